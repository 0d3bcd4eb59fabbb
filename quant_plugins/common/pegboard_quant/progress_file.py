"""The progress of a run of `pegboard quantize`, kept so that one that was broken off can go on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pegboard.errors import ConfigError
from pegboard_quant.output import write_json, write_tensors

STATE = "unfinished.json"


@dataclass(slots=True)
class FinishedLayer:
    """A decoder layer whose shard is written.

    Attributes:
        stored: names of the parameters of each of its quantized weights.
        notes: what the user should know.
    """

    stored: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class ProgressFile:
    """The state of a run in its folder.

    Args:
        folder: that the run writes to; made where it does not exist.
        identity: a digest of everything that the result depends on.

    Raises:
        ConfigError: the folder holds something else, or a run of another identity.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self._folder = folder
        self._identity = identity
        self.layers: list[FinishedLayer] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            names = sorted(path.name for path in folder.iterdir() if not _is_half_written(path))
        except OSError as problem:
            raise ConfigError(
                "out", f"{folder}: {problem.strerror}", fix="another folder"
            ) from None
        if STATE in names:
            self.layers = self._read()
        elif names:
            raise ConfigError(
                "out",
                f"{folder} is not empty ({', '.join(names[:3])})",
                allowed="a new folder, or that of a run that was broken off",
                fix="another folder",
            )
        else:
            self._write()

    def hidden(self, num_texts: int) -> list[torch.Tensor]:
        """The hidden states of all texts after the finished layers."""
        if num_texts == 0:
            return []
        path = self._hidden(len(self.layers))
        try:
            tensors = load_file(path)
            # A fresh tensor each: products depend on how their operands lie in memory.
            return [tensors[str(index)].clone() for index in range(num_texts)]
        except (OSError, ValueError, KeyError) as problem:
            raise ConfigError(
                "out", f"{path} is damaged ({problem})", fix="empty the folder and start again"
            ) from None

    def finish_layer(self, layer: FinishedLayer, hidden: Sequence[torch.Tensor]) -> None:
        """Notes that a layer's shard is written, and what comes out of it. Broken off anywhere, the
        state is that before or that after."""
        done = len(self.layers) + 1
        if hidden:
            tensors = {str(index): one for index, one in enumerate(hidden)}
            write_tensors(self._hidden(done), tensors)
        self.layers.append(layer)
        self._write()
        self._hidden(done - 1).unlink(missing_ok=True)

    def remove(self) -> None:
        """The run is finished."""
        self._hidden(len(self.layers)).unlink(missing_ok=True)
        for path in self._folder.iterdir():
            if _is_half_written(path):
                path.unlink()
        (self._folder / STATE).unlink()

    def _hidden(self, layer: int) -> Path:
        return self._folder / f"unfinished-{layer:05d}.hidden"

    def _read(self) -> list[FinishedLayer]:
        path = self._folder / STATE
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            identity, layers = state["identity"], state["layers"]
            found = [FinishedLayer(layer["stored"], layer["notes"]) for layer in layers]
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise ConfigError(
                "out", f"{path} is damaged ({problem})", fix="empty the folder and start again"
            ) from None
        if identity != self._identity:
            raise ConfigError(
                "out",
                f"{self._folder} holds a run that was broken off, of another model, text, settings"
                " or number of threads",
                fix="another folder, or that run's command again",
            )
        return found

    def _write(self) -> None:
        layers: list[dict[str, Any]] = [
            {"stored": layer.stored, "notes": layer.notes} for layer in self.layers
        ]
        write_json(self._folder / STATE, {"identity": self._identity, "layers": layers})


def _is_half_written(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".new")
