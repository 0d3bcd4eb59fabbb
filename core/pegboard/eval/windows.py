"""A text in windows, each of which a model reads anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pegboard.errors import ConfigError


@dataclass(frozen=True)
class Window:
    """Tokens that a model reads at once.

    Attributes:
        token_ids: of the window; with the bos token first, for a model that wants one.
        first_scored: index of the first token that is scored, by the logits of the token before it;
            all after it are. Those before it are context.
    """

    token_ids: tuple[int, ...]
    first_scored: int

    @property
    def num_scored(self) -> int:
        return len(self.token_ids) - self.first_scored


def windows(
    token_ids: Sequence[int], length: int, stride: int, bos: int | None = None
) -> tuple[Window, ...]:
    """The windows of a text. Each of its tokens is scored once: in the first window that has it with
    something before it. Without bos, and where windows do not overlap, a window's first token has
    nothing before it and is not scored.

    Args:
        token_ids: the text's, without bos.
        length: most tokens of a window, bos included.
        stride: tokens from the start of a window to that of the next, 1 to `length` less bos.
        bos: token that each window begins with; None: none.

    Raises:
        ConfigError: the stride would leave tokens out, or there is nothing to score.
    """
    head = () if bos is None else (bos,)
    room = length - len(head)
    if not 0 < stride <= room:
        raise ConfigError("--stride", str(stride), allowed=f"1 to {room}")
    found, seen = [], 0
    for start in range(0, len(token_ids), stride):
        text = tuple(token_ids[start : start + room])
        first_scored = len(head) + max(seen - start, 1 - len(head))
        window = Window(head + text, first_scored)
        if window.num_scored > 0:
            found.append(window)
        seen = start + len(text)
        if seen == len(token_ids):
            break
    if not found:
        raise ConfigError("--data", f"{len(token_ids)} tokens", allowed="a text of at least 2")
    return tuple(found)
