"""The parts of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pegboard.engine.prefix.guarded_cache import GuardedCache
from pegboard.interfaces.drafter import DraftSlots
from pegboard.interfaces.executor import Executor
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.kv_allocator import KVAllocator
from pegboard.interfaces.observer import Observer
from pegboard.interfaces.scheduler import Scheduler
from pegboard.interfaces.speculation_policy import SpeculationPolicy
from pegboard.request import SamplingParams


class Detokenizer(Protocol):
    """Turns one sequence's ids into text as they come."""

    def add(self, token_ids: Sequence[int]) -> str:
        """Takes the next ids; returns new text that later ids cannot change."""

    def finish(self) -> str:
        """The rest."""


def _class_name(part: object) -> str:
    return type(part).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The parts of one engine, and its limits.

    Attributes:
        groups: KV groups, in the order of the executor's block tables.
        num_blocks: of each group, block 0 included.
        allocator, prefix_cache, scheduler, policy, executor: one each; not shared between engines.
            The allocator asks the same guarded cache.
        fallback_scheduler: plans while the scheduler is cut off.
        caches_prefixes: whether the prefix cache ever has a hit; if not, it is not asked.
        observers: told of events, in this order.
        max_num_seqs: most running sequences.
        max_num_batched_tokens: most tokens a step, draft nodes included.
        depth: most steps in flight: planned and launched before the oldest of them is committed.
        max_step_s: seconds that a step may take while a sequence decodes, where fewer tokens can help
            it; None: any.
        max_model_len: most tokens a sequence, prompt included.
        vocab_size: ids are below it.
        eos_token_ids: ids that end a sequence by themselves.
        num_speculative_tokens: most draft nodes a row; 0: no speculation.
        draft_slots: slots past a row's last known token that the drafter's own KV groups need; None: it
            has none.
        drafter_name: of the drafter, which lives in the workers, in messages.
        make_detokenizer: a fresh one for a sequence; None: deltas carry no text.
        skipped_id: the id of the token that is written so, where answers do not show it, else None;
            None: answers have no text.
        max_token_bytes: bytes of UTF-8 that no token adds to a text more than; None: unknown.
        processor_params: logits processors' validated parameters of a request, only those that act.
            Raises RequestError.
        stateful_processors: names of logits processors whose state cannot be recomputed: requests that use
            one have no drafts, and are not preempted.
        seed: seeds of requests without one are derived from it; None: they are random.
        name_of: the name of a scheduler or an observer in messages.
        verifies_blocks: whether a cached block's bytes are compared at every hit; slow.
    """

    groups: tuple[KVGroup, ...]
    num_blocks: tuple[int, ...]
    allocator: KVAllocator
    prefix_cache: GuardedCache
    scheduler: Scheduler
    fallback_scheduler: Scheduler
    policy: SpeculationPolicy
    executor: Executor
    observers: tuple[Observer, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_speculative_tokens: int
    make_detokenizer: Callable[[], Detokenizer] | None
    processor_params: Callable[[SamplingParams], dict[str, dict[str, Any]]]
    seed: int | None
    draft_slots: DraftSlots | None = None
    depth: int = 1
    drafter_name: str = "none"
    caches_prefixes: bool = True
    stateful_processors: frozenset[str] = frozenset()
    verifies_blocks: bool = False
    skipped_id: Callable[[str], int | None] | None = None
    max_step_s: float | None = None
    max_token_bytes: int | None = None
    name_of: Callable[[object], str] = _class_name
