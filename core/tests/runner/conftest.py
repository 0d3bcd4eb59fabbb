"""A worker on a tiny model, and a host that is just enough to drive it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from pegboard.builtin import safetensors_describe
from pegboard.builtin.no_drafter import NoDrafter
from pegboard.builtin.processors import LogitBias, Penalties
from pegboard.builtin.safetensors_source import SafetensorsSource
from pegboard.builtin.torch_attention import TorchAttention
from pegboard.builtin.torch_attention_layout import layout
from pegboard.builtin.torch_kernels import torch_kernel
from pegboard.builtin.unquantized import Unquantized
from pegboard.interfaces.attention import AttentionContext
from pegboard.interfaces.drafter import Drafter, DrafterContext, DraftSlots
from pegboard.interfaces.kernel import KernelContext
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.logits_processor import LogitsProcessor, ProcessorContext
from pegboard.interfaces.quantizer import QuantizerContext
from pegboard.models import llama
from pegboard.models.shape import describe
from pegboard.runner.draft_unit import DrafterModels
from pegboard.runner.model_unit import UnitParts
from pegboard.runner.parts import WorkerParts
from pegboard.runner.runner import Runner
from pegboard.step import Drafts, GroupUpdate, RowAdmission, RowRelease, StepBatch, StepResult
from pegboard.testing.tiny import write_tiny_model

NUM_ROWS = 6
NUM_BLOCKS = 120
VOCAB = 517
DTYPE = "float64"
OPERATIONS = ("rms_norm", "rotary", "silu_mul", "sample", "probabilities")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", dtype=DTYPE)


@pytest.fixture
def make_host(tiny: Path) -> Callable[..., Host]:
    """(drafter=None, processors=None, window=None, verifies_trees=True, verification="exact") -> a host
    with a started worker."""

    def make(
        drafter: Drafter | None = None,
        processors: Mapping[str, LogitsProcessor] | None = None,
        window: int | None = None,
        verifies_trees: bool = True,
        verification: Literal["exact", "rejection"] = "exact",
    ) -> Host:
        parts = worker_parts(tiny, drafter, processors, window, verifies_trees)
        parts = replace(parts, verification=verification, num_speculative_tokens=8)
        runner = Runner(parts)
        runner.start()
        return Host(runner, parts.units[0].groups)

    return make


@pytest.fixture
def drafts_of() -> Callable[..., Drafts]:
    """(row to (token ids, parents)) -> the message; parents None: a chain."""

    def make(nodes: Mapping[int, tuple[Sequence[int], Sequence[int] | None]]) -> Drafts:
        tokens = [list(ids) for ids, _ in nodes.values()]
        parents = [
            list(range(-1, len(ids) - 1)) if tree is None else list(tree)
            for ids, tree in nodes.values()
        ]
        return Drafts(
            rows=ints(nodes),
            offsets=ints(np.cumsum([0, *map(len, tokens)])),
            token_ids=ints(chain(*tokens)),
            parents=ints(chain(*parents)),
        )

    return make


def worker_parts(
    folder: Path,
    drafter: Drafter | None,
    processors: Mapping[str, LogitsProcessor] | None,
    window: int | None,
    verifies_trees: bool = True,
) -> WorkerParts:
    facts = safetensors_describe.describe(folder)
    shape = describe(facts.config)

    def kernel(operation: str) -> Any:
        return torch_kernel(KernelContext(operation, "float", DTYPE, "cpu", 1))

    # Each layer a group of its own, so that block tables of two sizes are in play.
    groups = tuple(
        KVGroup((layer,), a.num_kv_heads, a.head_dim, block_size, window, "none", DTYPE)
        for layer, (a, block_size) in enumerate(zip(shape.attention, (4, 3), strict=True))
    )
    kernels = {name: kernel(name) for name in OPERATIONS}
    context = ProcessorContext(VOCAB, NUM_ROWS, "cpu")
    builtin: dict[str, LogitsProcessor] = {
        "penalties": Penalties(context),
        "logit_bias": LogitBias(context),
    }
    unit = UnitParts(
        name="target",
        rank=0,
        shape=shape,
        source=SafetensorsSource(facts),
        quantizer=Unquantized(QuantizerContext(facts, DTYPE)),
        linear_kernels={"float": kernel("linear")},
        kernels=kernels,
        attention=TorchAttention(
            AttentionContext(
                shape.attention, groups, NUM_ROWS, DTYPE, "cpu", 1, rotary=kernels["rotary"]
            )
        ),
        build=llama.build,
        groups=groups,
        num_blocks=(NUM_BLOCKS,) * len(groups),
        layouts=tuple(layout(group) for group in groups),
        dtype=DTYPE,
        device="cpu",
        masks_trees=verifies_trees,
        max_positions=100,
        on_tensor=lambda name: None,
    )
    return WorkerParts(
        units=(unit,),
        max_num_seqs=NUM_ROWS,
        max_model_len=100,
        num_threads=1,
        processors=builtin if processors is None else processors,
        drafter=drafter or NoDrafter(DrafterContext(8, VOCAB, NUM_ROWS, 100)),
        drafter_models=DrafterModels(DraftSlots()),
        taps=() if drafter is None else tuple(drafter.taps),
        num_speculative_tokens=0 if drafter is None else 8,
    )


@dataclass
class HostRow:
    """The host's side of a row."""

    tokens: list[int]
    num_prompt: int
    computed: int = 0
    held: int = 0
    blocks: list[list[int]] = field(default_factory=list)


