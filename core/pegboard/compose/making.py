"""Objects of parts: by their plugins' factories, or as they were given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import isabstract
from typing import Any

from pegboard.config_values import shown
from pegboard.errors import ConfigError, InterfaceNotSatisfied, ManifestInvalid
from pegboard.plugins.composition import Composition, Part
from pegboard.plugins.contracts import CONTRACTS
from pegboard.plugins.loader import load_plugins, options_of
from pegboard.plugins.manifest import OBJECT, Origin, Provides
from pegboard.plugins.manifest_reader import entry_of
from pegboard.plugins.registry import check_product, make_part, without

SEVERAL = ("kernel", "logits_processor", "observer")
"""Interfaces of which an engine has several; a list of objects may be given."""

READ_FROM_FILES = ("checkpoint_source", "model", "command", "kv_transfer")
"""Interfaces that cannot be given as objects: what provides them is found by its manifest."""


class Maker:
    """Makes a composition's objects.

    Args:
        composition: whose parts; the plugins that it names are loaded.
        objects: what was given in Python instead of plugins; see `parts_of`.
    """

    def __init__(self, composition: Composition, objects: Mapping[str, Any]) -> None:
        self._registry = load_plugins(composition.manifests)
        self._given = parts_of(objects)[1]
        self._own: list[Any] = []

    def make(self, part: Part, context: object) -> Any:
        """The object that was given for the part, or what its factory makes."""
        if part.origin.distribution != OBJECT:
            return self._registry.build(part, context, options_of(part))
        given = self._given[part.entry.interface, part.name]
        if isinstance(given, CONTRACTS[part.entry.interface].kind):
            return given
        return make_part(given, part, context, options_of(part))

    def make_own(self, part: Part, context: object) -> Any:
        """As `make`, of a part that only one model can have.

        Raises:
            InterfaceNotSatisfied: it is an object, and another model has it.
        """
        made = self.make(part, context)
        if any(made is other for other in self._own):
            raise part.origin.error(
                InterfaceNotSatisfied,
                f"{part.entry.interface} is one object, and the drafter's model needs another",
                allowed="its class, or a function of its context",
                fix="give one of those",
            )
        self._own.append(made)
        return made

    def factory(self, part: Part) -> Callable[[Any], Any]:
        """Makes the part of a context, for one that is made while weights load: what is raised may be
        another part's fault, and passes."""
        factory = self._registry.factory(part)

        def make(context: Any) -> Any:
            product = factory(context)
            check_product(product, part.entry.interface, part.name, part.origin)
            return product

        return make


def parts_of(
    objects: Mapping[str, Any],
) -> tuple[dict[str, tuple[Part, ...]], dict[tuple[str, str], Any]]:
    """The parts that stand for what was given in Python, by interface, and what was given, by part.

    Args:
        objects: interface to an object, its class, or a function of the interface's context that makes
            one; to a list of them for `SEVERAL`.

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


def _part_of(interface: str, thing: Any, given: dict[tuple[str, str], Any]) -> Part:
    """The part of one object or factory; the attribute `manifest` of its class, or of the function,
    says what it requires and promises."""
    is_factory = not isinstance(thing, CONTRACTS[interface].kind)
    named = thing if is_factory and hasattr(thing, "__name__") else type(thing)
    origin = Origin(
        plugin=named.__name__, distribution=OBJECT, version="", module=named.__module__, path=""
    )
    if is_factory:
        _check_factory(thing, interface, origin)
    own = vars(named).get("manifest", {})  # a subclass need not keep what its parent promises
    if not isinstance(own, Mapping):
        raise origin.error(
            ManifestInvalid,
            f"{named.__name__}.manifest is {shown(own)}",
            allowed="a mapping in the schema of a manifest entry",
        )
    name = named.__name__
    while (interface, name) in given:
        name += "'"
    entry = _entry(own, interface, name, origin)
    given[interface, entry.name] = thing
    return Part(origin=origin, entry=entry, path=interface)


def _check_factory(thing: object, interface: str, origin: Origin) -> None:
    """Raises InterfaceNotSatisfied when it can make no object of the interface."""
    kind = CONTRACTS[interface].kind
    if isinstance(thing, type):
        makes_one = issubclass(thing, kind) and not isabstract(thing)
        what = f"the class {thing.__name__}"
    else:
        makes_one, what = callable(thing), f"an object of {type(thing).__name__}"
    if makes_one:
        return
    named = f"{kind.__module__}.{kind.__name__}"
    raise origin.error(
        InterfaceNotSatisfied,
        f"{interface} is {what}" + without(thing, kind),
        allowed=f"an object of {named}, its class, or a function of its context that makes one",
    )


def _entry(own: Mapping[str, Any], interface: str, name: str, origin: Origin) -> Provides:
    """The manifest entry; without one, the object requires and promises nothing."""
    said = {
        "version": max(CONTRACTS[interface].versions),
        "name": name,
        "summary": "an object",
        **own,
        "interface": interface,
    }
    return entry_of(said, origin)
