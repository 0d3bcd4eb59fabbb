"""Training of heads: the unrolled head is the head that drafts, and runs go on where they broke off."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file

from pegboard import Engine, SamplingParams
from pegboard.errors import ConfigError
from pegboard.interfaces.command import CommandFactory
from pegboard.testing.command import CommandContract
from pegboard.testing.command_context import TinyCommandContext
from pegboard.testing.tiny import write_tiny_model
from pegboard.testing.watched_drafter import Notes, watched
from pegboard_eagle.drafter import EagleDrafter
from pegboard_eagle.training.answers import Answer
from pegboard_eagle.training.columns import NOT_DRAWN, columns
from pegboard_eagle.training.command import application
from pegboard_eagle.training.export import export
from pegboard_eagle.training.head import Head, HeadShape
from pegboard_eagle.training.loss import LossOptions, loss_of
from pegboard_eagle.training.precision import in_bfloat16
from pegboard_eagle.training.prompts import read_prompts
from pegboard_eagle.training.recording import Recorder, record
from pegboard_eagle.training.run import Job, train_head
from pegboard_eagle.training.start import Regression
from pegboard_eagle.training.target import head_shape
from pegboard_eagle.training.trainer import TrainOptions

T = TypeVar("T")

PROMPTS = tuple(f"the fox and {i} dogs" for i in range(24))
K = 4
MANIFEST = {
    "describe": "pegboard_eagle.layout:describe",
    "options": "pegboard_eagle.options:EagleOptions",
    "promises": ["draft_model"],
}


class TestCommand(CommandContract):
    arguments = (
        *("--model", "{model}", "--data", "{model}/tokenizer_config.json", "--out", "{folder}/out"),
        *("--max-tokens", "6", "--report-tokens", "3", "--epochs", "1", "--draft-vocab", "60"),
    )

    @pytest.fixture
    def make(self) -> CommandFactory:
        return application


class Broken(Exception):
    pass


class BreaksOff(TinyCommandContext):
    """Ends a run in the middle of what a label names."""

    def __init__(self, label: str, after: int) -> None:
        super().__init__()
        self._label, self._after = label, after

    def progress(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        for number, item in enumerate(items):
            if label == self._label and number == self._after:
                raise Broken
            yield item


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), tokenizer=True, num_hidden_layers=3)


def job_of(model: Path, out: Path, **changes: Any) -> Job:
    train = TrainOptions(3, 96, 1e-3, 2, 0, LossOptions(3, 0.8, 0.5), in_bfloat16=False)
    job = Job(
        config={"model": str(model), "threads": 1},
        prompts=PROMPTS,
        held_out=None,
        out=out,
        max_tokens=20,
        max_prompt_tokens=64,
        temperature=0.0,
        seed=0,
        batch=8,
        draft_vocab=400,
        intermediate_size=None,
        report_tokens=8,
        train=train,
    )
    return replace(job, **changes)


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing broke off."""
    out = tmp_path_factory.mktemp("whole") / "head"
    train_head(job_of(model, out), TinyCommandContext())
    return out


@pytest.fixture(scope="module")
def answers(model: Path) -> list[Answer]:
    """The target's answers."""
    recorders: list[Recorder] = []

    def recorder(context: Any) -> Recorder:
        recorders.append(Recorder(context, (2, 1, 0), 3))
        return recorders[0]

    with Engine({"model": str(model), "threads": 1}, drafter=recorder) as engine:
        assert engine.tokenizer is not None
        prompts = {i: engine.tokenizer.encode(text) for i, text in enumerate(PROMPTS[:6])}
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        return list(record(engine, recorders[0], prompts, params))


def random_head(target: Any, vocab_size: int) -> Head:
    torch.manual_seed(5)
    head = Head(head_shape(target, vocab_size, 50))
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
        head.tap_scale.uniform_(0.5, 1.5)
    return head


