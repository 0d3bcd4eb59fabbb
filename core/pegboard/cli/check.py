"""`pegboard check`: whether model, plugins and machine go together; each choice and its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from pegboard.cli.options import LoadLimit
from pegboard.cli.output import print_json, print_lines, print_tracebacks
from pegboard.config import Config
from pegboard.config_values import shown
from pegboard.errors import CompositionRefused, UserError
from pegboard.interfaces.kernel import JOINT_OPERATIONS
from pegboard.planner.ledger import Ledger, size_text
from pegboard.plugins.composition import Composition, KernelChoice, Part
from pegboard.plugins.functions import ask
from pegboard.plugins.inspect import undeclared_keys
from pegboard.plugins.listing import unsettled
from pegboard.plugins.loader import options_of

if TYPE_CHECKING:
    from pegboard.compose import Prepared

_KEYS = {"kv_allocator": "kv_cache.allocator", "speculation_policy": "drafter.policy"}
"""The config's key of an interface, where it is not the interface's name."""
_REASONS = {
    "checkpoint_source": "reads the checkpoint's files",
    "model": "builds the checkpoint's architecture",
    "threads": "cores that this process may use",
}
"""Reasons for choices that no decision tells."""
_INPUTS = {
    "": "inputs as they are",
    "static": "inputs rounded to {codes} by the checkpoint's scale",
    "dynamic": "inputs rounded to {codes} by a scale of each token",
    "grouped": "inputs rounded to int8 by a scale of each token and 32 inputs",
}
"""How a linear layer's inputs are computed, by the second half of its weights' format."""


def check(
    config: Config,
    load: Annotated[
        bool, typer.Option("--load", help="Import the plugins and make all parts, in a process.")
    ] = False,
    load_limit: LoadLimit = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say in a second whether a config will run, what was chosen for it, and why."""
    from pegboard.cli.check_text import text_report
    from pegboard.compose import prepare

    try:
        prepared = prepare(config)
        text = text_report(prepared)
        if load:
            _load(prepared, load_limit)
    except UserError as error:
        if not as_json:
            raise
        reasons = error.reasons if isinstance(error, CompositionRefused) else (str(error),)
        print_json({"refusals": list(reasons)})
        raise typer.Exit(2) from None
    found = report(config, prepared.composition, prepared.ledger)
    found["text"] = text
    found["left_out"] = unsettled(config.plugins)
    if as_json:
        print_json(found)
    else:
        print_lines(_lines(found))


def _load(prepared: Prepared, limit_s: float | None) -> None:
    """Raises CompositionRefused with what does not work when the parts are made."""
    from pegboard.compose.trial import LIMIT_S, try_composition

    findings = try_composition(prepared, limit_s or LIMIT_S).findings
    print_tracebacks(finding.traceback for finding in findings)
    if findings:
        raise CompositionRefused([str(finding) for finding in findings])


def report(config: Config, composition: Composition, ledger: Ledger) -> dict[str, Any]:
    """The composition and its decisions, as plain values."""
    why = {decision.key: decision.why for decision in composition.decisions}
    target = composition.target
    return {
        "model": composition.model_name,
        "checkpoint": target.facts.path,
        "architecture": target.shape.architecture,
        "dtype": _value(config, why, "dtype", composition.dtype),
        "device": _value(config, why, "device", composition.device),
        "threads": _value(config, why, "threads", composition.num_threads),
        "max_model_len": _value(config, why, "max_model_len", composition.max_model_len),
        "max_step_ms": _value(config, why, "scheduler.max_step_ms", composition.max_step_ms),
        "depth": _value(config, why, "executor.depth", composition.depth),
        "block_sizes": [group.block_size for group in composition.groups],
        "verify_kv": composition.verifies_kv,
        "parts": [
            _part(config, why, interface, part)
            for interface, part in (*target.parts.items(), *composition.parts.items())
        ],
        "logits_processors": [part.name for part in composition.logits_processors],
        "observers": [part.name for part in composition.observers],
        "notes": _notes(composition),
        "undeclared_keys": list(undeclared_keys(target.parts["model"], target.facts)),
        "kernels": [_kernel(config, choice) for choice in target.kernels],
        "verification": composition.verification,
        "numerics": composition.numerics,
        "not_promised": _not_promised(composition),
        "memory": {
            "entries": [msgspec.structs.asdict(entry) for entry in ledger.entries],
            "total_bytes": ledger.total_bytes,
            "device_bytes": ledger.device_bytes,
            "available_bytes": ledger.available_bytes,
            "num_full_sequences": round(ledger.num_full_sequences, 2),
        },
        "digest": composition.digest,
        "refusals": [],
    }


