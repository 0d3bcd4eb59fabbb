"""Logprobs on their way out: from arrays to values; a prompt's are collected until it is computed."""

from __future__ import annotations

import numpy as np

from pegboard.request import TokenLogprob
from pegboard.step import Logprobs


class PromptLogprobs:
    """Logprobs of one request's prompt; each of its sequences adds the places that it computes.

    They are kept as arrays, which take a tenth of the values that are handed out.
    """

    def __init__(self, num_prompt: int, num_top: int) -> None:
        """
        Args:
            num_prompt: tokens of the prompt.
            num_top: most likely tokens to report of each place.
        """
        self._num_prompt = num_prompt
        self._num_top = num_top
        self._num_known = 1  # nothing precedes the first token
        self._parts: list[Logprobs] = []

    @property
    def is_complete(self) -> bool:
        return self._num_known >= self._num_prompt

    def add(self, logprobs: Logprobs, index: int, start: int) -> None:
        """Adds a step's logprobs of new places. A preempted prompt is computed again, so some are old.

        Args:
            logprobs: of the step.
            index: of the row in the batch.
            start: tokens whose KV was in place before the step.
        """
        if self.is_complete:
            return
        first, end = logprobs.offsets[index : index + 2].tolist()
        first += self._num_known - start - 1
        if first < end:
            self._parts.append(_slice(logprobs, first, end, self._num_top))
            self._num_known += end - first

    def values(self) -> tuple[TokenLogprob | None, ...]:
        """A logprob for each prompt token, None for the first."""
        return (
            None,
            *(value for part in self._parts for value in logprobs_of(part, 0, None, self._num_top)),
        )


def _slice(logprobs: Logprobs, first: int, end: int, num_top: int) -> Logprobs:
    """Copies of some places: the step's own arrays hold all its rows."""
    places = slice(first, end)
    return Logprobs(
        offsets=np.array([0, end - first], np.int32),
        token_ids=logprobs.token_ids[places].copy(),
        logprobs=logprobs.logprobs[places].copy(),
        ranks=logprobs.ranks[places].copy(),
        top_ids=logprobs.top_ids[places, :num_top].copy(),
        top_logprobs=logprobs.top_logprobs[places, :num_top].copy(),
    )


def logprobs_of(
    logprobs: Logprobs | None, index: int, count: int | None, num_top: int
) -> tuple[TokenLogprob, ...]:
    """Logprobs of a batch row.

    Args:
        logprobs: of the whole batch.
        index: of the row in the batch.
        count: how many of the row's positions; None: all.
        num_top: how many of the most likely tokens were asked for.
    """
    if logprobs is None:
        return ()
    start, end = (int(offset) for offset in logprobs.offsets[index : index + 2])
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
