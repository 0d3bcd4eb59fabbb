"""The README's five rows and its plot, made of the results that the benches wrote; nothing is measured.

python examples/bench/speed_summary.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plots import Panel, line_panel, write_plot
from report import markdown, write_table
from rounds import num_tokens, rates, ratio, sizes

from pegboard.bench.charts import Point

HERE = Path(__file__).parent
README = HERE.parent.parent / "README.md"
RESULTS = HERE / "results"
PLOT = RESULTS / "speed.svg"

PEERS = {
    "vLLM": ("vllm", ""),
    "transformers": ("transformers", ""),
    "llama.cpp": ("xllamacpp", "xllamacpp 4 bit"),
    "OpenVINO": ("", "openvino 4 bit"),
}
"""A peer's name to what it is called in the results of float32 and of 4-bit weights; "": not in them."""


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        work: what is measured, for a reader.
        case: batch x prompt x generated tokens.
        part: `decode` or `prefill`.
        packed: weights of 4 bits, as in the bundled file; else float32.
    """

    work: str
    case: str
    part: str
    packed: bool


ROWS = (
    Row("decode, 1 sequence, float32", "1x128x64", "decode", packed=False),
    Row("decode, 32 sequences, float32", "32x128x64", "decode", packed=False),
    Row("prefill, 8 prompts of 128 tokens, float32", "8x128x64", "prefill", packed=False),
    Row("decode, 1 sequence, 4 bit", "1x128x64", "decode", packed=True),
    Row("decode, 32 sequences, 4 bit", "32x128x64", "decode", packed=True),
)


def main() -> None:
    results = read_results()
    write_table(README, "speed_summary", table(results))
    write_plot(PLOT, panels(results))


def read_results() -> dict[bool, dict[str, Any]]:
    """The committed runs: of packed weights (True) and of float32 (False)."""
    files = {False: "engine.json", True: "quant.json"}
    return {packed: json.loads((RESULTS / name).read_text()) for packed, name in files.items()}


def table(results: dict[bool, dict[str, Any]]) -> str:
    """Our speed, the machine's limit, and our speed to each peer's in the same run."""
    head = ["tokens a second", "Pegboard", "limit", *(f"to {name}" for name in PEERS)]
    rows = []
    for row in ROWS:
        runs = results[row.packed]["cases"][row.case]
        ours = runs[_our_name(row.packed)]
        cells = [row.work, f"{rates(row.case, ours)[row.part]:.0f}"]
        cells.append(f"{_limit(results[row.packed], row):.0f}")
        for names in PEERS.values():
            theirs = runs.get(names[row.packed])
            cells.append("" if theirs is None else ratio(ours, theirs, row.part))
        rows.append(cells)
    return f"{markdown(head, rows)}\n\n{_caption(results)}"


def panels(results: dict[bool, dict[str, Any]]) -> list[Panel]:
    """Decoding by batch size: float32, and 4 bit."""
    labels = ("sequences", "decoded tokens a second")
    return [
        line_panel(
            f"{'4 bit' if packed else 'float32'} weights",
            labels,
            _lines(results[packed], packed),
            logarithmic=(True, True),
        )
        for packed in (False, True)
    ]


def _lines(result: dict[str, Any], packed: bool) -> dict[str, list[Point]]:
    names = {"Pegboard": _our_name(packed)}
    names |= {peer: called[packed] for peer, called in PEERS.items() if called[packed]}
    return {
        label: [
            (float(sizes(case)[0]), rates(case, runs[name])["decode"])
            for case, runs in result["cases"].items()
        ]
        for label, name in names.items()
    }


def _our_name(packed: bool) -> str:
    return "pegboard 4 bit" if packed else "pegboard"


def _limit(result: dict[str, Any], row: Row) -> float:
    """Tokens a second, were weights read once a step, or multiplied, and nothing else done."""
    if not row.packed:
        return num_tokens(row.case)[row.part] / float(result["limits"][row.case][f"{row.part}_s"])
    bandwidth = float(result["machine"][f"read_gb_s_{result['threads']}t"]) * 1e9
    return sizes(row.case)[0] * bandwidth / float(result["memory"]["4 bit"]["weights"])


def _caption(results: dict[bool, dict[str, Any]]) -> str:
    result = results[False]
    return (
        "SmolLM2-135M, greedy, prompts of 128 and answers of 64 tokens,"
        f" {result['threads']} threads, {result['machine']['cpu']}. A ratio is Pegboard's speed to the"
        f" peer's in the same round, the median of {result['rounds']} rounds with the smallest and the"
        " largest; above 1, Pegboard is faster. The limit is one reading of the weights a step, or, in"
        " float32, their products where these take longer, as measured in the same run."
        " Data: `examples/bench/results/engine.json` and `quant.json`."
    )


if __name__ == "__main__":
    main()
