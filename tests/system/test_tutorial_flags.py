"""A command line as tutorials of other engines have it, run here unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AuthenticationError, BadRequestError

from pegboard.cli import main

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
