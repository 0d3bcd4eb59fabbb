"""From a plan to the message for the workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pegboard.engine.flight import Flight
from pegboard.engine.step_builder import Entry, Plan
from pegboard.interfaces.kv import KVGroup
from pegboard.step import Bool, GroupUpdate, Int32, RowAdmission, RowRelease, StepBatch, copy_plain


def build_batch(
    plan: Plan,
    flight: Flight,
    released: tuple[RowRelease, ...],
    groups: Sequence[KVGroup],
    drafter_trial: int,
    num_resets: int,
) -> StepBatch:
    """The batch of the step that is launched next: differences only."""
    entries = plan.entries
    none = np.zeros(len(entries), np.int32)
    return StepBatch(
        step_id=flight.newest + 1,
        fence=flight.fence,
        released=released,
        admitted=tuple(_admission(entry) for entry in plan.admitted),
        groups=_group_updates(plan.changed, groups),
        rows=_int32([_row(entry) for entry in entries]),
        num_computed=_int32([entry.start for entry in entries]),
        num_tokens=_int32([entry.num_tokens for entry in entries]),
        sample=np.array([entry.samples for entry in entries], np.bool_),
        verify=_int32([entry.verify for entry in entries]) if plan.has_drafts else none,
        propose=_int32([entry.propose for entry in entries]) if plan.has_drafts else none,
        pending=_pending(entries) if flight else np.zeros(len(entries), np.bool_),
        drafter_trial=drafter_trial,
        num_resets=num_resets,
    )


def _pending(entries: Sequence[Entry]) -> Bool:
    return np.array([entry.start >= entry.seq.num_known for entry in entries], np.bool_)


def _int32(values: list[int]) -> Int32:
    return np.array(values, np.int32)


def _row(entry: Entry) -> int:
    row = entry.seq.row
    assert row is not None
    return row


def _admission(entry: Entry) -> RowAdmission:
    seq = entry.seq
    params = seq.owner.request.params
    return RowAdmission(
        row=_row(entry),
        token_ids=seq.token_ids,
        num_prompt_tokens=seq.num_prompt,
        seed=seq.owner.seed,
        index=seq.index,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        num_prompt_logprobs=(
            params.prompt_logprobs
            if seq.wants_prompt_logprobs and params.prompt_logprobs is not None
            else -1
        ),
        # A worker in this process gets this very object. It must not change before the next admission.
        processors=copy_plain(seq.owner.processors),
        num_cached=entry.start,
        tenant=seq.tenant,
        salt=seq.salt,
        keeps=seq.owner.request.prefix_cache == "on",
        speculative=seq.max_drafts,
    )


def _group_updates(changed: Sequence[Entry], groups: Sequence[KVGroup]) -> tuple[GroupUpdate, ...]:
    if not changed:
        return ()
    updates = (_group_update(changed, index, group) for index, group in enumerate(groups))
    return tuple(update for update in updates if len(update.rows) or len(update.copy_from))


def _group_update(changed: Iterable[Entry], index: int, group: KVGroup) -> GroupUpdate:
    rows: list[int] = []
    table_entries: list[int] = []
    blocks: list[int] = []
    copy_from: list[int] = []
    copy_to: list[int] = []
    for entry in changed:
        row = _row(entry)
        for table_entry, block in _table_entries(entry, index):
            rows.append(row)
            table_entries.append(table_entry)
            blocks.append(block)
        for source, target in entry.growth.copies[index]:
            copy_from.append(source)
            copy_to.append(target)
    return GroupUpdate(
        group=index,
        encoding=group.encoding,
        rows=_int32(rows),
        entries=_int32(table_entries),
        blocks=_int32(blocks),
        copy_from=_int32(copy_from),
        copy_to=_int32(copy_to),
    )


def _table_entries(entry: Entry, group: int) -> Iterator[tuple[int, int]]:
    if entry.hit is not None:
        yield from enumerate(entry.hit.blocks[group])
    yield from entry.growth.new_blocks[group]
