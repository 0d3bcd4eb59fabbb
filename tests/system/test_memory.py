"""Engines live beside each other, and leave nothing behind."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pegboard import Engine, SamplingParams
from pegboard.testing.tiny import write_tiny_model


def _generate(engine: Engine, prompt: tuple[int, ...]) -> list[int]:
    engine.submit(prompt, SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True))
    tokens: list[int] = []
    while engine.has_work():
        for delta in engine.step():
            tokens += delta.token_ids
    return tokens


def test_two_engines_in_one_process(tiny_models: dict[str, Path]) -> None:
    settings = {"max_model_len": 64}
    prompt = (5, 9, 300, 4)
    alone = {}
    for family in ("llama", "qwen3"):
        with Engine({"model": str(tiny_models[family]), **settings}) as engine:
            alone[family] = _generate(engine, prompt)
    with (
        Engine({"model": str(tiny_models["llama"]), **settings}) as one,
        Engine({"model": str(tiny_models["qwen3"]), **settings}) as two,
    ):
        for engine in (one, two):
            engine.submit(prompt, SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True))
        tokens: dict[Engine, list[int]] = {one: [], two: []}
        while one.has_work() or two.has_work():
            for engine in (one, two):
                if engine.has_work():
                    tokens[engine] += [t for delta in engine.step() for t in delta.token_ids]
    assert tokens[one] == alone["llama"]
    assert tokens[two] == alone["qwen3"]
    assert alone["llama"] != alone["qwen3"]


@pytest.mark.slow
def test_closing_frees_memory(bundled_model: str) -> None:
    """Over 500 MiB of weights in float32."""
    dequantized = {"name": "gguf", "options": {"mode": "dequantize"}}
    check_that_closing_frees(300, model=bundled_model, dtype="float32", quantizer=dequantized)


def test_closing_frees_memory_of_wide_layers(tmp_path: Path) -> None:
    """Over 80 MiB of weights."""
    wide: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 7 * 1024,
        "num_hidden_layers": 1,
    }
    model = str(write_tiny_model(tmp_path, **wide))
    check_that_closing_frees(65, model=model, dtype="float32")


def check_that_closing_frees(num_mib: float, **settings: Any) -> None:
    """An engine takes so much while it is open, beside what one before it left, and leaves none."""
    settings |= {"max_model_len": 512, "show_progress": False}
    argv = [sys.executable, str(Path(__file__).with_name("closed_engine.py")), json.dumps(settings)]
    output = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=300).stdout
    before, loaded, after = json.loads(output)
    assert loaded - before > num_mib
    assert after - before < num_mib / 2


@pytest.mark.parametrize(
    "name",
    [
        *("awq-4b-g32", "gptq-3b-g32-sym", "gptq-4b-g32-desc-act", "gptq-8b-g32-sym"),
        *("ct-w4a16-g32-asym", "ct-w8a8-int8-static", "ct-fp8-block-ragged", "ct-fp8-static-kv"),
        *("fp8-block-inv", "gguf-q4_0/model.gguf", "gguf-q4_k-mixed-tied/model.gguf"),
    ],
)
def test_a_plan_counts_what_packed_weights_take(quant_data: Path, name: str) -> None:
    """Never less, and little more: scales that float16 holds are kept in it, which no plan can know."""
    from pegboard_cpu.weight import NativeWeight

    before = {id(one) for one in gc.get_objects() if type(one) is NativeWeight}
    with Engine({"model": str(quant_data / name), "kernels": "cpu", "dtype": "float32"}) as engine:
        held = [one for one in gc.get_objects() if type(one) is NativeWeight]
        taken = sum(one.num_bytes for one in held if id(one) not in before)
        ledger = engine.prepared.ledger
    planned = sum(one.num_bytes for one in ledger.entries if one.name.startswith("weights"))
    assert taken <= planned <= 1.35 * taken


def test_a_closed_engine_can_be_closed_again(tiny_models: dict[str, Path]) -> None:
    engine = Engine({"model": str(tiny_models["llama"]), "max_model_len": 64})
    engine.close()
    engine.close()


@pytest.mark.parametrize("family", ["llama"])
def test_engines_come_and_go(tiny_models: dict[str, Path], family: str) -> None:
    config = {"model": str(tiny_models[family]), "max_model_len": 64}
    texts = set()
    for _ in range(5):
        with Engine(config) as engine:
            texts.add(tuple(_generate(engine, (3, 4, 5))))
    assert len(texts) == 1
