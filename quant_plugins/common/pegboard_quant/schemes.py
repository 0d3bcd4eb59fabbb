"""Base classes of schemes of quantized weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch

from pegboard.interfaces.quantizer import LinearWeight, Scheme, StoredParameter, WeightSpec
from pegboard_quant.checks import check_finite, check_stored


class StoredScheme(Scheme):
    """A scheme whose tensors are checked against what it declares before they are used.

    Args:
        weight: whose scheme it is.
        stored: the tensors that it takes.
        weight_format: the format that it yields.
    """

    def __init__(
        self, weight: WeightSpec, stored: tuple[StoredParameter, ...], weight_format: str
    ) -> None:
        self.weight = weight
        self._stored = stored
        self._format = weight_format

    @property
    def format(self) -> str:
        return self._format

    @property
    def parameters(self) -> tuple[StoredParameter, ...]:
        return self._stored

    def load(self, parameters: Mapping[str, torch.Tensor]) -> LinearWeight:
        check_stored(self.weight.name, self._stored, parameters)
        return self.canonical(parameters)

    def dequantize(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return dequantized(self.load(parameters))

    @abstractmethod
    def canonical(self, parameters: Mapping[str, torch.Tensor]) -> LinearWeight:
        """The canonical weight of tensors that have the declared shapes and types.

        Raises:
            CheckpointError: their numbers cannot be right.
        """


class FloatScheme(StoredScheme):
    """A weight that the checkpoint keeps in floats.

    Args:
        weight, stored: as every scheme; `stored` is the one tensor `weight`.
        dtype: activation dtype, that the weight is converted to.
    """

    def __init__(
        self, weight: WeightSpec, stored: tuple[StoredParameter, ...], dtype: torch.dtype
    ) -> None:
        super().__init__(weight, stored, "float")
        self._dtype = dtype

    def canonical(self, parameters: Mapping[str, torch.Tensor]) -> LinearWeight:
        values = parameters["weight"].to(self._dtype)
        return LinearWeight("float", self.weight.shape, values=values)

    def dequantize(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        check_stored(self.weight.name, self.parameters, parameters)
        return parameters["weight"].float()


def finite_scales(name: str, scales: torch.Tensor) -> torch.Tensor:
    """Stored scales, of any shape, in float32.

    Raises:
        CheckpointError: one is not finite.
    """
    check_finite(name, scales)
    return scales.float()


def dequantized(weight: LinearWeight) -> torch.Tensor:
    """float32 [out, in], by the formula of `LinearWeight`: difference, then product, then sum."""
    if weight.values is not None:
        return weight.values.float()
    assert weight.codes is not None and weight.scales is not None
    group = group_of(weight)
    values = weight.codes.float()
    if weight.zeros is not None:
        values -= weight.zeros[:, group]
    values *= weight.scales[:, group]
    if weight.minima is not None:
        values += weight.minima[:, group]
    return values


def group_of(weight: LinearWeight) -> torch.Tensor:
    """int64 [in]: the group of scales that each input is in."""
    if weight.group_map is not None:
        return weight.group_map.long()
    assert weight.scales is not None
    in_features, num_groups = weight.shape[1], weight.scales.shape[1]
    return torch.arange(in_features) // (weight.group_size or in_features // num_groups)