def test_the_unrolled_head_is_the_one_that_drafts(
    model: Path, answers: list[Answer], tmp_path: Path
) -> None:
    """Each guess of a chain is the best of the column and step that stand for it in training."""
    ids = torch.randperm(517, generator=torch.Generator().manual_seed(2))[:300].sort().values
    draft_ids = torch.full((517,), NOT_DRAWN).index_copy(0, ids, torch.arange(300))
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    config = {"model": str(model), "threads": 1, "prefix_cache": "none"}
    with Engine(config) as engine:
        target = engine.prepared.composition.target.shape
    head = random_head(target, 300)
    export(head, ids, target, (2, 1, 0), tmp_path / "head")
    drafter = {"model": str(tmp_path / "head"), "num_speculative_tokens": K, "policy": "fixed"}
    notes = Notes()
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with Engine(
        {**config, "drafter": drafter}, drafter=watched(EagleDrafter, MANIFEST, notes)
    ) as engine:
        for one in answers:
            engine.submit(one.token_ids[: one.num_prompt_tokens].tolist(), params)
        while engine.has_work():
            engine.step()
    assert notes.wrong == []
    num_compared = 0
    for (tokens, _, _), nodes in notes.nodes.items():
        one = next(a for a in answers if a.token_ids[: len(tokens)].tolist() == list(tokens))
        num_known = len(tokens) - 1
        empty = torch.zeros(len(nodes), one.taps.shape[1])
        guessed = replace(
            one,
            token_ids=torch.tensor([*tokens, *(token for token, _ in nodes)], dtype=torch.int32),
            num_prompt_tokens=num_known,
            taps=torch.cat((one.taps[:num_known].float(), empty)),
            features=torch.zeros(num_known + len(nodes), one.features.shape[1]),
        )
        with torch.no_grad():
            states = head(columns([guessed], embedding, draft_ids), len(nodes))
            for (token, _), state in zip(nodes, states, strict=True):
                scores = head.logits(state[0, 0])
                assert scores.max() - scores[draft_ids[token]] < 1e-2 * scores.std()
                num_compared += 1
    assert num_compared > 60


def test_answers_are_recorded_whole_and_their_features_are_what_the_head_reads(
    model: Path, answers: list[Answer]
) -> None:
    """The target's head takes each feature to the token that the target, greedy, wrote next."""
    rows = load_file(model / "model.safetensors")["lm_head.weight"]
    for one in answers:
        assert len(one.token_ids) == len(one.features) + 1 == len(one.taps) + 1
        wrote = (one.features.float() @ rows.T).argmax(dim=1)[one.num_prompt_tokens - 1 :]
        assert wrote.tolist() == one.token_ids[one.num_prompt_tokens :].tolist()


def test_the_gradient_of_the_loss_is_its_slope(answers: list[Answer], model: Path) -> None:
    """The loss makes its own gradients; they are held against differences."""
    tensors = {name: one.double() for name, one in load_file(model / "model.safetensors").items()}
    shape = HeadShape(40, 3, 1, 40, 24, 517, 10000.0, 1e-5)
    torch.manual_seed(1)
    head = Head(shape).double()
    made = columns(answers[:2], tensors["model.embed_tokens.weight"], torch.arange(517))
    made = replace(made, taps=made.taps.double(), features=made.features.double())
    options = LossOptions(3, 0.8, 0.5)

    def loss() -> torch.Tensor:
        return loss_of(head, made, tensors["lm_head.weight"], options)

    torch.autograd.backward(loss())
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        direction = torch.randn_like(parameter)
        slope = float((parameter.grad * direction).sum())
        with torch.no_grad():
            parameter.add_(direction, alpha=1e-4)
            above = float(loss())
            parameter.add_(direction, alpha=-2e-4)
            below = float(loss())
            parameter.add_(direction, alpha=1e-4)
        assert slope == pytest.approx((above - below) / 2e-4, rel=1e-3, abs=1e-6), name


def test_a_regression_finds_the_weights_that_made_its_rows() -> None:
    torch.manual_seed(0)
    weights = torch.randn(3, 5)
    x = torch.randn(400, 5) * torch.tensor([1.0, 3.0, 0.3, 5.0, 1.0])
    regression = Regression(5, 3)
    for piece in torch.split(x, 90):
        regression.add(piece, piece @ weights.T)
    torch.testing.assert_close(
        regression.weights() / regression.scale.float(), weights, rtol=1e-2, atol=2e-2
    )


def epochs_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of a log that are about epochs."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line for line in lines if "reached" in line]


def test_a_trained_head_guesses_and_says_so(trained: Path) -> None:
    report = json.loads((trained / "acceptance.json").read_text())
    assert [way["num_speculative_tokens"] for way in report["ways"]] == [1, 2, 3, 5, 32]
    for way in report["ways"]:
        assert len(way["reached"]) == way["options"].get("depth", way["num_speculative_tokens"])
        assert way["tokens_a_step"] == pytest.approx(1 + sum(way["reached"]), abs=0.01)
        assert way["tokens_a_step"] > 1.1
    assert [line["epoch"] for line in epochs_of(trained)] == [0, 1, 2, 3]
    assert report["held_out_prompts"] == 2 and report["answers"] == len(PROMPTS)
    config = json.loads((trained / "config.json").read_text())
    assert config["draft_vocab_size"] == 400 and config["target_hidden_size"] == 40
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 0, -1]


