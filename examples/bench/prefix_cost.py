"""The prefix cache's own cost: beside a step of a long prompt, and by the blocks it holds."""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from host_parts import make_parts
from plots import Panel, line_panel
from report import markdown
from traces import FIRST_ID

from pegboard import Engine, SamplingParams
from pegboard.engine.prefix.prefixes import Prefixes
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.prefix_cache import Prefix, PrefixCache

BLOCK_SIZE = 16
VOCAB_SIZE = 49152
CALLS = ("match", "begin", "use", "publish")
"""The engine's calls of the cache, its own checks of the answers included."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of the long prompt, cached blocks, blocks of one text, and how often all is timed."""

    prompt: int = 8128
    blocks: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    text_blocks: int = 64
    repeats: int = 200


FULL = Sizes()
TINY = Sizes(prompt=200, blocks=(200, 400), text_blocks=8, repeats=5)


def measure(model: Path, sizes: Sizes) -> dict[str, Any]:
    """The cost within steps of a real model, and that of the cache alone, by its size."""
    with Engine(_config(model, sizes)) as engine:
        kv_bytes = sum(_block_bytes(group) for group in engine.prepared.composition.groups)
        in_steps = _in_steps(engine, sizes)
    pools = {}
    for num_blocks in sizes.blocks:
        # Each in a process of its own: none finds what another one has left in memory.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            pools[str(num_blocks)] = pool.submit(cost_of, num_blocks, sizes).result()
        print(num_blocks, "blocks", pools[str(num_blocks)], file=sys.stderr)
    return {
        "sizes": asdict(sizes),
        "model": model.name,
        "kv_bytes_a_block": kv_bytes,
        "steps": in_steps,
        "pools": pools,
    }


