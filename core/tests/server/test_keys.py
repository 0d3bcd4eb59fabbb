"""Where API keys come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.errors import ConfigError
from pegboard.server.keys import read_keys


def test_the_config_goes_before_the_environment() -> None:
    environment = {"PEGBOARD_API_KEY": "theirs"}
    assert read_keys(["one", "two"], environment) == ("one", "two")
    assert read_keys(None, environment) == ("theirs",)
    assert read_keys(None, {"PEGBOARD_API_KEY": " a, b,"}) == ("a", "b")
    assert read_keys(None, {}) == ()


def test_a_file_holds_a_key_on_each_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst\n\n  second \n")
    assert read_keys([f"file:{file}", "third"], {}) == ("first", "second", "third")


@pytest.mark.parametrize("content", [None, b"", b"# none\n\n", b"\xff\xfe"])
def test_no_key_where_keys_were_meant_lets_nobody_in(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"server\.api_keys.*keys"):
        read_keys([f"file:{file}"], {})


def test_an_empty_variable_lets_nobody_in() -> None:
    with pytest.raises(ConfigError, match="PEGBOARD_API_KEY"):
        read_keys(None, {"PEGBOARD_API_KEY": " , "})
