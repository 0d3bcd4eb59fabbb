"""A drafter's context in a worker, and the hidden states that it wants."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from operator import index
from typing import TYPE_CHECKING

from pegboard.config_values import shown
from pegboard.errors import InterfaceNotSatisfied, PluginError
from pegboard.interfaces.checkpoint import CheckpointSource
from pegboard.interfaces.drafter import BuildLayers, Drafter, DrafterContext, DraftUnit
from pegboard.interfaces.kernel import Kernel
from pegboard.interfaces.model import ModelShape
from pegboard.plugins.composition import Composition, ModelPlan, Part
from pegboard.plugins.guard import guarded

if TYPE_CHECKING:
    import torch

    from pegboard.runner.draft_unit import DrafterModels
    from pegboard.runner.model_unit import UnitParts


@dataclass(frozen=True, kw_only=True)
class WorkerDrafterContext(DrafterContext):
    """The context of a worker's drafter.

    Attributes:
        drafter: whose.
        models: its side of the worker, once weights are loaded.
        target: the parts of the target's unit.
        plan, parts: its own model, and the parts of its unit; None: it has none.
    """

    drafter: Part
    models: DrafterModels
    target: UnitParts
    plan: ModelPlan | None
    parts: UnitParts | None

    def unit(
        self, shape: ModelShape, build: BuildLayers, source: CheckpointSource | None = None
    ) -> DraftUnit:
        plan, parts = self._planned()
        if "model" in plan.parts:
            raise self._refused("makes layers of its own", "describe answered the registry's")
        if shape != plan.shape:
            raise self._refused("makes layers of another shape", "the one that describe answered")
        if source is not None:
            parts.source.close()
        return self.models.make(replace(parts, build=build, source=source or parts.source))

    def load_model(self, ref: str, quantizer: str = "auto") -> DraftUnit:
        plan, parts = self._planned()
        if "model" not in plan.parts:
            raise self._refused("loads a model", "describe answered a shape of its own")
        if ref != self.model:
            raise self._refused(f"loads model {ref!r}", f"drafter.model: {self.model}")
        chosen = plan.parts["quantizer"].name
        if quantizer not in ("auto", chosen):
            raise self._refused(f"loads its model by quantizer {quantizer!r}", f"auto, {chosen}")
        return self.models.make(parts)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.models.target.embed(token_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.models.target.logits(hidden)

    def kernel(self, operation: str, weight_format: str = "float") -> Kernel:
        for parts in filter(None, (self.target, self.parts)):
            if operation == "linear" and weight_format in parts.linear_kernels:
                return parts.linear_kernels[weight_format]
            if operation in parts.kernels:
                return parts.kernels[operation]
        raise self._refused(
            f"asks for a kernel of {operation} on {weight_format} weights",
            f"linear on {', '.join(self.target.linear_kernels)}; {', '.join(self.target.kernels)}",
        )

    def _planned(self) -> tuple[ModelPlan, UnitParts]:
        """Its model, if it may be made now."""
        if self.plan is None or self.parts is None:
            raise self._refused("makes a model", "what its manifest's describe answers: none")
        if self.models.unit is not None:
            raise self._refused("makes a second model", "one")
        return self.plan, self.parts

    def _refused(self, was: str, allowed: str) -> PluginError:
        return refused(self.drafter, was, allowed)


def drafter_context(
    composition: Composition, models: DrafterModels, target: UnitParts, own: UnitParts | None
) -> WorkerDrafterContext:
    """The context of a composition's drafter."""
    plan = None if own is None else composition.plan(own.name)
    return WorkerDrafterContext(
        composition.num_speculative_tokens,
        target.shape.vocab_size,
        composition.max_num_seqs,
        composition.max_model_len,
        composition.draft_model,
        composition.dtype,
        target.device,
        composition.num_threads,
        target.shape,
        None if plan is None else plan.facts,
        () if plan is None else plan.groups,
        () if plan is None else plan.num_blocks,
        None if plan is None else plan.shape,
        drafter=composition.parts["drafter"],
        models=models,
        target=target,
        plan=plan,
        parts=own,
    )


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
    allowed = (
        f"layers 0 to {shape.num_layers - 1} of the model, -1 for the embedding's output,"
        f" {shape.num_layers} for the state after the final norm"
    )
    with guarded(InterfaceNotSatisfied, part.origin, "reading its taps"):
        wanted = drafter.taps
        try:
            # One more than there are shows that there are too many; an iterator may have no end.
            taps = tuple(index(tap) for tap in islice(wanted, most + 1))
        except TypeError as problem:
            raise refused(part, f"wants taps: {shown(wanted)}", allowed) from problem
    for tap in taps:
        if tap not in shape.taps:
            raise refused(part, f"wants taps: {tap}", allowed)
    if len(taps) > most:
        raise refused(part, f"wants more than {most} taps", allowed)
    return tuple(sorted(set(taps)))


def refused(drafter: Part, was: str, allowed: str) -> PluginError:
    """The error about what a drafter does or wants."""
    return drafter.origin.error(
        InterfaceNotSatisfied, f"drafter {drafter.name!r} {was}", allowed=allowed
    )
