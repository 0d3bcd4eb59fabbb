"""Choosing the kernel of each operation, and what that says about the numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pegboard.config import Choice, Config
from pegboard.interfaces.device import DeviceFacts
from pegboard.interfaces.kernel import JOINT_OPERATIONS, OPERATIONS, REJECTION_OPERATIONS
from pegboard.interfaces.kv import KVGroup
from pegboard.plugins.choice import Chooser, Wanted
from pegboard.plugins.claims import foremost
from pegboard.plugins.composition import KernelChoice, Part
from pegboard.plugins.manifest import Operation


def choose_kernels(
    chooser: Chooser, formats: Sequence[str], attention: Part | None
) -> tuple[KernelChoice, ...]:
    """A kernel for each operation, `linear` once a weight format.

    Args:
        chooser: its config says which (`auto`, a kernel family's name, or operation to name) and with
            what `numerics`; collects reasons and decisions.
        formats: weight formats that the quantizer yields.
        attention: the backend that was chosen.
    """
    wanted = chooser.config.kernels
    operations = _operations(chooser.config)
    for operation in () if isinstance(wanted, str) else wanted:
        if operation not in operations:
            chooser.refuse(
                "unknown_operation",
                f"kernels.{operation}: unknown operation; allowed: {', '.join(operations)}",
            )
    found = [
        _choose(chooser, operation, weight_format)
        for operation in operations
        for weight_format in (formats if operation == "linear" else ("float",))
    ]
    choices = [choice for choice in found if choice is not None]
    joint = [_joint(chooser, operation, choices, attention) for operation in JOINT_OPERATIONS]
    choices += [choice for choice in joint if choice is not None]
    return tuple(choices)


def _operations(config: Config) -> tuple[str, ...]:
    """The operations that the engine asks for."""
    rejects = config.drafter.verification == "rejection"
    return (*OPERATIONS, *REJECTION_OPERATIONS) if rejects else OPERATIONS


def check_all_used(chooser: Chooser, choices: Sequence[KernelChoice]) -> None:
    """Refuses a kernel family that was asked for and runs nothing. `choices` are those of all models."""
    wanted = chooser.config.kernels
    running = {choice.part.name for choice in choices}
    asked = [(f"kernel: {part.name}", part.name) for part in chooser.objects.get("kernel", ())]
    if isinstance(wanted, str) and wanted != "auto":
        asked.append((f"kernels: {wanted}", wanted))
    for thing, name in asked:
        if name not in running:
            chooser.refuse(
                "inactive",
                f"{thing} has no kernel that any model here would use",
                plugin=name,
                fix="leave it out",
            )


def settle_quantizer(
    chooser: Chooser,
    alternatives: Sequence[Part],
    formats: Callable[[Part], Sequence[str]],
) -> Part:
    """The first of a quantizer's alternatives whose weight formats all have a kernel that is no mere
    reference; else the last.

    Args:
        chooser: as `choose_kernels`.
        alternatives: the quantizer with one set of options each.
        formats: weight formats that a quantizer yields.
    """
    if len(alternatives) == 1:
        return alternatives[0]
    trial = replace(chooser, refusals=[], decisions=[])
    lacking: list[str] = []
    for part in alternatives:
        choices = {each: _choose(trial, "linear", each) for each in formats(part)}
        missing = [each for each, choice in choices.items() if choice is None or choice.reference]
        if not missing:
            break
        lacking += missing
    why = "every weight format has a kernel made for it"
    if lacking:
        why = f"nothing installed is made for {', '.join(dict.fromkeys(lacking))} weights here"
    value = ", ".join(f"{name}: {chosen}" for name, chosen in part.options.items())
    chooser.decide("quantizer.options", value, why)
    return part


def numerics_id(
    kernels: Sequence[KernelChoice],
    parts: Mapping[str, Part],
    device: DeviceFacts,
    dtype: str,
    groups: Sequence[KVGroup],
) -> str:
    """Digest of everything that changes the numbers of KV and logits. A device's features count:
    kernels choose their instructions by them, and with those their rounding."""
    said = [device.kind, dtype, *sorted(device.features), *map(str, groups)]
    said += [f"{k.operation}/{k.format}={_signature(k.part)}" for k in kernels]
    said += [
        f"{name}={_signature(parts[name])}"
        for name in ("attention", "quantizer", "model")
        if name in parts
    ]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]


def _signature(part: Part) -> str:
    return f"{part.origin.distribution} {part.origin.version} {part.name} {sorted(part.options.items())}"


def _choose(chooser: Chooser, operation: str, weight_format: str) -> KernelChoice | None:
    """An object's kernel, the one that the config names, or the best that fits."""
    needed = (operation, weight_format)
    name = _name_of(chooser, operation)
    for part in chooser.objects.get("kernel", ()):
        for offered in part.entry.operations:
            if _serves(chooser, offered, needed):
                if not isinstance(chooser.config.kernels, str) and name != "auto":
                    chooser.refuse_beside_object(f"kernels.{operation}", name, part)
                return _choice(part, offered, needed, named=True)
    if name == "auto":
        return _best(chooser, needed)
    return _named(chooser, name, needed)


def _joint(
    chooser: Chooser, operation: str, choices: Sequence[KernelChoice], attention: Part | None
) -> KernelChoice | None:
    """The kernel of a joint operation, by the family that was chosen for all that it joins and whose
    plugin provides the attention too."""
    joined = [choice for choice in choices if choice.operation in JOINT_OPERATIONS[operation]]
    plugins = {choice.part.origin for choice in joined}
    families = {choice.part.name for choice in joined}
    if attention is None or plugins != {attention.origin} or len(families) != 1:
        return None
    if (operation, joined[0].part.name) in chooser.unusable:
        return None
    formats = {choice.format for choice in joined}
    needs_invariance = all(choice.row_invariant for choice in joined)
    for offered in joined[0].part.entry.operations:
        if needs_invariance and not offered.row_invariant:
            continue
        if formats <= set(offered.formats) and _serves(chooser, offered, (operation, "float")):
            needed = (operation, "float")
            return _choice(joined[0].part, offered, needed, named=False)
    return None


def _name_of(chooser: Chooser, operation: str) -> str:
    wanted = chooser.config.kernels
    return wanted if isinstance(wanted, str) else wanted.get(operation, "auto")


def _best(chooser: Chooser, needed: tuple[str, str]) -> KernelChoice | None:
    """The fitting kernel of highest priority, among row-invariant ones if there are any."""
    operation = needed[0]
    candidates = [
        (offer, offered)
        for offer in chooser.catalog.offers("kernel")
        if offer.entry.priority >= 0 and (operation, offer.entry.name) not in chooser.unusable
        if not chooser.misfits(offer)
        for offered in offer.entry.operations
        if _serves(chooser, offered, needed)
    ]
    invariant = [(offer, offered) for offer, offered in candidates if offered.row_invariant]
    if chooser.config.numerics == "invariant" or (chooser.config.numerics == "auto" and invariant):
        candidates = invariant
    if not candidates:
        _refuse_for_lack(chooser, needed)
        return None
    offers = [offer for offer, _ in candidates]
    chosen = chooser.settle(f"kernels.{operation}", foremost(chooser.catalog, offers))
    if chosen is None:
        return None
    offered = next(offered for offer, offered in candidates if offer == chosen)
    return _choice(chosen, offered, needed, named=False)


def _named(chooser: Chooser, name: str, needed: tuple[str, str]) -> KernelChoice | None:
    """The named family's kernel. A family that is named for all operations leaves those that it
    does not have to `auto`."""
    part = chooser.named(Wanted("kernel", "kernels", Choice(name=name)))
    if part is None:
        return None
    for offered in part.entry.operations:
        if _serves(chooser, offered, needed) and (
            offered.row_invariant or chooser.config.numerics != "invariant"
        ):
            return _choice(part, offered, needed, named=True)
    if isinstance(chooser.config.kernels, str) and _serves_something(chooser, part):
        choice = _best(chooser, needed)
        if choice is not None:
            why = f"{name} has none that fits"
            chooser.decide(f"kernels.{needed[0]}", choice.part.name, why)
        return choice
    _refuse_for_lack(chooser, needed, name)
    return None


def _serves(chooser: Chooser, offered: Operation, needed: tuple[str, str]) -> bool:
    operation, weight_format = needed
    return (
        offered.operation == operation
        and weight_format in offered.formats
        and chooser.device.kind in offered.devices
        and (not offered.dtypes or chooser.dtype in offered.dtypes)
    )


def _choice(
    part: Part, offered: Operation, needed: tuple[str, str], *, named: bool
) -> KernelChoice:
    return KernelChoice(
        operation=needed[0],
        format=needed[1],
        part=part,
        row_invariant=offered.row_invariant,
        named=named,
        reference=offered.reference,
    )


def _serves_something(chooser: Chooser, part: Part) -> bool:
    return any(
        _serves(chooser, offered, (offered.operation, weight_format))
        for offered in part.entry.operations
        for weight_format in offered.formats
    )


def _refuse_for_lack(chooser: Chooser, needed: tuple[str, str], name: str = "") -> None:
    operation, weight_format = needed
    invariant = chooser.config.numerics == "invariant"
    chooser.refuse(
        "no_kernel",
        f"kernels.{operation}: {f'{name} has no' if name else 'nothing installed has a'} kernel"
        + (" that promises row_invariant" if invariant else "")
        + f" for {weight_format} weights in {chooser.dtype} on {chooser.device.kind}",
        plugin=name,
        fix="numerics: auto"
        if invariant
        else chooser.catalog.left_out(
            "kernel", lambda entry: any(_serves(chooser, o, needed) for o in entry.operations)
        ),
    )
