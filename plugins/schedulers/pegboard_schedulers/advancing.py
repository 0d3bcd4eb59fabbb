"""The policies' common steps: running sequences go on, KV that lacks is taken from others,
waiting ones are admitted in an order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from pegboard.interfaces.scheduler import MAX_PREFIX_SKIPS, SequenceView, StepBuilder


def decodes_first(running: Iterable[SequenceView]) -> list[SequenceView]:
    """Decodes, then unfinished prompts, each in the order given: a prompt's chunk delays no decode."""
    return sorted(running, key=is_prompt_unfinished)


def is_prompt_unfinished(seq: SequenceView) -> bool:
    return seq.num_pending > 1


def advance(
    order: Iterable[SequenceView], victims: list[SequenceView], step: StepBuilder
) -> set[int]:
    """Lets running sequences go on, in the order given.

    Args:
        victims: running sequences; where KV lacks they are preempted, the last first. Shortened.

    Returns:
        The ids of those preempted.
    """
    preempted: set[int] = set()
    for seq in order:
        if step.num_tokens_left < 1:
            break
        if seq.seq_id not in preempted and not step.add(seq, seq.num_pending):
            _make_room(seq, victims, preempted, step)
    return preempted


def _make_room(
    seq: SequenceView, victims: list[SequenceView], preempted: set[int], step: StepBuilder
) -> None:
    """Preempts victims until the running sequence, which did not fit, is added, or is one itself."""
    while victims:
        victim = victims.pop()
        if step.preempt(victim):
            preempted.add(victim.seq_id)
            if victim.seq_id == seq.seq_id:
                return
        if step.add(seq, seq.num_pending):
            return


def admit(
    order: Iterator[SequenceView], step: StepBuilder, output_room: Callable[[SequenceView], int]
) -> Iterator[SequenceView]:
    """Admits waiting sequences, each once room is found for all its known tokens and for as many
    output tokens as `output_room` says.

    Ends at the first that is refused: none that comes later in the order slips past it.

    Yields:
        Each sequence that was admitted, before the order is asked for the next one.
    """
    num_skips = 0
    while step.num_rows_left >= 1 and step.num_tokens_left >= 1:
        seq = next(order, None)
        if seq is None:
            return
        if step.waits_for_prefix(seq):
            num_skips += 1
            if num_skips == MAX_PREFIX_SKIPS:
                return
        elif add_newcomer(seq, step, output_room(seq)):
            yield seq
        else:
            return


def add_newcomer(seq: SequenceView, step: StepBuilder, output_room: int) -> bool:
    """Admits a waiting sequence, with KV for its known tokens and `output_room` more."""
    num_pending, num_left = seq.num_pending, step.num_tokens_left
    if num_pending > num_left:
        # It begins after what is cached: no room is needed for that once more.
        num_pending -= step.num_cached(seq)
    num_tokens = min(num_pending, num_left)
    return step.add(seq, num_tokens, num_pending - num_tokens + output_room)


def max_output_left(seq: SequenceView) -> int:
    """Most output tokens that are still to come."""
    return seq.max_tokens - seq.num_output
