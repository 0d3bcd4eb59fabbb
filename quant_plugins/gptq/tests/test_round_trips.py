"""Codes that are written in a layout, and read again, are the same codes and mean the formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from pegboard.interfaces.checkpoint import CheckpointFacts, TensorFact, TokenizerFacts
from pegboard.interfaces.quantizer import QuantizerContext, WeightSpec
from pegboard.testing.linear_weight import dense
from pegboard_gptq.quantizer import GPTQQuantizer
from pegboard_quant import gptq_layout, packed_scheme
from pegboard_quant.codes import UnsignedCodes
from pegboard_quant.options import ActivationOptions
from pegboard_quant.planning import num_words, num_words_apart

NAME = "model.layers.0.mlp.up_proj"
sizes = st.integers(1, 70)


def random_codes(
    shape: tuple[int, int], bits: int, size: int, least_zero: int, seed: int, *, mapped: bool
) -> UnsignedCodes:
    generator = torch.Generator().manual_seed(seed)
    out_features, in_features = shape
    groups = (out_features, -(-in_features // size))
    order = torch.randperm(in_features, generator=generator)
    return UnsignedCodes(
        values=torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8),
        bits=bits,
        scales=(torch.rand(groups, generator=generator) + 0.01).half(),
        zeros=torch.randint(least_zero, 2**bits, groups, generator=generator, dtype=torch.uint8),
        group_size=size,
        group_map=(order // size).to(torch.int32) if mapped else None,
    )


def read(
    config: Mapping[str, Any],
    stored: Mapping[str, torch.Tensor],
    shape: tuple[int, int],
    bits: int,
) -> torch.Tensor:
    """The weight, in float64."""
    tensors = {
        f"{NAME}.{name}": TensorFact(
            tuple(one.shape), str(one.dtype).removeprefix("torch."), "plain", one.nbytes
        )
        for name, one in stored.items()
    }
    method, tokenizer = config["quant_method"], TokenizerFacts(None)
    facts = CheckpointFacts("safetensors", "/m", "", {}, tensors, method, config, (), tokenizer)
    quantizer = GPTQQuantizer(QuantizerContext(facts, "float32"), ActivationOptions())
    scheme = quantizer.scheme(WeightSpec(NAME, shape, "linear"))
    assert {one.name for one in scheme.parameters} == set(stored)
    weight = scheme.load(stored)
    assert weight.format == ("uint4" if bits <= 4 else "int8")
    return dense(weight)


def meant(codes: UnsignedCodes) -> torch.Tensor:
    """(code - zero) * scale, number by number."""
    groups = codes.group_map
    if groups is None:
        groups = torch.arange(codes.shape[1]) // codes.group_size
    zeros, scales = codes.zeros.double(), codes.scales.double()
    return (codes.values.double() - zeros[:, groups.long()]) * scales[:, groups.long()]


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    out_words=st.integers(1, 3),
    in_words=st.integers(1, 4),
    size=st.sampled_from([8, 16, 32, 64, 128]),
    first=st.booleans(),
    mapped=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_the_layout_of_gptq(
    bits: int, out_words: int, in_words: int, size: int, first: bool, mapped: bool, seed: int
) -> None:
    shape = (32 * out_words, 32 * in_words)
    size = min(size, shape[1])
    codes = random_codes(shape, bits, size, 1 if first else 0, seed, mapped=mapped)
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "sym": False,
        "desc_act": mapped,
        "checkpoint_format": "gptq" if first else "gptq_v2",
    }
    stored = gptq_layout.stored(codes, minus_one=first)
    assert torch.equal(read(config, stored, shape, bits), meant(codes))


@given(
    bits=st.integers(2, 8),
    shape=st.tuples(sizes, sizes),
    size=sizes,
    symmetric=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_the_layout_of_compressed_tensors(
    bits: int, shape: tuple[int, int], size: int, symmetric: bool, seed: int
) -> None:
    """Any number of inputs and outputs: streams end within a word, groups may be cut short."""
    for length in shape:
        # Where two versions of the tool fill as many words differently, nothing tells them apart.
        dense_words, apart = num_words(length, bits), num_words_apart(length, bits)
        assume(32 % bits == 0 or not dense_words == apart > 1)
    codes = random_codes(shape, bits, min(size, shape[1]), 0, seed, mapped=False)
    if symmetric:
        codes.zeros.fill_(1 << (bits - 1))
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": codes.group_size,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    stored = packed_scheme.stored_tensors(codes, torch.float16, symmetric=symmetric)
    assert torch.equal(read(config, stored, shape, bits), meant(codes))
