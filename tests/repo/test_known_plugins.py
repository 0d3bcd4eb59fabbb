"""`known.toml` says what our manifests say, so that errors name the right distribution."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pegboard.plugins.discovery import discover
from pegboard.plugins.known import suggestion

ROOT = Path(__file__).parents[2]

_SPEC = importlib.util.spec_from_file_location(
    "known_plugins", Path(__file__).with_name("known_plugins.py")
)
assert _SPEC is not None and _SPEC.loader is not None
known_plugins = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(known_plugins)


def test_known_plugins_are_those_of_the_manifests() -> None:
    ours = [one for one in discover().manifests if Path(one.origin.path).is_relative_to(ROOT)]
    manifests = {*ROOT.glob("*plugins/*/pegboard_*/plugin.toml"), ROOT / "core/pegboard/builtin"}
    assert len(ours) == len(manifests), "all plugins are installed: run `make setup`"
    assert known_plugins.KNOWN.read_text() == known_plugins.known_plugins()


def test_a_missing_plugin_has_a_suggestion() -> None:
    assert suggestion("checkpoint_source", "gguf") == "pegboard-gguf"
    assert suggestion("scheduler", "nobody's") is None
