"""Each contract suite of a worker's part fails on an implementation that breaks its contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.builtin.processors import Penalties
from pegboard.builtin.torch_attention import TorchAttention
from pegboard.builtin.torch_attention_layout import layout
from pegboard.builtin.torch_kernels import TorchPanelLinear, TorchRMSNorm
from pegboard.builtin.torch_quantized import (
    TorchCodesLinear,
    TorchFloat8Linear,
    TorchIntegerLinear,
)
from pegboard.builtin.torch_sampler import TorchSample
from pegboard.builtin.unquantized import Unquantized
from pegboard.builtin.unquantized_plan import parameters, resident_bytes
from pegboard.interfaces.attention import AttentionBatch
from pegboard.interfaces.drafter import DrafterContext, Observation
from pegboard.interfaces.kernel import PackedWeight, SampleRows
from pegboard.interfaces.logits_processor import LogitRow
from pegboard.interfaces.model import Model, ModelShape
from pegboard.interfaces.quantizer import (
    LinearWeight,
    QuantizerContext,
    Scheme,
    StoredParameter,
    WeightSpec,
)
from pegboard.models.layers import LayerBuilder
from pegboard.models.llama import Llama
from pegboard.models.shape import describe
from pegboard.step import Drafts, Float32, Int32, RowAdmission
from pegboard.testing.attention import AttentionContract
from pegboard.testing.drafter import DrafterContract
from pegboard.testing.guessing_drafter import GuessingDrafter
from pegboard.testing.kernels import LinearContract, MakeKernel, RMSNormContract
from pegboard.testing.logits_processor import LogitsProcessorContract
from pegboard.testing.model import ModelContract, ModelUnderTest, of_family
from pegboard.testing.model_parts import InMemory
from pegboard.testing.quantizer import SHAPES, QuantizerContract, QuantizerUnderTest
from pegboard.testing.sample import SampleContract


class LeftoverAttention(TorchAttention):
    """Does not hear of draft trees."""

    def prepare(self, batch: AttentionBatch) -> None:
        super().prepare(
            AttentionBatch(
                batch.positions, batch.query_starts, batch.num_computed, batch.block_tables
            )
        )


class ForgetfulAttention(TorchAttention):
    """Does not copy blocks."""

    def copy_blocks(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None:
        pass


class HastyAttention(TorchAttention):
    """Writes before all is read."""

    def move_slots(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None:
        for i in range(len(source)):
            super().move_slots(group, source[i : i + 1], target[i : i + 1])


class AttentionSuite(AttentionContract):
    layout = staticmethod(layout)


def test_broken_attention() -> None:
    suite = AttentionSuite()
    with pytest.raises(AssertionError):
        suite.test_draft_trees(LeftoverAttention)
    with pytest.raises(AssertionError):
        suite.test_copied_blocks_continue_apart(ForgetfulAttention)
    with pytest.raises(AssertionError):
        suite.test_moves_read_before_they_write(HastyAttention)


class RoundingLinear(TorchPanelLinear):
    """Computes in bfloat16."""

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        return super().linear(x, weight).bfloat16().to(x.dtype)


class CarelessNorm(TorchRMSNorm):
    """Leaves out epsilon."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return super().rms_norm(x, weight, 0.0)


def test_broken_kernels() -> None:
    with pytest.raises(AssertionError):
        LinearContract().test_linear_is_the_product(RoundingLinear)
    with pytest.raises(AssertionError):
        RMSNormContract().test_epsilon_counts(CarelessNorm)


def forgetting(kind: type[TorchCodesLinear], **changes: Any) -> MakeKernel:
    """A kernel that takes every weight for one without something."""

    class Forgetful(kind):  # type: ignore[valid-type,misc]
        def prepare(self, weight: LinearWeight) -> PackedWeight:
            known = {
                name: new for name, new in changes.items() if getattr(weight, name) is not None
            }
            packed: PackedWeight = super().prepare(dataclasses.replace(weight, **known))
            return packed

    return Forgetful


class WrappingLinear(TorchIntegerLinear):
    """Its sums of pairs keep 16 bits."""

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        return super().linear(x, weight).clamp(-(2.0**15), 2.0**15)


class SpoilingLinear(TorchCodesLinear):
    """Rounds its inputs where they lie."""

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        return super().linear(x.mul_(8).round_().div_(8), weight)


