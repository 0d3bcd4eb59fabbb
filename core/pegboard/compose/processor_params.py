"""A request's parameters, validated for each logits processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ValidationError

from pegboard.errors import ManifestFunctionFailed, RequestError
from pegboard.plugins.composition import Composition, Part
from pegboard.plugins.guard import guarded
from pegboard.plugins.loader import resolve_model
from pegboard.request import SamplingParams


def processor_params(
    composition: Composition,
) -> Callable[[SamplingParams], dict[str, dict[str, Any]]]:
    """A function from a request's parameters to those of each logits processor that acts on it."""
    defaults = SamplingParams()
    parts = {part.name: part for part in composition.logits_processors}
    models = {name: (part.entry.fields, _params_model(part)) for name, part in parts.items()}
    idle = {name: _defaults(parts[name], model) for name, (_, model) in models.items()}

    def params_of(sampling: SamplingParams) -> dict[str, dict[str, Any]]:
        for name in sampling.processors:
            if name not in models:
                raise RequestError(
                    f"processors.{name}", "no such logits processor", allowed=", ".join(models)
                )
        acting = {}
        for name, (fields, model) in models.items():
            values = {
                key: getattr(sampling, key)
                for key in fields
                if getattr(sampling, key) != getattr(defaults, key)
            }
            values |= sampling.processors.get(name, {})
            if values or name in sampling.processors:
                validated = _validated(name, values, model)
                if validated != idle[name] or name in sampling.processors:
                    acting[name] = validated
        return acting

    return params_of


def _params_model(part: Part) -> type[BaseModel] | None:
    dotted = part.entry.params
    return None if dotted is None else resolve_model(dotted, part.origin)


def _defaults(part: Part, model: type[BaseModel] | None) -> dict[str, Any]:
    """Values that ask for nothing; none where the model has a required field."""
    if model is None or any(field.is_required() for field in model.model_fields.values()):
        return {}
    with guarded(
        ManifestFunctionFailed, part.origin, f"its params model {part.entry.params!r} of nothing"
    ):
        return model().model_dump()


def _validated(name: str, values: dict[str, Any], model: type[BaseModel] | None) -> dict[str, Any]:
    if model is None:
        return values
    try:
        takes_any = model.model_config.get("extra") == "allow"
        return model.model_validate(values, extra=None if takes_any else "forbid").model_dump()
    except ValidationError as problem:
        first = problem.errors()[0]
        path = ".".join(("processors", name, *map(str, first["loc"])))
        raise RequestError(path, first["msg"]) from None
