"""The deltas that go out."""

from __future__ import annotations

from pegboard.engine.sequence import Sequence
from pegboard.request import SequenceDelta, TokenLogprob


def delta(
    seq: Sequence,
    token_ids: tuple[int, ...] = (),
    text: str = "",
    logprobs: tuple[TokenLogprob, ...] | None = None,
    error: str | None = None,
) -> SequenceDelta:
    """A sequence's delta. The prompt's logprobs come once, with the request's first tokens."""
    prompt_logprobs, collected = None, seq.owner.prompt_logprobs
    if collected is not None and token_ids and collected.is_complete:
        prompt_logprobs, seq.owner.prompt_logprobs = collected.values(), None
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
