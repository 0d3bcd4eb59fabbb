"""Damaged and foreign files are refused with one line that names the file."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pegboard.errors import CheckpointError
from pegboard_gguf.describe import describe
from pegboard_gguf.header import read_header

F32 = gguf.GGMLQuantizationType.F32


def _u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def _u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def _text(text: str) -> bytes:
    return _u64(len(text)) + text.encode()


def _info(name: str, shape: tuple[int, ...], type_id: int = 0, offset: int = 0) -> bytes:
    return _text(name) + _u32(len(shape)) + _u64(*shape) + _u32(type_id) + _u64(offset)


def _file(
    path: Path, infos: list[bytes], data: int = 256, metadata: list[bytes] | None = None
) -> Path:
    keys = metadata or []
    head = b"GGUF" + _u32(3) + _u64(len(infos), len(keys)) + b"".join(keys) + b"".join(infos)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + b"\0" * data)
    return path


def test_metadata_and_tensors_are_those_that_the_library_reads(smollm2: Path) -> None:
    header = read_header(smollm2)
    reader = gguf.GGUFReader(smollm2)
    assert {tensor.name for tensor in reader.tensors} == set(header.tensors)
    for theirs in reader.tensors:
        ours = header.tensors[theirs.name]
        assert ours.type == theirs.tensor_type.name
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
        assert (ours.offset, ours.num_bytes) == (theirs.data_offset, theirs.n_bytes)
    for key in ("llama.block_count", "tokenizer.chat_template", "llama.rope.freq_base"):
        assert header.metadata[key] == reader.fields[key].contents()
    assert header.metadata["tokenizer.ggml.merges"][:3] == ["Ġ t", "Ġ a", "i n"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"PK\3\4" + b"\0" * 64, "does not begin with 'GGUF'"),
        (b"GGUF" + _u32(1) + b"\0" * 64, "GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3) + b"\0" * 64, "big-endian"),
        (b"GGUF" + _u32(3) + _u64(2**60, 2**60), "truncated"),
        (b"GGUF" + _u32(3) + _u64(0, 1) + _u64(2**63), "truncated"),
        (b"GGUF" + _u32(3) + _u64(0, 1) + _text("k") + _u32(77) + b"\0" * 8, "type 77"),
        (b"GGUF" + _u32(3) + _u64(0, 1) + _text("k") + _u32(9, 9) + _u64(1), "type 9"),
    ],
)
def test_what_is_no_readable_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ([_info("a", (8, 8), offset=0), _info("b", (8,), offset=32)], "'a' and 'b' in the same"),
        ([_info("a", (8, 8)), _info("a", (8, 8), offset=256)], "'a' twice"),
        ([_info("a", (8, 9))], "'a' ends at byte"),
        ([_info("a", (8,), offset=2**40)], "'a' ends at byte"),
        ([_info("a", (8,), offset=4)], "offset 4"),
        ([_info("a", (2**40, 2**40))], "'a' ends at byte"),
        ([_info("a", (40, 2), type_id=8)], "multiple of 32"),
        ([_info("a", (96, 2), type_id=12)], "multiple of 256"),
        ([_info("a", (32,), type_id=8)], "the vector 'a' in Q8_0"),
        ([_info("a", (0, 2))], "shape"),
        ([_info("a", (2, 2), type_id=999)], "unknown type 999"),
        ([_info("a", (1,) * 9)], "9 dimensions"),
    ],
)
def test_tensors_lie_in_the_file_and_apart(
    tmp_path: Path, infos: list[bytes], message: str
) -> None:
    path = _file(tmp_path / "odd.gguf", infos)
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


def test_a_well_formed_file_passes_the_same_checks(tmp_path: Path) -> None:
    infos = [_info("a", (8, 4)), _info("b", (8, 4), offset=128)]
    header = read_header(_file(tmp_path / "fine.gguf", infos))
    assert {name: tensor.shape for name, tensor in header.tensors.items()} == {
        "a": (4, 8),
        "b": (4, 8),
    }


@pytest.mark.parametrize("alignment", [0, 4, 12])
def test_an_odd_alignment_is_refused(tmp_path: Path, alignment: int) -> None:
    key = _text("general.alignment") + _u32(4, alignment)
    with pytest.raises(CheckpointError, match=rf"general\.alignment {alignment}"):
        read_header(_file(tmp_path / "odd.gguf", [], metadata=[key]))


def test_a_part_of_a_split_file_names_the_tool_that_joins_them(write_gguf: Any) -> None:
    path = write_gguf({"split.count": 3, "split.no": 0}, {"a": (np.zeros((2, 4), np.float32), F32)})
    with pytest.raises(CheckpointError, match=r"one of 3 parts.*llama-gguf-split --merge"):
        describe(path)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9, 0.999])
def test_a_cut_file_is_truncated_wherever_it_is_cut(tiny_file: Path, fraction: float) -> None:
    content = tiny_file.read_bytes()
    tiny_file.write_bytes(content[: int(len(content) * fraction)])
    with pytest.raises(CheckpointError, match="truncated"):
        describe(tiny_file)


@pytest.mark.parametrize("in_a_folder", [True, False])
def test_a_fifo_is_not_waited_for(tmp_path: Path, in_a_folder: bool) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="a FIFO, and only regular files are read"):
        describe(tmp_path if in_a_folder else tmp_path / "model.gguf")


def test_a_header_has_a_limit(
    tmp_path: Path, tiny_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pegboard_gguf.header.MAX_BYTES", 100)
    with pytest.raises(CheckpointError, match="a header that does not end"):
        read_header(tiny_file)
