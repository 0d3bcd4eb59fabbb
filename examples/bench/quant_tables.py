"""The tables of `bench_quant.py`: ratios beside what is aimed at, speeds, memory and start."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench_start import beyond_import
from report import markdown
from rounds import peaks, rates, ratios, sizes

WEIGHTS = {"4 bit": "model-q4_1.gguf", "8 bit": "model-q8_0.gguf"}
"""A reader's name for the weights, to the file that `prepare_model.py` writes."""

FLOAT = "pegboard float32"
NAMES = {"xllamacpp": "llama.cpp", "openvino": "OpenVINO", FLOAT: "our float32"}
ABOUT = {
    "xllamacpp": "llama.cpp rounds inputs alike and keeps KV in float16.",
    "openvino": (
        "OpenVINO runs with its defaults, which round inputs and keep KV in 8 bits, and float32 precision."
    ),
}
"""Remarks on peers."""


@dataclass(frozen=True)
class Aim:
    """Least ratios of speed that are aimed at: of decoding by batch size, of prefill."""

    decode: dict[int, float] = field(default_factory=dict)
    prefill: float | None = None


AIMS = {
    ("4 bit", "xllamacpp"): Aim({1: 1.35, 8: 3.5, 32: 4.0}, 3.0),
    ("8 bit", "xllamacpp"): Aim({1: 1.2, 8: 3.0, 32: 2.5}, 1.5),
    ("4 bit", "openvino"): Aim({1: 2.8, 8: 3.5, 32: 1.6}),
    ("8 bit", "openvino"): Aim({1: 2.3, 8: 3.0, 32: 1.8}),
    ("4 bit", FLOAT): Aim({1: 3.5}),
    ("8 bit", FLOAT): Aim({1: 2.5}),
}
MOST_BYTES, MOST_PEAK, MOST_BEYOND_IMPORT_S = 130e6, 1.15, 2.0


def short(result: dict[str, Any]) -> str:
    """Ratios, memory and start."""
    return "\n\n".join((ratio_table(result), memory_table(result), _caption(result)))


def full(result: dict[str, Any]) -> str:
    """Everything."""
    tables = (speed_table(result), ratio_table(result), memory_table(result), rest_table(result))
    return "\n\n".join((*tables, _caption(result)))


def speed_table(result: dict[str, Any]) -> str:
    """Tokens a second of all, and the limit of reading our packed weights once a step."""
    others = [name for name in NAMES if name == FLOAT or f"{name} 4 bit" in result["peers"]]
    head = ["weights", "batch x prompt x generated", "pegboard, tokens/s", "decode"]
    head += ["decode's limit", "prefill"]
    head += [f"{NAMES[name]}, {part}" for name in others for part in ("decode", "prefill")]
    rows = []
    for bits in WEIGHTS:
        for case, runs in result["cases"].items():
            speed = rates(case, runs[f"pegboard {bits}"])
            limit = _decode_limit(result, bits, case)
            row = [bits, case, f"{speed['total']:.0f}", f"{speed['decode']:.0f}"]
            row += [f"{limit:.0f} ({speed['decode'] / limit:.0%})", f"{speed['prefill']:.0f}"]
            for name in others:
                theirs = rates(case, runs[_contestant(name, bits)])
                row += [f"{theirs[part]:.0f}" for part in ("decode", "prefill")]
            rows.append(row)
    return markdown(head, rows)


def ratio_table(result: dict[str, Any]) -> str:
    """Our speed to others', each beside what is aimed at; bold where that is not reached."""
    cases = list(result["cases"])
    head = ["weights", "to", *(f"decode, {case}" for case in cases)]
    head += [f"prefill, {case}" for case in cases]
    rows = []
    for (bits, name), aim in AIMS.items():
        if _contestant(name, bits) not in result["peers"]:
            continue
        row = [bits, NAMES[name]]
        row += [_ratio(result, case, bits, name, "decode", aim) for case in cases]
        row += [_ratio(result, case, bits, name, "prefill", aim) for case in cases]
        rows.append(row)
    return markdown(head, rows)


