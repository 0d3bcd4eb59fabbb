"""No way of running changes a bit, in any format of weights and any encoding of KV: with
the kernels of pegboard-cpu, in float32, on checkpoints of other tools.

Tokens and logprobs are compared for equality, with each sequence by itself.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pegboard import Config
from pegboard.compose import prepare
from pegboard.testing.invariance import (
    BATCHES,
    CHUNKS,
    Case,
    Guesses,
    Traces,
    differences,
    pairwise,
    run_case,
    various_params,
    various_prompts,
)

FLOAT, INT8 = {"activations": "float"}, {"activations": "int8"}
CHECKPOINTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "uint4": ("gptq-4b-g32-asym-v2", "gptq", FLOAT),
    "uint4, mapped": ("gptq-4b-g32-desc-act", "gptq", FLOAT),
    "uint4 of 3 bits": ("ct-w3a16-g32", "gptq", FLOAT),
    "uint4:grouped": ("awq-4b-g32", "awq", INT8),
    "int8": ("gptq-8b-g32-sym", "gptq", FLOAT),
    "int8:grouped": ("gptq-8b-g32-sym", "gptq", INT8),
    "int8:dynamic": ("ct-w8a8-int8-dynamic", "smoothquant", {}),
    "int8:static": ("ct-w8a8-int8-static", "smoothquant", {}),
    "float8": ("ct-fp8-dynamic", "fp8", FLOAT),
    "float8:dynamic": ("ct-fp8-dynamic", "fp8", {}),
    "float8:dynamic in blocks": ("ct-fp8-block-ragged", "fp8", {}),
    "float8:static": ("ct-fp8-static-kv", "fp8", {}),
    "int8:dynamic, uint4 and float8:dynamic": ("ct-mixed", "mixed", {}),
    "uint4 and int8 of a file": ("gguf-q4_k-mixed-tied", "gguf", {"mode": "packed", **FLOAT}),
    "uint4:grouped and int8:grouped of a file": (
        "gguf-q4_k-mixed-tied",
        "gguf",
        {"mode": "packed", **INT8},
    ),
}
"""A description of weights, formats among its words, to a checkpoint, the quantizer that reads it, and its
options."""

FORMAT = re.compile(r"(?:uint4|int8|float8)(?::\w+)?")
ENCODINGS = ("none", "fp8_e4m3", "int8")
MAX_MODEL_LEN = 64
BLOCK_SIZE = 4
NUM_BLOCKS = 2 * MAX_MODEL_LEN // BLOCK_SIZE + 2
"""Of a pool that holds two longest sequences, so that others are preempted."""

WAYS: dict[str, dict[str, Any]] = {
    "plenty": {},
    "tight budget": {"budget": 40},
    "small pool": {"pool": NUM_BLOCKS},
    "disorder in a small pool": {"pool": NUM_BLOCKS, "disorder": 2},
    "interrupted": {"interruptions": 1},
}
GUESSES: dict[str, Guesses | None] = {
    "none": None,
    "mixed chains": Guesses(0.6),
    "mixed trees": Guesses(0.6, width=2),
}
AXES: dict[str, tuple[Any, ...]] = {
    "checkpoint": tuple(CHECKPOINTS),
    "encoding": ENCODINGS,
    "batch": BATCHES,
    "chunk": CHUNKS,
    "way": tuple(WAYS),
    "guesses": tuple(GUESSES),
    "cached": (False, True),
    "threads": (1, 2, 3),
    "depth": (1, 2),
}
PAIRS = list(pairwise(AXES))
QUICK = [
    {
        "checkpoint": name,
        "encoding": ENCODINGS[index % len(ENCODINGS)],
        "batch": (17, 5, 33)[index % 3],
        "chunk": (7, None)[index % 2],
        "way": ("small pool", "disorder in a small pool")[index % 2],
        "guesses": ("mixed trees", "none")[index // 2 % 2],
        "cached": True,
        "threads": 1 + index % 2,
        "depth": 1 + index // 2 % 2,
    }
    for index, name in enumerate(CHECKPOINTS)
]
"""Each once: many at a time, preempted, with prefixes from a cache."""
PROMPTS = various_prompts((1, 2, 17, 50, 33, 3, 41, 8, 25), range(3, 256))
PARAMS = various_params(len(PROMPTS))
"""Of 33 sequences."""


def config(folder: Path, name: str, encoding: str, threads: int = 1) -> dict[str, Any]:
    checkpoint, quantizer, options = CHECKPOINTS[name]
    found = folder / checkpoint
    file = found / "model.gguf"
    return {
        "model": str(file if file.is_file() else found),
        "quantizer": {"name": quantizer, "options": options},
        "max_model_len": MAX_MODEL_LEN,
        "dtype": "float32",
        "kernels": "cpu",
        "attention": "cpu",
        "numerics": "invariant",
        "threads": threads,
        "kv_cache": {"block_size": BLOCK_SIZE, "encoding": encoding},
        "prefix_cache": "none",
    }


@cache
def alone(folder: Path, name: str, encoding: str) -> Traces:
    """Each sequence by itself, a prompt in one piece."""
    return run_case(config(folder, name, encoding), Case(batch=1), PROMPTS, PARAMS)


def check(folder: Path, row: dict[str, Any]) -> None:
    base = config(folder, row["checkpoint"], row["encoding"], row["threads"])
    way = dict(WAYS[row["way"]])
    if "pool" in way:
        ledger = prepare(Config.from_values(base)).ledger
        way["pool"] *= ledger.block_bytes[0]
    case = Case(
        row["batch"],
        row["chunk"],
        guesses=GUESSES[row["guesses"]],
        cached=row["cached"],
        settings={"executor": {"depth": row["depth"]}},
        **way,
    )
    expected = alone(folder, row["checkpoint"], row["encoding"])
    got = run_case(base, case, PROMPTS, PARAMS, expected)
    assert differences(expected, got) == [], str(row)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_each_checkpoint_has_the_formats_that_it_is_here_for(quant_data: Path, name: str) -> None:
    composition = prepare(Config.from_values(config(quant_data, name, "none"))).composition
    formats = {one.format for one in composition.target.kernels if one.operation == "linear"}
    assert set(FORMAT.findall(name)) == formats - {"float"}
    assert composition.numerics == "invariant"


def test_every_format_is_here() -> None:
    named = {found for name in CHECKPOINTS for found in FORMAT.findall(name)}
    assert named == {
        *("uint4", "int8", "float8", "uint4:grouped", "int8:grouped"),
        *("int8:dynamic", "int8:static", "float8:dynamic", "float8:static"),
    }


@pytest.mark.parametrize("row", QUICK, ids=lambda row: row["checkpoint"])
def test_many_at_once_preempted_with_cached_prefixes(quant_data: Path, row: dict[str, Any]) -> None:
    check(quant_data, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", PAIRS, ids=str)
def test_every_pair_of_ways_to_run(quant_data: Path, row: dict[str, Any]) -> None:
    check(quant_data, row)
