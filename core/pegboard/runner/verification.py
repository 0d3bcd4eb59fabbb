"""Verification of draft nodes: one walk for chains, trees and rows without drafts.

At the last known token and at each node the target's own token was sampled as if no draft existed. From
the last known token on, the walk commits that token and steps to the child that guessed it, until no
child did.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pegboard.runner.inputs import StepInputs
from pegboard.step import Bool, Int32, Int64


@dataclass(frozen=True, slots=True)
class Accepted:
    """The tokens that each of R rows commits, at most D.

    Attributes:
        token_ids: int32 [R, D], committed tokens; void past num_committed.
        logit_rows: int64 [R, D], the logit row that each was sampled from.
        num_committed: int64 [R]; 0: the row did not sample, or failed.
        nodes: int64 [R, D - 1], accepted nodes; void past num_accepted.
        num_accepted: int64 [R]; num_committed is one more.
        num_tried: int64 [R], depths at which a node was compared.
    """

    token_ids: Int32
    logit_rows: Int64
    num_committed: Int64
    nodes: Int64
    num_accepted: Int64
    num_tried: Int64

    def committed(self, rows: Bool | slice = slice(None)) -> Int32:
        """int32 [sum of num_committed], the tokens of all rows or of some, one row after the other."""
        token_ids, counts = self.token_ids[rows], self.num_committed[rows]
        return token_ids[np.arange(token_ids.shape[1]) < counts[:, None]]


def accept(inputs: StepInputs, sampled: Int64, usable: Bool) -> Accepted:
    """Walks all rows together, a depth at a time.

    Args:
        inputs: the step.
        sampled: int64 [L], the target's token at each logit row.
        usable: bool [L], whether it may be committed; where a row's first is not, nothing is.
    """
    num_rows, width = inputs.node_tokens.shape
    if not width:
        return _last_alone(inputs, sampled, usable)
    if inputs.ancestors is None:
        return _chains(inputs, sampled, usable)
    every = np.arange(num_rows)
    logit_row = np.zeros((num_rows, width + 1), dtype=np.int64)
    logit_row[inputs.logit_owner, inputs.logit_nodes] = np.arange(len(sampled))
    present = np.zeros((num_rows, width + 1), dtype=np.bool_)
    present[inputs.logit_owner, inputs.logit_nodes] = usable

    going = present[:, 0]
    at = np.zeros(num_rows, dtype=np.int64)
    num_committed, num_tried = np.zeros_like(at), np.zeros_like(at)
    tokens: list[Int64] = []
    path: list[Int64] = []
    while going.any():
        target = sampled[logit_row[every, at]]
        tokens.append(target)
        path.append(at)
        num_committed += going
        children = present[:, 1:] & (inputs.node_parents + 1 == at[:, None])
        num_tried += going & children.any(axis=1)
        right = children & (inputs.node_tokens == target[:, None])
        going = going & right.any(axis=1)
        at = np.where(going, right.argmax(axis=1) + 1, at)

    columns = np.stack(path, axis=1) if path else np.zeros((num_rows, 1), dtype=np.int64)
    committed = np.stack(tokens, axis=1) if tokens else columns
    return Accepted(
        token_ids=committed.astype(np.int32),
        logit_rows=logit_row[every[:, None], columns],
        num_committed=num_committed,
        nodes=columns[:, 1:] - 1,
        num_accepted=np.maximum(num_committed - 1, 0),
        num_tried=num_tried,
    )


def _chains(inputs: StepInputs, sampled: Int64, usable: Bool) -> Accepted:
    """The walk where nobody has a tree: a row's logit rows are in the order of its nodes."""
    num_rows, width = inputs.node_tokens.shape
    depth = np.arange(width + 1)
    heads = np.flatnonzero(inputs.logit_nodes == 0)
    going = np.zeros(num_rows, np.bool_)
    first = np.zeros(num_rows, np.int64)
    going[inputs.logit_owner[heads]] = usable[heads]
    first[inputs.logit_owner[heads]] = heads
    logit_rows = np.minimum(first[:, None] + depth, len(sampled) - 1)
    targets = sampled[logit_rows]
    # A column more than nodes: none follows the last one.
    compared = np.zeros((num_rows, width + 1), np.bool_)
    compared[:, :width] = depth[:width] < np.where(going, inputs.num_nodes, 0)[:, None]
    compared[:, :width] &= usable[logit_rows[:, 1:]]
    right = compared[:, :width] & (inputs.node_tokens == targets[:, :width])
    num_accepted = np.logical_and.accumulate(right, axis=1).sum(axis=1)
    return Accepted(
        token_ids=targets.astype(np.int32),
        logit_rows=logit_rows,
        num_committed=num_accepted + going,
        nodes=np.broadcast_to(depth[:width], (num_rows, width)),
        num_accepted=num_accepted,
        num_tried=num_accepted + compared[np.arange(num_rows), num_accepted],
    )


def _last_alone(inputs: StepInputs, sampled: Int64, usable: Bool) -> Accepted:
    """The result if no row has a node: each commits the token after its last known one."""
    num_rows = len(inputs.rows)
    logit_rows, token_ids = np.zeros((2, num_rows, 1), dtype=np.int64)
    logit_rows[inputs.logit_owner, 0] = np.arange(len(sampled))
    token_ids[inputs.logit_owner, 0] = sampled
    num_committed, none = np.zeros((2, num_rows), dtype=np.int64)
    num_committed[inputs.logit_owner] = usable
    return Accepted(
        token_ids=token_ids.astype(np.int32),
        logit_rows=logit_rows,
        num_committed=num_committed,
        nodes=np.zeros((num_rows, 0), dtype=np.int64),
        num_accepted=none,
        num_tried=none,
    )


def moves(inputs: StepInputs, accepted: Accepted) -> tuple[Int64, Int64, Int64]:
    """KV to move so that accepted nodes stand right behind the known tokens.

    Returns:
        Index into the step's rows, source and target token of the row, one a move.
    """
    depth = np.arange(accepted.nodes.shape[1])
    taken = depth < accepted.num_accepted[:, None]
    i, k = np.nonzero(taken & (accepted.nodes != depth))
    behind = (inputs.num_computed + inputs.num_chunk)[i]
    return i, behind + accepted.nodes[i, k], behind + k
