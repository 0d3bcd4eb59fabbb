"""Checks that the checkpoint has exactly the tensors that the model and the quantizer need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.dtypes import FLOAT_BYTES
from pegboard.interfaces.model import QUANTIZABLE, ModelShape, ParameterShape
from pegboard.interfaces.quantizer import StoredKVScales, WeightSpec
from pegboard.plugins.composition import ModelPlan, Refusal
from pegboard.plugins.functions import ask, named_function

HEAD = "lm_head."
SHOWN = 5


def weight_of(parameter: ParameterShape) -> WeightSpec:
    """The weight that a parameter of a quantizable kind belongs to."""
    rows, columns = parameter.shape
    return WeightSpec(parameter.name.removesuffix(".weight"), (rows, columns), parameter.kind)


def check_tensors(plan: ModelPlan) -> list[Refusal]:
    """A reason for each tensor that is missing, has another shape or dtype, or is unknown."""
    facts, shape = plan.facts, plan.shape
    needed = dict(_needed(plan))
    refusals = []
    for name, (wanted, dtype) in needed.items():
        fact = facts.tensors.get(name)
        if fact is None:
            refusals.append(_refusal("missing_tensor", facts, f"tensor {name!r} is missing"))
        elif fact.shape != wanted:
            message = f"tensor {name!r} has shape {list(fact.shape)}, not {list(wanted)}"
            refusals.append(_refusal("tensor_shape", facts, message))
        elif fact.format == "plain" and not _right_dtype(fact.dtype, dtype):
            message = f"tensor {name!r} is {fact.dtype}, not {dtype or 'floating point'}"
            refusals.append(_refusal("tensor_dtype", facts, message))
    named = needed.keys() | _kv_scales(plan)
    refusals += _unknown(facts, shape, sorted(facts.tensors.keys() - named))
    return _shortened(sorted(refusals, key=lambda refusal: (refusal.code, refusal.message)), facts)


def _unknown(facts: CheckpointFacts, shape: ModelShape, names: Sequence[str]) -> Iterator[Refusal]:
    """A reason for each tensor that nothing reads; one for all of a head that should be the embedding."""
    unread = [name for name in names if not any(fnmatch(name, one) for one in shape.ignored)]
    heads = [name for name in unread if shape.tied_embeddings and name.startswith(HEAD)]
    if heads:
        yield Refusal(
            code="tied_head",
            message=f"{facts.path}: tensor {heads[0]!r} is of an output head in codes, and"
            " tie_word_embeddings says that head and embedding are one",
            fix="tie_word_embeddings: false in config.json",
        )
    for name in unread:
        if name not in heads:
            message = f"tensor {name!r} is unknown to {shape.architecture}"
            yield _refusal("unknown_tensor", facts, message)


def _needed(plan: ModelPlan) -> Iterator[tuple[str, tuple[tuple[int, ...], str | None]]]:
    parameters = named_function(plan.parts["quantizer"], "parameters")
    for parameter in plan.shape.parameters:
        if parameter.kind not in QUANTIZABLE:
            yield parameter.name, (parameter.shape, None)
            continue
        weight = weight_of(parameter)
        for stored in parameters(weight, plan.facts):
            yield f"{weight.name}.{stored.name}", (stored.shape, stored.dtype)


def _kv_scales(plan: ModelPlan) -> set[str]:
    """Tensors with static scales of keys and values."""
    quantizer, facts = plan.parts["quantizer"], plan.facts
    if quantizer.entry.kv_scales is None:
        return set()
    stored: tuple[StoredKVScales, ...] = ask(quantizer, "kv_scales", facts)
    return {name for scales in stored for name in (scales.k, scales.v)}


def _right_dtype(dtype: str, wanted: str | None) -> bool:
    return dtype in FLOAT_BYTES if wanted is None else dtype == wanted


def _refusal(code: str, facts: CheckpointFacts, message: str) -> Refusal:
    return Refusal(code=code, message=f"{facts.path}: {message}")


def _shortened(refusals: list[Refusal], facts: CheckpointFacts) -> list[Refusal]:
    """A wrong config makes every tensor wrong: say some, and how many more there are."""
    kept: list[Refusal] = []
    for code in dict.fromkeys(refusal.code for refusal in refusals):
        same = [refusal for refusal in refusals if refusal.code == code]
        kept += same[:SHOWN]
        if len(same) > SHOWN:
            kept.append(_refusal(code, facts, f"{len(same) - SHOWN} more like the last"))
    return kept
