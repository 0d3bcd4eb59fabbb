"""What is installed: entry points of the group `pegboard` and single files, without importing any."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import EntryPoint, distributions
from pathlib import Path

from pegboard.errors import ConfigError, DuplicateName, ManifestInvalid, PluginError
from pegboard.plugins.manifest import (
    SINGLE_FILE,
    Manifest,
    Origin,
    Provides,
    Requires,
    block_of,
    parse_manifest,
)

GROUP = "pegboard"
CORE = "pegboard"


@dataclass(frozen=True)
class Broken:
    """A plugin that is installed and cannot be used."""

    origin: Origin
    error: PluginError


@dataclass(frozen=True)
class Offer:
    """A thing provided, and the plugin that provides it."""

    origin: Origin
    entry: Provides


@dataclass(frozen=True)
class Catalog:
    """Everything installed.

    Attributes:
        manifests: of usable plugins.
        broken: plugins that cannot be used.
        disabled: manifests of plugins that the config leaves out.
        replace: `interface.name` to the plugin that alone shall provide it.
    """

    manifests: tuple[Manifest, ...]
    broken: tuple[Broken, ...] = ()
    disabled: tuple[Manifest, ...] = ()
    replace: Mapping[str, str] = field(default_factory=dict)

    def offers(self, interface: str) -> list[Offer]:
        """All that is provided for an interface, sorted by name; a name stands twice when two
        plugins provide it and nothing settles which."""
        found = [
            Offer(manifest.origin, entry)
            for manifest in self.manifests
            for entry in manifest.provides
            if entry.interface == interface
            and self.replace.get(f"{interface}.{entry.name}", manifest.origin.plugin)
            == manifest.origin.plugin
        ]
        return sorted(found, key=lambda offer: (offer.entry.name, offer.origin.plugin))

    def left_out(self, interface: str, provides: Callable[[Provides], bool]) -> str:
        """What to do where a plugin that `plugins.disable` names would provide a thing; "" where
        none would."""
        names = [
            manifest.origin.plugin
            for manifest in self.disabled
            if any(entry.interface == interface and provides(entry) for entry in manifest.provides)
        ]
        return (
            f"take {', '.join(names)}, which provides it, out of plugins.disable" if names else ""
        )

    def manifest(self, plugin: str) -> Manifest:
        """A plugin's manifest, by its name."""
        return next(m for m in self.manifests if m.origin.plugin == plugin)


def absent(origin: Origin, requires: Requires) -> tuple[list[str], list[str]]:
    """Packages and files that something requires and that are not there."""
    packages = [name for name in requires.packages if importlib.util.find_spec(name) is None]
    folder = Path(origin.path)
    files = [name for name in requires.files if not folder.joinpath(name).is_file()]
    return packages, files


def discover(
    load: Sequence[str] = (),
    disable: Sequence[str] = (),
    replace: Mapping[str, str] | None = None,
) -> Catalog:
    """Reads the manifests of all installed plugins and of the single files in `load`.

    Raises:
        ConfigError: a file in `load` does not exist, `disable` names nothing installed, or `replace`
            names a plugin that does not provide the thing.
        ManifestInvalid: a file in `load` has no valid manifest: it was named, so it must work.
        DuplicateName: a file in `load` has the name of another plugin.
    """
    manifests: list[Manifest] = []
    broken: list[Broken] = []
    found: dict[str, Origin] = {}
    for origin in _installed():
        try:
            _check_alone(origin, found)
            manifests.append(_read(origin))
        except PluginError as error:
            broken.append(Broken(origin, error))
    for name in load:
        manifest = _read_file(Path(name))
        _check_alone(manifest.origin, found)
        manifests.append(manifest)
    known = {m.origin.plugin for m in manifests} | {b.origin.plugin for b in broken}
    for name in disable:
        if name not in known:
            raise ConfigError(
                "plugins.disable", f"no plugin {name!r} is installed", allowed=", ".join(known)
            )
    for key, plugin in (replace or {}).items():
        _check_replacement(key, plugin, manifests)
    return Catalog(
        tuple(m for m in manifests if m.origin.plugin not in disable),
        tuple(b for b in broken if b.origin.plugin not in disable),
        tuple(m for m in manifests if m.origin.plugin in disable),
        replace or {},
    )


