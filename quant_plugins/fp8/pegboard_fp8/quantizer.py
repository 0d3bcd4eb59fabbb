"""The `fp8` quantizer: weights in e4m3 with scales of the whole, of rows or of blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pegboard.errors import CheckpointError
from pegboard.interfaces.quantizer import (
    LinearWeight,
    Quantizer,
    QuantizerContext,
    Scheme,
    StoredParameter,
    WeightSpec,
)
from pegboard_fp8.e4m3 import any_nan
from pegboard_fp8.plan import Float8Form, form_of, parameters, rules_of
from pegboard_quant.checks import GET_AGAIN, check_positive
from pegboard_quant.options import CheckpointOptions
from pegboard_quant.schemes import FloatScheme, StoredScheme, finite_scales


class FP8Quantizer(Quantizer):
    """Reads float8 checkpoints.

    Raises:
        CheckpointError: the checkpoint is none, or its config says what is not known.
    """

    def __init__(self, context: QuantizerContext, options: CheckpointOptions) -> None:
        self._facts = context.facts
        self._options = options
        self._dtype: torch.dtype = getattr(torch, context.dtype)
        rules_of(context.facts)

    def scheme(self, weight: WeightSpec) -> Scheme:
        form = form_of(weight, self._facts)
        stored = parameters(weight, self._facts)
        if form is None:
            return FloatScheme(weight, stored, self._dtype)
        return Float8Scheme(weight, stored, form, self._options)


class Float8Scheme(StoredScheme):
    """A weight in e4m3: each code times the scale of its block.

    Args:
        weight, stored: as every scheme.
        form: how the weight is kept.
        options: how inputs are taken.
    """

    def __init__(
        self,
        weight: WeightSpec,
        stored: tuple[StoredParameter, ...],
        form: Float8Form,
        options: CheckpointOptions,
    ) -> None:
        super().__init__(weight, stored, form.rule.weight_format("float8", options))
        self._form = form
        self._activations = form.rule.activations(options)

    def canonical(self, parameters: Mapping[str, torch.Tensor]) -> LinearWeight:
        name, form, activations = self.weight.name, self._form, self._activations
        codes = parameters["weight"]
        if any_nan(codes):
            raise CheckpointError(f"tensor {name}.weight", "holds NaNs", fix=GET_AGAIN)
        scales = finite_scales(f"{name}.{form.scale}", parameters[form.scale])
        if "input_scale" in parameters:
            check_positive(f"{name}.input_scale", parameters["input_scale"])
        static, dynamic = activations == "static", activations == "dynamic"
        return LinearWeight(
            self.format,
            self.weight.shape,
            codes=codes,
            scales=form.blocks.spread(scales),
            group_size=form.blocks.group_size,
            activations=activations,
            input_scale=parameters["input_scale"].float().reshape(1) if static else None,
            input_group=form.rule.inputs.group if dynamic else None,
        )
