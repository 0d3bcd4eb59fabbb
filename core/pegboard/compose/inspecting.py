"""A drafter's needs and model, read before anything is resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pegboard.checkpoint_ref import locate
from pegboard.compose.vocabularies import difference
from pegboard.config import Choice, Config
from pegboard.errors import CheckpointError, OptionsInvalid, TokenizerError
from pegboard.interfaces.checkpoint import CheckpointFacts, TokenizerFacts
from pegboard.interfaces.drafter import DrafterFacts
from pegboard.interfaces.model import ModelShape
from pegboard.plugins.composition import Part, Refusal
from pegboard.plugins.discovery import Catalog
from pegboard.plugins.functions import ask
from pegboard.plugins.inspect import check_shape, inspect_checkpoint, inspect_model
from pegboard.plugins.loader import options_of
from pegboard.plugins.model_plan import InspectedDrafter, InspectedModel

DRAFT = "draft"
"""The drafter's own model."""


@dataclass(frozen=True)
class DrafterInspector:
    """Asks a drafter what it needs, and inspects its model.

    Attributes:
        config, catalog: what is wanted, and what is installed.
        target: the target.
        tokenizer: of the target.
        weights: patterns of files that hold weights.
    """

    config: Config
    catalog: Catalog
    target: ModelShape
    tokenizer: TokenizerFacts
    weights: Sequence[str]

    def __call__(self, part: Part) -> InspectedDrafter:
        """The drafter's needs, or the reasons against them.

        Raises:
            PluginError: a plugin is missing, or its function is at fault.
        """
        try:
            return self._inspected(part)
        except (CheckpointError, TokenizerError) as problem:
            return _refused(part, "draft_model", f"drafter.model: {problem}")
        except OptionsInvalid:  # refused where all parts' options are checked
            return InspectedDrafter()

    def _inspected(self, part: Part) -> InspectedDrafter:
        target, ref = self.target, self.config.drafter.model
        facts, source = None, None
        if ref is not None and "draft_model" in part.entry.promises:
            try:
                path = locate(ref, None, self.weights)
            except CheckpointError as missing:
                return self._missing(part, ref, missing)
            if part.entry.describe is not None:
                facts, source = inspect_checkpoint(self.catalog, path)
        if part.entry.describe is None:
            return InspectedDrafter()
        wants: DrafterFacts = ask(part, "describe", facts, target, options_of(part))
        if wrong := [tap for tap in wants.taps if tap not in target.taps]:
            allowed = f"-1 to {target.taps[-1]}"
            return _refused(
                part, "taps", f"drafter {part.name!r} wants taps {wrong}; allowed: {allowed}"
            )
        if wants.shape is None:
            return InspectedDrafter(wants)
        if facts is None or source is None:
            return _refused(
                part,
                "draft_model",
                f"drafter {part.name!r} needs a model",
                fix="name drafter.model",
            )
        model = None
        if isinstance(wants.shape, ModelShape):
            shape = wants.shape
            check_shape(shape, part)
        else:
            shape, model = inspect_model(self.catalog, facts)
        problem = "" if wants.maps_vocabulary else self._vocabulary(facts, shape, model)
        if problem:
            return _refused(
                part,
                "vocabulary",
                f"drafter.model: {facts.path}: {problem}; drafter {part.name!r} maps none to another",
                fix="name a model that has the target's tokenizer",
            )
        quantizer = Choice(name=wants.quantizer)
        return InspectedDrafter(
            wants, InspectedModel(DRAFT, facts, source, shape, model, quantizer)
        )

    def _missing(self, part: Part, ref: str, problem: CheckpointError) -> InspectedDrafter:
        """The refusal of a model that is not there, with what would make it."""
        made_by = part.entry.made_by.replace("{target}", self.config.model).replace("{model}", ref)
        fixes = (problem.fix, made_by and f"make one: {made_by}")
        message = f"drafter.model: {ref}: {problem.was}"
        return _refused(part, "draft_model", message, fix="; or ".join(filter(None, fixes)))

    def _vocabulary(self, facts: CheckpointFacts, shape: ModelShape, model: Part | None) -> str:
        """Why ids of the drafter's model are not the target's; "": they are. Rows that pad an embedding
        are no tokens."""
        if (
            model is not None
            and facts.tokenizer.file is not None
            and self.tokenizer.file is not None
        ):
            return difference(self.tokenizer, facts.tokenizer)
        if shape.vocab_size == self.target.vocab_size:
            return ""
        return f"it has {shape.vocab_size} tokens and the target {self.target.vocab_size}"


def _refused(part: Part, code: str, message: str, fix: str = "") -> InspectedDrafter:
    refusal = Refusal(code=code, plugin=part.origin.plugin, message=message, fix=fix)
    return InspectedDrafter(refusals=(refusal,))
