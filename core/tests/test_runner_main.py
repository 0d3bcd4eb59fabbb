"""A worker in a process of its own answers as a worker in this process does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from pegboard import Config, step
from pegboard.compose import prepare, start_worker
from pegboard.errors import EngineError
from pegboard.interfaces.executor import Worker
from pegboard.interfaces.worker_process import (
    Alive,
    Built,
    Call,
    Close,
    Connection,
    Done,
    Execute,
    Failed,
    FromWorker,
    Hello,
    Loaded,
    Start,
    ToWorker,
)
from pegboard.plugins.composition import from_json, to_json
from pegboard.step import GroupUpdate, RowAdmission, StepBatch, StepResult
from pegboard.testing.tiny import write_tiny_model

PROMPT = np.array([5, 9, 300, 2], dtype=np.int32)
ARRAYS = ("offsets", "token_ids", "num_accepted", "num_tried", "num_drafts", "confidences")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    config = Config.from_values(
        {
            "model": str(model),
            "threads": 1,
            "max_model_len": 64,
            "kv_cache": {"block_size": 16},
            "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": 64},
        }
    )
    composition = prepare(config).composition
    return Start(to_json(composition), composition.digest)


class Process:
    """The executor's end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        own, own_secret = zmq.curve_keypair()
        public, secret = zmq.curve_keypair()
        self._requests, self._answers = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket in (self._requests, self._answers):
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = own, own_secret
            socket.rcvtimeo = socket.sndtimeo = 60_000
            socket.bind("tcp://127.0.0.1:*")
        connection = Connection(
            requests=self._requests.getsockopt_string(zmq.LAST_ENDPOINT),
            answers=self._answers.getsockopt_string(zmq.LAST_ENDPOINT),
            executor_key=own.decode(),
            public_key=public.decode(),
            secret_key=secret.decode(),
            parent=os.getpid(),
        )
        argv = [sys.executable, "-m", "pegboard.runner_main", "0"]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE)
        self._give(msgspec.json.encode(connection) + b"\n")
        self.told: list[FromWorker] = []
        assert self.receive() == Hello(0)

    def receive(self) -> FromWorker:
        """The next message that is no sign of life."""
        while True:
            message = msgspec.msgpack.decode(self._answers.recv(), type=FromWorker)
            assert message.rank == 0
            if not isinstance(message, Alive):
                return message
            self.told.append(message)

    def ask(self, request: ToWorker) -> Done | Failed:
        self._requests.send(msgspec.msgpack.encode(request))
        while not isinstance(message := self.receive(), Done | Failed):
            self.told.append(message)
        return message

    def close_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def _give(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()


@pytest.fixture
def peer() -> Iterator[Process]:
    with zmq.Context() as context:
        peer = Process(context)
        yield peer
        peer.close_input()
        peer.process.wait(timeout=30)
        context.destroy(linger=0)


@pytest.fixture
def worker(start: Start) -> Iterator[Worker]:
    """The same in this process."""
    worker = start_worker(start.composition, start.digest, 0, lambda: None, lambda name: None)
    yield worker
    worker.close()


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
    start: Start, peer: Process, worker: Worker
) -> None:
    assert peer.ask(start) == Done(0)
    told = [message for message in peer.told if not isinstance(message, Alive)]
    assert told[0] == Built(0) and Loaded(0, "model.embed_tokens.weight") in told[1:]
    tokens = []
    for step_id in range(5):
        message = batch(1, step_id)
        expected = worker.execute(message)
        answer = peer.ask(Execute(step.encode(message)))
        assert isinstance(answer, Done)
        result = step.decode(answer.value, StepResult)
        assert result.step_id == step_id
        for name in ARRAYS:
            assert np.array_equal(getattr(result, name), getattr(expected, name))
        assert result.logprobs is not None and expected.logprobs is not None
        assert np.array_equal(result.logprobs.top_ids, expected.logprobs.top_ids)
        assert result.forward_s > 0
        tokens += result.token_ids.tolist()
    assert len(tokens) == 5
    assert peer.ask(Call("memory", [])) == Done(0, worker.call("memory"))
    checksums = worker.call("block_checksums", 0, [1, 2])
    assert peer.ask(Call("block_checksums", [0, [1, 2]])) == Done(0, checksums)
    # A terminal's Ctrl-C is for the executor's process.
    peer.process.send_signal(signal.SIGINT)
    assert peer.ask(Close()) == Done(0)
    assert peer.process.wait(timeout=30) == 0


def test_what_raises_is_answered_and_the_worker_lives_on(start: Start, peer: Process) -> None:
    """And ends, without being asked to close, once the fixture has closed its input."""

    def failure(request: ToWorker) -> str:
        answer = peer.ask(request)
        assert isinstance(answer, Failed) and not answer.mistake and "\n" not in answer.line
        return answer.line

    assert "worker 0 has not started" in failure(Execute(step.encode(batch(1, 0))))
    line = failure(Start(start.composition, "0" * 64))
    assert f"reads the composition 000000000000 as {start.digest[:12]}" in line
    assert not [message for message in peer.told if isinstance(message, Built | Loaded)]
    assert peer.ask(start) == Done(0)
    failure(Execute(b"\x93garbage"))
    assert "'weather'" in failure(Call("weather", []))
    assert "row 1 knows 0 tokens" in failure(Execute(step.encode(batch(1, 3))))
    assert isinstance(peer.ask(Execute(step.encode(batch(1, 0)))), Done)


def test_a_worker_with_other_versions_installed_is_refused(start: Start) -> None:
    composition = from_json(start.composition)
    first, *others = composition.manifests
    origin = msgspec.structs.replace(first.origin, version="9.9")
    newer = msgspec.structs.replace(
        composition, manifests=(msgspec.structs.replace(first, origin=origin), *others)
    )
    with pytest.raises(EngineError, match=rf"{origin.distribution} .* was made with 9\.9; fix"):
        start_worker(to_json(newer), newer.digest, 0, lambda: None, lambda name: None)
