"""Any GGUF file is used, or refused by a UserError, soon and in little memory,
and at the second start as at the first."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pegboard import Config, Engine
from pegboard.errors import FactoryFailed, UserError

MAX_S = 10.0
MAX_GROWN_BYTES = 256 * 2**20

EDGES = [0, 1, 2, 7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
F32, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0

MODEL: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
}
TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "\u2581", "abab", "c", "d"]
VOCABULARIES: dict[str, dict[str, Any]] = {
    "gpt2": {"tokenizer.ggml.merges": ["a b", "ab ab"], "tokenizer.ggml.pre": "smollm"},
    "llama": {
        "tokenizer.ggml.scores": [-float(i) for i in range(len(TOKENS))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 7],
    },
}
SHAPES = {
    "token_embd": (len(TOKENS), 32),
    "output_norm": (32,),
    "blk.0.attn_norm": (32,),
    "blk.0.attn_q": (32, 32),
    "blk.0.attn_k": (16, 32),
    "blk.0.attn_v": (16, 32),
    "blk.0.attn_output": (32, 32),
    "blk.0.ffn_norm": (32,),
    "blk.0.ffn_gate": (32, 32),
    "blk.0.ffn_up": (32, 32),
    "blk.0.ffn_down": (32, 32),
}
OTHER_KEYS = """
general.alignment general.architecture split.count llama.expert_count llama.attention.key_length
llama.attention.value_length llama.attention.sliding_window llama.rope.dimension_count
llama.rope.scaling.type llama.rope.scaling.factor llama.rope.scaling.original_context_length
llama.rope.scale_linear tokenizer.chat_template tokenizer.ggml.add_bos_token
tokenizer.ggml.add_space_prefix tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id
tokenizer.ggml.eot_token_id tokenizer.ggml.model tokenizer.ggml.tokens tokenizer.ggml.unknown_token_id
"""

read_only_fixtures = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
kinds = st.sampled_from(sorted(VOCABULARIES))
MODES = ("packed", "dequantize")
modes = st.sampled_from(MODES)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
numbers = st.one_of(st.sampled_from([e for e in EDGES if e < 2**32]), st.integers(0, 2**32 - 1))
values = st.one_of(
    st.booleans(),
    numbers,
    st.floats(width=32),
    texts,
    st.sampled_from(["yarn", "linear", "llama", "gpt2"]),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=4),
    st.lists(st.floats(width=32), min_size=1, max_size=10),
    st.lists(texts, min_size=1, max_size=10),
)


def metadata_of(kind: str) -> dict[str, Any]:
    vocabulary = {"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": TOKENS}
    return MODEL | vocabulary | VOCABULARIES[kind]


def tensors_of() -> dict[str, Any]:
    generator = np.random.default_rng(3)
    return {
        f"{name}.weight": (
            generator.normal(size=shape).astype(np.float32),
            Q8_0 if len(shape) == 2 else F32,
        )
        for name, shape in SHAPES.items()
    }


def refusal(path: Path, mode: str) -> str | None:
    """The refusal of a file, the same at two starts; None: it loads. All else fails the test."""
    first, second = _start(path, mode), _start(path, mode)
    assert first == second
    return first


def _start(path: Path, mode: str) -> str | None:
    config = {
        "model": str(path),
        "quantizer": {"name": "gguf", "options": {"mode": mode}},
        "threads": 1,
        "kv_cache": {"memory": "8MiB"},
        "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": 16},
    }
    with bounded():
        try:
            Engine(Config.from_values(config)).close()
        except FactoryFailed:
            raise
        except UserError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 4000
            return str(error)
    return None


@contextmanager
def bounded() -> Iterator[None]:
    """Fails where the body takes long or much memory."""
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.monotonic() - started < MAX_S
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < MAX_GROWN_BYTES


@pytest.mark.parametrize("kind", VOCABULARIES)
@pytest.mark.parametrize("mode", MODES)
def test_the_file_that_is_damaged_below_starts(write_gguf: Any, kind: str, mode: str) -> None:
    assert refusal(write_gguf(metadata_of(kind), tensors_of()), mode) is None


@read_only_fixtures
@given(
    kinds,
    modes,
    st.dictionaries(
        st.sampled_from(OTHER_KEYS.split() + list(metadata_of("gpt2") | metadata_of("llama"))),
        values,
        min_size=1,
        max_size=3,
    ),
    st.one_of(st.none(), st.lists(st.floats(width=32), min_size=1, max_size=8)),
)
@example("llama", "packed", {}, [float("inf")] * 8)
@example("llama", "packed", {"llama.rope.freq_base": 1e-38}, [1.0] * 7 + [2.0])
def test_values_of_metadata(
    write_gguf: Any, kind: str, mode: str, changed: dict[str, Any], factors: list[float] | None
) -> None:
    tensors = tensors_of()
    if factors is not None:
        tensors["rope_freqs.weight"] = (np.array(factors, np.float32), F32)
    refusal(write_gguf(metadata_of(kind) | changed, tensors), mode)


@read_only_fixtures
@given(
    st.sampled_from(sorted(SHAPES)),
    st.one_of(st.none(), st.lists(st.sampled_from([1, 2, 16, 32, 64]), min_size=1, max_size=4)),
    st.sampled_from(["F32", "F16", "Q8_0", "Q4_0", "I32", "F64", "BF16"]),
    modes,
)
def test_tensors_of_other_shapes_and_types(
    write_gguf: Any, name: str, shape: list[int] | None, kind: str, mode: str
) -> None:
    tensors = tensors_of()
    del tensors[f"{name}.weight"]
    if shape is not None:
        to = GGMLQuantizationType[kind]
        block_size, block_bytes = gguf.constants.GGML_QUANT_SIZES[to]
        if shape[-1] % block_size:
            shape[-1] = block_size
        stored = [*shape[:-1], shape[-1] // block_size * block_bytes]
        tensors[f"{name}.weight"] = (np.zeros(stored, np.uint8), to)
    refusal(write_gguf(metadata_of("gpt2"), tensors), mode)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("mode", MODES)
def test_scales_that_are_not_finite(write_gguf: Any, kind: str, mode: str) -> None:
    to = GGMLQuantizationType[kind]
    block_size, block_bytes = gguf.constants.GGML_QUANT_SIZES[to]
    width = max(block_size, 32)
    metadata = metadata_of("gpt2") | {"llama.feed_forward_length": width}
    shapes = {"blk.0.ffn_gate": (width, 32), "blk.0.ffn_up": (width, 32)}
    tensors = tensors_of() | {
        f"{name}.weight": (np.ones(shape, np.float32), F32) for name, shape in shapes.items()
    }
    blocks = np.full((32, width // block_size * block_bytes), 0xFF, np.uint8)
    tensors["blk.0.ffn_down.weight"] = (blocks, to)
    found = refusal(write_gguf(metadata, tensors), mode)
    assert found is not None and "not finite" in found


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content, cut, overwritten, with bytes put in or taken out; mostly in its header."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.one_of(st.integers(0, 900), st.integers(0, len(content))))
        before, after = content[:at], content[at:]
        some = draw(st.binary(min_size=1, max_size=12))
        number = draw(st.sampled_from(EDGES)).to_bytes(8, "little")
        content = draw(
            st.sampled_from(
                [
                    before,
                    before + some + after[len(some) :],
                    before + number + after[8:],
                    before + number[:4] + after[4:],
                    before + some + after,
                    before + after[draw(st.integers(1, 200)) :],
                ]
            )
        )
    return content


@read_only_fixtures
@given(kinds, modes, st.data())
def test_bytes(write_gguf: Any, kind: str, mode: str, data: st.DataObject) -> None:
    path = write_gguf(metadata_of(kind), tensors_of())
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    refusal(path, mode)
