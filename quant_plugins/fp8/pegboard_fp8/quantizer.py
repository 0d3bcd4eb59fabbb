"""The `fp8` quantizer: weights in e4m3 with scales of the whole, of rows or of blocks."""

from __future__ import annotations

from pegboard.interfaces.quantizer import QuantizerContext, Scheme, WeightSpec
from pegboard_fp8.plan import rules_of, stored_layer
from pegboard_quant.eight_bit_scheme import EightBitScheme
from pegboard_quant.options import CheckpointOptions
from pegboard_quant.quantizer import CheckpointQuantizer


class FP8Quantizer(CheckpointQuantizer[CheckpointOptions]):
    """Reads float8 checkpoints.

    Raises:
        CheckpointError: the checkpoint is none, or its config says what is not known.
    """

    def __init__(self, context: QuantizerContext, options: CheckpointOptions) -> None:
        super().__init__(context, options)
        rules_of(context.facts)

    def coded(self, weight: WeightSpec) -> Scheme | None:
        layer = stored_layer(weight, self.facts)
        return None if layer is None else EightBitScheme(weight, layer, self.options)
