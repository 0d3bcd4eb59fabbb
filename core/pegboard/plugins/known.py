"""Which distribution provides what, so that an error about a missing plugin can say what to install.

`known.toml` is generated from the manifests of this project's own plugins and is the one place in the
core that lists plugins.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources

from pegboard.plugins.manifest import Manifest

_HEADER = "# Generated from the manifests of the project's plugins; a test keeps it true.\n"


def suggestion(interface: str, name: str) -> str | None:
    """The distribution that provides a name, or reads a quantization method or checkpoint file."""
    return _known().get(interface, {}).get(name)


def generate(manifests: Iterable[Manifest]) -> str:
    """The text of `known.toml`."""
    table: dict[str, dict[str, str]] = {}
    for manifest in manifests:
        for entry in manifest.provides:
            names = (
                entry.name,
                *entry.methods,
                *entry.calibrators,
                *entry.files,
                *entry.architectures,
            )
            for name in names:
                table.setdefault(entry.interface, {})[name] = manifest.origin.distribution
    lines = [_HEADER]
    for interface in sorted(table):
        lines.append(f"[{interface}]\n")
        for name in sorted(table[interface]):
            lines.append(f'"{name}" = "{table[interface][name]}"\n')
        lines.append("\n")
    return "".join(lines).rstrip("\n") + "\n"


@cache
def _known() -> dict[str, dict[str, str]]:
    text = resources.files("pegboard.plugins").joinpath("known.toml").read_text(encoding="utf-8")
    known: dict[str, dict[str, str]] = tomllib.loads(text)
    return known
