"""More connections than may be: those that rest give way, those that work never do."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pegboard.server.open_files import RESERVED_FILES
from pegboard.testing.tiny import write_tiny_model

NUM_FILES = 160
MOST = NUM_FILES - RESERVED_FILES
GET = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(folder, num_hidden_layers=1, max_position_embeddings=20_000)


@pytest.fixture(scope="module")
def served(serve: Any, model: Path) -> Any:
    return serve(model, num_files=NUM_FILES)


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connect(served: Any, sockets: ExitStack, sent: bytes = b"") -> socket.socket:
    url = httpx.URL(served.url)
    opened = sockets.enter_context(socket.create_connection((url.host, url.port or 80), 30))
    opened.sendall(sent)
    return opened


def post(**fields: Any) -> bytes:
    body = json.dumps({"prompt": [5], "ignore_eos": True, "stream": True, **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
    return f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(2**16):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_ten_times_as_many_as_may_be_stop_nobody(served: Any, sockets: ExitStack) -> None:
    server = psutil.Process(served.process.pid)
    assert server.rlimit(psutil.RLIMIT_NOFILE) == (NUM_FILES, NUM_FILES)
    working = connect(served, sockets, post(max_tokens=15_000))
    assert working.recv(12) == b"HTTP/1.1 200"
    log = len(served.log)
    before = sum(server.cpu_times()[:2])
    began = time.monotonic()
    idle = []
    for number in range(10 * MOST):
        idle.append(connect(served, sockets, GET if number % 2 else b"POST /v1/compl"))
        if number % MOST == 0:
            assert httpx.get(f"{served.url}/live", timeout=20).status_code == 200
    assert server.num_fds() < NUM_FILES
    # The system's ends of those that came last are open, and of all others closed.
    deadline = time.monotonic() + 20
    while not all(map(is_closed, idle[: 8 * MOST])):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert working.recv(100) and not is_closed(working)
    # One line, and no work while nothing comes.
    assert len(served.log) - log < 1000, served.log[log:]
    assert served.log[log:].count("server.max_connections") == 1
    used = sum(server.cpu_times()[:2]) - before
    assert used < 0.9 * (time.monotonic() - began) + 5


def test_those_idle_longest_go_first(served: Any, sockets: ExitStack) -> None:
    first = [connect(served, sockets) for _ in range(MOST)]
    # A connection that was used lately is not idle long.
    used = first[MOST // 2 :: 2]
    for connection in used:
        connection.sendall(GET)
        assert connection.recv(12) == b"HTTP/1.1 200"
        while not connection.recv(2**16).endswith(b"}"):
            pass
    for _ in range(MOST // 4):
        connect(served, sockets)
    assert httpx.get(f"{served.url}/live", timeout=20).status_code == 200
    assert not any(map(is_closed, used))
    assert is_closed(first[0])


def test_when_all_work_a_new_one_is_told_so(served: Any, sockets: ExitStack) -> None:
    working = [connect(served, sockets, post(max_tokens=19_000)) for _ in range(MOST)]
    for connection in working:
        assert connection.recv(12) == b"HTTP/1.1 200"
    refused = connect(served, sockets)
    answer = b""
    while piece := refused.recv(2**16):
        answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in head.lower()
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert not any(map(is_closed, working))


@pytest.mark.parametrize(
    ("keep_alive_s", "is_kept"), [(0, False), pytest.param(1, True, marks=pytest.mark.slow)]
)
def test_keep_alive_is_a_setting_and_the_soft_limit_is_raised(
    serve: Any, model: Path, keep_alive_s: int, is_kept: bool, sockets: ExitStack
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard <= RESERVED_FILES + 600:
        pytest.skip(f"the system allows {hard} open files")
    settings = ("server.max_connections=600", f"server.keep_alive_s={keep_alive_s}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        served = serve(model, *(word for one in settings for word in ("--set", one)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert psutil.Process(served.process.pid).rlimit(psutil.RLIMIT_NOFILE)[0] >= 728
    connection = connect(served, sockets, GET)
    answer = b""
    while piece := connection.recv(2**16):  # to the connection's end
        answer += piece
    assert answer.startswith(b"HTTP/1.1 200")
    assert (b"connection: close" in answer.lower()) != is_kept


def test_more_connections_than_files_are_refused_before_anything_starts(model: Path) -> None:
    program = Path(sys.executable).with_name("serve")
    more = f"--set server.max_connections={NUM_FILES}"
    for files, extra in ((NUM_FILES, more), (RESERVED_FILES, "")):
        command = f"ulimit -n {files}; exec {program} {model} --port 0 {extra}"
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 2
        (line,) = done.stderr.strip().splitlines()
        assert "server.max_connections" in line and f"{files} open files" in line
        assert "ulimit -n" in line
