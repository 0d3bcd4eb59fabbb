"""Quantizes a model a decoder layer at a time: what `pegboard quantize` does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pegboard.errors import ConfigError
from pegboard.interfaces.command import CommandContext, LayerStream
from pegboard.interfaces.quantizer import Calibrator, StreamedLayer, WeightSpec
from pegboard_quant.output import Output
from pegboard_quant.progress_file import FinishedLayer, ProgressFile
from pegboard_quant.recipe import Choices, Recipe, choose

if TYPE_CHECKING:
    from pegboard.interfaces.model import ModelShape

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Job:
    """The arguments of a run.

    Attributes:
        model: reference of the model.
        method: of quantization.
        out: folder to write to.
        recipe: rules and settings.
        recipe_name: what the recipe is called in errors.
        said: settings of the command line.
        data: a text file; None: none.
        num_texts, text_length: most texts that are cut from it, and tokens of each.
    """

    model: str
    method: str
    out: Path
    recipe: Recipe = field(default_factory=Recipe)
    recipe_name: str = "recipe"
    said: dict[str, Any] = field(default_factory=dict)
    data: Path | None = None
    num_texts: int = 128
    text_length: int = 512


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a run.

    Attributes:
        num_quantized, num_kept: weights.
        bytes_before, bytes_after: of the checkpoints' tensors and of the new one's files.
        notes: what the user should know.
    """

    num_quantized: int
    num_kept: int
    bytes_before: int
    bytes_after: int
    notes: tuple[str, ...]


def quantize(job: Job, context: CommandContext) -> Report:
    """Writes the quantized checkpoint; goes on where a run of the same job was broken off.

    Raises:
        UserError: something asked for cannot be done; nothing has been written then.
    """
    calibrator = context.calibrator(job.method)
    texts = _texts(job, context)
    with closing(context.stream_layers(job.model)) as stream:
        return _Run(job, stream, calibrator, texts).run(context)


class _Run:
    """One run.

    Raises:
        UserError: as `quantize`.
    """

    def __init__(
        self,
        job: Job,
        stream: LayerStream,
        calibrator: type[Calibrator],
        texts: Sequence[Sequence[int]],
    ) -> None:
        weights = _weights(stream.shape)
        self.stream = stream
        self.choices = choose(weights, job.recipe, job.said, calibrator, job.recipe_name)
        self.calibrator = calibrator(self.choices.settings, self.choices.kept)
        for weight in weights:
            if weight.name in self.choices.settings:
                self.calibrator.check(weight)
        settings = self.choices.settings.values()
        if not texts and any(calibrator.needs_inputs(one) for one in settings):
            raise ConfigError(
                "data", f"is not given, and {job.method} looks at inputs", fix="--data TEXT"
            )
        if texts and len(texts[0]) > stream.max_tokens:
            raise ConfigError(
                "length", f"{len(texts[0])} tokens", allowed=f"at most {stream.max_tokens}"
            )
        self.texts = texts
        identity = _identity(job, stream, self.choices, texts)
        self.progress = ProgressFile(job.out, identity)
        self.output = Output(job.out, stream.facts, stream.shape.num_layers + 1)

    def run(self, context: CommandContext) -> Report:
        """Quantizes the layers that are not finished, and writes the rest."""
        num_layers, first = self.stream.shape.num_layers, len(self.progress.layers)
        hidden = self.progress.hidden(len(self.texts)) if first else self._embedded()
        for index in context.progress(range(first, num_layers), "quantizing layers"):
            layer = self.stream.layer(index, hidden)
            with torch.inference_mode():
                finished = self._quantize(layer)
            for number, output in enumerate(layer.outputs()):
                hidden[number] = output
            self.progress.finish_layer(finished, hidden)
        self._write_rest(num_layers)
        stored = {
            name: names for layer in self.progress.layers for name, names in layer.stored.items()
        }
        self.output.finish(self.calibrator.export(stored))
        self.progress.remove()
        return self._report()

    def _embedded(self) -> list[torch.Tensor]:
        if not self.texts:
            return []
        name = next(p.name for p in self.stream.shape.parameters if p.kind == "embedding")
        rows = self.stream.parameter(name)
        return [rows[torch.tensor(list(text))] for text in self.texts]

    def _quantize(self, layer: StreamedLayer) -> FinishedLayer:
        """Quantizes a layer's weights in the order in which they run, each from inputs that quantized
        weights before it made, and writes its shard."""
        self.calibrator.fold(layer)
        finished = FinishedLayer()
        tensors: dict[str, torch.Tensor] = {}
        for group in layer.groups:
            chosen = [weight for weight in group if weight.name in self.choices.settings]
            if not chosen:
                continue
            for inputs in layer.inputs(chosen[0].name):
                self.calibrator.observe(chosen, inputs)
            values = [layer.parameters[weight.name + _WEIGHT] for weight in chosen]
            made = self.calibrator.quantize(chosen, values)
            for weight, one in zip(chosen, made, strict=True):
                layer.parameters[weight.name + _WEIGHT] = one.values
                finished.stored[weight.name] = sorted(one.parameters)
                finished.notes += [one.note] if one.note else []
                for name, tensor in one.parameters.items():
                    tensors[f"{weight.name}.{name}"] = tensor
        for name, values_kept in layer.parameters.items():
            if name.removesuffix(_WEIGHT) not in finished.stored:
                tensors[name] = self.output.kept(name, values_kept)
        self.output.write_shard(layer.index, tensors)
        return finished

    def _write_rest(self, index: int) -> None:
        """Writes what is of no decoder layer."""
        names = [parameter.name for parameter in self.stream.shape.parameters]
        rest = [name for name in names if ".layers." not in name]
        tensors = {name: self.output.kept(name, self.stream.parameter(name)) for name in rest}
        self.output.write_shard(index, tensors)

    def _report(self) -> Report:
        before = sum(fact.num_bytes for fact in self.stream.facts.tensors.values())
        notes = tuple(note for layer in self.progress.layers for note in layer.notes)
        choices = self.choices
        return Report(
            len(choices.settings), len(choices.kept), before, self.output.num_bytes, notes
        )


def _weights(shape: ModelShape) -> list[WeightSpec]:
    """All weights that a rule can be about."""
    found = []
    for parameter in shape.parameters:
        if parameter.kind in ("linear", "embedding", "head"):
            out_features, in_features = parameter.shape
            name = parameter.name.removesuffix(_WEIGHT)
            found.append(WeightSpec(name, (out_features, in_features), parameter.kind))
    return found


def _texts(job: Job, context: CommandContext) -> list[list[int]]:
    """Token ids of the texts that are cut from the file, the last one perhaps shorter."""
    if job.data is None:
        return []
    try:
        text = job.data.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError("data", f"{job.data} cannot be read: {problem}") from None
    ids = context.tokenizer(job.model).encode(text)[: job.num_texts * job.text_length]
    if not ids:
        raise ConfigError("data", f"{job.data} holds no text", allowed="a text file")
    return [ids[at : at + job.text_length] for at in range(0, len(ids), job.text_length)]


def _identity(
    job: Job, stream: LayerStream, choices: Choices, texts: Sequence[Sequence[int]]
) -> str:
    """A digest of everything that the result depends on."""
    said = {
        "model": stream.facts.fingerprint,
        "method": job.method,
        "settings": {name: one.model_dump() for name, one in choices.settings.items()},
        "kept": list(choices.kept),
        "texts": [list(text) for text in texts],
        "threads": stream.num_threads,
        "torch": torch.__version__,
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
