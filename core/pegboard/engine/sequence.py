"""Requests and their sequences, as the engine keeps them."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pegboard.engine.logprobs import PromptLogprobs
from pegboard.engine.stops import TextStream
from pegboard.interfaces.prefix_cache import Hit
from pegboard.request import FinishReason, Request
from pegboard.step import Int32, read_only

_NEW_SLOTS = 64
"""Least room for tokens that a sequence's buffer gets at a time."""


@dataclass(slots=True)
class OpenRequest:
    """A request with a sequence that has not ended.

    Attributes:
        request: as it came.
        arrival: seconds of the monotonic clock.
        seed: the request's own, or the one drawn for it.
        max_known: most tokens of a sequence, prompt included.
        eos_ids: ids that end a sequence and are not named as the reason.
        stop_ids: all ids that end a sequence.
        stop_tokens: those of them that the request named by their texts.
        processors: logits processors' parameters.
        keeps_state: whether one of them has a state that a preemption would lose.
        max_drafts: most draft nodes of a sequence.
        prompt_logprobs: those of its prompt; None: not asked for, or handed out.
        sequences: those that have not ended.
    """

    request: Request
    arrival: float
    seed: int
    max_known: int
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    stop_tokens: dict[int, str]
    processors: dict[str, dict[str, Any]]
    keeps_state: bool = False
    max_drafts: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    sequences: list[Sequence] = field(default_factory=list)


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One sequence: the scheduler's view of it, and the engine's bookkeeping.

    Attributes:
        seq_id: unique in the engine; its owner name in the allocator.
        owner: the request.
        row: the worker's row; None while it waits.
        salt: KV is shared only between sequences of the same salt.
        min_tokens: output tokens before which no stop text counts.
        max_drafts: most draft nodes that it may have.
        num_known: tokens, prompt and output; all committed.
        num_computed: known tokens whose KV is in place, by the steps that are committed.
        num_scheduled: tokens that steps were given to compute, those in flight included. Past
            `num_known` there is one that the host does not know yet.
        has_drafts_in_flight: whether a step in flight verifies or proposes drafts of it, so that the host
            does not know its next token number.
        num_reserved: slots that the allocator made for later.
        num_published, num_trimmed: tokens whose blocks the prefix cache was told of, and that left
            the window.
        num_drafts, confidences, parents: draft nodes that the row holds: see `DraftView`.
        num_tried, num_accepted: draft depths compared and accepted so far.
        num_cached_tokens: prompt tokens that a cache served at the first admission.
        is_outdated: the cache was reset meanwhile, so that its blocks may not serve others.
        match: the cache's last hit, and its version: see `Prefixes.match`.
        digests: of its first blocks, by block size: see `prefix/digests.py`.
        ended: finish reason; None while it goes on.
        stop_reason: see `SequenceDelta`.
        admitted_at, first_token_at, last_token_at: times; None: not yet.
    """

    seq_id: int
    owner: OpenRequest
    index: int
    text: TextStream
    arrival: float = field(init=False)
    priority: int = field(init=False)
    tenant: str = field(init=False)
    salt: str = field(init=False)
    max_known: int = field(init=False)
    min_tokens: int = field(init=False)
    max_drafts: int = field(init=False)
    num_prompt: int = field(init=False)
    num_known: int = field(init=False)
    _tokens: Int32 = field(init=False)
    digests: dict[int, list[bytes]] = field(default_factory=dict)
    match: tuple[int, Hit] | None = None
    is_outdated: bool = False
    row: int | None = None
    num_computed: int = 0
    num_scheduled: int = 0
    num_reserved: int = 0
    num_published: int = 0
    num_trimmed: int = 0
    num_drafts: int = 0
    num_tried: int = 0
    num_accepted: int = 0
    confidences: Items[float] = ()
    parents: Items[int] = ()
    has_drafts_in_flight: bool = False
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    ended: FinishReason | None = None
    stop_reason: int | str | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    def __post_init__(self) -> None:
        owner, request = self.owner, self.owner.request
        self.arrival = owner.arrival
        self.priority = request.priority
        self.tenant = request.tenant
        self.salt = request.cache_salt
        self.max_known = owner.max_known
        self.min_tokens = request.params.min_tokens
        self.max_drafts = owner.max_drafts
        self.num_prompt = self.num_known = len(request.prompt_token_ids)
        self._tokens = np.empty(self.num_prompt + _NEW_SLOTS, np.int32)
        self._tokens[: self.num_prompt] = request.prompt_token_ids

    @property
    def num_output(self) -> int:
        return self.num_known - self.num_prompt

    @property
    def num_pending(self) -> int:
        num_pending = self.num_known - self.num_scheduled
        if num_pending > 0:
            return num_pending
        # A step in flight brings its next token: one to compute, but where that is the last.
        return int(not self.has_drafts_in_flight and self.num_scheduled < self.max_known - 1)

    @property
    def is_in_flight(self) -> bool:
        return self.num_scheduled > self.num_computed

    @property
    def max_tokens(self) -> int:
        return self.max_known - self.num_prompt

    @property
    def token_ids(self) -> Int32:
        """int32 [num_known], read-only. Its contents never change."""
        return read_only(self._tokens[: self.num_known])

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logprobs of prompt tokens are still to come."""
        collected = self.owner.prompt_logprobs
        return collected is not None and not collected.is_complete

    def take(self, token_ids: Items[int]) -> tuple[int, str]:
        """Appends committed tokens one by one until one of them ends the sequence.

        Returns:
            How many were kept, and the text that may be shown now.
        """
        shown = ""
        owner, text = self.owner, self.text
        count = 0
        for token_id in token_ids:
            count += 1
            self._append(token_id)
            may_stop = self.num_known - self.num_prompt > self.min_tokens
            if token_id in owner.stop_ids:
                self.ended = "stop"
                unnamed = None if token_id in owner.eos_ids else token_id
                self.stop_reason = owner.stop_tokens.get(token_id, unnamed)
            else:
                shown += text.add(token_id, may_stop)
                if self.num_known >= self.max_known:
                    self.ended = "length"
            if self.ended is not None:
                shown += text.finish(may_stop)
            if text.stopped_by is not None:
                self.ended, self.stop_reason = "stop", text.stopped_by
            if self.ended is not None:
                break
        return count, shown

    def leave_row(self) -> None:
        """Its row and KV are gone; its tokens must be computed again."""
        self.row = None
        self.num_computed = self.num_scheduled = 0
        self.num_reserved = self.num_published = self.num_trimmed = 0
        self.num_drafts, self.confidences, self.parents = 0, (), ()
        self.has_drafts_in_flight = False
        self.match, self.is_outdated = None, False

    def _append(self, token_id: int) -> None:
        if self.num_known == len(self._tokens):
            # A new buffer: arrays handed out before keep their contents.
            room = max(_NEW_SLOTS, self.num_known // 2)
            self._tokens = np.concatenate([self._tokens, np.empty(room, np.int32)])
        self._tokens[self.num_known] = token_id
        self.num_known += 1
