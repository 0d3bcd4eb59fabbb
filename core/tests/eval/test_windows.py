"""How a text is cut: each token is scored once, with what is before it in its window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.errors import ConfigError
from pegboard.eval.windows import windows


def test_windows_that_meet_score_all_but_their_first_tokens() -> None:
    first, second = windows(range(7), 4, 4)
    assert (first.token_ids, first.first_scored) == ((0, 1, 2, 3), 1)
    assert (second.token_ids, second.first_scored) == ((4, 5, 6), 1)


def test_bos_stands_before_each_window_and_gives_its_first_token_a_context() -> None:
    first, second = windows(range(6), 4, 3, bos=99)
    assert (first.token_ids, first.first_scored) == ((99, 0, 1, 2), 1)
    assert (second.token_ids, second.first_scored) == ((99, 3, 4, 5), 1)


def test_windows_that_overlap_score_what_those_before_did_not() -> None:
    found = windows(range(8), 4, 2)
    assert [w.token_ids for w in found] == [(0, 1, 2, 3), (2, 3, 4, 5), (4, 5, 6, 7)]
    assert [w.first_scored for w in found] == [1, 2, 2]


def test_a_last_window_of_one_token_is_left_out() -> None:
    assert [w.token_ids for w in windows(range(5), 4, 4)] == [(0, 1, 2, 3)]


@given(st.data())
def test_each_token_is_scored_at_most_once_and_all_are_where_there_is_context(
    data: st.DataObject,
) -> None:
    length = data.draw(st.integers(2, 9))
    bos = data.draw(st.sampled_from([None, 1000]))
    room = length - (bos is not None)
    stride = data.draw(st.integers(1, room))
    text = list(range(data.draw(st.integers(2, 40))))
    found = windows(text, length, stride, bos)
    scored = [token for window in found for token in window.token_ids[window.first_scored :]]
    assert scored == sorted(set(scored))
    assert all(0 < window.first_scored < len(window.token_ids) <= length for window in found)
    without_context = set() if bos is not None else {0} if stride < room else set(text[::stride])
    assert set(text) - set(scored) == without_context


@pytest.mark.parametrize(("stride", "bos"), [(0, None), (5, None), (4, 7)])
def test_a_stride_that_leaves_tokens_out_is_refused(stride: int, bos: int | None) -> None:
    with pytest.raises(ConfigError, match=f"--stride: {stride}; allowed: 1 to"):
        windows(range(9), 4, stride, bos)


@pytest.mark.parametrize("count", [0, 1])
def test_a_text_with_nothing_to_score_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"--data: {count} tokens"):
        windows(range(count), 4, 4)
