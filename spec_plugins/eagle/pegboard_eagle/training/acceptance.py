"""How many of a head's guesses the target takes: the engine drafts with it on held-out prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pegboard import Engine, SamplingParams
from pegboard.errors import EngineError

CHAINS = (1, 2, 3, 5)
"""Numbers of draft tokens that are tried."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to draft.

    Attributes:
        num_speculative_tokens: most draft tokens a step.
        options: of the drafter.
    """

    num_speculative_tokens: int
    options: Mapping[str, int]

    @property
    def name(self) -> str:
        return "tree" if self.options else f"chain of {self.num_speculative_tokens}"


WAYS = (*(Way(k, {}) for k in CHAINS), Way(32, {"top_k": 8, "depth": 6}))


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What came of a way to draft.

    Attributes:
        num_speculative_tokens, options: the way.
        num_steps: steps of all sequences, prompts not counted.
        tokens_a_step: the target's own token of each included.
        reached: share of steps in which the draft was right up to each position.
    """

    num_speculative_tokens: int
    options: dict[str, int]
    num_steps: int
    tokens_a_step: float
    reached: list[float]


def measure(
    config: Mapping[str, Any],
    head: Path,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    way: Way,
) -> Acceptance:
    """What comes of a way to draft.

    Args:
        config: of the engine, without a drafter.
        head: the folder that the head is in.

    Raises:
        EngineError: the drafter was cut off.
    """
    drafter = {
        "name": "eagle",
        "model": str(head),
        "num_speculative_tokens": way.num_speculative_tokens,
        "policy": "fixed",
        "options": dict(way.options),
    }
    with Engine({**config, "drafter": drafter}) as engine:
        counts = _counts(engine, prompts, params)
        if engine.core.cut_off:
            raise EngineError(f"the drafter was cut off: {engine.core.cut_off}")
    num_steps = max(len(counts), 1)
    depths = range(1, way.options.get("depth", way.num_speculative_tokens) + 1)
    return Acceptance(
        way.num_speculative_tokens,
        dict(way.options),
        len(counts),
        round(sum(counts) / num_steps, 4),
        [round(sum(count > depth for count in counts) / num_steps, 4) for depth in depths],
    )


def write_report(
    path: Path, about: Mapping[str, Any], found: Sequence[Acceptance], params: SamplingParams
) -> None:
    """Writes what came of the ways to draft."""
    written = {
        **about,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "ways": [asdict(one) for one in found],
    }
    path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _counts(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[int]:
    """Tokens of each step of each sequence, but for the first, which no draft precedes."""
    for prompt in prompts:
        engine.submit(prompt, params)
    counts: list[int] = []
    begun: set[str] = set()
    while engine.has_work():
        for delta in engine.step():
            if delta.request_id in begun and delta.token_ids:
                counts.append(len(delta.token_ids))
            begun.add(delta.request_id)
    return counts
