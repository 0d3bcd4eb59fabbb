"""The plan of a drafter's model, and refusals before a weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from safetensors.torch import load_file, save_file

from pegboard import Config
from pegboard.builtin.torch_attention import TorchAttention
from pegboard.cli import main
from pegboard.compose import Prepared, prepare
from pegboard.compose.making import Maker
from pegboard.compose.worker import worker_parts
from pegboard.errors import CompositionRefused, InterfaceNotSatisfied
from pegboard.interfaces.attention import AttentionContext
from pegboard.interfaces.drafter import VERSION, DrafterContext, DrafterFacts, DraftSlots
from pegboard.plugins.listing import list_plugins
from pegboard.testing import model_drafters
from pegboard.testing.model_drafters import SecondModel
from pegboard.testing.tiny import write_tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target") / "m")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft") / "m"
    return write_tiny_model(folder, seed=1, num_hidden_layers=1, num_key_value_heads=5)


Drafted = Callable[..., Prepared]


@pytest.fixture
def drafted(target: Path, draft: Path) -> Drafted:
    """(kind=SecondModel, **changes of the section drafter) -> what is prepared."""

    def make(kind: type[Any] = SecondModel, **drafter: Any) -> Prepared:
        config = {
            "model": str(target),
            "max_model_len": 64,
            "scheduler": {"max_num_seqs": 4},
            "drafter": {"model": str(draft), **drafter},
        }
        return prepare(Config.from_values(config), drafter=kind)

    return make


def start(prepared: Prepared) -> None:
    """Makes a worker's parts."""
    maker = Maker(prepared.composition, prepared.objects)
    worker_parts(prepared.composition, maker)


def test_planner_and_ledger_count_its_weights_groups_and_blocks(
    drafted: Drafted, target: Path
) -> None:
    found = drafted()
    plain = prepare(Config.from_values({"model": str(target), "max_model_len": 64}))
    names = [entry.name for entry in found.ledger.entries]
    for line in ("draft: weights: embedding", "draft: weights: layers", "draft: weights: head"):
        assert line in names
    assert sum(name.startswith("draft: KV: ") for name in names) == 1
    assert [group.model for group in found.composition.groups] == ["target", "draft"]
    own, theirs = found.ledger.num_blocks
    assert theirs >= own  # it has room for the slots past the last known token too
    assert found.ledger.total_bytes > plain.ledger.total_bytes
    assert found.composition.fingerprint != plain.composition.fingerprint
    start(found)


