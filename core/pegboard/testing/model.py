"""Contract suite of `Model`.

    class TestMyModel(ModelContract):
        @pytest.fixture
        def make(self):
            return ModelUnderTest(
                describe=describe, build=build, config=config, tensors=tensors, forward=forward
            )

The model is built in float64 on parts that are the formulas themselves, and compared with a dense
forward of the whole text. For the Llama family that is `DenseDecoder`; `of_family` makes all of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pegboard.errors import CheckpointError
from pegboard.interfaces.model import Model, ModelShape
from pegboard.testing.dense_decoder import DenseDecoder
from pegboard.testing.model_parts import attention_batch, layer_builder
from pegboard.testing.tiny import write_tiny_model

if TYPE_CHECKING:
    import torch

    from pegboard.models.layers import LayerBuilder

_TORCH_FREE = """
import importlib, json, sys
module, name, config = sys.argv[1:]
getattr(importlib.import_module(module), name)(json.loads(config))
sys.exit("torch" in sys.modules)
"""

Forward = Callable[[Sequence[int]], tuple["torch.Tensor", dict[int, "torch.Tensor"]]]
"""Token ids to logits [num_tokens, vocab_size] and the inputs of layers, as `DenseDecoder.forward`."""


@dataclass(frozen=True, slots=True)
class ModelUnderTest:
    """A model, a checkpoint, and a reference of its outputs.

    Attributes:
        describe: the torch-free function that the manifest names.
        build: the factory.
        config: of the checkpoint.
        tensors: of the checkpoint.
        forward: the reference.
    """

    describe: Callable[[Mapping[str, Any]], ModelShape]
    build: Callable[[LayerBuilder], Model]
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    forward: Forward


def of_family(
    family: str,
    describe: Callable[[Mapping[str, Any]], ModelShape],
    build: Callable[[LayerBuilder], Model],
    folder: Path,
    **overrides: Any,
) -> ModelUnderTest:
    """A tiny model of the Llama family; `overrides` are config keys."""
    from safetensors.torch import load_file

    path = write_tiny_model(folder / "model", family, dtype="float64", **overrides)
    config = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    forward = DenseDecoder(config, tensors).forward
    return ModelUnderTest(describe, build, config, tensors, forward)


class _Recorded(dict[str, Any]):
    """A config that remembers which of its keys were read, as the host's does."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


class Running:
    """A built model and its rows."""

    def __init__(self, make: ModelUnderTest) -> None:
        self.shape = make.describe(make.config)
        self.builder = layer_builder(self.shape, make.tensors)
        self.model = make.build(self.builder)
        self._lengths: dict[int, int] = {}

    def step(
        self, chunks: Mapping[int, Sequence[int]], taps: Sequence[int] = ()
    ) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Row to the logits of its tokens, and tapped hidden states of all of them."""
        import torch

        counts = [len(tokens) for tokens in chunks.values()]
        starts = [self._lengths.get(row, 0) for row in chunks]
        batch = attention_batch(starts, counts, [row + 1 for row in chunks])
        self.builder.attention.prepare(batch)
        ids = torch.tensor([token for tokens in chunks.values() for token in tokens])
        hidden, tapped = self.model.forward(ids, batch.positions, taps)
        assert hidden.dtype == torch.float64
        assert tuple(hidden.shape) == (len(ids), self.shape.hidden_size)
        logits = self.model.logits(hidden)
        assert logits.dtype == torch.float32
        assert tuple(logits.shape) == (len(ids), self.shape.vocab_size)
        for row, count in zip(chunks, counts, strict=True):
            self._lengths[row] = self._lengths.get(row, 0) + count
        return dict(zip(chunks, torch.split(logits, counts), strict=True)), tapped


class ModelContract:
    """The contract of every model.

    Attributes:
        text: token ids to run, longer than a window of the model.
        tolerance: most difference of a logit, relative to the largest; logits are float32.
    """

    text: ClassVar[tuple[int, ...]] = tuple((7 * i * i + 3 * i) % 500 + 2 for i in range(24))
    tolerance: ClassVar[float] = 1e-6

    @pytest.fixture
    def make(self) -> ModelUnderTest:
        """The model under test."""
        raise NotImplementedError("override the fixture `make`")

    def close(self, got: torch.Tensor, expected: torch.Tensor) -> None:
        """Compares with the reference."""
        size = expected.abs().max().item()
        error = (got.double() - expected).abs().max().item()
        assert error <= self.tolerance * size, f"off by {error}"

    def test_the_shape_names_every_parameter(self, make: ModelUnderTest) -> None:
        shape = make.describe(make.config)
        described = {one.name: one.shape for one in shape.parameters}
        assert described == {name: tuple(one.shape) for name, one in make.tensors.items()}
        assert len(described) == len(shape.parameters)

    def test_describing_does_not_import_torch(self, make: ModelUnderTest) -> None:
        function = make.describe
        argv = [sys.executable, "-c", _TORCH_FREE, function.__module__, function.__name__]
        argv.append(json.dumps(dict(make.config)))
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr or "torch was imported"

    def test_the_config_is_read_itself_and_not_a_copy(self, make: ModelUnderTest) -> None:
        """Or the host takes all of its keys for unread, and refuses them."""
        config = _Recorded(make.config)
        make.describe(config)
        assert {"vocab_size", "num_hidden_layers"} & config.read, "describe reads a copy"

    def test_a_foreign_architecture_is_an_error(self, make: ModelUnderTest) -> None:
        with pytest.raises(CheckpointError, match="architectures"):
            make.describe({**make.config, "architectures": ["NoSuchModel"]})

    def test_every_parameter_is_read_once_at_least(self, make: ModelUnderTest) -> None:
        import dataclasses

        read: list[str] = []
        builder = layer_builder(make.describe(make.config), make.tensors)
        make.build(dataclasses.replace(builder, on_tensor=read.append))
        assert set(read) == set(make.tensors)

    def test_a_prompt_in_one_piece(self, make: ModelUnderTest) -> None:
        logits, _ = Running(make).step({0: self.text})
        self.close(logits[0], make.forward(self.text)[0])

    @pytest.mark.parametrize("size", [1, 5])
    def test_a_prompt_in_chunks(self, make: ModelUnderTest, size: int) -> None:
        running, expected = Running(make), make.forward(self.text)[0]
        for start in range(0, len(self.text), size):
            part = slice(start, start + size)
            self.close(running.step({0: self.text[part]})[0][0], expected[part])

    def test_rows_do_not_see_each_other(self, make: ModelUnderTest) -> None:
        running, other = Running(make), self.text[::-1]
        running.step({2: other[:9], 0: self.text[:20]})
        logits, _ = running.step({0: self.text[20:], 2: other[9:12], 1: other[:5]})
        self.close(logits[0], make.forward(self.text)[0][20:])
        self.close(logits[2], make.forward(other[:12])[0][9:])
        self.close(logits[1], make.forward(other[:5])[0])

    def test_taps_are_the_inputs_of_layers(self, make: ModelUnderTest) -> None:
        running, expected = Running(make), make.forward(self.text)
        layers = [-1, *range(running.shape.num_layers)]
        logits, taps = running.step({0: self.text}, taps=layers)
        assert set(taps) == set(layers)
        for layer in layers:
            self.close(taps[layer], expected[1][layer])
        self.close(logits[0], expected[0])

    def test_only_the_taps_that_are_wanted(self, make: ModelUnderTest) -> None:
        assert Running(make).step({0: self.text[:3]})[1] == {}
        assert set(Running(make).step({0: self.text[:3]}, taps=[1])[1]) == {1}
