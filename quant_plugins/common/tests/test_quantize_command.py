"""`pegboard quantize` on tiny models: what it writes, what it goes on with, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from safetensors import safe_open

from pegboard.errors import ConfigError, ConfigMistakes, UserError
from pegboard.interfaces.command import CommandFactory
from pegboard.interfaces.quantizer import Calibrator
from pegboard.testing.command import CommandContract
from pegboard.testing.command_context import TinyCommandContext
from pegboard.testing.tiny import write_tiny_model
from pegboard_quant.command import application
from pegboard_quant.progress_file import STATE
from pegboard_quant.quantize import Job, quantize
from pegboard_quant.recipe import read_recipe
from pegboard_quant.rtn import RTNCalibrator

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
}


class RTNWithInputs(RTNCalibrator):
    """Looks at inputs, and does nothing with them."""

    @classmethod
    def needs_inputs(cls, settings: object) -> bool:
        return True


class Context(TinyCommandContext):
    calibrators: ClassVar[Mapping[str, type[Calibrator]]] = {
        "rtn": RTNCalibrator,
        "looking": RTNWithInputs,
    }


class TestQuantizeCommand(CommandContract):
    arguments = (
        *("--model", "{model}", "--out", "{folder}/out", "--method", "rtn"),
        *("--group-size", "-1", "--bits", "8", "--data", "{model}/config.json"),
        *("--samples", "2", "--length", "8"),
    )
    context = Context

    @pytest.fixture
    def make(self) -> CommandFactory:
        return application

    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=True, **SIZES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, tokenizer=True, dtype="bfloat16", **SIZES)
    (folder / "text.txt").write_text("the quick brown fox and the lazy dog. " * 20)
    return folder


def job(model: Path, out: Path, method: str = "rtn", **others: Any) -> Job:
    settings = {"data": model / "text.txt", "num_texts": 3, "text_length": 12}
    said = {"group_size": 32}
    return Job(str(model), method, out, **{**settings, "said": said, **others})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_folder_is_a_checkpoint_with_the_models_config_and_tokenizer(
    model: Path, tmp_path: Path
) -> None:
    report = quantize(job(model, tmp_path / "out"), Context())
    assert (report.num_quantized, report.num_kept) == (21, 2)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "gptq"
    assert config == json.loads((model / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) == 4
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        with (
            safe_open(tmp_path / "out" / index[name], "pt") as new,
            safe_open(model / "model.safetensors", "pt") as old,
        ):
            assert bool((new.get_tensor(name) == old.get_tensor(name)).all())
            assert new.get_tensor(name).dtype == old.get_tensor(name).dtype
    left = {path.name for path in (tmp_path / "out").iterdir()} - set(index.values())
    assert not [name for name in left if name.startswith((".", "unfinished"))]
    # Another user may serve the checkpoint.
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1


class Killed(Exception):
    pass


@pytest.mark.parametrize("finished", [0, 1, 2, 3])
def test_a_run_that_was_broken_off_goes_on_and_gives_the_same_bytes(
    model: Path, tmp_path: Path, finished: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(job(model, tmp_path / "whole"), Context())

    from pegboard_quant import output

    write, written = output.write_tensors, 0

    def killing(path: Path, tensors: object) -> None:
        nonlocal written
        if path.suffix == ".safetensors":
            if written == finished:
                path.with_name(f".{path.name}.new").write_bytes(b"half")
                raise Killed
            written += 1
        write(path, tensors)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(output, "write_tensors", killing)
        with pytest.raises(Killed):
            quantize(job(model, tmp_path / "out"), Context())
    assert not (tmp_path / "out/config.json").exists()
    assert len(json.loads((tmp_path / "out" / STATE).read_text())["layers"]) == finished
    with pytest.raises(ConfigError, match=r"out: .* of another model, text, settings"):
        quantize(job(model, tmp_path / "out", said={"group_size": 32, "bits": 8}), Context())
    quantize(job(model, tmp_path / "out"), Context())
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_the_first_rule_that_means_a_weight_counts(model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "method: rtn\n"
        "settings: {bits: 4, group_size: 32}\n"
        "rules:\n"
        "- {match: '*.1.self_attn.*', settings: {bits: 8}}\n"
        "- {match: '*.down_proj', keep: true}\n"
        "- {match: '*.1.*', kind: linear, settings: {group_size: -1}}\n"
        "- {kind: head, keep: true}\n"
    )
    said: dict[str, Any] = {"said": {}, "recipe": read_recipe(recipe), "recipe_name": recipe.name}
    quantize(job(model, tmp_path / "out", **said), Context())
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert (config["bits"], config["group_size"]) == (4, 32)
    kept = {key for key in config["dynamic"] if key.startswith("-:")}
    assert len(kept) == 5 and sum("down_proj" in key for key in kept) == 3
    found = {
        key.rpartition("\\.")[2].strip("$"): (said["bits"], said["group_size"])
        for key, said in config["dynamic"].items()
        if key.startswith("+:")
    }
    assert found == {
        **{f"{part}_proj": (8, 32) for part in "qkvo"},
        "gate_proj": (4, -1),
        "up_proj": (4, -1),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: [{match: '*.up_prj', keep: true}]", r"r.yaml.rules.0: means no weight"),
        ("rules: [{match: '*', setings: {}}]", r"r.yaml.rules.0.setings: no such setting"),
        ("rules: [{settings: {bits: 5}}]", r"r.yaml.rules.0.settings.bits: Input should be"),
        ("rules: [{settings: {clip: true}}]", r"rules.0.settings.clip: no such setting; allowed"),
        ("rules: [{kind: head, settings: {bits: 8}}]", r"r.yaml.rules.0.kind: head is always kept"),
        ("rules: [{keep: true}]", r"r.yaml: keeps every weight"),
        ("rules: [{keep: true, settings: {bits: 8}}]", r"rules.0: keeps weights and has settings"),
        ("settings: {group_size: 0}", r"r.yaml.settings.group_size: Value error, -1 or a positive"),
        ("rules: {", r"r.yaml: not YAML"),
        ("just text", r"r.yaml"),
    ],
)
def test_a_recipes_mistakes_are_told_with_their_path(
    model: Path, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        recipe = read_recipe(tmp_path / "r.yaml")
        quantize(
            job(model, tmp_path / "out", recipe=recipe, recipe_name="r.yaml", said={}), Context()
        )
    assert not (tmp_path / "out").exists()


def test_several_mistakes_are_told_together(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("metod: rtn\nrules: [{mach: x}]")
    with pytest.raises(ConfigMistakes, match=r"rules\.0\.mach: .*metod: no such"):
        read_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "magic"}, "method: 'magic'; allowed: rtn, looking"),
        ({"method": "looking", "data": None}, "data: is not given, and looking looks at inputs"),
        ({"data": Path("nowhere.txt")}, "data: nowhere.txt cannot be read"),
        ({"said": {"group_size": 40}}, "group_size: 40 does not divide the 64 inputs of model"),
        ({"said": {"alpha": 1}}, "settings.alpha: no such setting; allowed: bits, group_size, sym"),
        ({"text_length": 600, "num_texts": 9}, "length: 600 tokens; allowed: at most 512"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(
    model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (model / "text.txt").write_text("the quick brown fox and the lazy dog. " * 200)
    context = Context()
    with pytest.raises(UserError, match=message):
        quantize(job(model, tmp_path / "out", **changes), context)
    assert not (tmp_path / "out").exists() and context.all_closed


def test_a_file_without_text_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="holds no text"):
        quantize(job(model, tmp_path / "out", data=tmp_path / "empty.txt"), Context())


def test_a_folder_that_holds_something_else_is_left_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ConfigError, match=r"is not empty \(mine.txt\)"):
        quantize(job(model, tmp_path), Context())
    assert contents(tmp_path) == {"mine.txt": b"precious"}


def test_method_of_command_line_and_recipe_must_agree(model: Path, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("method: rtn")
    suite = TestQuantizeCommand()
    arguments = ["--model", str(model), "--out", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match="method: is not given"):
        suite.run(application, Context(), arguments)
    arguments += ["--recipe", str(tmp_path / "r.yaml")]
    with pytest.raises(ConfigError, match="the recipe says 'rtn'"):
        suite.run(application, Context(), [*arguments, "--method", "looking"])
    with pytest.raises(ConfigError, match="--set: 'sym'"):
        suite.run(application, Context(), [*arguments, "--set", "sym"])