@pytest.mark.parametrize(
    ("facts", "drafter", "reason"),
    [
        (DrafterFacts(taps=(3,)), {}, "wants taps [3]; allowed: -1 to 2"),
        (DrafterFacts(shape="registry"), {"model": None}, "needs a model; fix: name drafter.model"),
        (DrafterFacts(shape="registry"), {"model": "/does/not/exist"}, "drafter.model: "),
        (
            DrafterFacts(shape="registry", quantizer="nobody"),
            {},
            "drafter.model: quantizer: no installed plugin provides 'nobody'",
        ),
    ],
    ids=["taps", "no model", "no such model", "no such quantizer"],
)
def test_what_it_cannot_have_is_refused_at_once(
    drafted: Drafted,
    monkeypatch: pytest.MonkeyPatch,
    facts: DrafterFacts,
    drafter: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.setattr(model_drafters, "describe_second_model", lambda *asked: facts)
    with pytest.raises(Exception) as caught:  # of the kind that the reason has
        drafted(**drafter)
    assert reason in str(caught.value)


def test_another_vocabulary_needs_a_map(
    drafted: Drafted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_tiny_model(tmp_path / "m", vocab_size=300)
    with pytest.raises(CompositionRefused, match="has 300 tokens and the target 517"):
        drafted(model=str(other))
    facts = DrafterFacts(shape="registry", maps_vocabulary=True)
    monkeypatch.setattr(model_drafters, "describe_second_model", lambda *asked: facts)
    drafted(model=str(other))


Edit = Callable[[dict[str, Any]], None]
"""Changes the content of a tokenizer.json."""


def _rename(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    for number, token in enumerate([text for text, i in vocabulary.items() if i in (100, 200)]):
        vocabulary[f"<other{number}>"] = vocabulary.pop(token)
    gone = {merge[0] + merge[1] for merge in tokenizer["model"]["merges"]} - vocabulary.keys()
    assert not gone


def _add(content: str, token_id: int) -> Edit:
    def add(tokenizer: dict[str, Any]) -> None:
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        token = {"id": token_id, "content": content, **dict.fromkeys(flags, False)}
        tokenizer["added_tokens"].append(token)

    return add


@pytest.fixture
def with_tokenizers(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """(rows of the draft's embedding, change of its tokenizer) -> the keys of both models."""

    def write(vocab_size: int, edit: Edit = lambda tokenizer: None) -> dict[str, str]:
        target = write_tiny_model(tmp_path / "t", tokenizer=True)
        draft = write_tiny_model(tmp_path / "d", tokenizer=True, vocab_size=vocab_size)
        file = draft / "tokenizer.json"
        content = json.loads(file.read_text())
        edit(content)
        file.write_text(json.dumps(content))
        return {"model": str(target), "drafter": str(draft)}

    return write


def prepared_of(keys: dict[str, str]) -> Prepared:
    config = {"model": keys["model"], "max_model_len": 64, "drafter": {"model": keys["drafter"]}}
    return prepare(Config.from_values(config), drafter=SecondModel)


@pytest.mark.parametrize("vocab_size", [400, 517, 640])
def test_padding_of_the_embedding_is_no_other_vocabulary(
    with_tokenizers: Callable[..., dict[str, str]], vocab_size: int
) -> None:
    """Nor are the names that GGUF files give to its rows."""
    num_tokens = len(
        json.loads(tokenizer_of(with_tokenizers(vocab_size)).read_text())["model"]["vocab"]
    )
    prepared_of(with_tokenizers(vocab_size, _add(f"[PAD{num_tokens}]", num_tokens)))


def tokenizer_of(keys: dict[str, str]) -> Path:
    return Path(keys["drafter"]) / "tokenizer.json"


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (
            _rename,
            r"other tokens .*: 100 is '<other0>' for '.*', 200 is '<other1>' for .*\(2 differ\)",
        ),
        (_add("<more>", 320), r"other tokens .* is '<more>' for no token \(1 differ\); it has"),
    ],
    ids=["renamed", "added"],
)
def test_other_tokens_are_refused_by_their_texts(
    with_tokenizers: Callable[..., dict[str, str]],
    edit: Edit,
    reason: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Though the embeddings have as many rows. `check` says so, and loads no weight."""
    keys = with_tokenizers(517, edit)
    with pytest.raises(CompositionRefused, match=reason):
        prepared_of(keys)
    (tmp_path / "second_model.py").write_text(PLUGIN)
    drafting = f"drafter={{name: second_model, model: {keys['drafter']}}}"
    load = f"plugins.load=[{tmp_path / 'second_model.py'}]"
    assert main(["check", keys["model"], "--set", load, "--set", drafting]) == 2
    said = capsys.readouterr().err
    assert "other tokens" in said and "fix: name a model that has the target's tok" in said


def test_a_tokenizer_that_cannot_be_read_is_refused(
    with_tokenizers: Callable[..., dict[str, str]],
) -> None:
    keys = with_tokenizers(517)
    tokenizer_of(keys).write_text("{}")
    with pytest.raises(
        CompositionRefused, match=r"drafter\.model: .*tokenizer\.json: cannot be used"
    ):
        prepared_of(keys)


def test_its_tensors_are_checked_as_the_targets(drafted: Drafted, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CompositionRefused, match=r"tensor 'model.norm.weight' is missing"):
        drafted(model=str(folder))


class Idle(SecondModel):
    def __init__(self, context: DrafterContext) -> None:
        pass


class Twice(SecondModel):
    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        context.load_model(str(context.model))


class Elsewhere(SecondModel):
    def __init__(self, context: DrafterContext) -> None:
        context.load_model("somewhere/else")


class Own(SecondModel):
    def __init__(self, context: DrafterContext) -> None:
        assert context.target_shape is not None
        context.unit(context.target_shape, lambda builder: lambda ids, positions, hidden: ids)


class Kernels(SecondModel):
    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        assert context.kernel("linear") and context.kernel("rms_norm")
        context.kernel("linear", "a format that nobody has")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Idle, "describes a model and makes none"),
        (Twice, "makes a second model"),
        (Elsewhere, "loads model 'somewhere/else'"),
        (Own, "makes layers of its own"),
        (Kernels, "asks for a kernel of linear"),
    ],
)
def test_what_it_makes_is_what_it_described(drafted: Drafted, kind: type[Any], reason: str) -> None:
    kind.manifest = SecondModel.manifest
    with pytest.raises(InterfaceNotSatisfied, match=reason):
        start(drafted(kind))


def test_an_attention_object_serves_one_model_alone(target: Path, draft: Path) -> None:
    config = {"model": str(target), "max_model_len": 64, "drafter": {"model": str(draft)}}
    context = AttentionContext((), (), 1, "float32", "cpu", 1, cast(Any, None))
    parts: dict[str, Any] = {"drafter": SecondModel, "attention": Attending(context)}
    with pytest.raises(InterfaceNotSatisfied, match="is one object, and the drafter's model needs"):
        start(prepare(Config.from_values(config), **parts))
    parts["attention"] = Attending
    start(prepare(Config.from_values(config), **parts))


class Attending(TorchAttention):
    manifest: ClassVar[dict[str, Any]] = {
        "layout": "pegboard.builtin.torch_attention_layout:layout"
    }


PLUGIN = f"""# /// pegboard
# plugin = {{name = "second_model"}}
# [[provides]]
# interface = "drafter"
# version = {VERSION}
# name = "second_model"
# summary = "A second model of the registry"
# promises = ["draft_model"]
# describe = "pegboard.testing.model_drafters:describe_second_model"
# ///
from pegboard import hookimpl


@hookimpl
def pegboard_drafters():
    from pegboard.testing.model_drafters import SecondModel

    return {{"second_model": SecondModel}}
"""


def test_check_makes_and_shows_it(
    tmp_path: Path, target: Path, draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "second_model.py"
    file.write_text(PLUGIN)
    drafting = f"drafter={{name: second_model, model: {draft}}}"
    arguments = ["check", str(target), "--max-model-len", "64", "--load"]
    assert main([*arguments, "--set", f"plugins.load=[{file}]", "--set", drafting]) == 0
    said = capsys.readouterr().out
    assert f"drafter: its model is {draft} (LlamaForCausalLM)" in said
    assert "draft: weights: layers" in said and "draft: KV: " in said


def test_loading_a_plugin_leaves_out_what_needs_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "second_model.py"
    file.write_text(PLUGIN)
    others = [plugin.name for plugin in list_plugins() if plugin.name != "builtin"]
    config = tmp_path / "config.yaml"
    plugins = {"load": [str(file)], "disable": sorted(others)}
    config.write_text(json.dumps({"model": "none", "plugins": plugins}))
    assert main(["plugins", "--load", "--json", "--config", str(config)]) == 0
    (loaded,) = (
        plugin for plugin in json.loads(capsys.readouterr().out) if plugin["name"] == "second_model"
    )
    assert loaded["faults"] == [] and "needs a checkpoint" in loaded["not_made"][0]


def test_a_model_that_was_not_described_is_refused(
    drafted: Drafted, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = DrafterFacts(slots=DraftSlots())
    monkeypatch.setattr(model_drafters, "describe_second_model", lambda *asked: facts)
    with pytest.raises(InterfaceNotSatisfied, match="makes a model; allowed: what its manifest"):
        start(drafted())
