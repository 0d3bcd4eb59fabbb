"""Microseconds that a token costs a row, by drafter and kind of text: `python cost_per_token.py`.

Time of the processor. `read` is of a prompt's token, `step` of one that is appended and guessed after.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence

from pegboard_ngram.lookup import Text
from pegboard_ngram.ngram import NgramText
from pegboard_ngram.options import NgramOptions, SuffixOptions
from pegboard_ngram.recent import RecentOutputs
from pegboard_ngram.suffix import SuffixText

OWNER = ("", "")
NUM_GUESSES = 5


def texts(num_tokens: int) -> dict[str, list[int]]:
    chance = random.Random(1)
    words = [chance.randrange(49_000) for _ in range(3000)]
    phrase = [chance.choice(words) for _ in range(60)]
    return {
        "open": [words[int(chance.paretovariate(0.5)) % 3000] for _ in range(num_tokens)],
        "copied": [phrase[at % 60] for at in range(num_tokens)],
        "one token": [7] * num_tokens,
    }


def measure(make: Callable[[Sequence[int]], Text], tokens: list[int]) -> tuple[float, float]:
    """Microseconds of reading a token, and of a step."""
    half = len(tokens) // 2
    started = time.process_time()
    text = make(tokens[:half])
    read = time.process_time()
    for token in tokens[half:]:
        text.append(token)
        text.guess(NUM_GUESSES)
    ended = time.process_time()
    return (read - started) / half * 1e6, (ended - read) / (len(tokens) - half) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    recent = RecentOutputs(20_000)
    for tokens in texts(8000).values():
        recent.add(OWNER, tokens)
    ngram, suffix = NgramOptions(max_tokens=2**18), SuffixOptions(max_tokens=2**20)
    makers: dict[str, Callable[[Sequence[int]], Text]] = {
        "ngram": lambda tokens: NgramText(tokens, ngram),
        "suffix": lambda tokens: SuffixText(tokens, suffix, RecentOutputs(0), OWNER),
        "suffix, recent": lambda tokens: SuffixText(tokens, suffix, recent, OWNER),
    }
    for kind, tokens in texts(options.tokens).items():
        for name, make in makers.items():
            rounds = [measure(make, tokens) for _ in range(options.rounds)]
            read, step = (sorted(times)[len(times) // 2] for times in zip(*rounds, strict=True))
            print(f"{kind:10} {name:15} read {read:6.2f} us  step {step:6.2f} us")


if __name__ == "__main__":
    main()
