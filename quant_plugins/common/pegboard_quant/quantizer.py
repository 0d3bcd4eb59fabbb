"""The base of quantizers that read checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, TypeVar

import torch

from pegboard.interfaces.quantizer import Quantizer, QuantizerContext, Scheme, WeightSpec
from pegboard_quant.planning import plain_parameters
from pegboard_quant.schemes import FloatScheme

Options = TypeVar("Options")


class CheckpointQuantizer(Quantizer, Generic[Options]):
    """Reads layers in codes; those that the checkpoint keeps in floats stay so."""

    def __init__(self, context: QuantizerContext, options: Options) -> None:
        self.facts = context.facts
        self.options = options
        self._dtype: torch.dtype = getattr(torch, context.dtype)

    def scheme(self, weight: WeightSpec) -> Scheme:
        return self.coded(weight) or FloatScheme(weight, plain_parameters(weight), self._dtype)

    @abstractmethod
    def coded(self, weight: WeightSpec) -> Scheme | None:
        """The scheme of a weight in codes; None: it is in floats.

        Raises:
            CheckpointError: it is in neither, or config and tensors disagree.
        """
