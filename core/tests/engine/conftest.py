"""An engine around a worker that computes tokens by a deterministic function of history.

The worker keeps a shadow of KV: it writes, for each slot, which history it holds, and reads back all
that a token attends to. A block that two sequences write, or that is reused too early, is found there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest

from pegboard.builtin.fcfs import FCFS
from pegboard.builtin.fixed_policy import FixedPolicy
from pegboard.builtin.no_cache import NoCache
from pegboard.builtin.paged_allocator import PagedAllocator
from pegboard.engine.core import EngineCore
from pegboard.engine.parts import EngineParts
from pegboard.engine.prefix.guarded_cache import GuardedCache
from pegboard.engine.prefix.known_blocks import KnownBlocks
from pegboard.interfaces.executor import Executor, WorkerHealth
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.kv_allocator import AllocatorContext
from pegboard.interfaces.prefix_cache import PrefixCache, PrefixCacheContext
from pegboard.interfaces.scheduler import SchedulerContext
from pegboard.interfaces.speculation_policy import SpeculationContext
from pegboard.request import Request, SamplingParams, SequenceDelta
from pegboard.step import Logprobs, RowAdmission, StepBatch, StepResult, decode, encode
from pegboard.testing.dict_cache import DictCache

VOCAB_SIZE = 97


def next_token(history: Sequence[int], seed: int, index: int) -> int:
    """The token after a history: the whole model."""
    return (_chains(history)[-1] * 31 + seed * 7 + index * 13) % VOCAB_SIZE


def generate(
    prompt: Sequence[int], num_tokens: int, seed: int = 0, index: int = 0
) -> tuple[int, ...]:
    """The output that any engine must give."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, seed, index))
    return tuple(tokens[len(prompt) :])


def _chains(history: Sequence[int]) -> list[int]:
    """A number for each beginning of a history, the empty one included."""
    values = [17]
    for token in history:
        values.append((values[-1] * 1_000_003 + token + 1) % 2_147_483_647)
    return values


@dataclass
class Row:
    """A sequence's row on the worker."""

    admission: RowAdmission
    tokens: list[int]
    tables: list[dict[int, int]]
    num_drafts: int = 0
    sampled_in: int = -1


