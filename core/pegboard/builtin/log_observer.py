"""Structured log lines: one an event, and a summary every ten seconds under load."""

from __future__ import annotations

import logging

from pegboard.interfaces.observer import (
    ErrorHappened,
    Event,
    Observer,
    ObserverContext,
    RequestArrived,
    SequenceFinished,
    StepDone,
)

SUMMARY_PERIOD_S = 10.0

logger = logging.getLogger("pegboard.engine")


class LogObserver(Observer):
    """Writes `key=value` lines to the logger `pegboard.engine`; never a prompt or an answer.

    Arrivals are logged at level DEBUG, ends and summaries at INFO, errors at ERROR.
    """

    def __init__(self, context: ObserverContext) -> None:
        self._period_start: float | None = None
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        for entry, num_bytes in context.ledger.items():
            logger.info("memory entry=%r bytes=%d", entry, num_bytes)

    def observe(self, event: Event) -> None:
        match event:
            case StepDone():
                self._count(event)
            case RequestArrived():
                logger.debug(
                    "arrived id=%s prompt_tokens=%d sequences=%d",
                    event.request_id,
                    event.num_prompt_tokens,
                    event.num_sequences,
                )
            case SequenceFinished():
                _log_end(event)
            case ErrorHappened():
                logger.error(
                    "error kind=%s id=%s message=%r", event.kind, event.request_id, event.message
                )

    def close(self) -> None:
        pass

    def _count(self, step: StepDone) -> None:
        if self._period_start is None:
            self._period_start = step.time - step.duration_s
        self._num_prompt_tokens += step.num_prefill_tokens
        self._num_output_tokens += step.num_output_tokens
        elapsed = step.time - self._period_start
        idle = not (step.num_running or step.num_waiting)
        if elapsed >= SUMMARY_PERIOD_S:
            self._summarize(step, elapsed)
        if idle or elapsed >= SUMMARY_PERIOD_S:
            # Idle time belongs to no period: rates are of the time under load.
            self._period_start = None if idle else step.time
            self._num_prompt_tokens = self._num_output_tokens = 0

    def _summarize(self, step: StepDone, elapsed: float) -> None:
        used = max(
            ((kv.total - kv.free - kv.cached) / kv.total for kv in step.kv if kv.total), default=0.0
        )
        logger.info(
            "summary prompt_tokens_per_s=%.1f output_tokens_per_s=%.1f running=%d waiting=%d"
            " kv_used=%.1f%%",
            self._num_prompt_tokens / elapsed,
            self._num_output_tokens / elapsed,
            step.num_running,
            step.num_waiting,
            100 * used,
        )


def _log_end(event: SequenceFinished) -> None:
    first = "-" if event.first_token is None else f"{event.first_token - event.arrival:.3f}"
    logger.info(
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
