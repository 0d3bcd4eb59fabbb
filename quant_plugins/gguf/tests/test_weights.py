"""Weights are, bit for bit, what the gguf library makes of the blocks, cached or not."""

from __future__ import annotations

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
from pegboard.interfaces.quantizer import QuantizerContext, WeightSpec
from pegboard_gguf.describe import describe
from pegboard_gguf.options import GGUFOptions
from pegboard_gguf.plan import BLOCK_FORMATS, parameters, resident_bytes
from pegboard_gguf.quantizer import GGUFQuantizer
from pegboard_gguf.source import GGUFSource

BLOCKS = Path(__file__).parents[3] / "tests" / "data" / "quant" / "gguf-blocks"
DEQUANTIZE = GGUFOptions(mode="dequantize")

TINY = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def _loaded(facts: CheckpointFacts, dtype: str = "float32") -> dict[str, torch.Tensor]:
    """All matrices as a model's layers would get them."""
    quantizer = GGUFQuantizer(QuantizerContext(facts, dtype), DEQUANTIZE)
    source = GGUFSource(facts)
    weights = {}
    for name, fact in facts.tensors.items():
        if len(fact.shape) == 2:
            rows, columns = fact.shape
            scheme = quantizer.scheme(
                WeightSpec(name[: -len(".weight")], (rows, columns), "linear")
            )
            stored = {item.name: source.read(name) for item in scheme.parameters}
            weight = scheme.load(stored)
            assert weight.format == scheme.format == "float"
            assert weight.values is not None and weight.shape == tuple(weight.values.shape)
            weights[name] = weight.values
    source.close()
    return weights


def _same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) and first[name].dtype == second[name].dtype
        for name in first
    )


def _weights_file(cache_folder: Path) -> Path | None:
    return next(cache_folder.glob("*.safetensors"), None)


@pytest.mark.parametrize("name", sorted(load_file(BLOCKS / "model.safetensors")))
def test_foreign_blocks_of_every_kind_dequantize_bit_for_bit(write_gguf: Any, name: str) -> None:
    blocks = load_file(BLOCKS / "model.safetensors")[name]
    expected = load_file(BLOCKS / "expected.safetensors")[name]
    kind = GGMLQuantizationType[name.removesuffix("_random")]
    tensors = {
        "token_embd.weight": (np.zeros((8, 32), np.float32), GGMLQuantizationType.F32),
        "blk.0.ffn_down.weight": (blocks, kind),
    }
    facts = describe(write_gguf(TINY, tensors))
    weight = "model.layers.0.mlp.down_proj.weight"
    assert facts.tensors[weight].format == kind.name
    for _ in ("converted", "from the cache"):
        assert _loaded(facts)[weight].numpy().tobytes() == expected.tobytes()


def test_rows_and_types_come_back_as_they_were_quantized(
    tiny_file: Path,
    tiny_tensors: dict[str, torch.Tensor],
    tiny_kinds: dict[str, GGMLQuantizationType],
) -> None:
    """Independent of our order of work: here Hugging Face's rows are quantized and never permuted."""
    loaded = _loaded(describe(tiny_file))
    for name, kind in tiny_kinds.items():
        blocks = gguf.quants.quantize(tiny_tensors[name].numpy(), kind)
        expected = gguf.quants.dequantize(blocks, kind)
        assert torch.equal(loaded[name], torch.from_numpy(expected)), name