class Host:
    """Keeps rows and blocks; every method that says `step` runs one."""

    def __init__(self, runner: Runner, groups: Sequence[KVGroup]) -> None:
        self.runner = runner
        self.groups = groups
        self.rows: dict[int, HostRow] = {}
        self.results: list[StepResult] = []
        self.batches: list[list[int]] = []
        order = list(range(1, NUM_BLOCKS))
        random.Random(5).shuffle(order)
        self._free = [list(order) for _ in groups]
        self._admitted: list[RowAdmission] = []
        self._released: list[RowRelease] = []
        self._updates: list[dict[str, list[int]]] = []
        self._clear()

    def admit(self, row: int, tokens: Iterable[int], **params: Any) -> None:
        tokens = list(tokens)
        params = {"temperature": 0.0, "seed": 7, **params}
        num_prompt = params.pop("num_prompt_tokens", len(tokens))
        self.rows[row] = HostRow(tokens, num_prompt, blocks=[[] for _ in self.groups])
        self._admitted.append(
            RowAdmission(row=row, token_ids=ints(tokens), num_prompt_tokens=num_prompt, **params)
        )

    def release(self, row: int) -> None:
        sequence = self.rows.pop(row)
        for free, blocks in zip(self._free, sequence.blocks, strict=True):
            free.extend(blocks)
        self._released.append(RowRelease(row, len(sequence.tokens)))

    def fork(self, row: int, child: int, **params: Any) -> None:
        """Admits a child with a copy of the row's blocks."""
        parent = self.rows[row]
        self.admit(child, parent.tokens, num_prompt_tokens=parent.num_prompt, **params)
        self.rows[child].computed = parent.computed
        for g, blocks in enumerate(parent.blocks):
            for block in blocks:
                self._updates[g]["copy_from"].append(block)
                self._updates[g]["copy_to"].append(self._new_block(child, g))

    def step(
        self,
        chunks: Mapping[int, int],
        *,
        verify: Mapping[int, int] | None = None,
        propose: int = 0,
        drafts: Drafts | None = None,
        drafter_trial: int = 0,
        num_resets: int = 0,
    ) -> StepResult:
        """Computes so many tokens of each row, and so many draft nodes.

        drafts: put in place of what the worker holds for their rows.
        """
        verify = verify or {}
        for row, num_tokens in chunks.items():
            self._reserve(row, self.rows[row].computed + num_tokens + verify.get(row, 0))
        sequences = [self.rows[row] for row in chunks]
        batch = StepBatch(
            step_id=len(self.results),
            fence=len(self.results) - 1,
            released=tuple(self._released),
            admitted=tuple(self._admitted),
            groups=tuple(
                GroupUpdate(group=g, encoding="none", **{k: ints(v) for k, v in update.items()})
                for g, update in enumerate(self._updates)
            ),
            rows=ints(chunks),
            num_computed=ints(s.computed for s in sequences),
            num_tokens=ints(chunks.values()),
            sample=np.array(
                [self.rows[r].computed + n == len(self.rows[r].tokens) for r, n in chunks.items()]
            ),
            verify=ints(verify.get(row, 0) for row in chunks),
            propose=ints(propose for _ in chunks),
            pending=np.zeros(len(chunks), dtype=np.bool_),
            drafter_trial=drafter_trial,
            num_resets=num_resets,
        )
        self._clear()
        if drafts is not None:
            assert self.runner._loaded is not None
            self.runner._loaded.rows.drafts.put(drafts, np.ones(len(drafts.token_ids), np.float32))
        result = self.runner.execute(batch)
        self.results.append(result)
        self.batches.append(list(chunks))
        for i, (row, sequence) in enumerate(zip(chunks, sequences, strict=True)):
            sequence.computed += chunks[row] + int(result.num_accepted[i])
            sequence.tokens += result.token_ids[result.offsets[i] : result.offsets[i + 1]].tolist()
            sequence.held = int(result.num_drafts[i])
        return result

    def prefill(self, rows: Iterable[int], size: int = 1000, **options: Any) -> None:
        """Steps until each row has sampled its first token, `size` tokens of each a step."""
        left = {row: len(self.rows[row].tokens) - self.rows[row].computed for row in rows}
        while left:
            self.step({row: min(size, n) for row, n in left.items()}, **options)
            left = {row: n - size for row, n in left.items() if n > size}

    def decode(self, rows: Iterable[int], num_tokens: int, **options: Any) -> None:
        """Steps until each row has that many output tokens, verifying all drafts held."""
        rows = list(rows)
        while going := [r for r in rows if self.num_output(r) < num_tokens]:
            verify = {r: min(self.rows[r].held, num_tokens - self.num_output(r)) for r in going}
            self.step(dict.fromkeys(going, 1), verify=verify, **options)

    def num_output(self, row: int) -> int:
        return len(self.rows[row].tokens) - self.rows[row].num_prompt

    def output(self, row: int, num_tokens: int | None = None) -> list[int]:
        return self.rows[row].tokens[self.rows[row].num_prompt :][:num_tokens]

    def _reserve(self, row: int, num_slots: int) -> None:
        for g, group in enumerate(self.groups):
            while len(self.rows[row].blocks[g]) * group.block_size < num_slots:
                self._new_block(row, g)

    def _new_block(self, row: int, group: int) -> int:
        block = self._free[group].pop()
        blocks = self.rows[row].blocks[group]
        self._updates[group]["rows"].append(row)
        self._updates[group]["entries"].append(len(blocks))
        self._updates[group]["blocks"].append(block)
        blocks.append(block)
        return block

    def _clear(self) -> None:
        self._admitted, self._released = [], []
        names = ("rows", "entries", "blocks", "copy_from", "copy_to")
        self._updates = [{name: [] for name in names} for _ in self.groups]


def ints(values: Iterable[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(list(values), dtype=np.int32)
