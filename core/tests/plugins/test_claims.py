"""What two distributions claim is nobody's by standing first: who would use it is refused with both, and
`plugins.replace` settles it; who does not use it is told and goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard import errors
from pegboard.cli import main
from pegboard.compose import prepare
from pegboard.config import Config
from pegboard.plugins.contracts import CONTRACTS
from pegboard.plugins.listing import list_plugins
from pegboard.plugins.manifest import SINGLE_FILE, Origin
from pegboard.plugins.manifest_reader import parse_manifest

Place = Callable[..., Path]
Configure = Callable[..., Config]

MANIFEST = """
[plugin]
name = "{plugin}"

[[provides]]
interface = "{interface}"
version = {version}
name = "{name}"
summary = "Of the test"
{more}
"""

LAYOUT = """
from pegboard.interfaces.kv import TensorSpec

def layout(group):
    return (TensorSpec("kv", (2, group.block_size, group.num_kv_heads, group.head_dim), "float32"),)

def describe(config):
    raise AssertionError("asked before it was clear whose answer counts")
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Lays out a distribution as pip leaves it, and returns its package's folder."""

    def place(
        distribution: str,
        plugin: str,
        *,
        interface: str = "scheduler",
        name: str = "one_by_one",
        more: str = "",
        entry_points: str = "",
        metadata: str = "Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2.3\n",
    ) -> Path:
        site = tmp_path / distribution
        # A name of this test's own: what another has imported would be found instead.
        package = site / f"{tmp_path.name}_{distribution.replace('-', '_')}"
        package.mkdir(parents=True)
        info = site / f"{distribution.replace('-', '_')}-1.2.3.dist-info"
        info.mkdir()
        (info / "METADATA").write_bytes(
            metadata.replace("{distribution}", distribution).encode("latin-1")
        )
        points = entry_points.replace("{package}", package.name)
        points = points or f"[pegboard]\n{plugin} = {package.name}\n"
        (info / "entry_points.txt").write_bytes(points.encode("latin-1"))
        (version,) = CONTRACTS[interface].versions
        (package / "plugin.toml").write_text(
            MANIFEST.format(
                plugin=plugin, interface=interface, version=version, name=name, more=more
            )
        )
        (package / "__init__.py").write_text(LAYOUT)
        monkeypatch.syspath_prepend(str(site))
        return package

    return place


def both(error: errors.UserError, *claimants: str) -> str:
    """The one line, which names all claimants with what is known of them, and the fix."""
    line = str(error)
    assert type(error) is errors.DuplicateName and "\n" not in line
    for claimant in claimants:
        assert f"{claimant} 1.2.3, " in line
    return line[line.index("; fix: plugins.replace: ") :]


def test_an_entry_point_of_two_distributions(place: Place, config_of: Configure) -> None:
    place("pegboard-mine", "mine")
    place("stranger", "mine", name="another")
    for name in ("one_by_one", "another"):
        with pytest.raises(errors.DuplicateName) as caught:
            prepare(config_of(scheduler=name))
        fix = both(caught.value, "pegboard-mine", "stranger")
        assert "{plugin.mine: stranger}" in fix and "{plugin.mine: pegboard-mine}" in fix
    for plugins in ({"replace": {"plugin.mine": "pegboard-mine"}}, {"disable": ["stranger"]}):
        prepared = prepare(config_of(scheduler="one_by_one", plugins=plugins))
        assert prepared.composition.parts["scheduler"].origin.distribution == "pegboard-mine"


def test_a_distribution_that_takes_a_plugins_name_does_not_remove_it(
    place: Place, config_of: Configure
) -> None:
    """The name of an entry point is anybody's to take; what it would break says so."""
    place("stranger", "cpu")
    prepare(config_of(kernels="torch", attention="torch"))
    with pytest.raises(errors.UserError, match=r"pegboard-cpu .*stranger .*plugin\.cpu"):
        prepare(config_of(dtype="float32"))
    listed = [plugin for plugin in list_plugins() if plugin.name == "cpu"]
    assert {plugin.distribution for plugin in listed} == {"stranger", "pegboard-cpu"}
    assert all("plugin.cpu: pegboard-cpu" in claim for p in listed for claim in p.claims)


