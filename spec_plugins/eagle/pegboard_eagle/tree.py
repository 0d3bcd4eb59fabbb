"""The dynamic tree of EAGLE-2 (arXiv 2406.16858): which nodes get children, and which are proposed.

A node's score is the log of the draft's probability of its path, an estimate of how likely it is
accepted. At each depth the `top_k` best nodes get their `top_k` best children; of all nodes the best are
proposed. A child's score is at most its parent's, so these are connected, and so are the first n of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROOT = -1


@dataclass(slots=True)
class Pool:
    """The nodes of R rows found so far, P of each, parents first.

    Attributes:
        token_ids: int64 [R, P], of the draft vocabulary.
        parents: int64 [R, P], their parents in the pool; ROOT: none.
        log_probs: float32 [R, P], given the parent.
        scores: float32 [R, P].
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    log_probs: torch.Tensor
    scores: torch.Tensor

    def best(self, num_nodes: list[int], least: float) -> list[torch.Tensor]:
        """For each row the nodes with the best scores of those that have at least `least`, best first;
        of equal ones the earlier first."""
        order = torch.sort(self.scores, dim=1, descending=True, stable=True).indices
        good = (self.scores >= least).sum(dim=1).tolist()
        return [
            one[: min(count, most)] for one, count, most in zip(order, num_nodes, good, strict=True)
        ]


def roots(log_probs: torch.Tensor, top_k: int) -> Pool:
    """The first nodes: float32 [R, draft vocabulary] -> `top_k` of each row."""
    best, token_ids = log_probs.topk(min(top_k, log_probs.shape[1]), dim=1)
    return Pool(token_ids, torch.full_like(token_ids, ROOT), best, best)


def grow(pool: Pool, frontier: torch.Tensor, log_probs: torch.Tensor, top_k: int) -> torch.Tensor:
    """Adds the children of a frontier to the pool.

    Args:
        frontier: int64 [R, F], nodes of the pool.
        log_probs: float32 [R, F, draft vocabulary], of the tokens after each.

    Returns:
        The next frontier, int64 [R, up to top_k].
    """
    best, token_ids = log_probs.topk(min(top_k, log_probs.shape[2]), dim=2)
    scores = pool.scores.gather(1, frontier)[:, :, None] + best
    parents = frontier[:, :, None].expand_as(token_ids)
    first = pool.scores.shape[1]
    pool.token_ids = torch.cat((pool.token_ids, token_ids.flatten(1)), dim=1)
    pool.parents = torch.cat((pool.parents, parents.flatten(1)), dim=1)
    pool.log_probs = torch.cat((pool.log_probs, best.flatten(1)), dim=1)
    pool.scores = torch.cat((pool.scores, scores.flatten(1)), dim=1)
    order = torch.sort(scores.flatten(1), dim=1, descending=True, stable=True).indices
    return first + order[:, :top_k]
