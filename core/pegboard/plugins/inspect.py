"""Inspects a checkpoint and its model, by torch-free functions that manifests name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from pegboard.config_values import shown
from pegboard.errors import CheckpointError, ManifestFunctionFailed, PluginNotInstalled
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.model import QUANTIZABLE, ModelShape, ParameterShape
from pegboard.plugins.claims import foremost, settled
from pegboard.plugins.composition import Part
from pegboard.plugins.discovery import Catalog
from pegboard.plugins.functions import ask
from pegboard.plugins.known import suggestion
from pegboard.plugins.manifest import Provides
from pegboard.plugins.model_keys import ReadConfig, check_heeded, check_model_type, undeclared


def inspect_checkpoint(catalog: Catalog, path: Path) -> tuple[CheckpointFacts, Part]:
    """The facts of a checkpoint at a file or folder, and the source that reads it.

    Raises:
        CheckpointError: no file there is one that an installed source reads, or it is damaged.
        PluginNotInstalled: a plugin that is not installed would read it.
        ManifestInvalid, InterfaceVersionRefused: one that is installed and broken would.
    """
    names = _names_in(path)

    def reads(entry: Provides) -> bool:
        return any(fnmatch(name, pattern) for pattern in entry.files for name in names)

    source = _provider(catalog, "checkpoint_source", str(path), reads)
    if source is not None:
        return ask(source, "describe", path), source
    for name in names:
        pattern = f"*{Path(name).suffix}"
        distribution = suggestion("checkpoint_source", pattern)
        for broken in catalog.broken:
            if broken.origin.distribution == distribution:
                raise broken.error
        if distribution is not None:
            raise PluginNotInstalled(
                pattern.lstrip("*."),
                f"{path} needs it, and it is not installed",
                fix=f"pip install {distribution}",
            )
    raise CheckpointError(
        str(path),
        "no checkpoint found here",
        allowed=_all(catalog, "checkpoint_source", "files"),
    )


def _names_in(path: Path) -> list[str]:
    """Names of the files of a checkpoint's folder, or of the file that it is."""
    try:
        return [path.name] if path.is_file() else sorted(entry.name for entry in path.iterdir())
    except OSError as problem:
        raise CheckpointError(
            str(path), f"cannot be read ({problem.strerror})", allowed="a folder or a file"
        ) from None


def inspect_model(catalog: Catalog, facts: CheckpointFacts) -> tuple[ModelShape, Part]:
    """The shape of the checkpoint's model, and the family that builds it.

    Raises:
        CheckpointError: the config names no architecture, or one that nothing installed builds.
    """
    architectures = facts.config.get("architectures") or []
    is_list = isinstance(architectures, list | tuple)
    if not is_list or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(
            f"{facts.path}: architectures", shown(architectures), allowed="a list of texts"
        )
    thing = f"{facts.path}: architectures"

    def builds(entry: Provides) -> bool:
        return any(name in entry.architectures for name in architectures)

    family = _provider(catalog, "model", thing, builds)
    if family is not None:
        shape, config = _described(family, facts)
        check_shape(shape, family)
        check_model_type(config, shape.architecture)
        check_heeded(config, shape.architecture)
        return with_stored_biases(shape, facts), family
    distribution = next(filter(None, (suggestion("model", name) for name in architectures)), None)
    fix = f"pip install {distribution}" if distribution else ""
    if not architectures:
        fix = "name the model's own in config.json"
    raise CheckpointError(
        thing,
        ", ".join(architectures) or "none named",
        allowed=_all(catalog, "model", "architectures"),
        fix=fix,
    )


def check_shape(shape: ModelShape, family: Part) -> None:
    """Raises ManifestFunctionFailed when there is nothing to plan with."""
    sizes = (shape.vocab_size, shape.hidden_size, shape.intermediate_size, shape.max_position)
    flat = [p.name for p in shape.parameters if p.kind in QUANTIZABLE and len(p.shape) != 2]
    wrong = ""
    if not shape.attention or not shape.parameters or min(sizes) < 1:
        wrong = "a model without layers or sizes"
    elif any(
        min(layer.num_heads, layer.num_kv_heads, layer.head_dim) < 1 for layer in shape.attention
    ):
        wrong = "a layer without heads"
    elif flat:
        wrong = f"a weight that is no matrix, {flat[0]!r}"
    if wrong:
        raise family.origin.error(
            ManifestFunctionFailed, f"its describe {family.entry.describe!r} answered {wrong}"
        )


def undeclared_keys(model: Part, facts: CheckpointFacts) -> tuple[str, ...]:
    """Keys of the checkpoint's config that its model does not act on, and that no known config
    declares: what they mean nobody here knows."""
    return undeclared(_described(model, facts)[1])


def _described(model: Part, facts: CheckpointFacts) -> tuple[ModelShape, ReadConfig]:
    """The shape, and the config with a record of what the family read of it."""
    config = ReadConfig(facts.config)
    return ask(model, "describe", config), config


def with_stored_biases(shape: ModelShape, facts: CheckpointFacts) -> ModelShape:
    """The shape with the biases of linear layers that the checkpoint has, though the config does not
    say so: tools that quantize write one for every layer."""
    known = {parameter.name for parameter in shape.parameters}
    parameters: list[ParameterShape] = []
    for parameter in shape.parameters:
        parameters.append(parameter)
        bias = parameter.name.removesuffix(".weight") + ".bias"
        if parameter.kind == "linear" and bias in facts.tensors and bias not in known:
            split = 0 if parameter.shard_axis == 0 else None
            parameters.append(ParameterShape(bias, parameter.shape[:1], "bias", split))
    return replace(shape, parameters=tuple(parameters))


def _provider(
    catalog: Catalog, interface: str, thing: str, provides: Callable[[Provides], bool]
) -> Part | None:
    """The part of highest priority that provides a thing; None: nothing installed does.

    Raises:
        CheckpointError: a plugin that the config disables would.
        DuplicateName: several plugins claim to be the one.
    """
    fitting = [offer for offer in catalog.offers(interface) if provides(offer.entry)]
    if not fitting:
        left_out = catalog.left_out(interface, provides)
        if left_out:
            raise CheckpointError(thing, "the plugin that reads it is disabled", fix=left_out)
        return None
    return settled(foremost(catalog, fitting), interface)


def _all(catalog: Catalog, interface: str, field: str) -> str:
    """The names in a field of all manifest entries of an interface."""
    return ", ".join(
        name for one in catalog.offers(interface) for name in getattr(one.entry, field)
    )
