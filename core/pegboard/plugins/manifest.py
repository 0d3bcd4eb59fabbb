"""Manifests: what a plugin says of itself in `plugin.toml`, read without importing it."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from pegboard.errors import InterfaceVersionRefused, ManifestInvalid, printable
from pegboard.plugins.contracts import CONTRACTS
from pegboard.plugins.manifest_text import ManifestTextInvalid, parse_toml

OBJECT = "object"
"""The distribution of a part that stands for an object given in Python."""

SINGLE_FILE = "file"
"""The distribution of a plugin in a single file; its manifest alone says its name."""

Dotted = Annotated[str, msgspec.Meta(pattern=r"^[\w.]*:\w+\Z")]
"""`package.module:name`; `:name` is in the plugin's own module."""

Name = Annotated[str, msgspec.Meta(pattern=r"^[^\s]{1,100}\Z")]
"""Configs, metrics and logs say it."""

Line = Annotated[str, msgspec.Meta(pattern=r"^[^\r\n]{0,500}\Z")]

Priority = Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)]


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a plugin comes from.

    Attributes:
        plugin: its entry point's name, or a single file's stem.
        distribution, version: of the installed distribution; of a single file: `file` and ``.
        module: to import; of a single file: the name it is imported under.
        path: of the package's folder or the module's file.
        builtin: it is part of the core's own distribution.
    """

    plugin: str
    distribution: str
    version: str
    module: str
    path: str
    builtin: bool = False

    def __str__(self) -> str:
        if self.distribution == OBJECT:
            return f"object of {self.module}"
        return printable(f"{self.distribution} {self.version}".strip() + f", {self.path}")

    @property
    def owner(self) -> str:
        """Who answers for it: its distribution, or a single file's path."""
        return self.path if self.distribution == SINGLE_FILE else self.distribution

    @property
    def remedy(self) -> str:
        """What to do where the plugin itself is at fault."""
        if self.distribution == OBJECT:
            return f"mend {self.module}, or the attribute manifest of {self.plugin}"
        if self.distribution == SINGLE_FILE:
            return f"mend {self.path}"
        return f"install another version of {self.distribution}, or tell its authors"


