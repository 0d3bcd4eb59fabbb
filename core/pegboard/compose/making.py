"""Objects of parts: by their plugins' factories, or as they were given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.config_values import shown
from pegboard.errors import ConfigError, ManifestInvalid
from pegboard.plugins.composition import Part
from pegboard.plugins.contracts import CONTRACTS
from pegboard.plugins.loader import options_of
from pegboard.plugins.manifest import OBJECT, Origin, Provides, entry_of
from pegboard.plugins.registry import Registry, check_product

SEVERAL = ("kernel", "logits_processor", "observer")
"""Interfaces of which an engine has several; a list of objects may be given."""

READ_FROM_FILES = ("checkpoint_source", "model", "command", "kv_transfer")
"""Interfaces that cannot be given as objects: what provides them is found by its manifest."""

Given = Mapping[tuple[str, str], Any]
"""Interface and part name to the object that was given for it."""


class Maker:
    """Makes a composition's objects.

    Args:
        registry: factories of the plugins that it names.
        given: objects that stand for parts.
    """

    def __init__(self, registry: Registry, given: Given) -> None:
        self._registry = registry
        self._given = given

    def make(self, part: Part, context: object) -> Any:
        """The object that was given for the part, or what its plugin's factory makes."""
        if part.origin.distribution == OBJECT:
            return self._given[part.entry.interface, part.name]
        return self._registry.build(part, context, options_of(part))

    def factory(self, part: Part) -> Any:
        """The part's factory itself, for one that is called while weights load."""
        return self._registry.factory(part)


def parts_of(objects: Mapping[str, Any]) -> tuple[dict[str, tuple[Part, ...]], Given]:
    """The parts that stand for objects given in Python, by interface, and the objects by part.

    Args:
        objects: interface to an object; to a list of them for `SEVERAL`.

    Raises:
        ConfigError: no such interface, or one that no object can stand for.
        InterfaceNotSatisfied, ManifestInvalid: an object does not fit its interface.
    """
    parts: dict[str, tuple[Part, ...]] = {}
    given: dict[tuple[str, str], Any] = {}
    for interface, thing in objects.items():
        allowed = [name for name in CONTRACTS if name not in READ_FROM_FILES]
        if interface not in allowed:
            raise ConfigError(interface, "cannot be an object", allowed=", ".join(allowed))
        listed = interface in SEVERAL and isinstance(thing, Sequence)
        made = [_part_of(interface, one, given) for one in (thing if listed else [thing])]
        parts[interface] = tuple(made)
    return parts, given


def _part_of(interface: str, thing: object, given: dict[tuple[str, str], Any]) -> Part:
    """The part of one object; its class's attribute `manifest` says what it requires and promises."""
    kind = type(thing)
    origin = Origin(
        plugin=kind.__name__, distribution=OBJECT, version="", module=kind.__module__, path=""
    )
    check_product(thing, interface, kind.__name__, origin)
    manifest = getattr(kind, "manifest", {})
    if not isinstance(manifest, Mapping):
        raise ManifestInvalid(
            origin.plugin,
            f"{kind.__name__}.manifest is {shown(manifest)}",
            origin=str(origin),
            allowed="a mapping in the schema of a manifest entry",
        )
    name = kind.__name__
    while (interface, name) in given:
        name += "'"
    said = {
        "version": max(CONTRACTS[interface].versions),
        "name": name,
        "summary": "an object",
        **manifest,
        "interface": interface,
    }
    entry = _unpromising(said) if "manifest" not in vars(kind) else entry_of(said, origin)
    given[interface, entry.name] = thing
    return Part(origin=origin, entry=entry, path=interface)


def _unpromising(said: Mapping[str, Any]) -> Provides:
    """The entry of an object without a manifest: it requires nothing and promises nothing."""
    return Provides(**{key: said[key] for key in ("interface", "version", "name", "summary")})
