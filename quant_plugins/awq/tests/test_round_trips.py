"""Codes that are written in the layout, and read again, are the same codes and mean the formula."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pegboard.interfaces.checkpoint import CheckpointFacts, TensorFact, TokenizerFacts
from pegboard.interfaces.quantizer import QuantizerContext, WeightSpec
from pegboard.testing.linear_weight import dense
from pegboard_awq.packing import pack_outputs, stored_tensors, unpack_outputs
from pegboard_awq.quantizer import AWQQuantizer
from pegboard_quant.codes import UnsignedCodes
from pegboard_quant.options import ActivationOptions

NAME = "model.layers.0.mlp.up_proj"
seeds = st.integers(0, 2**16)


def random_codes(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)


@given(rows=st.integers(1, 9), words=st.integers(1, 9), seed=seeds)
def test_eight_outputs_a_word(rows: int, words: int, seed: int) -> None:
    codes = random_codes(rows, 8 * words, seed)
    packed = pack_outputs(codes)
    assert packed.dtype == torch.int32 and packed.shape == (rows, words)
    assert torch.equal(unpack_outputs(packed), codes)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    for row, numbers in zip(codes.tolist(), packed.tolist(), strict=True):
        for word, number in enumerate(numbers):
            own = [row[8 * word + output] for output in order]
            assert number % 2**32 == sum(code << (4 * place) for place, code in enumerate(own))


@given(words=st.integers(1, 6), columns=st.integers(1, 70), size=st.integers(1, 70), seed=seeds)
def test_the_layout(words: int, columns: int, size: int, seed: int) -> None:
    """Groups may be cut short; a zero is any code."""
    shape, size = (8 * words, columns), min(size, columns)
    groups = -(-columns // size)
    scales = (
        torch.rand(shape[0], groups, generator=torch.Generator().manual_seed(seed)) + 0.01
    ).half()
    zeros = random_codes(shape[0], groups, seed + 1)
    codes = UnsignedCodes(random_codes(*shape, seed), 4, scales, zeros, size)
    stored = stored_tensors(codes, torch.float16)
    config = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": size}
    tensors = {
        f"{NAME}.{name}": TensorFact(
            tuple(one.shape), str(one.dtype).removeprefix("torch."), "plain", one.nbytes
        )
        for name, one in stored.items()
    }
    tokenizer = TokenizerFacts(None)
    facts = CheckpointFacts("safetensors", "/m", "", {}, tensors, "awq", config, (), tokenizer)
    quantizer = AWQQuantizer(QuantizerContext(facts, "float32"), ActivationOptions())
    weight = quantizer.scheme(WeightSpec(NAME, shape, "linear")).load(stored)
    group = torch.arange(columns) // size
    meant = (codes.values.double() - zeros.double()[:, group]) * scales.double()[:, group]
    assert weight.format == "uint4" and torch.equal(dense(weight), meant)
