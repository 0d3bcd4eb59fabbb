"""What a step brought, as a drafter sees it, and what it may answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from pegboard.errors import EngineError
from pegboard.interfaces.drafter import Observation
from pegboard.runner.inputs import StepInputs
from pegboard.runner.rows import Rows
from pegboard.runner.verification import Accepted
from pegboard.step import Bool, Drafts, Float32, Int32, StepBatch, read_only

Int64 = NDArray[np.int64]


def observe(
    batch: StepBatch,
    inputs: StepInputs,
    accepted: Accepted,
    taps: dict[int, torch.Tensor],
    rows: Rows,
    groups: range,
) -> Observation:
    """The step's tokens and states, for the drafter. A row that sampled nothing may not get drafts.

    Args:
        groups: the numbers of the drafter's KV groups.
    """
    kept = _kept(inputs, accepted)
    lengths = inputs.num_chunk + accepted.num_accepted
    propose = np.where(accepted.num_committed > 0, batch.propose, 0)
    return Observation(
        rows=read_only(batch.rows),
        offsets=read_only(starts(lengths)),
        token_ids=read_only(inputs.token_ids[kept].astype(np.int32)),
        positions=read_only(inputs.positions[kept].astype(np.int32)),
        taps={layer: hidden[torch.from_numpy(kept)] for layer, hidden in taps.items()},
        next_offsets=read_only(starts(accepted.num_committed)),
        next_token_ids=read_only(accepted.committed()),
        propose=read_only(propose.astype(np.int32)),
        num_cached=read_only(rows.num_cached[batch.rows].astype(np.int32)),
        block_tables=tuple(read_only(rows.block_tables[group][batch.rows]) for group in groups),
    )


def of_rows(seen: Observation, chosen: Bool) -> Observation:
    """The part of an observation that is about some of its rows, bool [R]."""
    lengths, next_lengths = np.diff(seen.offsets), np.diff(seen.next_offsets)
    tokens, following = np.repeat(chosen, lengths), np.repeat(chosen, next_lengths)
    kept = torch.from_numpy(np.flatnonzero(tokens))
    return replace(
        seen,
        rows=read_only(seen.rows[chosen]),
        offsets=read_only(starts(lengths[chosen])),
        token_ids=read_only(seen.token_ids[tokens]),
        positions=read_only(seen.positions[tokens]),
        taps={layer: hidden[kept] for layer, hidden in seen.taps.items()},
        next_offsets=read_only(starts(next_lengths[chosen])),
        next_token_ids=read_only(seen.next_token_ids[following]),
        propose=read_only(seen.propose[chosen]),
        num_cached=read_only(seen.num_cached[chosen]),
        block_tables=tuple(read_only(table[chosen]) for table in seen.block_tables),
    )


def checked(answer: object, seen: Observation) -> tuple[Drafts, Float32]:
    """A drafter's proposal, checked against the step's rows; `DraftTable.put` checks the nodes.

    Raises:
        EngineError: it is something else, or too much.
    """
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Drafts)):
        raise EngineError(
            f"propose answered {type(answer).__name__}; allowed: Drafts and an array of probabilities"
        )
    drafts, confidences = answer
    for name in ("rows", "offsets", "token_ids", "parents"):
        _check_array(name, getattr(drafts, name), np.int32)
    _check_array("the probabilities", confidences, np.float32)
    if not (len(drafts.rows) or len(drafts.token_ids) or len(confidences)):
        return drafts, confidences
    # NaN is in no interval.
    if not bool(((confidences >= 0) & (confidences <= 1)).all()):
        raise EngineError("propose answered probabilities that are not from 0 to 1")
    allowed = dict(zip(seen.rows.tolist(), seen.propose.tolist(), strict=True))
    for row, count in zip(drafts.rows.tolist(), np.diff(drafts.offsets).tolist(), strict=True):
        if count > allowed.get(row, 0) or row not in allowed:
            raise EngineError(
                f"propose answered {count} nodes for row {row}; allowed: {allowed.get(row, 0)}"
            )
    return drafts, confidences


def starts(lengths: Int64 | Int32) -> Int32:
    """Offsets of ragged rows: int32 [num_rows + 1]."""
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def _kept(inputs: StepInputs, accepted: Accepted) -> Int64:
    """The step's tokens that are known now: those of the chunks, and accepted nodes."""
    if not inputs.num_nodes.any():
        return np.arange(len(inputs.owner))
    kept: Bool = inputs.local < inputs.num_chunk[inputs.owner]
    i, k = np.nonzero(np.arange(accepted.nodes.shape[1]) < accepted.num_accepted[:, None])
    kept[inputs.starts[i] + inputs.num_chunk[i] + accepted.nodes[i, k]] = True
    return np.flatnonzero(kept)


def _check_array(name: str, array: object, dtype: type[np.generic]) -> None:
    if not (isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype == dtype):
        found = (
            f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array)
        )
        raise EngineError(f"propose answered {name} as {found}; allowed: {dtype.__name__} [n]")
