"""Choosing the kernel of each operation, and what that says about the numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pegboard.interfaces.kernel import OPERATIONS
from pegboard.plugins.choice import Chooser
from pegboard.plugins.composition import KernelChoice, Part
from pegboard.plugins.discovery import Offer
from pegboard.plugins.manifest import Operation


@dataclass(frozen=True)
class _Candidate:
    offer: Offer
    operation: Operation

    @property
    def rank(self) -> int:
        return self.offer.entry.priority


def choose_kernels(
    chooser: Chooser,
    formats: Sequence[str],
    wanted: str | Mapping[str, str],
    numerics: str,
    unusable: frozenset[tuple[str, str]],
) -> tuple[KernelChoice, ...]:
    """A kernel for each operation, `linear` once a weight format.

    Args:
        chooser: collects reasons and decisions.
        formats: weight formats that the quantizer yields.
        wanted: `auto`, a kernel family's name, or operation to name.
        numerics: `invariant`, `fast` or `auto`.
        unusable: (operation, family) whose self-test failed on this machine.
    """
    for operation in () if isinstance(wanted, str) else wanted:
        if operation not in OPERATIONS:
            chooser.refuse(
                "unknown_operation",
                f"kernels.{operation}: unknown operation; allowed: {', '.join(OPERATIONS)}",
            )
    choices = []
    for operation in OPERATIONS:
        name = wanted if isinstance(wanted, str) else wanted.get(operation, "auto")
        for weight_format in formats if operation == "linear" else ("float",):
            choice = _choose(chooser, operation, weight_format, name, numerics, unusable)
            if choice is not None:
                choices.append(choice)
    return tuple(choices)


def numerics_id(
    kernels: Sequence[KernelChoice], parts: Mapping[str, Part], dtype: str, encodings: Sequence[str]
) -> str:
    """Digest of everything that changes the numbers of KV and logits."""
    said = [dtype, *encodings]
    said += [f"{k.operation}/{k.format}={_signature(k.part)}" for k in kernels]
    said += [f"{name}={_signature(parts[name])}" for name in ("attention", "quantizer", "model")]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]


def _signature(part: Part) -> str:
    return f"{part.origin.distribution} {part.origin.version} {part.name} {sorted(part.options.items())}"


def _choose(
    chooser: Chooser,
    operation: str,
    weight_format: str,
    name: str,
    numerics: str,
    unusable: frozenset[tuple[str, str]],
) -> KernelChoice | None:
    candidates = [
        candidate
        for candidate in _candidates(chooser, operation, weight_format)
        if (operation, candidate.offer.entry.name) not in unusable
    ]
    of_name = [c for c in candidates if c.offer.entry.name == name]
    families = {offer.entry.name for offer in chooser.catalog.offers("kernel")}
    named = name != "auto" and bool(of_name)
    if name != "auto" and name not in families:
        chooser.refuse(
            "not_installed",
            f"kernels: no installed plugin provides {name!r}; installed: {', '.join(sorted(families))}",
        )
        return None
    if named:
        candidates = of_name
    if numerics == "invariant":
        candidates = [c for c in candidates if c.operation.row_invariant]
    if not candidates:
        promise = " that promises row_invariant" if numerics == "invariant" else ""
        chooser.refuse(
            "no_kernel",
            f"no kernel{promise} for {operation} on {weight_format} weights in {chooser.dtype}"
            f" on {chooser.device.kind}",
            fix="numerics: auto" if numerics == "invariant" else "",
        )
        return None
    invariant = [c for c in candidates if c.operation.row_invariant]
    pool = invariant if numerics == "auto" and invariant else candidates
    best = max(pool, key=lambda candidate: candidate.rank)
    part = Part(origin=best.offer.origin, entry=best.offer.entry, path="kernels")
    return KernelChoice(
        operation=operation,
        format=weight_format,
        part=part,
        row_invariant=best.operation.row_invariant,
        named=named,
    )


def _candidates(chooser: Chooser, operation: str, weight_format: str) -> list[_Candidate]:
    return [
        _Candidate(offer, offered)
        for offer in chooser.catalog.offers("kernel")
        if offer.entry.priority >= 0 and not chooser.misfits(offer.entry.requires)
        for offered in offer.entry.operations
        if offered.operation == operation
        and weight_format in offered.formats
        and chooser.device.kind in offered.devices
        and (not offered.dtypes or chooser.dtype in offered.dtypes)
    ]
