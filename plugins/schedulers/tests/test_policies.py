"""The policies of `fair`, `shortest`, `reserve` and `prefix_aware`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings

from pegboard.interfaces.scheduler import Scheduler, SchedulerContext, SequenceView
from pegboard.testing.scheduler import Builder, Queue, SimulatedSequence, Simulation, workloads
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

ONE_ROW = SchedulerContext(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64)
ROOMY = 1000
"""Blocks that nobody ever lacks."""


def order(sim: Simulation) -> list[int]:
    """Ids as they were first computed."""
    return list(dict.fromkeys(seq_id for plan in sim.plans for seq_id in plan))


def of_tenant(seq_id: int, tenant: str, max_tokens: int = 4, size: int = 4) -> SimulatedSequence:
    return SimulatedSequence(seq_id, size, max_tokens, arrival=float(seq_id), tenant=tenant)


def test_tenants_take_turns_however_much_one_sends() -> None:
    sim = Simulation(ONE_ROW, ROOMY)
    for seq_id in range(6):
        sim.arrive(of_tenant(seq_id, "many" if seq_id < 4 else "few"))
    sim.finish(Fair(ONE_ROW, FairOptions()), max_steps=60)
    assert order(sim) == [0, 4, 1, 5, 2, 3]


def test_a_tenant_of_twice_the_weight_gets_twice_the_service() -> None:
    sim = Simulation(ONE_ROW, ROOMY)
    for seq_id in range(60):
        sim.arrive(of_tenant(seq_id, "ab"[seq_id % 2]))
    scheduler = Fair(ONE_ROW, FairOptions(weights={"b": 2.0}))
    for _ in range(30 * 4):
        sim.step(scheduler)
    served = [seq_id % 2 for seq_id in order(sim)]
    assert served.count(1) == pytest.approx(2 * served.count(0), abs=2)


@pytest.mark.parametrize(("input_weight", "output_weight", "first"), [(1, 0.1, 2), (0.1, 1, 3)])
def test_prompt_and_output_count_by_their_weights(
    input_weight: float, output_weight: float, first: int
) -> None:
    """One tenant's prompts are long, the other's answers; each has been served once."""
    sim = Simulation(ONE_ROW, ROOMY)
    sizes = {0: ("prompts", 2, 40), 1: ("answers", 20, 4)}
    for seq_id in range(4):
        tenant, max_tokens, size = sizes[seq_id % 2]
        sim.arrive(of_tenant(seq_id, tenant, max_tokens, size))
    options = FairOptions(input_weight=input_weight, output_weight=output_weight)
    sim.finish(Fair(ONE_ROW, options), max_steps=60)
    cheaper = 3 if first == 2 else 2
    assert order(sim) == [0, 1, cheaper, first]


def test_idle_time_earns_no_claim() -> None:
    sim = Simulation(ONE_ROW, ROOMY)
    scheduler = Fair(ONE_ROW, FairOptions())
    sim.arrive(of_tenant(0, "b"))
    for seq_id in range(1, 20):
        sim.arrive(of_tenant(seq_id, "a"))
    for _ in range(10 * 4):
        sim.step(scheduler)
    for seq_id in range(20, 30):
        sim.arrive(of_tenant(seq_id, "b"))
    begun = len(order(sim))
    for _ in range(8 * 4):
        sim.step(scheduler)
    tenants = ["b" if seq_id >= 20 else "a" for seq_id in order(sim)[begun:]]
    assert sorted(tenants[:8]) == ["a"] * 4 + ["b"] * 4


def test_fair_counts_anew_after_others_have_planned() -> None:
    sim = Simulation(ONE_ROW, ROOMY)
    scheduler = Fair(ONE_ROW, FairOptions())
    for seq_id in range(8):
        sim.arrive(of_tenant(seq_id, "a", max_tokens=8))
    for _ in range(20):
        sim.step(scheduler)
    scheduler.resync(sim.queue())
    sim.arrive(of_tenant(8, "b", max_tokens=8))
    sim.arrive(of_tenant(9, "b", max_tokens=8))
    sim.finish(scheduler, max_steps=100)
    later = order(sim)[3:]
    assert later.index(3) < later.index(9), "what was served before is forgotten"


def test_the_shortest_answer_goes_first() -> None:
    sim = Simulation(ONE_ROW, ROOMY)
    for seq_id, max_tokens in enumerate([9, 3, 20, 6]):
        sim.arrive(of_tenant(seq_id, "", max_tokens))
    sim.finish(Shortest(ONE_ROW, ShortestOptions(max_wait=100)), max_steps=60)
    assert order(sim) == [1, 3, 0, 2]


def test_who_waited_too_long_goes_before_shorter_ones() -> None:
    sim = Simulation(ONE_ROW, ROOMY)
    for seq_id, max_tokens in enumerate([9, 3, 20, 6]):
        sim.arrive(of_tenant(seq_id, "", max_tokens))
    sim.finish(Shortest(ONE_ROW, ShortestOptions(max_wait=2.5)), max_steps=60)
    assert order(sim) == [0, 1, 3, 2]


def test_a_tenant_whose_answers_end_early_is_predicted_to_be_short() -> None:
    sim = Simulation(ONE_ROW, ROOMY)
    scheduler = Shortest(ONE_ROW, ShortestOptions(max_wait=1000))
    for seq_id in range(3):
        sim.arrive(of_tenant(seq_id, "brief", max_tokens=40))
        for _ in range(3):
            sim.step(scheduler)
        sim.drop(seq_id)  # it said its stop word
    sim.arrive(of_tenant(10, "unknown", max_tokens=30))
    sim.arrive(of_tenant(11, "brief", max_tokens=40))
    sim.finish(scheduler, max_steps=100)
    assert order(sim)[-2:] == [11, 10]


def test_the_longest_answer_gives_its_kv_back_first() -> None:
    context = SchedulerContext(4, 64, 64)
    sim = Simulation(context, num_blocks=12)
    for seq_id, max_tokens in enumerate([12, 30, 12]):
        sim.arrive(replace(of_tenant(seq_id, "", max_tokens), num_prompt=8, arrival=float(seq_id)))
    scheduler = Shortest(context, ShortestOptions(max_wait=100))
    while not sim.num_preemptions:
        sim.step(scheduler)
    assert [seq.seq_id for seq in sim.waiting] == [1]


@settings(suppress_health_check=list(HealthCheck))
@given(workload=workloads())
def test_reserve_preempts_nothing(
    workload: tuple[SchedulerContext, int, list[SimulatedSequence]],
) -> None:
    context, num_blocks, sequences = workload
    sim, scheduler = Simulation(context, num_blocks), Reserve(context)
    for seq in sorted(sequences, key=lambda seq: (seq.arrival, seq.seq_id)):
        sim.arrive(seq)
        sim.step(scheduler)
    sim.finish(scheduler, max_steps=2000)
    assert sim.num_preemptions == 0
    assert order(sim) == sorted(order(sim), key=lambda seq_id: (sequences[seq_id].arrival, seq_id))


def test_reserve_frees_itself_of_what_others_admitted() -> None:
    """Four were admitted without their worst case, and have filled the pool."""
    context = SchedulerContext(4, 64, 64)
    sim = Simulation(context, num_blocks=8)
    for seq_id in range(4):
        seq = SimulatedSequence(seq_id, 8, 20, arrival=float(seq_id), blocks=2)
        seq.num_computed, seq.num_output = 8, 1
        sim.running.append(seq)
    scheduler = Reserve(context)
    scheduler.resync(sim.queue())
    sim.finish(scheduler, max_steps=200)
    assert sim.num_preemptions <= 3


@dataclass
class Waiter:
    """A waiting sequence that counts who asks what the cache holds of it."""

    seq_id: int
    cached: int
    arrival: float = 0.0
    priority: int = 0
    tenant: str = ""
    num_prompt: int = 32
    num_output: int = 0
    num_computed: int = 0
    num_pending: int = 32
    max_tokens: int = 8
    num_asked: int = 0


class Desk(Builder):
    """Admits while it has rows; some wait for a prefix. `added` is what each asked for: tokens now, and
    room for later."""

    def __init__(
        self, num_rows: int, passed_over: frozenset[int] = frozenset(), num_tokens: int = 1000
    ) -> None:
        self.order: list[int] = []
        self.added: list[tuple[int, int]] = []
        self.num_asked = 0
        self._num_rows, self._passed_over = num_rows, passed_over
        self._num_tokens = num_tokens

    @property
    def num_tokens_left(self) -> int:
        return self._num_tokens

    @property
    def num_rows_left(self) -> int:
        return self._num_rows - len(self.order)

    def add(self, seq: SequenceView, num_tokens: int, reserve: int = 0) -> bool:
        self.order.append(seq.seq_id)
        self.added.append((num_tokens, reserve))
        return True

    def num_cached(self, seq: SequenceView) -> int:
        assert isinstance(seq, Waiter)
        seq.num_asked += 1
        return seq.cached

    def waits_for_prefix(self, seq: SequenceView) -> bool:
        self.num_asked += 1
        return seq.seq_id in self._passed_over


def test_the_longest_cached_prefix_goes_first() -> None:
    waiting = [Waiter(seq_id, cached) for seq_id, cached in enumerate([0, 16, 4, 16, 0])]
    desk = Desk(num_rows=4)
    scheduler = PrefixAware(ONE_ROW, PrefixAwareOptions())
    scheduler.plan(Queue((), tuple(waiting)), desk)  # type: ignore[arg-type]
    assert desk.order == [1, 3, 2, 0]


def test_a_long_queue_is_asked_of_within_a_window_and_once() -> None:
    waiting = [Waiter(seq_id, seq_id) for seq_id in range(500)]
    desk = Desk(num_rows=200)
    scheduler = PrefixAware(ONE_ROW, PrefixAwareOptions(window=50))
    scheduler.plan(Queue((), tuple(waiting)), desk)  # type: ignore[arg-type]
    assert [one.num_asked for one in waiting] == [1] * 50 + [0] * 450
    assert desk.order[0] == 49


def test_a_step_without_a_row_asks_nothing() -> None:
    waiting = [Waiter(seq_id, seq_id) for seq_id in range(5)]
    scheduler = PrefixAware(ONE_ROW, PrefixAwareOptions())
    scheduler.plan(Queue((), tuple(waiting)), Desk(num_rows=0))  # type: ignore[arg-type]
    assert not any(one.num_asked for one in waiting)


@pytest.mark.parametrize(
    "scheduler",
    [
        Fair(ONE_ROW, FairOptions()),
        PrefixAware(ONE_ROW, PrefixAwareOptions()),
        Reserve(ONE_ROW),
        Shortest(ONE_ROW, ShortestOptions()),
    ],
    ids=lambda scheduler: type(scheduler).__name__,
)
def test_who_waits_for_a_prefix_is_passed_over_some_of_the_time(scheduler: Scheduler) -> None:
    waiting = tuple(Waiter(seq_id, 0) for seq_id in range(60))
    desk = Desk(100, frozenset({0, 2}))
    scheduler.plan(Queue((), waiting[:4]), desk)  # type: ignore[arg-type]
    assert desk.order == [1, 3]
    desk = Desk(100, frozenset(range(50)))
    scheduler.plan(Queue((), waiting), desk)  # type: ignore[arg-type]
    assert desk.num_asked == 32


@pytest.mark.parametrize(
    "scheduler",
    [
        Fair(ONE_ROW, FairOptions()),
        PrefixAware(ONE_ROW, PrefixAwareOptions()),
        Priority(ONE_ROW, PriorityOptions()),
        Shortest(ONE_ROW, ShortestOptions()),
    ],
    ids=lambda scheduler: type(scheduler).__name__,
)
def test_no_room_is_asked_for_what_is_cached(scheduler: Scheduler) -> None:
    """Of 32 tokens 20 are cached, and a step has 8 left: four are to come."""
    desk = Desk(num_rows=1, num_tokens=8)
    scheduler.plan(Queue((), (Waiter(0, cached=20),)), desk)  # type: ignore[arg-type]
    assert desk.added == [(8, 4)]