def test_tensors_equal_those_that_transformers_reads(tiny_file: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    facts = describe(tiny_file)
    config = LlamaConfig(**{**facts.config, "dtype": "float32"})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    theirs = load_gguf_checkpoint(  # type: ignore[no-untyped-call]
        str(tiny_file), return_tensors=True, model_to_load=model
    )
    loaded = _loaded(facts)
    for name, weight in loaded.items():
        assert torch.equal(weight, theirs["tensors"][name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_second_start_reads_the_same_weights_from_the_cache(
    tiny_file: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    facts = describe(tiny_file)
    first = _loaded(facts, dtype)
    assert all(weight.dtype == getattr(torch, dtype) for weight in first.values())

    def refuse(*args: Any) -> Any:
        raise AssertionError("dequantized again")

    monkeypatch.setattr("pegboard_gguf.weights.gguf_dequantize", refuse)
    assert _same(_loaded(facts, dtype), first)


def test_a_cached_file_is_a_valid_safetensors_file(tiny_file: Path, cache_folder: Path) -> None:
    facts = describe(tiny_file)
    loaded = _loaded(facts)
    path = _weights_file(cache_folder)
    assert path is not None
    stored = load_file(path)
    assert stored and all(np.array_equal(stored[name], loaded[name].numpy()) for name in stored)


@pytest.mark.parametrize("where", ["header", "data", "end", "gone"])
def test_damaged_weights_are_converted_anew(
    tiny_file: Path, cache_folder: Path, where: str
) -> None:
    facts = describe(tiny_file)
    first = _loaded(facts)
    path = _weights_file(cache_folder)
    assert path is not None
    intact = path.read_bytes()
    damaged = bytearray(intact)
    damaged[{"header": 40, "data": len(intact) - 1001}.get(where, 0)] ^= 0x10
    path.unlink()
    if where != "gone":
        path.write_bytes(intact[:-8] if where == "end" else damaged)
    for _ in ("notices", "is whole again"):
        assert _same(_loaded(facts), first)
    assert path.read_bytes() == intact


def test_weights_that_do_not_fit_are_dequantized_in_memory(
    tiny_file: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = describe(tiny_file)
    expected = _loaded(facts)
    path = _weights_file(cache_folder)
    assert path is not None
    path.unlink()
    monkeypatch.setenv("PEGBOARD_CACHE_SIZE", "20KiB")
    assert _same(_loaded(facts), expected)
    assert _weights_file(cache_folder) is None


def test_every_type_of_the_library_is_known() -> None:
    def readable(kind: GGMLQuantizationType) -> bool:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.quants.dequantize(np.zeros((1, 8 * block_bytes), np.uint8), kind)
        except NotImplementedError:
            return False
        return block_size > 1

    assert {kind.name for kind in GGMLQuantizationType if readable(kind)} == BLOCK_FORMATS


def test_a_type_that_nobody_dequantizes_is_refused_before_loading(write_gguf: Any) -> None:
    block = gguf.GGML_QUANT_SIZES[GGMLQuantizationType.Q8_1][1]
    tensors = {
        "token_embd.weight": (np.zeros((8, 32), np.float32), GGMLQuantizationType.F32),
        "blk.0.ffn_up.weight": (np.zeros((32, block), np.uint8), GGMLQuantizationType.Q8_1),
    }
    facts = describe(write_gguf(TINY, tensors))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight': is stored as Q8_1"):
        parameters(WeightSpec("model.layers.0.mlp.up_proj", (32, 32), "linear"), facts)


def test_scales_that_are_not_finite_are_refused(write_gguf: Any) -> None:
    blocks = gguf.quants.quantize(np.ones((32, 32), np.float32), GGMLQuantizationType.Q8_0)
    blocks[5, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    tensors = {
        "token_embd.weight": (np.zeros((8, 32), np.float32), GGMLQuantizationType.F32),
        "blk.0.ffn_up.weight": (blocks, GGMLQuantizationType.Q8_0),
    }
    facts = describe(write_gguf(TINY, tensors))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight': holds numbers that are not"):
        _loaded(facts)


def test_plans_say_what_a_weight_takes(smollm2: Path) -> None:
    facts = describe(smollm2)
    spec = WeightSpec("model.layers.0.mlp.up_proj", (1536, 576), "linear")
    (stored,) = parameters(spec, facts)
    assert (stored.name, stored.shape, stored.dtype) == ("weight", (1536, 576), "uint8")
    assert resident_bytes(spec, facts, "bfloat16", DEQUANTIZE) == 1536 * 576 * 2


def test_a_checkpoint_of_another_source_is_refused(tiny_file: Path) -> None:
    import dataclasses

    facts = dataclasses.replace(describe(tiny_file), source="safetensors")
    with pytest.raises(CheckpointError, match="not as GGUF"):
        GGUFQuantizer(QuantizerContext(facts, "float32"), DEQUANTIZE)


def test_a_file_that_changed_since_is_refused(
    tiny_file: Path, write_model: Any, tiny_config: dict[str, Any]
) -> None:
    facts = describe(tiny_file)
    write_model(tiny_config, {"model.embed_tokens.weight": torch.ones(288, 64)})
    with pytest.raises(CheckpointError, match="has changed since"):
        GGUFSource(facts)
