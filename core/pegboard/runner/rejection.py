"""Chain rejection sampling (arXiv 2211.17192, 2302.01318): the target's distribution, not its tokens.

A draft token x, drawn from q, is kept with the probability min(1, p(x) / q(x)). Otherwise one is drawn
from max(p - q, 0), scaled to a sum of 1, which x is never of. p is the target's distribution after every
processor, temperature and filter. Where no draft follows, and in greedy rows, the token is the target's
own.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch
from numpy.typing import NDArray

from pegboard.errors import EngineError
from pegboard.interfaces.drafter import Drafter, Observation, SampledDrafter
from pegboard.interfaces.kernel import ProbabilitiesKernel, SampleKernel, SampleRows
from pegboard.interfaces.workload import logprobs_rows
from pegboard.runner.coins import uniforms
from pegboard.runner.drafting import checked
from pegboard.runner.drafts import DraftTable
from pegboard.runner.inputs import StepInputs
from pegboard.runner.token_choice import TokenChoice
from pegboard.step import Drafts, Int32, Int64

_MAX_OFF = 1e-3
"""How far a distribution's sum in float32 may be from 1."""


class Rejection(TokenChoice):
    """Draft tokens kept or replaced by chance, so that what is committed has the target's distribution."""

    def __init__(
        self, sample: SampleKernel, probabilities: ProbabilitiesKernel, drawn_from: torch.Tensor
    ) -> None:
        """
        Args:
            drawn_from: float32 [max_num_seqs, most nodes, vocab_size], for what the nodes that rows hold
                were drawn from.
        """
        self._sample = sample
        self._probabilities = probabilities
        self._drawn_from = drawn_from
        self._max_places = logprobs_rows(drawn_from.shape[2])

    def propose(self, drafter: Drafter, seen: Observation, table: DraftTable) -> None:
        assert isinstance(drafter, SampledDrafter)
        answer = drafter.propose_sampled(seen)
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Drafts)):
            raise EngineError(
                f"propose_sampled answered {type(answer).__name__}; allowed: Drafts and a tensor of"
                " probabilities"
            )
        drafts, probabilities = answer
        # What is verified must not depend on what was guessed: no policy is told how likely that was.
        alike = np.ones(len(drafts.token_ids), np.float32)
        checked((drafts, alike), seen)
        if len(drafts.rows):
            table.check(drafts, alike)
            self._check(drafts, probabilities)
            self._keep(drafts, probabilities)
            table.put(drafts, alike)

    def draw(self, logits: torch.Tensor, rows: SampleRows, inputs: StepInputs) -> Int64:
        guessed = inputs.logit_nodes < inputs.num_nodes[inputs.logit_owner]
        guessed &= rows.temperature.cpu().numpy() > 0
        if not guessed.any():
            return self._sample.sample(logits, rows).cpu().numpy()
        tokens = np.empty(len(logits), np.int64)
        others = np.flatnonzero(~guessed)
        if len(others):
            tokens[others] = self._sample.sample(*_picked(logits, rows, others)).cpu().numpy()
        places = np.flatnonzero(guessed)
        for first in range(0, len(places), self._max_places):
            some = places[first : first + self._max_places]
            tokens[some] = self._draw_beside(*_picked(logits, rows, some), inputs, some)
        return tokens

    def _draw_beside(
        self, logits: torch.Tensor, rows: SampleRows, inputs: StepInputs, places: Int64
    ) -> NDArray[np.int64]:
        """The tokens at logit rows that a draft node follows; logits and rows are theirs."""
        owner, node = inputs.logit_owner[places], inputs.logit_nodes[places]
        drafted = self._index(inputs.node_tokens[owner, node])
        q = self._drawn_from[self._index(inputs.rows[owner]), self._index(node)].to(torch.float64)
        q /= q.sum(dim=1, keepdim=True)
        p = self._probabilities.probabilities(logits, rows)
        seed, position, index = (
            values.cpu().numpy() for values in (rows.seed, rows.position, rows.index)
        )
        coins = torch.from_numpy(uniforms(seed.view(np.uint64), position, index)).to(p.device)
        return kept_or_redrawn(p, q, drafted, coins).cpu().numpy()

    def _check(self, drafts: Drafts, probabilities: object) -> None:
        """Raises EngineError for nodes that are no chain, or distributions that they cannot be of."""
        drawn_from = self._drawn_from
        _, node = DraftTable.places(drafts, np.diff(drafts.offsets))
        if not np.array_equal(drafts.parents, node - 1):
            raise EngineError(
                "drafts are trees; allowed where they are verified by rejection: chains"
            )
        if not isinstance(probabilities, torch.Tensor):
            raise EngineError(f"probabilities: {type(probabilities).__name__}; allowed: a tensor")
        allowed = [drawn_from.dtype, [len(node), drawn_from.shape[2]], drawn_from.device.type]
        found = [probabilities.dtype, [*probabilities.shape], probabilities.device.type]
        if found != allowed:
            raise EngineError(
                "probabilities: {} {} on {}".format(*found)
                + "; allowed: {} {} on {}".format(*allowed)
            )
        # NaN is not at least 0.
        if not bool((probabilities >= 0).all()):
            raise EngineError("probabilities that are negative or NaN; allowed: from 0 to 1")
        off = (probabilities.sum(dim=1, dtype=torch.float64) - 1).abs()
        if not bool((off <= _MAX_OFF).all()):
            raise EngineError(
                f"probabilities whose sum is off by {off.max():.3g}; allowed: {_MAX_OFF}"
            )
        tokens = self._index(drafts.token_ids)[:, None]
        if not bool((probabilities.gather(1, tokens) > 0).all()):
            raise EngineError(
                "a drafted token has the probability 0; allowed: tokens that were drawn"
            )

    def _keep(self, drafts: Drafts, probabilities: torch.Tensor) -> None:
        """Keeps a copy for the step that verifies."""
        rows, node = DraftTable.places(drafts, np.diff(drafts.offsets))
        self._drawn_from[self._index(rows), self._index(node)] = probabilities

    def _index(self, values: Int32 | Int64) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._drawn_from.device)


