"""Reads the JSON files of a checkpoint. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pegboard.errors import CheckpointError
from pegboard.regular_files import MAX_JSON_BYTES, read_text


def read_json(file: Path, *, fix: str = "", limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON file that holds an object.

    Args:
        file: which.
        fix: for the error where it is missing.
        limit: bytes of the largest that is read.

    Raises:
        CheckpointError: it is missing, no regular file, larger, not JSON, or something else than an
            object.
    """
    value = _read(file, limit)
    if value is None:
        raise CheckpointError(str(file), "no such file", fix=fix)
    return value


def read_optional_json(file: Path) -> dict[str, Any]:
    """The same; an empty object where the file is missing.

    Raises:
        CheckpointError: it is there and cannot be used.
    """
    return _read(file, MAX_JSON_BYTES) or {}


def _read(file: Path, limit: int) -> dict[str, Any] | None:
    """The object; None: no such file."""
    try:
        value = json.loads(read_text(file, limit=limit), parse_int=_whole)
        # Half of a surrogate pair can be written in JSON, and nowhere else afterwards.
        json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError:
        return None
    except RecursionError:
        raise CheckpointError(str(file), "is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(str(file), f"cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(str(file), f"holds a {type(value).__name__}", allowed="an object")
    return value


def _whole(digits: str) -> int | float:
    """A number of 64 bits. A longer one, as `model_max_length` often is, stands for "very many"."""
    number = float(digits)
    return int(digits) if abs(number) < 2**63 else number
