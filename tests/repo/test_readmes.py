"""The commands and code in READMEs and CONTRIBUTING run as they stand there."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder

from pegboard import Config

ROOT = Path(__file__).parents[2]
READMES = [ROOT / "README.md", ROOT / "core" / "README.md", *ROOT.glob("*plugins/*/README.md")]
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def commands(path: Path, program: str) -> list[str]:
    """The shell commands of a text that begin with a program, continued lines joined."""
    text = "\n".join(blocks(path, "bash")).replace("\\\n", "")
    return [
        match[0] for match in re.finditer(rf"^{program} (?:'[^']*'|[^\n'])*", text, re.MULTILINE)
    ]


def run(argv: list[str], folder: Path = ROOT) -> str:
    done = subprocess.run(
        argv, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def needs_server(source: str) -> bool:
    return "127.0.0.1:8000" in source


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_python_examples_run(path: Path) -> None:
    for source in blocks(path, "python"):
        if not needs_server(source):
            said = run([sys.executable, "-c", source])
            assert "Paris" in said or "capital of France" not in source


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_config_examples_are_valid(path: Path) -> None:
    for source in blocks(path, "yaml"):
        Config.from_values(yaml.safe_load(source))


def test_the_first_example_asks_for_a_capital() -> None:
    (source,) = [text for text in blocks(ROOT / "README.md", "python") if "LLM(" in text]
    assert "capital of France" in source


def test_shell_examples_run() -> None:
    shown = [
        text
        for text in commands(ROOT / "README.md", "pegboard")
        if "--html" not in text and not text.startswith("pegboard serve")
    ]
    assert len(shown) == 3
    outputs = [run(shlex.split(command)) for command in shown]
    assert "Paris" in outputs[0]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["pegboard bench", "pegboard eval"])
def test_shell_examples_that_measure_run(program: str, tmp_path: Path) -> None:
    (command,) = commands(ROOT / "README.md", program)
    page = tmp_path / "out.html"
    run(shlex.split(command.replace("out.html", str(page))))
    assert "<svg" in page.read_text()


def test_the_command_line_of_a_tutorial_goes_together() -> None:
    _, command, _ = commands(ROOT / "README.md", "serve")
    checked = json.loads(run(["pegboard", "check", *shlex.split(command)[1:], "--json"]))
    assert checked["max_model_len"]["value"] == 2048
    (cache,) = [part for part in checked["parts"] if part["interface"] == "prefix_cache"]
    num_sequences = 16 if cache["name"] == "none" else 2 * 16  # the rest is for known prefixes
    assert checked["memory"]["num_full_sequences"] == num_sequences


def test_the_drafter_of_a_tutorial_goes_together() -> None:
    *_, command = commands(ROOT / "README.md", "serve")
    checked = json.loads(run(["pegboard", "check", *shlex.split(command)[1:], "--json"]))
    (drafter,) = [part for part in checked["parts"] if part["interface"] == "drafter"]
    assert drafter["name"] == "ngram"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The server of the README's command, on a free port."""
    command, *_ = commands(ROOT / "README.md", "serve")
    with serving(command, ROOT) as port:
        yield port


@contextmanager
def serving(command: str, folder: Path) -> Iterator[int]:
    """Runs a command that serves, on a free port, while the body does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [*shlex.split(command), "--port", str(port)]
    process = subprocess.Popen(argv, cwd=folder, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not _healthy(port):
            assert process.poll() is None and time.monotonic() < deadline, (
                "the server did not start"
            )
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=30)


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_the_curl_examples_are_answered(port: int) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    shown = commands(ROOT / "README.md", "curl")[:2]
    chat, models = (_curl(command, port) for command in shown)
    assert "Paris" in chat and '"finish_reason"' in chat
    assert '"data"' in models


def test_the_metrics_of_the_drafter_example_show_acceptance_by_position() -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    (command,) = commands(ROOT / "README.md", "pegboard serve")
    _, _, ask, metrics = commands(ROOT / "README.md", "curl")
    name = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{.*position="1".*} ([0-9.]+)'
    with serving(command, ROOT) as port:
        assert '"finish_reason"' in _curl(ask, port)
        deadline = time.monotonic() + 30
        asked = metrics.partition("|")[0]
        while not ((shown := re.search(name, _curl(asked, port))) and float(shown[1])):
            assert time.monotonic() < deadline, shown
            time.sleep(0.2)


def _curl(command: str, port: int) -> str:
    """The answer to a command of the text, sent to a port of ours."""
    return run(
        ["bash", "-c", command.replace("curl", "curl --silent").replace(":8000", f":{port}")]
    )


def test_the_openai_example_is_answered(port: int) -> None:
    (source,) = [text for text in blocks(ROOT / "README.md", "python") if needs_server(text)]
    assert run([sys.executable, "-c", source.replace(":8000", f":{port}")]).strip()


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of CONTRIBUTING's tutorial; the first line of each is its name."""
    folder = tmp_path_factory.mktemp("tutorial")
    for source in blocks(ROOT / "CONTRIBUTING.md", "python"):
        name = source.splitlines()[0].removeprefix("# ")
        (folder / name).write_text(source)
    return folder


def test_the_first_plugin_of_the_tutorial_is_a_dozen_lines_and_goes_together(
    tutorial: Path,
) -> None:
    lines = (tutorial / "newest_first.py").read_text().splitlines()[1:]
    assert len([line for line in lines if line]) <= 13, "a dozen lines, and the end of the manifest"
    (command,) = commands(ROOT / "CONTRIBUTING.md", "serve")
    assert "newest_first" in run(["pegboard", "check", *shlex.split(command)[1:]], tutorial)


