"""Finds installed plugins: entry points of the group `pegboard` and single files. None is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from pegboard.config import PluginsConfig
from pegboard.errors import ConfigError, DuplicateName, ManifestInvalid, PluginError
from pegboard.plugins.composition import Part
from pegboard.plugins.installed import installed_plugins, module_path, normalized
from pegboard.plugins.manifest import SINGLE_FILE, Manifest, Origin, Provides, Requires
from pegboard.plugins.manifest_reader import block_of, parse_manifest
from pegboard.plugins.manifest_text import MAX_BYTES
from pegboard.regular_files import MAX_SETTINGS_BYTES, read_text

INSTALLED = PluginsConfig()
"""The installed plugins, and no single file."""

PLUGIN = "plugin"
"""Before a dot in `plugins.replace`: the name of a plugin itself, not of what it provides."""


@dataclass(frozen=True)
class Broken:
    """A plugin that is installed and cannot be used."""

    origin: Origin
    error: PluginError


@dataclass(frozen=True)
class Catalog:
    """Everything installed.

    Attributes:
        manifests: of usable plugins.
        broken: plugins that cannot be used.
        disabled: manifests of plugins that the config leaves out.
        replaced: manifests of plugins whose name `plugins.replace` gives to another.
        settled: claim to the plugin that `plugins.replace` gives it to; see `PluginsConfig`.
    """

    manifests: tuple[Manifest, ...]
    broken: tuple[Broken, ...] = ()
    disabled: tuple[Manifest, ...] = ()
    replaced: tuple[Manifest, ...] = ()
    settled: Mapping[str, Origin] = field(default_factory=dict)

    def offers(self, interface: str) -> list[Part]:
        """All that is provided for an interface, sorted by name; a name stands twice when two
        plugins provide it and nothing settles which."""
        found = [
            Part(origin=manifest.origin, entry=entry, path=interface)
            for manifest in self.manifests
            for entry in manifest.provides
            if entry.interface == interface
            and self.settled.get(f"{interface}.{entry.name}", manifest.origin) == manifest.origin
        ]
        return sorted(found, key=lambda o: (o.entry.name, o.origin.plugin, o.origin.distribution))

    def left_out(self, interface: str, provides: Callable[[Provides], bool]) -> str:
        """The fix if a plugin that `plugins.disable` names would provide a thing; "" if none would."""
        names = [
            manifest.origin.plugin
            for manifest in self.disabled
            if any(entry.interface == interface and provides(entry) for entry in manifest.provides)
        ]
        return (
            f"take {', '.join(names)}, which provides it, out of plugins.disable" if names else ""
        )

    def manifest(self, origin: Origin) -> Manifest:
        """The manifest of a plugin."""
        return next(manifest for manifest in self.manifests if manifest.origin == origin)


def missing(origin: Origin, requires: Requires) -> tuple[list[str], list[str]]:
    """The packages and the files that something requires and that are not there."""
    folder = Path(origin.path)
    return (
        [name for name in requires.packages if module_path(name) is None],
        [name for name in requires.files if not folder.joinpath(name).is_file()],
    )


def absences(origin: Origin, requires: Requires) -> list[str]:
    """Reasons why something does not run here: packages and files that it requires are not there."""
    packages, files = missing(origin, requires)
    reasons = []
    if packages:
        reasons.append(f"needs the packages {', '.join(packages)}, which are not installed")
    if files:
        reasons.append(
            f"needs {', '.join(files)}, which its installation did not build: install a compiler,"
            " then the plugin again"
        )
    return reasons


def discover(plugins: PluginsConfig = INSTALLED) -> Catalog:
    """Reads the manifests of all installed plugins and of the single files in `load`.

    Raises:
        ConfigError: a file in `load` does not exist, `disable` names nothing installed, or `replace`
            names a plugin that does not provide the thing.
        ManifestInvalid: a file in `load` has no valid manifest: it was named, so it must work.
        DuplicateName: a file in `load` has the name of another plugin.
    """
    manifests: list[Manifest] = []
    broken: list[Broken] = []
    for origin, problem in installed_plugins():
        try:
            if problem is not None:
                raise problem
            manifests.append(_read(origin))
        except PluginError as error:
            broken.append(Broken(origin, error))
    for name in plugins.load:
        manifest = _read_file(Path(name))
        _check_alone(manifest.origin, [*(m.origin for m in manifests), *(b.origin for b in broken)])
        manifests.append(manifest)
    origins = [*(m.origin for m in manifests), *(b.origin for b in broken)]
    for name in plugins.disable:
        if not any(_is(origin, name) for origin in origins):
            raise ConfigError(
                "plugins.disable",
                f"no plugin {name!r} is installed",
                allowed=", ".join(dict.fromkeys(origin.plugin for origin in origins)),
            )

    def is_disabled(origin: Origin) -> bool:
        return any(_is(origin, name) for name in plugins.disable)

    enabled = [m for m in manifests if not is_disabled(m.origin)]
    settled = {key: _settled(key, name, manifests) for key, name in plugins.replace.items()}

    def is_replaced(origin: Origin) -> bool:
        return settled.get(f"{PLUGIN}.{origin.plugin}", origin) != origin

    return Catalog(
        manifests=tuple(m for m in enabled if not is_replaced(m.origin)),
        broken=tuple(b for b in broken if not is_disabled(b.origin)),
        disabled=tuple(m for m in manifests if is_disabled(m.origin)),
        replaced=tuple(m for m in enabled if is_replaced(m.origin)),
        settled=settled,
    )


def _is(origin: Origin, name: str) -> bool:
    """Whether a config means a plugin by a name: its own, or its distribution's."""
    return name == origin.plugin or normalized(name) == normalized(origin.distribution)


