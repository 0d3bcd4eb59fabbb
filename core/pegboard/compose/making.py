"""Objects of parts: by their plugins' factories, or as they were given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from pegboard.plugins.composition import (
    Composition,
    Part,
)
from pegboard.plugins.loader import resolve_dotted
from pegboard.plugins.registry import Registry, validate_options

if TYPE_CHECKING:
    pass


def make(registry: Registry, part: Part, context: object) -> Any:
    """What the part's factory makes of a context and its validated options."""
    return registry.build(part, context, options_of(part))


def build_part(
    registry: Registry,
    composition: Composition,
    objects: Mapping[str, Any],
    interface: str,
    context: object,
) -> Any:
    """The interface's object: the one that was given, or one that its plugin's factory makes."""
    if interface in objects:
        return objects[interface]
    return make(registry, composition.parts[interface], context)


def options_of(part: Part) -> BaseModel | None:
    """The part's options, validated; None when it takes none."""
    dotted = part.entry.options
    model = None if dotted is None else resolve_dotted(dotted, part.origin)
    return validate_options(part, model)
