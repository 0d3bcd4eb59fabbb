"""A benchmark from end to end: it asks the server, runs the load, and reports the numbers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from pegboard.bench.arrivals import arrival_times
from pegboard.bench.endpoint import Endpoint, find_endpoint, find_extensions, request_body
from pegboard.bench.exchange import Record, exchange
from pegboard.bench.load import closed_loop, open_loop, until
from pegboard.bench.options import Lengths
from pegboard.bench.prompts import Prompt, dataset_prompts, random_prompts
from pegboard.bench.report import Measured, counts_tokens, num_output_tokens, send_delay
from pegboard.bench.server_metrics import MetricsWatch
from pegboard.errors import ConfigError
from pegboard.progress import progress_bar

CONNECT_S = 30.0
"""Seconds that a server may take to accept a connection."""

LATE_S = 0.05
"""A client that sends later than this is worth a word."""


@dataclass(frozen=True)
class Plan:
    """A measurement to make.

    Attributes:
        model: the served name; None: the server's first.
        num_prompts: requests in all.
        request_rate: requests a second; infinity: all at once, or as places become free.
        burstiness: shape of the gaps' gamma distribution; see `arrivals`.
        max_concurrency: most requests under way; None: no limit.
        input_lens, output_lens: tokens, of random prompts and of answers.
        dataset: file of prompts instead of random ones.
        timeout_s: for one whole answer.
        goodput: latency to the most milliseconds that a good request has.
        percentiles: to give of each latency.
    """

    model: str | None
    num_prompts: int
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    input_lens: Lengths
    output_lens: Lengths
    dataset: Path | None
    seed: int
    timeout_s: float
    goodput: dict[str, float]
    percentiles: tuple[float, ...]


async def measure(url: str, api_key: str | None, plan: Plan) -> Measured:
    """Drives the server, until all is answered or Ctrl-C.

    Raises:
        ConfigError: the server cannot be reached, or the plan does not fit it.
    """
    async with _client(url, api_key) as http:
        endpoint = await find_endpoint(http, plan.model)
        prompts = _prompts(plan, endpoint)
        extensions = await find_extensions(http, endpoint, prompts[0])
        rng = np.random.default_rng([plan.seed, 1])
        arrivals = arrival_times(plan.num_prompts, plan.request_rate, plan.burstiness, rng)
        records = [
            Record(request_body(endpoint.model, prompt, extensions), prompt.output_len, scheduled)
            for prompt, scheduled in zip(prompts, arrivals, strict=True)
        ]
        watch = MetricsWatch(http)
        await watch.look_afresh()
        load = _Load(http, plan, records)
        async with _watching(watch):
            await load.run()
        await watch.look_afresh()
    return Measured(
        settings=_settings(url, plan, endpoint),
        records=records,
        duration_s=load.duration_s,
        watched=watch.result(load.start, load.duration_s),
        goodput=plan.goodput,
        percentiles=plan.percentiles,
        interrupted=load.interrupted,
        notes=list(_notes(records, plan, endpoint, extensions)),
    )


class _Load:
    """The load, on a clock that starts with it.

    Attributes:
        start: when it began, by `time.perf_counter`.
        duration_s: how long it took.
    """

    def __init__(self, http: httpx.AsyncClient, plan: Plan, records: Sequence[Record]) -> None:
        self._http, self._plan, self._records = http, plan, records
        self._num_open = self._num_failed = 0
        self.start = self.duration_s = 0.0
        self.interrupted = False

    def _clock(self) -> float:
        return time.perf_counter() - self.start

    async def run(self) -> None:
        """Returns when all requests have ended, or at Ctrl-C."""
        plan = self._plan
        with interruption() as stop, progress_bar() as bar:
            self._bar, self._task = bar, bar.add_task("Requests", total=plan.num_prompts)
            self.start = time.perf_counter()
            if math.isinf(plan.request_rate) and plan.max_concurrency is not None:
                load = closed_loop(self._records, self._send, self._clock, plan.max_concurrency)
            else:
                load = open_loop(self._records, self._send, self._clock, plan.max_concurrency)
            self.interrupted = await until(stop, load)
            self.duration_s = self._clock()

    async def _send(self, record: Record) -> None:
        self._num_open += 1
        try:
            await exchange(self._http, record, self._clock, self._plan.timeout_s)
        finally:
            self._num_open -= 1
        self._num_failed += record.state == "failed"
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        text = f"Requests ({self._num_open} open{failed})"
        self._bar.update(self._task, advance=1, description=text)


@contextlib.contextmanager
def interruption() -> Iterator[asyncio.Event]:
    """An event that Ctrl-C and SIGTERM set, instead of ending the program."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def _watching(watch: MetricsWatch) -> AsyncIterator[None]:
    task = asyncio.create_task(watch.watch())
    try:
        yield
    finally:
        task.cancel()


