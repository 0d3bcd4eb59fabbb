"""Decides everything, and starts nothing. Does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pegboard.checkpoint_ref import locate
from pegboard.compose.inspecting import DrafterInspector
from pegboard.compose.making import parts_of
from pegboard.config import Config
from pegboard.errors import (
    CheckpointError,
    CompositionRefused,
    ConfigError,
    DuplicateName,
    InterfaceVersionRefused,
    ManifestInvalid,
    OptionsInvalid,
    PluginError,
    PluginNotInstalled,
)
from pegboard.interfaces.checkpoint import CheckpointFacts, TokenizerFacts
from pegboard.planner.ledger import Ledger, account
from pegboard.planner.probe import probe
from pegboard.planner.tensors import check_tensors
from pegboard.plugins.composition import Composition, Refusal
from pegboard.plugins.discovery import Catalog, discover
from pegboard.plugins.inspect import inspect_checkpoint, inspect_model
from pegboard.plugins.loader import options_of, resolve_model
from pegboard.plugins.model_plan import TARGET, InspectedModel
from pegboard.plugins.resolver import Inspected, resolve
from pegboard.regular_files import MAX_TEMPLATE_BYTES, read_text
from pegboard.sampling_defaults import SamplingDefaults, sampling_defaults


@dataclass(frozen=True)
class Prepared:
    """A composition that goes together and fits.

    Attributes:
        config: what was asked for.
        composition: what that means.
        ledger: what it will take.
        objects: interface to the object given instead of a name.
    """

    config: Config
    composition: Composition
    ledger: Ledger
    objects: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The checkpoint's defaults, for fields that a request leaves out."""
        facts = self.composition.target.facts
        return sampling_defaults(facts.generation, facts.path)


def prepare(
    config: Config,
    *,
    unusable: frozenset[tuple[str, str]] = frozenset(),
    **objects: Any,
) -> Prepared:
    """Decides everything, and starts nothing. Does not import torch.

    Args:
        config: what is wanted.
        unusable: (operation, kernel family) whose self-test failed on this machine.
        objects: interface name to what is used instead of a plugin: an object, its class, or a
            function that makes one of the interface's context (a list of them for `kernel`,
            `logits_processor`, `observer`). The attribute `manifest` of the class or function, in the
            schema of a manifest entry, says what it requires and promises.

    Raises:
        CompositionRefused: the parts do not go together or do not fit; it carries every reason.
        PluginNotInstalled, ManifestInvalid, InterfaceVersionRefused, DuplicateName, OptionsInvalid:
            that is the only reason.
        ConfigError, CheckpointError: the model cannot be found or read.
    """
    catalog = discover(config.plugins)
    objects_parts, _ = parts_of(objects)
    weights = [name for o in catalog.offers("checkpoint_source") for name in o.entry.files]
    path = locate(config.model, config.revision, weights)
    facts, source = inspect_checkpoint(catalog, path)
    shape, model = inspect_model(catalog, facts)
    text_facts = _text_facts(config, catalog, facts)
    inspected = Inspected(
        model_name=config.served_names[0],
        target=InspectedModel(TARGET, text_facts, source, shape, model, config.quantizer),
        drafter=DrafterInspector(config, catalog, shape, text_facts.tokenizer, weights),
        objects=objects_parts,
        unusable=unusable,
    )
    devices = probe()
    composition = resolve(config, inspected, devices, catalog)
    if isinstance(composition, list):
        raise _refusal(composition)
    refusals = _check_options(composition)
    if refusals:
        raise _refusal(refusals)
    accounted = account(composition, config, devices)
    refusals = [refusal for plan in composition.models for refusal in check_tensors(plan)]
    if isinstance(accounted, list):
        refusals += accounted
    if refusals or isinstance(accounted, list):
        raise _refusal(refusals)
    return Prepared(config, *accounted, objects)


def to_wire(prepared: Prepared) -> bytes:
    """The prepared engine as bytes, for another process; keys do not travel.

    Raises:
        ValueError: an object was given instead of a plugin, and cannot travel.
    """
    if prepared.objects:
        raise ValueError("objects cannot be sent to another process")
    keys = {"server": {"api_keys", "admin_keys"}}
    config = prepared.config.model_dump(mode="json", exclude=keys)
    return msgspec.json.encode((config, prepared.composition, prepared.ledger))


