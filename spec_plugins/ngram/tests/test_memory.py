"""Texts of every kind take no more than the ledger says."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from pegboard.interfaces.model import ModelShape
from pegboard.interfaces.workload import Workload
from pegboard_ngram.lookup import Text
from pegboard_ngram.memory import estimate_ngram, estimate_suffix
from pegboard_ngram.ngram import NgramText
from pegboard_ngram.options import LookupOptions, NgramOptions, SuffixOptions
from pegboard_ngram.recent import RecentOutputs
from pegboard_ngram.suffix import SuffixText

NUM_TOKENS = 1200
VOCAB_SIZE = 150_000

OWNER = ("", "")


def texts() -> Iterator[tuple[str, list[int]]]:
    """Names and tokens. A Fibonacci word has the most states that branch, De Bruijn's all n-grams."""
    chance = random.Random(1)
    high = VOCAB_SIZE - 1
    yield "all different", chance.sample(range(VOCAB_SIZE), NUM_TOKENS)
    yield "one token", [high] * NUM_TOKENS
    for count in (2, 3, 5, 50):
        yield f"{count} tokens", [high - chance.randrange(count) for _ in range(NUM_TOKENS)]
    word, longer = [high], [high, high - 1]
    while len(longer) < NUM_TOKENS:
        word, longer = longer, longer + word
    yield "fibonacci", longer[:NUM_TOKENS]
    phrase = [high - chance.randrange(300) for _ in range(40)]
    yield (
        "a phrase",
        [
            high - chance.randrange(300) if chance.random() < 0.05 else phrase[at % 40]
            for at in range(NUM_TOKENS)
        ],
    )


def workload(shape: ModelShape | None, options: LookupOptions, max_model_len: int) -> Workload:
    return Workload(shape, "float32", "cpu", 1, 512, max_model_len, 5, options)  # type: ignore[arg-type]


def taken(make: Callable[[], object]) -> int:
    """The most bytes that were held while something was made."""
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        del made


def grown(text: Text, tokens: list[int]) -> Text:
    for token in tokens:
        text.append(token)
    return text


@pytest.mark.parametrize("max_tokens", [NUM_TOKENS // 3, 2 * NUM_TOKENS])
@pytest.mark.parametrize(("name", "tokens"), texts())
def test_a_row_takes_no_more_than_was_said(name: str, tokens: list[int], max_tokens: int) -> None:
    ngram = NgramOptions(prompt_lookup_min=1, prompt_lookup_max=6, max_tokens=max_tokens)
    suffix = SuffixOptions(max_tokens=max_tokens)
    most = estimate_ngram(workload(None, ngram, NUM_TOKENS))
    # A prompt's numbers are the row's own; those of one that is given here were there before.
    own = [token + 1 for token in tokens]
    assert taken(lambda: NgramText([token - 1 for token in own], ngram)) <= most
    assert taken(lambda: grown(NgramText(tokens[:1], ngram), tokens)) <= most
    most = estimate_suffix(workload(None, suffix, NUM_TOKENS))
    recent = RecentOutputs(0)
    assert taken(lambda: SuffixText([token - 1 for token in own], suffix, recent, OWNER)) <= most
    assert taken(lambda: grown(SuffixText(tokens[:1], suffix, recent, OWNER), tokens)) <= most


@pytest.mark.parametrize("num_owners", [1, 3, 40])
@pytest.mark.parametrize("num_tokens", [7, 300, 1200])
def test_recent_outputs_take_no_more_than_was_said(num_tokens: int, num_owners: int) -> None:
    recent_tokens = 1500
    options = SuffixOptions(recent_tokens=recent_tokens)
    chance = random.Random(1)
    high = VOCAB_SIZE - 1

    def run() -> RecentOutputs:
        recent = RecentOutputs(recent_tokens)
        for turn in range(50):
            tokens = [high - chance.randrange(3) for _ in range(num_tokens)]
            recent.add((f"tenant {turn % num_owners}", ""), tokens)
        return recent

    most = estimate_suffix(workload(None, options, 64)) + 48 * num_tokens
    assert taken(run) <= most


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 10, 64, 101])
def test_recent_outputs_are_no_more_than_max_tokens(max_tokens: int) -> None:
    chance = random.Random(max_tokens)
    recent = RecentOutputs(max_tokens)
    owners = [(f"tenant {number}", "") for number in range(4)]
    for _ in range(200):
        owner = chance.choice(owners)
        recent.add(owner, [chance.randrange(9) for _ in range(chance.randrange(12))])
        held = [one for each in owners for one in recent.of(each)]
        assert sum(one.num_tokens for one in held) <= max_tokens
        assert len({one.number for one in held}) == len(held)


def test_the_newest_output_is_kept_and_the_idlest_owner_loses_first() -> None:
    recent = RecentOutputs(64)
    for number in range(8):
        recent.add(("busy", ""), [number] * 6)
        assert any(number in one.outputs.tokens for one in recent.of(("busy", "")))
    recent.add(("idle", ""), [100] * 20)
    for number in range(10):
        recent.add(("busy", ""), [number] * 12)
    assert recent.of(("idle", "")) == []
    assert recent.of(("busy", ""))
