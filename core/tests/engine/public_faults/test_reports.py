"""Faults that users of other engines have reported, each with its small input.

`POSED` says for each of the forty which tests pose it: those of this folder, or those that stand
where the part at fault is tested. `NOT_POSED` says why the others cannot be posed here.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
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
        "tests/system/bad_input/test_bad_input.py"
        "::test_too_little_memory_for_one_sequence_says_how_many_tokens_would_fit",
    ),
}

NOT_POSED: dict[int, str] = {
    9: "an engine loads no KV in the background, so there is no load to abort",
    34: "prompts are token ids: there are no images whose keys could be shared",
    38: "weights do not change under a running engine, and KV does not outlive one",
}


@cache
def _functions(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _posed_here() -> frozenset[str]:
    """The tests in the other files of this folder."""
    files = [file for file in HERE.glob("test_*.py") if file != Path(__file__)]
    return frozenset(
        name for file in files for name in _functions(file) if name.startswith("test_")
    )


def test_every_report_is_posed_or_the_reason_said() -> None:
    assert sorted([*POSED, *NOT_POSED]) == list(range(1, 41))


@pytest.mark.parametrize("number", POSED)
def test_what_is_named_exists(number: int) -> None:
    for test in POSED[number]:
        path, _, name = test.rpartition("::")
        assert name in (_functions(ROOT / path) if path else _posed_here()), test


def test_no_test_of_this_folder_is_left_out() -> None:
    named = {test for tests in POSED.values() for test in tests}
    assert _posed_here() <= named
