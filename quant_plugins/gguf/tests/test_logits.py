"""A GGUF file, run whole, packed or not, gives the distributions that transformers gives for the same
weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from pegboard import Engine, SamplingParams
from pegboard.request import SequenceDelta
from pegboard_gguf.describe import describe

PROMPTS = [[5], [7, 3, 280, 41, 41, 9], list(range(20, 60))]


FLOATS = [{"mode": "dequantize"}, {"mode": "packed", "activations": "float"}]
ROUNDED = {"mode": "packed", "activations": "int8"}


@pytest.fixture(params=["tiny", "mixed"])
def model(
    request: pytest.FixtureRequest,
    tiny_config: dict[str, Any],
    tiny_tensors: dict[str, torch.Tensor],
    tiny_kinds: dict[str, GGMLQuantizationType],
    mixed_model: Any,
) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, GGMLQuantizationType]]:
    """Config, tensors and types of a file. The mixed one's types differ within q, k and v, its
    embedding is the head too, and its inputs of 256 are one block."""
    if request.param == "mixed":
        return mixed_model.config, mixed_model.tensors, mixed_model.kinds
    return tiny_config, tiny_tensors, tiny_kinds


@pytest.fixture
def expected(model: Any) -> list[torch.Tensor]:
    """float32 [num_tokens, vocab_size] logprobs of each prompt, by transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config, tensors, kinds = model
    weights = dict(tensors)
    for name, kind in kinds.items():
        blocks = weights[name].numpy()
        if blocks.dtype != np.uint8:
            blocks = gguf.quants.quantize(blocks, kind)
        weights[name] = torch.from_numpy(gguf.quants.dequantize(blocks, kind).copy())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    reference = LlamaForCausalLM(LlamaConfig(**config))
    reference.load_state_dict(weights)
    with torch.no_grad():
        logits = [reference(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
    return [rows.float().log_softmax(-1) for rows in logits]


@pytest.fixture
def path(model: Any, write_model: Any) -> Path:
    config, tensors, kinds = model
    written: Path = write_model(config, tensors, kinds=kinds)
    return written


@pytest.mark.parametrize("options", FLOATS, ids=lambda options: options["mode"])
def test_logprobs_are_those_of_transformers(
    path: Path, expected: list[torch.Tensor], options: dict[str, str]
) -> None:
    assert describe(path).quantization == "gguf"
    _compare(path, options, expected, tolerance=1e-4)


def test_rounded_inputs_change_logprobs_a_little(path: Path, expected: list[torch.Tensor]) -> None:
    _compare(path, ROUNDED, expected, tolerance=0.1)
    with pytest.raises(AssertionError):
        _compare(path, ROUNDED, expected, tolerance=1e-4)


def _compare(
    path: Path, options: dict[str, str], expected: list[torch.Tensor], tolerance: float
) -> None:
    engine = Engine(
        {
            "model": str(path),
            "dtype": "float32",
            "quantizer": {"name": "gguf", "options": options},
        }
    )
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, prompt_logprobs=5)
    requests = [engine.submit(prompt, params) for prompt in PROMPTS]
    deltas: dict[str, SequenceDelta] = {}
    while engine.has_work():
        deltas |= {delta.request_id: delta for delta in engine.step() if delta.token_ids}
    engine.close()
    for request, prompt, rows in zip(requests, PROMPTS, expected, strict=True):
        delta = deltas[request.request_id]
        assert delta.logprobs is not None and delta.prompt_logprobs is not None
        reported = [*delta.prompt_logprobs[1:], delta.logprobs[0]]
        following = [*prompt[1:], delta.token_ids[0]]
        for token_id, row, logprob in zip(following, rows, reported, strict=True):
            assert logprob is not None and logprob.token_id == token_id
            assert logprob.logprob == pytest.approx(float(row[token_id]), abs=tolerance)
            best = row.topk(5)
            assert logprob.top_logprobs == pytest.approx(best.values.tolist(), abs=tolerance)
