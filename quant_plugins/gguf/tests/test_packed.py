"""Weights that stay in the file's codes are, bit for bit, what the gguf library dequantizes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import LinearWeight, QuantizerContext, WeightSpec
from pegboard.testing.linear_weight import dense
from pegboard_gguf.blocks import unpack
from pegboard_gguf.describe import describe
from pegboard_gguf.forms import PACKED_FORMS
from pegboard_gguf.options import GGUFOptions
from pegboard_gguf.plan import BLOCK_FORMATS, resident_bytes
from pegboard_gguf.quantizer import GGUFQuantizer
from pegboard_gguf.source import GGUFSource

BLOCKS = Path(__file__).parents[3] / "tests" / "data" / "quant" / "gguf-blocks"
PACKED = GGUFOptions(mode="packed", activations="float")
ROUNDED = GGUFOptions(mode="packed", activations="int8")

CANONICAL = {
    "Q4_0": ("uint4", 32),
    "Q4_1": ("uint4", 32),
    "Q5_0": ("int8", 32),
    "Q5_1": ("int8", 32),
    "Q8_0": ("int8", 32),
    "Q4_K": ("uint4", 32),
    "Q5_K": ("int8", 32),
    "Q6_K": ("int8", 16),
}
"""Codes and weights a group."""

# Of each type, where its float16 numbers lie in a block.
NUMBERS = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
NAME = "model.layers.0.mlp.down_proj"


def loaded(facts: CheckpointFacts, options: GGUFOptions = PACKED) -> dict[str, LinearWeight]:
    """All matrices as a model's layers would get them."""
    quantizer = GGUFQuantizer(QuantizerContext(facts, "float32"), options)
    source = GGUFSource(facts)
    weights = {}
    for name, fact in facts.tensors.items():
        if len(fact.shape) == 2:
            spec = WeightSpec(name[: -len(".weight")], (fact.shape[0], fact.shape[1]), "linear")
            scheme = quantizer.scheme(spec)
            weight = scheme.load({item.name: source.read(name) for item in scheme.parameters})
            assert weight.format == scheme.format
            weights[name] = weight
    source.close()
    return weights


@pytest.fixture
def one_matrix(write_gguf: Any) -> Any:
    """`one_matrix(blocks, type) -> facts` of a file with that down_proj."""

    def write(blocks: Any, kind: str) -> CheckpointFacts:
        metadata = {
            "llama.block_count": 1,
            "llama.context_length": 64,
            "llama.embedding_length": 32,
            "llama.feed_forward_length": 32,
            "llama.attention.head_count": 2,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
        }
        tensors = {
            "token_embd.weight": (np.zeros((8, 32), np.float32), GGMLQuantizationType.F32),
            "blk.0.ffn_down.weight": (blocks, GGMLQuantizationType[kind]),
        }
        return describe(write_gguf(metadata, tensors))

    return write