def test_one_name_of_two_plugins(place: Place, config_of: Configure) -> None:
    place("first", "a")
    place("second", "b")
    with pytest.raises(errors.DuplicateName) as caught:
        prepare(config_of(scheduler="one_by_one"))
    both(caught.value, "first", "second")
    for name, chosen in (("a", "first"), ("b", "second"), ("second", "second")):
        plugins = {"replace": {"scheduler.one_by_one": name}}
        prepared = prepare(config_of(scheduler="one_by_one", plugins=plugins))
        assert prepared.composition.parts["scheduler"].origin.distribution == chosen


@pytest.mark.parametrize(
    ("interface", "more", "values"),
    [
        ("attention", 'layout = ":layout"\npriority = 99', {}),
        ("kernel", 'operations = [{ operation = "silu_mul" }]\npriority = 99', {}),
        ("prefix_cache", "priority = 99", {"prefix_cache": "on"}),
        (
            "model",
            'architectures = ["LlamaForCausalLM"]\ndescribe = ":describe"\npriority = 99',
            {},
        ),
    ],
)
def test_equal_priority_is_settled_by_no_alphabet(
    place: Place, config_of: Configure, interface: str, more: str, values: dict[str, Any]
) -> None:
    for distribution, plugin in (("first", "a"), ("second", "b")):
        place(distribution, plugin, interface=interface, name=f"of_{plugin}", more=more)
    with pytest.raises(errors.DuplicateName) as caught:
        prepare(config_of(**values))
    fix = both(caught.value, "first", "second")
    assert f"{{{interface}: a}} or {{{interface}: b}}" in fix
    if interface != "model":
        plugins = {"replace": {interface: "b"}}
        composition = prepare(config_of(plugins=plugins, **values)).composition
        target = composition.target
        used = [*target.parts.values(), *composition.parts.values()]
        used += [choice.part for choice in target.kernels]
        assert "of_b" in {part.name for part in used}
        assert "of_a" not in {part.name for part in used}


