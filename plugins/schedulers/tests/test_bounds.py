"""Each policy keeps its promise about waiting, in simulations of many requests."""

from __future__ import annotations

import random
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from pegboard.interfaces.scheduler import Scheduler, SchedulerContext, SequenceView
from pegboard_schedulers.fair import Fair
from pegboard_schedulers.options import (
    FairOptions,
    PrefixAwareOptions,
    PriorityOptions,
    ShortestOptions,
)
from pegboard_schedulers.prefix_aware import PrefixAware
from pegboard_schedulers.priority import Priority
from pegboard_schedulers.reserve import Reserve
from pegboard_schedulers.shortest import Shortest

CONTEXT = SchedulerContext(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=64)
PREFIX = 16
"""Tokens that requests of one prefix share."""
MAX_CACHED = 6
"""Prefixes that the cache holds; the oldest goes first."""


@dataclass(slots=True, eq=False)
class Job:
    """A sequence. `length` is the output at which it ends; `prefix` names its beginning, 0: none."""

    seq_id: int
    arrival: float
    num_prompt: int
    max_tokens: int
    length: int
    priority: int = 0
    tenant: str = ""
    prefix: int = 0
    num_output: int = 0
    num_computed: int = 0
    num_cached: int = 0
    num_kv: int = 0

    @property
    def num_pending(self) -> int:
        return self.num_prompt + self.num_output - self.num_computed


@dataclass
class Line:
    """Queue, step builder and engine in one; a step takes a second.

    Attributes:
        num_slots: tokens of KV.
        admitted: told of each admission, and of who waits, in order of arrival.
        left_over: tokens and rows that the last plan left.
    """

    context: SchedulerContext
    num_slots: int
    admitted: Callable[[Job, Sequence[Job]], None] = lambda job, waiting: None
    running: list[Job] = field(default_factory=list)
    waiting: list[Job] = field(default_factory=list)
    finished: list[Job] = field(default_factory=list)
    cached: dict[int, None] = field(default_factory=dict)
    left_over: tuple[int, int] = (0, 0)
    num_preemptions: int = 0

    def step(self, scheduler: Scheduler) -> None:
        self.num_tokens_left = self.context.max_num_batched_tokens
        self.num_rows_left = self.context.max_num_seqs - len(self.running)
        self._free = self.num_slots - sum(job.num_kv for job in self.running)
        self._entries: dict[Job, int] = {}
        self._lost: dict[Job, None] = {}
        self._new: list[Job] = []
        for job in self.waiting:
            job.num_cached = PREFIX if job.prefix in self.cached else 0
        scheduler.plan(self, self)
        self.left_over = self.num_tokens_left, self.num_rows_left
        self._apply()

    def _apply(self) -> None:
        if self._new:
            new = set(self._new)
            self.waiting = [job for job in self.waiting if job not in new]
            self.running += self._new
        for job in self._lost:
            self.running.remove(job)
            insort(self.waiting, job, key=lambda other: (other.arrival, other.seq_id))
            self.num_preemptions += 1
        for job, num_tokens in self._entries.items():
            job.num_computed += num_tokens
            if job.num_pending == 0:
                job.num_output += 1
            if job.prefix and job.num_computed >= PREFIX:
                self.cached[job.prefix] = None
                if len(self.cached) > MAX_CACHED:
                    del self.cached[next(iter(self.cached))]
        done = [job for job in self._entries if job.num_output >= job.length]
        for job in done:
            self.running.remove(job)
        self.finished += done

    def add(self, seq: SequenceView, num_tokens: int, reserve: int = 0) -> bool:
        assert isinstance(seq, Job)
        is_new = seq not in self.running
        if seq in self._entries or seq in self._lost or self.num_tokens_left < 1:
            return False
        if is_new and self.num_rows_left < 1:
            return False
        start = seq.num_cached if is_new else seq.num_computed
        num_tokens = min(num_tokens, seq.num_prompt + seq.num_output - start, self.num_tokens_left)
        most = seq.num_prompt + seq.max_tokens - 1
        num_kv = max(seq.num_kv, start + num_tokens, min(start + num_tokens + reserve, most))
        if num_kv - seq.num_kv > self._free:
            return False
        self._free -= num_kv - seq.num_kv
        seq.num_kv, seq.num_computed = num_kv, start
        self.num_tokens_left -= num_tokens
        self._entries[seq] = num_tokens
        if is_new:
            self.num_rows_left -= 1
            self.admitted(seq, [job for job in self.waiting if job not in self._new])
            self._new.append(seq)
        return True

    def num_cached(self, seq: SequenceView) -> int:
        assert isinstance(seq, Job)
        return seq.num_cached

    def waits_for_prefix(self, seq: SequenceView) -> bool:
        assert isinstance(seq, Job)
        if not seq.prefix or seq.num_cached:
            return False
        return any(job.prefix == seq.prefix for job in [*self.running, *self._new])

    def preempt(self, seq: SequenceView) -> bool:
        assert isinstance(seq, Job)
        running = [job for job in self.running if job not in self._lost]
        oldest = min([*running, *self._new], key=lambda job: (job.priority, job.arrival))
        if seq is oldest or seq not in running:
            return False
        self._free += seq.num_kv
        self.num_tokens_left += self._entries.pop(seq, 0)
        self.num_rows_left += 1
        seq.num_kv = seq.num_computed = 0
        self._lost[seq] = None
        return True


def play(line: Line, scheduler: Scheduler, jobs: Iterator[Job]) -> None:
    """Lets jobs arrive and the engine step until all are done; each has to end."""
    now, num_jobs, coming = 0.0, 0, next(jobs, None)
    while coming is not None or line.waiting or line.running:
        while coming is not None and coming.arrival <= now:
            line.waiting.append(coming)
            num_jobs, coming = num_jobs + 1, next(jobs, None)
        line.step(scheduler)
        now += 1.0
    assert len(line.finished) == num_jobs


