"""GPTQ writes a checkpoint that its quantizer reads, and the codes are those of the paper."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pegboard.errors import CheckpointError, ConfigError
from pegboard.interfaces.quantizer import WeightSpec
from pegboard.testing.calibrator import CalibratorContract, CalibratorUnderTest
from pegboard_gptq.calibrator import GPTQCalibrator, GPTQWeightSettings
from pegboard_gptq.quantizer import GPTQQuantizer
from pegboard_gptq.solver import ActOrder, Grid, Hessian, solve
from pegboard_quant.options import ActivationOptions
from pegboard_quant.rounding import Zeros, round_to_nearest
from pegboard_quant.rtn import quantized

WEIGHT = WeightSpec("model.layers.0.mlp.down_proj", (32, 64), "linear")


class TestGPTQCalibrator(CalibratorContract):
    settings = (
        {},
        {"bits": 8, "group_size": 128, "sym": False},
        {"bits": 3, "group_size": 32, "act_order": True},
        {"bits": 4, "group_size": 32, "act_order": False},
        {"bits": 4, "group_size": -1, "sym": False, "act_order": True},
    )

    @pytest.fixture
    def make(self) -> CalibratorUnderTest:
        quantizer = partial(GPTQQuantizer, options=ActivationOptions())
        return CalibratorUnderTest(GPTQCalibrator, quantizer)


def straight(
    values: torch.Tensor,
    hessian: torch.Tensor,
    *,
    bits: int,
    size: int,
    zeros: Zeros,
    damping: float,
    order: list[int],
    static: bool,
) -> torch.Tensor:
    """The quantized weight by equations 2 and 3 of the paper, in float64, row by row: an input is
    rounded, the others that are left make it good, and the inverse Hessian loses a row and a column.
    A group's scale is that of its weights when it begins, or (static) of neighbours as they were."""
    work = values.double().clone()
    h = hessian.clone()
    for j in range(len(h)):
        if hessian[j, j] == 0:
            h[j, j] = 1.0
            work[:, j] = 0.0
    h += damping * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    inverse = torch.linalg.inv(h)
    before = work.clone()
    result = torch.zeros_like(work)
    for step, q in enumerate(order):
        if static or step % size == 0:
            group = work[:, order[step : step + size]]
            if static:
                group = before[:, q // size * size : (q // size + 1) * size]
            if zeros == "middle":
                spread, low = 2 * group.abs().amax(1), torch.zeros(len(group))
            else:
                low = group.amin(1).clamp(max=0)
                spread = group.amax(1).clamp(min=0) - low
            scale = (spread / (2**bits - 1)).float().half().double()
            zero = (
                torch.round(-low / scale) if zeros == "fitted" else torch.tensor(2.0 ** (bits - 1))
            )
        code = (torch.round(work[:, q] / scale) + zero).clamp(0, 2**bits - 1)
        result[:, q] = (code - zero) * scale
        error = (work[:, q] - result[:, q]) / inverse[q, q]
        work -= torch.outer(error, inverse[q])
        inverse = inverse - torch.outer(inverse[:, q], inverse[q]) / inverse[q, q]
    return result


@settings(max_examples=25, deadline=None)
@example(
    seed=0, rows=3, groups=2, size=136, bits=4, zeros="fitted", act_order=True, dead=True
)  # groups larger than the blocks
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 5),
    groups=st.integers(1, 4),
    size=st.sampled_from([8, 24, 40]),
    bits=st.sampled_from([2, 3, 4, 8]),
    zeros=st.sampled_from(["middle", "fitted"]),
    act_order=st.sampled_from([False, True, "static"]),
    dead=st.booleans(),
)
def test_codes_are_those_of_the_papers_formula(
    seed: int,
    rows: int,
    groups: int,
    size: int,
    bits: int,
    zeros: Zeros,
    act_order: ActOrder,
    dead: bool,
) -> None:
    in_features = groups * size
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, in_features, generator=generator)
    mixing = torch.randn(in_features, in_features, generator=generator)
    inputs = torch.randn(2 * in_features, in_features, generator=generator) @ mixing
    if dead:
        inputs[:, in_features // 2] = 0.0
    observed = Hessian(in_features)
    observed.add(inputs[:7])
    observed.add(inputs[7:])
    hessian = observed.matrix
    expected = inputs.double().T @ inputs.double() * (2 / len(inputs))
    torch.testing.assert_close(hessian, expected, rtol=1e-4, atol=1e-3 * float(expected.max()))

    grid = Grid(bits, size, zeros, torch.float16)
    codes = solve(values, hessian, grid, damping=0.01, act_order=act_order)
    diagonal = torch.where(hessian.diagonal() == 0, 1.0, hessian.diagonal())
    order = torch.argsort(diagonal, descending=True, stable=True) if act_order else None
    indices = list(range(in_features)) if order is None else order.tolist()
    wanted = straight(
        values,
        hessian,
        bits=bits,
        size=size,
        zeros=zeros,
        damping=0.01,
        order=indices,
        static=act_order == "static",
    )
    found = quantized(codes, minus_one=False).values.double()
    # A product that falls on the middle of two codes may go either way; what follows then differs.
    same = (found - wanted).abs().amax(1) < 1e-6
    assert int((~same).sum()) <= 1
    wrong, right = ((one - values.double()) for one in (found, wanted))
    assert _loss(wrong, hessian) <= 1.05 * _loss(right, hessian) + 1e-9


def test_the_loss_on_the_inputs_is_less_than_that_of_rounding_to_nearest() -> None:
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(64, 64, generator=generator)
    inputs = torch.randn(500, 64, generator=generator) @ mixing
    values = torch.randn(WEIGHT.shape, generator=generator)
    losses = []
    for said in ({"act_order": False}, {"act_order": True}, {"act_order": "static"}):
        one = GPTQWeightSettings.model_validate({"bits": 3, "group_size": 32, **said})
        calibrator = GPTQCalibrator({WEIGHT.name: one}, [])
        calibrator.observe([WEIGHT], inputs)
        made = calibrator.quantize([WEIGHT], [values])[0]
        losses.append(float(((made.values - values) @ inputs.T).square().sum()))
    nearest = quantized(round_to_nearest(values, 3, 32, "middle", torch.float16), minus_one=True)
    rounding = float(((nearest.values - values) @ inputs.T).square().sum())
    assert max(losses) < 0.7 * rounding


def test_inputs_that_tell_nothing_are_rounded_to_nearest_and_reported() -> None:
    # Of two huge alike inputs nothing can be told apart, whatever is added to the diagonal's mean.
    inputs = torch.full((4, 64), 1e-30)
    inputs[:, :2] = 1e18
    calibrator = GPTQCalibrator({WEIGHT.name: GPTQWeightSettings(damping=1e-18)}, [])
    calibrator.observe([WEIGHT], inputs)
    values = torch.randn(WEIGHT.shape, generator=torch.Generator().manual_seed(1))
    made = calibrator.quantize([WEIGHT], [values])[0]
    assert WEIGHT.name in made.note and "rounded to nearest" in made.note
    nearest = round_to_nearest(values, 4, 64, "middle", torch.float16)
    assert torch.equal(made.values, quantized(nearest, minus_one=True).values)


def test_a_few_samples_are_enough_with_damping() -> None:
    calibrator = GPTQCalibrator({WEIGHT.name: GPTQWeightSettings()}, [])
    calibrator.observe([WEIGHT], torch.ones(1, 64))
    assert calibrator.quantize([WEIGHT], [torch.randn(WEIGHT.shape)])[0].note == ""


def test_inputs_that_are_not_finite_are_refused() -> None:
    calibrator = GPTQCalibrator({WEIGHT.name: GPTQWeightSettings()}, [])
    with pytest.raises(CheckpointError, match="down_proj: are not finite"):
        calibrator.observe([WEIGHT], torch.full((2, 64), float("inf")))


@pytest.mark.parametrize(
    ("said", "shape", "message"),
    [
        ({"group_size": 48}, (32, 64), "group_size: 48 does not divide the 64 inputs"),
        ({"bits": 3, "group_size": -1}, (32, 40), "3 bits of 40 inputs"),
        ({"bits": 4, "group_size": -1}, (20, 64), "4 bits of 20 outputs"),
    ],
)
def test_shapes_that_do_not_go_with_the_settings_are_refused(
    said: dict[str, int], shape: tuple[int, int], message: str
) -> None:
    weight = WeightSpec("layer", shape, "linear")
    calibrator = GPTQCalibrator({"layer": GPTQWeightSettings.model_validate(said)}, [])
    with pytest.raises(ConfigError, match=message):
        calibrator.check(weight)


def test_act_order_is_of_the_whole_checkpoint() -> None:
    mixed = {"a": GPTQWeightSettings(), "b": GPTQWeightSettings(act_order=True)}
    with pytest.raises(ConfigError, match="act_order: differs"):
        GPTQCalibrator(mixed, [])


def _loss(wrong: torch.Tensor, hessian: torch.Tensor) -> float:
    return float(((wrong @ hessian) * wrong).sum())
