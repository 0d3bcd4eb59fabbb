"""Contract suite of `Scheduler`.

    class TestMyScheduler(SchedulerContract):
        @pytest.fixture
        def make(self):
            return MyScheduler          # called with a SchedulerContext

The suite plays the engine: a queue, a step builder that refuses sequences that do not fit, and steps
that compute the plan. Every policy must finish all work, survive a full pool, and rely on nothing
that the queue does not show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from pegboard.interfaces.scheduler import Scheduler, SchedulerContext, SequenceView, StepBuilder

MakeScheduler = Callable[[SchedulerContext], Scheduler]

BLOCK_SIZE = 4
MAX_CALLS = 10_000
MAX_IDLE_STEPS = 100
"""In a row, that compute nothing although there is work: after them the scheduler counts as stuck."""


@dataclass(slots=True)
class SimulatedSequence:
    """A sequence as the engine keeps it. Numbers are tokens."""

    seq_id: int
    num_prompt: int
    max_tokens: int
    arrival: float = 0.0
    priority: int = 0
    tenant: str = ""
    num_output: int = 0
    num_computed: int = 0
    blocks: int = 0
    num_in_flight: int = 0

    @property
    def num_pending(self) -> int:
        num_scheduled = self.num_computed + self.num_in_flight
        num_pending = self.num_prompt + self.num_output - num_scheduled
        if num_pending > 0 or not self.num_in_flight:
            return num_pending
        return int(num_scheduled < self.num_prompt + self.max_tokens - 1)

    @property
    def finished(self) -> bool:
        return self.num_output >= self.max_tokens

    def view(self) -> View:
        return View(
            self.seq_id,
            self.arrival,
            self.priority,
            self.tenant,
            self.num_prompt,
            self.num_output,
            self.num_computed,
            self.num_pending,
            self.max_tokens,
        )


@dataclass(frozen=True, slots=True)
class View:
    """The view of a sequence; writing to it raises."""

    seq_id: int
    arrival: float
    priority: int
    tenant: str
    num_prompt: int
    num_output: int
    num_computed: int
    num_pending: int
    max_tokens: int


@dataclass(slots=True)
class Queue:
    """The queue that is shown."""

    running: tuple[View, ...]
    waiting: tuple[View, ...]


@dataclass(slots=True)
class Simulation:
    """An engine without a model: it computes by counting.

    Attributes:
        context: limits of a step.
        num_blocks: blocks of four tokens.
        depth: most steps in flight.
        running, waiting: in order of admission, in order of arrival.
        plans: for each step, sequence to the tokens it computed.
        num_preemptions: so far.
    """

    context: SchedulerContext
    num_blocks: int
    depth: int = 1
    running: list[SimulatedSequence] = field(default_factory=list)
    waiting: list[SimulatedSequence] = field(default_factory=list)
    plans: list[dict[int, int]] = field(default_factory=list)
    num_preemptions: int = 0
    flight: list[dict[int, int]] = field(default_factory=list)

    def arrive(self, seq: SimulatedSequence) -> None:
        self.waiting.append(seq)
        self.waiting.sort(key=lambda other: (other.arrival, other.seq_id))

    def queue(self) -> Queue:
        return Queue(
            tuple(seq.view() for seq in self.running), tuple(seq.view() for seq in self.waiting)
        )

    def step(self, scheduler: Scheduler) -> dict[int, int]:
        """Plans a step and commits the oldest in flight; returns sequence to tokens, as planned."""
        builder = Builder(self)
        scheduler.plan(self.queue(), builder)
        plan = dict(builder.entries)
        self.plans.append(plan)
        for seq in self.running:
            seq.num_in_flight += plan.get(seq.seq_id, 0)
        self.flight += [plan] if plan else []
        while self.flight and (
            len(self.flight) >= self.depth or not plan or builder.waits_for_flight
        ):
            self.commit(self.flight.pop(0))
        return plan

    def commit(self, plan: dict[int, int]) -> None:
        """Takes over a step's tokens; a sequence that has all that it may get is gone."""
        for seq in [seq for seq in self.running if seq.seq_id in plan]:
            seq.num_computed += plan[seq.seq_id]
            seq.num_in_flight -= plan[seq.seq_id]
            if seq.num_computed == seq.num_prompt + seq.num_output:
                seq.num_output += 1
            if seq.finished:
                self.drop(seq.seq_id)

    def drop(self, seq_id: int) -> None:
        """The sequence ended, or its caller went."""
        self.running = [seq for seq in self.running if seq.seq_id != seq_id]
        self.waiting = [seq for seq in self.waiting if seq.seq_id != seq_id]

    def finish(self, scheduler: Scheduler, max_steps: int) -> None:
        """Steps until nothing is left.

        Raises:
            AssertionError: something is left after so many steps, or nothing more happens.
        """
        num_idle = 0
        for _ in range(max_steps):
            if not (self.running or self.waiting) or num_idle == MAX_IDLE_STEPS:
                break
            num_idle = 0 if self.step(scheduler) else num_idle + 1
        left = [seq.seq_id for seq in self.running + self.waiting]
        assert not left, (
            f"sequences {left} did not finish in {len(self.plans)} steps, the last {num_idle} of which"
            " computed nothing"
        )


