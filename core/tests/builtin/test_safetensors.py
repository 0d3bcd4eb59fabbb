"""Checkpoints on disk: whole, sharded, damaged."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pegboard.builtin.safetensors_describe import describe
from pegboard.builtin.safetensors_source import SafetensorsSource
from pegboard.errors import CheckpointError

CONFIG = {"architectures": ["LlamaForCausalLM"], "eos_token_id": 2}
TENSORS = {
    "a": torch.arange(12.0).view(4, 3),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "c": torch.tensor([1, 2, 3], dtype=torch.int32),
    "d": torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {"a": "x-1.safetensors", "b": "x-1.safetensors", "c": "x-2.safetensors"}
    write_index(tmp_path, weight_map)
    for file in ("x-1.safetensors", "x-2.safetensors"):
        names = [name for name, holder in weight_map.items() if holder == file]
        save_file({name: TENSORS[name] for name in names}, tmp_path / file)
    return tmp_path


def write_index(folder: Path, weight_map: Any) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def with_header(header: Any, num_bytes: int) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + bytes(num_bytes)


def entry(start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [2], "data_offsets": [start, end]}


def test_tensors_come_back_as_they_were_saved(folder: Path) -> None:
    facts = describe(folder)
    assert facts.tensors["a"].shape == (4, 3)
    assert facts.tensors["b"].dtype == "bfloat16" and facts.tensors["b"].num_bytes == 10
    assert {fact.format for fact in facts.tensors.values()} == {"plain"}
    source = SafetensorsSource(facts)
    for name, tensor in TENSORS.items():
        read = source.read(name)
        assert read.dtype == tensor.dtype == getattr(torch, facts.tensors[name].dtype)
        assert torch.equal(read, tensor)
    assert torch.equal(source.read("a", slice(1, 3)), TENSORS["a"][1:3])
    with pytest.raises(CheckpointError, match="tensor z: missing"):
        source.read("z")
    source.close()
    source.close()


def test_shards_are_one_checkpoint(sharded: Path) -> None:
    facts = describe(sharded)
    assert sorted(facts.tensors) == ["a", "b", "c"]
    source = SafetensorsSource(facts)
    assert all(torch.equal(source.read(name), TENSORS[name]) for name in facts.tensors)
    source.close()


def test_one_file_is_a_checkpoint(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "fine-tune.safetensors")
    facts = describe(folder / "fine-tune.safetensors")
    source = SafetensorsSource(facts)
    assert torch.equal(source.read("d"), TENSORS["d"])
    source.close()


def test_fingerprint_follows_the_content(folder: Path) -> None:
    seen = [describe(folder).fingerprint]
    assert describe(folder).fingerprint == seen[0]
    (folder / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 5.0}))
    seen.append(describe(folder).fingerprint)
    file = folder / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    seen.append(describe(folder).fingerprint)
    save_file(TENSORS | {"e": torch.zeros(1)}, file)
    seen.append(describe(folder).fingerprint)
    assert len(set(seen)) == 4


def test_checkpoint_that_changed_after_planning_is_refused(folder: Path) -> None:
    facts = describe(folder)
    save_file({"a": TENSORS["a"]}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="changed since it was planned"):
        SafetensorsSource(facts)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda raw: raw[:-3],
    "too long": lambda raw: raw + b"xx",
    "truncated in its header": lambda raw: raw[:30],
    "empty": lambda raw: b"",
    "header not JSON": lambda raw: with_header(b"{nope", 8),
    "header longer than the file": lambda raw: struct.pack("<Q", 2**40) + b"{}",
    "overlapping tensors": lambda raw: with_header({"a": entry(0, 8), "b": entry(4, 12)}, 12),
    "hole between tensors": lambda raw: with_header({"a": entry(0, 8), "b": entry(12, 20)}, 20),
    "size not that of the shape": lambda raw: with_header({"a": entry(0, 4)}, 4),
    "unknown dtype": lambda raw: with_header({"a": entry(0, 8, "F31")}, 8),
    "a pickle": lambda raw: b"\x80\x02}q\x00." * 20,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_named(damage: str, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    with pytest.raises(CheckpointError) as error:
        describe(folder)
    assert str(error.value).startswith(f"{file}: damaged")
    assert "\n" not in str(error.value)


def test_complex_weights_are_refused(folder: Path) -> None:
    save_file({"z": torch.zeros(2, dtype=torch.complex64)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor z is of dtype C64; allowed: .*BF16"):
        describe(folder)


def test_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "x-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"x-2.safetensors: no such file"):
        describe(sharded)


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({"a": "x-1.safetensors", "b": "x-1.safetensors"}, None),
        ({"a": "x-1.safetensors", "b": "x-2.safetensors", "c": "x-2.safetensors"}, "tensor b"),
        ({"a": "x-1.safetensors", "c": "x-2.safetensors"}, "tensor b is not in"),
        ({"a": "../x-1.safetensors"}, "allowed: a file of the same folder"),
        ({"a": 1}, "allowed: a file of the same folder"),
        ({}, "no weight_map"),
        (["a"], "no weight_map"),
    ],
)
def test_index_and_shards_must_agree(weight_map: Any, says: str | None, sharded: Path) -> None:
    write_index(sharded, weight_map)
    if says is None:
        assert sorted(describe(sharded).tensors) == ["a", "b"]
        return
    with pytest.raises(CheckpointError, match=says):
        describe(sharded)


def test_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    save_file({"a": TENSORS["a"], "c": TENSORS["c"]}, sharded / "x-2.safetensors")
    with pytest.raises(CheckpointError, match=r"x-2\.safetensors: holds tensor a, and so does x-1"):
        describe(sharded)


def test_folder_without_safetensors_says_what_is_there(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"neither model.safetensors.*pytorch_model.bin"):
        describe(folder)


@pytest.mark.parametrize("text", [None, "{", "[1]", '"llama"', '{"quantization_config": 4}'])
def test_config_that_cannot_be_used_is_named(text: str | None, folder: Path) -> None:
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        describe(folder)


def test_quantization_method_is_reported(folder: Path) -> None:
    assert describe(folder).quantization is None
    method = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": method}))
    facts = describe(folder)
    assert facts.quantization == "gptq" and facts.quantization_config["bits"] == 4


@pytest.mark.parametrize(
    ("name", "method"), [("quantize_config.json", "gptq"), ("quant_config.json", "awq")]
)
def test_quantization_may_have_a_file_of_its_own(folder: Path, name: str, method: str) -> None:
    plain = describe(folder).fingerprint
    (folder / name).write_text(json.dumps({"bits": 3}))
    facts = describe(folder)
    assert facts.quantization == method and facts.quantization_config == {"bits": 3}
    assert facts.fingerprint != plain
    (folder / name).write_text(json.dumps({"bits": 3, "quant_method": "other"}))
    assert describe(folder).quantization == "other"
    in_config = {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(CONFIG | in_config))
    assert describe(folder).quantization == "fp8"


def test_end_of_sequence_ids_are_those_of_both_files(folder: Path) -> None:
    assert describe(folder).eos_token_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert describe(folder).eos_token_ids == (7, 9, 2)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert describe(folder).eos_token_ids == (2,)


def test_tokenizer_files(folder: Path) -> None:
    assert describe(folder).tokenizer.file is None
    (folder / "tokenizer.json").write_text("{}")
    settings: dict[str, Any] = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "add_bos_token": True,
        "chat_template": [
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": "plain"},
        ],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = describe(folder).tokenizer
    assert tokenizer.file == str(folder / "tokenizer.json")
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.chat_template == "plain"
    (folder / "chat_template.jinja").write_text("from the file")
    assert describe(folder).tokenizer.chat_template == "from the file"