def test_what_nothing_uses_is_told_and_stops_nothing(
    place: Place, config_of: Configure, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place("first", "same")
    place("second", "same", name="another")
    place("thief", "builtin", name="stolen")
    prepare(config_of())
    assert main(["check", "--json", str(tiny_model), "--max-model-len", "64"]) == 0
    said = json.loads(capsys.readouterr().out)["left_out"]
    assert main(["plugins"]) == 0
    listed = capsys.readouterr().out
    for lines in (said, [line for line in listed.splitlines() if ": " in line]):
        assert any("first 1.2.3" in line and "second 1.2.3" in line for line in lines)
        assert any("'builtin' (thief 1.2.3" in line and "left out" in line for line in lines)


def test_metadata_that_stands_twice_on_the_path_is_one_distribution(
    place: Place, config_of: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place("twice", "mine")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "twice")
    monkeypatch.syspath_prepend(str(link))
    prepare(config_of(scheduler="one_by_one"))
    assert len([plugin for plugin in list_plugins() if plugin.name == "mine"]) == 1


@pytest.mark.parametrize(
    ("replace", "said"),
    [
        ({"scheduler.one_by_one": "nobody"}, "does not provide it"),
        ({"scheduler.fcfs": "mine"}, "allowed: scheduler.one_by_one"),
        ({"plugin.mine": "mine"}, "'mine' is the name of several plugins.*allowed: .*first"),
    ],
)
def test_a_replacement_that_settles_nothing(
    place: Place, config_of: Configure, replace: dict[str, str], said: str
) -> None:
    place("first", "mine")
    place("second", "mine")
    with pytest.raises(errors.ConfigError, match=said):
        prepare(config_of(plugins={"replace": replace}))


BROKEN: dict[str, dict[str, Any]] = {
    "no_value": {"entry_points": "[pegboard]\nevil = \n"},
    "no_equals": {"entry_points": "[pegboard]\nevil\n"},
    "no_module": {"entry_points": "[pegboard]\nevil = not a module!\n"},
    "dots": {"entry_points": "[pegboard]\nevil = ..\n"},
    "encoding": {"entry_points": "[pegboard]\nev\xefl = {package}\n"},
    "reserved": {"entry_points": "[pegboard]\nbuiltin = {package}\n"},
    "nameless": {"metadata": "Metadata-Version: 2.1\nVersion: 1.2.3\n"},
    "versionless": {"metadata": "Metadata-Version: 2.1\nName: versionless\n"},
    "metadata": {"metadata": "Metadata-Version: 2.1\nName: m\xe9tadata\nVersion: 1.2.3\n"},
    "empty": {"metadata": ""},
    "escape": {"entry_points": "[pegboard]\n\x1b[2Jevil\x9b = {package}\n"},
    "needs": {"more": "requires = { packages = ['no_such.sub', '', '..', 'json.nothing'] }"},
    "dotted": {"more": "estimate = 'no function'"},
    "priority": {"more": "priority = 99999999999999999999"},
    "digits": {"more": f"priority = {'9' * 5000}"},
    "nested": {"more": "x = " + "[" * 100_000},
    "tables": {"more": "x = " + "{a=" * 10_000},
    "long_key": {"more": ".".join("a" * 100_000) + " = 1"},
    "key_lines": {"more": "\n".join(f"{'a.' * 9}b{i} = 1" for i in range(100))},
    "quoted_key": {"more": ".".join(['"a"'] * 9) + " = 1"},
    "huge": {"more": "# " + "x" * 70_000},
    "quotes": {"more": 'x = "' + '\\"' * 30_000},
    "bell": {"name": "be\\u0007ll"},
    "newline": {"name": "two\\nlines"},
    "end_of_line": {"name": "line\\n"},
    "end_of_summary": {
        "more": '[[provides]]\ninterface = "scheduler"\nversion = 1\nname = "b"\nsummary = "a\\n"'
    },
    "end_of_function": {"more": 'estimate = ":bytes\\n"'},
    "again": {
        "more": '[[provides]]\ninterface = "scheduler"\nversion = 1\nname = "one_by_one"\nsummary = ""'
    },
}


@pytest.mark.parametrize("field", ["name", "summary"])
@pytest.mark.parametrize("text", ["be\\u0007ll", "\\u001b[2J", "\\u202eme", "me\\n"])
def test_a_plugin_says_of_itself_what_can_be_printed(field: str, text: str) -> None:
    said = {"name": "mine", "summary": "Of the test", field: text}
    header = "".join(f'{key} = "{value}"\n' for key, value in said.items())
    origin = Origin(plugin="mine", distribution=SINGLE_FILE, version="", module="m", path="m.py")
    with pytest.raises(errors.ManifestInvalid, match=f"printable|plugin.{field}"):
        parse_manifest(f"provides = []\n[plugin]\n{header}", origin)


def test_a_command_that_the_core_has_is_told(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place("greedy", "greedy", interface="command", name="serve")
    assert main(["plugins"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "contested" in line]
    assert line.strip().startswith("contested: command 'serve' is the core's own")


def test_no_plugin_that_nothing_names_stops_or_garbles_a_command(
    place: Place, config_of: Configure, capsys: pytest.CaptureFixture[str]
) -> None:
    for case, values in BROKEN.items():
        place(case, "evil" if "entry_points" in values else case, **values)
    prepare(config_of())
    assert main(["plugins"]) == 0
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert main(["plugins", "--json"]) == 0
    text = capsys.readouterr().out
    assert text.replace("\n", "").isprintable()
    listed = json.loads(text)
    for case in BROKEN:
        (problem,) = [p["problem"] for p in listed if p["distribution"] == case]
        assert problem, case
        assert "\n" not in problem
    assert main(["--help"]) == 0


def test_a_manifest_that_is_no_regular_file_is_not_read(place: Place, config_of: Configure) -> None:
    pipe, device = place("pipe", "pipe"), place("device", "device")
    for package in (pipe, device):
        (package / "plugin.toml").unlink()
    os.mkfifo(pipe / "plugin.toml")
    (device / "plugin.toml").symlink_to("/dev/zero")
    prepare(config_of())
    problems = {plugin.name: plugin.problem or "" for plugin in list_plugins()}
    assert "only regular files" in problems["pipe"] and "only regular files" in problems["device"]
