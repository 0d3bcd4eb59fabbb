"""`python -m pegboard.eval.engine_main`: an engine in a process of its own, so that memory and
speed are its own. It reads `messages` on standard input and answers on standard output.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from pegboard.config import Config
from pegboard.errors import UserError
from pegboard.eval.messages import Done, Job, Memory, Start, Started
from pegboard.request import SamplingParams

if TYPE_CHECKING:
    from pegboard.llm import Engine


def main() -> int:
    """Answers until standard input ends; the exit status."""
    answers = _own_standard_output()
    import torch  # noqa: F401  # its memory is counted before the engine's

    before = _memory_bytes("VmRSS")
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    from pegboard.llm import Engine

    started = time.perf_counter()
    try:
        engine = Engine(Config.from_values(start.config))
    except UserError as error:
        _say(answers, Started(mistake=str(error)))
        return 2
    with engine:
        _say(answers, Started(seconds=time.perf_counter() - started))
        for line in sys.stdin.buffer:
            _say(answers, _run(engine, msgspec.json.decode(line, type=Job), before))
    return 0


def _own_standard_output() -> IO[bytes]:
    """The stream for answers. Whatever else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def _say(answers: IO[bytes], message: Started | Done) -> None:
    answers.write(msgspec.json.encode(message) + b"\n")
    answers.flush()


def _run(engine: Engine, job: Job, before: int | None) -> Done:
    params = SamplingParams(max_tokens=job.num_tokens, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    requests = [engine.submit(prompt, params) for prompt in job.prompts]
    generated: dict[str, list[int]] = {request.request_id: [] for request in requests}
    first_at, num_at_first = started, 0
    while engine.has_work():
        for delta in engine.step():
            generated[delta.request_id] += delta.token_ids
        if not num_at_first and all(generated.values()):
            first_at, num_at_first = time.perf_counter(), sum(map(len, generated.values()))
    return Done(
        token_ids=tuple(map(tuple, generated.values())),
        first_s=first_at - started,
        rest_s=time.perf_counter() - first_at,
        num_rest=sum(map(len, generated.values())) - num_at_first,
        memory=Memory(before, _memory_bytes("VmRSS"), _memory_bytes("VmHWM")),
    )


def _memory_bytes(name: str) -> int | None:
    """A line of /proc/self/status, where there is one. (`getrusage` counts the process before `exec`.)"""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    values = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return next((int(value) * 1024 for value in values), None)


if __name__ == "__main__":
    sys.exit(main())
