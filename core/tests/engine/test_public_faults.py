"""Faults that users of other engines have reported, each with its small input.

`POSED` says for each of the forty which tests pose it: those of this file, or those that stand where
the part at fault is tested. `NOT_POSED` says why the others cannot be posed here.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pegboard.builtin.fcfs import FCFS
from pegboard.interfaces.observer import Event, Observer, StepDone
from pegboard.interfaces.scheduler import QueueView, Scheduler, SchedulerContext, StepBuilder

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]

ROOT = Path(__file__).parents[3]
ENGINE = "core/tests/engine"
ALLOCATORS = "core/pegboard/testing/kv_allocator.py"
PRIORITY = "plugins/schedulers/tests/test_priority.py"

POSED: dict[int, tuple[str, ...]] = {
    # Leaks, double frees, aliasing.
    1: ("test_blocks_that_several_hold_are_counted_once",),
    2: (
        "test_an_end_within_a_verified_span_frees_each_block_once",
        f"{ENGINE}/test_core.py::test_tokens_after_a_stop_are_dropped_from_a_verified_span",
    ),
    3: (
        "test_blocks_that_left_a_window_serve_others",
        f"{ALLOCATORS}::test_no_block_in_sight_of_a_window_is_handed_out_again",
    ),
    4: (
        "test_a_plan_that_fails_half_way_holds_nothing",
        f"{ALLOCATORS}::test_all_groups_or_nothing",
        f"{ALLOCATORS}::test_a_failed_transaction_leaves_nothing",
    ),
    5: ("test_a_preempted_hit_that_ends_within_a_block_leaks_nothing",),
    6: (
        f"{ENGINE}/test_prefix_news.py"
        "::test_a_sequence_preempted_after_a_reset_is_computed_and_named_anew",
    ),
    7: ("test_the_block_that_has_the_name_is_the_one_that_is_kept",),
    8: (
        f"{ENGINE}/test_prefix_cache_use.py::test_a_block_given_away_in_this_plan_is_no_hit",
        "plugins/prefix_cache/tests/test_eviction.py"
        "::test_names_are_gone_before_their_blocks_return",
    ),
    10: (f"{ALLOCATORS}::test_pinned_blocks_outlive_their_sequence",),
    11: (
        f"{ALLOCATORS}::test_pins_end_at_their_deadline",
        f"{ALLOCATORS}::test_fence_frees_what_older_steps_held",
    ),
    12: (f"{ENGINE}/test_core.py::test_abort_in_every_state",),
    13: ("test_one_preempted_at_the_end_of_its_prompt_leaves_the_prompts_blocks",),
    # Hangs and livelocks.
    14: (f"{ENGINE}/test_core.py::test_a_refusal_for_lack_of_kv_says_the_numbers",),
    15: ("test_two_that_begin_with_hits_do_not_keep_each_other_from_the_rest",),
    16: (
        f"{ENGINE}/test_step_builder.py::test_preempting_gives_back_tokens_rows_and_blocks_at_once",
        f"{ALLOCATORS}::test_release_waits_for_the_fence",
    ),
    17: (f"{ENGINE}/test_core.py::test_a_queue_that_never_moves_is_failed_with_the_ledger",),
    18: (f"{PRIORITY}::test_who_was_raised_ends_while_higher_classes_fill_the_pool",),
    19: (f"{ENGINE}/test_invariance.py::test_a_pool_for_one_sequence_serves_many",),
    20: (f"{ENGINE}/test_room_to_grow.py::test_one_that_fills_the_pool_begins_when_nothing_runs",),
    21: (f"{ENGINE}/test_invariance.py::test_the_oldest_is_never_preempted",),
    22: (
        f"{ENGINE}/test_step_builder.py"
        "::test_requests_for_tokens_are_cut_and_second_entries_refused",
        f"{ENGINE}/test_core.py::test_a_failing_executor_ends_all_requests",
    ),
    23: ("test_a_window_pool_for_one_serves_many",),
    24: ("test_a_prompt_of_more_than_32k_is_admitted",),
    25: ("test_one_that_cannot_go_on_fails_alone_with_the_numbers",),
    26: ("test_after_a_preemption_each_step_brings_everybody_a_token",),
    # Order and accounting.
    27: (
        f"{ENGINE}/test_step_builder.py::test_preempting_gives_back_tokens_rows_and_blocks_at_once",
    ),
    28: ("test_a_preempted_sequence_keeps_its_place",),
    29: (
        f"{PRIORITY}::test_a_higher_class_takes_as_much_kv_as_it_needs",
        "tests/system/test_scheduler_policies.py::test_a_higher_class_overtakes",
    ),
    30: (
        f"{ENGINE}/test_invariance.py::test_tokens_depend_on_the_request_alone",
        "tests/system/test_invariance.py::test_pairs_of_ways_to_run",
    ),
    # Wrong outputs.
    31: ("test_a_prompt_preempted_half_way_poisons_no_prefix",),
    32: (
        "test_pinned_blocks_of_a_preempted_sequence_stay",
        f"{ENGINE}/test_invariance.py::test_pinned_blocks_are_copied_before_a_sequence_goes_on",
    ),
    33: (
        f"{ALLOCATORS}::test_all_blocks_but_block_zero_are_handed_out",
        "core/pegboard/testing/attention.py::test_only_the_rows_own_blocks_are_written",
    ),
    35: (
        f"{ENGINE}/test_core.py::test_salts_share_no_kv_and_tenants_do",
        "core/pegboard/testing/kv_transfer.py::test_fingerprints_are_kept_apart",
    ),
    36: ("test_slots_for_drafts_cost_no_block_that_is_needed",),
    37: (
        "core/pegboard/testing/attention.py::test_entries_that_are_not_a_rows_may_be_anything",
        "core/tests/runner/test_runner.py::test_a_resumed_sequence_goes_on_with_the_same_tokens",
    ),
    39: ("test_windows_and_drafts_have_hits_and_say_so",),
    40: (
        "core/tests/plugins/test_composition.py::test_the_pool_never_exceeds_its_budget",
        "tests/system/test_bad_input.py"
        "::test_too_little_memory_for_one_sequence_says_how_many_tokens_would_fit",
    ),
}

NOT_POSED: dict[int, str] = {
    9: "an engine loads no KV in the background, so there is no load to abort",
    34: "prompts are token ids: there are no images whose keys could be shared",
    38: "weights do not change under a running engine, and KV does not outlive one",
}

PROMPT = list(range(1, 31))


@cache
def _functions(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_report_is_posed_or_the_reason_said() -> None:
    assert sorted([*POSED, *NOT_POSED]) == list(range(1, 41))


@pytest.mark.parametrize("number", POSED)
def test_what_is_named_exists(number: int) -> None:
    for test in POSED[number]:
        path, _, name = test.rpartition("::")
        assert name in _functions(ROOT / path if path else Path(__file__)), test


def test_no_test_of_this_file_is_left_out() -> None:
    named = {test for tests in POSED.values() for test in tests}
    own = {name for name in _functions(Path(__file__)) if name.startswith("test_")}
    about_the_list = {
        "test_every_report_is_posed_or_the_reason_said",
        "test_what_is_named_exists",
        "test_no_test_of_this_file_is_left_out",
    }
    assert own - about_the_list <= named


class Preempting(FCFS):
    """Plans as FCFS does, but for the plans in which a test chooses a victim: nobody is admitted then."""

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self.victims: Iterator[int] = iter(())
        """Places among those that run, one a plan; negative: nobody."""

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        place = next(self.victims, -1)
        if place < 0:
            super().plan(queue, step)
            return
        assert step.preempt(queue.running[place])
        for seq in queue.running:
            step.add(seq, seq.num_pending)


def _preempting(victims: list[int]) -> Callable[[SchedulerContext], Scheduler]:
    """Makes a scheduler with these victims."""

    def make(context: SchedulerContext) -> Scheduler:
        scheduler = Preempting(context)
        scheduler.victims = iter(victims)
        return scheduler

    return make


def _all_free(engine: Any) -> bool:
    """Whether every block is free once the cache has given up its names."""
    engine.core.reset_prefix_cache()
    return all(ledger.free == ledger.total for ledger in engine.core.ledger())


def test_blocks_that_several_hold_are_counted_once(bench: Make, dict_cache: Any) -> None:
    engine = bench(cache=dict_cache)
    engine.add("first", PROMPT, max_tokens=1)
    engine.run()
    assert engine.core.ledger()[0].cached == 7
    for name in "ab":
        engine.add(name, PROMPT, max_tokens=2)
    engine.step()
    (ledger,) = engine.core.ledger()
    # Both have the seven blocks and one of their own; the cache's are theirs too.
    assert (ledger.held, ledger.cached, ledger.free) == (9, 0, 55)
    engine.run()
    (ledger,) = engine.core.ledger()
    assert (ledger.held, ledger.cached, ledger.free) == (0, 7, 57)


def test_an_end_within_a_verified_span_frees_each_block_once(
    bench: Make, expected: Expected
) -> None:
    tokens = expected(PROMPT, 20)
    for stop in tokens:
        engine = bench(num_speculative_tokens=6)
        engine.add("stops", PROMPT, max_tokens=20, stop_token_ids=(stop,))
        engine.add("aborted", PROMPT, max_tokens=20)
        engine.step()
        engine.step()
        engine.core.abort("aborted")
        outputs = engine.run()
        assert outputs["stops", 0].token_ids == tokens[: tokens.index(stop) + 1]
        assert engine.core.ledger()[0].free == 64


def test_blocks_that_left_a_window_serve_others(bench: Make, expected: Expected) -> None:
    engine = bench(
        block_sizes=(4, 1),
        windows=(None, 5),
        num_blocks=(65, 15),
        max_num_batched_tokens=5,
        scheduler=_preempting([-1] * 12 + [1] + [-1] * 5 + [1]),
    )
    for name in "abc":
        engine.add(name, PROMPT, max_tokens=20)
    outputs = engine.run()
    for name in "abc":
        assert outputs[name, 0].token_ids == expected(PROMPT, 20)
    assert [ledger.free for ledger in engine.core.ledger()] == [64, 14]


class HalfWay(FCFS):
    """Admits what it can, and raises."""

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        super().plan(queue, step)
        raise RuntimeError("half way")


def test_a_plan_that_fails_half_way_holds_nothing(bench: Make, expected: Expected) -> None:
    class One(FCFS):
        def plan(self, queue: QueueView, step: StepBuilder) -> None:
            for seq in queue.running or queue.waiting[:1]:
                step.add(seq, seq.num_pending)

    only_one = One(SchedulerContext(8, 64, 128))
    engine = bench(scheduler=HalfWay, fallback_scheduler=only_one)
    for name in "ab":
        engine.add(name, PROMPT, max_tokens=3)
    engine.step()
    assert (engine.core.num_running, engine.core.ledger()[0].held) == (1, 8)
    outputs = engine.run()
    assert all(outputs[name, 0].token_ids == expected(PROMPT, 3) for name in "ab")


@pytest.mark.parametrize("block_size", [2, 4, 7, 16])
def test_a_preempted_hit_that_ends_within_a_block_leaks_nothing(
    bench: Make, expected: Expected, dict_cache: Any, block_size: int
) -> None:
    victims = [-1] * 2 + [1, -1, -1] * 6
    engine = bench(
        block_sizes=(block_size,), cache=dict_cache, scheduler=_preempting(victims), num_blocks=129
    )
    for number in range(4):
        engine.add(str(number), [*PROMPT[: 17 + number], 90 + number], max_tokens=9, n=2)
    outputs = engine.run()
    for number in range(4):
        prompt = [*PROMPT[: 17 + number], 90 + number]
        for index in range(2):
            assert outputs[str(number), index].token_ids == expected(prompt, 9, 0, index)
    assert _all_free(engine)


class Impatient(Scheduler):
    """Lets everybody compute at once, whoever else computes the same."""

    def __init__(self, context: SchedulerContext) -> None: ...

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        for seq in (*queue.running, *queue.waiting):
            step.add(seq, seq.num_pending)


def test_the_block_that_has_the_name_is_the_one_that_is_kept(
    bench: Make, expected: Expected, dict_cache: Any
) -> None:
    engine = bench(cache=dict_cache, scheduler=Impatient, num_blocks=33)
    engine.add("named", PROMPT, max_tokens=8)
    engine.add("twin", PROMPT, max_tokens=2)
    engine.step()
    assert engine.core.ledger()[0].held == 16, "each computed all of it"
    engine.run()
    # The twin ended first. Its blocks are used by others now; the named ones are not.
    assert engine.core.ledger()[0].cached == 9
    engine.add("other", [90, *PROMPT, *PROMPT], max_tokens=20)
    engine.run()
    engine.add("hits", PROMPT, max_tokens=3)
    output = engine.run()["hits", 0]
    assert (output.token_ids, output.last.num_cached_tokens) == (expected(PROMPT, 3), 28)
    assert _all_free(engine)


@pytest.mark.parametrize("depth", [1])
def test_one_preempted_at_the_end_of_its_prompt_leaves_the_prompts_blocks(
    bench: Make, expected: Expected, dict_cache: Any
) -> None:
    # Ten tokens a step beside the first one's: the victim's prompt would be done in the third.
    scheduler = _preempting([-1, -1, 1])
    engine = bench(cache=dict_cache, scheduler=scheduler, max_num_batched_tokens=11)
    engine.add("first", [7], max_tokens=12)
    engine.add("victim", PROMPT, max_tokens=1)
    assert engine.run()["victim", 0].token_ids == expected(PROMPT, 1)
    admitted = [row.token_ids[0] for batch in engine.worker.batches for row in batch.admitted]
    assert admitted == [7, 1, 1]
    engine.add("next", PROMPT, max_tokens=2)
    output = engine.run()["next", 0]
    assert (output.token_ids, output.last.num_cached_tokens) == (expected(PROMPT, 2), 28)


def test_two_that_begin_with_hits_do_not_keep_each_other_from_the_rest(
    bench: Make, expected: Expected, dict_cache: Any
) -> None:
    """Sixteen blocks: five of each hit, and either of them needs fifteen in the end."""
    engine = bench(cache=dict_cache, num_blocks=17, max_num_batched_tokens=8)
    prompts = {name: [start + i for i in range(20)] for name, start in (("a", 0), ("b", 40))}
    for name, prompt in prompts.items():
        engine.add(f"warm {name}", [*prompt, 1], max_tokens=1)
        engine.run()
    for name, prompt in prompts.items():
        engine.add(name, [*prompt, *range(15)], max_tokens=25)
    outputs = engine.run()
    for name, prompt in prompts.items():
        assert outputs[name, 0].token_ids == expected([*prompt, *range(15)], 25)
    assert outputs["a", 0].last.num_cached_tokens == 20


def test_a_window_pool_for_one_serves_many(bench: Make, expected: Expected) -> None:
    """A window of five and a step of four need eight tokens, in three blocks at most."""
    engine = bench(windows=(5,), num_blocks=4, max_num_batched_tokens=4, max_num_seqs=4)
    for name in "abcd":
        engine.add(name, PROMPT, max_tokens=20)
    outputs = engine.run()
    assert all(outputs[name, 0].token_ids == expected(PROMPT, 20) for name in "abcd")


def test_a_prompt_of_more_than_32k_is_admitted(bench: Make, expected: Expected) -> None:
    engine = bench(
        block_sizes=(64, 16),
        windows=(None, 100),
        num_blocks=(600, 700),
        max_model_len=36_000,
        max_num_batched_tokens=8192,
    )
    prompt = [number % 97 for number in range(33_000)]
    engine.add("long", prompt, max_tokens=2)
    engine.add("short", [1, 2], max_tokens=2)
    outputs = engine.run()
    assert outputs["long", 0].token_ids == expected(prompt, 2)
    assert outputs["short", 0].token_ids == expected([1, 2], 2)


def test_one_that_cannot_go_on_fails_alone_with_the_numbers(
    bench: Make, expected: Expected
) -> None:
    engine = bench(num_blocks=13)
    engine.add("lends", PROMPT, max_tokens=2)
    engine.step()
    engine.allocator.pin("transfer", 1, deadline=0.0)
    engine.run()
    assert engine.core.ledger()[0].pinned == 8
    engine.add("grows", [1, 2, 3], max_tokens=30)
    error = engine.run()["grows", 0].last.error
    assert error is not None and "pinned=8" in error and "total=12" in error
    assert engine.outputs["grows", 0].token_ids == expected([1, 2, 3], 14)
    engine.add("fits", [1, 2, 3], max_tokens=10)
    assert engine.run()["fits", 0].token_ids == expected([1, 2, 3], 10)
    engine.allocator.unpin("transfer")
    engine.add("again", [1, 2, 3], max_tokens=30)
    assert engine.run()["again", 0].token_ids == expected([1, 2, 3], 30)


def test_after_a_preemption_each_step_brings_everybody_a_token(bench: Make) -> None:
    engine = bench(scheduler=_preempting([-1] * 10 + [2, 1]))
    for name in "abc":
        engine.add(name, PROMPT[:8], max_tokens=40)
    for _ in range(13):
        engine.step()
    assert engine.core.num_running == 3
    for _ in range(20):
        assert {delta.request_id for delta in engine.step()} == set("abc")


@pytest.mark.parametrize("depth", [1])
def test_a_preempted_sequence_keeps_its_place(bench: Make) -> None:
    engine = bench(max_num_seqs=2, scheduler=_preempting([-1, -1, -1, 1]))
    for name in "abcd":
        engine.add(name, [ord(name) - 90, 2], max_tokens=9)
    while engine.core.has_work():
        engine.step()
    admitted = [row.token_ids[0] for batch in engine.worker.batches for row in batch.admitted]
    a, b, c, d = (ord(name) - 90 for name in "abcd")
    assert admitted == [a, b, b, c, d]


def test_a_prompt_preempted_half_way_poisons_no_prefix(
    bench: Make, expected: Expected, dict_cache: Any
) -> None:
    """Its blocks are named as they are filled, given back, and found by itself and by others."""
    prompt = list(range(50))
    engine = bench(
        cache=dict_cache,
        scheduler=_preempting([-1, -1, 1, -1, 1]),
        num_blocks=22,
        max_num_batched_tokens=10,
    )
    engine.add("first", [90], max_tokens=20)
    engine.add("half way", prompt, max_tokens=4)
    for _ in range(3):
        engine.step()
    named = [len(tokens) for _, tokens in engine.cache.names[0]]
    assert 0 < max(named) < 50
    engine.add("twin", prompt, max_tokens=4)
    engine.add("fills", [80] * 40, max_tokens=20)
    engine.add("later", prompt, max_tokens=4)
    outputs = engine.run()
    for name in ("half way", "twin", "later"):
        assert outputs[name, 0].token_ids == expected(prompt, 4)
    assert outputs["twin", 0].last.num_cached_tokens > 0
    assert _all_free(engine)


def test_pinned_blocks_of_a_preempted_sequence_stay(bench: Make, expected: Expected) -> None:
    engine = bench(scheduler=_preempting([-1] * 5 + [1]), num_blocks=25)
    engine.add("first", [7], max_tokens=30)
    engine.add("victim", PROMPT, max_tokens=20)
    for _ in range(5):
        engine.step()
    (blocks,) = engine.allocator.pin("transfer", 2, deadline=0.0)
    pinned = {key: value for key, value in engine.worker.kv[0].items() if key[0] in blocks}
    assert len(pinned) == 30 + 4
    engine.step()
    engine.add("takes what is free", [80] * 10, max_tokens=3)
    outputs = engine.run()
    assert outputs["victim", 0].token_ids == expected(PROMPT, 20)
    assert pinned.items() <= engine.worker.kv[0].items()


@pytest.mark.parametrize("windows", [(None,), (3,), (None, 3)])
def test_slots_for_drafts_cost_no_block_that_is_needed(
    bench: Make, expected: Expected, windows: tuple[int | None, ...]
) -> None:
    for length in range(1, 10):
        engine = bench(
            block_sizes=(4, 2)[: len(windows)], windows=windows, num_speculative_tokens=4
        )
        engine.add("a", PROMPT[:length], max_tokens=17)
        engine.add("b", PROMPT[1 : length + 1], max_tokens=17, n=2)
        outputs = engine.run()
        assert outputs["a", 0].token_ids == expected(PROMPT[:length], 17)
        for index in range(2):
            tokens = expected(PROMPT[1 : length + 1], 17, 0, index)
            assert outputs["b", index].token_ids == tokens


class Hits(Observer):
    """Prompt tokens that were looked up, and found."""

    def __init__(self) -> None:
        self.num_looked_up = self.num_found = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.num_looked_up += event.num_prefix_queries
            self.num_found += event.num_prefix_hits

    def close(self) -> None:
        pass


def test_windows_and_drafts_have_hits_and_say_so(
    bench: Make, expected: Expected, dict_cache: Any
) -> None:
    hits = Hits()
    engine = bench(
        cache=dict_cache,
        block_sizes=(4, 2),
        windows=(None, 6),
        num_speculative_tokens=3,
        observers=(hits,),
    )
    for number in range(3):
        engine.add(str(number), PROMPT, max_tokens=8, seed=number)
        assert engine.run()[str(number), 0].token_ids == expected(PROMPT, 8, number)
    assert (hits.num_looked_up, hits.num_found) == (3 * 30, 2 * 28)
