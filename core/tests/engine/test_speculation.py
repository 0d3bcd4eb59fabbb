"""Drafts take what a step leaves free: a policy costs no row a token, a turn or a block."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from pegboard.builtin.fcfs import FCFS
from pegboard.engine.breaker import FIRST_PAUSE_S, MAX_CALL_S
from pegboard.engine.speculation import LEAST_POLICY_S
from pegboard.engine.step_costs import MeasuredCosts
from pegboard.interfaces.observer import ErrorHappened, Event, Observer
from pegboard.interfaces.scheduler import QueueView, Scheduler, SchedulerContext, StepBuilder
from pegboard.interfaces.speculation_policy import (
    Choice,
    DraftView,
    SpeculationPolicy,
    StepCosts,
)
from pegboard.step import StepBatch
from pegboard.testing.erring_drafter import Mute, Panic

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]


class Policy(SpeculationPolicy):
    """Answers by a function, and keeps what it was asked."""

    def __init__(self, choose: Callable[[Sequence[DraftView], int], Any]) -> None:
        self._choose = choose
        self.asked: list[tuple[Sequence[DraftView], int, int]] = []

    def choose(self, rows: Sequence[DraftView], tokens_left: int, costs: StepCosts) -> Any:
        self.asked.append((rows, tokens_left, costs.num_tokens))
        return self._choose(rows, tokens_left)


def all_of(rows: Sequence[DraftView], tokens_left: int) -> list[Choice]:
    return [Choice(row.num_drafts, 4) for row in rows]


def none_of(rows: Sequence[DraftView], tokens_left: int) -> list[Choice]:
    return [Choice(0, 0) for _ in rows]


def first_of(rows: Sequence[DraftView], tokens_left: int) -> list[Choice]:
    return [Choice(row.num_drafts, 4) for row in rows[:1]] + none_of(rows[1:], tokens_left)


def any_of(rows: Sequence[DraftView], tokens_left: int) -> list[Choice]:
    dice = random.Random(tokens_left)
    return [Choice(dice.randint(0, row.num_drafts), dice.randint(0, 4)) for row in rows]


def now_and_then(rows: Sequence[DraftView], tokens_left: int) -> list[Choice]:
    return [Choice(-1, 0)] if tokens_left % 5 == 1 else all_of(rows, tokens_left)


class Copied(Policy):
    """Its copy wants no drafts."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Policy:
        return Policy(none_of)


class Shuffled(Scheduler):
    """Any order and chunk, with reserves; preempts at random where somebody does not fit."""

    def __init__(self, context: SchedulerContext) -> None:
        self._dice = random.Random(context.max_num_batched_tokens)

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        dice = self._dice
        seqs = [*queue.running, *queue.waiting]
        for seq in dice.sample(seqs, len(seqs)):
            if not step.add(seq, dice.randint(1, 9), dice.choice([0, 0, 5])) and queue.running:
                step.preempt(dice.choice(queue.running))


def _plain(batch: StepBatch) -> dict[str, Any]:
    """The plain part of a batch, without drafts."""
    return {
        "released": [release.row for release in batch.released],
        "admitted": [admission.row for admission in batch.admitted],
        "rows": batch.rows.tolist(),
        "num_computed": batch.num_computed.tolist(),
        "num_tokens": batch.num_tokens.tolist(),
        "sample": batch.sample.tolist(),
    }


def _compare_plans(
    engine: Any, lengths: Sequence[tuple[int, int]], dice: random.Random, share: float
) -> None:
    """Runs requests of those prompts and outputs. Of a share of the steps, a copy of the engine whose
    policy wants no drafts has to plan the same."""
    for number, (prompt, output) in enumerate(lengths):
        engine.add(str(number), range(prompt), max_tokens=output)
    while engine.core.has_work():
        past = engine.worker.batches
        num_past = len(past)
        shared = {id(batch): batch for batch in past}
        twin = copy.deepcopy(engine, shared) if dice.random() < share else None
        engine.step()
        if twin is not None:
            twin.step()
            ours, theirs = (each.worker.batches[num_past:] for each in (engine, twin))
            assert [_plain(batch) for batch in ours] == [_plain(batch) for batch in theirs]
            assert not any(batch.verify.any() for batch in theirs)


@settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=8),
    scheduler=st.sampled_from([FCFS, Shuffled]),
    policy=st.sampled_from([all_of, first_of, any_of, now_and_then]),
    num_tokens=st.sampled_from([1, 3, 9, 32]),
    max_step_s=st.sampled_from([None, 1e-9]),
    block_size=st.sampled_from([1, 4]),
    spare=st.one_of(st.integers(0, 3), st.integers(0, 30)),
    is_cached=st.booleans(),
    guesses_right=st.booleans(),
    seed=st.integers(0, 99),
)
def test_plain_tokens_are_planned_as_without_drafts(
    bench: Make,
    dict_cache: Any,
    lengths: list[tuple[int, int]],
    scheduler: type[Scheduler],
    policy: Callable[[Sequence[DraftView], int], list[Choice]],
    num_tokens: int,
    max_step_s: float | None,
    block_size: int,
    spare: int,
    is_cached: bool,
    guesses_right: bool,
    seed: int,
) -> None:
    longest = max(prompt + output for prompt, output in lengths)
    engine = bench(
        scheduler=scheduler,
        policy=Copied(policy),
        block_sizes=(block_size,),
        num_blocks=1 + -(-longest // block_size) + spare,
        max_num_seqs=4,
        max_num_batched_tokens=num_tokens,
        max_step_s=max_step_s,
        num_speculative_tokens=4,
        **({"cache": dict_cache} if is_cached else {}),
    )
    engine.worker.guesses_right = guesses_right
    _compare_plans(engine, lengths, random.Random(seed), share=0.2)
    cut_off = {one.part for one in engine.core.cut_off}
    # In a small pool, random preemptions may keep everybody from the next token.
    may_be = {"speculation_policy": policy is now_and_then, "scheduler": scheduler is Shuffled}
    assert cut_off <= {part for part, may in may_be.items() if may}


@pytest.mark.parametrize("scheduler", [FCFS, Shuffled])
@pytest.mark.parametrize("guesses_right", [False, True])
def test_plain_tokens_are_planned_as_without_drafts_where_blocks_run_out(
    bench: Make, scheduler: type[Scheduler], guesses_right: bool
) -> None:
    num_preempted = num_verified = num_left_out = 0
    for seed in range(4):
        dice = random.Random(seed)
        lengths = [(dice.randint(1, 12), dice.randint(8, 16)) for _ in range(6)]
        policy = Copied(all_of)
        engine = bench(
            scheduler=scheduler,
            policy=policy,
            block_sizes=(dice.choice((1, 2)),),
            num_blocks=32 + 4 * seed,
            max_num_seqs=4,
            num_speculative_tokens=4,
        )
        engine.worker.guesses_right = guesses_right
        _compare_plans(engine, lengths, dice, share=0.4)
        batches = engine.worker.batches
        num_preempted += sum(len(batch.admitted) for batch in batches) - len(lengths)
        verified = sum(int(batch.verify.sum()) for batch in batches)
        num_verified += verified
        num_left_out += sum(row.num_drafts for rows, _, _ in policy.asked for row in rows)
        num_left_out -= verified
    assert num_preempted > 3, "no row ran out of blocks"
    assert num_verified > 20 and num_left_out > 20, "drafts found all blocks, or none"


def test_wrong_drafts_cost_no_row_its_turn(bench: Make) -> None:
    def num_steps(num_drafts: int) -> int:
        engine = bench(
            max_num_seqs=16,
            max_num_batched_tokens=32,
            num_blocks=600,
            num_speculative_tokens=num_drafts,
        )
        engine.worker.guesses_right = False
        for number in range(16):
            engine.add(str(number), [number, 1], max_tokens=25)
        engine.run()
        return len(engine.worker.batches)

    assert num_steps(4) == num_steps(0) == 25


@pytest.mark.parametrize("guesses_right", [False, True])
def test_drafts_take_no_block_that_another_row_needs(bench: Make, guesses_right: bool) -> None:
    # Nine blocks for each of three rows at their end, and none to spare.
    engine = bench(block_sizes=(1,), num_blocks=28, num_speculative_tokens=4)
    engine.worker.guesses_right = guesses_right
    for name in "abc":
        engine.add(name, [1, 2, 3], max_tokens=7)
    engine.run()
    batches = engine.worker.batches
    assert sum(len(batch.admitted) for batch in batches) == 3, "somebody was preempted"
    assert all(len(batch.rows) == 3 for batch in batches[:3])
    assert any(batch.verify.any() for batch in batches)


@pytest.mark.parametrize("depth", [1])
def test_a_row_verifies_in_the_rest_of_its_block_where_no_block_is_free(bench: Make) -> None:
    engine = bench(num_speculative_tokens=4)
    engine.worker.guesses_right = False
    engine.add("a", [1, 2, 3, 4], max_tokens=20)
    engine.step()
    engine.step()
    engine.allocator.grow("another", 4 * engine.core.ledger()[0].free)
    # It computes tokens 5 to 8 in a block of four.
    num_verified = [int(engine.worker.batches[-1].verify[0])]
    for _ in range(2):
        engine.step()
        num_verified.append(int(engine.worker.batches[-1].verify[0]))
    assert num_verified == [4, 2, 1]


@pytest.mark.parametrize("depth", [1])
def test_known_prefixes_give_way_to_drafts(bench: Make, dict_cache: Any) -> None:
    engine = bench(cache=dict_cache, block_sizes=(1,), num_blocks=21, num_speculative_tokens=4)
    engine.add("old", range(50, 68), max_tokens=2)
    engine.run()
    assert engine.core.ledger()[0].free <= 2
    engine.add("new", [1, 2, 3], max_tokens=12)
    engine.step()
    engine.step()
    assert engine.worker.batches[-1].verify.tolist() == [4]


@pytest.mark.parametrize("depth", [1])
def test_the_policy_is_asked_once_a_step_for_all_rows_that_sample(bench: Make) -> None:
    policy = Policy(all_of)
    engine = bench(
        policy=policy, num_speculative_tokens=4, max_num_batched_tokens=16, max_num_seqs=4
    )
    for name in "ab":
        engine.add(name, [1, 2, 3], max_tokens=10)
    engine.step()
    engine.add("long", range(40), max_tokens=3)
    engine.step()
    (first, first_left, first_tokens), (second, second_left, second_tokens) = policy.asked
    assert [row.num_drafts for row in first] == [0, 0] and (first_left, first_tokens) == (10, 6)
    # The long prompt's chunk fills the step.
    assert [row.num_drafts for row in second] == [4, 4] and (second_left, second_tokens) == (0, 16)
    assert [row.num_left for row in second] == [9, 9]
    assert second[0].confidences == [0.5] * 4 and list(second[0].parents) == [-1, 0, 1, 2]
    engine.run()
    assert len(policy.asked) == sum(bool(batch.sample.any()) for batch in engine.worker.batches)
    oldest = first[0].seq_id
    tried = [row.num_tried for rows, _, _ in policy.asked for row in rows if row.seq_id == oldest]
    assert tried == sorted(tried) and tried[-1] > 0


def test_without_a_drafter_no_policy_is_asked(bench: Make) -> None:
    policy = Policy(all_of)
    engine = bench(policy=policy)
    engine.add("a", [1, 2, 3], max_tokens=5)
    engine.run()
    assert policy.asked == []


@pytest.mark.parametrize("depth", [1])
def test_what_the_step_has_no_room_for_is_left_out_from_the_last_row_on(bench: Make) -> None:
    assert _verified_in_nine_tokens(bench, policy=Policy(all_of)) == [4, 2, 0]


@pytest.mark.parametrize("depth", [1])
def test_by_default_rows_share_the_room(bench: Make) -> None:
    assert _verified_in_nine_tokens(bench) == [2, 2, 2]


def _verified_in_nine_tokens(bench: Make, **values: Any) -> list[int]:
    """Nodes verified of three rows that hold four each."""
    engine = bench(num_speculative_tokens=4, max_num_batched_tokens=9, max_num_seqs=3, **values)
    for name in "abc":
        engine.add(name, [1, 2, 3], max_tokens=10)
    engine.step()
    engine.step()
    verified: list[int] = engine.worker.batches[-1].verify.tolist()
    return verified


class Errors(Observer):
    """Keeps what went wrong."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, ErrorHappened):
            self.kinds.append(event.kind)

    def close(self) -> None: ...


class Endless(list[Choice]):
    """A list that says one length and has another."""

    def __iter__(self) -> Any:
        while True:
            yield Choice(0, 0)


def _raising(error: BaseException) -> Callable[[Any], Any]:
    def answer(rows: Any) -> Any:
        raise error

    return answer


ANSWERS: dict[str, Callable[[Sequence[DraftView]], Any]] = {
    "nothing": lambda rows: None,
    "a number": lambda rows: 1,
    "a text": lambda rows: "1" * len(rows),
    "a generator": lambda rows: (Choice(0, 0) for _ in rows),
    "too few": lambda rows: [Choice(0, 0)] * (len(rows) - 1),
    "too many": lambda rows: [Choice(0, 0)] * (len(rows) + 1),
    "without end": lambda rows: Endless([Choice(0, 0)] * len(rows)),
    "numbers": lambda rows: [0] * len(rows),
    "triples": lambda rows: [(0, 0, 0)] * len(rows),
    "fractions": lambda rows: [(0.5, 0)] * len(rows),
    "NaN": lambda rows: [(0, float("nan"))] * len(rows),
    "None of each": lambda rows: [(None, None)] * len(rows),
    "more than there are": lambda rows: [(row.num_drafts + 1, 0) for row in rows],
    "more than may be": lambda rows: [(0, 4)] * len(rows),
    "fewer than none": lambda rows: [(-1, 0)] * len(rows),
    "very many": lambda rows: [(10**5000, 0)] * len(rows),
    "ValueError": _raising(ValueError("no")),
    "SystemExit": _raising(SystemExit(3)),
    "Panic": _raising(Panic()),
    "Mute": _raising(Mute()),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_policy_that_errs_is_cut_off_by_name_and_no_token_changes(
    bench: Make, expected: Expected, answer: Callable[[Sequence[DraftView]], Any]
) -> None:
    errors = Errors()
    policy = Policy(lambda rows, tokens_left: answer(rows))
    engine = bench(num_speculative_tokens=3, policy=policy, observers=(errors,))
    for number in range(3):
        engine.add(f"{number}", [number, 1, 2], max_tokens=12)
    outputs = engine.run()
    for number in range(3):
        assert outputs[f"{number}", 0].token_ids == expected([number, 1, 2], 12)
    (cut_off,) = engine.core.cut_off
    assert (cut_off.part, cut_off.name) == ("speculation_policy", "Policy") and cut_off.reason
    # Once; on a busy machine a pause may be over before the end, and it is tried again.
    assert 0 < len(errors.kinds) == len(policy.asked)
    assert not any(batch.verify.any() or batch.propose.any() for batch in engine.worker.batches)


def test_a_policy_is_tried_again_after_a_pause(
    bench: Make, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    errs = True
    policy = Policy(lambda rows, tokens_left: None if errs else all_of(rows, tokens_left))
    engine = bench(num_speculative_tokens=4, policy=policy)
    engine.add("a", [1, 2, 3], max_tokens=30)
    engine.step()
    errs = False
    breaker = engine.core._speculation.policy
    assert breaker.is_open
    later = breaker._clock() + FIRST_PAUSE_S
    monkeypatch.setattr(breaker, "_clock", lambda: later)
    assert engine.run()["a", 0].token_ids == expected([1, 2, 3], 30)
    assert engine.core.cut_off == () and not breaker.is_on_trial
    assert any(batch.verify.any() for batch in engine.worker.batches)


@pytest.mark.parametrize(
    ("call_s", "step_s", "is_slow"),
    [
        (2 * MAX_CALL_S, 1000.0, True),
        (LEAST_POLICY_S / 4, LEAST_POLICY_S / 4, True),
        (LEAST_POLICY_S / 4, LEAST_POLICY_S, False),
        (LEAST_POLICY_S / 1000, 0.0, False),
    ],
    ids=["one call", "as long as its steps", "shorter than its steps", "hardly measurable"],
)
def test_a_policy_that_takes_more_time_than_it_may_is_cut_off(
    bench: Make, monkeypatch: pytest.MonkeyPatch, call_s: float, step_s: float, is_slow: bool
) -> None:
    now = 0.0

    def choose(rows: Sequence[DraftView], tokens_left: int) -> list[Choice]:
        nonlocal now
        now += call_s
        return all_of(rows, tokens_left)

    engine = bench(num_speculative_tokens=4, policy=Policy(choose))
    engine.worker.forward_s = lambda batch: step_s
    monkeypatch.setattr(engine.core._speculation.policy, "_clock", lambda: now)
    engine.add("a", [1, 2, 3], max_tokens=60)
    engine.run()
    assert [part.part for part in engine.core.cut_off] == ["speculation_policy"] * is_slow
    assert all("choose took" in part.reason for part in engine.core.cut_off)


@pytest.mark.parametrize("depth", [1])
def test_costs_are_those_that_were_measured(bench: Make) -> None:
    costs: list[StepCosts] = []

    class Looking(Policy):
        def choose(self, rows: Sequence[DraftView], tokens_left: int, seen: StepCosts) -> Any:
            costs.append(seen)
            return super().choose(rows, tokens_left, seen)

    engine = bench(num_speculative_tokens=4, policy=Looking(all_of), max_num_seqs=20)
    engine.worker.forward_s = lambda batch: float(batch.num_tokens.sum() + batch.verify.sum())
    engine.add("first", [1, 2, 3], max_tokens=9)
    engine.step()
    assert costs[0].step_s(3) == costs[0].step_s(1000) == pytest.approx(3.0, rel=0.15)
    assert 0 < costs[0].step_s(0) < costs[0].step_s(1) < costs[0].step_s(3)
    assert costs[0].draft_s(0) == 0.0
    for number in range(12):
        engine.add(str(number), [1], max_tokens=9)
    engine.run()
    # The first step computes a prompt of three.
    batches = engine.worker.batches[1:]
    sizes = [int(batch.num_tokens.sum() + batch.verify.sum()) for batch in batches]
    for size in sizes:
        assert costs[0].step_s(size) == pytest.approx(size, rel=0.15)
    assert costs[0].step_s(10**6) == pytest.approx(max(sizes), rel=0.15)
    assert costs[0].steps_s(2, 40).tolist() == pytest.approx(
        list(map(costs[0].step_s, range(2, 41)))
    )


@given(
    st.lists(st.tuples(st.integers(1, 2048), st.floats(1e-6, 10)), min_size=1, max_size=60),
    st.lists(st.integers(0, 5000), min_size=2, max_size=9),
)
def test_costs_lie_between_the_measurements(
    measured: list[tuple[int, float]], sizes: list[int]
) -> None:
    costs = MeasuredCosts()
    for number, (size, seconds) in enumerate(measured):
        # Every other one computes a prompt of two tokens.
        costs.note(size, size + number % 2, 0, size, seconds, seconds)
    costs.begin(1, measured[0][0])
    values = [seconds for _, seconds in measured]
    sizes = sorted(sizes)
    for of_size in (costs.step_s, costs.draft_s):
        asked = [of_size(size) for size in sizes]
        assert all(0 <= value <= max(values) * 1.7 for value in asked)
        assert all(low <= high * 1.000001 for low, high in pairwise(asked))
        assert of_size(10**7) >= min(values) * 0.999


def test_a_pace_that_changes_is_that_of_all_sizes() -> None:
    costs = MeasuredCosts()
    for _ in range(20):
        for size in (1, 5, 9):
            costs.note(1, size, size - 1, 0, size * 0.01, 0.0)
    for _ in range(40):
        costs.note(1, 1, 0, 0, 0.02, 0.0)
    assert costs.step_s(1) == pytest.approx(0.02, rel=0.1)
    assert costs.step_s(9) == pytest.approx(9 * costs.step_s(1), rel=0.15)


def test_one_late_step_is_no_change_of_pace() -> None:
    costs = MeasuredCosts()
    for number in range(60):
        for size in (1, 5, 9):
            is_late = number % 20 == 0
            costs.note(1, size, size - 1, 0, size * (1.0 if is_late else 0.01), 0.0)
    for size in (1, 5, 9):
        assert costs.step_s(size) == pytest.approx(size * 0.01, rel=0.1)
