"""Which weights `pegboard quantize` quantizes, and how: a method's settings, by rules of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pegboard.errors import ConfigError, ConfigMistakes
from pegboard.interfaces.quantizer import Calibrator, WeightSpec
from pegboard.regular_files import MAX_SETTINGS_BYTES, read_text

Model = TypeVar("Model", bound=BaseModel)

KEPT_KINDS = ("embedding", "head")
"""Kinds that no method quantizes: they cost the most quality for the bytes."""


class Rule(BaseModel):
    """A rule for some weights.

    Attributes:
        match: a pattern of names (`*.mlp.down_proj`), as shells have them.
        kind: only weights of this kind; None: of any.
        keep: they stay as they are.
        settings: of the method, laid over those of the recipe.
    """

    model_config = ConfigDict(extra="forbid")

    match: str = "*"
    kind: Literal["linear", "embedding", "head"] | None = None
    keep: bool = False
    settings: dict[str, Any] = Field(default_factory=dict)

    def means(self, weight: WeightSpec) -> bool:
        """Whether the rule is about a weight."""
        return self.kind in (None, weight.kind) and fnmatchcase(weight.name, self.match)


class Recipe(BaseModel):
    """A recipe file.

    Attributes:
        method: of quantization; None: the command line says it.
        settings: of the method, for every weight.
        rules: the first that means a weight is the one that counts.
    """

    model_config = ConfigDict(extra="forbid")

    method: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    rules: list[Rule] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Choices:
    """The choice for each weight.

    Attributes:
        settings: of those that are quantized, by name, in the model's order.
        kept: names of the others.
    """

    settings: Mapping[str, Any]
    kept: tuple[str, ...]


def read_recipe(path: Path) -> Recipe:
    """The recipe in a YAML file.

    Raises:
        ConfigError: it cannot be read, or says what a recipe cannot say; each mistake with its path.
    """
    try:
        said = yaml.safe_load(read_text(path, limit=MAX_SETTINGS_BYTES))
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(str(path), f"cannot be read: {problem}", fix="name a file") from None
    except (yaml.YAMLError, RecursionError) as problem:
        raise ConfigError(str(path), f"not YAML: {problem}") from None
    return validated(Recipe, {} if said is None else said, path.name)


def validated(model: type[Model], said: object, where: str) -> Model:
    """The values, validated by a model. Other keys are refused.

    Args:
        model: of it.
        said: plain values.
        where: path of it, for errors.

    Raises:
        ConfigError: it does not fit, each mistake with its whole path.
    """
    try:
        return model.model_validate(said, extra="forbid")
    except ValidationError as problem:
        mistakes = [
            ConfigError(
                ".".join((where, *map(str, error["loc"]))),
                "no such setting" if error["type"] == "extra_forbidden" else error["msg"],
                allowed=", ".join(model.model_fields)
                if error["type"] == "extra_forbidden" and len(error["loc"]) == 1
                else "",
            )
            for error in problem.errors()
        ]
        raise mistakes[0] if len(mistakes) == 1 else ConfigMistakes(mistakes) from None


def choose(
    weights: Sequence[WeightSpec],
    recipe: Recipe,
    said: Mapping[str, Any],
    calibrator: type[Calibrator],
    where: str,
) -> Choices:
    """The choice for each weight.

    Args:
        weights: all of a model's.
        recipe: its rules; the first that means a weight counts.
        said: settings of the command line; they go before the recipe's own and after a rule's.
        calibrator: of the method.
        where: what the recipe's file is called, for errors.

    Raises:
        ConfigError: settings that the method does not have, a rule that means nothing or that
            quantizes what cannot be, or no weight to quantize.
    """
    model = calibrator.settings
    base = {**recipe.settings, **said}
    usual = validated(model, base, f"{where}.settings" if recipe.settings else "settings")
    by_rule = [
        validated(model, {**base, **rule.settings}, f"{where}.rules.{index}.settings")
        for index, rule in enumerate(recipe.rules)
    ]
    settings, kept, used = {}, [], set()
    for weight in weights:
        index = next((i for i, rule in enumerate(recipe.rules) if rule.means(weight)), None)
        used.add(index)
        if weight.kind in KEPT_KINDS or (index is not None and recipe.rules[index].keep):
            kept.append(weight.name)
        else:
            settings[weight.name] = usual if index is None else by_rule[index]
    _check_rules(recipe, used, where)
    if not settings:
        raise ConfigError(where, "keeps every weight", fix="let a rule quantize some")
    return Choices(settings, tuple(kept))


def _check_rules(recipe: Recipe, used: set[int | None], where: str) -> None:
    for index, rule in enumerate(recipe.rules):
        path = f"{where}.rules.{index}"
        if index not in used:
            raise ConfigError(
                path,
                f"means no weight: {rule.match!r}, or only those that rules before it mean",
                allowed="names as in the checkpoint (model.layers.0.mlp.down_proj)",
            )
        if rule.keep and rule.settings:
            raise ConfigError(path, "keeps weights and has settings", fix="say one of them")
        if rule.kind in KEPT_KINDS and not rule.keep:
            raise ConfigError(f"{path}.kind", f"{rule.kind} is always kept", fix="keep: true")
