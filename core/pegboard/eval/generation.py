"""Generation by engines in processes of their own: greedy texts, speed, memory, round by round."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from pegboard.errors import ConfigError, EngineError
from pegboard.eval.messages import Done, Job, Memory, Start, Started

BATCH = 8
"""Sequences at once: of decoding, and prompts whose continuations are compared."""

_ROUNDS = 3
_STOP_S = 10.0

M = TypeVar("M")


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens a second, medians of the rounds; and what the engine took.

    Attributes:
        prefill: of a prompt of `prefill_tokens`.
        decode_1, decode_8: with so many sequences at once, of all together.
        load_s: seconds until the engine was ready, torch imported before.
        memory: of the process, when all was done.
    """

    prefill: float
    prefill_tokens: int
    decode_1: float
    decode_8: float
    load_s: float
    memory: Memory


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Greedy continuations of the same prompts by both models.

    Attributes:
        num_prompts, num_tokens: how many, and generated for each.
        identical: share of prompts whose continuations are equal to the end.
        common_prefix: mean share of a continuation until the first difference.
    """

    num_prompts: int
    num_tokens: int
    identical: float
    common_prefix: float


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run.

    Attributes:
        short: `BATCH` of them, which are continued.
        long: one a round, for prefill.
        num_tokens: generated after each of the short ones.
    """

    short: tuple[tuple[int, ...], ...]
    long: tuple[tuple[int, ...], ...]
    num_tokens: int


def prompts_of(token_ids: Sequence[int], bos: int | None, num_tokens: int, most: int) -> Prompts:
    """Prompts from a text: short ones of 32 tokens and long ones of 512, evenly spread over it, fewer
    where text or room are short.

    Args:
        token_ids: the text's.
        bos: token that each begins with; None: none.
        num_tokens: to generate after each short one.
        most: tokens of a prompt and what follows it.
    """
    head = () if bos is None else (bos,)

    def spread(count: int, length: int) -> tuple[tuple[int, ...], ...]:
        length = max(1, min(length, most - num_tokens - len(head), len(token_ids)))
        last = len(token_ids) - length
        starts = [last * index // max(1, count - 1) for index in range(count)]
        return tuple(head + tuple(token_ids[at : at + length]) for at in starts)

    return Prompts(spread(BATCH, 32), spread(_ROUNDS + 1, 512), num_tokens)


def measure(
    configs: Mapping[str, dict[str, Any]],
    prompts: Prompts,
    on_job: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Speed], dict[str, tuple[tuple[int, ...], ...]]]:
    """Runs the configs in turns, so that a slow moment of the machine slows all of them.

    Args:
        configs: name to nested values of a config.
        prompts: what to run.
        on_job: called `num_jobs(len(configs))` times on the way.

    Returns:
        By name, the speed, and the greedy continuations of the short prompts.

    Raises:
        ConfigError: a config cannot be run; `thing` is its name.
        EngineError: a process ended.
    """
    with ExitStack() as open_engines:
        engines = {
            name: open_engines.enter_context(_engine(name, config))
            for name, config in configs.items()
        }
        runs: dict[str, list[_Round]] = {name: [] for name in engines}
        for number in range(_ROUNDS + 1):
            for name, engine in engines.items():
                runs[name].append(_round(engine, prompts, number))
                on_job()
    # The first round also fills caches and makes threads.
    length = len(prompts.long[0])
    speeds = {name: _speed(engine, runs[name][1:], length) for name, engine in engines.items()}
    return speeds, {name: rounds[0].decode_8.token_ids for name, rounds in runs.items()}


def num_jobs(num_configs: int) -> int:
    """The number of calls of `on_job` by `measure`."""
    return num_configs * (_ROUNDS + 1)


def agreement(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]], num_tokens: int) -> Agreement:
    """The agreement of two sets of continuations."""
    equal = [
        next((at for at, (x, y) in enumerate(zip(one, other, strict=True)) if x != y), num_tokens)
        for one, other in zip(a, b, strict=True)
    ]
    return Agreement(
        num_prompts=len(equal),
        num_tokens=num_tokens,
        identical=sum(length == num_tokens for length in equal) / len(equal),
        common_prefix=sum(equal) / len(equal) / num_tokens,
    )


@dataclass(frozen=True)
class _Round:
    prefill: Done
    decode_1: Done
    decode_8: Done


class _EngineProcess:
    """An engine that another process runs."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], config: dict[str, Any]) -> None:
        self._name, self._process = name, process
        started = self._ask(Start(config), Started)
        if started.mistake is not None:
            raise ConfigError(self._name, started.mistake)
        self.load_s = started.seconds

    def run(self, job: Job) -> Done:
        return self._ask(job, Done)

    def _ask(self, message: Start | Job, kind: type[M]) -> M:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        return msgspec.json.decode(line, type=kind)

    def _died(self) -> EngineError:
        return EngineError(f"{self._name}: its engine ended with status {self._process.wait()}")


@contextmanager
def _engine(name: str, config: dict[str, Any]) -> Iterator[_EngineProcess]:
    argv = [sys.executable, "-m", "pegboard.eval.engine_main"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield _EngineProcess(name, process, config)
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Closes the standard input, at whose end the process ends."""
    try:
        process.communicate(timeout=_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _round(engine: _EngineProcess, prompts: Prompts, number: int) -> _Round:
    return _Round(
        prefill=engine.run(Job((prompts.long[number],), 1)),
        decode_1=engine.run(Job(prompts.short[:1], prompts.num_tokens)),
        decode_8=engine.run(Job(prompts.short, prompts.num_tokens)),
    )


def _speed(engine: _EngineProcess, rounds: Sequence[_Round], prefill_tokens: int) -> Speed:
    def decoding(done: Sequence[Done]) -> float:
        return statistics.median(one.num_rest / one.rest_s for one in done)

    return Speed(
        prefill=statistics.median(prefill_tokens / one.prefill.first_s for one in rounds),
        prefill_tokens=prefill_tokens,
        decode_1=decoding([one.decode_1 for one in rounds]),
        decode_8=decoding([one.decode_8 for one in rounds]),
        load_s=engine.load_s,
        memory=rounds[-1].decode_8.memory,
    )
