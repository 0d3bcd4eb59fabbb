"""Each option does what it says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pydantic import ValidationError

from pegboard.interfaces.drafter import DrafterContext
from pegboard.testing.drafter import Rows
from pegboard_ngram.lookup import Text
from pegboard_ngram.ngram import NgramText
from pegboard_ngram.options import NgramOptions, SuffixOptions
from pegboard_ngram.recent import RecentOutputs
from pegboard_ngram.suffix import Suffix, SuffixText

CONTEXT = DrafterContext(8, 1000, 4, 512)
PHRASE = [5, 6, 7, 8, 9]


def ngram_text(tokens: list[int], **options: float) -> NgramText:
    return NgramText(tokens, NgramOptions.model_validate(options))


def suffix_text(tokens: list[int], **options: float) -> SuffixText:
    return SuffixText(tokens, SuffixOptions.model_validate(options), RecentOutputs(0), ("", ""))


def test_prompt_lookup_max_and_min_bound_a_match() -> None:
    tokens = [*PHRASE, 1, *PHRASE[1:], 2, *PHRASE]
    assert ngram_text(tokens, prompt_lookup_max=4).num_matched == 4
    assert ngram_text(tokens, prompt_lookup_max=3).num_matched == 3
    whole = ngram_text(tokens, prompt_lookup_max=5)
    assert (whole.num_matched, whole.behind) == (5, 5)
    assert ngram_text(tokens, prompt_lookup_min=6, prompt_lookup_max=6).num_matched == 0


def test_min_match_bounds_a_match() -> None:
    tokens = [*PHRASE, 1, *PHRASE]
    assert suffix_text(tokens, min_match=5).match is not None
    assert suffix_text(tokens, min_match=6).match is None


Make = Callable[..., Text]


@pytest.mark.parametrize("make", [ngram_text, suffix_text])
def test_a_draft_ends_below_min_confidence(make: Make) -> None:
    tokens = [*PHRASE * 3, 1, *PHRASE[:3]]
    whole, likely = make(tokens, min_confidence=0), make(tokens, min_confidence=0.3)
    assert len(whole.guess(8)[0]) == 8
    guessed, probabilities = likely.guess(8)
    assert 0 < len(guessed) < 8 and guessed == whole.guess(8)[0][: len(guessed)]
    of_all = 1.0
    for probability in whole.guess(8)[1][: len(guessed) + 1]:
        of_all *= probability
    assert of_all < 0.3
    assert make(tokens, min_confidence=1).guess(8) == ([], [])
    assert probabilities == whole.guess(8)[1][: len(guessed)]


@pytest.mark.parametrize("make", [ngram_text, suffix_text])
def test_the_older_half_is_forgotten_beyond_max_tokens(make: Make) -> None:
    for max_tokens, is_known in ((64, False), (256, True)):
        text = make([*PHRASE, 1], max_tokens=max_tokens)
        for token in range(100, 200):
            text.append(token)
        for token in PHRASE[:4]:
            text.append(token)
        assert (text.guess(1)[0] == [9]) == is_known


def drafts_after_an_output(recent_tokens: int, owner: str = "", num_dropped: int = 0) -> list[int]:
    """What is guessed after the output's second token, by a row that has it in its prompt."""
    drafter = Suffix(
        CONTEXT, SuffixOptions(recent_tokens=recent_tokens, min_confidence=0, min_match=2)
    )
    rows = Rows(drafter, CONTEXT, 0)
    rows.admit(0, [1, 2, 3])
    rows.step({0: 3}, {0: [50, 51, 52, 53, 54, 55]})
    rows.release(0, num_dropped)
    rows.admit(1, [9, 50, 51], owner=(owner, ""))
    nodes = rows.step({1: 2}, {1: [52]}, {1: 4})
    return [token for token, _ in nodes.get(1, [])]


def test_recent_tokens_lets_rows_see_outputs() -> None:
    assert drafts_after_an_output(100) == [53, 54, 55]
    assert drafts_after_an_output(0) == []


def test_another_tenant_sees_none() -> None:
    assert drafts_after_an_output(100, owner="other") == []


def test_tokens_that_never_were_are_not_kept() -> None:
    assert drafts_after_an_output(100, num_dropped=2) == [53]
    assert drafts_after_an_output(100, num_dropped=6) == []


def guesses_behind(rows: Rows) -> list[tuple[int, int]]:
    """Of a row whose last tokens stand in an output that ended."""
    rows.admit(1, [9, 50])
    return rows.step({1: 2}, {1: [51]}, {1: 1}).get(1, [])


@pytest.mark.parametrize("keeps", [True, False])
def test_an_output_is_kept_where_the_request_allows_it(keeps: bool) -> None:
    rows = Rows(Suffix(CONTEXT, SuffixOptions(recent_tokens=100)), CONTEXT, 0)
    rows.admit(0, [1, 2, 3], keeps=keeps)
    rows.step({0: 3}, {0: [50, 51, 52]})
    rows.release(0)
    assert guesses_behind(rows) == ([(52, -1)] if keeps else [])


def test_the_output_of_a_preempted_row_is_kept_once() -> None:
    """It is given back with its first tokens, and taken again with them."""
    drafter = Suffix(CONTEXT, SuffixOptions(recent_tokens=100))
    rows = Rows(drafter, CONTEXT, 0)
    rows.admit(0, [1, 2, 3])
    rows.step({0: 3}, {0: [50, 51, 52]})
    rows.release(0)
    rows.admit(0, [1, 2, 3, 50, 51, 52])
    rows.step({0: 6}, {0: [53, 54, 55]})
    rows.release(0)
    rows.admit(1, [9, 50, 51])
    assert rows.step({1: 3}, {1: [52]}, {1: 8}).get(1, []) == []
    rows.admit(2, [9, 53])
    assert rows.step({2: 2}, {2: [54]}, {2: 8})[2] == [(55, -1)]


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_lookup_min": 0},
        {"prompt_lookup_max": 17},
        {"prompt_lookup_min": 5, "prompt_lookup_max": 4},
        {"prompt_lookup_min": 5},
        {"max_tokens": 63},
        {"min_confidence": 1.5},
        {"min_confidence": float("nan")},
        {"min_match": 2},
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        NgramOptions.model_validate(options)


@pytest.mark.parametrize(
    "options", [{"min_match": 0}, {"recent_tokens": -1}, {"prompt_lookup_min": 2}]
)
def test_what_makes_no_sense_is_refused_by_suffix(options: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        SuffixOptions.model_validate(options)