def memory_table(result: dict[str, Any]) -> str:
    """An engine's memory beyond torch, the part that is neither weights nor KV, and the start."""
    head = ["weights", "work", "beyond `import torch`, MB", "packed weights", "touched KV"]
    head += ["the rest", "peak of the load to its end", "ready beyond `import torch`, s"]
    rows = []
    for bits, memory in result["memory"].items():
        at_most, in_the_end = (
            memory[k] - memory["import_torch"] for k in ("peak_until_ready", "ready")
        )
        peak = _most(at_most / in_the_end, MOST_PEAK, 2)
        for work, running in memory["running"].items():
            parts = (running["beyond_torch"], memory["weights"], running["touched_kv"])
            rest = _most(memory["rest"][work] / 1e6, MOST_BYTES / 1e6, 0)
            rows.append([bits, work, *(f"{size / 1e6:.0f}" for size in parts), rest, peak, ""])
    if result["starts"]:
        beyond = statistics.median(beyond_import(result["starts"]))
        rows[0][-1] = _most(beyond, MOST_BEYOND_IMPORT_S, 2)
    return markdown(head, rows)


def rest_table(result: dict[str, Any]) -> str:
    """The sources of memory that is neither torch's, nor weights, nor KV."""
    stages = list(next(iter(result["memory"].values()))["added"])
    rows = [
        [bits, *(f"{memory['added'][stage] / 1e6:+.1f}" for stage in stages)]
        for bits, memory in result["memory"].items()
    ]
    return markdown(["the rest, MB, by what adds it", *stages], rows)


def _contestant(name: str, bits: str) -> str:
    return name if name == FLOAT else f"{name} {bits}"


def _decode_limit(result: dict[str, Any], bits: str, case: str) -> float:
    """Tokens a second, were a step no more than one reading of the packed weights."""
    bandwidth: float = result["machine"][f"read_gb_s_{result['threads']}t"] * 1e9
    num_bytes: int = result["memory"][bits]["weights"]
    return sizes(case)[0] * bandwidth / num_bytes


def _ratio(result: dict[str, Any], case: str, bits: str, name: str, part: str, aim: Aim) -> str:
    runs = result["cases"][case]
    values = ratios(runs[f"pegboard {bits}"], runs[_contestant(name, bits)], part)
    value, spread = statistics.median(values), f"({min(values):.2f} to {max(values):.2f})"
    least = aim.decode.get(sizes(case)[0]) if part == "decode" else aim.prefill
    if least is None:
        return f"{value:.2f} {spread}"
    if value >= least:
        return f"{value:.2f} {spread} ≥ {least:g}"
    return f"**{value:.2f} {spread} < {least:g}**"


def _most(value: float, most: float, digits: int) -> str:
    """A number beside the most that is aimed at; bold where it is more."""
    if value <= most:
        return f"{value:.{digits}f} ≤ {most:g}"
    return f"**{value:.{digits}f} > {most:g}**"


def _caption(result: dict[str, Any]) -> str:
    return " ".join(_sentences(result))


def _sentences(result: dict[str, Any]) -> Iterator[str]:
    machine, threads = result["machine"], result["threads"]
    versions = {about["peer"]: about["version"] for about in result["peers"].values()}
    yield (
        f"SmolLM2-135M, greedy, threads: {threads}, {machine['cpu']}, {result['clock']};"
        f" {', '.join(f'{name} {version}' for name, version in versions.items())}."
    )
    yield (
        "4 bit is the bundled file (Q4_1, its embedding and head Q8_0), 8 bit the same weights in Q8_0;"
        " float32 the first's, dequantized. All get the same token ids as prompts."
        f" Pegboard ({result['instruction_set']}) rounds inputs of packed weights to int8 in groups of"
        " 32, and keeps KV in float32."
    )
    yield from (about for name, about in ABOUT.items() if f"{name} 4 bit" in result["peers"])
    yield (
        f"Ratios are medians of {result['rounds']} rounds, with the smallest and the largest; above 1,"
        " Pegboard is faster. Beside them stands what is aimed at, bold where it is not reached."
    )
    limit = f"{machine[f'read_gb_s_{threads}t']:.1f} GB/s"
    yield (
        "The rest of the memory is what is neither torch's, nor packed weights, nor pages of the KV pool"
        " that are in memory, which the system hands out in 2 MB where it can; the C library gives back on"
        " request (`malloc_trim`) what it keeps for later."
    )
    yield (
        f"The limit of decoding is one reading of the packed weights a step, at {limit} as measured in the"
        f" same run. Load of the machine before it: {result['load_before']:.1f}."
    )
    yield f"Peak memory, MB: {peaks(result['cases'], list(result['peers']))}."
    yield "Data: `examples/bench/results/quant.json`."
