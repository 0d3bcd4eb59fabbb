"""The sources of keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pegboard.config import Config, ServerConfig
from pegboard.errors import ConfigError
from pegboard.server.keys import Keys, read_keys, without_keys

SOURCES = [("api_keys", "PEGBOARD_API_KEY"), ("admin_keys", "PEGBOARD_ADMIN_KEY")]


def read(environment: dict[str, str] | None = None, **settings: Any) -> Keys:
    return read_keys(ServerConfig(**settings), environment or {})


def test_the_config_goes_before_the_environment() -> None:
    environment = {"PEGBOARD_API_KEY": "theirs", "PEGBOARD_ADMIN_KEY": "boss"}
    assert read(environment, api_keys=["one", "two"]) == Keys(("one", "two"), ("boss",))
    assert read(environment, admin_keys="me") == Keys(("theirs",), ("me",))
    assert read({"PEGBOARD_API_KEY": " a, b,"}) == Keys(("a", "b"))
    assert read() == Keys()


def test_a_file_holds_a_key_on_each_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst\n\n  second \n")
    assert read(api_keys=[f"file:{file}", " third "]).api == ("first", "second", "third")
    assert read(admin_keys=f"file:{file}").admin == ("first", "second")


@pytest.mark.parametrize(("setting", "_variable"), SOURCES)
@pytest.mark.parametrize("content", [None, b"", b"# none\n\n", b" \n\t\n", b"\xff\xfe"])
def test_no_key_where_keys_were_meant_lets_nobody_in(
    tmp_path: Path, setting: str, _variable: str, content: bytes | None
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"server\.{setting}.*keys"):
        read_keys(ServerConfig.model_validate({setting: [f"file:{file}"]}), {})


@pytest.mark.parametrize(("setting", "variable"), SOURCES)
@pytest.mark.parametrize("blank", ["", " ", "\t\n", "\u00a0\u2003"])
def test_a_blank_key_lets_nobody_in_wherever_it_comes_from(
    setting: str, variable: str, blank: str
) -> None:
    with pytest.raises(ConfigError, match=variable):
        read({variable: blank})
    with pytest.raises(ConfigError, match=variable):
        read({variable: f"{blank},"})
    for value in (blank, [blank], ["one", blank]):
        with pytest.raises(ConfigError, match=f"{setting}: a blank key"):
            Config.from_values({"model": "m", "server": {setting: value}})


@pytest.mark.parametrize("key", ["a\nb", "a\x00b", "a\x1b[2Jb"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="control characters") as refused:
        read(api_keys=[key])
    assert key not in str(refused.value)


def test_a_users_key_is_no_admins() -> None:
    with pytest.raises(ConfigError, match=r"server\.admin_keys"):
        read({"PEGBOARD_API_KEY": "one,two"}, admin_keys=["two"])


def test_keys_go_no_further() -> None:
    environment = {"PEGBOARD_API_KEY": "a", "PEGBOARD_ADMIN_KEY": "b", "HOME": "/"}
    assert without_keys(environment) == {"HOME": "/"}
