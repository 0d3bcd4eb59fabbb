"""Files that others name are read at a bounded cost, or refused at once."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from pegboard.config import PluginsConfig, ServerConfig, load_config
from pegboard.errors import ConfigError, ManifestInvalid
from pegboard.plugins.discovery import discover
from pegboard.regular_files import MAX_SETTINGS_BYTES, UnfitFile, read_bytes, read_text
from pegboard.server.keys import read_keys


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))


@pytest.mark.parametrize(
    "put",
    [os.mkfifo, os.mkdir, _socket, lambda path: path.symlink_to("/dev/zero")],
    ids=["fifo", "folder", "socket", "device"],
)
def test_what_is_no_regular_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    put(Path("file"))
    with pytest.raises(OSError):
        read_bytes("file", limit=10)


def test_a_file_of_the_limit_is_read_and_a_larger_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"a" * 10)
    assert read_bytes(file, limit=10) == b"a" * 10
    with pytest.raises(UnfitFile, match="larger than"):
        read_bytes(file, limit=9)


def test_a_file_that_states_no_size_has_the_same_limit() -> None:
    assert Path("/proc/self/status").stat().st_size == 0
    assert b"Name:" in read_bytes("/proc/self/status", limit=2**20)
    with pytest.raises(UnfitFile, match="larger than"):
        read_bytes("/proc/self/status", limit=4)


def test_a_text_is_what_the_standard_library_reads(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes("a\r\nb\rc\nü".encode())
    assert read_text(file, limit=100) == file.read_text(encoding="utf-8")


def test_a_config_and_a_plugin_of_one_file_have_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "large.py"
    with file.open("wb") as opened:
        opened.truncate(MAX_SETTINGS_BYTES + 1)
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load_config(file)
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        read_keys(ServerConfig(api_keys=[f"file:{file}"]), {})
    with pytest.raises((ConfigError, ManifestInvalid), match="larger than 1 MiB"):
        discover(PluginsConfig(load=[str(file)]))
