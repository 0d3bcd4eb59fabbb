"""What is found is what a comparison of everything with everything finds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard_ngram.automaton import MAX_LINKS, SuffixAutomaton
from pegboard_ngram.ngram import NgramText
from pegboard_ngram.options import MAX_NGRAM, NgramOptions, SuffixOptions
from pegboard_ngram.recent import RecentOutputs
from pegboard_ngram.suffix import MAX_MATCH, SuffixText

OWNER = ("a", "b")
SHORT = MAX_LINKS
"""Tokens of a text in which every end is up to date."""


def longest_match(tokens: Sequence[int], least: int, most: int) -> tuple[int, int]:
    """How many of the newest tokens stood together before, and the index behind the last such place;
    (0, 0): fewer than `least`. No more than `most` are compared."""
    return match_in(tokens[:-1], tokens, least, most)


def match_in(text: Sequence[int], tokens: Sequence[int], least: int, most: int) -> tuple[int, int]:
    """The same in another text. Matches of it may end where it ends."""
    for length in range(min(most, len(tokens)), least - 1, -1):
        wanted = list(tokens[len(tokens) - length :])
        for end in range(len(text), length - 1, -1):
            if list(text[end - length : end]) == wanted:
                return length, end
    return 0, 0


def continuation(tokens: Sequence[int], behind: int, count: int) -> list[int]:
    """What follows if the text goes on as it did from that index."""
    text = list(tokens)
    for at in range(behind, behind + count):
        text.append(text[at])
    return text[len(tokens) :]


def texts(max_size: int) -> st.SearchStrategy[list[int]]:
    """Of few tokens, so that they repeat themselves; ids as large as they come."""
    ids = st.sampled_from([0, 1, 2, 262_143])
    return st.integers(1, 4).flatmap(
        lambda count: st.lists(st.one_of(ids, st.integers(0, count)), min_size=1, max_size=max_size)
    )


def ngram_text(tokens: list[int], least: int, most: int) -> NgramText:
    options = NgramOptions(
        prompt_lookup_min=least, prompt_lookup_max=most, min_confidence=0, max_tokens=256
    )
    return NgramText(tokens, options)


def suffix_text(
    tokens: list[int], least: int = 1, recent: RecentOutputs | None = None
) -> SuffixText:
    options = SuffixOptions(min_match=least, min_confidence=0, max_tokens=256)
    return SuffixText(tokens, options, recent or RecentOutputs(0), OWNER)


@given(
    texts(80),
    texts(20),
    st.tuples(st.integers(1, MAX_NGRAM), st.integers(1, MAX_NGRAM)).map(sorted),
)
def test_the_longest_ngram_is_found_where_it_stood_last(
    prompt: list[int], output: list[int], sizes: list[int]
) -> None:
    least, most = sizes
    text, tokens = ngram_text(prompt, least, most), list(prompt)
    for token in [*output, None]:
        assert (text.num_matched, text.num_matched and text.behind) == longest_match(
            tokens, least, most
        )
        expected = continuation(tokens, text.behind, 7) if text.num_matched else []
        assert text.guess(7)[0] == expected
        if token is not None:
            text.append(token)
            tokens.append(token)


@given(texts(SHORT - 8), texts(8), st.integers(1, 5))
def test_the_longest_suffix_is_found_where_it_stood_last(
    prompt: list[int], output: list[int], least: int
) -> None:
    text, tokens = suffix_text(prompt, least), list(prompt)
    for token in [*output, None]:
        length, behind = longest_match(tokens, least, len(tokens))
        found = (text.match.num_matched, text.match.behind) if text.match else (0, 0)
        assert found == (length, behind)
        assert text.guess(7)[0] == (continuation(tokens, behind, 7) if length else [])
        if token is not None:
            text.append(token)
            tokens.append(token)


@given(texts(200))
def test_in_long_texts_the_match_is_the_longest_and_stood_there(tokens: list[int]) -> None:
    text = suffix_text(tokens)
    length, _ = longest_match(tokens, 1, len(tokens))
    assert length == (text.match.num_matched if text.match else 0)
    if text.match:
        behind = text.match.behind
        assert tokens[behind - length : behind] == tokens[len(tokens) - length :]
        assert behind < len(tokens)


@given(st.lists(texts(12), max_size=6), texts(20), texts(20))
def test_recent_outputs_are_searched_too(
    outputs: list[list[int]], prompt: list[int], output: list[int]
) -> None:
    """Those that came before the row was taken, and those that come between its tokens."""
    recent = RecentOutputs(1000)
    text, tokens = suffix_text(prompt, 1, recent), list(prompt)
    known: list[list[int]] = []
    for token in output:
        if outputs:
            known.append(outputs.pop())
            recent.add(OWNER, known[-1])
            recent.add(("other", "b"), [7, 7, 7])
        text.append(token)
        tokens.append(token)
        own, _ = longest_match(tokens, 1, len(tokens))
        most = max((match_in(one, tokens, 1, MAX_MATCH)[0] for one in known), default=0)
        followed = max((match_in(one[:-1], tokens, 1, MAX_MATCH)[0] for one in known), default=0)
        found = text.match.num_matched if text.match else 0
        assert max(own, followed) <= found or most > followed
        assert found <= max(own, most)
        if text.match and not text.match.goes_on:
            guessed = text.guess(9)[0]
            wanted = [*tokens[len(tokens) - found :], *guessed]
            assert guessed and any(
                wanted == one[at : at + len(wanted)] for one in known for at in range(len(one))
            )


@given(st.lists(texts(15), min_size=1, max_size=5))
def test_the_automaton_knows_all_strings_and_no_others(read: list[list[int]]) -> None:
    automaton = SuffixAutomaton()
    for one in read:
        automaton.read(one)
    total = sum(map(len, read))
    assert len(automaton.length) <= max(2, 2 * total)
    strings = {tuple(one[i:j]) for one in read for i in range(len(one)) for j in range(i, len(one))}
    strings |= {tuple(one[i:]) for one in read for i in range(len(one))}
    for string in strings:
        state = 0
        for token in string:
            state = automaton.next(state, token)
            assert state > 0
        if string:
            latest = automaton.latest[state]
            assert tuple(automaton.tokens[latest - len(string) : latest]) == string
    alphabet = {token for one in read for token in one}
    for string in random.Random(1).sample(sorted(strings), min(len(strings), 20)):
        for token in alphabet:
            state = 0
            for step in (*string, token):
                state = automaton.next(state, step) if state >= 0 else -1
            assert (state >= 0) == ((*string, token) in strings)


@given(texts(300), st.integers(64, 100))
def test_a_text_beyond_max_tokens_is_searched_in_its_newest_half_at_least(
    tokens: list[int], max_tokens: int
) -> None:
    """It finds nothing that is not there, and what is in the newest half."""
    ngram = NgramText(tokens[:1], NgramOptions(max_tokens=max_tokens, min_confidence=0))
    suffix = SuffixText(
        tokens[:1],
        SuffixOptions(max_tokens=max_tokens, min_confidence=0),
        RecentOutputs(0),
        OWNER,
    )
    for at in range(1, len(tokens)):
        ngram.append(tokens[at])
        suffix.append(tokens[at])
    half = tokens[-(max_tokens // 2) :]
    for found, most in (
        (ngram.num_matched, 4),
        (suffix.match.num_matched if suffix.match else 0, len(tokens)),
    ):
        assert longest_match(half, 2, most)[0] <= found
        assert found <= longest_match(tokens[-max_tokens:], 2, most)[0]


def test_two_ngrams_of_one_key_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegboard_ngram.ngram.KEY_MASK", 1)
    chance = random.Random(3)
    tokens = [chance.randrange(50) for _ in range(60)]
    text = ngram_text(tokens[:20], 2, 4)
    for end in range(20, 60):
        text.append(tokens[end])
        n = text.num_matched
        if n:
            assert tokens[text.behind - n : text.behind] == tokens[end + 1 - n : end + 1]
