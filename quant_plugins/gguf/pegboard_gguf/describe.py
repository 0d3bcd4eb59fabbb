"""`describe`: a GGUF file's facts, without torch and without reading weights."""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import shutil
import tempfile
from pathlib import Path

import msgspec

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard_gguf.cache import Cache, content_digest, group_of, known_digest


class _Described(msgspec.Struct, frozen=True):
    """The cached description of a file.

    Attributes:
        facts: all but the paths, which are filled in for each call.
        tokenizer_digest: sha256 of the `tokenizer.json` beside this entry; None: there is none.
    """

    facts: CheckpointFacts
    tokenizer_digest: str | None


def describe(path: Path) -> CheckpointFacts:
    """Facts of one GGUF file, or of a folder that holds exactly one.

    Raises:
        CheckpointError: the file is damaged, or of a kind that this package does not read.
        TokenizerError: its tokenizer is of a kind that this package does not read.
    """
    path = _single_file(path.absolute())
    cache = Cache.from_environment()
    try:
        digest = known_digest(path, cache) or _digest_of_readable(path, cache)
    except OSError as error:
        raise CheckpointError(f"{path}", f"cannot be read ({error.strerror})") from error
    group = group_of(digest)
    facts, tokenizer = _recall(cache, group) or _convert(cache, group, path, digest)
    return dataclasses.replace(
        facts,
        path=str(path),
        tokenizer=dataclasses.replace(
            facts.tokenizer, file=None if tokenizer is None else str(tokenizer)
        ),
    )


def _single_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise CheckpointError(
            f"{path}", f"holds {len(files)} GGUF files ({names})", fix="name one file"
        )
    return files[0]


def _digest_of_readable(path: Path, cache: Cache) -> str:
    """The digest of a file whose header is whole: a damaged one is refused before all is read."""
    from pegboard_gguf.header import read_header

    read_header(path)
    return content_digest(path, cache)


def _recall(cache: Cache, group: str) -> tuple[CheckpointFacts, Path | None] | None:
    described = cache.load(f"{group}-facts", _Described)
    if described is None:
        return None
    if described.tokenizer_digest is None:
        return described.facts, None
    tokenizer = cache.find(f"{group}-tokenizer.json")
    try:
        if tokenizer and _digest(tokenizer.read_bytes()) == described.tokenizer_digest:
            return described.facts, tokenizer
    except OSError:
        pass  # evicted by another process since `find`
    return None


def _convert(
    cache: Cache, group: str, path: Path, digest: str
) -> tuple[CheckpointFacts, Path | None]:
    # Imported here: a file that the cache knows is described in less time than the import takes.
    from pegboard_gguf.convert import convert

    facts, tokenizer_json = convert(path, digest)
    if tokenizer_json is None:
        cache.store(f"{group}-facts", _Described(facts, None))
        return facts, None
    content = tokenizer_json.encode()
    tokenizer = cache.add(f"{group}-tokenizer.json", content)
    if tokenizer is None:
        return facts, _private_file(content)
    cache.store(f"{group}-facts", _Described(facts, _digest(content)))
    return facts, tokenizer


def _private_file(content: bytes) -> Path:
    """A tokenizer.json that lasts as long as this process, for want of a cache."""
    folder = tempfile.mkdtemp(prefix="pegboard-gguf-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "tokenizer.json"
    path.write_bytes(content)
    return path


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
