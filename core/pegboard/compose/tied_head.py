"""Whether a head that a checkpoint holds, and its config says is the embedding, is the embedding."""

from __future__ import annotations

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointSource
from pegboard.plugins.composition import ModelPlan

HEAD = "lm_head.weight"
_ROWS = 4096


def check_tied_head(plan: ModelPlan, source: CheckpointSource) -> None:
    """Tools write a tied weight twice, and no second one is loaded. Where the two differ, one of config
    and weights is wrong: to guess which would be to answer with the wrong words.

    Raises:
        CheckpointError: they differ.
    """
    facts, shape = plan.facts, plan.shape
    if not shape.tied_embeddings or HEAD not in facts.tensors:
        return
    embedding = next(one.name for one in shape.parameters if one.kind == "embedding")
    if facts.tensors[HEAD] != facts.tensors.get(embedding) or not _equal(
        source, HEAD, embedding, facts.tensors[HEAD].shape[0]
    ):
        raise CheckpointError(
            f"tensor {HEAD}",
            f"differs from {embedding}, and tie_word_embeddings says that they are one",
            fix="tie_word_embeddings: false in config.json, if the head is its own",
        )


def _equal(source: CheckpointSource, one: str, other: str, num_rows: int) -> bool:
    import torch

    pieces = (slice(at, min(at + _ROWS, num_rows)) for at in range(0, num_rows, _ROWS))
    return all(torch.equal(source.read(one, rows), source.read(other, rows)) for rows in pieces)
