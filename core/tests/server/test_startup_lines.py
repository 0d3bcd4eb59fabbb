"""The lines of a starting server."""

from __future__ import annotations

from pegboard.config import Config
from pegboard.server.startup_lines import non_default


def test_only_what_was_set_is_said_and_no_secret() -> None:
    config = Config.from_values(
        {
            "model": "m",
            "scheduler": {"max_num_seqs": 3, "options": {"db_password": "hunter2"}},
            "server": {"api_keys": ["hunter2"], "admin_keys": ["hunter3"], "port": 9},
            "observers": [{"name": "remote", "options": {"token": "hunter2", "tokens": 5}}],
        }
    )
    assert non_default(config) == {
        "model": "m",
        "scheduler": {"max_num_seqs": 3, "options": {"db_password": "***"}},
        "server": {"api_keys": "***", "admin_keys": "***", "port": 9},
        "observers": [{"name": "remote", "options": {"token": "***", "tokens": 5}}],
    }


def test_what_is_as_by_default_is_not_said() -> None:
    assert non_default(Config(model="m")) == {"model": "m"}
