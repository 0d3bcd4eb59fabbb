"""The hidden states that a drafter wants, against those that the model has."""

from __future__ import annotations

from itertools import islice
from operator import index

from pegboard.config_values import shown
from pegboard.errors import InterfaceNotSatisfied, PluginError
from pegboard.interfaces.drafter import Drafter
from pegboard.interfaces.model import ModelShape
from pegboard.plugins.composition import Composition, Part
from pegboard.plugins.guard import guarded


def taps_of(drafter: Drafter, part: Part, composition: Composition) -> tuple[int, ...]:
    """The hidden states that a drafter wants, each once, by number: as it described, or else as the object
    says.

    Args:
        part: the drafter's.

    Raises:
        InterfaceNotSatisfied: one of them is none of the model's, or they cannot be read.
    """
    if part.entry.describe is not None:
        return tuple(sorted(set(composition.drafter.taps)))
    shape = composition.target.shape
    most = len(shape.taps)
    with guarded(InterfaceNotSatisfied, part.origin, "reading its taps"):
        wanted = drafter.taps
        try:
            # One more than there are shows that there are too many; an iterator may have no end.
            taps = tuple(index(tap) for tap in islice(wanted, most + 1))
        except TypeError as problem:
            raise _refused(part, f"taps: {shown(wanted)}", shape) from problem
    for tap in taps:
        if tap not in shape.taps:
            raise _refused(part, f"taps: {tap}", shape)
    if len(taps) > most:
        raise _refused(part, f"more than {most} taps", shape)
    return tuple(sorted(set(taps)))


def _refused(part: Part, was: str, shape: ModelShape) -> PluginError:
    return part.origin.error(
        InterfaceNotSatisfied,
        f"drafter {part.name!r} wants {was}",
        allowed=f"layers 0 to {shape.num_layers - 1} of the model, -1 for the embedding's output,"
        f" {shape.num_layers} for the state after the final norm",
    )