@pytest.mark.parametrize(
    ("format", "kind", "changes"),
    [
        ("uint4", TorchCodesLinear, {"zeros": None}),
        ("uint4", TorchCodesLinear, {"minima": None}),
        ("int8", TorchCodesLinear, {"group_map": None}),
        ("int8", TorchCodesLinear, {"group_size": 32}),
        ("uint4:grouped", TorchIntegerLinear, {"zeros": None}),
        ("uint4:grouped", TorchIntegerLinear, {"minima": None}),
        ("int8:grouped", TorchIntegerLinear, {"group_map": None}),
        ("int8:grouped", TorchIntegerLinear, {"activations": "dynamic"}),
        ("int8:dynamic", TorchIntegerLinear, {"input_group": None}),
        ("int8:dynamic", TorchIntegerLinear, {"activations": "grouped"}),
        ("int8:static", TorchIntegerLinear, {"input_scale": torch.ones(1)}),
        ("int8:static", TorchIntegerLinear, {"input_zero": None}),
        ("int8:static", TorchCodesLinear, {}),
        ("float8:static", TorchFloat8Linear, {"input_scale": torch.ones(1)}),
        ("float8:dynamic", TorchFloat8Linear, {"input_group": None}),
        ("float8:dynamic", TorchCodesLinear, {}),
    ],
)
def test_kernels_that_forget_a_part_of_the_weight(
    format: str, kind: type[TorchCodesLinear], changes: dict[str, Any]
) -> None:
    class Suite(LinearContract):
        formats = (format,)

    with pytest.raises((AssertionError, IndexError)):
        Suite().test_linear_is_the_product(forgetting(kind, **changes))


def test_kernels_that_overflow_or_spoil_their_inputs() -> None:
    class Suite(LinearContract):
        formats = ("int8:dynamic",)

    with pytest.raises(AssertionError):
        Suite().test_whole_numbers_are_summed_exactly(WrappingLinear)

    class FloatInputs(LinearContract):
        formats = ("int8",)

    with pytest.raises(AssertionError):
        FloatInputs().test_input_is_not_changed(SpoilingLinear)