def from_wire(data: bytes) -> Prepared:
    """The prepared engine of `to_wire`; nothing is decided anew."""
    config, composition, ledger = msgspec.json.decode(data, type=_Wire)
    return Prepared(Config.from_values(config), composition, ledger)


_Wire = tuple[dict[str, Any], Composition, Ledger]


def _text_facts(config: Config, catalog: Catalog, facts: CheckpointFacts) -> CheckpointFacts:
    """The facts with the tokenizer that is used, what ends a text by it, and the defaults that hold.

    Raises:
        TokenizerError: the tokenizer cannot be used.
        CheckpointError: a default cannot be followed.
    """
    from pegboard.tokenizer import eos_token_id

    tokenizer = _tokenizer_facts(config, catalog, facts)
    eos_ids, sources = facts.eos_token_ids, dict(facts.eos_sources)
    own = eos_token_id(tokenizer)
    if own is not None:
        eos_ids = tuple(dict.fromkeys((*eos_ids, own)))
        sources["the tokenizer's eos_token"] = (own,)
    generation = facts.generation if config.generation_config == "auto" else {}
    sampling_defaults(generation, facts.path)
    return dataclasses.replace(
        facts,
        tokenizer=tokenizer,
        eos_token_ids=eos_ids,
        eos_sources=sources,
        generation=generation,
    )


def _tokenizer_facts(config: Config, catalog: Catalog, facts: CheckpointFacts) -> TokenizerFacts:
    """The checkpoint's tokenizer and chat template, or those that the config names instead."""
    tokenizer = facts.tokenizer
    if config.tokenizer != "auto":
        tokenizer = _named_tokenizer(config.tokenizer, catalog, tokenizer)
    if config.chat_template == "none":
        tokenizer = dataclasses.replace(tokenizer, chat_template=None)
    elif config.chat_template != "auto":
        if tokenizer.file is None:
            was = f"{config.chat_template}, but {facts.path} has no tokenizer"
            raise ConfigError("chat_template", was, fix="set tokenizer, or leave it out")
        try:
            template = read_text(Path(config.chat_template), limit=MAX_TEMPLATE_BYTES)
        except (OSError, ValueError) as problem:
            raise ConfigError("chat_template", str(problem), fix="name a jinja2 file") from None
        tokenizer = dataclasses.replace(tokenizer, chat_template=template)
    return tokenizer


def _named_tokenizer(ref: str, catalog: Catalog, own: TokenizerFacts) -> TokenizerFacts:
    """Another checkpoint's tokenizer, or one's own with another `tokenizer.json`."""
    try:
        path = locate(ref, None)
        if path.name == "tokenizer.json":
            return dataclasses.replace(own, file=str(path), eos_token_id=None, added_tokens=())
        return inspect_checkpoint(catalog, path)[0].tokenizer
    except CheckpointError as problem:
        raise ConfigError(
            "tokenizer", str(problem), fix="name a checkpoint, or a tokenizer.json"
        ) from None


def _refusal(refusals: Sequence[Refusal]) -> PluginError | CompositionRefused:
    """Every reason; an error of its own kind when there is one reason alone."""
    kinds: dict[str, type[PluginError]] = {
        "not_installed": PluginNotInstalled,
        "manifest_invalid": ManifestInvalid,
        "interface_version": InterfaceVersionRefused,
        "duplicate_name": DuplicateName,
        "options": OptionsInvalid,
    }
    only = refusals[0]
    if len(refusals) == 1 and only.code in kinds:
        key, _, message = only.message.partition(": ")
        return kinds[only.code](only.plugin, message, key=key, fix=only.fix)
    return CompositionRefused([str(refusal) for refusal in refusals])


def _check_options(composition: Composition) -> list[Refusal]:
    """Options that do not fit their models. Raises PluginError when a manifest's model cannot be had."""
    refusals = []
    for part in (
        *(part for plan in composition.models for part in plan.parts.values()),
        *composition.parts.values(),
        *(choice.part for plan in composition.models for choice in plan.kernels),
        *composition.logits_processors,
        *composition.observers,
    ):
        if part.entry.params is not None:
            resolve_model(part.entry.params, part.origin)
        try:
            options_of(part)
        except OptionsInvalid as problem:
            message = f"{problem.was} (plugin {problem.plugin!r}, {problem.origin})"
            if problem.allowed:
                message += f"; allowed: {problem.allowed}"
            refusals.append(
                Refusal(code="options", plugin=problem.plugin, message=message, fix=problem.fix)
            )
    return refusals
