"""A drafter with a model of its own, watched between the worker and its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.interfaces.checkpoint import CheckpointSource
from pegboard.interfaces.drafter import (
    BuildLayers,
    Drafter,
    DrafterContext,
    DrafterFacts,
    DraftUnit,
    Observation,
    UnitTokens,
)
from pegboard.interfaces.kernel import Kernel
from pegboard.interfaces.model import ModelShape
from pegboard.step import Drafts, Float32, Int32, RowAdmission
from pegboard.testing.drafter import Nodes, usable_nodes

if TYPE_CHECKING:
    import torch

MakeModelDrafter = Callable[..., Drafter]
"""Makes the drafter of its context, and of its options where its manifest names their model."""

Text = tuple[tuple[int, ...], int, tuple[int, int] | None]
"""The known tokens of a row, the nodes asked for, and seed and index of a row that is sampled."""


@dataclass(slots=True)
class Notes:
    """The notes on one run.

    Attributes:
        facts: the answer of `describe` in the worker.
        options: of the drafter.
        built: for each model that was made, the shape of its own layers, or `registry`.
        taps: the layers of the hidden states of each observation.
        num_tables: the KV groups of each observation.
        asked: numbers of nodes that were asked for.
        nodes: those proposed, by what they follow.
        behind_hits: the keys of `nodes` whose row a cache or a fork served.
        wrong: a line for each breach of the contract.
    """

    facts: DrafterFacts | None = None
    options: Any = None
    built: list[ModelShape | str] = field(default_factory=list)
    taps: set[tuple[int, ...]] = field(default_factory=set)
    num_tables: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    nodes: dict[Text, Nodes] = field(default_factory=dict)
    behind_hits: set[Text] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)


def watched(make: MakeModelDrafter, manifest: Mapping[str, Any], notes: Notes) -> MakeModelDrafter:
    """The factory of the drafter, watched; an engine takes it as an object."""

    def make_watched(context: DrafterContext, *options: Any) -> Drafter:
        notes.options = options[0] if options else None
        describe: Callable[..., DrafterFacts] = resolve_name(manifest["describe"])
        notes.facts = describe(context.facts, context.target_shape, notes.options)
        handed = {one.name: getattr(context, one.name) for one in fields(DrafterContext)}
        slots: dict[int, int] = {}
        watched = WatchedContext(**handed, worker=context, notes=notes, slots=slots)
        return WatchedDrafter(
            make(watched, *options), context.vocab_size, notes.facts, notes, slots
        )

    make_watched.manifest = dict(manifest)  # type: ignore[attr-defined]
    return make_watched


@dataclass(frozen=True, kw_only=True)
class WatchedContext(DrafterContext):
    """The worker's context; it notes which model is made.

    Attributes:
        worker: the worker's own.
        notes: of the run.
        slots: by row of the step, the slots that may be written.
    """

    worker: DrafterContext
    notes: Notes
    slots: dict[int, int]

    def unit(
        self, shape: ModelShape, build: BuildLayers, source: CheckpointSource | None = None
    ) -> DraftUnit:
        self.notes.built.append(shape)
        return WatchedUnit(self.worker.unit(shape, build, source), self.notes, self.slots)

    def load_model(self, ref: str, quantizer: str = "auto") -> DraftUnit:
        self.notes.built.append("registry")
        return WatchedUnit(self.worker.load_model(ref, quantizer), self.notes, self.slots)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.worker.embed(token_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.worker.logits(hidden)

    def kernel(self, operation: str, weight_format: str = "float") -> Kernel:
        return self.worker.kernel(operation, weight_format)


class WatchedUnit(DraftUnit):
    """A model whose forwards are held to the slots that `describe` declared."""

    def __init__(self, unit: DraftUnit, notes: Notes, slots: Mapping[int, int]) -> None:
        self._unit = unit
        self._notes = notes
        self._slots = slots

    def forward(self, tokens: UnitTokens, hidden: torch.Tensor | None = None) -> torch.Tensor:
        ends = tokens.num_computed + np.diff(tokens.offsets)
        for row, end in zip(tokens.rows.tolist(), ends.tolist(), strict=True):
            if end > (most := self._slots.get(row, 0)):
                self._notes.wrong.append(f"slots of row {row} up to {end}; declared: {most}")
        return self._unit.forward(tokens, hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._unit.logits(hidden)


class WatchedDrafter(Drafter):
    """A drafter whose nodes are noted by what they follow."""

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        facts: DrafterFacts,
        notes: Notes,
        slots: dict[int, int],
    ) -> None:
        self.taps = drafter.taps
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._facts = facts
        self._notes = notes
        self._slots = slots
        self._tokens: dict[int, list[int]] = {}
        self._noise: dict[int, tuple[int, int] | None] = {}

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        self._tokens[admission.row] = admission.token_ids.tolist()
        is_sampled = admission.temperature > 0
        self._noise[admission.row] = (admission.seed, admission.index) if is_sampled else None
        self._drafter.admit(admission, block_tables)

    def release(self, row: int, num_tokens: int) -> None:
        self._drafter.release(row, num_tokens)

    def forget(self) -> None:
        self._drafter.forget()

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        self._notes.taps.add(tuple(sorted(seen.taps)))
        self._notes.num_tables.add(len(seen.block_tables))
        self._slots.clear()
        for i, row in enumerate(seen.rows.tolist()):
            new = seen.next_token_ids[seen.next_offsets[i] : seen.next_offsets[i + 1]]
            self._tokens[row] += new.tolist()
            asked = int(seen.propose[i])
            observed = int(seen.positions[seen.offsets[i + 1] - 1]) + 1
            known = len(self._tokens[row]) + self._facts.slots.past(asked)
            self._slots[row] = known if asked else observed
            self._notes.asked.add(asked)
        try:
            drafts, probabilities = self._drafter.propose(seen)
            found = usable_nodes(seen, drafts, probabilities, self._vocab_size)
        except Exception as error:
            self._notes.wrong.append(f"{type(error).__name__}: {error}")
            raise
        self._note(seen, found)
        return drafts, probabilities

    def _note(self, seen: Observation, found: Mapping[int, Nodes]) -> None:
        for i, row in enumerate(seen.rows.tolist()):
            if found.get(row):
                key = tuple(self._tokens[row]), int(seen.propose[i]), self._noise[row]
                self._notes.nodes[key] = found[row]
                if seen.num_cached[i]:
                    self._notes.behind_hits.add(key)
