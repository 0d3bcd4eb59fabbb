"""Drafts of a step: the policy's choice among the drafts that rows hold, the host's half of the drafter,
and the breakers of both."""

from __future__ import annotations

from operator import index

from pegboard.engine.breaker import Breaker, PluginErred
from pegboard.engine.flight import Launched
from pegboard.engine.parts import EngineParts
from pegboard.engine.sequence import OpenRequest
from pegboard.engine.step_builder import Entry, PlannedStep
from pegboard.engine.step_costs import MeasuredCosts
from pegboard.errors import INTERRUPTS
from pegboard.interfaces.observer import NoDrafts
from pegboard.interfaces.speculation_policy import Choice, DraftView
from pegboard.step import StepResult

LEAST_POLICY_S = 0.5
"""Seconds of a policy's calls after which they are compared with the steps' own seconds."""

MAX_POLICY_SHARE = 0.5
"""Most seconds of a policy, as a part of the workers'. It is there to save time."""


class Speculation:
    """Adds drafts to a step, in the room that its planned tokens leave.

    The worker itself cuts off a drafter that errs, and says so. After a pause the worker is told to try
    the drafter again, with the rows that are admitted from then on.

    Attributes:
        drafter, policy: their breakers.
        drafter_trial: see `StepBatch.drafter_trial`.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.drafter = Breaker("drafter", parts.drafter_name)
        self.policy = Breaker("speculation_policy", parts.name_of(parts.policy))
        self.drafter_trial = 0
        self._policy = parts.policy
        self._max_drafts = parts.num_speculative_tokens
        self._max_num_tokens = parts.max_num_batched_tokens
        self._costs = MeasuredCosts()
        self._judge_anew()

    def add_drafts(self, step: PlannedStep) -> None:
        """Asks the policy, once, and adds drafts to the rows that sample and may have some, as far as there
        is room."""
        if not self._max_drafts or not self.drafter.retry(self._try_drafter):
            return
        sampling = step.sampling()
        entries = [entry for entry in sampling if entry.seq.max_drafts]
        if not entries or not self.policy.retry(self._judge_anew):
            return
        tokens_left = self._max_num_tokens - step.num_tokens
        self._costs.begin(step.num_tokens, len(sampling))
        try:
            choices = self._choices(entries, tokens_left)
        except PluginErred:
            return
        for entry, (verify, propose) in zip(entries, choices, strict=True):
            # This step brings a token beside the drafts, and so does the next.
            num_left = entry.seq.max_known - entry.end
            verify = max(0, min(verify, num_left - 1, tokens_left))
            propose = max(0, min(propose, num_left - 2, entry.seq.max_drafts))
            tokens_left -= step.add_drafts(entry, verify, propose)

    def reason_without(self, opened: OpenRequest) -> NoDrafts | None:
        """Why a request has no drafts, though there is a drafter; None: it may have some."""
        if opened.max_drafts or not self._max_drafts:
            return None
        return "processor" if opened.keeps_state else "request"

    def note(self, step: Launched, result: StepResult) -> None:
        """Notes the outcome of a step. A drafter's trial ends well if it observed an admitted row in it."""
        plan = step.plan
        if result.drafter_failed:
            self.drafter.mistake(result.drafter_failed)
        elif plan.admitted and step.batch.drafter_trial == self.drafter_trial:
            self.drafter.confirm()
        if not self._max_drafts:
            return
        entries = plan.entries
        self._costs.note(
            num_rows=len(entries),
            num_tokens=plan.num_tokens,
            num_verified=sum([entry.verify for entry in entries]),
            num_asked=max([entry.propose for entry in entries]),
            step_s=result.forward_s + result.sampling_s,
            draft_s=result.drafting_s,
        )
        self._judge(result.forward_s + result.sampling_s + result.drafting_s)

    def _choices(self, entries: list[Entry], tokens_left: int) -> list[tuple[int, int]]:
        """The policy's answer, of plain integers.

        Raises:
            PluginErred: the answer cannot be used.
        """
        rows = tuple(_view(entry) for entry in entries)
        answer = self.policy.call(self._policy.choose, rows, tokens_left, self._costs)
        # Exact types only: a subclass may state one length and have another.
        if type(answer) not in (list, tuple) or len(answer) != len(rows):
            raise self.policy.wrong_answer("choose", answer, f"a list of {len(rows)} choices")
        most = self._max_drafts
        choices: list[tuple[int, int]] = []
        for choice, row in zip(answer, rows, strict=True):
            if type(choice) is Choice:
                verify, propose = choice
                if (
                    type(verify) is type(propose) is int
                    and 0 <= verify <= row.num_drafts
                    and 0 <= propose <= most
                ):
                    choices.append(choice)
                    continue
            choices.append(self._checked(choice, row.num_drafts))
        self.policy.confirm()
        return choices

    def _checked(self, choice: object, num_drafts: int) -> tuple[int, int]:
        try:
            verify, propose = map(index, choice)  # type: ignore[call-overload]
        except INTERRUPTS:
            raise
        except BaseException:
            verify = propose = -1
        if 0 <= verify <= num_drafts and 0 <= propose <= self._max_drafts:
            return verify, propose
        raise self.policy.wrong_answer(
            "choose",
            choice,
            f"verify 0 to {num_drafts} and propose 0 to {self._max_drafts} for this row",
        )

    def _judge(self, step_s: float) -> None:
        """Whether a policy is worth its time."""
        self._step_s += step_s
        policy_s = self.policy.seconds - self._judged_s
        if policy_s < LEAST_POLICY_S:
            return
        if policy_s > MAX_POLICY_SHARE * self._step_s:
            self.policy.mistake(
                f"choose took {policy_s:.2f} s for steps of {self._step_s:.2f} s; "
                f"allowed: {MAX_POLICY_SHARE:g} of that"
            )
        self._judge_anew()

    def _judge_anew(self) -> None:
        self._step_s, self._judged_s = 0.0, self.policy.seconds

    def _try_drafter(self) -> None:
        self.drafter_trial += 1


def _view(entry: Entry) -> DraftView:
    seq = entry.seq
    return DraftView(
        seq.seq_id,
        seq.num_drafts,
        seq.confidences,
        seq.parents,
        seq.num_tried,
        seq.num_accepted,
        seq.max_known - entry.end,
        seq.max_drafts,
    )
