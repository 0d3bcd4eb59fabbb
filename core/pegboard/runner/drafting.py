"""A step as a drafter sees it, and the check of its answer."""

from __future__ import annotations

import numpy as np
import torch

from pegboard.errors import EngineError
from pegboard.interfaces.drafter import Observation
from pegboard.runner.inputs import StepInputs
from pegboard.runner.rows import Rows
from pegboard.runner.verification import Accepted
from pegboard.step import Bool, Drafts, Float32, Int32, Int64, StepBatch, read_only


def observe(
    batch: StepBatch,
    inputs: StepInputs,
    accepted: Accepted,
    taps: dict[int, torch.Tensor],
    rows: Rows,
    groups: range,
    known: Bool,
) -> Observation:
    """The tokens and states that the step brought to the rows that the drafter knows. A row that
    sampled nothing may not get drafts.

    Args:
        groups: the numbers of the drafter's KV groups.
        known: bool [R], which rows of the step it knows.
    """
    kept = _kept(inputs, accepted)
    # Nearly always it knows all.
    some: Bool | slice = slice(None) if known.all() else known
    if known is some:
        kept = kept[known[inputs.owner[kept]]]
    shown, num_next = batch.rows[some], accepted.num_committed[some]
    return Observation(
        rows=read_only(shown),
        offsets=read_only(starts((inputs.num_chunk + accepted.num_accepted)[some])),
        token_ids=read_only(inputs.token_ids[kept].astype(np.int32)),
        positions=read_only(inputs.positions[kept].astype(np.int32)),
        taps={layer: hidden[torch.from_numpy(kept)] for layer, hidden in taps.items()},
        next_offsets=read_only(starts(num_next)),
        next_token_ids=read_only(accepted.committed(some)),
        propose=read_only(batch.propose[some] * (num_next > 0)),
        num_cached=read_only(rows.num_cached[shown].astype(np.int32)),
        block_tables=tuple(read_only(rows.block_tables[group][shown]) for group in groups),
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
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _kept(inputs: StepInputs, accepted: Accepted) -> Int64:
    """The step's tokens that are known now: those of the chunks, and accepted nodes."""
    if not inputs.num_nodes.any():
        return np.arange(len(inputs.owner))
    if inputs.ancestors is None:
        num_kept = inputs.num_chunk + accepted.num_accepted
        return np.flatnonzero(inputs.local < num_kept[inputs.owner])
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