class Requires(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a thing needs; empty: anything goes.

    Attributes:
        devices: kinds (`cpu`, `cuda`).
        device_features: all of these a device must have (`avx2`, `triton_interpreter`).
        capability: least CUDA compute capability, major.minor.
        dtypes: activation dtypes it runs with.
        head_sizes: elements of a head.
        block_sizes: tokens of a KV block.
        features: of other interfaces, `interface.feature` (`attention.query_mask`).
        packages: modules that must be importable.
        files: that must lie in the plugin's folder, such as a library that is built when the plugin
            is installed.
    """

    devices: tuple[str, ...] = ()
    device_features: tuple[str, ...] = ()
    capability: str | None = None
    dtypes: tuple[str, ...] = ()
    head_sizes: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()
    features: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


class Operation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operation that a kernel family implements; see `interfaces/kernel.py`.

    Attributes:
        operation: its name.
        formats: of weights, for `linear`.
        dtypes: of activations; empty: all.
        devices: kinds.
        row_invariant: what it promises.
        reference: written to be read and compared with, and slow.
    """

    operation: str
    formats: tuple[str, ...] = ("float",)
    dtypes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    row_invariant: bool = False
    reference: bool = False


class Provides(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that a plugin provides.

    Attributes:
        interface, version: the contract, and the version of it that this was written for.
        name: as configs say it.
        summary: one line.
        options: pydantic model of its options.
        requires: what it needs.
        promises: `row_invariant`, or features that others may require (`sharing`, `query_mask`,
            `window`, `soft_cap`, `lse`), or of kernels and attention `own_threads`: where what
            runs linear layers and attention promises it, torch computes with one thread.
        priority: for `auto`, the highest that fits wins; negative: never by `auto`.
        estimate: torch-free function of a `Workload`: bytes beside weights and KV.
        files, describe: of a checkpoint source; `describe` of a model too.
        architectures: of a model.
        methods, formats, parameters, resident_bytes, kv_scales, notes, alternatives: of a quantizer;
            `formats` is a list, or a torch-free function.
        calibrators: of a quantizer: classes of `Calibrator` by the method that they quantize by.
        layout, encodings: of an attention backend.
        operations: of a kernel family.
        params, fields: of a logits processor.
    """

    interface: str
    version: int
    name: Name
    summary: Line
    options: Dotted | None = None
    requires: Requires = Requires()
    promises: tuple[str, ...] = ()
    priority: Priority = 0
    estimate: Dotted | None = None
    files: tuple[str, ...] = ()
    describe: Dotted | None = None
    architectures: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    formats: tuple[str, ...] | Dotted = ()
    parameters: Dotted | None = None
    resident_bytes: Dotted | None = None
    kv_scales: Dotted | None = None
    notes: Dotted | None = None
    alternatives: Dotted | None = None
    calibrators: dict[str, Dotted] = {}
    layout: Dotted | None = None
    encodings: tuple[str, ...] = ("none",)
    operations: tuple[Operation, ...] = ()
    params: Dotted | None = None
    fields: tuple[str, ...] = ()


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Name
    summary: Line = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    plugin: _Header
    provides: tuple[Provides, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A plugin: where it comes from and what it provides."""

    origin: Origin
    provides: tuple[Provides, ...]


_BLOCK = re.compile(r"^# /// pegboard\n(?P<body>(?:#(?: .*)?\n)+)# ///$", re.MULTILINE)


def block_of(source: str) -> str | None:
    """The TOML of a single file's `# /// pegboard` comment block; None: there is none."""
    found = _BLOCK.search(source)
    if found is None:
        return None
    return "\n".join(line[2:] for line in found["body"].splitlines())


def parse_manifest(text: str, origin: Origin) -> Manifest:
    """The manifest in TOML.

    Raises:
        ManifestInvalid: not TOML, or not by the schema.
        InterfaceVersionRefused: an entry was written for a version that this core does not accept.
    """
    try:
        raw = msgspec.convert(parse_toml(text), _File)
    except (ManifestTextInvalid, msgspec.ValidationError) as problem:
        raise ManifestInvalid(
            origin.plugin,
            f"invalid manifest: {problem}",
            origin=str(origin),
            fix=origin.remedy,
        ) from None
    for said in (raw.plugin.name, raw.plugin.summary):
        _check_printable(f"says of itself {said!r}", said, origin)
    if origin.distribution == SINGLE_FILE:
        origin = msgspec.structs.replace(origin, plugin=raw.plugin.name)
    elif raw.plugin.name != origin.plugin:
        raise ManifestInvalid(
            origin.plugin,
            f"its manifest says that its name is {raw.plugin.name!r}",
            origin=str(origin),
            allowed=f"the name that it is found by, {origin.plugin!r}",
        )
    for entry in raw.provides:
        check_entry(entry, origin)
    things = [f"{entry.interface} {entry.name!r}" for entry in raw.provides]
    twice = next((thing for thing in things if things.count(thing) > 1), None)
    if twice is not None:
        raise ManifestInvalid(
            origin.plugin, f"provides {twice} twice", origin=str(origin), fix=origin.remedy
        )
    return Manifest(origin=origin, provides=raw.provides)


def entry_of(manifest: Any, origin: Origin) -> Provides:
    """The entry of an object's class attribute `manifest`, a mapping in the schema of `provides`."""
    try:
        entry = msgspec.convert(manifest, Provides)
    except (msgspec.ValidationError, RecursionError) as problem:
        raise ManifestInvalid(
            origin.plugin,
            f"invalid manifest: {problem}",
            origin=str(origin),
            fix=origin.remedy,
        ) from None
    check_entry(entry, origin)
    return entry


def check_entry(entry: Provides, origin: Origin) -> None:
    """Checks what the schema cannot say.

    Raises:
        ManifestInvalid, InterfaceVersionRefused: as `parse_manifest`.
    """
    _check_printable(f"provides {entry.name!r}", entry.name, origin)
    contract = CONTRACTS.get(entry.interface)
    if contract is None:
        raise ManifestInvalid(
            origin.plugin,
            f"provides {entry.name!r} of unknown interface {entry.interface!r}",
            origin=str(origin),
            allowed=", ".join(CONTRACTS),
        )
    if entry.version not in contract.versions:
        raise InterfaceVersionRefused(
            origin.plugin,
            f"{entry.interface} {entry.name!r} is written for version {entry.version}",
            origin=str(origin),
            allowed=", ".join(map(str, sorted(contract.versions))),
            fix=f"install a version of {origin.distribution} that fits this core",
        )
    missing = [field for field in contract.needs if not getattr(entry, field)]
    if missing:
        raise ManifestInvalid(
            origin.plugin,
            f"{entry.interface} {entry.name!r} lacks {', '.join(missing)}",
            origin=str(origin),
            fix=origin.remedy,
        )


def _check_printable(what: str, text: str, origin: Origin) -> None:
    if not text.isprintable():
        raise ManifestInvalid(
            origin.plugin,
            f"{what}, with characters that are not printable",
            origin=str(origin),
            fix=origin.remedy,
        )
