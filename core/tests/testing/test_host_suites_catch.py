"""Each contract suite of a host's part fails on an implementation that breaks its contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis.errors import FlakyFailure

from pegboard.builtin.fcfs import FCFS
from pegboard.builtin.fixed_policy import FixedPolicy
from pegboard.builtin.local_executor import LocalExecutor
from pegboard.builtin.metrics_observer import MetricsObserver
from pegboard.builtin.paged_allocator import PagedAllocator
from pegboard.interfaces.executor import ExecutorContext, WorkerHealth
from pegboard.interfaces.kv_allocator import AllocatorContext, Growth, KVLedger, Owner
from pegboard.interfaces.observer import Event, ObserverContext
from pegboard.interfaces.prefix_cache import Hit, Prefix
from pegboard.interfaces.scheduler import QueueView, SequenceView, StepBuilder
from pegboard.interfaces.speculation_policy import Choice, DraftView, StepCosts
from pegboard.step import StepBatch, StepResult
from pegboard.testing.dict_cache import DictCache
from pegboard.testing.executor import ExecutorContract
from pegboard.testing.executor_worker import EchoWorker, program
from pegboard.testing.kv_allocator import PinnedBlocksContract, context, group
from pegboard.testing.observer import ObserverContract
from pegboard.testing.prefix_cache import PrefixCacheContract
from pegboard.testing.scheduler import SchedulerContract
from pegboard.testing.speculation_policy import SpeculationPolicyContract


class LeakyAllocator(PagedAllocator):
    """Forgets to give back what waited for a step."""

    def fence(self, step_id: int) -> None:
        pass


class GreedyAllocator(PagedAllocator):
    """Hands out a block more than was asked for."""

    def grow(self, owner: Owner, num_tokens: int, lookahead: Sequence[int] = ()) -> Growth | None:
        more = lookahead or (0,) * len(self.ledger())
        return super().grow(owner, num_tokens, tuple(slots + 4 for slots in more))


class BoastfulAllocator(PagedAllocator):
    """Counts block 0."""

    def ledger(self) -> tuple[KVLedger, ...]:
        return tuple(
            KVLedger(one.total + 1, one.free + 1, one.held, one.cached, one.pinned)
            for one in super().ledger()
        )


@pytest.mark.parametrize("make", [LeakyAllocator, GreedyAllocator, BoastfulAllocator])
def test_broken_allocators(make: Callable[[AllocatorContext], PagedAllocator]) -> None:
    suite = PinnedBlocksContract()
    with pytest.raises(AssertionError):
        suite.test_release_waits_for_the_fence(make(context((group(4),), (11,))))
        suite.test_growing_appends_and_repeating_changes_nothing(make(context((group(4),), (11,))))
        suite.test_a_transaction_that_ends_well_holds(make(context((group(4),), (11,))))


def test_random_operations_find_a_broken_allocator() -> None:
    with pytest.raises((AssertionError, ExceptionGroup)):
        PinnedBlocksContract().test_random_operations_agree_with_sets(BoastfulAllocator)


class StubbornScheduler(FCFS):
    """Never preempts: a full pool stops everything."""

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        for seq in [*queue.running, *queue.waiting]:
            step.add(seq, seq.num_pending)


class RememberingScheduler(FCFS):
    """Keeps views from step to step, of sequences that are gone."""

    _seen: Sequence[SequenceView] = ()

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        for seq in self._seen:
            step.add(seq, 1)
        self._seen = [*queue.running, *queue.waiting]
        super().plan(queue, step)


class InsistentScheduler(FCFS):
    """Asks until it gets what it wants."""

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        for seq in [*queue.running, *queue.waiting]:
            while not step.add(seq, seq.num_pending):
                pass


@pytest.mark.parametrize("make", [StubbornScheduler, RememberingScheduler, InsistentScheduler])
def test_broken_schedulers(make: Any) -> None:
    suite = SchedulerContract()
    with pytest.raises(AssertionError):
        suite.test_a_full_pool_does_not_stop_the_work(make)
        suite.test_sequences_may_vanish_between_steps(make)


class SaltlessCache(DictCache):
    """Forgets whose tokens they are."""

    def match(self, prefix: Prefix, limit: int) -> Hit:
        return super().match(Prefix(prefix.token_ids, "a"), limit)


class GreedyCache(DictCache):
    """Heeds no limit."""

    def match(self, prefix: Prefix, limit: int) -> Hit:
        return super().match(prefix, len(prefix.token_ids))


class RuthlessCache(DictCache):
    """Evicts what others reference."""

    def evict(self, group: int, num_blocks: int, evictable: Callable[[int], bool]) -> Sequence[int]:
        return super().evict(group, num_blocks, lambda block: True)


class RootFirstCache(DictCache):
    """Evicts beginnings first, so that what follows is never found again."""

    def evict(self, group: int, num_blocks: int, evictable: Callable[[int], bool]) -> Sequence[int]:
        names = dict(reversed(self.names[group].items()))
        keys = sorted(names, key=lambda key: len(key[1]))
        victims = [names[key] for key in keys if evictable(names[key])][:num_blocks]
        self.names[group] = {k: block for k, block in names.items() if block not in victims}
        return victims


class ClingingCache(DictCache):
    """Keeps the names of blocks that it gave back."""

    def clear(self) -> Sequence[tuple[int, int]]:
        names = [dict(one) for one in self.names]
        blocks = super().clear()
        self.names = names
        return blocks


class DoubleCache(DictCache):
    """References a block anew each time it is published."""

    def publish(self, prefix: Prefix, blocks: Sequence[Sequence[int]]) -> Sequence[tuple[int, int]]:
        super().publish(prefix, blocks)
        return [(group, block) for group, own in enumerate(blocks) for block in own]


def test_broken_caches() -> None:
    suite = PrefixCacheContract()
    for test, broken in (
        (suite.test_salts_are_kept_apart, SaltlessCache),
        (suite.test_a_hit_keeps_within_the_limit, GreedyCache),
        (suite.test_only_what_nobody_else_references_is_evicted, RuthlessCache),
        (suite.test_leaves_are_evicted_first, RootFirstCache),
        (suite.test_clearing_gives_every_reference_back, ClingingCache),
        (suite.test_publishing_again_brings_no_reference, DoubleCache),
    ):
        with pytest.raises(AssertionError):
            test(broken)


@pytest.mark.parametrize(
    "broken", [GreedyCache, DoubleCache, pytest.param(RuthlessCache, marks=pytest.mark.slow)]
)
def test_random_operations_find_a_broken_cache(broken: type[DictCache]) -> None:
    with pytest.raises((AssertionError, FlakyFailure, ExceptionGroup)):
        PrefixCacheContract().test_random_operations_never_name_a_wrong_block(broken)


class BoldPolicy(FixedPolicy):
    """Verifies more than there is."""

    def choose(self, rows: Sequence[DraftView], tokens_left: int, costs: StepCosts) -> list[Choice]:
        return [Choice(row.num_drafts + 1, 0) for row in rows]


class TimidPolicy(FixedPolicy):
    """Never proposes."""

    def choose(self, rows: Sequence[DraftView], tokens_left: int, costs: StepCosts) -> list[Choice]:
        return [Choice(row.num_drafts, 0) for row in rows]


class FractionalPolicy(FixedPolicy):
    """Divides by what was never tried."""

    def choose(self, rows: Sequence[DraftView], tokens_left: int, costs: StepCosts) -> list[Choice]:
        return [Choice(0, row.num_accepted // row.num_tried) for row in rows]


class SparePolicy(FixedPolicy):
    """Answers for rows that hold drafts alone."""

    def choose(self, rows: Sequence[DraftView], tokens_left: int, costs: StepCosts) -> list[Choice]:
        return super().choose([row for row in rows if row.num_drafts], tokens_left, costs)


def test_broken_policies() -> None:
    suite = SpeculationPolicyContract()
    for broken in (BoldPolicy, SparePolicy):
        with pytest.raises((AssertionError, ExceptionGroup)):
            suite.test_each_row_gets_numbers_of_nodes(broken)
    with pytest.raises((ZeroDivisionError, ExceptionGroup)):
        suite.test_each_row_gets_numbers_of_nodes(FractionalPolicy)
    with pytest.raises(AssertionError):
        suite.test_guesses_that_are_always_right_are_used(TimidPolicy)


class SharedObserver(MetricsObserver):
    """All of its kind count together."""

    _all: MetricsObserver | None = None

    def __init__(self, context: ObserverContext) -> None:
        if SharedObserver._all is None:
            SharedObserver._all = MetricsObserver(context)

    def observe(self, event: Event) -> None:
        assert SharedObserver._all is not None
        SharedObserver._all.observe(event)

    def render(self) -> str:
        assert SharedObserver._all is not None
        return SharedObserver._all.render()


class MeddlingObserver(MetricsObserver):
    """Writes into what it gets."""

    def __init__(self, context: ObserverContext) -> None:
        super().__init__(context)
        context.ledger["observer"] = 1


class SlowObserver(MetricsObserver):
    """Renders at every event."""

    def observe(self, event: Event) -> None:
        super().observe(event)
        self.render()


class ProseObserver(MetricsObserver):
    """Renders something to read."""

    def render(self) -> str:
        return "all is well"


def test_broken_observers() -> None:
    suite = ObserverContract()
    for test, broken in (
        (suite.test_observers_share_nothing, SharedObserver),
        (suite.test_nothing_is_changed, MeddlingObserver),
        (suite.test_an_event_takes_little_time, SlowObserver),
    ):
        with pytest.raises(AssertionError):
            test(broken)
    with pytest.raises((AssertionError, ValueError)):
        suite.test_metrics_are_prometheus_text_that_grows(ProseObserver)


class RaisingExecutor(LocalExecutor):
    """Raises where the future should."""

    def execute(self, batch: StepBatch) -> Future[StepResult]:
        future = super().execute(batch)
        future.result()
        return future


class LyingExecutor(LocalExecutor):
    """Has a process that does not exist."""

    def health(self) -> tuple[WorkerHealth, ...]:
        return (WorkerHealth(rank=0, sign=None, silence_s=0.0),)


class LateExecutor(LocalExecutor):
    """Answers with the step before."""

    _last: Future[StepResult] | None = None

    def execute(self, batch: StepBatch) -> Future[StepResult]:
        last, self._last = self._last, super().execute(batch)
        return last or self._last


class LeavingExecutor(LocalExecutor):
    """Does not close its worker."""

    def close(self) -> None:
        self._worker = None


def test_broken_executors(tmp_path: Path) -> None:
    suite = ExecutorContract()
    made = ExecutorContext(
        ("cpu",),
        partial(EchoWorker, tmp_path),
        partial(program, tmp_path),
        on_built=lambda: None,
        on_tensor=lambda name: None,
    )

    def diaries() -> list[list[str]]:
        return [(tmp_path / "0").read_text().split()]

    with pytest.raises(RuntimeError, match="went wrong"):
        suite.test_what_a_step_raises_is_the_futures(RaisingExecutor, made)
    with pytest.raises(AssertionError):
        suite.test_workers_live_where_the_suite_is_told(LyingExecutor, made, tmp_path)
    with pytest.raises(AssertionError):
        suite.test_steps_are_answered_in_order(LateExecutor, made, 1)
    (tmp_path / "0").unlink()
    with pytest.raises(AssertionError):
        suite.test_every_worker_is_started_and_closed(LeavingExecutor, made, diaries)