class Answer(Future[StepResult]):
    """A step's result, which is there at once. An engine with steps in flight can be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Answer:
        answer = Answer()
        answer.set_result(self.result())
        return answer


class ShadowWorker(Executor):
    """Executes batches, and checks each of them."""

    def __init__(
        self, groups: Sequence[KVGroup], num_blocks: Sequence[int], max_num_batched_tokens: int
    ) -> None:
        self.groups = groups
        self.num_blocks = num_blocks
        self.max_num_batched_tokens = max_num_batched_tokens
        self.rows: dict[int, Row] = {}
        self.kv: list[dict[tuple[int, int], int]] = [{} for _ in groups]
        self.released: list[tuple[tuple[int, ...], int]] = []
        self.batches: list[StepBatch] = []
        self.fail_rows: Callable[[Row], bool] = lambda row: False
        self.raises: Exception | None = None
        self.drafter_failed = ""
        self.guesses_right = True
        self.forward_s: Callable[[StepBatch], float] = lambda batch: 0.0
        self.closed = 0

    def start(self) -> None: ...

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return []

    def health(self) -> tuple[WorkerHealth, ...]:
        return ()

    def close(self) -> None:
        self.closed += 1

    def execute(self, batch: StepBatch) -> Future[StepResult]:
        future = Answer()
        if self.raises is not None:
            future.set_exception(self.raises)
            return future
        batch = decode(encode(batch), StepBatch)
        self.batches.append(batch)
        assert batch.step_id == len(self.batches) - 1 > batch.fence
        assert len(set(batch.rows.tolist())) == len(batch.rows) > 0
        budget = int(batch.num_tokens.sum() + batch.verify.sum())
        assert budget <= self.max_num_batched_tokens
        self._change_rows(batch)
        self._change_tables(batch)
        future.set_result(self._forward(batch))
        return future

    def _change_rows(self, batch: StepBatch) -> None:
        for release in batch.released:
            row = self.rows.pop(release.row)
            self.released.append((tuple(row.tokens), release.num_tokens))
        for admission in batch.admitted:
            assert admission.row not in self.rows
            tokens = admission.token_ids.tolist()
            self.rows[admission.row] = Row(admission, tokens, [{} for _ in self.groups])

    def _change_tables(self, batch: StepBatch) -> None:
        for update in batch.groups:
            group, kv = self.groups[update.group], self.kv[update.group]
            assert update.encoding == group.encoding
            for source, target in zip(
                update.copy_from.tolist(), update.copy_to.tolist(), strict=True
            ):
                for offset in range(group.block_size):
                    kv.pop((target, offset), None)
                    if (source, offset) in kv:
                        kv[target, offset] = kv[source, offset]
            for row, entry, block in zip(
                update.rows.tolist(), update.entries.tolist(), update.blocks.tolist(), strict=True
            ):
                assert 0 <= block < self.num_blocks[update.group]
                self.rows[row].tables[update.group][entry] = block

    def _forward(self, batch: StepBatch) -> StepResult:
        committed: list[list[int]] = []
        accepted, tried, num_drafts = [], [], []
        confidences: list[float] = []
        failed = {}
        prompt_logprobs: list[list[int]] = []
        for i, number in enumerate(batch.rows.tolist()):
            row = self.rows[number]
            start, count = int(batch.num_computed[i]), int(batch.num_tokens[i])
            assert start + count <= len(row.tokens)
            assert bool(batch.sample[i]) == (start + count == len(row.tokens))
            assert bool(batch.pending[i]) == (batch.sample[i] and row.sampled_in > batch.fence)
            verify = int(batch.verify[i])
            assert verify <= row.num_drafts and (not verify or batch.sample[i])
            drafts = self._drafts(row, verify)
            self._compute(row, start, row.tokens[: start + count] + drafts)
            prompt_logprobs.append(
                row.tokens[start + 1 : min(start + count + 1, row.admission.num_prompt_tokens)]
            )
            if self.fail_rows(row):
                failed[number] = "the processor failed"
            new: list[int] = []
            if batch.sample[i]:
                for draft in [*drafts, None]:
                    new.append(self._sample(row, new))
                    if draft is not None and draft != new[-1]:
                        break
                row.tokens += new
                row.num_drafts, row.sampled_in = int(batch.propose[i]), batch.step_id
            committed.append(new)
            accepted.append(max(0, len(new) - 1))
            tried.append(min(verify, len(new)))
            num_drafts.append(row.num_drafts)
            confidences += [0.5] * row.num_drafts
        return StepResult(
            step_id=batch.step_id,
            offsets=_offsets(committed),
            token_ids=np.array(list(chain.from_iterable(committed)), np.int32),
            num_accepted=np.array(accepted, np.int32),
            num_tried=np.array(tried, np.int32),
            num_drafts=np.array(num_drafts, np.int32),
            confidences=np.array(confidences, np.float32),
            logprobs=_logprobs(committed),
            prompt_logprobs=_logprobs(prompt_logprobs),
            failed=failed,
            drafter_failed=self.drafter_failed,
            forward_s=self.forward_s(batch),
        )

    def _sample(self, row: Row, new: Sequence[int]) -> int:
        admission = row.admission
        return next_token([*row.tokens, *new], admission.seed, admission.index)

    def _drafts(self, row: Row, count: int) -> list[int]:
        """Guesses of which some are right, or none."""
        drafts: list[int] = []
        for _ in range(count):
            token = self._sample(row, drafts)
            is_right = self.guesses_right and token % 3
            drafts.append(token if is_right else (token + 1) % VOCAB_SIZE)
        return drafts

    def _compute(self, row: Row, start: int, tokens: Sequence[int]) -> None:
        """Writes KV of tokens from `start` on; reads back what the first of them attends to."""
        chains = _chains(tokens)[1:]
        for index, group in enumerate(self.groups):
            kv, table, size = self.kv[index], row.tables[index], group.block_size
            for position in range(start, len(tokens)):
                block = table[position // size]
                assert block != 0, "a write to the block of nobody"
                kv[block, position % size] = chains[position]
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for position in range(first, len(tokens)):
                block = table[position // size]
                assert kv.get((block, position % size)) == chains[position], (
                    f"position {position} of row {row.admission.row} is not in block {block}"
                )


def _offsets(values: Sequence[Sequence[int]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array([0, *np.cumsum([len(value) for value in values])], np.int32)


def _logprobs(tokens: Sequence[Sequence[int]]) -> Logprobs:
    flat = np.array(list(chain.from_iterable(tokens)), np.int32)
    top = ((flat[:, None] + np.arange(3)) % VOCAB_SIZE).astype(np.int32)
    return Logprobs(
        offsets=_offsets(tokens),
        token_ids=flat,
        logprobs=-flat.astype(np.float32),
        ranks=np.ones(len(flat), np.int32),
        top_ids=top,
        top_logprobs=-top.astype(np.float32),
    )


@dataclass
class Output:
    """All deltas of one sequence, put together."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    deltas: list[SequenceDelta] = field(default_factory=list)

    @property
    def last(self) -> SequenceDelta:
        return self.deltas[-1]


