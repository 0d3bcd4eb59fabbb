"""A cache of weights that are slow to convert, in files.

Entries lie in one folder, `$PEGBOARD_CACHE/gguf`. Each is written to a temporary file and moved into
place, so that any number of processes may share the folder. A full disk, a folder that cannot be
written and an entry over the limit are no failures: the caller then has no entry and converts for
itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from pegboard.errors import ConfigError
from pegboard.regular_files import open_regular

FOLDER_VARIABLE = "PEGBOARD_CACHE"
SIZE_VARIABLE = "PEGBOARD_CACHE_SIZE"
DEFAULT_MAX_BYTES = 20 * 2**30

_NEW_PREFIX = ".new-"
_NEW_MAX_AGE_S = 3600.0
_DIGEST_LENGTH = 64  # of sha256 in hex

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}

T = TypeVar("T")


class Cache:
    """A folder of files, bounded in size; the least recently used go first.

    An entry's name is `GROUP-KIND`. Entries of one group are in use together: adding one never
    evicts another.

    Args:
        folder: where the entries are; made when the first one is added.
        max_bytes: most bytes of all entries together.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    @classmethod
    def from_environment(cls) -> Cache:
        """The cache that `PEGBOARD_CACHE` and `PEGBOARD_CACHE_SIZE` say.

        Raises:
            ConfigError: the size is not one.
        """
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        root = Path(os.environ.get(FOLDER_VARIABLE) or Path(home) / "pegboard")
        return cls(root.absolute() / "gguf", _max_bytes())

    def find(self, name: str) -> Path | None:
        """The entry's file, marked as used just now; None: there is none."""
        path = self._folder / name
        if not path.is_file():
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return path

    def add(self, name: str, content: bytes) -> Path | None:
        """Keeps an entry, replacing one of that name; see `write`."""
        return self.write(name, len(content), lambda file: _write(file, content))

    def write(self, name: str, num_bytes: int, write: Callable[[BinaryIO], None]) -> Path | None:
        """Keeps an entry of `num_bytes` that `write` puts into the file it is given.

        Returns:
            The entry's file; None where it does not fit or cannot be written.
        """
        temporary = None
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._make_room(name, num_bytes):
                return None
            handle, temporary = tempfile.mkstemp(prefix=_NEW_PREFIX, dir=self._folder)
            with os.fdopen(handle, "wb") as file:
                write(file)
            os.replace(temporary, self._folder / name)
        except OSError:
            return None
        finally:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
        return self._folder / name

    def drop(self, name: str) -> None:
        """Removes an entry that turned out to be damaged."""
        with contextlib.suppress(OSError):
            (self._folder / name).unlink(missing_ok=True)

    def load(self, name: str, kind: type[T]) -> T | None:
        """The value that `store` kept; None: there is none, or its file is damaged."""
        path = self.find(name)
        if path is None:
            return None
        try:
            content = path.read_bytes()
            digest, payload = content[:_DIGEST_LENGTH], content[_DIGEST_LENGTH:]
            if hashlib.sha256(payload).hexdigest().encode() == digest:
                return msgspec.json.decode(payload, type=kind)
        except (OSError, msgspec.MsgspecError):
            pass
        self.drop(name)
        return None

    def store(self, name: str, value: Any) -> None:
        """Keeps a plain value as JSON behind its digest."""
        payload = msgspec.json.encode(value)
        self.add(name, hashlib.sha256(payload).hexdigest().encode() + payload)

    def _make_room(self, name: str, num_bytes: int) -> bool:
        group = name.partition("-")[0] + "-"
        total, candidates = 0, []
        for path in self._folder.iterdir():
            try:
                stat = path.lstat()
            except FileNotFoundError:  # another process evicted it just now
                continue
            if path.name == name:
                continue
            total += stat.st_size
            if not (path.name.startswith(group) or _is_being_written(path, stat.st_mtime)):
                candidates.append((stat.st_mtime_ns, stat.st_size, path))
        excess = total + num_bytes - self._max_bytes
        if excess > sum(size for _, size, _ in candidates):
            return False
        for _, size, path in sorted(candidates):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size
        return True


def known_digest(path: Path, cache: Cache) -> str | None:
    """sha256 of a file in hex, where it has not changed since `content_digest` read it."""
    known = cache.load(_index_name(path), tuple[list[int], str])
    return known[1] if known is not None and known[0] == _identity(path) else None


def content_digest(path: Path, cache: Cache) -> str:
    """sha256 of a file in hex; reads all of it."""
    identity = _identity(path)
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if _identity(path) == identity:
        cache.store(_index_name(path), (identity, digest))
    return digest


def group_of(digest: str) -> str:
    """The group of the entries made of a file's content, by this version of the code."""
    return hashlib.sha256(f"{digest} {_code_digest()}".encode()).hexdigest()[:32]


def _index_name(path: Path) -> str:
    return f"index-{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}"


def _identity(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


def _code_digest() -> str:
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for module in sorted([*here.glob("*.py"), *here.glob("*.toml")]):
        digest.update(module.read_bytes())
    return digest.hexdigest()


def _is_being_written(path: Path, mtime: float) -> bool:
    return path.name.startswith(_NEW_PREFIX) and time.time() - mtime < _NEW_MAX_AGE_S


def _write(file: BinaryIO, content: bytes) -> None:
    file.write(content)


def _max_bytes() -> int:
    text = os.environ.get(SIZE_VARIABLE, "").strip()
    if not text:
        return DEFAULT_MAX_BYTES
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS:
        raise ConfigError(SIZE_VARIABLE, repr(text), allowed="a size such as 20GiB, 500MB or 0")
    return int(float(match[1]) * _UNITS[match[2]])
