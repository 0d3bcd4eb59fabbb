"""Bounds of a step: the tokens that it may have, so that a long prompt does not hold up the streams beside
it; and the blocks that a newcomer must leave, so that the pool does not thrash."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pegboard.engine.queue import Queue
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.kv_allocator import KVAllocator

MIN_TOKENS = 64
"""Least that a budget is lowered to: smaller steps would cost more time than they save."""

MIN_PROMPT_TOKENS = 32
"""Least that it leaves to prompts, however many sequences decode."""

_FADING = 1 / 8
"""Part of an old measurement's excess over newer ones that goes with each of them."""


class StepBudget:
    """Tokens of a step: all that a plan may have, and less while a sequence decodes.

    Then it is the largest power of two, at least `MIN_TOKENS`, whose step takes no longer than it may,
    by the steps that were measured. All that decode fit beside `MIN_PROMPT_TOKENS` in any case, so that
    neither they nor prompts wait for ever. Drafts are not counted: they come on top of it.

    A size that was not measured yet takes as long as its part, or its multiple, of the nearest that
    was. One that was slow once is not measured again while it is avoided: what is known of it comes
    nearer to what smaller steps let expect, until it is tried once more.
    """

    def __init__(self, most: int, max_step_s: float | None) -> None:
        """
        Args:
            most: tokens that no step exceeds.
            max_step_s: seconds that a step may take while a sequence decodes; None: any.
        """
        self._most = most
        self._max_step_s = max_step_s
        self._seconds: dict[int, float] = {}
        self._lowered = most if max_step_s is None else min(MIN_TOKENS, most)

    def num_tokens(self, queue: Queue) -> int:
        """Most tokens of the next step, draft nodes not counted."""
        if self._lowered >= self._most:
            return self._most
        all_fit = queue.num_running + MIN_PROMPT_TOKENS <= self._lowered
        num_decoding = 0
        for seq in queue.running:
            if seq.num_known - seq.num_scheduled <= 1:
                if all_fit:
                    return self._lowered
                num_decoding += 1
        if not num_decoding:
            return self._most
        return min(self._most, max(self._lowered, num_decoding + MIN_PROMPT_TOKENS))

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        # Steps that are smaller by far take what the weights' way through memory takes.
        if self._max_step_s is None or num_tokens < MIN_PROMPT_TOKENS:
            return
        size = max(MIN_TOKENS, _power_of_two(num_tokens))
        seconds *= size / num_tokens
        known = self._seconds.get(size, 0.0)
        self._seconds[size] = seconds if seconds > known else (seconds + known) / 2
        self._fade(size)
        self._lowered = self._largest(self._max_step_s)

    def _fade(self, size: int) -> None:
        for larger, known in self._seconds.items():
            expected = self._seconds[size] * larger / size
            if larger > size and known > expected:
                self._seconds[larger] += (expected - known) * _FADING

    def _largest(self, max_step_s: float) -> int:
        size = max(MIN_TOKENS, _power_of_two(self._most))
        while size > MIN_TOKENS and self._expected(size) > max_step_s:
            size //= 2
        return min(size, self._most)

    def _expected(self, size: int) -> float:
        """Seconds of a step of that size: as measured, or else by the nearest size below, or above."""
        below = [measured for measured in self._seconds if measured <= size]
        nearest = max(below) if below else min(self._seconds)
        return self._seconds[nearest] * size / nearest


def _power_of_two(number: int) -> int:
    """The least one that is not smaller."""
    return 1 << (number - 1).bit_length()


def has_headroom(
    allocator: KVAllocator,
    groups: Sequence[KVGroup],
    num_running: int,
    running: Iterable[tuple[int, int]],
) -> bool:
    """Whether each group has a block left for each running sequence that may still ask for one.

    A newcomer that takes the last blocks would be preempted as soon as running sequences grow, and its
    work lost. Blocks that were set aside count as room: their sequences need no others.

    Args:
        running: of each, the slots that it has or has reserved, and the most that it can come to.
    """
    room = [ledger.free + ledger.cached + ledger.reserved for ledger in allocator.ledger()]
    if min(room) >= num_running:
        return True
    slots = list(running)
    for group, num_blocks in zip(groups, room, strict=True):
        size = group.block_size
        if num_blocks < sum(-(-most // size) > -(-now // size) for now, most in slots):
            return False
    return True
