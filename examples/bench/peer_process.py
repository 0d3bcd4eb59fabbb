"""Engines to compare, each in a process of its own, which take turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PEERS = Path(__file__).parent / "peers"
MODELS = Path(tempfile.gettempdir()) / "pegboard-bench-models"


def prepare_models(folder: Path) -> None:
    """Writes SmolLM2 in each peer's format into the folder, unless it is there."""
    if (folder / "hf-f32" / "config.json").exists():
        return
    script = [sys.executable, str(PEERS / "prepare_model.py"), "--out", str(folder)]
    subprocess.run(script, check=True, stdout=sys.stderr)


class PeerProcess:
    """A peer's process, which does one thing at a time.

    Args:
        name: for messages.
        python: interpreter of its environment.
        script: of `peers/peer_SCRIPT.py`.
        arguments: the script's, beside `--stdin`.

    Attributes:
        name: as given.
        about: what it says of itself once it is loaded.
    """

    def __init__(self, name: str, python: str, script: str, arguments: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, str(PEERS / f"peer_{script}.py"), "--stdin", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        self.about = self._answer()

    def ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer to one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        """The next line that is an answer; an engine may print lines of its own."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"peer {self.name} ended with status {self._process.wait()}")
