"""A line for each request: those that the engine was given, and those that were refused."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from starlette.types import Scope

from pegboard.server.access import PUBLIC_PATHS
from pegboard.server.failures import shown
from pegboard.server.sparse_log import SparseLog
from pegboard.server.submission import Submission
from pegboard.server.waiting import num_sequences

MAX_REFUSALS = 20
PERIOD_S = 10.0
"""So many refusals have a line in so many seconds; the others are counted."""

logger = logging.getLogger("pegboard.server")


class RequestLog:
    """Writes `key=value` lines, never a prompt or an answer. Texts of clients are cut, and their
    control characters escaped.

    The submission of a request is its `state.submission`, and its refusal's message `state.refusal`.
    """

    def __init__(self) -> None:
        self._refusals = SparseLog("requests were refused", MAX_REFUSALS, PERIOD_S)

    def ended(self, scope: Scope, status: int, seconds: float) -> None:
        """Tells of a request that is over.

        Args:
            status: that it was answered with; 499: its client left before.
            seconds: from its head to its end.
        """
        state: dict[str, Any] = scope.get("state", {})
        refusal = state.get("refusal")
        if (submission := state.get("submission")) is not None:
            logger.info("%s", _answered(scope, status, seconds, submission, refusal))
        elif refusal is not None and scope["path"] not in PUBLIC_PATHS:
            where = f"method={shown(scope['method'])} path={shown(scope['path'])}"
            self.refused(status, scope.get("client"), refusal, where)

    def refused(
        self, status: int, client: tuple[str, int] | None, message: str, where: str = "path=-"
    ) -> None:
        """Logs a refusal; of its request little else may be known."""
        address = "-" if client is None else f"{client[0]}:{client[1]}"
        self._refusals.warn(
            "refused status=%d %s client=%s error=%s", status, where, address, shown(message)
        )


def _answered(
    scope: Scope, status: int, seconds: float, submission: Submission, refusal: str | None
) -> str:
    requests, progress = submission.requests, submission.progress
    call_id, _, _ = requests[0].request_id.rpartition("-")
    reasons = Counter(progress.reasons)
    first = "-" if progress.first_token_s is None else f"{progress.first_token_s:.3f}"
    return (
        f"request status={status} path={shown(scope['path'])} id={call_id}"
        f" prompts={len(requests)} sequences={num_sequences(requests)}"
        f" reasons={','.join(f'{reason}:{n}' for reason, n in sorted(reasons.items())) or '-'}"
        f" prompt_tokens={sum(len(request.prompt_token_ids) for request in requests)}"
        f" cached_tokens={progress.num_cached_tokens} output_tokens={progress.num_output_tokens}"
        f" ttft_s={first} e2e_s={seconds:.3f}"
        + ("" if refusal is None else f" error={shown(refusal)}")
    )
