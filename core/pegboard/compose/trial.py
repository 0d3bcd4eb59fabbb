"""Trials of plugins, in a process of their own with a time limit; every outcome is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from pegboard.compose.preparing import Prepared, to_wire
from pegboard.errors import PluginFailed
from pegboard.plugins.manifest import Manifest

MAX_FILE_BYTES = 16 * 2**20
"""Most that a file may hold which the trial's process writes, its standard error and report included."""

LIMIT_S = 60.0
"""Seconds that a trial may take; torch and a compiled library load in ten seconds on a busy machine."""


Subject = Manifest | bytes
"""The subject of a trial: a plugin with all that it provides, or the parts of a composition, in the form
of `to_wire`."""


class Began(msgspec.Struct, frozen=True, tag=True):
    """A step in a plugin has begun."""

    plugin: str
    origin: str
    doing: str


class Finding(msgspec.Struct, frozen=True, tag=True):
    """Something that does not work.

    Attributes:
        kind: the error's class name.
        line: what went wrong.
        traceback: where.
    """

    kind: str
    line: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.line}"


class Skipped(msgspec.Struct, frozen=True, tag=True):
    """Something that could not be made without what it needs."""

    interface: str
    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.interface} {self.name!r} ({self.why})"


class Done(msgspec.Struct, frozen=True, tag=True):
    """The trial came to its end."""


class Verdict(msgspec.Struct, frozen=True):
    """The findings of a trial.

    Attributes:
        findings: faults; empty: everything that was tried works.
        skipped: what was not tried.
    """

    findings: tuple[Finding, ...]
    skipped: tuple[Skipped, ...]


Line = Began | Finding | Skipped | Done
"""A line of the report."""

_lines = msgspec.json.Decoder(Line)


def try_plugin(manifest: Manifest, limit_s: float = LIMIT_S) -> Verdict:
    """Imports and registers a plugin, finds all that its manifest names, and makes each part that can be
    made without a checkpoint."""
    return _try(manifest, limit_s)


def try_composition(prepared: Prepared, limit_s: float = LIMIT_S) -> Verdict:
    """Makes all parts of a composition, in the way of the start, and loads no weight."""
    return _try(to_wire(prepared), limit_s)


def _try(subject: Subject, limit_s: float) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="pegboard-") as name:
        folder = Path(name)
        (folder / "subject.json").write_bytes(msgspec.json.encode(subject))
        with (folder / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{__package__}.trial_process", name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                status = process.wait(limit_s)
                ended = f"ended the process with status {status}"
                if status < 0:
                    ended = f"ended the process by {signal.Signals(-status).name}"
            except subprocess.TimeoutExpired:
                ended = f"took more than {limit_s:g} s"
            finally:
                # What the plugin may have started there goes with it.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return _verdict(_read(folder / "report"), ended, _last_line(folder / "stderr"))


def _verdict(lines: Sequence[Line], ended: str, said: str) -> Verdict:
    findings = [line for line in lines if isinstance(line, Finding)]
    if not any(isinstance(line, Done) for line in lines):
        began = [line for line in lines if isinstance(line, Began)]
        last = began[-1] if began else Began("the core", "", "the trial's start")
        said = f" ({said})" if said else ""
        error = PluginFailed(last.plugin, f"{last.doing}: {ended}{said}", origin=last.origin)
        findings.append(Finding(type(error).__name__, str(error)))
    skipped = tuple(line for line in lines if isinstance(line, Skipped))
    return Verdict(tuple(dict.fromkeys(findings)), skipped)


def _read(report: Path) -> list[Line]:
    found = []
    for line in report.read_bytes().splitlines() if report.exists() else ():
        with suppress(msgspec.DecodeError):  # the last one may be cut off
            found.append(_lines.decode(line))
    return found


def _last_line(stderr: Path) -> str:
    """The process's last line."""
    with stderr.open("rb") as file:
        file.seek(max(0, stderr.stat().st_size - 2000))
        lines = file.read(2000).decode("utf-8", "replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")
