"""A drafter behind a guard: if it errs, the step goes on without drafts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec

import numpy as np
import torch

from pegboard.errors import INTERRUPTS, MAX_REASON_LEN, EngineError, reason_of
from pegboard.interfaces.drafter import MAX_CALL_S, Drafter, Observation
from pegboard.runner.draft_unit import DrafterModels
from pegboard.runner.drafting import observe
from pegboard.runner.inputs import StepInputs
from pegboard.runner.rows import Rows
from pegboard.runner.token_choice import TokenChoice
from pegboard.runner.verification import Accepted
from pegboard.step import Bool, RowAdmission, StepBatch, read_only

P = ParamSpec("P")


class GuardedDrafter:
    """Calls a drafter for the rows that it knows. One that errs is not called until it is tried again:
    then it gives back the rows that it had, and begins with those admitted from there on."""

    def __init__(
        self,
        drafter: Drafter,
        models: DrafterModels,
        taps: tuple[int, ...],
        rows: Rows,
        choice: TokenChoice,
        *,
        is_asked: bool,
    ) -> None:
        """
        Args:
            models: its side of the worker.
            taps: hidden states that it wants; the target has all of them.
            rows: the worker's tables; what it proposes goes into their draft nodes.
            choice: asks it for drafts.
            is_asked: whether there may ever be drafts; one that is never asked is told of no row.
        """
        self._drafter = drafter
        self._models = models
        self._taps = taps
        self._rows = rows
        self._choice = choice
        self._is_asked = is_asked
        self._known: Bool = np.zeros(len(rows.num_known), np.bool_)
        self._owed: dict[int, int] = {}
        self._trial = self._num_resets = 0
        self._is_cut_off = False
        self._failure = ""

    def begin(self, trial: int, num_resets: int) -> None:
        """A step begins; both numbers are the batch's. Another trial brings the drafter back; another
        reset makes it forget, as soon as it is there."""
        if trial != self._trial:
            self._trial, self._is_cut_off = trial, False
            while self._owed and not self._is_cut_off:
                self._call(MAX_CALL_S, self._drafter.release, *self._owed.popitem())
        if num_resets != self._num_resets and self._call(MAX_CALL_S, self._drafter.forget):
            self._num_resets = num_resets

    def admit(self, admission: RowAdmission) -> None:
        """A sequence took a row, and its blocks are known."""
        if not self._is_asked:
            return
        tables = tuple(
            read_only(self._rows.block_tables[group][admission.row])
            for group in self._models.groups
        )
        has_it = self._call(MAX_CALL_S, self._drafter.admit, admission, tables)
        self._known[admission.row] = has_it and not self._is_cut_off
        if has_it and self._is_cut_off:  # it took the row, and too long for it
            self._owed[admission.row] = len(admission.token_ids)

    def release(self, row: int, num_tokens: int) -> None:
        """A row is given back; one that the drafter does not know is no news to it."""
        if self._known[row]:
            self._known[row] = False
            self._call(MAX_CALL_S, self._drafter.release, row, num_tokens)
        elif row in self._owed:
            self._owed[row] = min(self._owed[row], num_tokens)

    def taps(self, batch: StepBatch) -> tuple[int, ...]:
        """Hidden states that it wants of a step."""
        return self._taps if self._taps and self._known[batch.rows].any() else ()

    def redraft(
        self,
        batch: StepBatch,
        inputs: StepInputs,
        accepted: Accepted,
        taps: dict[int, torch.Tensor],
        forward_s: float,
    ) -> None:
        """Replaces the nodes of the step's rows by what the drafter proposes.

        forward_s: seconds of the step's forward.
        """
        self._rows.drafts.drop(batch.rows)
        known = self._known[batch.rows]
        if not known.any():
            return
        seen = observe(batch, inputs, accepted, taps, self._rows, self._models.groups, known)
        observed = (inputs.num_computed + inputs.num_chunk + accepted.num_accepted)[known]
        with self._models.observing(seen.rows, observed, seen.propose):
            self._call(max(MAX_CALL_S, forward_s), self._propose, seen)

    def take_failure(self) -> str:
        """For what the drafter was cut off since the last call; "": it was not."""
        failure, self._failure = self._failure, ""
        return failure

    def _propose(self, seen: Observation) -> None:
        missing = [layer for layer in self._taps if layer not in seen.taps]
        if missing:
            raise EngineError(
                f"it wants the inputs of layers {missing}, which the model does not give"
            )
        self._choice.propose(self._drafter, seen, self._rows.drafts)

    def _call(
        self, allowed_s: float, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs
    ) -> bool:
        """Whether a call came back. One that does not, or takes too long, is the last."""
        if self._is_cut_off:
            return False
        started = time.perf_counter()
        try:
            function(*args, **kwargs)
        except INTERRUPTS:
            raise
        except BaseException as error:
            # A subclass may be the drafter's own, and its text may raise.
            self._cut_off(str(error) if type(error) is EngineError else reason_of(error))
            return False
        taken = time.perf_counter() - started
        if taken > allowed_s:
            name = getattr(function, "__name__", "a call").lstrip("_")
            self._cut_off(f"{name} took {taken:.1f} s; allowed: {allowed_s:.3g}")
        return True

    def _cut_off(self, reason: str) -> None:
        """The rows that it has stay its own until it can be told that they are gone."""
        self._is_cut_off, self._failure = True, reason[:MAX_REASON_LEN]
        for row in np.flatnonzero(self._known).tolist():
            self._owed[row] = int(self._rows.num_known[row])
        self._known[:] = False
