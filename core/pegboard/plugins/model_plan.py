"""Choosing what a model is made of: quantizer, attention backend, kernels, KV groups."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from pegboard.config import Choice, Config
from pegboard.errors import ManifestFunctionFailed, OptionsInvalid
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.drafter import DrafterFacts
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.model import ModelShape
from pegboard.plugins.checks import attends, layout_of, reads, unread
from pegboard.plugins.choice import Chooser, Wanted
from pegboard.plugins.composition import ModelPlan, Part, Refusal
from pegboard.plugins.functions import ask
from pegboard.plugins.guard import guarded
from pegboard.plugins.kernels import choose_kernels, numerics_id, settle_quantizer
from pegboard.plugins.loader import options_of

DEFAULT_BLOCK_SIZE = 16

TARGET = "target"
"""The model whose tokens are answered."""


@dataclass(frozen=True)
class InspectedModel:
    """A model as it was inspected, before resolving.

    Attributes:
        name: of its units in the workers.
        facts, source: the checkpoint and the part that reads it.
        shape, model: the model and the part that builds it; None: a drafter does.
        quantizer: what is wanted of its quantizer.
    """

    name: str
    facts: CheckpointFacts
    source: Part
    shape: ModelShape
    model: Part | None
    quantizer: Choice

    def formats(self, quantizer: Part) -> tuple[str, ...]:
        """The weight formats that a quantizer makes of the checkpoint. None while its options do not
        fit, which is refused where all parts' options are checked."""
        said = quantizer.entry.formats
        if not isinstance(said, str):
            return said
        try:
            options = options_of(quantizer)
        except OptionsInvalid:
            return ()
        return tuple(ask(quantizer, "formats", self.facts, options))

    def alternatives(self, quantizer: Part) -> tuple[Part, ...]:
        """A quantizer with what its options may stand for, best first; as it is while they do not fit."""
        if quantizer.entry.alternatives is None:
            return (quantizer,)
        try:
            options = options_of(quantizer)
        except OptionsInvalid:
            return (quantizer,)
        settled = ask(quantizer, "alternatives", self.facts, options)
        with guarded(ManifestFunctionFailed, quantizer.origin, "taking its alternatives"):
            return tuple(
                msgspec.structs.replace(quantizer, options=one.model_dump(mode="json"))
                for one in settled
            )


@dataclass(frozen=True)
class InspectedDrafter:
    """The needs of a drafter, as its `describe` says them.

    Attributes:
        facts: as its `describe` answered; of a drafter without one, nothing.
        model: its own model; None: it has none.
        refusals: reasons why it cannot have them.
    """

    facts: DrafterFacts = field(default_factory=DrafterFacts)
    model: InspectedModel | None = None
    refusals: tuple[Refusal, ...] = ()


def plan_model(inspected: InspectedModel, chooser: Chooser) -> ModelPlan:
    """The plan of a model. If something is lacking, the chooser has the reasons, and the plan is void.

    Args:
        inspected: the model.
        chooser: of the model's head sizes; collects reasons and decisions.
    """
    config, shape = chooser.config, inspected.shape
    quantizer = chooser.choose(_quantizer(inspected, chooser))
    attention = chooser.choose(
        Wanted(
            "attention",
            "attention",
            config.attention,
            lambda entry: attends(entry, shape, _encoding(config)),
        )
    )
    if quantizer is not None:
        quantizer = settle_quantizer(chooser, inspected.alternatives(quantizer), inspected.formats)
    formats = () if quantizer is None else inspected.formats(quantizer)
    kernels = choose_kernels(chooser, formats, attention)
    groups = _groups(inspected, attention, chooser)
    found = {
        "checkpoint_source": inspected.source,
        "model": inspected.model,
        "quantizer": quantizer,
        "attention": attention,
    }
    parts = {interface: part for interface, part in found.items() if part is not None}
    return ModelPlan(
        name=inspected.name,
        facts=inspected.facts,
        shape=shape,
        parts=parts,
        kernels=kernels,
        groups=groups,
        numerics_id=numerics_id(kernels, parts, chooser.device, chooser.dtype, groups),
    )


def _quantizer(inspected: InspectedModel, chooser: Chooser) -> Wanted:
    facts = inspected.facts
    methods = {m for one in chooser.catalog.offers("quantizer") for m in one.entry.methods}
    return Wanted(
        "quantizer",
        "quantizer",
        inspected.quantizer,
        lambda entry: reads(entry, facts),
        known_as=(layout_of(facts), facts.quantization or "none"),
        unread=unread(methods - {"none"}, facts),
    )


def _encoding(config: Config) -> str:
    return "none" if config.kv_cache.encoding == "auto" else config.kv_cache.encoding


def _groups(
    inspected: InspectedModel, attention: Part | None, chooser: Chooser
) -> tuple[KVGroup, ...]:
    block_size = _block_size(attention, chooser)
    layers: dict[tuple[int, int, int | None, int], list[int]] = {}
    for layer, attention_of in enumerate(inspected.shape.attention):
        one = attention_of
        key = (one.num_kv_heads, one.head_dim, one.window, one.skipped)
        layers.setdefault(key, []).append(layer)
    return tuple(
        KVGroup(
            layers=tuple(members),
            num_kv_heads=heads,
            head_dim=head_dim,
            block_size=block_size,
            window=window,
            encoding=_encoding(chooser.config),
            dtype=chooser.dtype,
            model=inspected.name,
        )
        for (heads, head_dim, window, _), members in layers.items()
    )


def _block_size(attention: Part | None, chooser: Chooser) -> int:
    legal = _block_sizes(attention, chooser) if attention is not None else ()
    wanted = chooser.config.kv_cache.block_size
    if wanted == "auto":
        block_size = DEFAULT_BLOCK_SIZE if not legal or DEFAULT_BLOCK_SIZE in legal else legal[0]
        chooser.decide("kv_cache.block_size", block_size, "the default that the attention allows")
        return block_size
    if legal and wanted not in legal and attention is not None:
        chooser.refuse(
            "block_size",
            f"kv_cache.block_size: {attention.name} has no blocks of {wanted} tokens;"
            f" allowed: {', '.join(map(str, legal))}",
            plugin=attention.origin.plugin,
        )
    return wanted


def _block_sizes(attention: Part, chooser: Chooser) -> tuple[int, ...]:
    """Block sizes of the attention backend; empty: any."""
    each = [requires.block_sizes for requires in chooser.met(attention)]
    return tuple(dict.fromkeys(size for sizes in each for size in sizes)) if all(each) else ()
