"""A GGUF file, run whole, gives the distributions that transformers gives for the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType

from pegboard import Engine, SamplingParams
from pegboard.request import SequenceDelta
from pegboard_gguf.describe import describe

PROMPTS = [[5], [7, 3, 280, 41, 41, 9], list(range(20, 60))]


@pytest.fixture
def expected(
    tiny_config: dict[str, Any],
    tiny_tensors: dict[str, torch.Tensor],
    tiny_kinds: dict[str, GGMLQuantizationType],
) -> list[torch.Tensor]:
    """float32 [num_tokens, vocab_size] logprobs of each prompt, by transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    weights = dict(tiny_tensors)
    for name, kind in tiny_kinds.items():
        blocks = gguf.quants.quantize(weights[name].numpy(), kind)
        weights[name] = torch.from_numpy(gguf.quants.dequantize(blocks, kind).copy())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = LlamaForCausalLM(LlamaConfig(**tiny_config))
    model.load_state_dict(weights)
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
    return [rows.float().log_softmax(-1) for rows in logits]


def test_logprobs_are_those_of_transformers(tiny_file: Path, expected: list[torch.Tensor]) -> None:
    assert describe(tiny_file).quantization == "gguf"
    engine = Engine({"model": str(tiny_file), "dtype": "float32"})
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
            assert logprob.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            best = row.topk(5)
            assert logprob.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)
