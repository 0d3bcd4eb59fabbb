"""The entry points of what is installed. Nothing is imported, and whatever stands in a distribution's
metadata, the others are found."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path

from pegboard.errors import DuplicateName, ManifestInvalid, PluginError, described
from pegboard.plugins.manifest import Origin

GROUP = "pegboard"
CORE = "pegboard"
BUILTIN = "builtin"
"""The name of the core's own plugin, which no other may have."""


def installed_plugins() -> Iterator[tuple[Origin, PluginError | None]]:
    """The origin of each installed plugin, and the fault of its entry point; None: it has none."""
    seen: set[str] = set()
    for distribution in distributions():
        try:
            entry_points = [point for point in distribution.entry_points if point.group == GROUP]
        except Exception as problem:
            yield _unreadable(
                distribution, f"its entry points cannot be read: {described(problem)}"
            )
            continue
        if not entry_points:
            continue
        name, version = _said(distribution, "Name"), _said(distribution, "Version")
        if not name or not version:
            yield _unreadable(distribution, "its METADATA says no name and version")
            continue
        # A folder, and so a distribution's metadata, can stand twice on the path: the first counts.
        if normalized(name) not in seen:
            seen.add(normalized(name))
            folder = _folder(distribution)
            yield from (_plugin(point, name, version, folder) for point in entry_points)


def normalized(distribution: str) -> str:
    """A distribution's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def module_path(name: str) -> str | None:
    """The folder of a package, or the file of a module; "" where it has none; None: it does not exist.

    Its parents are not imported, as looking up a submodule's spec would.
    """
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
        walked = top
        for part in rest:
            if spec is None or spec.submodule_search_locations is None:
                return None
            walked = f"{walked}.{part}"
            spec = PathFinder.find_spec(walked, list(spec.submodule_search_locations))
        if spec is None:
            return None
        folder = next(iter(spec.submodule_search_locations or ()), None)
    except Exception:  # of a finder that others put on the path
        return None
    return str(folder or spec.origin or "")


def _plugin(
    point: EntryPoint, name: str, version: str, folder: str
) -> tuple[Origin, PluginError | None]:
    try:
        module = point.module
    except AttributeError:  # its value is no module's name
        module = ""
    origin = Origin(
        plugin=point.name,
        distribution=name,
        version=version,
        module=module,
        path=(module_path(module) or "") if module else folder,
        builtin=name == CORE,
    )
    if point.name == BUILTIN and not origin.builtin:
        return origin, origin.error(
            DuplicateName,
            "that name is the core's own, so this one is left out",
            fix=f"uninstall {name}, or rename its entry point",
        )
    if module:
        return origin, None
    return origin, origin.error(
        ManifestInvalid, f"its entry point is {point.value!r}", allowed="the name of a module"
    )


def _unreadable(distribution: Distribution, problem: str) -> tuple[Origin, PluginError]:
    folder = _folder(distribution)
    name = _said(distribution, "Name") or Path(folder).name.partition("-")[0]
    origin = Origin(
        plugin=name,
        distribution=name,
        version=_said(distribution, "Version"),
        module="",
        path=folder,
    )
    return origin, origin.error(ManifestInvalid, problem, fix=f"reinstall {name}")


def _folder(distribution: Distribution) -> str:
    """The folder of its metadata."""
    return str(getattr(distribution, "_path", "") or distribution.locate_file(""))


def _said(distribution: Distribution, field: str) -> str:
    """A field of its METADATA; "": it has none."""
    try:
        return str(distribution.metadata[field] or "")
    except Exception:  # not UTF-8, or missing
        return ""
