"""Contract suite of `Calibrator`.

    class TestMyCalibrator(CalibratorContract):
        settings = ({}, {"bits": 8})         # each set of them is tried

        @pytest.fixture
        def make(self):
            return CalibratorUnderTest(calibrator=MyCalibrator, quantizer=MyQuantizer)

The suite has weights quantized and read again by the quantizer of the same method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts, TensorFact, TokenizerFacts
from pegboard.interfaces.quantizer import (
    Calibrator,
    QuantizedWeight,
    Quantizer,
    QuantizerContext,
    WeightSpec,
)

if TYPE_CHECKING:
    import torch

SHARING = (
    WeightSpec("model.layers.0.mlp.gate_proj", (96, 128), "linear"),
    WeightSpec("model.layers.0.mlp.up_proj", (64, 128), "linear"),
)
"""Weights that share their inputs."""

KEPT = "lm_head"


@dataclass(frozen=True, slots=True)
class CalibratorUnderTest:
    """A calibrator, and the quantizer that reads what it makes.

    Attributes:
        calibrator: the class.
        quantizer: the factory.
    """

    calibrator: type[Calibrator]
    quantizer: Callable[[QuantizerContext], Quantizer]


class CalibratorContract:
    """The contract of every calibrator.

    Attributes:
        settings: sets of settings under test, as a recipe says them.
    """

    settings: ClassVar[Sequence[Mapping[str, Any]]] = ({},)

    @pytest.fixture
    def make(self) -> CalibratorUnderTest:
        """The calibrator under test."""
        raise NotImplementedError("override the fixture `make`")

    def calibrators(self, make: CalibratorUnderTest) -> list[Calibrator]:
        """One of each set of settings."""
        kind = make.calibrator
        models = [kind.settings.model_validate(said, extra="forbid") for said in self.settings]
        return [kind({weight.name: one for weight in SHARING}, [KEPT]) for one in models]

    def quantized(self, calibrator: Calibrator, seed: int = 0) -> list[QuantizedWeight]:
        """The weights, quantized from inputs of a seed."""
        for inputs in _inputs(seed):
            calibrator.observe(SHARING, inputs)
        return calibrator.quantize(SHARING, _values())

    def test_what_it_stores_means_what_it_says(self, make: CalibratorUnderTest) -> None:
        import torch

        for calibrator in self.calibrators(make):
            made = self.quantized(calibrator)
            stored = {w.name: one.parameters for w, one in zip(SHARING, made, strict=True)}
            facts = _facts(stored, calibrator.export(stored))
            quantizer = make.quantizer(QuantizerContext(facts, "float32"))
            for weight, one in zip(SHARING, made, strict=True):
                scheme = quantizer.scheme(weight)
                assert {item.name for item in scheme.parameters} == set(one.parameters)
                assert scheme.format != "float"
                assert torch.equal(scheme.dequantize(one.parameters), one.values)

    def test_products_are_near_those_of_the_weights(self, make: CalibratorUnderTest) -> None:
        for calibrator in self.calibrators(make):
            for one, values in zip(self.quantized(calibrator), _values(), strict=True):
                assert one.values.shape == values.shape
                for inputs in _inputs(0):
                    exact = inputs @ values.T
                    assert float((inputs @ one.values.T - exact).norm() / exact.norm()) < 0.3

    def test_it_forgets_what_it_has_quantized(self, make: CalibratorUnderTest) -> None:
        used, fresh = self.calibrators(make), self.calibrators(make)
        for one, other in zip(used, fresh, strict=True):
            self.quantized(one, seed=1)
            pairs = zip(self.quantized(one), self.quantized(other), strict=True)
            for again, anew in pairs:
                assert _bytes(again.parameters) == _bytes(anew.parameters)

    def test_numbers_that_are_not_finite_are_refused(self, make: CalibratorUnderTest) -> None:
        for calibrator in self.calibrators(make):
            for inputs in _inputs(0):
                calibrator.observe(SHARING, inputs)
            broken = _values()
            broken[1][3, 5] = float("nan")
            with pytest.raises(CheckpointError, match=r"up_proj\.weight"):
                calibrator.quantize(SHARING, broken)


def _values() -> list[torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(5)
    return [torch.randn(weight.shape, generator=generator) / 8 for weight in SHARING]


def _inputs(seed: int) -> list[torch.Tensor]:
    """Inputs of two texts; a few are far larger than the others."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    sizes = torch.ones(SHARING[0].shape[1])
    sizes[::31] = 20.0
    return [torch.randn(n, len(sizes), generator=generator) * sizes for n in (160, 90)]


def _facts(
    stored: Mapping[str, Mapping[str, torch.Tensor]], config: Mapping[str, Any]
) -> CheckpointFacts:
    tensors = {
        f"{layer}.{name}": TensorFact(
            tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), "plain", tensor.nbytes
        )
        for layer, parameters in stored.items()
        for name, tensor in parameters.items()
    }
    return CheckpointFacts(
        source="safetensors",
        path="a checkpoint",
        fingerprint="",
        config={},
        tensors=tensors,
        quantization=config["quant_method"],
        quantization_config=config,
        eos_token_ids=(),
        tokenizer=TokenizerFacts(None),
    )


def _bytes(parameters: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    import torch

    return {
        name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in parameters.items()
    }