def traffic(num_jobs: int, seed: int = 0) -> Iterator[Job]:
    """Bursts beyond what the engine can serve, and times in which it catches up."""
    rng = random.Random(seed)
    now = 0.0
    for seq_id in range(num_jobs):
        now += rng.expovariate(1.5 if seq_id // 200 % 2 else 0.5)
        length = rng.randint(1, 20)
        yield Job(
            seq_id,
            arrival=now,
            num_prompt=rng.randint(PREFIX + 1, 40),
            max_tokens=20,
            length=length,
            priority=rng.choice([0, 0, 0, 1, 2]),
            tenant=f"tenant {length // 5}",
            prefix=max(0, rng.randint(-30, 12)),
        )


SIZES = [2_000, pytest.param(100_000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("num_jobs", SIZES)
def test_priority_overtakes_by_a_wait_for_each_class(num_jobs: int) -> None:
    max_wait = 30.0
    seen: Counter[bool] = Counter()

    def check(job: Job, waiting: Sequence[Job]) -> None:
        for other in waiting:
            if other.arrival >= job.arrival or other.prefix:
                continue
            classes = other.priority - job.priority
            assert job.arrival - other.arrival <= classes * max_wait
            seen[job.arrival - other.arrival > max_wait / 2] += 1

    line = Line(CONTEXT, 500, check)
    play(line, Priority(CONTEXT, PriorityOptions(max_wait=max_wait)), traffic(num_jobs))
    assert seen[True] and line.num_preemptions, "the bound was never near"


@pytest.mark.parametrize("num_jobs", SIZES)
def test_shortest_overtakes_nobody_who_came_much_earlier(num_jobs: int) -> None:
    max_wait = 40.0
    longest = 0.0

    def check(job: Job, waiting: Sequence[Job]) -> None:
        nonlocal longest
        head = next((other for other in waiting if other is not job and not other.prefix), job)
        longest = max(longest, job.arrival - head.arrival)

    line = Line(CONTEXT, 500, check)
    play(line, Shortest(CONTEXT, ShortestOptions(max_wait=max_wait)), traffic(num_jobs))
    assert max_wait / 2 < longest <= max_wait


@pytest.mark.parametrize("num_jobs", SIZES)
def test_prefix_aware_overtakes_a_bounded_number_of_times(num_jobs: int) -> None:
    max_overtakes = 4
    overtakes: Counter[int] = Counter()

    def check(job: Job, waiting: Sequence[Job]) -> None:
        for other in waiting:
            if other.arrival < job.arrival and not other.prefix:
                overtakes[other.seq_id] += 1

    line = Line(CONTEXT, 100_000, check)  # nobody is preempted, so each waits once
    options = PrefixAwareOptions(max_overtakes=max_overtakes)
    play(line, PrefixAware(CONTEXT, options), traffic(num_jobs))
    assert max(overtakes.values()) == max_overtakes


@pytest.mark.parametrize("num_jobs", SIZES)
def test_reserve_preempts_nothing_and_keeps_the_order(num_jobs: int) -> None:
    def check(job: Job, waiting: Sequence[Job]) -> None:
        assert not [other for other in waiting if other.arrival < job.arrival and not other.prefix]

    line = Line(CONTEXT, 500, check)
    play(line, Reserve(CONTEXT), traffic(num_jobs))
    assert line.num_preemptions == 0


def backlog(num_jobs: int) -> Iterator[Job]:
    """All at once: `a` sends five long prompts for each long answer that `b` asks for."""
    for seq_id in range(num_jobs):
        if seq_id % 6:
            yield Job(seq_id, 0.0, num_prompt=30, max_tokens=2, length=2, tenant="a")
        else:
            yield Job(seq_id, 0.0, num_prompt=2, max_tokens=20, length=20, tenant="b")


@pytest.mark.parametrize("weights", [{}, {"a": 3.0}])
@pytest.mark.parametrize("num_slots", [10_000, 150])
@pytest.mark.parametrize("num_jobs", [600, pytest.param(4_000, marks=pytest.mark.slow)])
def test_fair_keeps_the_gap_of_two_backlogged_tenants_bounded(
    num_jobs: int, num_slots: int, weights: dict[str, float]
) -> None:
    options = FairOptions(weights=weights)
    line, scheduler = Line(CONTEXT, num_slots), Fair(CONTEXT, options)
    jobs = line.waiting = list(backlog(num_jobs))
    admitted: set[Job] = set()
    line.admitted = lambda job, waiting: admitted.add(job)
    gaps, most_running = [0.0], 0
    while {job.tenant for job in line.waiting} == {"a", "b"}:
        line.step(scheduler)
        served: Counter[str] = Counter()
        for job in jobs:
            cost = (job in admitted) * job.num_prompt + 2.0 * job.num_output
            served[job.tenant] += cost / weights.get(job.tenant, 1.0)  # type: ignore[assignment]
        gaps.append(served["a"] - served["b"])
        running = sum(job.num_prompt + job.num_output for job in line.running)
        most_running = max(most_running, running)
    assert len(gaps) > 100
    assert max(gaps) - min(gaps) <= 2 * max(1.0 * 30, 2.0 * most_running)


def test_fair_leaves_nothing_idle_while_someone_waits() -> None:
    line, scheduler = Line(CONTEXT, 10_000), Fair(CONTEXT, FairOptions(weights={"b": 9.0}))
    line.waiting = list(backlog(600))
    while line.waiting:
        line.step(scheduler)
        if line.waiting:
            assert 0 in line.left_over
