"""A result in the words that the terminal and the page share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pegboard.eval.generation import BATCH, Speed
from pegboard.eval.report import Result, Text

if TYPE_CHECKING:
    from rich.table import Table

Row = tuple[str, ...]
"""A name, A's value, and B's if there is one."""


def lead(text: Text, num_scored: int) -> str:
    """The text and its windows, in words."""
    begin = "none begins with bos" if text.bos is None else f"each begins with bos ({text.bos})"
    return (
        f"{num_scored:,} tokens scored of the first {text.num_tokens:,} of {text.file}; windows of"
        f" {text.window} tokens, a stride of {text.stride}, {begin}"
    )


def side_rows(result: Result) -> Iterator[Row]:
    """Rows of each config and its measurements."""
    sides = [side for side in (result.a, result.b) if side is not None]
    yield "config", *(side.ref for side in sides)
    if any(side.model != side.ref for side in sides):
        yield "model", *(side.model for side in sides)
    for name in result.a.about:
        yield name, *(side.about[name] for side in sides)
    perplexities = (result.quality.perplexity_a, result.quality.perplexity_b)
    yield "perplexity", *(f"{value:.4f}" for value in perplexities if value is not None)
    yield "weights, by the ledger", *(_size(side.weight_bytes) for side in sides)
    yield "in all, by the ledger", *(_size(side.total_bytes) for side in sides)
    speeds = [side.speed for side in sides if side.speed is not None]
    if speeds:
        yield from _speed_rows(speeds)


def difference_rows(result: Result) -> Iterator[tuple[str, str]]:
    """Rows of the differences between A and B."""
    found, greedy = result.quality.divergence, result.greedy
    if found is not None:
        error = f"{found.perplexity_ratio:.5f} ± {found.perplexity_ratio_error:.5f}"
        yield "perplexity, A / B", error
        yield "KL divergence from B, mean", f"{found.kl_mean:.6f}"
        yield "  median", f"{found.kl_median:.6f}"
        yield "  99th percentile", f"{found.kl_p99:.6f}"
        yield "  most", f"{found.kl_max:.6f}"
        yield "same most likely token", f"{found.top1_agreement:.2%}"
    if greedy is not None:
        same = round(greedy.identical * greedy.num_prompts)
        yield (
            "same greedy text",
            f"{same} of {greedy.num_prompts} texts of {greedy.num_tokens} tokens;"
            f" {greedy.common_prefix:.0%} of the tokens come before a text's first difference",
        )


def tables(result: Result) -> Iterator[Table]:
    """For a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text as Words

    sides = Table("", box=SIMPLE_HEAD)
    for name in "AB" if result.b else "A":
        sides.add_column(name, overflow="fold")
    for row in side_rows(result):
        sides.add_row(*map(Words, row))
    yield sides
    rows = list(difference_rows(result))
    if rows:
        difference = Table("A against B", "", box=SIMPLE_HEAD)
        for name, value in rows:
            difference.add_row(name, value)
        yield difference


def _speed_rows(speeds: Sequence[Speed]) -> Iterator[Row]:
    memories = [speed.memory for speed in speeds]
    yield "resident beyond torch", *(_beyond(m.now, m.before) for m in memories)
    yield "at the peak", *(_beyond(m.peak, m.before) for m in memories)
    length = speeds[0].prefill_tokens
    yield f"prefill of {length}, tokens/s", *(f"{s.prefill:,.1f}" for s in speeds)
    yield "decode, tokens/s", *(f"{s.decode_1:,.1f}" for s in speeds)
    yield f"decode of {BATCH} at once, tokens/s", *(f"{s.decode_8:,.1f}" for s in speeds)
    yield "start, s", *(f"{s.load_s:.2f}" for s in speeds)


def _beyond(now: int | None, before: int | None) -> str:
    return "unknown" if now is None or before is None else _size(now - before)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
