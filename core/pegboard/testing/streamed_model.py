"""A tiny model by its formulas, a decoder layer at a time, for commands under test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.model import ModelShape
from pegboard.interfaces.quantizer import WeightSpec
from pegboard.testing.dense_decoder import DenseDecoder, Tensors

if TYPE_CHECKING:
    import torch

OnInput = Callable[[str, "torch.Tensor"], None]


class TinyStream:
    """See `interfaces.command.LayerStream`; reads what `tiny.write_tiny_model` wrote."""

    num_threads = 1

    def __init__(self, folder: Path, facts: CheckpointFacts, shape: ModelShape) -> None:
        from safetensors.torch import load_file

        self.facts = facts
        self.shape = shape
        self.max_tokens = shape.max_position
        self.closed = False
        self._config = json.loads((folder / "config.json").read_text())
        self._tensors = load_file(folder / "model.safetensors")

    def parameter(self, name: str) -> torch.Tensor:
        assert not self.closed, "a closed model was read"
        return self._tensors[name].float()

    def layer(self, index: int, inputs: Sequence[torch.Tensor]) -> TinyLayer:
        assert not self.closed, "a closed model was read"
        prefix = f"model.layers.{index}."
        parameters = {
            name: tensor.float().clone()
            for name, tensor in self._tensors.items()
            if name.startswith(prefix)
        }
        return TinyLayer(index, self._config, parameters, inputs)

    def close(self) -> None:
        self.closed = True


class TinyLayer:
    """See `interfaces.quantizer.StreamedLayer`."""

    def __init__(
        self,
        index: int,
        config: dict[str, Any],
        parameters: dict[str, torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        self.index = index
        self.parameters = parameters
        self._config = config
        self._inputs = inputs
        self.groups = self._groups()

    def inputs(self, name: str, num_texts: int | None = None) -> Iterator[torch.Tensor]:
        for hidden in self._inputs[:num_texts]:
            given: dict[str, torch.Tensor] = {}
            self._run(hidden, given.__setitem__)
            yield given[name].float()

    def outputs(self) -> Iterator[torch.Tensor]:
        for hidden in self._inputs:
            yield self._run(hidden, lambda name, x: None).float()

    def _run(self, hidden: torch.Tensor, on_input: OnInput) -> torch.Tensor:
        decoder = _OpenDecoder(self._config, self.parameters, on_input)
        return decoder.layer(self.index, hidden.double())

    def _groups(self) -> tuple[tuple[WeightSpec, ...], ...]:
        import torch

        given: dict[str, torch.Tensor] = {}
        self._run(torch.zeros(1, self._config["hidden_size"]), given.__setitem__)
        groups: dict[int, list[WeightSpec]] = {}
        for name, x in given.items():
            out_features, in_features = self.parameters[f"{name}.weight"].shape
            spec = WeightSpec(name, (out_features, in_features), "linear")
            groups.setdefault(id(x), []).append(spec)
        return tuple(map(tuple, groups.values()))


class _OpenDecoder(DenseDecoder):
    """Tells the inputs of its linear layers."""

    def __init__(self, config: dict[str, Any], tensors: Tensors, on_input: OnInput) -> None:
        super().__init__(config, tensors)
        self._on_input = on_input

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        self._on_input(name, x)
        return super()._linear(x, name)
