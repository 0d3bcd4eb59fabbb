"""Stop texts against a search of the whole text."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from pegboard.engine.stops import TextStream, stop_texts

Make = Callable[..., Any]

letters = st.text(alphabet="ab", min_size=1, max_size=5)


class Pieces:
    """A detokenizer whose tokens are pieces of text; it keeps the last piece for the end."""

    def __init__(self, pieces: Sequence[str], rest: str) -> None:
        self.pieces = pieces
        self.rest = rest

    def add(self, token_ids: Sequence[int]) -> str:
        return "".join(self.pieces[token_id] for token_id in token_ids)

    def finish(self) -> str:
        return self.rest


def _whole(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The text up to the stop text that is complete first; of several the longest."""
    for end in range(len(text) + 1):
        found = [word for word in stop if text[:end].endswith(word)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=7 * settings().max_examples)
@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=12),
    rest=st.text(alphabet="ab", max_size=3),
    stop=st.lists(letters, max_size=4),
)
def test_shown_text_is_the_text_before_the_stop_however_it_arrives(
    pieces: list[str], rest: str, stop: list[str]
) -> None:
    text, stopped_by = _whole("".join(pieces) + rest, stop)
    stream = TextStream(Pieces(pieces, rest), stop_texts(stop, None))
    shown = ""
    for token_id in range(len(pieces)):
        shown += stream.add(token_id)
        assert text.startswith(shown), "text had to be taken back"
        if stream.stopped_by is not None:
            break
    shown += stream.finish()
    assert (shown, stream.stopped_by) == (text, stopped_by)


@given(pieces=st.lists(st.text(max_size=4), max_size=12))
def test_without_stop_texts_nothing_is_held_back(pieces: list[str]) -> None:
    stream = TextStream(Pieces(pieces, "."), ())
    assert [stream.add(index) for index in range(len(pieces))] == pieces
    assert stream.finish() == "."


def test_only_what_could_become_a_stop_is_held_back() -> None:
    stream = TextStream(
        Pieces(["one tw", "elve", " two", " th", "ree"], ""), stop_texts(["two three"], 9)
    )
    assert [stream.add(index) for index in range(5)] == ["one ", "twelve", " ", "", ""]
    assert stream.stopped_by == "two three"


@settings(max_examples=4 * settings().max_examples)
@given(
    early=st.text(alphabet="ab", max_size=8),
    late=st.text(alphabet="ab", max_size=8),
    stop=st.lists(letters, min_size=1, max_size=3),
)
def test_a_stop_text_that_is_complete_too_early_is_passed_over(
    early: str, late: str, stop: list[str]
) -> None:
    text = early + late
    ends = range(len(early) + 1, len(text) + 1)
    found = [
        (end, word)
        for end in ends
        for word in stop
        if len(word) <= end and text[:end].endswith(word)
    ]
    first = min((end for end, _ in found), default=None)
    expected, stopped_by = text, None
    if first is not None:
        stopped_by = max((word for end, word in found if end == first), key=len)
        expected = text[: first - len(stopped_by)]

    stream = TextStream(Pieces([*early, *late], ""), stop_texts(stop, None))
    shown = ""
    for index in range(len(text)):
        shown += stream.add(index, may_stop=index >= len(early))
        if stream.stopped_by is not None:
            break
    shown += stream.finish()
    assert (shown, stream.stopped_by) == (expected, stopped_by)


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None, ())
    assert stream.add(3) == "" and stream.finish() == ""


def test_a_long_stop_text_costs_what_the_answer_takes() -> None:
    """Its table, shared by all sequences, grows as far as one of them has matched."""
    tracemalloc.start()
    stop = stop_texts(["ab" * 900_000, "b" * 1_900_000], None)
    streams = [TextStream(Pieces(["ab", "c"], ""), stop) for _ in range(128)]
    for stream in streams:
        assert "".join(map(stream.add, [0] * 40 + [1])) == "ab" * 40 + "c"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * 2**20, "two texts of about 2 MB each, and little else"


def test_no_stop_text_is_kept_that_is_longer_than_any_answer() -> None:
    assert [stop.text for stop in stop_texts(["abc", "ab", "abcd", "ab"], 3)] == ["abc", "ab"]


def test_the_longest_answer_is_counted_in_bytes_of_its_tokens(bench: Make) -> None:
    class Ones:
        def add(self, token_ids: Sequence[int]) -> str:
            return "1" * len(token_ids)

        def finish(self) -> str:
            return ""

    engine = bench(make_detokenizer=Ones, max_token_bytes=1)
    for name, length in (("fits", 9), ("too long", 10)):
        engine.add(name, [1], max_tokens=9, stop=("1" * length,))
    outputs = engine.run()
    assert [outputs[name, 0].last.finish_reason for name in ("fits", "too long")] == [
        "stop",
        "length",
    ]