def cost_of(num_blocks: int, sizes: Sizes) -> dict[str, float]:
    """Microseconds of each call, medians, to a cache of so many blocks; and its bytes a block."""
    make = make_parts("on", BLOCK_SIZE)
    cache, _ = make(num_blocks)
    texts = [_text(number, sizes) for number in range(num_blocks // sizes.text_blocks)]
    blocks = list(range(num_blocks, 0, -1))
    tracemalloc.start()  # texts and block numbers are there: a cache that copies tokens pays for them
    for text in texts:
        cache.publish(text, [[blocks.pop() for _ in range(sizes.text_blocks)]])
    num_bytes = tracemalloc.get_traced_memory()[0] / (len(texts) * sizes.text_blocks)
    tracemalloc.stop()
    return {"bytes_a_block": round(num_bytes, 1), **_time_calls(cache, texts, sizes)}


def table(result: dict[str, Any]) -> str:
    """The Markdown tables of a result."""
    sizes, kv_bytes = result["sizes"], result["kv_bytes_a_block"]
    steps = [
        [name, f"{1e3 * spent['steps']:.0f}"]
        + [f"{1e3 * spent[call]:.2f}" for call in CALLS]
        + [f"{sum(spent[call] for call in CALLS) / spent['steps']:.2%}"]
        for name, spent in result["steps"].items()
    ]
    head = [f"prompt of {sizes['prompt']} tokens", "its steps, ms"]
    head += [*(f"{call}, ms" for call in CALLS), "share of the steps"]
    pools = [
        [f"{int(num_blocks):,}"]
        + [f"{pool[key]:.1f}" for key in ("hit", "miss", "publish", "evict")]
        + [f"{pool['bytes_a_block']:.0f}", f"{pool['bytes_a_block'] / kv_bytes:.3%}"]
        for num_blocks, pool in result["pools"].items()
    ]
    below = ["cached blocks", f"match of {sizes['text_blocks']} blocks, µs", "miss, µs"]
    below += [f"publish of {sizes['text_blocks']}, µs", f"evict of {sizes['text_blocks']}, µs"]
    below += ["bytes a block", "of the KV it names"]
    caption = (
        f"{result['model']}, {kv_bytes:,} bytes of KV a block; prompts once, calls as medians of"
        f" {sizes['repeats']};"
        f" {result['cpu']}, pegboard {result['pegboard']}; load of the machine before it:"
        f" {result['load_before']}. Data: `results/prefix_cost.json`."
    )
    return "\n\n".join((markdown(head, steps), markdown(below, pools), caption))


def panels(result: dict[str, Any]) -> list[Panel]:
    """Time of each call, and memory, by the blocks that are cached."""
    names = {"hit": "match, a hit", "miss": "match, a miss", "publish": "publish", "evict": "evict"}
    pools = [(float(num_blocks), pool) for num_blocks, pool in result["pools"].items()]
    lines = {name: [(size, pool[key]) for size, pool in pools] for key, name in names.items()}
    num_blocks = result["sizes"]["text_blocks"]
    labels = "cached blocks", "microseconds"
    title = f"a call about {num_blocks} blocks"
    return [line_panel(title, labels, lines, logarithmic=(True, True))]


def _config(model: Path, sizes: Sizes) -> dict[str, Any]:
    return {
        "model": str(model),
        "prefix_cache": "on",
        "max_model_len": sizes.prompt + 16,
        "scheduler": {"max_num_seqs": 2},
    }


def _in_steps(engine: Engine, sizes: Sizes) -> dict[str, dict[str, float]]:
    """Seconds of the steps of one prompt, and of the calls within, before and after it is known."""
    vocab_size = engine.prepared.composition.target.shape.vocab_size
    random = np.random.default_rng(0)
    prompt = random.integers(FIRST_ID, vocab_size, sizes.prompt).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    watch = _Stopwatch()
    result = {}
    with ExitStack() as stack:
        for call in CALLS:
            timed = watch.around(getattr(Prefixes, call), call)
            stack.enter_context(mock.patch.object(Prefixes, call, timed))
        for name in ("new", "known"):
            watch.spent.clear()
            engine.submit(prompt, params)
            begin = time.perf_counter()
            while engine.has_work():
                engine.step()
            result[name] = {"steps": time.perf_counter() - begin}
            result[name] |= {call: watch.spent[call] for call in CALLS}
    return result


class _Stopwatch:
    """Seconds by call; of calls within calls, the outermost counts."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._is_running = False

    def around(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The call, timed."""

        def timed(*arguments: Any) -> Any:
            if self._is_running:
                return call(*arguments)
            self._is_running = True
            begin = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.spent[name] += time.perf_counter() - begin
                self._is_running = False

        return timed


def _time_calls(cache: PrefixCache, texts: list[Prefix], sizes: Sizes) -> dict[str, float]:
    times: defaultdict[str, list[float]] = defaultdict(list)
    choose = np.random.default_rng(1)

    def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter()
        answer = call(*arguments)
        times[name].append(1e6 * (time.perf_counter() - begin))
        return answer

    num_tokens = sizes.text_blocks * BLOCK_SIZE
    for number in range(sizes.repeats):
        known = texts[choose.integers(len(texts))]
        new = _text(len(texts) + number, sizes)
        timed("hit", cache.match, known, num_tokens)
        timed("miss", cache.match, new, num_tokens)
        blocks = timed("evict", cache.evict, 0, sizes.text_blocks, lambda block: True)
        timed("publish", cache.publish, new, [list(blocks)])
    return {name: round(statistics.median(laps), 2) for name, laps in times.items()}


def _text(number: int, sizes: Sizes) -> Prefix:
    num_tokens = sizes.text_blocks * BLOCK_SIZE
    tokens = np.random.default_rng(number).integers(0, VOCAB_SIZE, num_tokens, dtype=np.int32)
    tokens.setflags(write=False)
    return Prefix(tokens, "")


def _block_bytes(group: KVGroup) -> int:
    """Of keys and values as they are, without an encoding."""
    element = {"float64": 8, "float32": 4}.get(group.dtype, 2)
    return 2 * len(group.layers) * group.num_kv_heads * group.head_dim * group.block_size * element
