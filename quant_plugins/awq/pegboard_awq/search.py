"""AWQ's two searches (arXiv 2306.00978): scales of inputs, and where the ranges of groups are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from pegboard.interfaces.quantizer import StreamedLayer
from pegboard_quant.codes import UnsignedCodes, canonical
from pegboard_quant.folding import Fold
from pegboard_quant.rounding import round_to_nearest
from pegboard_quant.schemes import dequantized

BITS = 4
SCALES = torch.float16
"""The type that scales of groups are stored in."""

RATIOS = tuple(step / 20 for step in range(20))
"""Exponents of the inputs' size in a scale, against the weights' size."""

SHRINKS = tuple(step / 20 for step in range(1, 11))
"""Parts of a group's range that may be cut off."""

_LEAST = 1e-4


def nearest(values: torch.Tensor, group_size: int) -> UnsignedCodes:
    """The nearest codes of a weight [out, in]; each group has its own zero."""
    return round_to_nearest(values, BITS, group_size, "fitted", SCALES)


def meaning(codes: UnsignedCodes) -> torch.Tensor:
    """float32 [out, in]."""
    return dequantized(canonical(codes, "uint4"))


def best_scales(
    layer: StreamedLayer, place: Fold, group_size: int, num_texts: int
) -> torch.Tensor | None:
    """The scales of a place's inputs, float32 [in], with which its quantized weights change the block
    the least that they begin; None: no scales are better than none.

    Args:
        layer: with its float weights.
        place: where the scales may be folded.
        group_size: of the weights.
        num_texts: texts on which the block is compared.
    """
    names = [f"{weight.name}.weight" for weight in place.weights]
    plain = {name: layer.parameters[name] for name in names}
    size_of_inputs = _mean_size(layer.inputs(place.weights[0].name))
    size_of_weights = _relative_size(list(plain.values()), group_size)
    # A block of the weights alone is a product, whose inputs do not change with them.
    first, end = place.weights[0].name, place.end
    last = layer.parameters[f"{end}.weight"]
    given = list(layer.inputs(first, num_texts)) if end == first else []

    def block() -> Iterator[torch.Tensor]:
        if end == first:
            return (x @ layer.parameters[f"{end}.weight"].T for x in given)
        return (x @ last.T for x in layer.inputs(end, num_texts))

    expected = list(block())

    def loss(scales: torch.Tensor | None) -> float:
        for name, values in plain.items():
            scaled = values if scales is None else values * scales
            rounded = meaning(nearest(scaled, group_size))
            layer.parameters[name] = rounded if scales is None else rounded / scales
        pairs = zip(block(), expected, strict=True)
        return sum(float((one - other).square().double().sum()) for one, other in pairs)

    try:
        return _least(loss, size_of_inputs, size_of_weights)
    finally:
        layer.parameters.update(plain)


def clipped(values: torch.Tensor, group_size: int, grams: torch.Tensor) -> torch.Tensor:
    """The weight with each group's range cut where its rounded products come nearest.

    Args:
        values: float32 [out, in].
        group_size: inputs a group; divides them.
        grams: float32 [groups, size, size], sum x xᵀ of each group's inputs.

    Returns:
        float32 [out, in].
    """
    out_features, in_features = values.shape
    groups = values.view(out_features, -1, group_size)
    most = groups.abs().amax(-1, keepdim=True)

    def losses(candidate: torch.Tensor) -> torch.Tensor:
        rounded = meaning(nearest(candidate.view(out_features, in_features), group_size))
        wrong = (rounded.view_as(groups) - groups).transpose(0, 1)
        return (torch.bmm(wrong, grams) * wrong).sum(-1).T.unsqueeze(-1)

    best, least = groups, losses(groups)
    for shrink in SHRINKS:
        limit = most * (1 - shrink)
        candidate = groups.clamp(-limit, limit)
        loss = losses(candidate)
        best = torch.where(loss < least, candidate, best)
        least = torch.minimum(loss, least)
    return best.reshape(out_features, in_features)


def _least(
    loss: Callable[[torch.Tensor | None], float],
    size_of_inputs: torch.Tensor,
    size_of_weights: torch.Tensor,
) -> torch.Tensor | None:
    """The scales of the least loss, among powers of the sizes; None, the plain weights, go first."""
    best, least = None, loss(None)
    for ratio in RATIOS:
        scales = size_of_inputs**ratio / (size_of_weights ** (1 - ratio) + _LEAST)
        scales = scales.clamp(min=_LEAST)
        scales = scales / (scales.max() * scales.min()).sqrt()
        scales = torch.where(scales.isfinite(), scales, torch.ones_like(scales))
        if (found := loss(scales)) < least:
            best, least = scales, found
    return best


def _mean_size(inputs: Iterator[torch.Tensor]) -> torch.Tensor:
    """Mean of |x| over all tokens, float32 [in]."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for x in inputs:
        total = total + x.abs().double().sum(0)
        count += len(x)
    return (total / max(count, 1)).float()


def _relative_size(weights: Sequence[torch.Tensor], group_size: int) -> torch.Tensor:
    """Mean over all rows of |w| against the largest of its group, float32 [in]."""
    rows = torch.cat(list(weights))
    groups = rows.view(len(rows), -1, group_size).abs()
    largest = groups.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return (groups / largest).view_as(rows).mean(0)
