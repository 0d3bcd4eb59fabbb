"""What a checkpoint and its model are, by torch-free functions that manifests name."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from pegboard.errors import CheckpointError, PluginNotInstalled
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.model import ModelShape
from pegboard.plugins.composition import Part
from pegboard.plugins.discovery import Catalog, Offer
from pegboard.plugins.known import suggestion
from pegboard.plugins.loader import resolve_dotted


def inspect_checkpoint(catalog: Catalog, path: Path) -> tuple[CheckpointFacts, Part]:
    """The facts of a checkpoint at a file or folder, and the source that reads it.

    Raises:
        CheckpointError: no file there is one that an installed source reads, or it is damaged.
        PluginNotInstalled: a plugin that is not installed would read it.
    """
    names = [path.name] if path.is_file() else sorted(entry.name for entry in path.iterdir())
    offers = catalog.offers("checkpoint_source")
    for offer in sorted(offers, key=lambda offer: -offer.entry.priority):
        if any(fnmatch(name, pattern) for pattern in offer.entry.files for name in names):
            describe = resolve_dotted(offer.entry.describe or "", offer.origin)
            return describe(path), _part(offer)
    for name in names:
        pattern = f"*{Path(name).suffix}"
        distribution = suggestion("checkpoint_source", pattern)
        if distribution is not None:
            raise PluginNotInstalled(
                pattern.lstrip("*."),
                f"{path} needs it, and it is not installed",
                fix=f"pip install {distribution}",
            )
    raise CheckpointError(
        str(path),
        "no checkpoint found here",
        allowed=", ".join(pattern for offer in offers for pattern in offer.entry.files),
    )


def inspect_model(
    catalog: Catalog, facts: CheckpointFacts, replace: Mapping[str, str]
) -> tuple[ModelShape, Part]:
    """The shape of the checkpoint's model, and the family that builds it.

    Raises:
        CheckpointError: the config names no architecture, or one that nothing installed builds.
    """
    architectures = list(facts.config.get("architectures") or [])
    offers = catalog.offers("model")
    fitting = [
        offer
        for offer in offers
        if any(name in offer.entry.architectures for name in architectures)
    ]
    named = [
        offer
        for offer in fitting
        if replace.get(f"model.{offer.entry.name}", offer.origin.plugin) == offer.origin.plugin
    ]
    if named:
        best = max(named, key=lambda offer: offer.entry.priority)
        describe = resolve_dotted(best.entry.describe or "", best.origin)
        return describe(facts.config), _part(best)
    distribution = next(filter(None, (suggestion("model", name) for name in architectures)), None)
    raise CheckpointError(
        f"{facts.path}: architectures",
        ", ".join(architectures) or "none named",
        allowed=", ".join(name for offer in offers for name in offer.entry.architectures),
        fix=f"pip install {distribution}" if distribution else "",
    )


def _part(offer: Offer) -> Part:
    return Part(origin=offer.origin, entry=offer.entry)
