"""Events are whole lines, also to clients that cut text into lines by all of Unicode's rules."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from pegboard.testing.tiny import write_tiny_model

LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
"""The characters that `str.splitlines` splits at."""


@pytest.fixture(scope="module")
def url(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    served = serve(write_tiny_model(folder, tokenizer=True, num_hidden_layers=1))
    return f"{served.url}/v1/completions"


@pytest.mark.parametrize("end", LINE_ENDS, ids=lambda end: f"U+{ord(end):04X}")
def test_no_character_ends_the_line_of_an_event(url: str, end: str) -> None:
    prompt = f"the{end}dog"
    body = {"prompt": prompt, "echo": True, "stream": True, "max_tokens": 1, "logprobs": 1}
    answer = httpx.post(url, json=body, timeout=60)
    lines = [line for line in answer.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines), lines
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).startswith(prompt)
    # The same by the rules of events, which know no other ends than these.
    assert all(line.startswith(b"data: ") for line in answer.content.split(b"\n") if line)
