"""Tells the drafter what a step brought, and keeps what it proposes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pegboard.errors import EngineError
from pegboard.interfaces.drafter import Drafter, Observation
from pegboard.runner.drafts import DraftTable
from pegboard.runner.inputs import StepInputs
from pegboard.runner.verification import Accepted
from pegboard.step import Bool, Drafts, Int32, StepBatch, read_only

Int64 = NDArray[np.int64]


def observe(
    batch: StepBatch, inputs: StepInputs, accepted: Accepted, taps: dict[int, torch.Tensor]
) -> Observation:
    """What the step computed and kept; a row that sampled nothing may not get drafts."""
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
    )


def redraft(drafter: Drafter, seen: Observation, table: DraftTable) -> None:
    """Replaces the nodes of the step's rows by what the drafter proposes.

    Raises:
        EngineError: nodes for a row that computed nothing, too many, or unusable ones.
    """
    table.drop(seen.rows)
    drafts, confidences = drafter.propose(seen)
    if len(drafts.rows):
        _check(drafts, seen)
        table.put(drafts, confidences)


def starts(lengths: Int64) -> Int32:
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


def _check(drafts: Drafts, seen: Observation) -> None:
    allowed = dict(zip(seen.rows.tolist(), seen.propose.tolist(), strict=True))
    for row, count in zip(drafts.rows.tolist(), np.diff(drafts.offsets).tolist(), strict=True):
        if count > allowed.get(row, 0):
            raise EngineError(
                f"drafter: {count} nodes for row {row}; allowed: {allowed.get(row, 0)}"
            )
