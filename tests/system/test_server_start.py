"""How a server starts, or does not: one line for each fault, no process and no file left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pegboard.testing.tiny import write_tiny_model

WaitUntil = Callable[..., None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=True)


def run_serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).with_name("pegboard")
    return subprocess.run(
        [command, "serve", *arguments], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--api-key", ""),
        pytest.param(("--api-key", " \t"), marks=pytest.mark.slow),
        pytest.param(("--set", "server.admin_keys=' '"), marks=pytest.mark.slow),
    ],
)
def test_a_blank_key_is_one_line_before_anything_starts(
    model: Path, arguments: tuple[str, ...]
) -> None:
    done = run_serve(str(model), "--port", "0", *arguments)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "a blank key" in done.stderr


@pytest.mark.slow
def test_a_taken_port_is_one_line_before_anything_starts(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_serve(str(model), "--port", str(port))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert "loading" not in done.stderr


BROKEN_PLUGIN = """# /// pegboard
# [plugin]
# name = "broken"
# [[provides]]
# interface = "executor"
# version = 1
# name = "broken"
# summary = "Fails once the parts are made"
# ///
import time
from pathlib import Path

from pegboard import hookimpl
from pegboard.interfaces.executor import Executor


class Broken(Executor):
    def __init__(self, context):
        self.context = context

    def start(self):
        self.context.worker(0)
        while not Path({go!r}).exists():
            time.sleep(0.05)
        raise ValueError("no such device")

    def execute(self, batch):
        raise AssertionError

    def call(self, method, *arguments):
        raise AssertionError

    def health(self):
        return ()

    def close(self):
        pass


@hookimpl
def pegboard_executors():
    return {{"broken": Broken}}
"""

UNBUILT_PLUGIN = """# /// pegboard
# [plugin]
# name = "broken"
# [[provides]]
# interface = "observer"
# version = 2
# name = "broken"
# summary = "Cannot be made"
# ///
import time

from pegboard import hookimpl


def make(context):
    raise ValueError("no such device")


@hookimpl
def pegboard_observers():
    return {"broken": make}
"""


def load_of(plugin: Path, code: str) -> tuple[str, ...]:
    """Arguments that load a plugin of this code."""
    plugin.write_text(code)
    return "--set", f"plugins.load=[{plugin}]", "--set", "observers=[broken]"


def test_a_part_that_cannot_be_made_is_one_line_before_anything_listens(
    model: Path, tmp_path: Path
) -> None:
    plugin = tmp_path / "broken.py"
    load = load_of(plugin, UNBUILT_PLUGIN)
    done = run_serve(str(model), "--port", "0", *load)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"error: plugin 'broken' (file, {plugin}): making observer 'broken'")
    assert "listening" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_where_a_part_cannot_be_made_is_shown_to_who_asks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = load_of(tmp_path / "broken.py", UNBUILT_PLUGIN)
    monkeypatch.setenv("PEGBOARD_RAISE", "1")
    done = run_serve(str(model), "--port", "0", *load)
    assert done.returncode == 2
    assert 'raise ValueError("no such device")' in done.stderr


@pytest.mark.slow
def test_a_plugin_that_ends_its_process_is_named_before_anything_listens(
    model: Path, tmp_path: Path
) -> None:
    plugin = tmp_path / "broken.py"
    load = load_of(plugin, f"{UNBUILT_PLUGIN}\nimport os; os._exit(0)\n")
    done = run_serve(str(model), "--port", "0", *load)
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert any(f"importing plugin 'broken' (file, {plugin})" in line for line in lines)
    assert any("the engine's process ended with status 0" in line for line in lines)
    assert "listening" not in done.stderr and "Traceback" not in done.stderr


def test_a_signal_while_a_plugin_hangs_ends_both_processes(
    serve: Any, model: Path, tmp_path: Path
) -> None:
    plugin = tmp_path / "broken.py"
    hanging = UNBUILT_PLUGIN.replace("from pegboard", "time.sleep(600)\nfrom pegboard")
    load = load_of(plugin, hanging)
    served = serve(model, *load, until=f"importing plugin 'broken' (file, {plugin})")
    children = psutil.Process(served.process.pid).children()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(20) == 0
    assert children and not any(child.is_running() for child in children)
    assert "listening" not in served.log


def broken(folder: Path) -> tuple[str, ...]:
    """Arguments that load a plugin, which fails once the folder has a file `go`."""
    plugin = folder / "broken.py"
    plugin.write_text(BROKEN_PLUGIN.format(go=str(folder / "go")))
    return "--set", f"plugins.load=[{plugin}]", "--set", "executor=broken"


def test_a_start_that_fails_is_one_line_after_answers_that_say_it_loads(
    serve: Any, model: Path, tmp_path: Path
) -> None:
    served = serve(model, *broken(tmp_path), until="listening on")
    assert httpx.get(f"{served.url}/v1/models").status_code == 200
    for path in ("/health", "/ready"):
        answer = httpx.get(served.url + path)
        assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
    refused = httpx.post(f"{served.url}/v1/completions", json={"prompt": [5]})
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert "loading (0%)" in refused.json()["error"]["message"]
    (tmp_path / "go").touch()
    assert served.process.wait(60) == 2
    assert "no such device" in served.log.strip().splitlines()[-1]
    assert "Traceback" not in served.log


@pytest.mark.slow
def test_a_signal_while_the_model_loads_ends_both_processes(
    serve: Any, model: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    served = serve(model, *broken(tmp_path), until="listening on")
    wait_until(lambda: bool(psutil.Process(served.process.pid).children()))
    children = psutil.Process(served.process.pid).children()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(20) == 0
    assert not any(child.is_running() for child in children)


SLOW_TOKENIZER = """
import sys, time
from pegboard.cli import serve_main
from pegboard.server import supervisor

read = supervisor.load_tokenizer

def slowly(prepared):
    time.sleep(600)
    return read(prepared)

supervisor.load_tokenizer = slowly
sys.exit(serve_main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_while_the_tokenizer_is_read_leaves_nothing_behind(
    model: Path, tmp_path: Path, number: signal.Signals, wait_until: WaitUntil
) -> None:
    """The engine's process starts meanwhile. A terminal sends its Ctrl-C to all in the foreground."""
    command = [sys.executable, "-c", SLOW_TOKENIZER, str(model), "--port", "0"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_until(lambda: bool(psutil.Process(process.pid).children()))
    (engine,) = psutil.Process(process.pid).children()
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in said
    assert not engine.is_running()
    assert not list(tmp_path.glob("pegboard-*"))


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_a_signal_while_the_chat_template_is_tried_ends_all_processes(
    model: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(ENDLESS)
    program = Path(sys.executable).with_name("pegboard")
    arguments = ("--port", "0", "--chat-template", str(template))
    process = subprocess.Popen(
        [program, "serve", str(model), *arguments], stderr=subprocess.PIPE, text=True
    )
    server = psutil.Process(process.pid)

    def has_renderer() -> bool:
        return any("pegboard.chat.process" in child.cmdline() for child in server.children())

    wait_until(has_renderer, timeout_s=60)
    children = server.children()
    process.terminate()
    _, said = process.communicate(timeout=15)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    assert not any(child.is_running() for child in children)


def test_a_folder_in_which_no_socket_can_be_is_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("a" * 120)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    done = run_serve(str(model), "--port", "0")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: TMPDIR: ")
    assert "listening" not in done.stderr and "Traceback" not in done.stderr
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_a_model_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    done = run_serve(str(tmp_path / "nothing"), "--port", "0")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
