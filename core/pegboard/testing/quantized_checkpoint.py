"""Running small quantized checkpoints of other tools: facts and tensors without a source's help, an
engine's logprobs, a straight decoder whose linear layers round their inputs, refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard import Engine, SamplingParams
from pegboard.errors import UserError
from pegboard.interfaces.checkpoint import (
    CheckpointFacts,
    CheckpointSource,
    TensorFact,
    TokenizerFacts,
)
from pegboard.interfaces.quantizer import Quantizer, WeightSpec
from pegboard.request import TokenLogprob
from pegboard.testing.dense_decoder import DenseDecoder, Tensors
from pegboard.testing.model_parts import InMemory

if TYPE_CHECKING:
    import torch

REFERENCE = {"dtype": "float32", "kernels": "torch", "attention": "torch"}
"""Parts of an engine that computes as the formulas say."""

NUM_TOP = 20
"""Logprobs that are compared at each position, the largest."""


def facts_of(folder: Path) -> CheckpointFacts:
    """The facts of a folder with `config.json` and `model.safetensors`."""
    config = json.loads((folder / "config.json").read_text())
    quantization = config.get("quantization_config") or {}
    tensors = {
        name: TensorFact(
            tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), "plain", tensor.nbytes
        )
        for name, tensor in tensors_of(folder).items()
    }
    return CheckpointFacts(
        source="safetensors",
        path=str(folder),
        fingerprint="0",
        config=config,
        tensors=tensors,
        quantization=quantization.get("quant_method"),
        quantization_config=quantization,
        eos_token_ids=(),
        tokenizer=TokenizerFacts(file=None),
    )


def source_of(facts: CheckpointFacts) -> CheckpointSource:
    """The tensors of the folder that the facts are of."""
    return InMemory(tensors_of(Path(facts.path)))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder's `model.safetensors`."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Path:
    """A folder that `facts_of` reads."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def changed_checkpoint(
    source: Path,
    folder: Path,
    change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object],
) -> Path:
    """A copy of a checkpoint after `change(tensors, quantization_config)`, which changes both in place."""
    tensors, config = tensors_of(source), json.loads((source / "config.json").read_text())
    change(tensors, config["quantization_config"])
    return write_checkpoint(folder, config, {key: one.contiguous() for key, one in tensors.items()})


def dequantized(quantizer: Quantizer, facts: CheckpointFacts) -> dict[str, torch.Tensor]:
    """All weights of a model of the Llama family, float32, by the quantizer's own reference; biases
    and norms as they are stored."""
    source, weights = source_of(facts), {}
    for name, fact in facts.tensors.items():
        layer, _, last = name.rpartition(".")
        if last in ("weight", "weight_packed") and len(fact.shape) == 2:
            kind = {"embed_tokens": "embedding", "lm_head": "head"}.get(layer.rpartition(".")[2])
            packed = last == "weight_packed"
            rows, columns = source.read(f"{layer}.weight_shape").tolist() if packed else fact.shape
            scheme = quantizer.scheme(WeightSpec(layer, (rows, columns), kind or "linear"))  # type: ignore[arg-type]
            stored = {one.name: source.read(f"{layer}.{one.name}") for one in scheme.parameters}
            weights[f"{layer}.weight"] = scheme.dequantize(stored)
        elif last in ("weight", "bias"):
            weights[name] = source.read(name).float()
    return weights


def weights_that_differ(
    folder: Path, make: Callable[[CheckpointFacts], Quantizer]
) -> dict[str, bool]:
    """For each weight that the folder's `expected.safetensors` has dequantized by the tool (named
    `dequant.` and the tensor), whether a quantizer's, rounded to the same type, has other bits."""
    import torch
    from safetensors.torch import load_file

    facts = facts_of(folder)
    quantizer, source = make(facts), source_of(facts)
    differ = {}
    for name, wanted in load_file(folder / "expected.safetensors").items():
        if name.startswith("dequant."):
            layer = name.removeprefix("dequant.").removesuffix(".weight")
            rows, columns = wanted.shape
            scheme = quantizer.scheme(WeightSpec(layer, (rows, columns), "linear"))
            stored = {one.name: source.read(f"{layer}.{one.name}") for one in scheme.parameters}
            differ[name] = not torch.equal(scheme.dequantize(stored).to(wanted.dtype), wanted)
    return differ


def tools_logits(folder: Path) -> tuple[list[int], torch.Tensor]:
    """The text, and its logits by the tool [num_tokens, vocab_size], that the folder's
    `expected.safetensors` has."""
    from safetensors.torch import load_file

    held = load_file(folder / "expected.safetensors")
    ids: list[int] = held["input_ids"].flatten().tolist()
    return ids, held["logits"].reshape(len(ids), -1).float()


class RoundingDecoder(DenseDecoder):
    """A `DenseDecoder` whose linear layers round their inputs.

    Args:
        config, tensors: as `DenseDecoder`.
        round_inputs: (layer's name, inputs [num_tokens, in_features] in float64) -> rounded ones.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Tensors,
        round_inputs: Callable[[str, torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(config, tensors)
        self._round_inputs = round_inputs

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return super()._linear(self._round_inputs(name, x), name)


def logprob_errors(
    config: Mapping[str, Any], texts: Sequence[Sequence[int]], logits: Sequence[torch.Tensor]
) -> list[float]:
    """The errors of an engine's logprobs of each text against those of logits [num_tokens, vocab_size].

    Compared are the engine's `NUM_TOP` largest at each position but the last. A text's error is the
    root of their mean square difference, over the logits' standard deviation.
    """
    engine = Engine({"threads": 1, **config})
    found = [_prompt_logprobs(engine, ids) for ids in texts]
    engine.close()
    return [_error(positions, rows) for positions, rows in zip(found, logits, strict=True)]


def largest_logprob_error(
    config: Mapping[str, Any], ids: Sequence[int], logits: torch.Tensor
) -> float:
    """The most that an engine's `NUM_TOP` largest logprobs differ anywhere in a text from those of
    logits [num_tokens, vocab_size]."""
    engine = Engine({"threads": 1, **config})
    found = _prompt_logprobs(engine, ids)
    engine.close()
    expected = logits.double().log_softmax(-1)[:-1].tolist()
    largest: float = max(
        abs(logprob - row[token_id])
        for row, position in zip(expected, found, strict=True)
        for token_id, logprob in zip(position.top_ids, position.top_logprobs, strict=True)
    )
    return largest


def _prompt_logprobs(engine: Engine, ids: Sequence[int]) -> list[TokenLogprob]:
    """Logprobs of each token but the first."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=NUM_TOP)
    engine.submit(list(ids), params)
    found: list[TokenLogprob] = []
    while engine.has_work():
        for delta in engine.step():
            found += [one for one in delta.prompt_logprobs or () if one is not None]
    return found


def _error(positions: Sequence[TokenLogprob], logits: torch.Tensor) -> float:
    expected = logits.double().log_softmax(-1)[:-1].tolist()
    differences = [
        logprob - row[token_id]
        for row, position in zip(expected, positions, strict=True)
        for token_id, logprob in zip(position.top_ids, position.top_logprobs, strict=True)
    ]
    rms = math.sqrt(sum(one * one for one in differences) / len(differences))
    return rms / float(logits.double().std())


def refusal(config: Mapping[str, Any]) -> str | None:
    """The one line with which an engine refuses to start; None: it starts."""
    try:
        Engine({"threads": 1, **config}).close()
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return None