def _client(url: str, api_key: str | None) -> httpx.AsyncClient:
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if api_key is not None:
        if not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("--api-key", "holds other characters", allowed="printable ASCII")
        headers["authorization"] = f"Bearer {api_key}"
    # Neither a limit on connections nor a proxy of the environment's may become part of the latencies;
    # a whole answer has its own time limit.
    try:
        return httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )
    except httpx.InvalidURL as error:
        raise ConfigError("--url", f"{url}: {error}", allowed="http://HOST:PORT") from None


def _prompts(plan: Plan, endpoint: Endpoint) -> list[Prompt]:
    """The prompts of the load. The seed decides them, not the rate."""
    rng = np.random.default_rng([plan.seed, 0])
    if plan.dataset is not None:
        return dataset_prompts(plan.dataset, plan.num_prompts, plan.output_lens, rng)
    most = plan.input_lens.high + plan.output_lens.high
    if endpoint.max_model_len is not None and most > endpoint.max_model_len:
        raise ConfigError(
            "--input-len, --output-len",
            f"up to {plan.input_lens.high} + {plan.output_lens.high} tokens",
            allowed=f"{endpoint.max_model_len} together, the model's max_model_len",
        )
    input_lens = plan.input_lens.sample(plan.num_prompts, rng)
    output_lens = plan.output_lens.sample(plan.num_prompts, rng)
    return random_prompts(endpoint.token_ids, input_lens, output_lens, rng)


def _settings(url: str, plan: Plan, endpoint: Endpoint) -> dict[str, Any]:
    """The settings of the measurement, with which the result begins."""
    rate = plan.request_rate
    dataset = None if plan.dataset is None else str(plan.dataset)
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "pegboard_version": version("pegboard"),
        "backend": "openai",
        "base_url": url,
        "model_id": endpoint.model,
        "num_prompts": plan.num_prompts,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": "inf" if math.isinf(plan.burstiness) else plan.burstiness,
        "max_concurrency": plan.max_concurrency,
        "input_len": None if dataset else str(plan.input_lens),
        "output_len": str(plan.output_lens),
        "dataset": dataset,
        "seed": plan.seed,
    }


def _notes(
    records: Sequence[Record], plan: Plan, endpoint: Endpoint, extensions: dict[str, Any]
) -> Iterator[str]:
    """Notes for reading the numbers."""
    completed = [record for record in records if record.state == "completed"]
    if plan.dataset is None and not endpoint.token_ids:
        yield "The server has no /tokenize: prompts are texts of as many words as tokens were asked."
    if "ignore_eos" not in extensions:
        yield "The server does not take ignore_eos: answers end where the model ends them."
    if any(record.num_output_tokens is None for record in completed):
        yield "The server does not count tokens: input tokens are missing, chunks count as tokens."
    odd = sum(num_output_tokens(record) != record.num_asked for record in completed)
    if odd:
        yield f"{odd} of {len(completed)} answers have not the length that was asked for."
    if not all(map(counts_tokens, completed)):
        yield "The server does not say how many tokens a chunk has: ITL is between chunks."
    late = send_delay(records)
    if plan.max_concurrency is None and late > LATE_S:
        yield f"This client was up to {late * 1000:.0f} ms late to send, which latencies include."
