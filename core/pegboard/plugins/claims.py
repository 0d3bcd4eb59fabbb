"""Claims of several plugins: on the name of an entry point, on a name of an interface, or, with equal
priority, on `auto`. None of them wins by standing first: only `plugins.replace` settles it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pegboard.errors import DuplicateName
from pegboard.plugins.composition import Part
from pegboard.plugins.discovery import PLUGIN, Catalog
from pegboard.plugins.manifest import Origin


@dataclass(frozen=True)
class Claim:
    """Several plugins' claim to one thing.

    Attributes:
        key: as `plugins.replace` has it: `plugin.name`, `interface.name`, or `interface` alone.
        thing: what is claimed, in words.
        origins: by whom.
    """

    key: str
    thing: str
    origins: tuple[Origin, ...]

    def __str__(self) -> str:
        claimants = ", and by ".join(f"{one.plugin} ({one})" for one in self.origins)
        return f"{self.thing} is provided by several plugins: by {claimants}"

    @property
    def fix(self) -> str:
        """The setting that settles it."""
        names = [one.plugin for one in self.origins]
        if len(set(names)) < len(names):
            names = [one.distribution for one in self.origins]
        return "plugins.replace: " + " or ".join(f"{{{self.key}: {name}}}" for name in names)


def settled(found: Part | Claim, key: str, *, fix: str = "") -> Part:
    """The part that was found.

    Raises:
        DuplicateName: several plugins claim to have it; about a key of the config.
    """
    if isinstance(found, Claim):
        raise DuplicateName(found.origins[0].plugin, str(found), key=key, fix=fix or found.fix)
    return found


def claims_of(catalog: Catalog) -> list[Claim]:
    """All that is claimed twice among the installed plugins, used or not."""
    plugins = dict.fromkeys(manifest.origin.plugin for manifest in catalog.manifests)
    found = [claim for name in plugins if (claim := _of_plugin(catalog, name)) is not None]
    for interface in dict.fromkeys(e.interface for m in catalog.manifests for e in m.provides):
        offers = catalog.offers(interface)
        for _, same in groupby(offers, key=lambda offer: offer.entry.name):
            claim = _of_name(list(same))
            # Where the plugins' own names are the same, that is said already.
            if claim is not None and len({one.plugin for one in claim.origins}) > 1:
                found.append(claim)
    return found


def sole(catalog: Catalog, offers: Sequence[Part]) -> Part | Claim:
    """The one offer of a name, or the claims to it.

    Args:
        catalog: what is installed.
        offers: all of one interface and name; at least one.
    """
    return _of_plugin(catalog, offers[0].origin.plugin) or _of_name(offers) or offers[0]


def foremost(catalog: Catalog, fitting: Sequence[Part]) -> Part | Claim:
    """The offer of the highest priority, or the equal claims to be it.

    Args:
        catalog: what is installed.
        fitting: offers of one interface, of which `auto` may take any; at least one.
    """
    interface = fitting[0].entry.interface
    top = max(offer.entry.priority for offer in fitting)
    equal = [offer for offer in fitting if offer.entry.priority == top]
    preferred = catalog.settled.get(interface)
    equal = [offer for offer in equal if offer.origin == preferred] or equal
    first = equal[0]
    same_name = [offer for offer in fitting if offer.entry.name == first.entry.name]
    chosen = sole(catalog, same_name)
    if isinstance(chosen, Claim):
        return chosen
    rivals = [offer for offer in equal if offer.origin.owner != first.origin.owner]
    if not rivals:
        return chosen
    named = ", ".join(repr(name) for name in dict.fromkeys(o.entry.name for o in (first, *rivals)))
    origins = tuple(dict.fromkeys(offer.origin for offer in (first, *rivals)))
    return Claim(interface, f"what auto takes, with priority {top} each ({named}),", origins)


def _of_plugin(catalog: Catalog, name: str) -> Claim | None:
    origins = [m.origin for m in catalog.manifests if m.origin.plugin == name]
    return _claim(f"{PLUGIN}.{name}", f"a plugin {name!r}", origins)


def _of_name(offers: Sequence[Part]) -> Claim | None:
    entry = offers[0].entry
    origins = [offer.origin for offer in offers]
    return _claim(f"{entry.interface}.{entry.name}", f"{entry.interface} {entry.name!r}", origins)


def _claim(key: str, thing: str, origins: Sequence[Origin]) -> Claim | None:
    """The claim of several plugins; None: there is one."""
    claimants = tuple(dict.fromkeys(origins))
    return Claim(key, thing, claimants) if len(claimants) > 1 else None
