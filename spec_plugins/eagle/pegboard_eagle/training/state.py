"""Where a run keeps what it has done, and whether a folder's run is the same one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegboard.errors import ConfigError

WORK, STATE = "work", "run.json"
HEAD_FILES = ("config.json", "model.safetensors")


class RunState:
    """The folder of a run.

    Args:
        out: folder of the head.
        answers: everything that the answers depend on.
        training: everything else that the head depends on.

    Attributes:
        answers: folder of the answers.
        checkpoint: how far the training is.

    Raises:
        ConfigError: the folder holds a head that no run made, or a run of something else.
    """

    def __init__(self, out: Path, answers: Mapping[str, Any], training: Mapping[str, Any]) -> None:
        work = out / WORK
        self.answers = work / "answers"
        self.checkpoint = work / "training.safetensors"
        said = {"answers": dict(answers), "training": dict(training)}
        try:
            found = _read(work / STATE)
            if found is None and any((out / name).exists() for name in HEAD_FILES):
                raise ConfigError(
                    "out", f"{out} holds a model that was not made here", fix="another folder"
                )
            if found is not None:
                self._compare(out, found, said)
            self.answers.mkdir(parents=True, exist_ok=True)
            written = work / f"{STATE}.part"
            written.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
            written.replace(work / STATE)
        except OSError as problem:
            raise ConfigError("out", f"{out}: {problem.strerror}", fix="another folder") from None

    def _compare(self, out: Path, found: Mapping[str, Any], said: Mapping[str, Any]) -> None:
        if changed := _changed(found["answers"], said["answers"]):
            raise ConfigError(
                "out",
                f"{out} holds a run of another {changed}",
                fix="another folder, or that run's command again",
            )
        changed = _changed(found["training"], said["training"])
        if changed and self.checkpoint.exists():
            raise ConfigError(
                "out",
                f"{out} holds a run of another {changed}",
                fix=f"that run's command again, or delete {self.checkpoint} to train anew on its"
                " answers",
            )


def digest(value: object) -> str:
    """A digest of something that JSON can write."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _changed(found: Mapping[str, Any], said: Mapping[str, Any]) -> str:
    """Names of what differs; "": nothing."""
    names = [name for name in said if found.get(name) != said[name]]
    return ", ".join(names)


def _read(path: Path) -> Mapping[str, Any] | None:
    """What the file says; None: there is none."""
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if all(isinstance(found[part], dict) for part in ("answers", "training")):
            return dict(found)
        problem = "no run"
    except (ValueError, KeyError, TypeError) as error:
        problem = str(error)
    raise ConfigError("out", f"{path} is damaged ({problem})", fix="another folder")
