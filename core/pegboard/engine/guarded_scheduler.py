"""A scheduler behind a breaker: if it errs, the built-in one plans the step."""

from __future__ import annotations

import time
from collections.abc import Callable

from pegboard.engine.breaker import Breaker, PluginErred
from pegboard.engine.flight import Flight
from pegboard.engine.parts import EngineParts
from pegboard.engine.queue import Queue
from pegboard.engine.step_builder import PlannedStep
from pegboard.errors import EngineError, described

MAX_IDLE_PLANS = 4
"""Empty plans in a row after which the fallback is asked for a plan."""

MAX_VAIN_PREEMPTIONS = 128
"""Most preemptions without an output token in between. A scheduler that lets the oldest go on has fewer."""


class _Idle(Exception):
    """The scheduler has planned nothing for too long."""


class GuardedScheduler:
    """Lets the scheduler plan. If it errs, its plan is undone and the fallback plans.

    Attributes:
        breaker: the scheduler's.
        num_idle: steps up to now for which the fallback could plan nothing either.
    """

    def __init__(
        self, parts: EngineParts, queue: Queue, flight: Flight, make_step: Callable[[], PlannedStep]
    ) -> None:
        """
        Args:
            flight: an empty plan is no mistake while a step is in flight.
            make_step: a step in which nothing is planned.
        """
        cache = parts.prefix_cache.breaker
        # Seconds of a slow prefix cache within a plan do not count as the scheduler's.
        self.breaker = Breaker(
            "scheduler",
            parts.name_of(parts.scheduler),
            clock=lambda: time.monotonic() - cache.seconds,
        )
        self.num_idle = 0
        self._scheduler = parts.scheduler
        self._fallback = parts.fallback_scheduler
        self._allocator = parts.allocator
        self._queue = queue
        self._flight = flight
        self._make_step = make_step
        self._num_idle_plans = 0
        self._num_vain_preemptions = 0

    def plan(self) -> PlannedStep:
        """The next step.

        Raises:
            EngineError: the fallback raised too; nothing has changed.
        """
        step = None
        if self.breaker.retry(self._scheduler.resync, self._queue):
            step = self._planned()
        if step is None:
            step = self._planned_instead()
            self.num_idle = self.num_idle + 1 if self._is_stuck(step) else 0
            if self._num_idle_plans and not self.num_idle:
                self.breaker.mistake("it planned nothing where something could be computed")
        if not self._is_stuck(step):
            self.num_idle = self._num_idle_plans = 0
        return step

    def note(self, num_preempted: int, num_output_tokens: int) -> None:
        """Notes the outcome of a step."""
        if num_output_tokens or self.breaker.is_open:
            self._num_vain_preemptions = 0
            return
        self._num_vain_preemptions += num_preempted
        if self._num_vain_preemptions > MAX_VAIN_PREEMPTIONS:
            self.breaker.mistake(
                f"{self._num_vain_preemptions} preemptions and no token in between"
            )

    def _planned(self) -> PlannedStep | None:
        """The scheduler's plan; None, with nothing changed, if the fallback must plan."""
        step = self._make_step()
        try:
            with self._allocator.transaction():
                self.breaker.call(self._scheduler.plan, self._queue, step)
                self._heed_idleness(step)
        except (PluginErred, _Idle):
            return None
        finally:
            step.close()
        if not step.is_empty:
            self.breaker.confirm()
        return step

    def _planned_instead(self) -> PlannedStep:
        step = self._make_step()
        try:
            with self._allocator.transaction():
                self._fallback.plan(self._queue, step)
        except Exception as error:
            raise EngineError(f"planning a step failed: {described(error)}") from error
        finally:
            step.close()
        return step

    def _heed_idleness(self, step: PlannedStep) -> None:
        if self._is_stuck(step):
            self._num_idle_plans += 1
            if self._num_idle_plans >= MAX_IDLE_PLANS or self.breaker.is_on_trial:
                raise _Idle

    def _is_stuck(self, step: PlannedStep) -> bool:
        has_work = bool(self._queue.num_running or self._queue.num_waiting)
        return step.is_empty and has_work and not self._flight
