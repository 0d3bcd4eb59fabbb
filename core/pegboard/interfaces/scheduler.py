"""`Scheduler`: who runs this step, with how many tokens; who is preempted.

The queue is the engine's; the order is the scheduler's. A scheduler walks read-only views and asks a
`StepBuilder`, which holds the truth and answers False when something does not fit: a scheduler
cannot break an invariant.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

VERSION = 1

MAX_PREFIX_SKIPS = 32
"""Most waiting sequences that one plan passes over because they wait for a prefix; then it admits
nobody more. Each may cost a look into the prefix cache."""


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """The context of a scheduler's factory, which takes it beside its options.

    Attributes:
        max_num_seqs: most running sequences.
        max_num_batched_tokens: most tokens a step.
        max_model_len: most tokens a sequence.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class SequenceView(Protocol):
    """A sequence, as a scheduler sees it. Numbers are tokens."""

    @property
    def seq_id(self) -> int: ...
    @property
    def arrival(self) -> float:
        """Seconds of a monotonic clock."""

    @property
    def priority(self) -> int:
        """Lower runs earlier, where the policy heeds it."""

    @property
    def tenant(self) -> str: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def num_output(self) -> int: ...
    @property
    def num_computed(self) -> int:
        """Tokens whose KV is in place, by the steps that are committed; 0 while it waits."""

    @property
    def num_pending(self) -> int:
        """Known tokens that no step was given yet: 1 for a sequence that decodes, more while it prefills;
        0 while a step in flight decides how it goes on."""

    @property
    def max_tokens(self) -> int:
        """Most output tokens that it may reach."""


class QueueView(Protocol):
    """All sequences that are not finished."""

    @property
    def running(self) -> Sequence[SequenceView]:
        """Those that own a row, in order of their admission."""

    @property
    def waiting(self) -> Sequence[SequenceView]:
        """The others, in order of arrival; a preempted one stands where it arrived."""


class StepBuilder(Protocol):
    """The step that is being planned. Once `plan` has returned, the answer to all is
    False, or 0."""

    @property
    def num_tokens_left(self) -> int:
        """Tokens that the step still has room for."""

    @property
    def num_rows_left(self) -> int:
        """Sequences that may still be admitted."""

    def add(self, seq: SequenceView, num_tokens: int, reserve: int = 0) -> bool:
        """Computes `num_tokens` of the sequence's pending tokens in this step.

        A waiting sequence is admitted. `num_tokens` is cut to what is pending and to the room left.
        `reserve` asks for so many tokens of KV beyond, as a guarantee for later.

        Returns:
            False, with nothing changed, when no token, no row or no KV is left, or the sequence is
            in the step already. True, with nothing changed, when nothing of it is pending.
        """

    def num_cached(self, seq: SequenceView) -> int:
        """Tokens that a waiting sequence would begin with if it were admitted now: a cache's, or, of a
        request with several sequences, the prompt that a running one has computed. 0 for one that
        runs. Each may cost a look into the prefix cache."""

    def waits_for_prefix(self, seq: SequenceView) -> bool:
        """Whether a waiting sequence had better wait a little: another one is computing its beginning
        right now, in this step at the latest, and the prefix cache will have it then. Adding it
        all the same computes the beginning twice."""

    def preempt(self, seq: SequenceView) -> bool:
        """Takes a running sequence's row and KV; it waits and computes anew later.

        If it was added to this step, its entry goes. False when it does not run, or may not be
        preempted: the oldest of the highest class only ever grows, one that a step in flight computes
        goes on until that step is committed, which is then done before the next plan, and one whose
        logits processor keeps a state has all its KV from the start.
        """


class Scheduler(ABC):
    """A policy. The truth about sequences is in `queue` and `step`, so that it needs none of its own. It
    must not call the engine, which answers it with an EngineError."""

    def resync(self, queue: QueueView) -> None:
        """Others have planned for a while; the queue is what is left. A policy that counts begins anew
        from there."""
        return None

    @abstractmethod
    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        """Plans one step by calls of `step`. If it raises, nothing that it did remains."""


class Caution:
    """A rule that any scheduler may keep: after a preemption newcomers need room for their output too,
    so that they are not preempted again at once. It weakens with each plan that preempts nobody."""

    DECAY = 0.98
    """The part of it that is left after such a plan."""
    MAX_OUTPUT = 1024
    """Most output tokens for which room is asked."""

    def __init__(self) -> None:
        self._level = 0.0

    def note(self, preempted: bool) -> None:
        """Told once a plan whether somebody had to be preempted."""
        self._level = 1.0 if preempted else self._level * self.DECAY

    def output_room(self, seq: SequenceView) -> int:
        """Output tokens for which a newcomer needs room now."""
        return int(min(seq.max_tokens - seq.num_output, self.MAX_OUTPUT) * self._level)
