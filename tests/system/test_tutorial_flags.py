"""A command line as tutorials of other engines have it, run here unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai import AuthenticationError, BadRequestError

from pegboard.cli import main
from pegboard.testing.tiny import write_tiny_model

FLAGS = [
    "--max-model-len",
    "2048",
    "--max-num-seqs",
    "16",
    "--gpu-memory-utilization",
    "0.9",
    "--api-key",
    "secret",
]


def test_memory_is_that_of_so_many_sequences_of_that_length(
    bundled_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", bundled_model, *FLAGS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["max_model_len"] == {"value": 2048, "why": "named in the config"}
    (cache,) = [part for part in found["parts"] if part["interface"] == "prefix_cache"]
    num_sequences = 16 if cache["name"] == "none" else 2 * 16  # the rest is for known prefixes
    assert found["memory"]["num_full_sequences"] == num_sequences


def test_a_draft_model_is_checked_as_the_flag_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = write_tiny_model(tmp_path / "t"), write_tiny_model(tmp_path / "d", seed=1)
    given = {
        "model": str(draft),
        "num_speculative_tokens": 3,
        "draft_tensor_parallel_size": 1,
        "quantization": "int8",
    }
    assert main(["check", str(target), "--speculative-config", json.dumps(given), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (drafter,) = [part for part in found["parts"] if part["interface"] == "drafter"]
    assert drafter["name"] == "draft_model"
    assert any("read by quantizer 'int8'" in note for note in found["notes"])


@pytest.mark.slow
def test_it_serves_as_the_flags_say(serve: Any, bundled_model: str) -> None:
    served = serve(bundled_model, *FLAGS)
    with served.client("wrong") as client, pytest.raises(AuthenticationError):
        client.models.list()
    with served.client("secret") as client:
        (model,) = client.models.list().data
        assert (model.id, model.to_dict()["max_model_len"]) == (bundled_model, 2048)
        asked: dict[str, Any] = {"model": model.id, "temperature": 0}
        answer = client.completions.create(prompt="The capital of France is", max_tokens=4, **asked)
        assert "Paris" in answer.choices[0].text
        with pytest.raises(BadRequestError, match="2048"):
            client.completions.create(prompt=[7] * 2048, max_tokens=1, **asked)
