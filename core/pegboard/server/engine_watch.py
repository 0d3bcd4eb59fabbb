"""Whether the engine lives, judged by the signs that its process and its workers send."""

from __future__ import annotations

from pegboard.interfaces.executor import Sign
from pegboard.server.messages import Alive

TICK_S = 0.5
"""Time between two judgements."""

START_S = 120.0
"""A process that starts may be silent for so long: it may read large libraries from a slow disk, and its
thread of signs waits for an import."""

TIMES_WORST = 20
"""A step may always take so many times what the longest one took."""


class EngineWatch:
    """Two clocks: how long nothing was heard, and how old the running step is.

    Silence is no death: a process that is stopped may go on. It is one when it lasts as long as a step
    may; or as a start may, if that is longer and the process starts. Time in which the server itself
    stood still counts for nobody's silence.

    Args:
        silence_s: seconds without a sign, after which a process is said to be silent.
        deadline_s: seconds after which a step hangs, unless steps have taken long before.
    """

    def __init__(self, silence_s: float, deadline_s: float) -> None:
        self._silence_s = silence_s
        self._deadline_s = deadline_s
        self._quiet_s = 0.0
        self._last: Alive | None = None
        self._has_started = False

    def started(self) -> None:
        """The start is over, although the last sign may still tell of it."""
        self._has_started = True

    def hear(self, sign: Alive) -> None:
        """Takes a sign of the engine's process."""
        self._quiet_s, self._last = 0.0, sign

    def tick(self, elapsed_s: float) -> None:
        """So much time has passed."""
        self._quiet_s += min(elapsed_s, 2 * TICK_S)

    def silent(self) -> str | None:
        """The process that gives no sign, and its last one; None: all do."""
        return self._silent_for(self._silence_s, self._silence_s)

    def lost(self) -> str | None:
        """The reason for which the engine will not go on; None while it may."""
        start_s = max(self._deadline_s, START_S)
        return self._death() or self._hang() or self._silent_for(self._deadline_s, start_s)

    def _death(self) -> str | None:
        workers = () if self._last is None else self._last.workers
        return next((worker.ended for worker in workers if worker.ended), None)

    def _silent_for(self, limit_s: float, start_limit_s: float) -> str | None:
        def limit_of(last: Sign | None) -> float:
            is_starting = last is None or last.doing == "starting"
            return start_limit_s if is_starting and not self._has_started else limit_s

        own = None if self._last is None else self._last.sign
        if self._quiet_s >= limit_of(own):
            return _silence("the engine's process", self._quiet_s, own)
        for worker in () if self._last is None else self._last.workers:
            if worker.silence_s >= limit_of(worker.sign):
                said = _silence(f"worker {worker.rank}", worker.silence_s, worker.sign)
                return f"{said}; the engine is {own}"
        return None

    def _hang(self) -> str | None:
        last = self._last
        if last is None or last.sign.doing != "step":
            return None
        age_s = last.sign.age_s + self._quiet_s
        if age_s < max(self._deadline_s, TIMES_WORST * last.worst_step_s):
            return None
        return (
            f"step {last.sign.step_id} hangs: it has taken {age_s:.0f} s, and no step before it more"
            f" than {last.worst_step_s:.1f} s (server.deadline_s: {self._deadline_s})"
            + "".join(f"; worker {one.rank} is {one.sign}" for one in last.workers)
        )


def _silence(who: str, silence_s: float, last: Sign | None) -> str:
    sign = "it gave none yet" if last is None else f"its last sign: {last}"
    return f"{who} has been silent for {silence_s:.0f} s; {sign}"