class SeedlessSample(TorchSample):
    """Ignores which sequence of a request it samples for."""

    def sample(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        same = SampleRows(
            rows.temperature,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            rows.seed,
            rows.position,
            torch.zeros_like(rows.index),
        )
        return super().sample(logits, same)


def test_a_broken_sampler() -> None:
    with pytest.raises(AssertionError):
        SampleContract().test_seed_position_and_sequence_change_the_noise(SeedlessSample)


class CountingPenalties(Penalties):
    """Its penalty grows with the calls, so that drafts leave a trace."""

    _calls = 0

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> None:
        self._calls += 1
        super().apply(logits, rows)
        logits -= torch.arange(logits.shape[1]) % 2 * self._calls


class PenaltiesSuite(LogitsProcessorContract):
    params = ({"repetition_penalty": 1.3}, {"presence_penalty": 0.7})


def test_a_broken_processor() -> None:
    with pytest.raises(AssertionError):
        PenaltiesSuite().test_drafts_leave_no_trace(CountingPenalties)


class EagerDrafter(GuessingDrafter):
    """Guesses more than it is asked for."""

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        return super().propose(dataclasses.replace(seen, propose=seen.propose + 1))


class SharingDrafter(GuessingDrafter):
    """Has one state for all rows."""

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        super().admit(admission, block_tables)
        for row in self._coming:
            self._coming[row] = self._coming[admission.row]


class WritingDrafter(GuessingDrafter):
    """Writes into what it observes."""

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        seen.propose[:] = 1
        return super().propose(seen)


class UncertainDrafter(GuessingDrafter):
    """Gives logarithms for probabilities."""

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        drafts, probabilities = super().propose(seen)
        return drafts, probabilities - 2


@pytest.mark.parametrize("kind", [EagerDrafter, WritingDrafter, UncertainDrafter])
def test_broken_drafters(kind: type[GuessingDrafter]) -> None:
    suite = DrafterContract()
    text = suite.text(60)

    def make(context: DrafterContext) -> GuessingDrafter:
        return kind({(tuple(text[:20]), 0): text[20:]}, 1.0)

    with pytest.raises((AssertionError, ValueError)):
        suite.test_no_more_than_asked_for(make)


class ClingingDrafter(GuessingDrafter):
    """Takes no row again that it has had."""

    def release(self, row: int, num_tokens: int) -> None:
        pass

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        assert admission.row not in self._coming
        super().admit(admission, block_tables)


def test_a_drafter_that_does_not_give_rows_back() -> None:
    suite = DrafterContract()
    suite.test_rows_are_taken_back_while_their_sequences_run(lambda _: GuessingDrafter({}, 1.0))
    with pytest.raises(AssertionError):
        suite.test_rows_are_taken_back_while_their_sequences_run(lambda _: ClingingDrafter({}, 1.0))


@pytest.mark.parametrize("taps", [(-2,), ("last",), (1.0,)], ids=repr)
def test_a_drafter_with_taps_that_are_no_layers(taps: Any) -> None:
    drafter = GuessingDrafter({}, 1.0)
    drafter.taps = taps
    with pytest.raises(AssertionError, match="taps"):
        DrafterContract().test_taps_are_layers(lambda _: drafter)


def test_a_drafter_that_mixes_up_rows() -> None:
    suite = DrafterContract()
    first, second = (suite.text(40, seed=seed) for seed in (1, 2))
    outputs = {(tuple(text[:20]), 0): text[20:] for text in (first, second)}
    suite.test_a_row_is_guessed_by_its_own_tokens(lambda context: GuessingDrafter(outputs, 1.0))
    with pytest.raises(AssertionError):
        suite.test_a_row_is_guessed_by_its_own_tokens(lambda context: SharingDrafter(outputs, 1.0))


class TransposingScheme(Scheme):
    """Stores its weight the other way round, and says so to nobody."""

    def __init__(self, inner: Scheme) -> None:
        self._inner = inner

    @property
    def format(self) -> str:
        return self._inner.format

    @property
    def parameters(self) -> tuple[StoredParameter, ...]:
        (one,) = self._inner.parameters
        return (dataclasses.replace(one, shape=one.shape[::-1]),)

    def load(self, parameters: Mapping[str, torch.Tensor]) -> LinearWeight:
        weight = self._inner.load(parameters)
        assert weight.values is not None
        return dataclasses.replace(weight, values=weight.values.half())

    def dequantize(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._inner.dequantize(parameters) * 1.001


class CarelessQuantizer(Unquantized):
    """Takes what it finds, in the wrong dtype."""

    def scheme(self, weight: WeightSpec) -> Scheme:
        known = WeightSpec(weight.name, SHAPES[weight.name][0], weight.kind)
        return TransposingScheme(super().scheme(known))


def test_a_broken_quantizer(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from pegboard.builtin.safetensors_describe import describe as describe_safetensors

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = {f"{name}.weight": torch.randn(shape) for name, (shape, _) in SHAPES.items()}
    save_file(weights, folder / "model.safetensors")
    facts = describe_safetensors(folder)

    def make(context: QuantizerContext) -> CarelessQuantizer:
        return CarelessQuantizer(context)

    suite = QuantizerContract()
    broken = QuantizerUnderTest(
        make,
        parameters,
        resident_bytes,
        write=lambda folder, weights: facts,
        open=lambda facts: InMemory(load_file(folder / "model.safetensors")),
    )
    for test in (
        suite.test_schemes_declare_what_the_checkpoint_holds,
        suite.test_loaded_weights_are_canonical,
        suite.test_dequantizing_is_the_reference,
        suite.test_a_plan_counts_what_a_weight_takes,
    ):
        with pytest.raises(AssertionError):
            test(broken, facts)
    with pytest.raises(AssertionError):
        suite.test_loaded_weights_are_those_that_were_written(broken, facts, weights)
    with pytest.raises(pytest.fail.Exception):
        suite.test_a_weight_of_another_shape_is_an_error_naming_it(broken, facts)
    torch_at_import = dataclasses.replace(broken, resident_bytes=describe_with_torch)
    with pytest.raises(AssertionError, match="torch was imported"):
        suite.test_planning_does_not_import_torch(torch_at_import)


def describe_with_torch(*arguments: object) -> int:
    return 0


describe_with_torch.__module__ = TorchAttention.__module__


class LastTapLlama(Llama):
    """Gives its taps after the layer, not before it."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        hidden, tapped = super().forward(token_ids, positions, [layer + 1 for layer in taps])
        return hidden, {layer - 1: values for layer, values in tapped.items()}


class NarrowLlama(Llama):
    """Computes its logits in bfloat16."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden).bfloat16().float()


def describe_without_norms(config: Mapping[str, object]) -> ModelShape:
    shape = describe(config)
    kept = tuple(one for one in shape.parameters if one.kind != "norm")
    return dataclasses.replace(shape, parameters=kept)


def test_broken_models(tmp_path: Path) -> None:
    suite = ModelContract()
    fine = of_family("llama", describe, Llama, tmp_path)

    def broken(build: Callable[[LayerBuilder], Model]) -> ModelUnderTest:
        return dataclasses.replace(fine, build=build)

    with pytest.raises(AssertionError):
        suite.test_taps_are_the_inputs_of_layers(broken(LastTapLlama))
    with pytest.raises(AssertionError):
        suite.test_a_prompt_in_one_piece(broken(NarrowLlama))
    with pytest.raises(AssertionError):
        suite.test_the_shape_names_every_parameter(
            dataclasses.replace(fine, describe=describe_without_norms)
        )