def _settled(key: str, name: str, manifests: Sequence[Manifest]) -> Origin:
    """The plugin that `plugins.replace` gives something to. Raises ConfigError when there is none, or
    more than one."""
    means = [manifest for manifest in manifests if _is(manifest.origin, name)]
    found = [manifest.origin for manifest in means if key in _claimable(manifest)]
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(f"{origin.plugin} ({origin})" for origin in found)
        was = f"{name!r} is the name of several plugins: {listed}"
        allowed = ", ".join(origin.distribution for origin in found)
    else:
        was = f"plugin {name!r} does not provide it"
        allowed = ", ".join(key for manifest in means for key in _claimable(manifest))
        allowed = allowed or "the name of an installed plugin"
    raise ConfigError(f"plugins.replace.{key}", was, allowed=allowed)


def _claimable(manifest: Manifest) -> list[str]:
    """The keys of `plugins.replace` under which a plugin can stand."""
    provided = [f"{entry.interface}.{entry.name}" for entry in manifest.provides]
    interfaces = dict.fromkeys(entry.interface for entry in manifest.provides)
    return [*provided, *interfaces, f"{PLUGIN}.{manifest.origin.plugin}"]


def _check_alone(origin: Origin, others: Sequence[Origin]) -> None:
    """Raises DuplicateName when another plugin has the name of a single file."""
    for other in others:
        if other.plugin == origin.plugin:
            raise origin.error(
                DuplicateName,
                f"{other} has that name too",
                fix="uninstall one of them, or give the file another name",
            )


def _read(origin: Origin) -> Manifest:
    path = Path(origin.path)
    if not origin.path:
        raise origin.error(
            ManifestInvalid,
            f"module {origin.module} does not exist",
            fix=f"reinstall {origin.distribution}",
        )
    if not path.is_dir():
        return _read_block(path, origin)
    return parse_manifest(_text_of(path / "plugin.toml", origin, MAX_BYTES), origin)


def _read_file(path: Path) -> Manifest:
    if not path.exists() or path.is_dir():
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
    block = block_of(_text_of(path, origin, MAX_SETTINGS_BYTES))
    if block is None:
        raise origin.error(
            ManifestInvalid,
            "has no manifest",
            fix="begin the file with a '# /// pegboard' block of TOML comments",
        )
    return parse_manifest(block, origin)


def _text_of(path: Path, origin: Origin, limit: int) -> str:
    try:
        return read_text(path, limit=limit)
    except (OSError, UnicodeDecodeError) as problem:
        was = f"no readable {path.name}: {problem}"
        raise origin.error(ManifestInvalid, was) from None
