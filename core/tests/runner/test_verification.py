"""Verification of chains, which needs no walk, keeps what the walk over trees keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pegboard.runner.drafts import chain_parents
from pegboard.runner.inputs import StepInputs
from pegboard.runner.verification import Accepted, accept, moves

TOKENS = st.integers(0, 2)
ROWS = st.lists(
    st.tuples(
        st.booleans(),  # samples
        st.integers(1, 3),  # known tokens that it computes
        st.lists(TOKENS, max_size=4),  # drafts, of a row that samples
    ),
    min_size=1,
    max_size=4,
)


def step(rows: list[tuple[bool, int, list[int]]]) -> StepInputs:
    """The inputs that a step of chains has, built token by token."""
    nodes = [drafts if samples else [] for samples, _, drafts in rows]
    width = max(map(len, nodes))
    owner: list[int] = []
    local: list[int] = []
    starts, logits = [0], []
    for row, ((samples, num_chunk, _), drafts) in enumerate(zip(rows, nodes, strict=True)):
        for number in range(num_chunk + len(drafts)):
            if samples and number >= num_chunk - 1:
                logits.append((row, len(owner), number - num_chunk + 1))
            owner.append(row)
            local.append(number)
        starts.append(len(owner))
    padded = [drafts + [7] * (width - len(drafts)) for drafts in nodes]
    logit_owner, logit_tokens, logit_nodes = np.array(logits, np.int64).reshape(-1, 3).T
    node_tokens = np.array(padded, np.int32).reshape(len(rows), width)
    return StepInputs(
        rows=np.arange(len(rows), dtype=np.int32),
        num_computed=np.zeros(len(rows), np.int64),
        num_chunk=np.array([num_chunk for _, num_chunk, _ in rows]),
        num_nodes=np.array([len(drafts) for drafts in nodes]),
        starts=np.array(starts),
        owner=np.array(owner),
        local=np.array(local),
        token_ids=np.zeros(len(owner), np.int64),
        positions=np.array(local),
        node_tokens=node_tokens,
        node_parents=chain_parents(node_tokens),
        ancestors=None,
        logit_owner=logit_owner,
        logit_tokens=logit_tokens,
        logit_nodes=logit_nodes,
    )


def said(accepted: Accepted) -> list[tuple[list[int], ...]]:
    """Each row's committed tokens, the logit rows of these, its accepted nodes, and the depths tried."""
    rows = zip(accepted.num_committed, accepted.num_accepted, accepted.num_tried, strict=True)
    return [
        (
            accepted.token_ids[i, :committed].tolist(),
            accepted.logit_rows[i, :committed].tolist(),
            accepted.nodes[i, :count].tolist(),
            [int(tried)],
        )
        for i, (committed, count, tried) in enumerate(rows)
    ]


@given(ROWS, st.data())
def test_chains_are_accepted_as_trees_are(
    rows: list[tuple[bool, int, list[int]]], data: st.DataObject
) -> None:
    chains = step(rows)
    num_logits = len(chains.logit_owner)
    sampled = np.array(data.draw(st.lists(TOKENS, min_size=num_logits, max_size=num_logits)))
    usable = np.array(
        data.draw(st.lists(st.booleans(), min_size=num_logits, max_size=num_logits)), np.bool_
    )
    sampled = sampled.astype(np.int64)
    # The mask only says that there may be trees; the walk reads the parents.
    trees = replace(chains, ancestors=np.zeros((len(chains.owner), 1), np.bool_))
    found = accept(chains, sampled, usable)
    assert said(found) == said(accept(trees, sampled, usable))
    assert all(not len(moved) for moved in moves(chains, found))
