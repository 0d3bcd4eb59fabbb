"""A person's other mistakes outside HTTP: one line that names the mistake, status 2, soon, and nothing left
running or on the disk."""

from __future__ import annotations

import socket
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from pegboard.cli import main

Refuse = Callable[..., list[str]]

COMMANDS = ("serve", "pegboard generate", "pegboard check")


def in_turn(*cases: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Each case with one of the commands, which all begin by the same functions."""
    return [(command, *case) for command, case in zip(cycle(COMMANDS), cases, strict=False)]


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