def kept_or_redrawn(
    p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor, coins: torch.Tensor
) -> torch.Tensor:
    """The drafted token where it is kept, else one of what is left of p; int64 [n].

    Args:
        p, q: float64 [n, vocab_size], the target's and the drafter's distribution.
        drafted: int64 [n], drawn from q.
        coins: float64 [n, 2], from 0 to below 1: whether it is kept, and else which is drawn.
    """
    at = drafted[:, None]
    # u < p / q, without the quotient's rounding; and never for p = 0.
    refused = torch.nonzero(coins[:, 0] * q.gather(1, at)[:, 0] >= p.gather(1, at)[:, 0])[:, 0]
    tokens = drafted.clone()
    if len(refused):
        rest = left_over(p[refused], q[refused])
        tokens[refused] = inverse_cdf(rest, coins[refused, 1])
    return tokens


def left_over(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """max(p - q, 0), [n, vocab_size], not scaled; p itself where rounding leaves nothing of it."""
    rest = (p - q).clamp_(min=0)
    return torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, p)


def inverse_cdf(mass: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The lowest id up to which the share of the mass is more than u; int64 [n].

    mass: [n, vocab_size], at least 0 and not all of it; u: [n], from 0 to below 1.
    """
    reached = mass.cumsum(dim=1)
    return torch.searchsorted(reached / reached[:, -1:], u[:, None], right=True)[:, 0]


def _picked(
    logits: torch.Tensor, rows: SampleRows, places: Int64
) -> tuple[torch.Tensor, SampleRows]:
    """Some logit rows and their parameters."""
    at = torch.from_numpy(places).to(logits.device)
    return logits[at], SampleRows(*(getattr(rows, field.name)[at] for field in fields(SampleRows)))
