"""Reads files that others name, at a bounded cost: regular files alone, up to a limit.

A FIFO would be waited for without end, a device may hold bytes without end, and a text far larger than
any that the field writes is read for nothing.
"""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

MIB = 2**20

# The largest that are read. The field's largest are given for comparison.
MAX_JSON_BYTES = 16 * MIB
"""`config.json` and its like; one that names each expert of each layer has a few MiB."""
MAX_INDEX_BYTES = 64 * MIB
"""`model.safetensors.index.json`; a model of 100,000 tensors has 10 MiB."""
MAX_TOKENIZER_BYTES = 128 * MIB
"""`tokenizer.json`; a vocabulary of 262,144 tokens has 32 MiB."""
MAX_TEMPLATE_BYTES = 1 * MIB
"""A chat template; long ones have 20 KiB."""
MAX_SETTINGS_BYTES = 1 * MIB
"""A file that a person writes: a config, a recipe, a plugin of one file."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class UnfitFile(OSError):
    """A file that is there, and is none to be read; its text says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.strerror = reason


def open_regular(path: Path | str) -> BufferedReader:
    """A regular file, open for reading; the call returns at once, for a FIFO too.

    Raises:
        UnfitFile: a FIFO, a device, a folder or a socket.
        OSError: it is missing or cannot be opened.
    """
    # Opening a FIFO then does not wait for a writer; for a regular file the flag changes nothing.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise UnfitFile(f"{kind}, and only regular files are read")
    return os.fdopen(handle, "rb")


def read_bytes(path: Path | str, *, limit: int) -> bytes:
    """All of a regular file.

    Args:
        path: of the file.
        limit: bytes of the largest that is read.

    Raises:
        UnfitFile: no regular file, or a larger one.
        OSError: it is missing or cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # One byte more, because a file may grow, and those of /proc state no size.
        content = file.read(limit + 1) if size <= limit else b""
    if size > limit or len(content) > limit:
        raise UnfitFile(f"larger than {limit / MIB:g} MiB, the most that is read of it")
    return content


def read_text(path: Path | str, *, limit: int) -> str:
    """All of a regular file, as UTF-8; ends of lines become `\\n`.

    Args:
        path: of the file.
        limit: bytes of the largest that is read.

    Raises:
        UnfitFile: no regular file, or a larger one.
        OSError: it is missing or cannot be read.
        UnicodeDecodeError: it is not UTF-8.
    """
    text = read_bytes(path, limit=limit).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")
