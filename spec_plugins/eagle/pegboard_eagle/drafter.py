"""The drafter: a head over the target's hidden states guesses chains, or trees.

Row s of the head's KV is made of token s and the feature of token s - 1, in the slot of token s: a block's
rows depend on nothing behind it, as the target's do. Rows of guessed tokens are made of the head's own
states and are void after the step; accepted tokens are computed again from the target's.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from pegboard.interfaces.drafter import Drafter, DrafterContext, Observation, OwnLayers, UnitTokens
from pegboard.models.layers import DTYPES, LayerBuilder
from pegboard.step import Drafts, Float32, Int32, RowAdmission
from pegboard_eagle.deferred import Deferred
from pegboard_eagle.features import Features
from pegboard_eagle.layers import EagleLayers
from pegboard_eagle.layout import layout_of
from pegboard_eagle.nodes import Nodes, chains_of, drafts_of, offsets_of
from pegboard_eagle.options import EagleOptions
from pegboard_eagle.sampled import Sampling
from pegboard_eagle.tree import ROOT, Pool, grow, roots


class EagleDrafter(Drafter):
    """EAGLE 1, 2 and 3."""

    def __init__(self, context: DrafterContext, options: EagleOptions) -> None:
        assert context.facts is not None and context.target_shape is not None
        self._context = context
        self._options = options
        self._layout = layout_of(context.facts, context.target_shape, options)
        shape, (group,) = self._layout.shape, context.groups
        kept = torch.empty(0, shape.hidden_size, dtype=DTYPES[context.dtype], device=context.device)
        self._features = Features(
            context.max_num_seqs, context.num_blocks[0], group.block_size, kept
        )
        self._deferred = Deferred(context.max_num_seqs, group.block_size)
        self._sampling = Sampling(context) if options.sampled else None
        self._unit = context.unit(shape, self._build)

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        self._features.admit(admission, block_tables[0])
        self._deferred.admit(admission.row)
        if self._sampling is not None:
            self._sampling.admit(admission)

    def release(self, row: int, num_tokens: int) -> None:
        self._features.release(row)

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        due = self._deferred.due(seen)
        if due is None:
            return drafts_of(seen.rows[:0], [])
        return self._proposed(due)

    def _proposed(self, seen: Observation) -> tuple[Drafts, Float32]:
        states = self._extend(seen)
        asked = np.flatnonzero(seen.propose)
        if not len(asked):
            return drafts_of(seen.rows[asked], [])
        # The slot after the last known token's, which is not observed yet.
        ends = seen.positions[seen.offsets[1:][asked] - 1] + 2
        rows, num_nodes = seen.rows[asked], seen.propose[asked]
        if self._options.top_k == 1:
            return self._chains(rows, ends, num_nodes, states)
        return drafts_of(rows, self._trees(rows, ends, num_nodes, states))

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
        offsets = offsets_of(counts[some])
        tokens = UnitTokens(seen.rows[some], offsets, starts[some], self._tensor(token_ids))
        states = self._run(tokens, sources[self._tensor(source)])
        return states[self._tensor(offsets[1:][seen.propose[some] > 0] - 1)]

    def _chains(
        self, rows: Int32, ends: Int32, num_nodes: Int32, states: torch.Tensor
    ) -> tuple[Drafts, Float32]:
        """The likeliest token, or one that is drawn, and again behind it."""
        going, least = np.arange(len(rows)), self._options.min_confidence
        likelihoods = np.ones(len(rows), np.float32)
        owners, token_ids, probabilities = [], [], []
        for depth in range(int(num_nodes.max())):
            tokens, found = self._guesses(rows[going], ends[going] + depth, states)
            likelihoods = likelihoods * found
            good = likelihoods >= least
            owners.append(going[good])
            token_ids.append(tokens.cpu().numpy()[good])
            probabilities.append(found[good])
            more = good & (num_nodes[going] > depth + 1)
            if not more.all():
                going, likelihoods = going[more], likelihoods[more]
                on = self._tensor(np.flatnonzero(more))
                tokens, states = tokens[on], states[on]
            if not len(going):
                break
            next_tokens = UnitTokens(
                rows[going],
                np.arange(len(going) + 1, dtype=np.int32),
                (ends[going] + depth).astype(np.int32),
                tokens,
            )
            states = self._run(next_tokens, self._layers.fed_back(states))
        return chains_of(rows, owners, token_ids, probabilities)

    def _guesses(
        self, rows: Int32, positions: Int32, states: torch.Tensor
    ) -> tuple[torch.Tensor, Float32]:
        """A token of the target's after each state, int64 [n], and the head's probability of it.

        positions: int32 [n], of these tokens in their sequences.
        """
        logits = self._layers.logits(states)
        if self._sampling is not None and self._sampling.draws(rows):
            drawn, probabilities = self._sampling.draw(
                rows, positions, logits, self._layers.target_ids
            )
            return drawn, probabilities.cpu().numpy()
        best, draft_ids = logits.max(dim=1)
        probabilities = (best - logits.logsumexp(dim=1)).exp_().clamp_(max=1)
        return self._target_ids(draft_ids), probabilities.cpu().numpy()

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
        confidence = self._options.min_confidence
        least = math.log(confidence) if confidence else -math.inf
        nodes = []
        for i, best in enumerate(pool.best(num_nodes.tolist(), least)):
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
