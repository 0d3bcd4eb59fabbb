"""Factories by interface and name, frozen after registration; makes the objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from pegboard.errors import FactoryFailed, InterfaceNotSatisfied
from pegboard.plugins.composition import Part
from pegboard.plugins.contracts import CONTRACTS
from pegboard.plugins.guard import guarded
from pegboard.plugins.manifest import Origin

FactoryKey = tuple[Origin, str, str]
"""Plugin, interface, name: two plugins may provide one name, and only one of them was chosen."""


class Registry:
    """The things that loaded plugins provide."""

    def __init__(self, factories: Mapping[FactoryKey, Callable[..., Any]]) -> None:
        self._factories: Mapping[FactoryKey, Callable[..., Any]] = MappingProxyType(dict(factories))

    def factory(self, part: Part) -> Callable[..., Any]:
        """The part's factory, as its plugin registered it."""
        entry = part.entry
        return self._factories[part.origin, entry.interface, entry.name]

    def build(self, part: Part, context: object, options: BaseModel | None = None) -> Any:
        """An object of the part's factory; see `make_part`."""
        return make_part(self.factory(part), part, context, options)


def make_part(
    factory: Callable[..., Any], part: Part, context: object, options: BaseModel | None = None
) -> Any:
    """An object that a factory makes.

    Args:
        factory: the part's.
        part: what is made.
        context: the interface's context.
        options: validated options, when the manifest entry names a model for them.

    Raises:
        UserError: raised by the factory, about what it was given.
        FactoryFailed: the factory raised anything else.
        InterfaceNotSatisfied: its product does not implement the interface.
    """
    entry, origin = part.entry, part.origin
    arguments = (context,) if options is None else (context, options)
    with guarded(FactoryFailed, origin, f"making {entry.interface} {entry.name!r}"):
        product = factory(*arguments)
        check_product(product, entry.interface, entry.name, origin)
    return product


def check_product(product: object, interface: str, name: str, origin: Origin) -> None:
    """Raises InterfaceNotSatisfied when the product does not implement the interface."""
    kind = CONTRACTS[interface].kind
    if isinstance(product, kind):
        return
    raise origin.error(
        InterfaceNotSatisfied,
        f"{interface} {name!r} is an object of {type(product).__name__}" + without(product, kind),
        allowed=f"a subclass of {kind.__module__}.{kind.__name__}",
    )


def without(thing: object, kind: type) -> str:
    """The methods of an interface that an object or a class does not have, in words; "": none."""
    asked: frozenset[str] = getattr(kind, "__abstractmethods__", frozenset())
    abstract: frozenset[str] = getattr(thing, "__abstractmethods__", frozenset())
    lacking = sorted(name for name in asked if name in abstract or not hasattr(thing, name))
    return f" without {', '.join(lacking)}" if lacking else ""