def _value(config: Config, why: Mapping[str, str], key: str, value: object) -> dict[str, Any]:
    return {"value": value, "why": why.get(key) or _origin(config, key, key)}


def _part(config: Config, why: Mapping[str, str], interface: str, part: Part) -> dict[str, Any]:
    key = _KEYS.get(interface, interface)
    return {
        "interface": interface,
        "name": part.name,
        "plugin": part.origin.plugin,
        "version": part.origin.version,
        "why": why.get(key) or _origin(config, interface, key),
    }


def _notes(composition: Composition) -> list[str]:
    """Notes on drafts, on the quantizer's options, and the quantizer's own on how the checkpoint runs."""
    quantizer = composition.target.parts["quantizer"]
    settled = _draft_notes(composition) + [
        f"{decision.key}: {decision.value}  ({decision.why})"
        for decision in composition.decisions
        if decision.key == "quantizer.options"
    ]
    if quantizer.entry.notes is None:
        return settled
    return [*settled, *ask(quantizer, "notes", composition.target.facts, options_of(quantizer))]


def _draft_notes(composition: Composition) -> list[str]:
    notes = [
        f"drafter: its model is {plan.facts.path} ({plan.shape.architecture}), read by quantizer"
        f" {plan.parts['quantizer'].name!r}"
        for plan in composition.models[1:]
    ]
    if not composition.num_speculative_tokens:
        return notes
    attention = composition.target.parts["attention"].name
    if not composition.target.masks_trees:
        notes.append(
            f"drafter: trees are cut to their first path: attention {attention!r} has no query_mask"
        )
    notes += [
        f"drafter: requests that use logits processor {name!r} run without drafts: it keeps a state that"
        " cannot be recomputed"
        for name in sorted(composition.stateful_processors)
    ]
    return notes


def inputs_of(weight_format: str) -> str:
    """How weights of a format take their inputs, in words."""
    codes, _, activations = weight_format.partition(":")
    return _INPUTS[activations].format(codes=codes)


def _kernel(config: Config, choice: KernelChoice) -> dict[str, Any]:
    if choice.operation in JOINT_OPERATIONS:
        joined = ", ".join(JOINT_OPERATIONS[choice.operation])
        why = f"joins {joined} and attention, in layers without biases and norms of q and k"
    elif choice.reference:
        why = "the reference, which is slow: nothing installed is made for these weights here"
    elif choice.named:
        why = "named in the config"
    elif config.numerics == "fast":
        why = "highest priority of what fits"
    elif choice.row_invariant:
        why = "highest priority of those that promise row_invariant"
    else:
        why = "highest priority of what fits; none promises row_invariant"
    return {
        "operation": choice.operation,
        "format": choice.format,
        "name": choice.part.name,
        "plugin": choice.part.origin.plugin,
        "row_invariant": choice.row_invariant,
        "inputs": inputs_of(choice.format),
        "why": why,
    }


def _origin(config: Config, thing: str, key: str) -> str:
    """The origin of a value that needed no decision."""
    if thing in ("checkpoint_source", "model"):
        return _REASONS[thing]
    section: Any = config
    for name in key.split("."):
        if name not in section.model_fields_set:
            return _REASONS.get(thing, "the default")
        section = getattr(section, name)
    return "named in the config"


