"""Counts of a step, and the event by which observers are told of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pegboard.engine.flight import Launched
from pegboard.interfaces.kv_allocator import KVLedger
from pegboard.interfaces.observer import LoadChanged, StepDone, StepDrafts
from pegboard.step import StepResult


@dataclass(slots=True)
class Tally:
    """Counts of a step while it is committed.

    Attributes:
        num_output_tokens: committed.
        first_token_s: seconds since arrival, of each first token.
        inter_token_s: seconds since the last tokens, of each other sequence that got some.
        num_prompt_tokens, num_cached_prompt_tokens: of requests whose prompt is done.
    """

    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)


def step_done(step: Launched, result: StepResult, tally: Tally, load: LoadChanged) -> StepDone:
    """The event of a committed step; `load` is that after it."""
    plan = step.plan
    num_prefill = num_decode = 0
    for entry in plan.entries:
        if entry.num_tokens == 1 and entry.start >= entry.seq.num_prompt:
            num_decode += 1 + entry.verify
        else:
            num_prefill += entry.num_tokens + entry.verify
    # The cache was not asked for a prompt that a sibling had computed.
    admitted = [
        entry.seq for entry in plan.admitted if not (entry.is_fork or entry.seq.num_preemptions)
    ]
    drafts = _drafts(step, result) if plan.has_drafts else None
    return StepDone(
        step_id=result.step_id,
        time=load.time,
        duration_s=load.time - step.started,
        forward_s=result.forward_s,
        sampling_s=result.sampling_s,
        drafting_s=result.drafting_s,
        num_prefill_tokens=num_prefill,
        num_decode_tokens=num_decode,
        num_output_tokens=tally.num_output_tokens,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_preempted=plan.num_preempted,
        num_tried=_sum(drafts.tried) if drafts else 0,
        num_accepted=_sum(drafts.accepted) if drafts else 0,
        kv=load.kv,
        first_token_s=tuple(tally.first_token_s),
        inter_token_s=tuple(tally.inter_token_s),
        num_sequences=len(plan.entries),
        num_prompt_tokens=tally.num_prompt_tokens,
        num_cached_prompt_tokens=tally.num_cached_prompt_tokens,
        num_prefix_queries=sum(seq.num_prompt for seq in admitted),
        num_prefix_hits=sum(seq.num_cached_tokens for seq in admitted),
        drafts=drafts,
    )


def _drafts(step: Launched, result: StepResult) -> StepDrafts:
    """Those of rows that failed are left out."""
    batch, was_tried = step.batch, result.num_tried > 0
    verified, tried, accepted = (
        tuple(np.bincount(counts[was_tried]).tolist())
        for counts in (batch.verify, result.num_tried, result.num_accepted)
    )
    return StepDrafts(
        verified=verified,
        tried=tried,
        accepted=accepted,
        num_asked=int(batch.propose.sum()),
        num_proposed=int(result.num_drafts.sum()),
    )


def _sum(histogram: tuple[int, ...]) -> int:
    return sum(value * count for value, count in enumerate(histogram))


def ledger_line(ledgers: tuple[KVLedger, ...]) -> str:
    """The numbers of KV blocks by state, in words."""
    return ", ".join(f"group {index}: {entry}" for index, entry in enumerate(ledgers))
