"""Checks of the chosen parts against each other, the model and the config."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from pegboard.config import Choice, Config, DrafterChoice
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.model import ModelShape
from pegboard.plugins.choice import INACTIVE, Chooser
from pegboard.plugins.composition import ModelPlan, Part
from pegboard.plugins.manifest import Provides


def reads(entry: Provides, facts: CheckpointFacts) -> list[str]:
    """Reasons why a quantizer does not read a checkpoint."""
    method = facts.quantization or "none"
    layout = layout_of(facts)
    if method in entry.methods or layout in entry.methods:
        return []
    return [f"reads {_named(entry.methods, method)}, and the checkpoint {_stored(facts)}"]


def unread(methods: Collection[str], facts: CheckpointFacts) -> str:
    """The refusal of a checkpoint that no quantizer reads; `methods` are those of all quantizers."""
    allowed = _named(sorted(methods), facts.quantization or "none")
    return f"the checkpoint {_stored(facts)}, which nothing installed reads; allowed: {allowed}"


def _stored(facts: CheckpointFacts) -> str:
    method = facts.quantization or "none"
    return "is not quantized" if method == "none" else f"is quantized by {layout_of(facts)}"


def _named(methods: Sequence[str], stored: str) -> str:
    """Methods in a few words: their layouts only where the checkpoint's is one of them."""
    names = (m if m.startswith(f"{stored}/") else m.partition("/")[0] for m in methods)
    return ", ".join(dict.fromkeys(names))


def layout_of(facts: CheckpointFacts) -> str:
    """`method/format` of a checkpoint whose method has several layouts; else its method."""
    method, said = facts.quantization or "none", facts.quantization_config
    layout = said.get("packing_format") or said.get("format")
    return f"{method}/{layout}" if isinstance(layout, str) else method


def attends(entry: Provides, shape: ModelShape, encoding: str) -> list[str]:
    """Reasons why an attention backend does not run a model's layers."""
    needs = {
        "window": any(layer.window is not None for layer in shape.attention),
        "soft_cap": any(layer.soft_cap is not None for layer in shape.attention),
        "skipped": any(layer.skipped for layer in shape.attention),
    }
    reasons = [
        f"has no {name}" for name, needed in needs.items() if needed and name not in entry.promises
    ]
    if encoding not in entry.encodings:
        reasons.append(f"has no KV encoding {encoding!r}; allowed: {', '.join(entry.encodings)}")
    return reasons


def check_parts(
    shape: ModelShape, parts: Mapping[str, Part], used: Sequence[Part], chooser: Chooser
) -> None:
    """Reasons against the parts together.

    Args:
        shape: the model.
        parts: by interface, those of which there is one.
        used: all of them, kernels, processors and observers included.
        chooser: knows what was asked for, and collects the reasons.
    """
    config = chooser.config
    _check_parallel(config, shape, chooser)
    _check_kv_transfer(config, chooser)
    _check_drafter(config, parts, chooser)
    _check_verify(config, parts, chooser)
    _check_numerics(config, parts, chooser)
    _check_features(used, chooser)
    for interface in ("model", "checkpoint_source"):
        chooser.refuse_misfits(interface, parts[interface])


def _check_parallel(config: Config, shape: ModelShape, chooser: Chooser) -> None:
    executors = [part.entry for part in chooser.objects.get("executor", ())]
    executors += [offer.entry for offer in chooser.catalog.offers("executor")]
    for kind in ("tensor_parallel", "pipeline_parallel"):
        size = getattr(config.executor, kind)
        if size == 1:
            continue
        promising = [entry.name for entry in executors if kind in entry.promises]
        reason = f"no installed executor promises {kind}"
        if promising:
            reason = f"a model runs on one device here, although {', '.join(promising)} promises it"
        chooser.refuse(
            "parallel", f"executor.{kind}: {size}, but {reason}", fix=f"executor.{kind}: 1"
        )
    if config.executor.tensor_parallel not in shape.tensor_parallel:
        chooser.refuse(
            "parallel",
            f"executor.tensor_parallel: the model cannot be split over"
            f" {config.executor.tensor_parallel} devices;"
            f" allowed: {', '.join(map(str, shape.tensor_parallel))}",
        )


