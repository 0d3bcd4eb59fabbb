"""The drafter: a head over the target's hidden states guesses chains, or trees.

Row s of the head's KV is made of token s and the feature of token s - 1, in the slot of token s: a block's
rows depend on nothing behind it, as the target's do. Rows of guessed tokens are made of the head's own
states and are void after the step; accepted tokens are computed again from the target's.
"""

from __future__ import annotations

import numpy as np
import torch

from pegboard.interfaces.drafter import Drafter, DrafterContext, Observation, OwnLayers, UnitTokens
from pegboard.models.layers import LayerBuilder
from pegboard.step import Drafts, Float32, Int32, RowAdmission
from pegboard_eagle.features import Features
from pegboard_eagle.layers import EagleLayers
from pegboard_eagle.layout import layout_of
from pegboard_eagle.options import EagleOptions
from pegboard_eagle.tree import ROOT, Pool, grow, roots

Nodes = tuple[Int32, Int32, Float32]
"""Tokens, parents and probabilities of a row's nodes."""


class EagleDrafter(Drafter):
    """EAGLE 1, 2 and 3."""

    def __init__(self, context: DrafterContext, options: EagleOptions) -> None:
        assert context.facts is not None and context.target_shape is not None
        self._context = context
        self._options = options
        self._layout = layout_of(context.facts, context.target_shape, options)
        self._features = Features(context.max_num_seqs, context.groups[0].block_size)
        self._unit = context.unit(self._layout.shape, self._build)

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        self._features.admit(admission, block_tables[0])

    def release(self, row: int, num_tokens: int) -> None:
        self._features.release(row)

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        states = self._extend(seen)
        asked = np.flatnonzero(seen.propose)
        if not len(asked):
            return _drafts(seen.rows[asked], [])
        # The slot after the last known token's, which is not observed yet.
        ends = seen.positions[seen.offsets[1:][asked] - 1] + 2
        rows, num_nodes = seen.rows[asked], seen.propose[asked]
        if self._options.top_k == 1:
            return _drafts(rows, self._chains(rows, ends, num_nodes, states))
        return _drafts(rows, self._trees(rows, ends, num_nodes, states))

    def _build(self, builder: LayerBuilder) -> OwnLayers:
        self._layers = EagleLayers(builder, self._layout, self._context)
        return self._layers

    def _extend(self, seen: Observation) -> torch.Tensor:
        """Computes the rows of what was observed and, where nodes are asked for, of the last known token.
        Returns the latter's states, [rows asked, hidden_size]."""
        features = self._layers.features(seen.taps)
        sources = torch.cat((self._features.before(seen, features), features))
        num_rows, ends = len(seen.rows), seen.offsets[1:]
        source = num_rows + np.arange(len(seen.token_ids)) - 1
        source[seen.offsets[:-1]] = np.arange(num_rows)
        kept = seen.positions > 0  # the first token of a text has no feature before it
        asked = np.flatnonzero(seen.propose)
        behind = np.cumsum(kept)[ends - 1][asked]
        newest = seen.next_token_ids[seen.next_offsets[1:][asked] - 1]
        token_ids = np.insert(seen.token_ids[kept], behind, newest)
        source = np.insert(source[kept], behind, num_rows + ends[asked] - 1)
        counts = np.add.reduceat(kept, seen.offsets[:-1]) + (seen.propose > 0)
        starts = np.maximum(seen.positions[seen.offsets[:-1]], 1).astype(np.int32)
        some = counts > 0
        if not some.any():
            return features[:0]
        offsets = _starts(counts[some])
        tokens = UnitTokens(seen.rows[some], offsets, starts[some], self._tensor(token_ids))
        states = self._run(tokens, sources[self._tensor(source)])
        return states[self._tensor(offsets[1:][seen.propose[some] > 0] - 1)]

    def _chains(
        self, rows: Int32, ends: Int32, num_nodes: Int32, states: torch.Tensor
    ) -> list[Nodes]:
        """The likeliest token, and again behind it."""
        guesses: list[list[int]] = [[] for _ in rows]
        probabilities: list[list[float]] = [[] for _ in rows]
        going = np.arange(len(rows))
        for depth in range(int(num_nodes.max())):
            best, draft_ids = self._log_probs(states).max(dim=1)
            token_ids = self._target_ids(draft_ids)
            listed = zip(going.tolist(), token_ids.tolist(), best.exp().tolist(), strict=True)
            for i, token, probability in listed:
                guesses[i].append(token)
                probabilities[i].append(probability)
            more = num_nodes[going] > depth + 1
            going = going[more]
            if not len(going):
                break
            on = self._tensor(np.flatnonzero(more))
            tokens = UnitTokens(
                rows[going],
                np.arange(len(going) + 1, dtype=np.int32),
                (ends[going] + depth).astype(np.int32),
                token_ids[on],
            )
            states = self._run(tokens, self._layers.fed_back(states[on]))
        return [
            (
                np.array(guess, np.int32),
                np.arange(ROOT, len(guess) - 1, dtype=np.int32),
                np.array(probability, np.float32),
            )
            for guess, probability in zip(guesses, probabilities, strict=True)
        ]

    def _trees(
        self, rows: Int32, ends: Int32, num_nodes: Int32, states: torch.Tensor
    ) -> list[Nodes]:
        """The best nodes of a tree. A depth is run together with those above it, which its mask shows
        to it: of what lies in KV a token sees all or nothing."""
        num_rows, top_k = len(rows), self._options.top_k
        pool = roots(self._log_probs(states), top_k)
        frontier = torch.arange(pool.scores.shape[1], device=states.device).expand(num_rows, -1)
        run = frontier[:, :0]
        fed = states[:, None, :][:, :0]
        above = self._layers.fed_back(states)[:, None, :].expand(-1, frontier.shape[1], -1)
        for _ in range(min(self._options.depth, int(num_nodes.max())) - 1):
            run = torch.cat((run, frontier), dim=1)
            fed = torch.cat((fed, above), dim=1)
            out = self._run(self._tree_tokens(rows, ends, pool, run), fed.flatten(0, 1))
            newest = out.view(*run.shape, -1)[:, -frontier.shape[1] :]
            log_probs = self._log_probs(newest.flatten(0, 1)).view(*frontier.shape, -1)
            children = grow(pool, frontier, log_probs, top_k)
            parent = pool.parents.gather(1, children)
            at = (parent[:, :, None] == frontier[:, None, :]).int().argmax(dim=2)
            newest = self._layers.fed_back(newest.flatten(0, 1)).view(newest.shape)
            above = newest.gather(1, at[:, :, None].expand(-1, -1, newest.shape[2]))
            frontier = children
        return self._best(pool, num_nodes)

    def _tree_tokens(self, rows: Int32, ends: Int32, pool: Pool, run: torch.Tensor) -> UnitTokens:
        """The nodes that are run, with their parents among them."""
        parents = pool.parents.gather(1, run)
        same = parents[:, :, None] == run[:, None, :]
        local = torch.where(same.any(dim=2), same.int().argmax(dim=2), ROOT)
        return UnitTokens(
            rows,
            np.arange(len(rows) + 1, dtype=np.int32) * run.shape[1],
            ends.astype(np.int32),
            self._target_ids(pool.token_ids.gather(1, run).flatten()),
            local.flatten().cpu().numpy().astype(np.int32),
        )

    def _best(self, pool: Pool, num_nodes: Int32) -> list[Nodes]:
        token_ids = self._target_ids(pool.token_ids).cpu().numpy().astype(np.int32)
        parents = pool.parents.cpu().numpy()
        probabilities = pool.log_probs.exp().cpu().numpy().astype(np.float32)
        nodes = []
        for i, best in enumerate(pool.best(num_nodes.tolist())):
            chosen = best.cpu().numpy()
            number = np.full(pool.scores.shape[1] + 1, ROOT, np.int32)
            number[chosen] = np.arange(len(chosen))
            number[ROOT] = ROOT  # the last entry stands for no parent
            nodes.append(
                (token_ids[i][chosen], number[parents[i][chosen]], probabilities[i][chosen])
            )
        return nodes

    def _run(self, tokens: UnitTokens, hidden: torch.Tensor) -> torch.Tensor:
        return self._unit.forward(tokens, hidden)

    def _log_probs(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [N, draft vocabulary], none above 0."""
        return torch.log_softmax(self._layers.logits(states), dim=1).clamp_(max=0)

    def _target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        ids = self._layers.target_ids
        return draft_ids if ids is None else ids[draft_ids]

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._context.device)


def _starts(counts: np.ndarray) -> Int32:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def _drafts(rows: Int32, nodes: list[Nodes]) -> tuple[Drafts, Float32]:
    """The nodes of rows, one row after the other."""
    token_ids, parents, probabilities = zip(*nodes, strict=True) if nodes else ((), (), ())
    drafts = Drafts(
        rows=rows.astype(np.int32),
        offsets=_starts(np.array([len(one) for one in token_ids], np.int64)),
        token_ids=np.concatenate((np.empty(0, np.int32), *token_ids)),
        parents=np.concatenate((np.empty(0, np.int32), *parents)),
    )
    return drafts, np.concatenate((np.empty(0, np.float32), *probabilities))