@pytest.mark.parametrize(
    ("label", "after"),
    [
        ("answering prompts", 7),
        ("closed-form start, tokens", 0),
        ("training", 5),
        ("training", 10),
        ("trying the head", 2),
    ],
)
def test_a_run_that_was_broken_off_ends_like_one_that_was_not(
    model: Path, trained: Path, tmp_path: Path, label: str, after: int
) -> None:
    with pytest.raises(Broken):
        train_head(job_of(model, tmp_path / "head"), BreaksOff(label, after))
    train_head(job_of(model, tmp_path / "head"), TinyCommandContext())
    for name in ("model.safetensors", "acceptance.json"):
        assert (tmp_path / "head" / name).read_bytes() == (trained / name).read_bytes(), name
    assert epochs_of(tmp_path / "head") == epochs_of(trained)


def test_threads_may_differ_from_run_to_run(model: Path, tmp_path: Path) -> None:
    with pytest.raises(Broken):
        train_head(job_of(model, tmp_path / "head"), BreaksOff("closed-form start, tokens", 0))
    config = {"model": str(model), "threads": 2}
    train_head(job_of(model, tmp_path / "head", config=config), TinyCommandContext())


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"max_tokens": 21}, "of another max-tokens"),
        ({"prompts": PROMPTS[1:]}, "of another data"),
        ({"config": {"threads": 1, "dtype": "float64"}}, "of another settings"),
        ({"draft_vocab": 399}, "of another draft-vocab.*delete .*training.safetensors"),
    ],
)
def test_a_folder_of_another_run_is_refused(
    model: Path, trained: Path, tmp_path: Path, changes: Mapping[str, Any], found: str
) -> None:
    out = copied(trained, tmp_path / "head")
    if "config" in changes:
        changes = {"config": {**changes["config"], "model": str(model)}}
    with pytest.raises(ConfigError, match=found):
        train_head(job_of(model, out, **changes), TinyCommandContext())


def test_damaged_files_of_a_run_are_named(model: Path, trained: Path, tmp_path: Path) -> None:
    out = copied(trained, tmp_path / "head")
    for path in (
        out / "work/training.safetensors",
        out / "work/answers/answers-00000.safetensors",
        out / "work/run.json",
    ):
        path.write_bytes(path.read_bytes()[:50])
        with pytest.raises(ConfigError, match=f"{path.name} is damaged"):
            train_head(job_of(model, out), TinyCommandContext())


def test_a_model_that_was_not_made_here_is_not_overwritten(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a model that was not made here"):
        train_head(job_of(model, tmp_path), TinyCommandContext())


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"turns": []}\n', "line 2 holds no prompt"),
        ("p.jsonl", "{", "line 1"),
        ("p.txt", "\n \n", "holds no prompt"),
    ],
)
def test_files_without_prompts_are_refused(
    tmp_path: Path, name: str, text: str, found: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=found):
        read_prompts(tmp_path / name, "data")


def test_prompts_are_read_from_lines_and_objects(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "c"}]
    lines = [{"prompt": "a"}, {"turns": ["b", "x"]}, {"messages": messages}, {"prompt": "a"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "p.txt").write_text("a\n\nb c \na\n")
    assert read_prompts(tmp_path / "p.jsonl", "data") == ["a", "b", messages]
    assert read_prompts(tmp_path / "p.txt", "data") == ["a", "b c"]
    with pytest.raises(ConfigError, match=r"data: .*cannot be read"):
        read_prompts(tmp_path / "none.txt", "data")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"prompts": PROMPTS[:1]}, "1 are held out"),
        ({"max_prompt_tokens": 2}, "0 prompts of at most 2 tokens"),
    ],
)
def test_too_little_data_is_refused(
    model: Path, tmp_path: Path, changes: Mapping[str, Any], found: str
) -> None:
    with pytest.raises(ConfigError, match=found):
        train_head(job_of(model, tmp_path / "head", **changes), TinyCommandContext())


def test_a_model_of_one_layer_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", tokenizer=True, num_hidden_layers=1)
    with pytest.raises(ConfigError, match="1 decoder layers"):
        train_head(job_of(folder, tmp_path / "head"), TinyCommandContext())


def test_an_unknown_precision_is_refused() -> None:
    assert in_bfloat16("bfloat16") and not in_bfloat16("float32")
    with pytest.raises(ConfigError, match=r"precision.*float16"):
        in_bfloat16("float16")
