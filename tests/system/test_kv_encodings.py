"""KV in codes: no way of running changes a token, a quarter of the memory, and little accuracy lost."""

from __future__ import annotations

import math
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pegboard import Config, Engine
from pegboard.compose import prepare
from pegboard.request import SamplingParams
from pegboard.testing.invariance import Case, Guesses, Traces, differences, run_case

STATIC_SCALES = Path(__file__).parents[1] / "data" / "quant" / "ct-fp8-static-kv"
ENCODINGS = ("fp8_e4m3", "int8")
CASES = {
    "one token at a time": Case(5, chunk=1),
    "disorder and wrong trees": Case(7, disorder=1, guesses=Guesses(0.3, width=2)),
    "a small pool and a cache": Case(7, chunk=7, pool=2 * 2 * (24 + 8) * 80, cached=True),
    "a step in flight": Case(7, chunk=7, cached=True, settings={"executor": {"depth": 2}}),
}
PROMPTS = [tuple(2 + (5 * i + n) % 500 for i in range(n)) for n in (1, 9, 40, 17, 33, 5, 24)]
PARAMS = [
    SamplingParams(temperature=float(i % 2), seed=i, max_tokens=8, logprobs=2, ignore_eos=True)
    for i in range(len(PROMPTS))
]


def config(model: Path, encoding: str) -> dict[str, Any]:
    """Of the plain reference, in float64: rounding neither hides nor excuses a fault."""
    return {
        "model": str(model),
        "max_model_len": 64,
        "dtype": "float64",
        "attention": "torch",
        "kv_cache": {"block_size": 4, "encoding": encoding},
        "threads": 1,
    }


@cache
def alone(model: Path, encoding: str) -> Traces:
    return run_case(config(model, encoding), Case(1), PROMPTS, PARAMS)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_no_way_to_run_changes_a_token(
    tiny_models: dict[str, Path], encoding: str, case: Case
) -> None:
    model = tiny_models["llama"]
    expected = alone(model, encoding)
    got = run_case(config(model, encoding), case, PROMPTS, PARAMS, expected)
    assert differences(expected, got, tolerance=1e-5) == []


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_codes_are_what_attention_reads(tiny_models: dict[str, Path], encoding: str) -> None:
    model = tiny_models["llama"]
    assert differences(alone(model, "none"), alone(model, encoding), tolerance=1e-5)


@pytest.mark.parametrize("attention", ["torch", "cpu"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_pool_of_codes_holds_more_tokens(
    bundled_model: str, attention: str, encoding: str
) -> None:
    tokens = {}
    for kept in ("none", encoding):
        settings = {"dtype": "float32", "attention": attention, "threads": 1}
        kv_cache = {"encoding": kept, "memory": "32MiB", "block_size": 16}
        config = Config.from_values({"model": bundled_model, **settings, "kv_cache": kv_cache})
        tokens[kept] = 16 * prepare(config).composition.num_blocks[0]
    assert tokens[encoding] == pytest.approx(tokens["none"] * 64 * 4 / (64 + 4), rel=0.02)


@pytest.mark.parametrize("attention", ["torch", "cpu"])
@pytest.mark.parametrize(("encoding", "takes_them"), [("fp8_e4m3", True), ("int8", False)])
def test_a_checkpoints_scales_are_taken_where_they_are_of_the_same_codes(
    attention: str, encoding: str, takes_them: bool, tmp_path: Path
) -> None:
    """With scales so large that all values become zero, an encoding that takes them says other things."""
    settings = {"dtype": "float32", "attention": attention, "max_model_len": 64}
    settings |= {"kv_cache": {"encoding": encoding}}
    changed = tmp_path / "changed"
    shutil.copytree(STATIC_SCALES, changed)
    tensors = load_file(changed / "model.safetensors")
    for name in [name for name in tensors if name.endswith("v_scale")]:
        tensors[name] = torch.full_like(tensors[name], 1e6)
    save_file(tensors, changed / "model.safetensors")
    kept, other = (
        run_case({"model": str(model), **settings}, Case(2), PROMPTS[:2], PARAMS[:2])
        for model in (STATIC_SCALES, changed)
    )
    assert bool(differences(kept, other)) == takes_them


@pytest.mark.slow
@pytest.mark.parametrize(("encoding", "mean_error"), [("fp8_e4m3", 0.12), ("int8", 0.05)])
def test_the_real_model_says_nearly_the_same(
    bundled_model: str, shared_folder: Path, encoding: str, mean_error: float
) -> None:
    """Perplexity within one percent of that over float KV; logprobs off by little on average."""
    file = shared_folder / "fixtures" / "text" / "wikitext2-test.txt"
    if not file.is_file():
        pytest.skip("the shared material holds no fixtures/text/wikitext2-test.txt")
    text = file.read_text()
    texts = [text[start : start + 3000] for start in range(0, 12000, 3000)]
    plain, coded = (logprobs(bundled_model, kept, texts) for kept in ("none", encoding))
    assert abs(math.exp(plain.mean() - coded.mean()) - 1) < 0.01
    assert 0 < np.abs(plain - coded).mean() < mean_error


def logprobs(model: str, encoding: str, texts: list[str]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of each token of the texts, after those before it."""
    settings = {"dtype": "float32", "max_model_len": 1024, "kv_cache": {"encoding": encoding}}
    # rounded inputs of products would make more of a small difference than KV does
    settings["quantizer"] = {"name": "gguf", "options": {"mode": "dequantize"}}
    found: list[float] = []
    with Engine({"model": model, **settings}) as engine:
        assert engine.tokenizer is not None
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        for text in texts:
            engine.submit(engine.tokenizer.encode(text), params)
        while engine.has_work():
            for delta in engine.step():
                found += [one.logprob for one in delta.prompt_logprobs or () if one is not None]
    return np.array(found)