@pytest.mark.slow
def test_the_first_plugin_of_the_tutorial_is_served(tutorial: Path) -> None:
    (command,) = commands(ROOT / "CONTRIBUTING.md", "serve")
    with serving(command, tutorial) as port:
        asked = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps({"model": command.split()[1], **asked}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert "Paris" in json.load(answer)["choices"][0]["text"]


@pytest.mark.parametrize(
    "chosen",
    [["-k", "full_pool"], pytest.param([], marks=pytest.mark.slow)],
    ids=["one test", "as it stands"],
)
def test_the_suite_finds_what_the_first_plugin_lacks(tutorial: Path, chosen: list[str]) -> None:
    argv = [sys.executable, "-m", "pytest", "-q", "test_newest_first.py", *chosen]
    done = subprocess.run(
        argv, cwd=tutorial, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "test_a_full_pool_does_not_stop_the_work" in done.stdout


@pytest.mark.parametrize(
    "program", ["pegboard generate", pytest.param("pytest", marks=pytest.mark.slow)]
)
def test_the_second_plugin_of_the_tutorial_works(tutorial: Path, program: str) -> None:
    (command,) = commands(ROOT / "CONTRIBUTING.md", program)
    assert run(shlex.split(command), tutorial).strip()


def test_the_distribution_of_the_tutorial_has_the_files_that_it_names() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.split("| file | holds |")[1].split("\n\n")[0]
    folder = ROOT / "examples" / "my_plugin"
    named = re.findall(r"^\| `([\w./]+)` \|", table, re.MULTILINE)
    assert len(named) == 7
    assert [name for name in named if not (folder / name).is_file()] == []
    (entry_point,) = blocks(ROOT / "CONTRIBUTING.md", "toml")
    assert entry_point in (folder / "pyproject.toml").read_text()


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the core's wheel, which finds all else in ours."""
    folder = tmp_path_factory.mktemp("author")
    run([sys.executable, "-m", "venv", str(folder / "venv")])
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    ours = sysconfig.get_path("purelib")
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    builder = WheelBuilder(str(ROOT / "core"))
    (wheel,) = builder.build(directory=str(folder), versions=["standard"])
    python = str(folder / "venv" / "bin" / "python")
    run([python, "-m", "pip", "install", "--no-index", "--no-deps", "--ignore-installed", wheel])
    return folder / "venv" / "bin"


@pytest.mark.slow
def test_a_distribution_is_published_as_the_tutorial_says(programs: Path, tmp_path: Path) -> None:
    project = tmp_path / "pegboard-oldest-first"
    copy_with_other_names(ROOT / "examples" / "my_plugin", project)
    (block,) = [text for text in blocks(ROOT / "CONTRIBUTING.md", "bash") if "pip wheel" in text]
    environment = {**ENVIRONMENT, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert f"pegboard-oldest-first 0.1.0  {project / 'pegboard_oldest_first'}" in done.stdout
    (wheel,) = (project / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert "pegboard_oldest_first/plugin.toml" in names
    assert [name for name in names if not name.startswith("pegboard_oldest_first/")] == []


def copy_with_other_names(source: Path, target: Path) -> None:
    """Copies the example, with every form of its name replaced, in texts and in names of files."""
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            copy = target / renamed(path.relative_to(source).as_posix())
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(renamed(path.read_text()))


def renamed(text: str) -> str:
    """With a stranger's name in each of the forms that CONTRIBUTING names."""
    forms = re.search(
        r"three forms, `(\w+)`,\s`([\w-]+)` and `(\w+)`", (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert forms is not None
    others = ("oldest_first", "oldest-first", "OldestFirst")
    for form, other in zip(forms.groups(), others, strict=True):
        text = text.replace(form, other)
    return text


@pytest.mark.parametrize("path", [*READMES, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    text = path.read_text()
    named = re.findall(r"\]\(([\w./]+)\)", text)
    named += re.findall(r"`((?:core|examples|tests|\.ci)/[\w./]+)`", text)
    folders = (path.parent, ROOT / "examples" / "my_plugin")
    places = [name for name in named if not any((one / name).exists() for one in folders)]
    modules = re.findall(
        r"`((?:server|engine|runner|models|plugins|planner|compose|builtin)/\w+\.py)", text
    )
    places += [name for name in modules if not (ROOT / "core" / "pegboard" / name).is_file()]
    assert [name for name in places if name != "core/pegboard/interfaces/x.py"] == []


def test_the_layout_names_every_package_and_nothing_else() -> None:
    layout = (ROOT / "README.md").read_text().split("## Layout")[1].split("```")[1]
    inside = layout.split("  pegboard/\n")[1].split("\n  tests/")[0]
    package = ROOT / "core" / "pegboard"
    packages = {path.parent.name for path in package.glob("*/__init__.py")}
    named = [
        name for line in inside.splitlines() for name in re.findall(r"\S+/|\S+\.py", line[:47])
    ]
    assert {name.rstrip("/") for name in named if name.endswith("/")} == packages
    assert [name for name in named if not (package / name).exists()] == []


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        named = set(re.findall(r"(?:`|^)make ([\w-]+)", path.read_text(), re.MULTILINE))
        assert named and named <= targets


def test_the_table_of_interfaces_names_everything_that_is_provided() -> None:
    rows = re.findall(r"^\| `(\w+)` \|(.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    table = dict(rows)
    manifests = [ROOT / "core/pegboard/builtin/plugin.toml", *ROOT.glob("*plugins/*/*/plugin.toml")]
    for path in manifests:
        for entry in tomllib.loads(path.read_text())["provides"]:
            assert entry["interface"] in table, entry
            assert entry["name"] in table[entry["interface"]], entry
