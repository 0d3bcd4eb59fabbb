"""`known.toml` says what our manifests say, so that errors name the right distribution."""

from __future__ import annotations

from pathlib import Path

from pegboard.plugins.discovery import discover
from pegboard.plugins.known import generate, suggestion

ROOT = Path(__file__).parents[2]


def test_known_plugins_are_those_of_the_manifests() -> None:
    catalog = discover()
    ours = [one for one in catalog.manifests if Path(one.origin.path).is_relative_to(ROOT)]
    manifests = {*ROOT.glob("*plugins/*/pegboard_*/plugin.toml"), ROOT / "core/pegboard/builtin"}
    assert len(ours) == len(manifests), "all plugins are installed: run `make setup`"
    known = ROOT / "core" / "pegboard" / "plugins" / "known.toml"
    assert known.read_text() == generate(ours)


def test_a_missing_plugin_has_a_suggestion() -> None:
    assert suggestion("checkpoint_source", "gguf") == "pegboard-gguf"
    assert suggestion("scheduler", "nobody's") is None