@pytest.mark.parametrize("name", sorted(load_file(BLOCKS / "model.safetensors")))
def test_foreign_blocks_keep_their_codes_and_their_bits(
    one_matrix: Any, cache_folder: Path, name: str
) -> None:
    kind = name.removesuffix("_random")
    expected = load_file(BLOCKS / "expected.safetensors")[name]
    facts = one_matrix(load_file(BLOCKS / "model.safetensors")[name], kind)
    weight = loaded(facts)[f"{NAME}.weight"]
    assert dense(weight).float().numpy().tobytes() == expected.tobytes()
    if kind not in CANONICAL:
        assert weight.format == "float"
    else:
        codes, group_size = CANONICAL[kind]
        assert weight.format == codes and weight.scales is not None
        assert weight.scales.shape == (4, 512 // group_size)
    assert not list(cache_folder.glob("*.safetensors"))


def test_what_is_packed_is_tested() -> None:
    assert set(PACKED_FORMS) == set(CANONICAL) == set(NUMBERS) < BLOCK_FORMATS


def test_inputs_are_rounded_where_the_options_say_so(tiny_file: Path) -> None:
    facts = describe(tiny_file)
    plain, rounded = loaded(facts), loaded(facts, ROUNDED)
    assert {weight.format for weight in plain.values()} == {"float", "int8", "uint4"}
    for name, weight in rounded.items():
        assert torch.equal(dense(weight), dense(plain[name]))
        if weight.format != "float":
            assert weight.format == f"{plain[name].format}:grouped"
            assert weight.activations == "grouped"


def test_rows_of_q_and_k_are_those_that_transformers_reads(tiny_file: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    facts = describe(tiny_file)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{**facts.config, "dtype": "float32"}))
    theirs = load_gguf_checkpoint(  # type: ignore[no-untyped-call]
        str(tiny_file), return_tensors=True, model_to_load=model
    )
    for name, weight in loaded(facts).items():
        assert torch.equal(dense(weight).float(), theirs["tensors"][name]), name


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_rows_of_other_architectures_stay_where_they_are(write_model: Any, family: str) -> None:
    from pegboard.testing.tiny import FAMILIES, ODD_SHAPE

    config = {**ODD_SHAPE, **FAMILIES[family], "dtype": "float32"}
    width = 32 * -(-config["hidden_size"] // 32)
    written = torch.randn((64, width), generator=torch.Generator().manual_seed(1))
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = {"model.embed_tokens.weight": torch.zeros(8, width), name: written}
    facts = describe(write_model(config, tensors, kinds={name: GGMLQuantizationType.Q8_0}))
    kept = dense(loaded(facts)[name])
    assert (kept - written.double()).abs().max() < 0.02


def test_blocks_of_mixed_types_keep_hugging_faces_rows(write_model: Any, mixed_model: Any) -> None:
    kinds = mixed_model.kinds
    weights = loaded(describe(write_model(mixed_model.config, mixed_model.tensors, kinds=kinds)))
    for name, kind in kinds.items():
        expected = gguf.quants.dequantize(mixed_model.tensors[name].numpy(), kind)
        assert dense(weights[name]).float().numpy().tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kind", sorted(NUMBERS))
def test_numbers_that_are_not_finite_are_refused(one_matrix: Any, kind: str, value: float) -> None:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    for offset in NUMBERS[kind]:
        blocks = np.full((4, 3, block_bytes), 0x11, np.uint8)
        blocks[2, 1, offset : offset + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
        facts = one_matrix(blocks.reshape(4, -1), kind)
        assert facts.tensors[f"{NAME}.weight"].shape == (4, 3 * block_size)
        with pytest.raises(CheckpointError, match=r"down_proj\.weight': holds numbers") as refused:
            loaded(facts)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", sorted(CANONICAL))
def test_a_file_that_ends_early_is_refused(one_matrix: Any, kind: str) -> None:
    block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    facts = one_matrix(np.zeros((64, 4 * block_bytes), np.uint8), kind)
    path = Path(facts.path)
    path.write_bytes(path.read_bytes()[: -block_bytes - 32])
    with pytest.raises(CheckpointError, match=r"is truncated: tensor 'blk\.0\.ffn_down\.weight'"):
        describe(path)


def test_a_file_that_is_cut_while_it_is_read_is_refused(one_matrix: Any) -> None:
    facts = one_matrix(np.zeros((64, 4 * 34), np.uint8), "Q8_0")
    source = GGUFSource(facts)
    path = Path(facts.path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4096)
    with pytest.raises(CheckpointError, match="has changed since"):
        source.read(f"{NAME}.weight")
    source.close()


def test_plans_count_codes_at_their_bits_and_all_numbers(
    write_model: Any, mixed_model: Any, tiny_file: Path
) -> None:
    mixed = write_model(
        mixed_model.config,
        mixed_model.tensors,
        kinds=mixed_model.kinds,
        path=tiny_file.with_name("mixed.gguf"),
    )
    for facts in (describe(mixed), describe(tiny_file)):
        for name, weight in loaded(facts, ROUNDED).items():
            spec = WeightSpec(name[: -len(".weight")], weight.shape, "linear")
            planned = resident_bytes(spec, facts, "float32", ROUNDED)
            assert planned == _num_bytes(weight), name


def _num_bytes(weight: LinearWeight) -> int:
    bits = 4 if weight.format.startswith("uint4") else 8
    codes = 0 if weight.codes is None else weight.codes.numel() * bits // 8
    numbers = (weight.values, weight.scales, weight.zeros, weight.minima)
    return codes + sum(part.numel() * 4 for part in numbers if part is not None)


@pytest.mark.parametrize("kind", ["Q5_K", "Q6_K"])
def test_unpacking_takes_little_memory_beside_the_codes(random_blocks: Any, kind: str) -> None:
    blocks = random_blocks((4096, 2048), GGMLQuantizationType[kind], 1)
    tracemalloc.start()
    unpacked = unpack(blocks, kind, 2048)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    kept = unpacked.codes.nbytes + unpacked.scales.nbytes
    kept += 0 if unpacked.minima is None else unpacked.minima.nbytes
    assert peak < 1.25 * kept


def test_of_a_file_only_tensors_in_use_are_mapped(tiny_file: Path) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not show a process's maps")
    source = GGUFSource(describe(tiny_file))
    held = source.read("model.layers.0.mlp.up_proj.weight")
    assert maps.read_text().count(str(tiny_file)) == 1
    del held
    assert str(tiny_file) not in maps.read_text()
    source.close()
