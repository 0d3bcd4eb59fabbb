"""The list of installed plugins, for `pegboard plugins` and for the commands that plugins add."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pegboard.config import PluginsConfig
from pegboard.errors import FactoryFailed
from pegboard.plugins.claims import Claim, claims_of, settled, sole
from pegboard.plugins.discovery import INSTALLED, absences, discover, missing
from pegboard.plugins.guard import guarded
from pegboard.plugins.loader import load_plugins
from pegboard.plugins.manifest import Manifest, Origin, Provides, Requires


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
        claims: what other plugins claim as well, a line each; an engine that would use it is refused.
        faults: what did not work when it was loaded, a line each with the kind of error.
        not_made: what was not made then, and why.
    """

    name: str
    distribution: str
    version: str
    origin: str
    provides: tuple[Provided, ...]
    problem: str | None = None
    claims: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    not_made: tuple[str, ...] = ()


DISABLED = "disabled by the config"
REPLACED = "left out by plugins.replace"


def list_plugins(plugins: PluginsConfig = INSTALLED) -> list[PluginListing]:
    """All installed plugins and the config's single files, sorted by name. Imports none."""
    catalog = discover(plugins)
    claims = claims_of(catalog)
    listings = [_listing(m.origin, _unmet(m), m.provides, claims) for m in catalog.manifests]
    listings += [_listing(m.origin, DISABLED, m.provides) for m in catalog.disabled]
    listings += [_listing(m.origin, REPLACED, m.provides) for m in catalog.replaced]
    listings += [_listing(broken.origin, str(broken.error)) for broken in catalog.broken]
    return sorted(listings, key=lambda listing: (listing.name, listing.distribution))


def loadable(plugins: PluginsConfig = INSTALLED) -> list[Manifest]:
    """The manifests of plugins that have all that they need."""
    return [manifest for manifest in discover(plugins).manifests if _unmet(manifest) is None]


def unsettled(plugins: PluginsConfig) -> list[str]:
    """A line for each plugin that is installed and left out because it cannot be used, and for each
    thing that several claim. Imports none."""
    catalog = discover(plugins)
    claims = [f"{claim}; fix: {claim.fix}" for claim in claims_of(catalog)]
    return claims + [str(broken.error) for broken in catalog.broken]


def command_entries() -> list[tuple[str, str]]:
    """Name and summary of the commands that plugins add. Imports none."""
    return [(offer.name, offer.entry.summary) for offer in discover().offers("command")]


def load_command(name: str, convert: Callable[[Any], Any]) -> Any:
    """A plugin's command; its plugin is imported.

    Args:
        name: the command's.
        convert: makes the command of the typer application that the plugin's factory returns.

    Raises:
        PluginError: the plugin cannot be used, or several provide the command.
    """
    catalog = discover()
    offers = [offer for offer in catalog.offers("command") if offer.entry.name == name]
    offer = settled(sole(catalog, offers), f"command {name!r}", fix="uninstall one of them")
    factory = load_plugins([catalog.manifest(offer.origin)]).factory(offer)
    with guarded(FactoryFailed, offer.origin, f"making command {name!r}"):
        return convert(factory())


def _listing(
    origin: Origin,
    problem: str | None,
    provides: Sequence[Provides] = (),
    claims: Sequence[Claim] = (),
) -> PluginListing:
    return PluginListing(
        name=origin.plugin,
        distribution=origin.distribution,
        version=origin.version,
        origin=origin.path,
        provides=tuple(Provided(one.interface, one.name, one.summary) for one in provides),
        problem=problem,
        claims=tuple(f"{one}; fix: {one.fix}" for one in claims if origin in one.origins),
    )


def _unmet(manifest: Manifest) -> str | None:
    """The needs of the plugin's parts that this machine does not meet: of alternatives, those of the one
    that lacks the least."""

    def num_missing(requires: Requires) -> int:
        return sum(map(len, missing(manifest.origin, requires)))

    nearest = [min(entry.requirements, key=num_missing) for entry in manifest.provides]
    lacking = [reason for one in nearest for reason in absences(manifest.origin, one)]
    return "; ".join(dict.fromkeys(lacking)) or None
