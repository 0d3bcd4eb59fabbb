"""The `mixed` quantizer: layers of one checkpoint in several layouts of compressed-tensors."""

from __future__ import annotations

from pegboard.interfaces.quantizer import QuantizerContext, Scheme, WeightSpec
from pegboard_quant.eight_bit_scheme import EightBitScheme
from pegboard_quant.mixed_plan import config_of, stored_layer
from pegboard_quant.options import ActivationOptions, CheckpointOptions
from pegboard_quant.packed_layers import PackedLayer
from pegboard_quant.packed_scheme import PackedScheme
from pegboard_quant.quantizer import CheckpointQuantizer


class MixedQuantizer(CheckpointQuantizer[CheckpointOptions]):
    """Reads each layer in its group's layout.

    Raises:
        CheckpointError: the checkpoint is none, or its config says what is not known.
    """

    def __init__(self, context: QuantizerContext, options: CheckpointOptions) -> None:
        super().__init__(context, options)
        config_of(context.facts)

    def coded(self, weight: WeightSpec) -> Scheme | None:
        layer = stored_layer(weight, self.facts)
        if layer is None:
            return None
        if isinstance(layer, PackedLayer):
            return PackedScheme(weight, layer, ActivationOptions())
        return EightBitScheme(weight, layer, self.options)
