"""What is read of models, and of what a drafter needs, before anything is resolved."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from pegboard.checkpoint_ref import locate
from pegboard.config import Choice, Config
from pegboard.errors import CheckpointError, ManifestFunctionFailed, OptionsInvalid
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.drafter import DrafterFacts
from pegboard.interfaces.model import ModelShape
from pegboard.plugins.composition import Part, Refusal
from pegboard.plugins.discovery import Catalog
from pegboard.plugins.functions import ask
from pegboard.plugins.guard import guarded
from pegboard.plugins.inspect import check_shape, inspect_checkpoint, inspect_model
from pegboard.plugins.loader import options_of
from pegboard.plugins.model_plan import InspectedDrafter, InspectedModel

DRAFT = "draft"
"""The drafter's own model."""


def inspected_model(
    name: str,
    facts: CheckpointFacts,
    source: Part,
    shape: ModelShape,
    model: Part | None,
    quantizer: Choice,
) -> InspectedModel:
    """A model as `resolve` takes it."""
    return InspectedModel(
        name=name,
        facts=facts,
        source=source,
        shape=shape,
        model=model,
        quantizer=quantizer,
        formats=partial(_formats, facts),
        alternatives=partial(_alternatives, facts),
    )


def inspect_drafter(
    part: Part,
    config: Config,
    catalog: Catalog,
    target: ModelShape,
    weights: Sequence[str],
) -> InspectedDrafter:
    """What a drafter says that it needs, and its model; or the reasons against them.

    Args:
        weights: patterns of files that hold weights.

    Raises:
        PluginError: a plugin is missing, or its function is at fault.
    """
    try:
        return _inspected(part, config, catalog, target, weights)
    except CheckpointError as problem:
        return _refused(part, "draft_model", f"drafter.model: {problem}")
    except OptionsInvalid:  # refused where all parts' options are checked
        return InspectedDrafter()


def _inspected(
    part: Part,
    config: Config,
    catalog: Catalog,
    target: ModelShape,
    weights: Sequence[str],
) -> InspectedDrafter:
    found = None
    if config.drafter.model is not None and "draft_model" in part.entry.promises:
        path = locate(config.drafter.model, None, weights)
        if part.entry.describe is None:
            return InspectedDrafter()
        found = inspect_checkpoint(catalog, path)
    if part.entry.describe is None:
        return InspectedDrafter()
    facts = None if found is None else found[0]
    wants: DrafterFacts = ask(part, "describe", facts, target, options_of(part))
    if wrong := [tap for tap in wants.taps if tap not in target.taps]:
        allowed = f"-1 to {target.taps[-1]}"
        return _refused(
            part, "taps", f"drafter {part.name!r} wants taps {wrong}; allowed: {allowed}"
        )
    if wants.shape is None:
        return InspectedDrafter(wants)
    if found is None:
        return _refused(
            part, "draft_model", f"drafter {part.name!r} needs a model", fix="name drafter.model"
        )
    facts, source = found
    model = None
    if isinstance(wants.shape, ModelShape):
        shape = wants.shape
        check_shape(shape, part)
    else:
        shape, model = inspect_model(catalog, facts)
    if shape.vocab_size != target.vocab_size and not wants.maps_vocabulary:
        return _refused(
            part,
            "vocabulary",
            f"drafter.model: {facts.path} has {shape.vocab_size} tokens and the target"
            f" {target.vocab_size}, and drafter {part.name!r} maps none to another",
        )
    quantizer = Choice(name=wants.quantizer)
    return InspectedDrafter(wants, inspected_model(DRAFT, facts, source, shape, model, quantizer))


def _refused(part: Part, code: str, message: str, fix: str = "") -> InspectedDrafter:
    refusal = Refusal(code=code, plugin=part.origin.plugin, message=message, fix=fix)
    return InspectedDrafter(refusals=(refusal,))


def _formats(facts: CheckpointFacts, quantizer: Part) -> tuple[str, ...]:
    """The weight formats that a quantizer makes of a checkpoint. None while its options do not fit,
    which is refused where all parts' options are checked."""
    said = quantizer.entry.formats
    if not isinstance(said, str):
        return said
    try:
        options = options_of(quantizer)
    except OptionsInvalid:
        return ()
    return tuple(ask(quantizer, "formats", facts, options))


def _alternatives(facts: CheckpointFacts, quantizer: Part) -> tuple[Part, ...]:
    """A quantizer with what its options may stand for, best first; as it is while they do not fit."""
    if quantizer.entry.alternatives is None:
        return (quantizer,)
    try:
        options = options_of(quantizer)
    except OptionsInvalid:
        return (quantizer,)
    settled = ask(quantizer, "alternatives", facts, options)
    with guarded(ManifestFunctionFailed, quantizer.origin, "taking its alternatives"):
        return tuple(
            msgspec.structs.replace(quantizer, options=one.model_dump(mode="json"))
            for one in settled
        )
