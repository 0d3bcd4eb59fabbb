"""The process of a trial: `python -m pegboard.compose.trial_process FOLDER`.

It reads the subject from `subject.json` of the folder, and leaves in `report` a line of JSON for each
step that it begins in a plugin, and for each thing found.
"""

from __future__ import annotations

import io
import logging
import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pegboard.compose.host import build_engine
from pegboard.compose.making import Maker
from pegboard.compose.preparing import from_wire
from pegboard.compose.sample_contexts import DTYPE, GROUP, kernel_context, sample_context
from pegboard.compose.trial import MAX_FILE_BYTES, Began, Done, Finding, Line, Skipped, Subject
from pegboard.compose.worker import worker_parts
from pegboard.errors import FactoryFailed, UserError, described
from pegboard.interfaces.kernel import Kernel
from pegboard.planner.probe import probe
from pegboard.plugins.composition import Part
from pegboard.plugins.discovery import absences
from pegboard.plugins.functions import ANSWERS, ask, named_function
from pegboard.plugins.guard import guarded
from pegboard.plugins.loader import load_plugins, options_of, resolve_dotted, resolve_model
from pegboard.plugins.manifest import Manifest, Provides, Requires
from pegboard.plugins.registry import Registry

_FUNCTIONS = (*dict.fromkeys(field for _, field in ANSWERS), "estimate")
"""Fields of a manifest's entry that name functions; the first that fails is told."""


class Report(logging.Handler):
    """Writes the report. It hears of each step in a plugin what the guard around it logs."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file: io.BufferedWriter = path.open("wb")
        guard = logging.getLogger("pegboard.plugins.guard")
        guard.setLevel(logging.DEBUG)
        guard.propagate = False
        guard.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        origin = getattr(record, "origin", None)
        if origin is not None:
            self.write(Began(origin.plugin, str(origin), str(getattr(record, "doing", ""))))

    def write(self, line: Line) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def attempt(self, function: Callable[[], Any]) -> Any:
        """The function's result; None when it raised, which is a finding."""
        try:
            return function()
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            said = str(error) if isinstance(error, UserError) else described(error)
            self.write(Finding(type(error).__name__, said, trace))
        return None


def main(arguments: Sequence[str]) -> int:
    """Tries the folder's subject; does not return, since a plugin's threads would hold it."""
    _limit_files()
    folder = Path(arguments[0])
    subject: Subject = msgspec.json.decode((folder / "subject.json").read_bytes(), type=Subject)
    report = Report(folder / "report")
    if isinstance(subject, bytes):
        prepared = from_wire(subject)
        report.attempt(lambda: build_engine(prepared).close())
        report.attempt(lambda: worker_parts(prepared.composition, Maker(prepared.composition, {})))
    else:
        _try_plugin(subject, report)
    report.write(Done())
    os._exit(0)


def _limit_files() -> None:
    """A plugin that prints without end meets an error, and fills no disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = MAX_FILE_BYTES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILE_BYTES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def _try_plugin(manifest: Manifest, report: Report) -> None:
    registry = report.attempt(lambda: load_plugins([manifest]))
    if registry is None:
        return
    for entry in manifest.provides:
        part = Part(origin=manifest.origin, entry=entry, path=entry.interface)
        if report.attempt(partial(_resolve_names, part)) is None:
            continue
        why = _why_not(part)
        if why:
            report.write(Skipped(entry.interface, entry.name, why))
        elif entry.interface == "command":
            report.attempt(partial(_make_command, registry, part))
        else:
            for context in _contexts(entry):
                report.attempt(partial(_make, registry, part, context))


def _resolve_names(part: Part) -> bool:
    """Finds everything that a manifest entry names, and calls what can be called without a checkpoint."""
    entry, origin = part.entry, part.origin
    for field in ("options", "params"):
        if (dotted := getattr(entry, field)) is not None:
            resolve_model(dotted, origin)
    for field in _FUNCTIONS:
        if isinstance(getattr(entry, field), str):
            named_function(part, field)
    for dotted in entry.calibrators.values():
        resolve_dotted(dotted, origin)
    if entry.layout is not None:
        ask(part, "layout", GROUP)
    return True


def _why_not(part: Part) -> str:
    """The reason for not making a part; "": it is made."""
    entry = part.entry
    misses = [_misses(part, requires) for requires in entry.requirements]
    if all(misses):
        return misses[0]
    reads_one = entry.interface == "drafter" and entry.describe is not None
    if reads_one or (
        entry.interface not in ("kernel", "command") and sample_context(entry.interface) is None
    ):
        return "needs a checkpoint"
    model = None if entry.options is None else resolve_model(entry.options, part.origin)
    if model is not None and any(field.is_required() for field in model.model_fields.values()):
        return "needs options"
    return ""


def _misses(part: Part, requires: Requires) -> str:
    """The needs of a part that are not met here, where there is a CPU and no checkpoint; "": none."""
    (cpu, *_) = probe()
    reasons = absences(part.origin, requires)
    lacking = set(requires.device_features) - cpu.features
    if lacking:
        reasons.append(f"needs a device with {', '.join(sorted(lacking))}")
    if reasons:
        return "; ".join(reasons)
    is_elsewhere = requires.devices and "cpu" not in requires.devices
    return f"runs on {', '.join(requires.devices)}" if is_elsewhere else ""


def _contexts(entry: Provides) -> Iterator[Any]:
    if entry.interface == "kernel":
        for one in entry.operations:
            if "cpu" in one.devices and (not one.dtypes or DTYPE in one.dtypes):
                for weight_format in one.formats:
                    yield kernel_context(one.operation, weight_format)
    else:
        yield sample_context(entry.interface)


def _make(registry: Registry, part: Part, context: Any) -> None:
    made = registry.build(part, context, options_of(part))
    if isinstance(made, Kernel):
        with guarded(FactoryFailed, part.origin, f"the self-test of kernel {part.name!r}"):
            made.self_test()


def _make_command(registry: Registry, part: Part) -> None:
    import typer

    with guarded(FactoryFailed, part.origin, f"making command {part.name!r}"):
        typer.main.get_command(registry.factory(part)())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
