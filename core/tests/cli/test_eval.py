"""`pegboard eval`: its figures beside those that transformers' logits give, its limits, its mistakes."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from pegboard.cli import main
from pegboard.testing.tiny import write_tiny_model
from pegboard.tokenizer import Tokenizer

TEXT = "the quick brown fox jumps over the lazy dog, and no dog minds 12 foxes. " * 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("a"), tokenizer=True, seed=1)


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in bfloat16."""
    folder = tmp_path_factory.mktemp("b")
    return write_tiny_model(folder, tokenizer=True, seed=1, dtype="bfloat16")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


def run(tmp_path: Path, *arguments: str | Path, status: int = 0) -> dict[str, Any]:
    """Runs the command without generation; what it wrote."""
    out = tmp_path / "out.json"
    words = ["eval", *map(str, arguments), "--no-generation", "--json", str(out)]
    assert main(words) == status
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def token_ids(model: Path) -> list[int]:
    from pegboard.cli.command_context import EngineCommandContext

    tokenizer = EngineCommandContext().tokenizer(str(model))
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer.encode(TEXT, special=False)


def reference(model: Path, ids: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """transformers' logits, float64 [num_tokens, vocab_size], and the layers' inputs."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        out = loaded(torch.tensor([ids]), output_hidden_states=True)
    layers = loaded.config.num_hidden_layers
    return out.logits[0].double(), [state[0].double() for state in out.hidden_states[:layers]]


def test_perplexity_is_that_of_transformers_on_the_same_windows(
    model: Path, data: Path, tmp_path: Path
) -> None:
    found = run(tmp_path, "--config", model, "--data", data, "--window", "48", "--stride", "32")
    ids, losses, seen = token_ids(model), [], 0
    for start in range(0, len(ids), 32):
        window = ids[start : start + 48]
        log_p = reference(model, window)[0].log_softmax(-1)
        first = max(1, seen - start)
        losses += [-log_p[at - 1, window[at]].item() for at in range(first, len(window))]
        seen = start + len(window)
        if seen == len(ids):
            break
    assert found["quality"]["num_tokens"] == len(losses) == len(ids) - 1
    expected = math.exp(sum(losses) / len(losses))
    assert found["quality"]["perplexity_a"] == pytest.approx(expected, rel=1e-5)
    assert found["b"] is None and found["quality"]["divergence"] is None


def test_a_tokenizer_that_wants_bos_gets_it_before_each_window(
    model: Path, data: Path, tmp_path: Path
) -> None:
    with_bos = Path(shutil.copytree(model, tmp_path / "with_bos"))
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(with_bos / "tokenizer.json"))
    found = run(tmp_path, "--config", with_bos, "--data", data, "--window", "48")
    ids, losses = token_ids(model), []
    for start in range(0, len(ids), 47):
        window = [0, *ids[start : start + 47]]
        log_p = reference(model, window)[0].log_softmax(-1)
        losses += [-log_p[at - 1, window[at]].item() for at in range(1, len(window))]
    assert found["text"]["bos"] == 0
    assert found["quality"]["num_tokens"] == len(ids)
    expected = math.exp(sum(losses) / len(losses))
    assert found["quality"]["perplexity_a"] == pytest.approx(expected, rel=1e-5)


def test_a_model_against_itself_differs_in_nothing(model: Path, data: Path, tmp_path: Path) -> None:
    limits = ("--max-kl", "0", "--max-perplexity-ratio", "1", "--min-top1", "1")
    found = run(tmp_path, "--config", model, "--against", model, "--data", data, *limits)
    difference = found["quality"]["divergence"]
    assert difference == {
        **{"perplexity_ratio": 1.0, "perplexity_ratio_error": 0.0, "top1_agreement": 1.0},
        **dict.fromkeys(("kl_mean", "kl_median", "kl_p99", "kl_max"), 0.0),
        "layer_errors": [0.0, 0.0, 0.0],
    }


def test_differences_are_those_of_the_logits_and_hidden_states_of_transformers(
    model: Path, near: Path, data: Path, tmp_path: Path
) -> None:
    page = tmp_path / "out.html"
    found = run(
        *(tmp_path, "--config", near, "--set", "dtype=float32", "--against", model),
        *("--data", data, "--max-tokens", "100", "--window", "128", "--html", page),
    )
    ids = token_ids(model)[:100]
    (logits_a, states_a), (logits_b, states_b) = reference(near, ids), reference(model, ids)
    log_a, log_b = logits_a[:-1].log_softmax(-1), logits_b[:-1].log_softmax(-1)
    kl = (log_b.exp() * (log_b - log_a)).sum(-1)
    targets = torch.tensor(ids[1:])[:, None]
    ratio = (log_b.gather(1, targets) - log_a.gather(1, targets)).mean().exp()
    same = (log_a.argmax(-1) == log_b.argmax(-1)).double().mean()
    difference = found["quality"]["divergence"]
    assert difference["kl_mean"] == pytest.approx(kl.mean().item(), rel=0.02)
    assert difference["kl_p99"] == pytest.approx(kl.quantile(0.99).item(), rel=0.05)
    assert difference["kl_max"] == pytest.approx(kl.max().item(), rel=0.05)
    assert difference["perplexity_ratio"] == pytest.approx(ratio.item(), rel=1e-4)
    assert difference["top1_agreement"] == pytest.approx(same.item())
    pairs = zip([*states_a, logits_a[:-1]], [*states_b, logits_b[:-1]], strict=True)
    errors = [((a - b).norm(dim=-1) / b.norm(dim=-1)).mean().item() for a, b in pairs]
    assert difference["layer_errors"] == pytest.approx(errors, rel=0.01)
    text = page.read_text()
    assert "mean relative error, %" in text and 'class="area c1"' in text
    assert not re.search(r"\b(?:src|href)=|url\(|@import|<script", text)


def test_models_of_other_depths_are_compared_without_their_layers(
    model: Path, data: Path, tmp_path: Path
) -> None:
    deeper = write_tiny_model(tmp_path / "deeper", tokenizer=True, num_hidden_layers=3)
    page = tmp_path / "out.html"
    found = run(tmp_path, "--config", deeper, "--against", model, "--data", data, "--html", page)
    assert found["quality"]["divergence"]["kl_mean"] > 0
    assert found["quality"]["divergence"]["layer_errors"] == []
    assert "their layers cannot be compared" in page.read_text()


def test_each_limit_that_is_passed_is_said_and_the_status_is_3(
    model: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = write_tiny_model(tmp_path / "other", tokenizer=True, seed=2)
    limits = ("--max-kl", "0.01", "--max-perplexity-ratio", "0.001", "--min-top1", "0.9")
    words = (tmp_path, "--config", other, "--against", model, "--data", data)
    found = run(*words, *limits, status=3)
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in lines] == found["passed"]
    assert [line.split(" passes ")[1] for line in lines] == [
        "--max-kl 0.01",
        "--max-perplexity-ratio 0.001",
        "--min-top1 0.9",
    ]
    assert len(run(*words, "--max-kl", "1000", "--min-top1", "0.9", status=3)["passed"]) == 1


def test_logits_that_are_no_numbers_keep_no_limit(model: Path, data: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = write_tiny_model(tmp_path / "broken", tokenizer=True, seed=1)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][:] = 3e38
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    words = (tmp_path, "--config", broken, "--against", model, "--data", data)
    assert len(run(*words, "--max-kl", "1000", status=3)["passed"]) == 1


@pytest.mark.slow
def test_both_generate_in_processes_of_their_own(model: Path, data: Path, tmp_path: Path) -> None:
    """Greedy texts of a model agree with its own; speed and memory are those of each engine."""
    config = tmp_path / "a.yaml"
    config.write_text(f"model: {model}\nthreads: 1\n")
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    words = ["eval", "--config", str(config), "--against", str(model), "--data", str(data)]
    assert main([*words, "--new-tokens", "5", "--json", str(out), "--html", str(page)]) == 0
    found = json.loads(out.read_text())
    assert found["greedy"] == {
        **{"num_prompts": 8, "num_tokens": 5, "identical": 1.0, "common_prefix": 1.0}
    }
    for side in (found["a"], found["b"]):
        speed = side["speed"]
        assert min(speed[name] for name in ("prefill", "decode_1", "decode_8", "load_s")) > 0
        memory = speed["memory"]
        if sys.platform == "linux":
            assert 0 < memory["before"] < memory["now"] <= memory["peak"]
        assert 0 < side["weight_bytes"] < side["total_bytes"]
    assert "decode of 8 at once, tokens/s" in page.read_text()


MISTAKES = [
    (["--data", "{data}"], "--config: missing"),
    (["--config", "{model}"], "--data: missing"),
    (["--config", "{model}", "--data", "nowhere.txt"], "--data: "),
    (["--config", "{model}", "--data", "{empty}"], "is empty; allowed: a text of at least 2"),
    (["--config", "{model}", "--data", "{letter}"], "--data: 1 tokens"),
    (["--config", "no/such/model", "--data", "{data}"], "no/such/model"),
    (["--config", "nowhere.yaml", "--data", "{data}"], "nowhere.yaml"),
    (["--config", "{model}", "--set", "dtpe=float32", "--data", "{data}"], "dtpe"),
    (["--config", "{model}", "--against", "{small}", "--data", "{data}"], "vocabulary of 400"),
    (["--config", "{model}", "--against", "{other}", "--data", "{data}"], "makes other tokens"),
    (["--config", "{silent}", "--data", "{data}"], "has no tokenizer"),
    (["--config", "{model}", "--data", "{data}", "--max-kl", "1"], "--against: missing"),
    (["--config", "{model}", "--data", "{data}", "--against-set", "a=b"], "--against: missing"),
    (["--config", "{model}", "--data", "{data}", "--window", "5000"], "--window: 5000"),
    (["--config", "{model}", "--data", "{data}", "--stride", "900"], "--stride: 900"),
    (["--config", "{model}", "--data", "{data}", "--new-tokens", "9999"], "--new-tokens: 9999"),
    (["--config", "{model}", "--data", "{data}", "--json", "."], "--json: . cannot be written"),
    (["--config", "{model}", "--data", "{data}", "--html", "no/x"], "--html: no/x"),
    (["--against", "x", "--min-top1", "1.5"], "--min-top1: 1.5; allowed: 0 to 1"),
    (["--against", "x", "--max-kl", "nan"], "--max-kl: nan"),
]


@pytest.fixture(scope="module")
def places(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "empty.txt").write_text(" \n")
    (folder / "letter.txt").write_text("q")
    write_tiny_model(folder / "small", tokenizer=True, vocab_size=400)
    write_tiny_model(folder / "other", tokenizer="unigram")
    write_tiny_model(folder / "silent")
    names = {name: folder / name for name in ("small", "other", "silent")}
    files = {"empty": folder / "empty.txt", "letter": folder / "letter.txt"}
    return {k: str(v) for k, v in {"model": model, "data": data, **names, **files}.items()}


@pytest.mark.parametrize(
    ("arguments", "said"), MISTAKES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_mistakes_are_one_line(
    arguments: list[str],
    said: str,
    places: dict[str, str],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["eval", *(word.format(**places) for word in arguments)]) == 2
    err = capfd.readouterr().err
    assert said in err
    assert err.count("\n") == 1 and err.startswith("error: ")


def test_mistakes_are_found_without_torch(places: dict[str, str]) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pegboard.cli import main\n"
        "sys.exit(main(['eval', *sys.argv[1:]]))"
    )
    words = ["--config", places["model"], "--against", places["small"], "--data", places["data"]]
    argv = [sys.executable, "-c", code, *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "vocabulary of 400" in done.stderr, done.stderr
