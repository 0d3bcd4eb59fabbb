"""Chats in the caller's process: `LLM.chat` renders where a template can do no harm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams
from pegboard.compose import prepare
from pegboard.config import Config
from pegboard.errors import RequestError, TokenizerError
from pegboard.testing.tiny import write_tiny_model

ENDLESS_ON_WORD = (
    "{{ messages[0].content }}{% if messages[0].content == 'loop' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
)


def test_an_endless_template_is_an_error_of_its_chat(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", tokenizer=True)
    (folder / "chat_template.jinja").write_text(ENDLESS_ON_WORD)
    with LLM(folder, show_progress=False, threads=1, max_model_len=64) as llm:
        with pytest.raises(RequestError, match="chat template takes over"):
            llm.chat([{"role": "user", "content": "loop"}])
        with pytest.raises(RequestError, match="more than the context can hold"):
            llm.chat([{"role": "user", "content": "x" * 100_000}])
        (result,) = llm.chat([{"role": "user", "content": "the dog"}])
        assert result.prompt == "the dog"
        (parts,) = llm.chat([{"role": "user", "content": [{"type": "text", "text": "the dog"}]}])
        assert parts.prompt_token_ids == result.prompt_token_ids


def test_a_model_may_be_run_without_its_template(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", tokenizer=True)
    (folder / "chat_template.jinja").write_text("{{ messages | length }}")
    settings: Any = {"threads": 1, "max_model_len": 64}
    with LLM(folder, show_progress=False, **settings) as llm:
        with pytest.raises(TokenizerError, match=r"leaves out what a user says.*template=none"):
            llm.chat([{"role": "user", "content": "the dog"}])
        assert llm.generate("the dog", SamplingParams(max_tokens=1))
    prepared = prepare(Config.from_values({"model": str(folder), "chat_template": "none"}))
    assert prepared.composition.target.facts.tokenizer.chat_template is None
