"""Contract suite of `Quantizer`.

    class TestMyQuantizer(QuantizerContract):
        tolerance = 0.05                    # most error of a stored weight, relative to the largest

        @pytest.fixture
        def make(self):
            return QuantizerUnderTest(
                make=MyQuantizer, parameters=parameters, resident_bytes=resident_bytes,
                write=write_my_format, open=MySource,
            )

The suite has weights written in the quantizer's format and compares the loaded weights with the
written ones.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts, CheckpointSource
from pegboard.interfaces.quantizer import (
    LinearWeight,
    Quantizer,
    QuantizerContext,
    Scheme,
    StoredParameter,
    WeightSpec,
)
from pegboard.testing.linear_weight import dense

if TYPE_CHECKING:
    import torch

    from pegboard.interfaces.model import ParameterKind

_TORCH_FREE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
sys.exit("torch" in sys.modules)
"""

SHAPES: dict[str, tuple[tuple[int, int], ParameterKind]] = {
    "model.embed_tokens": ((96, 64), "embedding"),
    "model.layers.0.self_attn.q_proj": ((64, 64), "linear"),
    "model.layers.0.mlp.down_proj": ((64, 128), "linear"),
}
"""Weights that are written: name to [out_features, in_features] and kind."""


@dataclass(frozen=True, slots=True)
class QuantizerUnderTest:
    """A quantizer, and a writer of its format.

    Attributes:
        make: the factory.
        parameters, resident_bytes: the torch-free functions that the manifest names.
        write: (folder, weights) -> facts of a checkpoint; weights are float32 [out, in] by the
            tensor's name in Hugging Face's words (`model.embed_tokens.weight`).
        open: the factory of the source that reads it.
        options: what `make` was bound to, as the planning functions get them.
    """

    make: Callable[[QuantizerContext], Quantizer]
    parameters: Callable[[WeightSpec, CheckpointFacts], tuple[StoredParameter, ...]]
    resident_bytes: Callable[[WeightSpec, CheckpointFacts, str, Any], int]
    write: Callable[[Path, Mapping[str, torch.Tensor]], CheckpointFacts]
    open: Callable[[CheckpointFacts], CheckpointSource]
    options: Any = None


