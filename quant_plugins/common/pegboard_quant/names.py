"""Matching names of modules with what a checkpoint's config says of them. Torch-free.

Names are those of the checkpoint (`model.layers.0.mlp.up_proj`). A config may spell a module as an
engine does that fuses it with its neighbours (`qkv_proj`, `gate_up_proj`), or with another prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pegboard.errors import CheckpointError
from pegboard.interfaces.model import ParameterKind

FUSED = {
    "q_proj": ("qkv_proj", "qkv"),
    "k_proj": ("qkv_proj", "qkv"),
    "v_proj": ("qkv_proj", "qkv"),
    "gate_proj": ("gate_up_proj",),
    "up_proj": ("gate_up_proj",),
}
"""Last part of a module's name to what it is called where it is fused."""

CLASSES: dict[ParameterKind, str] = {
    "linear": "Linear",
    "head": "Linear",
    "embedding": "Embedding",
}
"""A weight's kind to its module's class, as configs name classes."""

REGEX = "re:"


def spellings(module: str) -> tuple[str, ...]:
    """The module's own name first, then those of the fused modules that it is a part of."""
    parent, dot, last = module.rpartition(".")
    return (module, *(f"{parent}{dot}{name}" for name in FUSED.get(last, ())))


def rank(entry: str, module: str, kind: ParameterKind) -> int | None:
    """How narrowly an entry of `targets` or `ignore` names a module. 0: by its name (a prefix more or less
    on either side); 1: by `re:` and a pattern that its name begins with; 2: by its class; None: not at all.

    Raises:
        CheckpointError: the pattern is no regular expression.
    """
    if entry.startswith(REGEX):
        pattern = entry.removeprefix(REGEX)
        return 1 if any(begins_with(pattern, name) for name in spellings(module)) else None
    if any(_same(entry, name) for name in spellings(module)):
        return 0
    return 2 if entry == CLASSES.get(kind) else None


def is_any(entries: Iterable[str], module: str, kind: ParameterKind) -> bool:
    """Whether any of the entries means the module, as `rank`.

    Raises:
        CheckpointError: a pattern is no regular expression.
    """
    return any(rank(entry, module, kind) is not None for entry in entries)


def contains_any(entries: Iterable[str], module: str) -> bool:
    """Whether any of the entries is a part of the module's name, as `modules_to_not_convert` means it:
    one or more whole parts between its dots."""
    return any(
        f".{entry.strip('.')}." in f".{name}." for entry in entries for name in spellings(module)
    )


def begins_with(pattern: str, name: str) -> bool:
    """Whether a regular expression matches the beginning of a name.

    Raises:
        CheckpointError: it is no regular expression.
    """
    try:
        return re.match(pattern, name) is not None
    except (re.error, RecursionError, OverflowError) as problem:
        raise CheckpointError(
            f"quantization_config: pattern {pattern!r}",
            f"is no regular expression ({problem})",
            fix="get the checkpoint's config.json again",
        ) from None


def _same(entry: str, name: str) -> bool:
    return entry == name or name.endswith(f".{entry}") or entry.endswith(f".{name}")
