"""The services of plugins' commands: models, tokenizers and compositions by reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pegboard.cli.command_context import EngineCommandContext
from pegboard.errors import CompositionRefused, ConfigError, RequestError, TokenizerError
from pegboard.testing.tiny import write_tiny_model


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp(request.param), request.param, tokenizer=True)


def test_a_loaded_model_computes_the_logits_and_hidden_states_of_transformers(model: Path) -> None:
    token_ids = torch.randint(0, 500, (40,), generator=torch.Generator().manual_seed(1))
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(token_ids[None], output_hidden_states=True)
    loaded = EngineCommandContext().load_model(str(model))
    try:
        loaded.forward([1, 2, 3])
        logits, tapped = loaded.forward(token_ids.tolist(), taps=(1,))
        torch.testing.assert_close(logits, expected.logits[0], atol=1e-3, rtol=0)
        torch.testing.assert_close(tapped[1], expected.hidden_states[1][0], atol=1e-3, rtol=0)
        with pytest.raises(RequestError, match="0 tokens"):
            loaded.forward([])
        with pytest.raises(RequestError, match="100000 tokens; allowed: 1 to"):
            loaded.forward([1] * 100_000)
        with pytest.raises(RequestError, match=r"taps: \[-2, 3\]; allowed: -1 to 2"):
            loaded.forward([1], taps=(-2, 0, 3))
    finally:
        loaded.close()
        loaded.close()


def test_a_tokenizer_by_reference_goes_there_and_back(model: Path) -> None:
    tokenizer = EngineCommandContext().tokenizer(str(model))
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"


def test_a_model_without_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        EngineCommandContext().tokenizer(str(write_tiny_model(tmp_path)))


def test_resolving_refuses_as_check_does(model: Path) -> None:
    context = EngineCommandContext()
    assert context.resolve({"model": str(model)}).composition.dtype == "float32"
    with pytest.raises(ConfigError, match="modle: unknown key"):
        context.resolve({"modle": str(model)})
    with pytest.raises(CompositionRefused, match="tensor_parallel"):
        context.resolve({"model": str(model), "executor": {"tensor_parallel": 3}})


def test_progress_hands_on_the_items() -> None:
    assert list(EngineCommandContext().progress(iter("abc"), "counting", total=3)) == list("abc")
