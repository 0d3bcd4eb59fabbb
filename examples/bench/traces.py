"""Traces: requests as token ids with arrival times, which share beginnings as real ones do.

Kinds, each drawn from a seed alone:
    system      one question each, behind one of many system prompts, few of them popular
    few_shot    a task's worked examples, more or fewer of them, then the question
    multi_turn  chats: each turn sends the history, answers included, again
    agents      calls that branch: each sends its parent's context, answer and the tools' results
    mix         sessions of all four

Lengths are log-normal. Sessions begin at random times; a session's calls follow each other after
pauses, whether the call before has been answered by then or not. Run as a script it writes a trace
for the peers' `--trace`.

    python examples/bench/traces.py --kind mix --requests 200 --rate 2 trace.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]

FIRST_ID = 100
"""Lower ids are left out: common vocabularies have their special tokens there."""
NUM_TENANTS = 4
URGENT_SHARE = 0.2
"""Sessions of priority 0; the others have 1."""
MAX_CALLS = 12
"""Of an agents' session."""
MAX_DEPTH = 5


@dataclass(frozen=True, slots=True)
class Workload:
    """The load that a trace is drawn for.

    Attributes:
        num_requests: in all.
        rate: requests a second, on average.
        think_s: mean pause between the calls of a session.
        vocab_size: ids are below it.
        max_len: most tokens of a prompt and its answer; a session ends before it passes them.
        scale: of all lengths; 1: hundreds of tokens.
    """

    num_requests: int = 1000
    rate: float = 4.0
    think_s: float = 30.0
    vocab_size: int = 49152
    max_len: int = 4096
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request, and the answer that it gets.

    Attributes:
        arrival_s: seconds since the trace's beginning.
        prompt, answer: int32 [num_tokens], at least one token each.
        kind: which of `KINDS`.
        session: number of the session that it belongs to.
        tenant: whose it is.
        priority: 0 is urgent.
    """

    arrival_s: float
    prompt: Int32
    answer: Int32
    kind: str
    session: int
    tenant: str
    priority: int


@dataclass(frozen=True, slots=True)
class _Call:
    """A request of a session, so many seconds after its beginning."""

    offset_s: float
    prompt: Int32
    answer: Int32


class _Source:
    """Draws tokens, lengths and choices."""

    def __init__(self, seed: Sequence[int], workload: Workload) -> None:
        self.random = np.random.default_rng(seed)
        self.workload = workload

    def text(self, mean: float) -> Int32:
        """Tokens, on average so many (times the scale), at least one."""
        spread = 0.5
        length = self.random.lognormal(np.log(mean * self.workload.scale) - spread**2 / 2, spread)
        size = max(1, round(length))
        vocab_size = self.workload.vocab_size
        ids: Int32 = self.random.integers(FIRST_ID, vocab_size, size, dtype=np.int32)
        return ids

    def popular(self, num_choices: int, exponent: float = 0.8) -> int:
        """A number below `num_choices`, by Zipf's law: 0 is the most popular."""
        weights = 1.0 / np.arange(1, num_choices + 1) ** exponent
        return int(self.random.choice(num_choices, p=weights / weights.sum()))

    def pause(self) -> float:
        """Seconds between two calls of a session."""
        return float(self.random.exponential(self.workload.think_s))

    def fits(self, *parts: Int32) -> bool:
        """Whether prompt and answer stay within `max_len`."""
        return sum(len(part) for part in parts) <= self.workload.max_len


_MakeSession = Callable[[], list[_Call]]


def _system(source: _Source) -> _MakeSession:
    systems = [source.text(600) for _ in range(100)]

    def session() -> list[_Call]:
        system = systems[source.popular(len(systems))]
        return _single(source, [system, source.text(40)], 50)

    return session


def _few_shot(source: _Source) -> _MakeSession:
    instruction = source.text(40)
    tasks = [[source.text(120) for _ in range(8)] for _ in range(40)]

    def session() -> list[_Call]:
        task = tasks[source.popular(len(tasks))]
        num_examples = int(source.random.choice((2, 4, 8), p=(0.2, 0.3, 0.5)))
        return _single(source, [instruction, *task[:num_examples], source.text(40)], 20)

    return session


def _single(source: _Source, parts: list[Int32], mean_answer: float) -> list[_Call]:
    answer = source.text(mean_answer)
    return [_Call(0.0, np.concatenate(parts), answer)] if source.fits(*parts, answer) else []