class QuantizerContract:
    """The contract of every quantizer.

    Attributes:
        dtypes: activation dtypes under test.
        tolerance: most error of a loaded weight, relative to the largest that was written.
    """

    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")
    tolerance: ClassVar[float] = 0.0
    rounding: ClassVar[dict[str, float]] = {"float64": 0, "float32": 0, "bfloat16": 2**-8}

    @pytest.fixture
    def make(self) -> QuantizerUnderTest:
        """The quantizer under test."""
        raise NotImplementedError("override the fixture `make`")

    @pytest.fixture
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights that are written."""
        import torch

        generator = torch.Generator().manual_seed(8)
        return {
            f"{name}.weight": torch.randn(shape, generator=generator)
            for name, (shape, _) in SHAPES.items()
        }

    @pytest.fixture
    def facts(
        self, make: QuantizerUnderTest, weights: dict[str, torch.Tensor], tmp_path: Path
    ) -> CheckpointFacts:
        """The checkpoint."""
        return make.write(tmp_path / "model", weights)

    def specs(self) -> list[WeightSpec]:
        return [WeightSpec(name, shape, kind) for name, (shape, kind) in SHAPES.items()]

    def stored(
        self, make: QuantizerUnderTest, facts: CheckpointFacts, spec: WeightSpec, scheme: Scheme
    ) -> dict[str, torch.Tensor]:
        """A weight's tensors, read as a loader does."""
        source = make.open(facts)
        tensors = {
            parameter.name: source.read(f"{spec.name}.{parameter.name}").clone()
            for parameter in scheme.parameters
        }
        source.close()
        return tensors

    def test_schemes_declare_what_the_checkpoint_holds(
        self, make: QuantizerUnderTest, facts: CheckpointFacts
    ) -> None:
        quantizer = make.make(QuantizerContext(facts, self.dtypes[0]))
        for spec in self.specs():
            declared = quantizer.scheme(spec).parameters
            assert declared == make.parameters(spec, facts)
            for parameter in declared:
                fact = facts.tensors[f"{spec.name}.{parameter.name}"]
                assert parameter.shape == fact.shape
                assert parameter.dtype in (None, fact.dtype)

    def test_loaded_weights_are_canonical(
        self, make: QuantizerUnderTest, facts: CheckpointFacts
    ) -> None:
        for dtype in self.dtypes:
            quantizer = make.make(QuantizerContext(facts, dtype))
            for spec in self.specs():
                scheme = quantizer.scheme(spec)
                weight = scheme.load(self.stored(make, facts, spec, scheme))
                assert weight.format == scheme.format and weight.shape == spec.shape
                _check_canonical(weight, dtype)

    def test_loaded_weights_are_those_that_were_written(
        self,
        make: QuantizerUnderTest,
        facts: CheckpointFacts,
        weights: dict[str, torch.Tensor],
    ) -> None:
        for dtype in self.dtypes:
            quantizer = make.make(QuantizerContext(facts, dtype))
            for spec in self.specs():
                scheme = quantizer.scheme(spec)
                written = weights[f"{spec.name}.weight"].double()
                got = dense(scheme.load(self.stored(make, facts, spec, scheme)))
                allowed = (self.tolerance + self.rounding[dtype]) * written.abs().max().item()
                assert (got - written).abs().max().item() <= allowed

    def test_dequantizing_is_the_reference(
        self, make: QuantizerUnderTest, facts: CheckpointFacts
    ) -> None:
        import torch

        quantizer = make.make(QuantizerContext(facts, "float32"))
        for spec in self.specs():
            scheme = quantizer.scheme(spec)
            stored = self.stored(make, facts, spec, scheme)
            reference = scheme.dequantize(stored)
            assert reference.dtype == torch.float32 and tuple(reference.shape) == spec.shape
            loaded = dense(scheme.load(stored))
            size = reference.abs().max().item()
            assert (loaded - reference.double()).abs().max().item() <= 1e-6 * size

    def test_a_missing_weight_is_an_error_naming_it(
        self, make: QuantizerUnderTest, facts: CheckpointFacts
    ) -> None:
        spec = WeightSpec("model.layers.7.mlp.up_proj", (64, 64), "linear")
        with pytest.raises(CheckpointError, match=r"layers\.7\.mlp\.up_proj"):
            make.make(QuantizerContext(facts, self.dtypes[0])).scheme(spec)

    def test_a_weight_of_another_shape_is_an_error_naming_it(
        self, make: QuantizerUnderTest, facts: CheckpointFacts
    ) -> None:
        spec = WeightSpec("model.layers.0.mlp.down_proj", (64, 64), "linear")
        with pytest.raises(CheckpointError, match="down_proj"):
            scheme = make.make(QuantizerContext(facts, self.dtypes[0])).scheme(spec)
            scheme.load(self.stored(make, facts, spec, scheme))

    def test_a_plan_counts_what_a_weight_takes(
        self, make: QuantizerUnderTest, facts: CheckpointFacts
    ) -> None:
        for dtype in self.dtypes:
            quantizer = make.make(QuantizerContext(facts, dtype))
            for spec in self.specs():
                scheme = quantizer.scheme(spec)
                weight = scheme.load(self.stored(make, facts, spec, scheme))
                planned = make.resident_bytes(spec, facts, dtype, make.options)
                assert planned > 0
                if weight.values is not None:
                    assert planned == math.prod(spec.shape) * weight.values.element_size()

    def test_planning_does_not_import_torch(self, make: QuantizerUnderTest) -> None:
        done = _import_apart(make.parameters.__module__, make.resident_bytes.__module__)
        assert done.returncode == 0, done.stderr or "torch was imported"


@cache
def _import_apart(*modules: str) -> subprocess.CompletedProcess[str]:
    """Imports modules in a process of their own, once for all schemes that they plan."""
    argv = [sys.executable, "-c", _TORCH_FREE, *modules]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def _check_canonical(weight: LinearWeight, dtype: str) -> None:
    import torch

    if weight.format == "float":
        assert weight.values is not None and tuple(weight.values.shape) == weight.shape
        assert weight.values.dtype == getattr(torch, dtype)
        quantized = (weight.codes, weight.scales, weight.zeros, weight.group_map)
        assert quantized == (None, None, None, None)
        return
    assert weight.values is None and weight.codes is not None and weight.scales is not None
    kind, _, activations = weight.format.partition(":")
    code_types = {"uint4": torch.uint8, "int8": torch.int8, "float8": torch.float8_e4m3fn}
    assert weight.codes.dtype == code_types[kind]
    assert weight.activations == (activations or "float")
    assert weight.zeros is None or weight.minima is None
    assert tuple(weight.codes.shape) == weight.shape
    for numbers in (weight.scales, weight.zeros, weight.minima):
        if numbers is not None:
            assert numbers.dtype == torch.float32 and numbers.shape == weight.scales.shape
            assert bool(numbers.isfinite().all())
    num_groups = weight.scales.shape[1]
    if weight.group_map is None:
        size = weight.group_size or weight.shape[1] // num_groups
        assert -(-weight.shape[1] // size) == num_groups
    else:
        assert weight.group_map.dtype == torch.int32 and len(weight.group_map) == weight.shape[1]
        assert int(weight.group_map.min()) >= 0 and int(weight.group_map.max()) < num_groups
