"""The composition: all choices, frozen, hashed, and sent to every worker."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.drafter import DrafterFacts
from pegboard.interfaces.kv import KVGroup, TensorSpec
from pegboard.interfaces.model import ModelShape
from pegboard.plugins.manifest import Manifest, Origin, Provides


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """One reason why a composition cannot be.

    Attributes:
        code: kind of reason (`dtype`, `head_size`, `missing_tensor`, ...).
        plugin: the plugin it is about; "" for the model or the machine.
        message: the things that do not go together, and others that would.
        fix: the change that helps.
    """

    code: str
    plugin: str = ""
    message: str
    fix: str = ""

    def __str__(self) -> str:
        return self.message + (f"; fix: {self.fix}" if self.fix else "")


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A choice that was left open (`auto`), what became of it, and why.

    Attributes:
        key: the config's key.
        value: the choice.
        why: the reason.
    """

    key: str
    value: str
    why: str


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen provider of an interface.

    Attributes:
        origin: its plugin.
        entry: its manifest entry.
        options: as the config gives them; validated when the part is built.
        path: the config's path of the part, for messages (`scheduler.options`).
    """

    origin: Origin
    entry: Provides
    options: dict[str, object] = {}
    path: str = ""

    @property
    def name(self) -> str:
        return self.entry.name


class KernelChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel of an operation on weights of a format.

    Attributes:
        operation, format: of its work.
        part: whose kernel.
        row_invariant: whether it promises so.
        named: whether the config asked for it by name.
        reference: whether it is slow, being there to be compared with.
    """

    operation: str
    format: str
    part: Part
    row_invariant: bool
    named: bool
    reference: bool = False


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a composition, as each of its units is made.

    Attributes:
        name: of its units in the workers: `target`, `draft`.
        facts, shape: the checkpoint and the model.
        parts: its `checkpoint_source`, `model`, `quantizer` and `attention`.
        kernels: provider by operation and format.
        groups: its KV groups, with their `layouts` (tensors a block and layer) and `num_blocks`, which
            are empty until the plan has sized the pool.
        numerics_id: digest of everything that changes the numbers of KV and logits.
    """

    name: str
    facts: CheckpointFacts
    shape: ModelShape
    parts: dict[str, Part]
    kernels: tuple[KernelChoice, ...]
    groups: tuple[KVGroup, ...]
    layouts: tuple[tuple[TensorSpec, ...], ...] = ()
    num_blocks: tuple[int, ...] = ()
    numerics_id: str

    @property
    def fingerprint(self) -> str:
        """A digest of everything that changes KV content: the model and its numerics."""
        return f"{self.facts.fingerprint}/{self.numerics_id}"

    @property
    def masks_trees(self) -> bool:
        """Whether its attention has a mask for trees of drafts."""
        return "query_mask" in self.parts["attention"].entry.promises


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a part of a model.

    Attributes:
        model: the plan's name.
        worker: the worker's rank.
        device: of that worker.
        tensor_rank: which of the parts into which its axes are split.
        stage: which of the parts into which its layers are split.
    """

    model: str
    worker: int
    device: str
    tensor_rank: int = 0
    stage: int = 0


class Composition(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an engine is built from.

    Attributes:
        model_name: under which the model is served.
        models: the plan of each model; the target first.
        placement: where their slices live.
        dtype: activation dtype.
        device: kind of device, `cpu` or `cuda`.
        num_threads: CPU threads of a worker.
        seed: of seeds that the engine draws; None: from the system.
        max_model_len: most tokens a sequence.
        max_num_seqs, max_num_batched_tokens: most running sequences, and tokens a step.
        max_step_ms: milliseconds that a step may take while a sequence decodes, where smaller chunks of
            prompts can help it; None: any.
        depth: most steps in flight.
        draft_model: reference of the drafter's own model.
        drafter: its needs, as it says them.
        num_speculative_tokens: most draft nodes a row; 0: no speculation.
        verification: as `drafter.verification`.
        verifies_kv: whether the bytes of a cached block are compared at every hit.
        parts: provider by interface, for interfaces that have one beside the models' own.
        logits_processors, observers: in order.
        numerics: `invariant` when every kernel and the attention backend promise `row_invariant`.
        manifests: of the plugins that parts come from; workers import these and no other.
        decisions: the open choices, and how each was settled.
    """

    model_name: str
    models: tuple[ModelPlan, ...]
    placement: tuple[Slice, ...]
    dtype: str
    device: str
    num_threads: int
    seed: int | None
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_step_ms: int | None
    depth: int
    draft_model: str | None
    drafter: DrafterFacts
    num_speculative_tokens: int
    verification: Literal["exact", "rejection"]
    verifies_kv: bool
    parts: dict[str, Part]
    logits_processors: tuple[Part, ...]
    observers: tuple[Part, ...]
    numerics: Literal["invariant", "fast"]
    manifests: tuple[Manifest, ...]
    decisions: tuple[Decision, ...]

    @property
    def target(self) -> ModelPlan:
        """The model whose tokens are answered."""
        return self.models[0]

    def plan(self, name: str) -> ModelPlan:
        """The model of that name."""
        return next(plan for plan in self.models if plan.name == name)

    @property
    def devices(self) -> tuple[str, ...]:
        """Each worker's, by its rank."""
        return tuple({piece.worker: piece.device for piece in self.placement}.values())

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        """KV groups of all models: a group's number is its index."""
        return tuple(group for plan in self.models for group in plan.groups)

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each KV group; empty until the plan has sized the pool."""
        return tuple(number for plan in self.models for number in plan.num_blocks)

    @property
    def fingerprint(self) -> str:
        """A digest of everything that changes KV content, in all groups."""
        return " ".join(plan.fingerprint for plan in self.models)

    @property
    def stateful_processors(self) -> frozenset[str]:
        """Names of the logits processors whose state cannot be recomputed."""
        return frozenset(
            part.name for part in self.logits_processors if "keeps_state" in part.entry.promises
        )

    def slots_past(self, model: str) -> int:
        """Most slots of a row past the tokens that the target has computed, in a model's KV groups."""
        if model == self.target.name:
            return 0
        return 1 + self.drafter.slots.past(self.num_speculative_tokens)

    @property
    def max_slots_past(self) -> int:
        """The most in any KV group."""
        return max(self.slots_past(plan.name) for plan in self.models)

    @property
    def num_parameters(self) -> int:
        """Parameters to load, of all models."""
        return sum(len(plan.shape.parameters) for plan in self.models)

    @property
    def torch_threads(self) -> int:
        """Threads that torch may use on a CPU: one where linear layers and attention bring their own,
        which torch's would only disturb."""
        busy = [plan.parts["attention"] for plan in self.models]
        busy += [
            choice.part
            for plan in self.models
            for choice in plan.kernels
            if choice.operation == "linear"
        ]
        bring_their_own = all("own_threads" in part.entry.promises for part in busy)
        return 1 if bring_their_own else self.num_threads

    @property
    def digest(self) -> str:
        """sha256, hex: workers compare it before they load a weight."""
        return hashlib.sha256(to_json(self)).hexdigest()


def to_json(composition: Composition) -> bytes:
    """The composition as JSON, the same bytes for equal compositions."""
    return msgspec.json.encode(composition, order="deterministic")


def from_json(data: bytes) -> Composition:
    """The composition of `to_json`."""
    return msgspec.json.decode(data, type=Composition)
