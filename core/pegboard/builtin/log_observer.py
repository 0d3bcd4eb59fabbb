"""Structured log lines: one an event, and a summary every ten seconds under load."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from pegboard.interfaces.observer import (
    BlocksNamed,
    BreakerChanged,
    ErrorHappened,
    Event,
    LoadChanged,
    Observer,
    ObserverContext,
    RequestArrived,
    SequenceFinished,
    StepDone,
    kv_usage,
)

SUMMARY_PERIOD_S = 10.0

logger = logging.getLogger("pegboard.engine")


@dataclass(slots=True)
class _Period:
    """Sums over a time under load; `start` is seconds of a monotonic clock."""

    start: float
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_looked_up: int = 0
    num_hits: int = 0
    num_decodes: int = 0
    accepted: Counter[int] = field(default_factory=Counter)

    def add(self, step: StepDone) -> None:
        self.num_prompt_tokens += step.num_prefill_tokens
        self.num_output_tokens += step.num_output_tokens
        self.num_looked_up += step.num_prefix_queries
        self.num_hits += step.num_prefix_hits
        self.num_decodes += len(step.inter_token_s)
        if step.drafts is not None:
            self.accepted.update(dict(enumerate(step.drafts.accepted)))

    def drafts(self) -> str:
        """Tokens a step of decoding sequences, and the part of drafts whose token at each position was
        accepted."""
        num_drafts = self.accepted.total()
        num_accepted = sum(length * count for length, count in self.accepted.items())
        parts = []
        left = num_drafts
        for length in range(max(+self.accepted, default=0)):
            left -= self.accepted[length]
            parts.append(f"{left / num_drafts:.2f}")
        a_step = 1 + num_accepted / self.num_decodes if self.num_decodes else 1.0
        return f" tokens_per_step={a_step:.2f} accepted_per_pos={','.join(parts) or '-'}"


class LogObserver(Observer):
    """Writes `key=value` lines to the logger `pegboard.engine`; never a prompt or an answer.

    Arrivals of requests and ends of sequences are logged at level DEBUG (a server has a line of its own
    for each request), summaries, resets of the prefix cache and returns of plugins that were cut off at
    INFO, errors at ERROR, those of a request's sequences that are the same once.
    """

    def __init__(self, context: ObserverContext) -> None:
        self._caches_prefixes = context.caches_prefixes
        self._drafts = context.num_speculative_tokens > 0
        self._period: _Period | None = None
        self._last_error: ErrorHappened | None = None
        for entry, num_bytes in context.ledger.items():
            logger.info("memory entry=%r bytes=%d", entry, num_bytes)

    def observe(self, event: Event) -> None:
        match event:
            case StepDone():
                self._count(event)
            case LoadChanged():
                if not (event.num_running or event.num_waiting):
                    self._period = None
            case BlocksNamed(cleared=True):
                logger.info("prefix_cache cleared")
            case BreakerChanged():
                if not event.is_open:  # what cut it off came as an error
                    logger.info("back part=%s name=%s", event.part, event.name)
            case RequestArrived():
                logger.debug(
                    "arrived id=%s prompt_tokens=%d sequences=%d",
                    event.request_id,
                    event.num_prompt_tokens,
                    event.num_sequences,
                )
            case SequenceFinished():
                _log_end(event)
            case ErrorHappened() if event.request_id is None or event != self._last_error:
                self._last_error = event
                logger.error(
                    "error kind=%s id=%s message=%r", event.kind, event.request_id, event.message
                )

    def close(self) -> None:
        pass

    def _count(self, step: StepDone) -> None:
        period = self._period
        if period is None:
            period = self._period = _Period(step.time - step.duration_s)
        period.add(step)
        # Idle time belongs to no period: rates are of the time under load.
        if step.time - period.start >= SUMMARY_PERIOD_S:
            self._summarize(step, period)
            self._period = _Period(step.time)
        if not (step.num_running or step.num_waiting):
            self._period = None

    def _summarize(self, step: StepDone, period: _Period) -> None:
        elapsed = step.time - period.start
        hit_rate = "-"
        if self._caches_prefixes and period.num_looked_up:
            hit_rate = f"{100 * period.num_hits / period.num_looked_up:.1f}%"
        logger.info(
            "summary prompt_tokens_per_s=%.1f output_tokens_per_s=%.1f running=%d waiting=%d"
            " kv_used=%.1f%% hit_rate=%s%s",
            period.num_prompt_tokens / elapsed,
            period.num_output_tokens / elapsed,
            step.num_running,
            step.num_waiting,
            100 * kv_usage(step.kv),
            hit_rate,
            period.drafts() if self._drafts else "",
        )


def _log_end(event: SequenceFinished) -> None:
    first = "-" if event.first_token is None else f"{event.first_token - event.arrival:.3f}"
    logger.debug(
        "finished id=%s index=%d reason=%s prompt_tokens=%d cached_tokens=%d output_tokens=%d"
        " preemptions=%d ttft_s=%s e2e_s=%.3f",
        event.request_id,
        event.index,
        event.reason,
        event.num_prompt_tokens,
        event.num_cached_tokens,
        event.num_output_tokens,
        event.num_preemptions,
        first,
        event.finished - event.arrival,
    )
