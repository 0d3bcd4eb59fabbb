"""Our tokens and logits are those of transformers, and of the written formula of sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from pegboard import LLM, Engine, SamplingParams
from pegboard.checkpoint_ref import locate
from pegboard.cli.command_context import EngineCommandContext
from pegboard.compose import load_text_model
from pegboard.interfaces.command import LoadedModel
from pegboard.testing.invariance import Case, run_case
from pegboard.testing.parity import AuditReport, audit
from pegboard.testing.sample import NEAR, Draw, reference_token

FLOAT_INPUTS = {"name": "gguf", "options": {"mode": "packed", "activations": "float"}}
DEQUANTIZED = {"name": "gguf", "options": {"mode": "dequantize"}}
"""Both differ from the reference by the order of sums alone; rounded inputs do not."""


def gguf_weights(reader: gguf.GGUFReader, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """The file's tensors in transformers' names and order, dequantized by the `gguf` library."""
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    weights = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        name = names.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{parts[part]}.weight"
            if part in ("attn_q", "attn_k"):
                # The file pairs neighbours for rotation, transformers pairs halves.
                count = heads if part == "attn_q" else kv_heads
                pairs = values.view(count, -1, 2, values.shape[1])
                values = pairs.transpose(1, 2).reshape(values.shape)
        weights[name] = values
    return weights


@pytest.fixture(scope="module")
def reference(bundled_model: str) -> Any:
    """The bundled model in transformers, without a line of our loader."""
    reader = gguf.GGUFReader(locate(bundled_model, None))

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    weights = gguf_weights(reader, heads, kv_heads)
    config = transformers.LlamaConfig(
        vocab_size=weights["model.embed_tokens.weight"].shape[0],
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings="lm_head.weight" not in weights,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model.eval()


def logits_of(model: Any, ids: Sequence[int]) -> NDArray[Any]:
    with torch.inference_mode():
        logits: NDArray[Any] = model(torch.tensor([list(ids)])).logits[0].numpy()
    return logits


@pytest.fixture(scope="module")
def ours(bundled_model: str) -> Iterator[LoadedModel]:
    """The bundled model, by our loader and layers."""
    config = {"model": bundled_model, "quantizer": FLOAT_INPUTS, "scheduler": {"max_num_seqs": 1}}
    model = load_text_model(EngineCommandContext().resolve(config).composition)
    yield model
    model.close()


@pytest.mark.parametrize("num_texts", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_logits_of_the_bundled_model(
    reference: Any, ours: LoadedModel, texts: list[str], bundled_model: str, num_texts: int
) -> None:
    tokenizer = EngineCommandContext().tokenizer(bundled_model)
    worst = 0.0
    for text in texts[:num_texts]:
        ids = tokenizer.encode(text)
        logits, _ = ours.forward(ids)
        worst = max(worst, float(np.abs(logits.numpy() - logits_of(reference, ids)).max()))
    assert worst < 1e-3


@pytest.mark.parametrize(
    ("num_texts", "num_tokens"), [(3, 16), pytest.param(50, 64, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_audit_of_the_bundled_model(
    reference: Any,
    texts: list[str],
    bundled_model: str,
    name: str,
    num_texts: int,
    num_tokens: int,
) -> None:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    parts: dict[str, Any] = {"kernels": name, "attention": name, "dtype": "float32", "threads": 1}
    parts["quantizer"] = FLOAT_INPUTS if name == "cpu" else DEQUANTIZED
    with LLM(bundled_model, show_progress=False, **parts) as llm:
        results = llm.generate(texts[:num_texts], params)
    report = sum(
        (
            audit(lambda ids: logits_of(reference, ids), one.prompt_token_ids, one.token_ids)
            for one in results
        ),
        AuditReport(),
    )
    assert report.num_positions == num_texts * num_tokens
    assert report.passed, report


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_sampled_tokens_are_those_of_the_formula(tiny_models: dict[str, Path], family: str) -> None:
    """Each token, by the logits of transformers and a sampler in numpy."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_models[family], dtype=torch.float64
    )
    prompts = [tuple(range(2 + 31 * i, 40 + 26 * i)) for i in range(4)]
    draws = [
        Draw(temperature=0.0),
        Draw(temperature=1.0, seed=2**63 + 5),
        Draw(temperature=0.8, seed=9, top_k=40, top_p=0.9),
        Draw(temperature=1.5, seed=3, min_p=0.05),
    ]
    params = [
        SamplingParams(
            max_tokens=20,
            ignore_eos=True,
            n=3,
            temperature=draw.temperature,
            seed=draw.seed,
            top_k=draw.top_k,
            top_p=draw.top_p,
            min_p=draw.min_p,
        )
        for draw in draws
    ]
    config = {
        "model": str(tiny_models[family]),
        "max_model_len": 128,
        "threads": 1,
        "dtype": "float64",
    }
    traces = run_case(config, Case(batch=12, chunk=9), prompts, params)
    assert len(traces) == 12
    for (number, index), trace in traces.items():
        prompt, base = prompts[number], draws[number]
        logits = logits_of(model, [*prompt, *trace.tokens]).astype(np.float32)
        for i, token in enumerate(trace.tokens):
            position = len(prompt) + i
            draw = Draw(
                base.temperature, base.top_k, base.top_p, base.min_p, base.seed, position, index
            )
            expected, margin = reference_token(logits[position - 1], draw)
            assert token == expected or margin < NEAR, (number, index, i)


def test_logprobs_are_those_of_transformers(tiny_models: dict[str, Path]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_models["llama"], dtype=torch.float64
    )
    prompt = tuple(range(5, 30))
    params = SamplingParams(
        max_tokens=8, temperature=1.0, seed=4, logprobs=2, prompt_logprobs=2, ignore_eos=True
    )
    with Engine(
        {"model": str(tiny_models["llama"]), "max_model_len": 64, "dtype": "float64"}
    ) as engine:
        engine.submit(prompt, params)
        deltas = []
        while engine.has_work():
            deltas += engine.step()
    tokens = [token for delta in deltas for token in delta.token_ids]
    ids = [*prompt, *tokens]
    expected = torch.from_numpy(logits_of(model, ids)).log_softmax(-1)
    (prompt_entries,) = (d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None)
    assert prompt_entries[0] is None
    entries = [*prompt_entries[1:], *(entry for delta in deltas for entry in delta.logprobs or ())]
    assert len(entries) == len(ids) - 1
    for position, entry in enumerate(entries):
        assert entry is not None
        row = expected[position]
        assert entry.token_id == ids[position + 1]
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-5)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        top = row.topk(2)
        assert list(entry.top_ids) == top.indices.tolist()
        assert list(entry.top_logprobs) == pytest.approx(top.values.tolist(), abs=1e-5)