def _not_promised(composition: Composition) -> list[str]:
    """The kernels, and the attention backend, by which numbers depend on the batch."""
    loose = [
        f"{choice.operation} ({choice.format}): {choice.part.name}"
        for choice in composition.target.kernels
        if not choice.row_invariant
    ]
    attention = composition.target.parts["attention"]
    if "row_invariant" not in attention.entry.promises:
        loose.append(f"attention: {attention.name}")
    return loose


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    from pegboard.cli.check_text import text_lines

    yield f"model          {found['model']}  ({found['architecture']})"
    yield f"checkpoint     {found['checkpoint']}"
    for key in ("dtype", "device", "threads", "max_model_len"):
        yield f"{key:<14} {found[key]['value']}  ({found[key]['why']})"
    step = found["max_step_ms"]
    limit = "none" if step["value"] is None else f"{step['value']} ms"
    yield f"max_step_ms    {limit}  ({step['why']})"
    yield f"depth          {found['depth']['value']}  ({found['depth']['why']})"
    yield f"block size     {', '.join(map(str, found['block_sizes']))} tokens"
    yield from text_lines(found["text"])
    if found["verify_kv"]:
        yield "kv_cache       verify: each hit's blocks are read and compared first, which is slow"
    yield ""
    yield "parts"
    for part in found["parts"]:
        name, plugin = part["name"], f"{part['plugin']} {part['version']}".strip()
        yield f"  {part['interface']:<18}  {name:<14}  {plugin:<18}  {part['why']}"
    for key in ("logits_processors", "observers"):
        yield f"  {key:<18}  {', '.join(found[key]) or 'none'}"
    yield ""
    if found["undeclared_keys"]:
        names = ", ".join(map(shown, found["undeclared_keys"]))
        yield f"keys of the model's config that no known config declares: {names}"
        yield ""
    for heading, lines in (("notes", found["notes"]), ("not used", found["left_out"])):
        if lines:
            yield heading
            yield from (f"  {line}" for line in lines)
            yield ""
    yield "kernels"
    for kernel in found["kernels"]:
        operation = f"{kernel['operation']} ({kernel['format']})"
        promise = "row_invariant" if kernel["row_invariant"] else "fast"
        why = kernel["why"]
        if kernel["operation"] == "linear" and kernel["format"] != "float":
            why += f"; {kernel['inputs']}"
        yield f"  {operation:<23}  {kernel['name']:<14}  {promise:<18}  {why}"
    yield ""
    yield from _numerics_lines(found)
    yield ""
    yield from _memory_lines(found["memory"])


def _numerics_lines(found: Mapping[str, Any]) -> Iterator[str]:
    if found["verification"] == "rejection":
        yield "verification   rejection: a drafter changes tokens, not their distribution"
        yield "  not promised: the same tokens without drafts, in any batch, after a preemption; those of a"
        yield "  seed come again only with the same drafts"
    if not found["not_promised"]:
        yield f"numerics       {found['numerics']}: a row's bits do not depend on the batch"
        return
    yield f"numerics       {found['numerics']}"
    yield "  not promised: the same bits for a row in any batch, because of"
    for loose in found["not_promised"]:
        yield f"    {loose}"


def _memory_lines(memory: Mapping[str, Any]) -> Iterator[str]:
    yield "memory"
    for entry in memory["entries"]:
        yield f"  {size_text(entry['num_bytes']):>10}  {entry['name']}  ({entry['plugin']})"
    yield (
        f"  {size_text(memory['total_bytes']):>10}  in all, of {size_text(memory['device_bytes'])};"
        f" {size_text(memory['available_bytes'])} free now"
    )
    yield f"  KV for {memory['num_full_sequences']:.1f} sequences of max_model_len at once"
