"""Entries of the cache are found again, never trusted blindly, and bounded."""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pegboard.errors import CheckpointError, ConfigError
from pegboard_gguf.cache import Cache
from pegboard_gguf.describe import describe


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_an_unchanged_file_is_hashed_once(tiny_file: Path, monkeypatch: Any) -> None:
    fingerprint = describe(tiny_file).fingerprint
    monkeypatch.setattr("pegboard_gguf.cache.hashlib.file_digest", refuse_to_hash)
    assert describe(tiny_file).fingerprint == fingerprint
    os.utime(tiny_file, ns=(0, 12345))
    with pytest.raises(AssertionError, match="hashed again"):
        describe(tiny_file)


def test_a_damaged_file_is_refused_before_it_is_hashed(tiny_file: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("pegboard_gguf.cache.hashlib.file_digest", refuse_to_hash)
    os.truncate(tiny_file, tiny_file.stat().st_size - 5)
    with pytest.raises(CheckpointError, match="truncated"):
        describe(tiny_file)


def refuse_to_hash(*args: Any) -> Any:
    raise AssertionError("hashed again")


def test_the_least_recently_used_entries_go(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c", 1000)
    for number in range(3):
        path = cache.add(f"{number}-x", b"x" * 300)
        assert path is not None
        os.utime(path, (time.time() - 100 + number,) * 2)
    assert cache.find("0-x") is not None  # used just now, so 1 is the oldest
    assert cache.add("3-x", b"x" * 300) is not None
    assert cache.find("1-x") is None
    assert all(cache.find(f"{number}-x") is not None for number in (0, 2, 3))
    assert _size(tmp_path / "c") <= 1000


def test_an_entry_over_the_bound_is_not_kept_and_evicts_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c", 1000)
    cache.add("a-x", b"x" * 500)
    assert cache.add("b-x", b"x" * 1001) is None
    assert cache.find("a-x") is not None


def test_entries_of_one_group_stay_together(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c", 1000)
    cache.add("a-tokenizer", b"x" * 500)
    assert cache.add("a-weights", b"x" * 600) is None
    assert cache.find("a-tokenizer") is not None


def test_what_a_dead_process_left_is_cleared(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1000)
    left, fresh = tmp_path / ".new-left", tmp_path / ".new-fresh"
    left.write_bytes(b"x" * 300)
    fresh.write_bytes(b"x" * 300)
    os.utime(left, (1, 1))
    assert cache.add("a-x", b"x" * 600) is not None
    assert not left.exists() and fresh.exists()


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c", 1000)

    def fail(file: Any) -> None:
        file.write(b"half")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        cache.write("a-x", 100, fail)
    assert list((tmp_path / "c").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("0", 0), ("4096", 4096), ("20GiB", 20 * 2**30), ("1.5 MB", 1500000)]
)
def test_the_bound_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, num_bytes: int
) -> None:
    monkeypatch.setenv("PEGBOARD_CACHE_SIZE", text)
    cache = Cache.from_environment()
    assert cache.write("a-x", num_bytes + 1, lambda file: None) is None
    assert cache.write("a-x", num_bytes, lambda file: None) is not None


def test_a_bound_that_is_no_size_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGBOARD_CACHE_SIZE", "plenty")
    with pytest.raises(ConfigError, match="PEGBOARD_CACHE_SIZE: 'plenty'"):
        Cache.from_environment()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
@pytest.mark.parametrize("kind", ["facts", "tokenizer.json", "index"])
def test_damaged_entries_are_made_anew(
    smollm2: Path, cache_folder: Path, kind: str, damage: str
) -> None:
    facts = describe(smollm2)
    entry = next(path for path in cache_folder.iterdir() if kind in path.name)
    content = bytearray(entry.read_bytes())
    intact = bytes(content)
    content[len(content) // 2] ^= 0x20
    entry.write_bytes({"flip": bytes(content), "cut": intact[:-7], "empty": b""}[damage])
    assert describe(smollm2) == facts
    assert entry.read_bytes() == intact


@pytest.mark.parametrize("obstacle", ["no room", "not a folder"])
def test_without_a_cache_everything_still_works(
    smollm2: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    if obstacle == "no room":
        monkeypatch.setenv("PEGBOARD_CACHE_SIZE", "0")
    else:
        cache_folder.parent.mkdir(parents=True)
        cache_folder.write_text("in the way")
    facts = describe(smollm2)
    assert facts.tokenizer.file is not None
    tokenizer = Tokenizer.from_file(facts.tokenizer.file)
    assert tokenizer.decode(tokenizer.encode("It works.").ids) == "It works."
    assert not cache_folder.is_dir() or list(cache_folder.iterdir()) == []


def test_processes_may_convert_the_same_file_at_once(smollm2: Path, cache_folder: Path) -> None:
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        facts = list(pool.map(describe, [smollm2] * 4))
    assert all(other == facts[0] for other in facts)
    assert not [path for path in cache_folder.iterdir() if path.name.startswith(".new-")]
