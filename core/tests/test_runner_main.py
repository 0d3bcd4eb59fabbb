"""A worker process over a real socket answers as a worker in this process does."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegboard import Config, step
from pegboard.compose import load_worker, prepare
from pegboard.plugins.composition import to_json
from pegboard.runner_main import receive_frame, send_frame
from pegboard.step import GroupUpdate, RowAdmission, StepBatch, StepResult
from pegboard.testing.tiny import write_tiny_model

PROMPT = np.array([5, 9, 300, 2], dtype=np.int32)
ARRAYS = ("offsets", "token_ids", "num_accepted", "num_tried", "num_drafts", "confidences")


@pytest.fixture(scope="module")
def composition(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("composition")
    model = write_tiny_model(folder / "model")
    config = Config.from_values(
        {
            "model": str(model),
            "threads": 1,
            "max_model_len": 64,
            "kv_cache": {"block_size": 16},
            "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": 64},
        }
    )
    path = folder / "composition.json"
    path.write_bytes(to_json(prepare(config).composition))
    return path


@pytest.fixture
def peer(composition: Path, tmp_path: Path) -> Iterator[socket.socket]:
    """The host's end, after `hello`; the process ends by itself when it is closed."""
    address = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen()
        argv = [sys.executable, "-m", "pegboard.runner_main", str(composition), "0", address]
        process = subprocess.Popen(argv)
        listener.settimeout(60)
        connection, _ = listener.accept()
    with connection:
        connection.settimeout(60)
        assert receive_frame(connection) == ["hello", load_worker(composition, 0)[0]]
        yield connection
    assert process.wait(timeout=30) == 0


def ask(peer: socket.socket, *frame: Any) -> Any:
    send_frame(peer, list(frame))
    return receive_frame(peer)


def batch(composition_groups: int, step_id: int) -> StepBatch:
    """Step 0 admits and prefills, later ones decode."""

    def ints(*values: int) -> Any:
        return np.array(values, dtype=np.int32)

    admission = RowAdmission(
        row=1, token_ids=PROMPT, num_prompt_tokens=4, seed=2**64 - 5, num_logprobs=2
    )
    update = GroupUpdate(
        group=0,
        encoding="none",
        rows=ints(1),
        entries=ints(0),
        blocks=ints(1),
        copy_from=ints(),
        copy_to=ints(),
    )
    first = step_id == 0
    return StepBatch(
        step_id=step_id,
        fence=step_id - 1,
        released=(),
        admitted=(admission,) if first else (),
        groups=(update,) * composition_groups if first else (),
        rows=ints(1),
        num_computed=ints(0 if first else 3 + step_id),
        num_tokens=ints(4 if first else 1),
        sample=np.array([True]),
        verify=ints(0),
        propose=ints(0),
        pending=np.array([False]),
    )


def test_steps_over_the_socket_equal_steps_in_this_process(
    composition: Path, peer: socket.socket
) -> None:
    _, worker = load_worker(composition, 0)
    worker.start()
    assert ask(peer, "start") == ["ok", None]
    tokens = []
    for step_id in range(5):
        message = batch(1, step_id)
        expected = worker.execute(message)
        kind, payload = ask(peer, "execute", step.encode(message))
        assert kind == "ok"
        result = step.decode(payload, StepResult)
        assert result.step_id == step_id
        for name in ARRAYS:
            assert np.array_equal(getattr(result, name), getattr(expected, name))
        assert result.logprobs is not None and expected.logprobs is not None
        assert np.array_equal(result.logprobs.top_ids, expected.logprobs.top_ids)
        assert result.forward_s > 0
        tokens += result.token_ids.tolist()
    assert len(tokens) == 5
    assert ask(peer, "call", "memory") == ["ok", worker.call("memory")]
    checksums = worker.call("block_checksums", 0, [1, 2])
    assert ask(peer, "call", "block_checksums", 0, [1, 2]) == ["ok", checksums]
    assert ask(peer, "close") == ["ok", None]
    assert receive_frame(peer) is None
    worker.close()


def test_what_raises_is_answered_and_the_worker_lives_on(peer: socket.socket) -> None:
    """And ends, without being asked to close, once the fixture has closed the socket."""
    assert ask(peer, "execute", step.encode(batch(1, 0)))[0] == "error"
    assert ask(peer, "start") == ["ok", None]
    kind, line = ask(peer, "execute", b"\x93garbage")
    assert kind == "error" and "\n" not in line
    assert ask(peer, "dance") == [
        "error",
        "worker: unknown request ['dance']; allowed: start, execute, call, close",
    ]
    kind, line = ask(peer, "call", "weather")
    assert kind == "error" and "'weather'" in line
    kind, line = ask(peer, "execute", step.encode(batch(1, 3)))
    assert kind == "error" and "row 1 knows 0 tokens" in line
    assert ask(peer, "execute", step.encode(batch(1, 0)))[0] == "ok"
