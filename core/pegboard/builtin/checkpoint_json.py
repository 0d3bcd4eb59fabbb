"""Reads the JSON files of a checkpoint. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pegboard.errors import CheckpointError


def read_json(file: Path, *, fix: str = "") -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        CheckpointError: it is missing, not JSON, or something else than an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"), parse_int=_whole)
        # Half of a surrogate pair can be written in JSON, and nowhere else afterwards.
        json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError:
        raise CheckpointError(str(file), "no such file", fix=fix) from None
    except RecursionError:
        raise CheckpointError(str(file), "is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(str(file), f"cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(str(file), f"holds a {type(value).__name__}", allowed="an object")
    return value


def _whole(digits: str) -> int | float:
    """Of 64 bits; what is longer, as `model_max_length` often is, stands for "very many"."""
    number = float(digits)
    return int(digits) if abs(number) < 2**63 else number


def read_optional_json(file: Path) -> dict[str, Any]:
    """The same; an empty object where the file is missing.

    Raises:
        CheckpointError: it is there and cannot be used.
    """
    return read_json(file) if file.is_file() else {}
