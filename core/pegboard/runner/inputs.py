"""Turns a `StepBatch` and the rows' tables into the tensors of one forward.

A row's step tokens are its chunk, then its draft nodes. Everything is computed for all tokens at
once; the only loops are over node numbers, of which a row has a few.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pegboard.errors import EngineError
from pegboard.runner.drafts import ROOT, chain_parents
from pegboard.runner.rows import Rows
from pegboard.step import Bool, Int32, Int64, StepBatch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tokens: R rows, T tokens, at most M draft nodes a row, L rows of logits to sample.

    Attributes:
        rows: int32 [R], rows of the tables.
        num_computed: int64 [R], tokens in KV.
        num_chunk: int64 [R], known tokens to compute.
        num_nodes: int64 [R], draft nodes to verify, after them.
        starts: int64 [R + 1], where each row's tokens start.
        owner: int64 [T], each token's row, as an index into `rows`.
        local: int64 [T], its number within the row's step tokens.
        token_ids, positions: int64 [T]; a node's position is that of its depth.
        node_tokens: int32 [R, M].
        node_parents: int32 [R, M], ROOT or a node's number; void past num_nodes.
        ancestors: bool [T, most tokens of a row], as in `AttentionBatch`; None without a tree.
        logit_owner: int64 [L], the row of each logit row, as an index into `rows`.
        logit_tokens: int64 [L], the tokens after which one is sampled.
        logit_nodes: int64 [L], 0 for a row's last known token, n + 1 for its node n.
    """

    rows: Int32
    num_computed: Int64
    num_chunk: Int64
    num_nodes: Int64
    starts: Int64
    owner: Int64
    local: Int64
    token_ids: Int64
    positions: Int64
    node_tokens: Int32
    node_parents: Int32
    ancestors: Bool | None
    logit_owner: Int64
    logit_tokens: Int64
    logit_nodes: Int64


def build_inputs(rows: Rows, batch: StepBatch) -> StepInputs:
    """The step's tokens.

    Raises:
        EngineError: host and worker disagree about a row.
    """
    _check(rows, batch)
    num_computed = batch.num_computed.astype(np.int64)
    num_chunk = batch.num_tokens.astype(np.int64)
    num_nodes = batch.verify.astype(np.int64)
    lengths = num_chunk + num_nodes
    starts = np.concatenate(([0], np.cumsum(lengths)))
    owner = np.repeat(np.arange(len(lengths)), lengths)
    local = np.arange(len(owner)) - starts[owner]
    numbers = num_computed[owner] + local
    # A node's may lie beyond the table; what is read there is replaced.
    columns = np.minimum(numbers, rows.token_ids.shape[1] - 1)
    token_ids = rows.token_ids[batch.rows[owner], columns].astype(np.int64)
    width = int(num_nodes.max(initial=0))
    node_tokens = rows.drafts.token_ids[batch.rows, :width]
    if width:
        node = local - num_chunk[owner]
        at = np.flatnonzero(node >= 0)
        token_ids[at] = node_tokens[owner[at], node[at]]
        logit_tokens = np.flatnonzero(batch.sample[owner] & (node >= -1))
        logit_owner, logit_nodes = owner[logit_tokens], node[logit_tokens] + 1
    else:
        logit_owner = np.flatnonzero(batch.sample)
        logit_tokens = starts[1:][logit_owner] - 1
        logit_nodes = np.zeros(len(logit_owner), dtype=np.int64)
    inputs = StepInputs(
        rows=batch.rows,
        num_computed=num_computed,
        num_chunk=num_chunk,
        num_nodes=num_nodes,
        starts=starts,
        owner=owner,
        local=local,
        token_ids=token_ids,
        positions=numbers,
        node_tokens=node_tokens,
        node_parents=rows.drafts.parents[batch.rows, :width],
        ancestors=None,
        logit_owner=logit_owner,
        logit_tokens=logit_tokens,
        logit_nodes=logit_nodes,
    )
    if not width or not rows.drafts.has_trees or _all_chains(inputs):
        return inputs
    return _with_trees(inputs)


def node_path(parents: Int32, node: int) -> list[int]:
    """A node's ancestors from depth 1 on, itself last; parents: [num_nodes] of one row."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = int(parents[node])
    return path[::-1]


def _check(rows: Rows, batch: StepBatch) -> None:
    known = rows.num_known[batch.rows]
    end = batch.num_computed + batch.num_tokens
    wrong = (batch.num_tokens < 1) | (end > known) | (batch.sample & (end != known))
    is_pending = batch.sample & (rows.sampled_in[batch.rows] > batch.fence)
    wrong |= (batch.pending != is_pending) | (batch.pending & (batch.num_tokens > 1))
    if batch.verify.any():
        wrong |= batch.verify > np.where(batch.sample, rows.drafts.counts[batch.rows], 0)
    if wrong.any():
        i = int(np.argmax(wrong))
        row = int(batch.rows[i])
        raise EngineError(
            f"step {batch.step_id}: row {row} knows {known[i]} tokens and holds "
            f"{rows.drafts.counts[row]} drafts, its last token from step {rows.sampled_in[row]}; the host "
            f"has heard of step {batch.fence} and asks for tokens {batch.num_computed[i]} to {end[i]} and "
            f"{batch.verify[i]} drafts, sample={bool(batch.sample[i])}, pending={bool(batch.pending[i])}"
        )


def _depths(parents: Int32) -> Int64:
    """Depth of each node, 1 for a child of the last known token; int64 [R, M]."""
    depths = np.ones(parents.shape, dtype=np.int64)
    every = np.arange(len(parents))
    for node in range(1, parents.shape[1]):
        # Void entries may hold any parent; none is read.
        parent = np.minimum(parents[:, node], node - 1)
        depths[:, node] = np.where(parent == ROOT, 1, depths[every, parent] + 1)
    return depths


def _all_chains(inputs: StepInputs) -> bool:
    used = np.arange(inputs.node_parents.shape[1]) < inputs.num_nodes[:, None]
    chains = chain_parents(inputs.node_parents)
    return bool((inputs.node_parents == chains)[used].all())


def _with_trees(inputs: StepInputs) -> StepInputs:
    """The inputs of a step in which some row's drafts are a tree: positions by depth, and the mask."""
    return replace(inputs, positions=_positions(inputs), ancestors=_ancestors(inputs))


def _positions(inputs: StepInputs) -> Int64:
    node = inputs.local - inputs.num_chunk[inputs.owner]
    at = np.flatnonzero(node >= 0)
    last_known = inputs.num_computed + inputs.num_chunk - 1
    positions = inputs.positions.copy()
    depths = _depths(inputs.node_parents)
    positions[at] = last_known[inputs.owner[at]] + depths[inputs.owner[at], node[at]]
    return positions


def _ancestors(inputs: StepInputs) -> Bool:
    lengths = np.diff(inputs.starts)
    ancestors = np.arange(int(lengths.max())) <= inputs.local[:, None]
    for node in range(inputs.node_parents.shape[1]):
        having = np.flatnonzero(inputs.num_nodes > node)
        chunk = inputs.num_chunk[having]
        # ROOT is -1: the parent's token is then the chunk's last.
        parent = inputs.starts[having] + chunk + inputs.node_parents[having, node]
        token = inputs.starts[having] + chunk + node
        ancestors[token] = ancestors[parent]
        ancestors[token, chunk + node] = True
    return ancestors
