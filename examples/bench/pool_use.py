"""How a KV pool is used while requests of mixed lengths run, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from simulation import BLOCK_BYTES, Clock, ScriptedExecutor, StepCost, measured_cost
from traces import Int32, TraceRequest

from pegboard import Engine, SamplingParams
from pegboard.interfaces.observer import Event, Observer, SequenceFinished, StepDone
from pegboard.step import StepBatch, StepResult

HERE = Path(__file__).parent
BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
POOL_SEQUENCES = 32
"""Sequences of MAX_MODEL_LEN tokens that the pool holds."""
NUM_POINTS = 200
"""Of a line in the plot."""
CHAT_LENGTHS = (161.0, 338.0)
"""Mean tokens of prompts and answers, before they are cut; like those of ShareGPT's chats."""
SPREAD = 1.0
"""Standard deviation of the logarithm of a length."""


def chats(
    num_requests: int, means: tuple[float, float], max_len: int, seed: int
) -> list[TraceRequest]:
    """Requests without common beginnings, all there from the start.

    Lengths are log-normal around the means of prompts and answers; each is cut to half of `max_len`,
    which lowers the means.
    """
    draw = np.random.default_rng(seed)

    def text(mean: float) -> Int32:
        size = round(draw.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD))
        ids: Int32 = draw.integers(100, 49152, min(max(size, 2), max_len // 2), dtype=np.int32)
        return ids

    return [
        TraceRequest(0.0, text(means[0]), text(means[1]), "chats", number, "", 1)
        for number in range(num_requests)
    ]


def mean_lengths(trace: Sequence[TraceRequest]) -> list[float]:
    """Tokens of a prompt and of an answer, as they are."""
    pairs = [(len(request.prompt), len(request.answer)) for request in trace]
    return [round(sum(column) / len(pairs), 1) for column in zip(*pairs, strict=True)]


class CountingExecutor(ScriptedExecutor):
    """Keeps how many tokens of each request have their KV in place, by the request's number."""

    def __init__(self, clock: Clock, cost: StepCost, answers: Sequence[Sequence[int]]) -> None:
        super().__init__(clock, cost, answers)
        self.in_place: dict[int, int] = {}
        self._numbers: dict[int, int] = {}

    def execute(self, batch: StepBatch) -> Future[StepResult]:
        for release in batch.released:
            self.in_place.pop(self._numbers.pop(release.row), None)
        for admission in batch.admitted:
            self._numbers[admission.row] = admission.seed
        ends = (batch.num_computed + batch.num_tokens).tolist()
        for row, end in zip(batch.rows.tolist(), ends, strict=True):
            self.in_place[self._numbers[row]] = end
        return super().execute(batch)


class Usage(Observer):
    """Notes, after each step that leaves requests waiting, where the pool's slots are.

    Attributes:
        samples: time, duration, slots held or reserved, slots that hold a token, sequences that run.
        num_preempted: sequences, so far.
    """

    def __init__(self, executor: CountingExecutor) -> None:
        self._executor = executor
        self.samples: list[tuple[float, float, int, int, int]] = []
        self.num_preempted = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, SequenceFinished):
            self._executor.in_place.pop(int(event.request_id), None)
        if isinstance(event, StepDone):
            self.num_preempted += event.num_preempted
            if event.num_waiting:
                taken = BLOCK_SIZE * sum(ledger.held + ledger.reserved for ledger in event.kv)
                filled = sum(self._executor.in_place.values())
                self.samples.append(
                    (event.time, event.duration_s, taken, filled, event.num_running)
                )

    def close(self) -> None:
        pass


def memory(trace: Sequence[TraceRequest], allocator: str, model: Path) -> dict[str, Any]:
    """How a pool is used while the trace's requests, all there from the start, run."""
    num_blocks = POOL_SEQUENCES * MAX_MODEL_LEN // BLOCK_SIZE
    config = {
        "model": str(model),
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache": {
            "allocator": allocator,
            "block_size": BLOCK_SIZE,
            "memory": (1 + num_blocks) * BLOCK_BYTES,
        },
        "attention": "torch",  # whose blocks have BLOCK_BYTES
        "prefix_cache": "none",
        "scheduler": {"max_num_seqs": 1024},
    }
    clock = Clock()
    cost = measured_cost(HERE / "results" / "engine.json")
    executor = CountingExecutor(clock, cost, [request.answer.tolist() for request in trace])
    usage = Usage(executor)
    with clock.everywhere(), Engine(config, executor=executor, observer=[usage]) as engine:
        assert engine.prepared.composition.num_blocks == (1 + num_blocks,)
        begin = clock.now
        for number, request in enumerate(trace):
            engine.submit(
                request.prompt.tolist(),
                SamplingParams(
                    temperature=0.0, max_tokens=len(request.answer), seed=number, ignore_eos=True
                ),
                request_id=str(number),
            )
        while engine.has_work():
            engine.step()
    times, durations, taken, filled, running = np.array(usage.samples).T
    return {
        "blocks": num_blocks,
        "filled_of_taken": round(float(durations @ filled / (durations @ taken)), 4),
        "filled_of_pool": round(
            float(durations @ filled / durations.sum()) / (num_blocks * BLOCK_SIZE), 4
        ),
        "running_mean": round(float(durations @ running / durations.sum()), 1),
        "running_most": int(running.max()),
        "preempted": usage.num_preempted,
        "timeline": thinned(times - begin, filled / (num_blocks * BLOCK_SIZE), running),
    }


def thinned(*columns: Any) -> list[list[float]]:
    """So many points of a timeline as a plot can show."""
    rows = np.array(columns).T
    chosen = np.unique(np.linspace(0, len(rows) - 1, NUM_POINTS).astype(int))
    return [[round(float(value), 3) for value in row] for row in rows[chosen]]
