"""A model of which one decoder layer at a time is in memory, for commands that quantize it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pegboard.cli.single_text_model import text_batch
from pegboard.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from pegboard.compose import Prepared
    from pegboard.interfaces.checkpoint import CheckpointFacts
    from pegboard.interfaces.model import ModelShape, ParameterShape
    from pegboard.models.one_layer import OneLayer


class StreamedModel:
    """The engine's own attention, norms and activations around plain float32 products. See
    `interfaces.command.LayerStream`.

    Args:
        prepared: a float32 composition of one sequence at a time.
    """

    def __init__(self, prepared: Prepared) -> None:
        from pegboard.compose import Maker, worker_parts
        from pegboard.plugins.loader import load_plugins
        from pegboard.runner.loading import layer_builder, use_threads

        composition = prepared.composition
        maker = Maker(load_plugins(composition.manifests), {})
        self._parts = worker_parts(composition, maker, lambda name: None)
        self._builder = layer_builder(self._parts)
        self._parameters = {one.name: one for one in composition.shape.parameters}
        self.facts: CheckpointFacts = composition.facts
        self.shape: ModelShape = composition.shape
        self.num_threads = composition.num_threads
        blocks = zip(composition.num_blocks, composition.groups, strict=True)
        room = [(num_blocks - 1) * group.block_size for num_blocks, group in blocks]
        self.max_tokens = min(composition.max_model_len, *room)
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
        return OneLayer(
            index, parameters, inputs, self._builder, self._parts.build_model, self._prepare
        )

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        self._parts.source.close()

    def _values(self, parameter: ParameterShape) -> torch.Tensor:
        if parameter.kind in ("norm", "bias"):
            return self._parts.source.read(parameter.name)
        return self._builder.values(parameter.name.removesuffix(".weight"))

    def _prepare(self, num_tokens: int) -> torch.Tensor:
        """Makes attention ready for a text; its tokens' positions."""
        import torch

        batch = text_batch(num_tokens, self._parts.groups, torch.device(self._parts.device))
        self._parts.attention.prepare(batch)
        return batch.positions

    def _share_kv(self) -> None:
        """Layers run one after the other: those of a group use the same blocks."""
        import torch

        from pegboard.runner import kv_tensors

        parts = self._parts
        kv = kv_tensors.allocate(
            parts.groups, parts.num_blocks, parts.layouts, torch.device(parts.device)
        )
        first = {layer: group.layers[0] for group in parts.groups for layer in group.layers}
        parts.attention.bind([kv[first[layer]] for layer in range(len(kv))])