class Builder(StepBuilder):
    """The step that is being planned; it refuses sequences that do not fit.

    Attributes:
        waits_for_flight: whether somebody in flight was to be preempted.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.waits_for_flight = False
        self._sim = simulation
        self._calls = 0
        self.entries: dict[int, int] = {}

    @property
    def num_tokens_left(self) -> int:
        return self._sim.context.max_num_batched_tokens - sum(self.entries.values())

    @property
    def num_rows_left(self) -> int:
        return self._sim.context.max_num_seqs - len(self._sim.running)

    def add(self, seq: SequenceView, num_tokens: int, reserve: int = 0) -> bool:
        mine = self._find(seq)
        if not mine.num_pending:
            return True
        num_tokens = min(num_tokens, mine.num_pending, self.num_tokens_left)
        admitted = mine in self._sim.running
        if num_tokens < 1 or mine.seq_id in self.entries:
            return False
        if not admitted and self.num_rows_left < 1:
            return False
        num_scheduled = mine.num_computed + mine.num_in_flight
        blocks = -(-(num_scheduled + num_tokens + reserve) // BLOCK_SIZE)
        used = sum(other.blocks for other in self._sim.running)
        if used + blocks - mine.blocks > self._sim.num_blocks:
            return False
        mine.blocks = max(mine.blocks, blocks)
        if not admitted:
            self._sim.waiting.remove(mine)
            self._sim.running.append(mine)
        self.entries[mine.seq_id] = num_tokens
        return True

    def num_cached(self, seq: SequenceView) -> int:
        return 0

    def waits_for_prefix(self, seq: SequenceView) -> bool:
        return False

    def preempt(self, seq: SequenceView) -> bool:
        mine = self._find(seq)
        if mine not in self._sim.running or mine is self._oldest():
            return False
        if mine.num_in_flight:
            self.waits_for_flight = True
            return False
        self.entries.pop(mine.seq_id, None)
        self._sim.running.remove(mine)
        mine.blocks = mine.num_computed = 0
        self._sim.arrive(mine)
        self._sim.num_preemptions += 1
        return True

    def _oldest(self) -> SimulatedSequence:
        return min(self._sim.running, key=lambda seq: (seq.priority, seq.arrival, seq.seq_id))

    def _find(self, seq: SequenceView) -> SimulatedSequence:
        self._calls += 1
        assert self._calls < MAX_CALLS, "the scheduler keeps asking for what was refused"
        for mine in self._sim.running + self._sim.waiting:
            if mine.seq_id == seq.seq_id:
                return mine
        raise AssertionError(f"sequence {seq.seq_id} is not in the queue")


@st.composite
def workloads(draw: st.DrawFn) -> tuple[SchedulerContext, int, list[SimulatedSequence]]:
    """Limits, blocks, and sequences that fit one by one."""
    count = draw(st.integers(1, 7))
    sequences = [
        SimulatedSequence(
            seq_id,
            num_prompt=draw(st.integers(1, 24)),
            max_tokens=draw(st.integers(1, 9)),
            arrival=float(draw(st.integers(0, 6))),
            priority=draw(st.integers(0, 2)),
            tenant=draw(st.sampled_from(["", "a", "b"])),
        )
        for seq_id in range(count)
    ]
    most = max(-(-(seq.num_prompt + seq.max_tokens) // BLOCK_SIZE) for seq in sequences)
    context = SchedulerContext(draw(st.integers(1, 5)), draw(st.integers(1, 32)), 64)
    return context, most + draw(st.integers(0, 12)), sequences


_property = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class SchedulerContract:
    """The contract of every scheduler."""

    @pytest.fixture
    def make(self) -> MakeScheduler:
        """The factory under test."""
        raise NotImplementedError("override the fixture `make`")

    @_property
    @given(workload=workloads(), depth=st.integers(1, 2))
    def test_all_work_is_finished(
        self,
        make: MakeScheduler,
        workload: tuple[SchedulerContext, int, list[SimulatedSequence]],
        depth: int,
    ) -> None:
        context, num_blocks, sequences = workload
        simulation, scheduler = Simulation(context, num_blocks, depth), make(context)
        for seq in sorted(sequences, key=lambda seq: seq.arrival):
            simulation.arrive(seq)
            simulation.step(scheduler)
        work = sum(seq.num_prompt + seq.max_tokens for seq in sequences)
        simulation.finish(scheduler, max_steps=20 * work + 100)

    @_property
    @given(workload=workloads(), depth=st.integers(1, 2), data=st.data())
    def test_sequences_may_vanish_between_steps(
        self,
        make: MakeScheduler,
        workload: tuple[SchedulerContext, int, list[SimulatedSequence]],
        depth: int,
        data: st.DataObject,
    ) -> None:
        context, num_blocks, sequences = workload
        simulation, scheduler = Simulation(context, num_blocks, depth), make(context)
        for seq in sequences:
            simulation.arrive(seq)
        for seq in sequences:
            simulation.step(scheduler)
            if data.draw(st.booleans(), label=f"abort {seq.seq_id}"):
                simulation.drop(seq.seq_id)
        work = sum(seq.num_prompt + seq.max_tokens for seq in sequences)
        simulation.finish(scheduler, max_steps=20 * work + 100)

    def test_an_empty_queue_plans_nothing(self, make: MakeScheduler) -> None:
        context = SchedulerContext(4, 16, 64)
        assert Simulation(context, 16).step(make(context)) == {}

    def test_a_lone_sequence_is_admitted_and_decodes_each_step(self, make: MakeScheduler) -> None:
        context = SchedulerContext(4, 16, 64)
        simulation, scheduler = Simulation(context, 16), make(context)
        simulation.arrive(SimulatedSequence(1, num_prompt=5, max_tokens=4))
        simulation.finish(scheduler, max_steps=4)
        assert [sum(plan.values()) for plan in simulation.plans] == [5, 1, 1, 1]

    def test_a_prompt_longer_than_a_step_is_chunked(self, make: MakeScheduler) -> None:
        context = SchedulerContext(4, 8, 64)
        simulation, scheduler = Simulation(context, 16), make(context)
        simulation.arrive(SimulatedSequence(1, num_prompt=30, max_tokens=1))
        simulation.finish(scheduler, max_steps=30)
        assert sum(plan[1] for plan in simulation.plans) == 30
        assert max(plan[1] for plan in simulation.plans) <= 8

    def test_sequences_run_together(self, make: MakeScheduler) -> None:
        context = SchedulerContext(4, 64, 64)
        simulation, scheduler = Simulation(context, 64), make(context)
        for seq_id in range(4):
            simulation.arrive(SimulatedSequence(seq_id, num_prompt=4, max_tokens=8))
        simulation.finish(scheduler, max_steps=40)
        assert max(len(plan) for plan in simulation.plans) == 4

    def test_a_full_pool_does_not_stop_the_work(self, make: MakeScheduler) -> None:
        context = SchedulerContext(4, 64, 64)
        simulation, scheduler = Simulation(context, 8), make(context)
        for seq_id in range(4):
            simulation.arrive(
                SimulatedSequence(seq_id, num_prompt=8, max_tokens=20, arrival=float(seq_id))
            )
        simulation.finish(scheduler, max_steps=2000)

    def test_a_plan_that_was_dropped_is_planned_again(self, make: MakeScheduler) -> None:
        context = SchedulerContext(2, 16, 64)
        scheduler = make(context)
        for _ in range(3):
            simulation = Simulation(context, 16)
            simulation.arrive(SimulatedSequence(1, num_prompt=5, max_tokens=1))
            assert simulation.step(scheduler) == {1: 5}

    def test_views_cannot_be_written_to(self, make: MakeScheduler) -> None:
        context = SchedulerContext(2, 16, 64)
        simulation = Simulation(context, 16)
        simulation.arrive(SimulatedSequence(1, num_prompt=5, max_tokens=1))
        view = simulation.queue().waiting[0]
        with pytest.raises(FrozenInstanceError):
            view.num_prompt = 0  # type: ignore[misc]
        make(context).plan(simulation.queue(), Builder(simulation))
