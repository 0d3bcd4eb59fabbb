"""The `smoothquant` quantizer: weights in int8 with scales of the whole, of rows or of groups."""

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
from pegboard_quant.checks import GET_AGAIN, check_positive, check_range
from pegboard_quant.options import CheckpointOptions
from pegboard_quant.schemes import FloatScheme, StoredScheme, finite_scales
from pegboard_smoothquant.plan import (
    INPUT_SCALE,
    INPUT_ZERO,
    ORDER,
    SCALE,
    ZERO,
    Int8Form,
    form_of,
    parameters,
    rules_of,
)


class SmoothQuantizer(Quantizer):
    """Reads W8A8 checkpoints.

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
        return Int8Scheme(weight, stored, form, self._options)


class Int8Scheme(StoredScheme):
    """A weight in int8: each code less its block's zero, times its scale.

    Args:
        weight, stored: as every scheme.
        form: how the weight is kept.
        options: how inputs are taken.
    """

    def __init__(
        self,
        weight: WeightSpec,
        stored: tuple[StoredParameter, ...],
        form: Int8Form,
        options: CheckpointOptions,
    ) -> None:
        super().__init__(weight, stored, form.rule.weight_format("int8", options))
        self._form = form
        self._activations = form.rule.activations(options)

    def canonical(self, parameters: Mapping[str, torch.Tensor]) -> LinearWeight:
        blocks, activations = self._form.blocks, self._activations
        scales = finite_scales(f"{self.weight.name}.{SCALE}", parameters[SCALE])
        input_scale, input_zero = self._input_numbers(parameters)
        static, dynamic = activations == "static", activations == "dynamic"
        order = self._order(parameters)
        return LinearWeight(
            self.format,
            self.weight.shape,
            codes=parameters["weight"],
            scales=blocks.spread(scales),
            zeros=self._zeros(parameters),
            group_map=order,
            group_size=blocks.group_size if order is None else None,
            activations=activations,
            input_scale=input_scale if static else None,
            input_zero=input_zero if static else None,
            input_group=self._form.rule.inputs.group if dynamic else None,
        )

    def _zeros(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        zeros = parameters.get(ZERO)
        if zeros is None or not bool(zeros.any()):
            return None
        if not self._form.rule.zeros:
            raise self._not_symmetric(ZERO)
        return self._form.blocks.spread(zeros)

    def _order(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        order = parameters.get(ORDER)
        if order is not None:
            check_range(f"{self.weight.name}.{ORDER}", order, 0, self._form.blocks.num_groups - 1)
        return order

    def _input_numbers(
        self, parameters: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Scale and zero of static inputs, float32 [1] each; no zero where it is 0."""
        scale, zero = parameters.get(INPUT_SCALE), parameters.get(INPUT_ZERO)
        if scale is None:
            return None, None
        check_positive(f"{self.weight.name}.{INPUT_SCALE}", scale)
        if zero is None or not bool(zero.any()):
            return scale.float().reshape(1), None
        if not self._form.rule.inputs.zeros:
            raise self._not_symmetric(INPUT_ZERO)
        return scale.float().reshape(1), zero.float().reshape(1)

    def _not_symmetric(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"tensor {self.weight.name}.{name}",
            "is not 0, and quantization_config says symmetric",
            fix=GET_AGAIN,
        )
