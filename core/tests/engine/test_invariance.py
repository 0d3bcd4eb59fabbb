"""No plan changes a token: chunks, pools, preemption, caches, drafts, orders, aborts.

The worker of these tests checks each batch: the token budget, one row a sequence, and that every block
holds what its sequence wrote.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from pegboard.builtin.fcfs import FCFS
from pegboard.interfaces.scheduler import QueueView, Scheduler, SchedulerContext, StepBuilder

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]

_settings = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Erratic(Scheduler):
    """Any order, any chunk, any reserve, preempts at random; now and then it plans as FCFS does."""

    def __init__(self, context: SchedulerContext) -> None:
        self.random = random.Random(context.max_num_batched_tokens)
        self.sane = FCFS(context)

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        dice = self.random
        if dice.random() < 0.4:
            self.sane.plan(queue, step)
            return
        views = [*queue.running, *queue.waiting]
        for seq in dice.choices(views, k=2 * len(views)) if views else ():
            if dice.random() < 0.25:
                step.preempt(seq)
            elif dice.random() < 0.5 or not step.waits_for_prefix(seq):
                step.add(seq, dice.randint(0, seq.num_pending + 2), dice.choice([0, 0, 1, 9]))


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts with parameters; several begin alike, and not all may share what they have."""
    shared = draw(st.lists(st.integers(0, 96), min_size=1, max_size=20))
    shared *= draw(st.sampled_from([1, 1, 3]))
    requests = []
    for _ in range(draw(st.integers(1, 5))):
        tail = draw(st.lists(st.integers(0, 96), min_size=1, max_size=8))
        params = {
            "max_tokens": draw(st.integers(1, 14)),
            "n": draw(st.integers(1, 3)),
            "seed": draw(st.integers(0, 99)),
            "priority": draw(st.integers(0, 1)),
            "cache_salt": draw(st.sampled_from(["", "", "a"])),
            "prefix_cache": draw(st.sampled_from(["on", "on", "read_only", "off"])),
        }
        requests.append((shared + tail, params))
    return requests


def _run(engine: Any, workload: list[tuple[list[int], dict[str, Any]]], expected: Expected) -> None:
    for name, (prompt, params) in enumerate(workload):
        engine.add(str(name), prompt, **params)
        if name % 3 != 1:  # some arrive together
            engine.step()
    outputs = engine.run()
    # An erratic scheduler may be cut off for what it does; never for what a call of the step raised.
    erratic = ("it planned nothing", "preemptions and no token")
    cut_off = [part.reason for part in engine.core.cut_off]
    assert not [reason for reason in cut_off if not any(words in reason for words in erratic)]
    for name, (prompt, params) in enumerate(workload):
        for index in range(params["n"]):
            tokens = outputs[str(name), index].token_ids
            assert tokens == expected(prompt, params["max_tokens"], params["seed"], index)
    for tokens, num_tokens in engine.worker.released:
        assert num_tokens <= len(tokens)