def _check_replacement(key: str, plugin: str, manifests: Sequence[Manifest]) -> None:
    provided = {
        f"{entry.interface}.{entry.name}": manifest.origin.plugin
        for manifest in manifests
        for entry in manifest.provides
        if manifest.origin.plugin == plugin
    }
    if key not in provided:
        raise ConfigError(
            f"plugins.replace.{key}",
            f"plugin {plugin!r} does not provide it",
            allowed=", ".join(provided) or "the name of an installed plugin",
        )


def _check_alone(origin: Origin, found: dict[str, Origin]) -> None:
    """Raises DuplicateName when another plugin has this one's name; notes it otherwise."""
    other = found.setdefault(origin.plugin, origin)
    if other is not origin:
        raise DuplicateName(
            origin.plugin,
            f"{other} has that name too",
            origin=str(origin),
            fix="uninstall one of them, or give the file another name",
        )


def _installed() -> Iterable[Origin]:
    seen: set[tuple[str, str]] = set()
    for distribution in distributions():
        for entry_point in distribution.entry_points:
            if entry_point.group != GROUP:
                continue
            name = distribution.metadata["Name"]
            # A folder can stand twice on the path; a plugin of two distributions must be reported.
            if (name, entry_point.name) in seen:
                continue
            seen.add((name, entry_point.name))
            yield Origin(
                plugin=entry_point.name,
                distribution=name,
                version=distribution.version,
                module=entry_point.module,
                path=_path_of(entry_point),
                builtin=name == CORE,
            )


def _path_of(entry_point: EntryPoint) -> str:
    """The folder of the entry point's package, or the file of its module; "" when neither exists.

    Only the top-level name is looked up: finding a submodule's spec would import its parents.
    """
    top, *rest = entry_point.module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return ""
    if spec is None:
        return ""
    if not spec.submodule_search_locations:
        return spec.origin or ""
    folder = Path(next(iter(spec.submodule_search_locations))).joinpath(*rest)
    module = folder.with_suffix(".py")
    return str(folder if folder.is_dir() else module if rest and module.is_file() else "")


def _read(origin: Origin) -> Manifest:
    path = Path(origin.path)
    if not origin.path:
        raise ManifestInvalid(
            origin.plugin,
            f"module {origin.module} does not exist",
            origin=str(origin),
            fix=f"reinstall {origin.distribution}",
        )
    if path.is_file():
        return _read_block(path, origin)
    manifest = path / "plugin.toml"
    try:
        text = manifest.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ManifestInvalid(
            origin.plugin,
            f"no readable plugin.toml beside the module: {problem}",
            origin=str(origin),
            fix=origin.remedy,
        ) from None
    return parse_manifest(text, origin)


def _read_file(path: Path) -> Manifest:
    if not path.is_file():
        raise ConfigError("plugins.load", f"no file {path}", fix="give the path of a Python file")
    origin = Origin(
        plugin=path.stem,
        distribution=SINGLE_FILE,
        version="",
        module=f"pegboard_file_{path.stem}_{sha256(bytes(path.resolve())).hexdigest()[:8]}",
        path=str(path.resolve()),
    )
    return _read_block(path, origin)


def _read_block(path: Path, origin: Origin) -> Manifest:
    try:
        block = block_of(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise ManifestInvalid(origin.plugin, str(problem), origin=str(origin)) from None
    if block is None:
        raise ManifestInvalid(
            origin.plugin,
            "has no manifest",
            origin=str(origin),
            fix="begin the file with a '# /// pegboard' block of TOML comments",
        )
    return parse_manifest(block, origin)
