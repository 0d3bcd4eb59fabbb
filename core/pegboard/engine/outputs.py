"""What goes out: deltas, and logprobs from arrays to values."""

from __future__ import annotations

from pegboard.engine.sequence import Sequence
from pegboard.request import SequenceDelta, TokenLogprob
from pegboard.step import Logprobs


def delta(
    seq: Sequence,
    token_ids: tuple[int, ...] = (),
    text: str = "",
    logprobs: tuple[TokenLogprob, ...] | None = None,
    error: str | None = None,
) -> SequenceDelta:
    """The sequence's news; prompt logprobs are handed out with the first."""
    prompt_logprobs = None
    if seq.prompt_logprobs is not None and not seq.wants_prompt_logprobs:
        prompt_logprobs, seq.prompt_logprobs = tuple(seq.prompt_logprobs), None
    return SequenceDelta(
        request_id=seq.owner.request.request_id,
        index=seq.index,
        token_ids=token_ids,
        text=text,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=seq.ended,
        stop_reason=seq.stop_reason,
        error=error,
        num_prompt_tokens=seq.num_prompt,
        num_cached_tokens=seq.num_cached_tokens,
        num_output_tokens=seq.num_output,
    )


def logprobs_of(
    logprobs: Logprobs | None, row: int, count: int | None, num_top: int
) -> tuple[TokenLogprob, ...]:
    """Values of a batch row.

    Args:
        logprobs: of the whole batch.
        row: which of the batch's rows.
        count: how many of the row's positions; None: all.
        num_top: how many of the most likely tokens were asked for.
    """
    if logprobs is None:
        return ()
    start, end = (int(offset) for offset in logprobs.offsets[row : row + 2])
    if count is not None:
        end = min(end, start + count)
    part = slice(start, end)
    return tuple(
        TokenLogprob(token_id, logprob, rank, tuple(top_ids), tuple(top_logprobs))
        for token_id, logprob, rank, top_ids, top_logprobs in zip(
            logprobs.token_ids[part].tolist(),
            logprobs.logprobs[part].tolist(),
            logprobs.ranks[part].tolist(),
            logprobs.top_ids[part, :num_top].tolist(),
            logprobs.top_logprobs[part, :num_top].tolist(),
            strict=True,
        )
    )
