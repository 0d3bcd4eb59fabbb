"""A model of which one decoder layer at a time is in memory, for commands that quantize it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from pegboard.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from pegboard.compose import Prepared
    from pegboard.interfaces.checkpoint import CheckpointFacts
    from pegboard.interfaces.model import Model, ModelShape, ParameterShape
    from pegboard.models.layers import LayerBuilder
    from pegboard.models.one_layer import OneLayer


class StreamedModel:
    """The engine's own attention, norms and activations around plain float32 products. See
    `interfaces.command.LayerStream`.

    Args:
        prepared: a float32 composition of one sequence at a time.
    """

    def __init__(self, prepared: Prepared) -> None:
        from pegboard.compose import target_unit
        from pegboard.runner.parts import use_threads
        from pegboard.runner.text_model import max_text

        self._unit = target_unit(prepared.composition)
        self._parameters = {one.name: one for one in self._unit.shape.parameters}
        self.facts: CheckpointFacts = prepared.composition.target.facts
        self.shape: ModelShape = self._unit.shape
        self.num_threads = prepared.composition.num_threads
        self.max_tokens = max_text(self._unit)
        use_threads(self.num_threads)
        self._share_kv()

    def parameter(self, name: str) -> torch.Tensor:
        """Float32 values of a parameter, in memory of its own.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        import torch

        parameter = self._parameters[name]
        values = self._values(parameter).to(torch.float32, copy=True)
        if tuple(values.shape) != parameter.shape:
            raise CheckpointError(
                f"tensor {name}", f"shape {list(values.shape)}", allowed=f"{list(parameter.shape)}"
            )
        return values

    def layer(self, index: int, inputs: Sequence[torch.Tensor]) -> OneLayer:
        """A decoder layer, and what each text brings to it.

        Raises:
            CheckpointError: one of its parameters is missing or damaged.
        """
        from pegboard.models.one_layer import OneLayer, layer_of

        names = [name for name in self._parameters if layer_of(name) == index]
        parameters = {name: self.parameter(name) for name in names}
        build = cast("Callable[[LayerBuilder], Model]", self._unit.build)
        return OneLayer(index, parameters, inputs, self._unit, build, self._prepare)

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        self._unit.source.close()

    def _values(self, parameter: ParameterShape) -> torch.Tensor:
        if parameter.kind in ("norm", "bias"):
            return self._unit.source.read(parameter.name)
        return self._unit.values(parameter.name.removesuffix(".weight"))

    def _prepare(self, num_tokens: int) -> torch.Tensor:
        """Makes attention ready for a text; its tokens' positions."""
        from pegboard.runner.text_model import text_batch

        batch = text_batch(self._unit, num_tokens)
        self._unit.attention.prepare(batch)
        return batch.positions

    def _share_kv(self) -> None:
        """Layers run one after the other: those of a group use the same blocks."""
        import torch

        from pegboard.runner import kv_tensors

        unit = self._unit
        kv = kv_tensors.allocate(
            unit.groups, unit.num_blocks, unit.layouts, torch.device(unit.device)
        )
        first = {layer: group.layers[0] for group in unit.groups for layer in group.layers}
        unit.attention.bind([kv[first[layer]] for layer in range(len(kv))])