def _multi_turn(source: _Source) -> _MakeSession:
    systems = [source.text(200) for _ in range(4)]

    def session() -> list[_Call]:
        history, offset_s = systems[source.popular(len(systems))], 0.0
        calls: list[_Call] = []
        for _ in range(source.random.geometric(0.2)):
            prompt, answer = np.concatenate((history, source.text(50))), source.text(100)
            if not source.fits(prompt, answer):
                break
            calls.append(_Call(offset_s, prompt, answer))
            history = np.concatenate((prompt, answer))
            offset_s += source.pause()
        return calls

    return session


def _agents(source: _Source) -> _MakeSession:
    toolboxes = [source.text(600) for _ in range(8)]

    def session() -> list[_Call]:
        prompt = np.concatenate((toolboxes[source.popular(len(toolboxes))], source.text(80)))
        calls: list[_Call] = []
        waiting = deque([(prompt, 0, 0.0)])
        while waiting and len(calls) < MAX_CALLS:
            prompt, depth, offset_s = waiting.popleft()
            answer = source.text(60)
            if not source.fits(prompt, answer):
                continue
            calls.append(_Call(offset_s, prompt, answer))
            num_children = int(source.random.choice((1, 2, 3), p=(0.6, 0.25, 0.15)))
            for _ in range(num_children if depth + 1 < MAX_DEPTH else 0):
                child = np.concatenate((prompt, answer, source.text(120)))
                waiting.append((child, depth + 1, offset_s + source.pause()))
        return calls

    return session


_SESSIONS: dict[str, Callable[[_Source], _MakeSession]] = {
    "system": _system,
    "few_shot": _few_shot,
    "multi_turn": _multi_turn,
    "agents": _agents,
}
KINDS = (*_SESSIONS, "mix")


def make_trace(kind: str, seed: int, workload: Workload) -> list[TraceRequest]:
    """Requests in order of arrival.

    Raises:
        ValueError: nothing of such lengths fits into `max_len`.
    """
    makers = {
        name: make(_Source((seed, number), workload))
        for number, (name, make) in enumerate(_SESSIONS.items())
        if kind in (name, "mix")
    }
    choose = np.random.default_rng((seed, len(_SESSIONS)))
    sessions: list[tuple[str, list[_Call]]] = []
    num_missing, num_failures = workload.num_requests, 0
    while num_missing > 0:
        name = str(choose.choice(list(makers)))
        calls = makers[name]()[:num_missing]
        num_failures = 0 if calls else num_failures + 1
        if num_failures > 100:
            raise ValueError(f"max_len: {workload.max_len}; allowed: room for one {name} request")
        num_missing -= len(calls)
        sessions.append((name, calls))
    return _arrive(sessions, choose, workload)


def _arrive(
    sessions: Iterable[tuple[str, list[_Call]]], choose: np.random.Generator, workload: Workload
) -> list[TraceRequest]:
    duration_s = workload.num_requests / workload.rate
    weights = 1.0 / np.arange(1, NUM_TENANTS + 1)
    requests = []
    for number, (kind, calls) in enumerate(sessions):
        last_s = max((call.offset_s for call in calls), default=0.0)
        begin_s = float(choose.uniform(0.0, max(0.0, duration_s - last_s)))
        tenant = f"tenant-{choose.choice(NUM_TENANTS, p=weights / weights.sum())}"
        priority = int(choose.random() >= URGENT_SHARE)
        requests += [
            TraceRequest(
                begin_s + call.offset_s, call.prompt, call.answer, kind, number, tenant, priority
            )
            for call in calls
        ]
    return sorted(requests, key=lambda request: request.arrival_s)


def write_trace(path: Path, trace: Iterable[TraceRequest]) -> None:
    """Writes the JSON lines that the peers' `--trace` reads."""
    with path.open("w") as file:
        for request in trace:
            line = {
                "arrival_s": request.arrival_s,
                "prompt_token_ids": request.prompt.tolist(),
                "max_tokens": len(request.answer),
            }
            file.write(json.dumps(line) + "\n")


def main() -> None:
    usual = Workload()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("path", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="mix")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=usual.num_requests)
    parser.add_argument("--rate", type=float, default=usual.rate, help="requests a second")
    parser.add_argument("--max-len", type=int, default=usual.max_len)
    parser.add_argument("--scale", type=float, default=usual.scale, help="of all lengths")
    options = parser.parse_args()
    workload = Workload(
        options.requests, options.rate, max_len=options.max_len, scale=options.scale
    )
    write_trace(options.path, make_trace(options.kind, options.seed, workload))


if __name__ == "__main__":
    main()
