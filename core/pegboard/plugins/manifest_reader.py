"""Reads manifests without importing their plugins, and refuses what nothing would act on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from pegboard.errors import InterfaceVersionRefused, ManifestInvalid
from pegboard.plugins.contracts import CONTRACTS
from pegboard.plugins.manifest import SINGLE_FILE, Manifest, ManifestFile, Origin, Provides
from pegboard.plugins.manifest_text import ManifestTextInvalid, parse_toml
from pegboard.plugins.vocabulary import PROMISES, WORDS, foreign_fields, is_promise

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
        raw = msgspec.convert(parse_toml(text), ManifestFile)
    except (ManifestTextInvalid, msgspec.ValidationError) as problem:
        raise origin.error(ManifestInvalid, f"invalid manifest: {problem}") from None
    for said in (raw.plugin.name, raw.plugin.summary):
        _check_printable(f"says of itself {said!r}", said, origin)
    if origin.distribution == SINGLE_FILE:
        origin = msgspec.structs.replace(origin, plugin=raw.plugin.name)
    elif raw.plugin.name != origin.plugin:
        raise origin.error(
            ManifestInvalid,
            f"its manifest says that its name is {raw.plugin.name!r}",
            allowed=f"the name that it is found by, {origin.plugin!r}",
        )
    for entry in raw.provides:
        check_entry(entry, origin)
    things = [f"{entry.interface} {entry.name!r}" for entry in raw.provides]
    twice = next((thing for thing in things if things.count(thing) > 1), None)
    if twice is not None:
        raise origin.error(ManifestInvalid, f"provides {twice} twice")
    return Manifest(origin=origin, provides=raw.provides)


def entry_of(manifest: Any, origin: Origin) -> Provides:
    """The entry of an object's class attribute `manifest`, a mapping in the schema of `provides`."""
    try:
        entry = msgspec.convert(manifest, Provides)
    except (msgspec.ValidationError, RecursionError) as problem:
        raise origin.error(ManifestInvalid, f"invalid manifest: {problem}") from None
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
        raise origin.error(
            ManifestInvalid,
            f"provides {entry.name!r} of unknown interface {entry.interface!r}",
            allowed=", ".join(CONTRACTS),
        )
    if entry.version not in contract.versions:
        raise origin.error(
            InterfaceVersionRefused,
            f"{entry.interface} {entry.name!r} is written for version {entry.version}",
            allowed=", ".join(map(str, sorted(contract.versions))),
            fix=f"install a version of {origin.distribution} that fits this core",
        )
    missing = [field for field in contract.needs if not getattr(entry, field)]
    if missing:
        raise origin.error(
            ManifestInvalid, f"{entry.interface} {entry.name!r} lacks {', '.join(missing)}"
        )
    for wrong, allowed in _unread(entry):
        raise origin.error(
            ManifestInvalid, f"{entry.interface} {entry.name!r} {wrong}", allowed=allowed
        )


def _unread(entry: Provides) -> Iterator[tuple[str, str]]:
    """Words that nothing reads, and the words allowed in their place."""
    promises = PROMISES.get(entry.interface, {})
    for name in entry.promises:
        if not is_promise(entry.interface, name):
            yield f"promises {name!r}, which means nothing", ", ".join(promises) or "no promise"
    for feature in (name for one in entry.requirements for name in one.features):
        interface, _, name = feature.partition(".")
        if not is_promise(interface, name):
            known = [f"{one}.{name}" for one, names in PROMISES.items() for name in names]
            yield f"requires {feature!r}, which nothing can promise", ", ".join(known)
    for key, word in _words(entry):
        if word not in WORDS[key]:
            yield f"says {key} {word!r}, which means nothing", ", ".join(WORDS[key])
    if entry.interface != "attention" and any(one.block_sizes for one in entry.requirements):
        yield f"requires block_sizes, which are not read of {entry.interface!r}", ""
    blank = Provides(interface="", version=0, name="", summary="")
    for key in sorted(foreign_fields(entry.interface)):
        if getattr(entry, key) != getattr(blank, key):
            yield f"says {key}, which is not read of {entry.interface!r}", ""


def _words(entry: Provides) -> Iterator[tuple[str, str]]:
    """The words of keys that allow only some, by key."""
    for table in (*entry.requirements, *entry.operations):
        for key in WORDS:
            said = getattr(table, key, ())
            yield from ((key, word) for word in ((said,) if isinstance(said, str) else said))


def _check_printable(what: str, text: str, origin: Origin) -> None:
    if not text.isprintable():
        raise origin.error(ManifestInvalid, f"{what}, with characters that are not printable")
