"""`Observer`: what is told to the outside. Observers run in the engine's process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.kv_allocator import KVLedger
from pegboard.request import FinishReason

VERSION = 2


@dataclass(frozen=True, slots=True)
class ObserverContext:
    """The context of an observer's factory.

    Attributes:
        model: name under which the model is served.
        ledger: ledger entry to bytes: what the plan says is in memory.
        max_model_len: most tokens a sequence.
        groups: KV groups.
        num_blocks: of each group, block 0 included.
        caches_prefixes: whether a prefix cache is asked; without one, no prompt is looked up.
        num_speculative_tokens: most draft nodes a row; 0: there is no drafter.
    """

    model: str
    ledger: dict[str, int] = field(default_factory=dict)
    max_model_len: int = 0
    groups: tuple[KVGroup, ...] = ()
    num_blocks: tuple[int, ...] = ()
    caches_prefixes: bool = True
    num_speculative_tokens: int = 0


NoDrafts = Literal["request", "processor"]
"""Why a request has no drafts: it said so, or a logits processor that it uses keeps a state."""


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request entered the queue. Times are seconds of a monotonic clock.

    Attributes:
        num_sequences: sequences that it asks for.
        max_tokens: most tokens that each of them can get: what was asked for, or what the context
            leaves.
        without_drafts: why it has none, though there is a drafter; None: it may have some, or there is no
            drafter.
    """

    request_id: str
    time: float
    num_prompt_tokens: int
    num_sequences: int
    max_tokens: int = 0
    without_drafts: NoDrafts | None = None


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """A sequence ended.

    Attributes:
        arrival, admitted, first_token, finished: times; None where it never came that far.
        num_cached_tokens: prompt tokens served by a cache.
        num_preemptions: times it was preempted.
    """

    request_id: str
    index: int
    reason: FinishReason
    arrival: float
    admitted: float | None
    first_token: float | None
    finished: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """Drafts of a step. A draft is a row's nodes that were verified. Entry n of a tuple is the number of
    drafts with a count of n.

    Attributes:
        verified: nodes of a draft.
        tried: depths at which one of them was compared, up to the first at which none was right.
        accepted: nodes accepted, one a depth.
        num_asked: nodes that the drafter was asked for, for the next step, in all.
        num_proposed: nodes that it gave.
    """

    verified: tuple[int, ...] = ()
    tried: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    num_asked: int = 0
    num_proposed: int = 0


@dataclass(frozen=True, slots=True)
class StepDone:
    """One step was committed.

    Attributes:
        time: when.
        duration_s: from the step's planning, or from the end of the step ahead of it in flight, to its
            commit; `forward_s`, `sampling_s`, `drafting_s` are the worker's.
        num_prefill_tokens, num_decode_tokens: tokens computed; draft nodes count as decode.
        num_output_tokens: tokens committed.
        num_running, num_waiting: sequences after the step.
        num_preempted: sequences preempted for the step.
        num_tried, num_accepted: depths at which drafts were compared, and accepted.
        kv: the allocator's ledger, an entry for each KV group.
        first_token_s: for each sequence that got its first token, seconds since its arrival.
        inter_token_s: for each other sequence that got tokens, seconds since its last ones.
        num_sequences: sequences that computed something.
        num_prompt_tokens: prompt tokens of requests whose first sequence got its first token.
        num_cached_prompt_tokens: how many of them a cache had.
        num_prefix_queries: prompt tokens of the sequences admitted for the first time.
        num_prefix_hits: how many of them a cache had.
        drafts: None: none were verified or asked for.
    """

    step_id: int
    time: float
    duration_s: float
    forward_s: float
    sampling_s: float
    drafting_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_output_tokens: int
    num_running: int
    num_waiting: int
    num_preempted: int
    num_tried: int
    num_accepted: int
    kv: tuple[KVLedger, ...]
    first_token_s: tuple[float, ...] = ()
    inter_token_s: tuple[float, ...] = ()
    num_sequences: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    drafts: StepDrafts | None = None


@dataclass(frozen=True, slots=True)
class LoadChanged:
    """Load changed and no step followed: the last sequences were aborted or failed, or the prefix cache
    gave its blocks back.

    Attributes:
        num_running, num_waiting: sequences now.
        kv: the allocator's ledger, an entry for each KV group.
    """

    time: float
    num_running: int
    num_waiting: int
    kv: tuple[KVLedger, ...]


@dataclass(frozen=True, slots=True)
class ErrorHappened:
    """Something failed. `kind` is the error's class name."""

    kind: str
    message: str
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class BlocksNamed:
    """The prefix cache's names changed. A listener that misses a number knows less than there is.

    Digests are of salt and tokens: they compare within one engine, or among engines of one
    composition, whose model and numerics are the same.

    Attributes:
        number: of this event, from 1 on, without gaps.
        stored: for each block named, its group and the digest (16 bytes) of all tokens up to its end.
        evicted: the same, of blocks whose names are gone.
        cleared: all names were forgotten, before those stored.
    """

    number: int
    stored: tuple[tuple[int, bytes], ...] = ()
    evicted: tuple[tuple[int, bytes], ...] = ()
    cleared: bool = False


GUARDED_PARTS = ("scheduler", "prefix_cache", "speculation_policy", "drafter", "observer")
"""Interfaces whose plugins are cut off when they err: the engine can do without."""


@dataclass(frozen=True, slots=True)
class BreakerChanged:
    """A plugin was cut off, or is back.

    Attributes:
        part: its interface, one of `GUARDED_PARTS`.
        name: its name in the config.
        is_open: whether it is cut off, and the engine does without.
        reason: what it had done.
    """

    part: str
    name: str
    is_open: bool
    reason: str


Event = (
    RequestArrived
    | SequenceFinished
    | StepDone
    | LoadChanged
    | BlocksNamed
    | BreakerChanged
    | ErrorHappened
)
"""Events that an observer hears."""


def kv_usage(ledgers: Sequence[KVLedger]) -> float:
    """Used part of the fullest KV group, 0 to 1; what a cache alone holds can be had at once."""
    return max(
        ((kv.total - kv.free - kv.cached) / kv.total for kv in ledgers if kv.total), default=0.0
    )


class Observer(ABC):
    """Hears events. It must not change what it gets; an exception cuts it off for a while, logged."""

    @abstractmethod
    def observe(self, event: Event) -> None:
        """Called in the engine's loop: be quick, keep numbers, write later. The engine that is
        observed can be asked, and not be called to step, take, abort or close."""

    def resync(self, num_missed: int) -> None:
        """It was cut off for so many events, because it raised, and hears the next ones again."""
        return None

    @abstractmethod
    def close(self) -> None:
        """The engine closes. Idempotent."""


class MetricsText(ABC):
    """An observer that renders metrics implements this beside `Observer`."""

    @abstractmethod
    def render(self) -> str:
        """Prometheus text format (version 0.0.4)."""
