"""What is installed, for `pegboard plugins` and for the commands that plugins add."""

from __future__ import annotations

from typing import Any

import msgspec

from pegboard.config import Config
from pegboard.plugins.composition import Part
from pegboard.plugins.discovery import Catalog, absent, discover
from pegboard.plugins.loader import load_plugins
from pegboard.plugins.manifest import Manifest, Origin


class Provided(msgspec.Struct, frozen=True):
    """One thing that a plugin provides."""

    interface: str
    name: str
    summary: str


class PluginListing(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `pegboard plugins`.

    Attributes:
        name: the plugin's.
        distribution, version, origin: what it was installed with, and where it lies.
        provides: by its manifest.
        problem: why it cannot be used; None: it can.
    """

    name: str
    distribution: str
    version: str
    origin: str
    provides: tuple[Provided, ...]
    problem: str | None = None


def list_plugins(config: Config | None = None) -> list[PluginListing]:
    """All installed plugins and the config's single files, sorted by name. Imports none."""
    plugins = config.plugins if config is not None else None
    catalog = discover(plugins.load, plugins.disable) if plugins is not None else discover()
    listings = [_listing(manifest) for manifest in catalog.manifests]
    listings += [_listing(manifest, "disabled by the config") for manifest in catalog.disabled]
    listings += [_broken(broken.origin, str(broken.error)) for broken in catalog.broken]
    return sorted(listings, key=lambda listing: listing.name)


def command_entries(catalog: Catalog | None = None) -> list[tuple[str, str]]:
    """Name and summary of the commands that plugins add. Imports none."""
    offers = (catalog or discover()).offers("command")
    return [(offer.entry.name, offer.entry.summary) for offer in offers]


def load_command(name: str) -> Any:
    """The typer application of a plugin's command; its plugin is imported.

    Raises:
        PluginError: the plugin cannot be used.
    """
    catalog = discover()
    offer = next(offer for offer in catalog.offers("command") if offer.entry.name == name)
    registry = load_plugins([catalog.manifest(offer.origin.plugin)])
    return registry.factory(Part(origin=offer.origin, entry=offer.entry))()


def _listing(manifest: Manifest, problem: str | None = None) -> PluginListing:
    provides = tuple(
        Provided(entry.interface, entry.name, entry.summary) for entry in manifest.provides
    )
    return _of(manifest.origin, provides, problem or _unmet(manifest))


def _broken(origin: Origin, problem: str) -> PluginListing:
    return _of(origin, (), problem)


def _of(origin: Origin, provides: tuple[Provided, ...], problem: str | None) -> PluginListing:
    return PluginListing(
        name=origin.plugin,
        distribution=origin.distribution,
        version=origin.version,
        origin=origin.path,
        provides=provides,
        problem=problem,
    )


def _unmet(manifest: Manifest) -> str | None:
    """What the things that the plugin provides would need, and is not there."""
    lacking = [absent(manifest.origin, entry.requires) for entry in manifest.provides]
    packages = sorted({name for names, _ in lacking for name in names})
    files = sorted({name for _, names in lacking for name in names})
    problems = []
    if packages:
        problems.append(f"needs packages that are not installed: {', '.join(packages)}")
    if files:
        problems.append(
            f"needs {', '.join(files)}, which its installation did not build:"
            " install a compiler, then the plugin again"
        )
    return "; ".join(problems) or None
