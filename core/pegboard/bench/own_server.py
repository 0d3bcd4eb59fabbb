"""A server in a process of its own, for as long as a benchmark runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pegboard.errors import ConfigError, ConfigMistakes, EngineError
from pegboard.progress import progress_bar

STOP_S = 10.0
"""Seconds that the server may take to end by itself."""

_READY = re.compile(r"Uvicorn running on (\S+)")
_MISTAKE = re.compile(r"^error: (.+)$", re.MULTILINE)


@contextmanager
def own_server(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """The URL of a server that runs until the block ends, however it does.

    Args:
        arguments: of `serve`, which takes a free port of the loopback device.
        environment: variables that it gets beside those of this process.

    Raises:
        ConfigError: the server says what is wrong with the arguments.
        EngineError: it ended otherwise before it was ready.
    """
    place = ["--set", "server.host=127.0.0.1", "--set", "server.port=0"]
    module = [sys.executable, "-m", "pegboard.bench.own_server_main", str(os.getpid())]
    with tempfile.TemporaryDirectory(prefix="pegboard-bench-") as folder:
        log = Path(folder, "log")
        with log.open("wb") as file:
            # In a session of its own, for the terminal sends Ctrl-C to every process of this one.
            process = subprocess.Popen(
                [*module, *arguments, *place],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        try:
            yield _wait_until_ready(process, log)
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    with progress_bar() as bar:
        bar.add_task("Starting the server", total=None)
        while True:
            ended = process.poll() is not None
            text = log.read_text(errors="replace")
            ready = _READY.search(text)
            if ready:
                return ready[1]
            if ended:
                raise _why(process.returncode, text)
            time.sleep(0.05)


def _why(status: int, log: str) -> Exception:
    mistakes = _MISTAKE.findall(log)
    if status == 2 and mistakes:
        return ConfigMistakes([ConfigError(mistake) for mistake in mistakes])
    return EngineError(f"the server ended with status {status}; its log:\n{log[-4000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        assert process.stdin is not None
        process.stdin.close()