def _check_kv_transfer(config: Config, chooser: Chooser) -> None:
    name, options = config.kv_transfer.name, config.kv_transfer.options
    if name != "none":
        chooser.refuse(
            "inactive",
            f"kv_transfer: {name}, but this engine moves no KV yet",
            fix="kv_transfer: none",
        )
    elif options:
        chooser.refuse(
            "inactive",
            "kv_transfer.options: 'none' takes no options",
            fix="leave out kv_transfer.options",
        )


def _check_drafter(config: Config, parts: Mapping[str, Part], chooser: Chooser) -> None:
    drafter = parts.get("drafter")
    if drafter is None:
        return
    if INACTIVE in drafter.entry.promises:
        _check_no_drafter(config.drafter, drafter, chooser)
        return
    if config.drafter.verification == "rejection":
        _check_rejection(config, drafter, chooser)
    if config.drafter.model is not None and "draft_model" not in drafter.entry.promises:
        chooser.refuse(
            "inactive",
            f"drafter.model: drafter {drafter.name!r} does nothing with {config.drafter.model!r}",
            plugin=drafter.origin.plugin,
            fix="leave out drafter.model",
        )


def _check_rejection(config: Config, drafter: Part, chooser: Chooser) -> None:
    if "probabilities" not in drafter.entry.promises:
        offers = [offer.entry for offer in chooser.catalog.offers("drafter")]
        able = [entry.name for entry in offers if "probabilities" in entry.promises]
        chooser.refuse(
            "inactive",
            f"drafter.verification: rejection, but drafter {drafter.name!r} does not promise"
            f" probabilities; installed ones that do: {', '.join(able) or 'none'}",
            plugin=drafter.origin.plugin,
            fix="leave out drafter.verification: guesses that are not drawn are kept as often without it",
        )
    if config.numerics == "invariant":
        chooser.refuse(
            "numerics",
            "numerics: invariant, but with drafter.verification: rejection tokens depend on the drafts,"
            " and with them on the batch",
            plugin=drafter.origin.plugin,
            fix="leave out drafter.verification",
        )


def _check_no_drafter(asked: DrafterChoice, none: Part, chooser: Chooser) -> None:
    """Reasons against what is asked of a drafter where there is none."""
    default = DrafterChoice()
    for key in ("model", "num_speculative_tokens", "policy", "verification"):
        said = getattr(asked, key)
        if said != getattr(default, key):
            value = said.name if isinstance(said, Choice) else said
            chooser.refuse(
                "inactive",
                f"drafter.{key}: {value}, but drafter {none.name!r} guesses nothing",
                fix=f"name a drafter, or leave out drafter.{key}",
            )
    for policy in chooser.objects.get("speculation_policy", ()):
        chooser.refuse(
            "inactive",
            f"speculation_policy: {policy.name} was given, but drafter {none.name!r} guesses nothing",
            fix="name a drafter",
        )


def _check_verify(config: Config, parts: Mapping[str, Part], chooser: Chooser) -> None:
    cache = parts.get("prefix_cache")
    if config.kv_cache.verify and cache is not None and INACTIVE in cache.entry.promises:
        chooser.refuse(
            "inactive",
            f"kv_cache.verify: true, but prefix_cache {cache.name!r} has no blocks to compare",
            plugin=cache.origin.plugin,
            fix="leave out kv_cache.verify, or name a prefix cache",
        )


def _check_features(used: Sequence[Part], chooser: Chooser) -> None:
    for part in used:
        for reason in chooser.lacking(part, all_chosen=True):
            chooser.refuse(
                "feature",
                f"{part.entry.interface} {part.name!r} {reason}",
                plugin=part.origin.plugin,
            )


def _check_numerics(config: Config, parts: Mapping[str, Part], chooser: Chooser) -> None:
    attention = parts.get("attention")
    if attention is not None and config.numerics == "invariant" and not _is_invariant(attention):
        chooser.refuse(
            "numerics",
            f"numerics: invariant, but attention {attention.name!r} does not promise row_invariant",
            plugin=attention.origin.plugin,
            fix="numerics: auto",
        )


def numerics_of(
    target: ModelPlan, verification: Literal["exact", "rejection"]
) -> Literal["invariant", "fast"]:
    """`invariant` where the target's attention and all its kernels promise it, and tokens depend on nothing
    else."""
    invariant = (
        verification == "exact"
        and _is_invariant(target.parts["attention"])
        and all(kernel.row_invariant for kernel in target.kernels)
    )
    return "invariant" if invariant else "fast"


def _is_invariant(attention: Part) -> bool:
    return "row_invariant" in attention.entry.promises