@dataclass
class Bench:
    """An engine with its worker."""

    core: EngineCore
    worker: ShadowWorker
    cache: PrefixCache
    allocator: PagedAllocator
    outputs: dict[tuple[str, int], Output] = field(default_factory=dict)

    def add(self, request_id: str, prompt: Sequence[int], **params: Any) -> None:
        """Adds a request; `seed` is 0 where none is given."""
        names = ("priority", "tenant", "cache_salt", "prefix_cache")
        fields = {name: params.pop(name) for name in names if name in params}
        self.core.add(
            Request(
                request_id=request_id,
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(**{"seed": 0, **params}),
                **fields,
            )
        )

    def step(self) -> list[SequenceDelta]:
        deltas = self.core.step()
        for delta in deltas:
            output = self.outputs.setdefault((delta.request_id, delta.index), Output())
            assert not output.deltas or output.last.finish_reason is None, "news after the end"
            output.token_ids += delta.token_ids
            output.text += delta.text
            output.deltas.append(delta)
            assert delta.num_output_tokens == len(output.token_ids)
        for ledger in self.core.ledger():
            parts = (ledger.free, ledger.held, ledger.cached, ledger.pinned, ledger.deferred)
            assert sum(parts) == ledger.total
        return deltas

    def run(self, max_steps: int = 5000) -> dict[tuple[str, int], Output]:
        """Steps until nothing is left, and checks that nothing leaked."""
        for _ in range(max_steps):
            if not self.core.has_work():
                break
            self.step()
        assert not self.core.has_work(), "not all requests ended"
        assert all(ledger.held == 0 for ledger in self.core.ledger())
        return self.outputs


def make_bench(
    *,
    block_sizes: Sequence[int] = (4,),
    windows: Sequence[int | None] = (None,),
    num_blocks: Sequence[int] | int = 65,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 128,
    cache: Callable[[PrefixCacheContext], PrefixCache] = NoCache,
    num_speculative_tokens: int = 0,
    **values: Any,
) -> Bench:
    groups = tuple(
        KVGroup((index,), 1, 8, size, window, "none", "float32")
        for index, (size, window) in enumerate(zip(block_sizes, windows, strict=True))
    )
    counts = (num_blocks,) * len(groups) if isinstance(num_blocks, int) else tuple(num_blocks)
    prefix_cache = cache(PrefixCacheContext(groups, counts, "model"))
    guarded = GuardedCache(
        prefix_cache, KnownBlocks(len(groups), is_heard=bool(values.get("observers")))
    )
    worker = ShadowWorker(groups, counts, max_num_batched_tokens)
    scheduler = values.pop("scheduler", FCFS)
    parts: dict[str, Any] = {
        "groups": groups,
        "num_blocks": counts,
        "allocator": PagedAllocator(
            AllocatorContext(groups, counts, max_model_len, max_num_batched_tokens, guarded)
        ),
        "prefix_cache": guarded,
        "fallback_scheduler": FCFS(
            SchedulerContext(max_num_seqs, max_num_batched_tokens, max_model_len)
        ),
        "scheduler": scheduler(
            SchedulerContext(max_num_seqs, max_num_batched_tokens, max_model_len)
        ),
        "policy": FixedPolicy(SpeculationContext(num_speculative_tokens)),
        "executor": worker,
        "observers": (),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (),
        "num_speculative_tokens": num_speculative_tokens,
        "make_detokenizer": None,
        "processor_params": lambda params: {},
        "seed": None,
        "caches_prefixes": cache is not NoCache,
    }
    core = EngineCore(EngineParts(**{**parts, **values}))
    core.start()
    return Bench(core, worker, prefix_cache, parts["allocator"])


@pytest.fixture(params=[1, 2])
def depth(request: pytest.FixtureRequest) -> int:
    """Most steps in flight. A test that counts what each call of `step` brings is about a depth of 1."""
    count: int = request.param
    return count


@pytest.fixture
def bench(depth: int) -> Callable[..., Bench]:
    """Builds an engine of that depth; see `make_bench`."""
    return partial(make_bench, depth=depth)


@pytest.fixture
def dict_cache() -> type[DictCache]:
    return DictCache


@pytest.fixture
def expected() -> Callable[..., tuple[int, ...]]:
    """The output that any engine must give; see `generate`."""
    return generate