@_settings
@given(
    workload=workloads(),
    chunk=st.sampled_from([1, 2, 5, 7, 16, 64]),
    block_size=st.sampled_from([1, 2, 3, 4, 16]),
    spare=st.integers(0, 30),
    max_num_seqs=st.integers(1, 6),
    num_drafts=st.sampled_from([0, 0, 1, 4]),
    cached=st.booleans(),
    scheduler=st.sampled_from([FCFS, Erratic]),
)
def test_tokens_depend_on_the_request_alone(
    bench: Make,
    expected: Expected,
    dict_cache: Any,
    workload: list[tuple[list[int], dict[str, Any]]],
    chunk: int,
    block_size: int,
    spare: int,
    max_num_seqs: int,
    num_drafts: int,
    cached: bool,
    scheduler: type[Scheduler],
) -> None:
    longest = max(len(prompt) + params["max_tokens"] for prompt, params in workload)
    engine = bench(
        block_sizes=(block_size,),
        num_blocks=1 + -(-(longest - 1) // block_size) + spare,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=chunk,
        num_speculative_tokens=num_drafts,
        scheduler=scheduler,
        **({"cache": dict_cache} if cached else {}),
    )
    _run(engine, workload, expected)


@_settings
@given(
    workload=workloads(),
    chunk=st.sampled_from([1, 3, 8, 64]),
    block_sizes=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([2, 3, 4])),
    window=st.sampled_from([1, 2, 5, 9]),
    num_drafts=st.sampled_from([0, 3]),
    scheduler=st.sampled_from([FCFS, Erratic]),
    spare=st.integers(0, 9),
    cached=st.booleans(),
)
def test_windows_and_several_groups_change_nothing(
    bench: Make,
    expected: Expected,
    dict_cache: Any,
    workload: list[tuple[list[int], dict[str, Any]]],
    chunk: int,
    block_sizes: tuple[int, int],
    window: int,
    num_drafts: int,
    scheduler: type[Scheduler],
    spare: int,
    cached: bool,
) -> None:
    longest = max(len(prompt) + params["max_tokens"] for prompt, params in workload)
    span = window + chunk
    engine = bench(
        block_sizes=block_sizes,
        windows=(None, window),
        num_blocks=(
            1 + -(-longest // block_sizes[0]) + spare,
            3 + -(-min(span, longest) // block_sizes[1]) + spare,
        ),
        max_num_seqs=4,
        max_num_batched_tokens=chunk,
        num_speculative_tokens=num_drafts,
        scheduler=scheduler,
        **({"cache": dict_cache} if cached else {}),
    )
    _run(engine, workload, expected)


@pytest.mark.parametrize("cached", [False, True])
def test_a_pool_for_one_sequence_serves_many(
    bench: Make, expected: Expected, dict_cache: Any, cached: bool
) -> None:
    engine = bench(
        num_blocks=9,
        num_speculative_tokens=3,
        max_num_batched_tokens=16,
        **({"cache": dict_cache} if cached else {}),
    )
    workload = [([name, 2, 3, 4, 5], {"max_tokens": 28, "n": 2, "seed": 1}) for name in range(8)]
    _run(engine, workload, expected)


def test_the_oldest_is_never_preempted(bench: Make) -> None:
    engine = bench(num_blocks=13, max_num_seqs=4)
    for number, name in enumerate("abcd", start=1):
        engine.add(name, [number, 2, 3, 4], max_tokens=40)
    lengths = []
    while ("a", 0) not in engine.outputs or engine.outputs["a", 0].last.finish_reason is None:
        lengths += [delta.num_output_tokens for delta in engine.step() if delta.request_id == "a"]
    assert lengths == list(range(1, 41))
    admitted = [row.token_ids[0] for batch in engine.worker.batches for row in batch.admitted]
    assert admitted.count(1) == 1
    engine.run()
    assert len(engine.worker.released) > 3, "nothing was preempted: the pool is too large"


def test_decodes_go_on_while_a_long_prompt_is_prefilled(bench: Make) -> None:
    engine = bench(max_num_batched_tokens=8)
    engine.add("decodes", [1], max_tokens=30)
    engine.step()
    engine.add("long", range(60), max_tokens=2)
    for _ in range(9):
        assert "decodes" in {delta.request_id for delta in engine.step()}
    engine.run()


def test_nothing_leaks_after_many_random_aborts(
    bench: Make, expected: Expected, dict_cache: Any
) -> None:
    dice = random.Random(0)
    engine = bench(
        num_blocks=40,
        max_num_seqs=6,
        max_num_batched_tokens=12,
        num_speculative_tokens=3,
        cache=dict_cache,
        scheduler=Erratic,
    )
    aborted: set[str] = set()
    prompts: dict[str, list[int]] = {}
    while len(aborted) < 500:
        if engine.core.num_waiting < 6:
            name = str(len(prompts))
            prompts[name] = [1] * dice.randint(1, 20) + [dice.randint(0, 96)]
            engine.add(name, prompts[name], max_tokens=dice.randint(1, 20), n=dice.randint(1, 2))
        engine.step()
        if dice.random() < 0.7:
            name = dice.choice(list(prompts))
            aborted.add(name)
            engine.core.abort(name)
    outputs = engine.run()
    for group, block in engine.cache.clear():
        engine.allocator.forget(group, block)
    (ledger,) = engine.core.ledger()
    assert ledger.free == ledger.total
    for (name, index), output in outputs.items():
        length = len(output.token_ids)
        assert output.token_ids == expected(prompts[name], length, 0, index)


def test_a_cached_beginning_is_not_computed_again(bench: Make, dict_cache: Any) -> None:
    engine = bench(cache=dict_cache)
    engine.add("a", range(30), max_tokens=10)
    engine.run()
    first = sum(int(batch.num_tokens.sum()) for batch in engine.worker.batches)
    engine.add("b", range(30), max_tokens=10)
    outputs = engine.run()
    second = sum(int(batch.num_tokens.sum()) for batch in engine.worker.batches) - first
    assert outputs["a", 0].token_ids == outputs["b", 0].token_ids
    assert (first, second) == (39, 11)
    assert outputs["b", 0].last.num_cached_tokens == 28


def test_drafts_save_steps(bench: Make) -> None:
    def num_steps(num_drafts: int) -> int:
        engine = bench(num_speculative_tokens=num_drafts)
        engine.add("a", [1, 2, 3], max_tokens=60)
        engine.run()
        return len(engine.worker.batches)

    assert num_steps(4) < num_steps(0) - 10


def test_batches_carry_differences_only(bench: Make) -> None:
    engine = bench()
    engine.add("a", [1, 2, 3], max_tokens=12)
    engine.run()
    batches = engine.worker.batches
    assert [len(batch.admitted) for batch in batches] == [1] + [0] * 11
    entries = [sum(len(update.rows) for update in batch.groups) for batch in batches]
    # 3 prompt tokens and 11 outputs have KV: a block of four tokens each at 0, 4, 8 and 12.
    assert entries == [1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0]


def test_pinned_blocks_are_copied_before_a_sequence_goes_on(
    bench: Make, expected: Expected
) -> None:
    engine = bench()
    engine.add("a", [1, 2, 3], max_tokens=30)
    for _ in range(5):
        engine.step()
    (blocks,) = engine.allocator.pin("transfer", 1, deadline=0.0)
    pinned = {key: value for key, value in engine.worker.kv[0].items() if key[0] in blocks}
    assert engine.run()["a", 0].token_ids == expected([1, 2, 3], 30)
    assert pinned.items() <= engine.worker.kv[0].items()
    engine.allocator.unpin("transfer")
    assert engine.core.ledger()[0].free == 64
