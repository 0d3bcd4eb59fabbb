"""A checkpoint's rules for texts, on a served model: defaults, ends, and the form of contents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from transformers import AutoTokenizer

from pegboard.testing.tiny import write_tiny_model

PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'][0]['text'] }}<|im_end|>\n"
    "{% endfor %}"
)
GENERATION = {"eos_token_id": 7, "max_new_tokens": 5, "do_sample": False, "typical_p": 0.9}
CHAT: list[Any] = [{"role": "user", "content": "the quick fox"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("m") / "model", tokenizer=True)
    (folder / "chat_template.jinja").write_text(PARTS)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": 305}))
    return folder


@pytest.fixture(scope="module")
def served(serve: Any, folder: Path) -> Any:
    return serve(folder)


@pytest.fixture(scope="module")
def client(served: Any) -> OpenAI:
    client: OpenAI = served.client()
    return client


def answer(client: OpenAI, folder: Path, **fields: Any) -> Any:
    extra = {"return_token_ids": True, **fields.pop("extra_body", {})}
    return client.chat.completions.create(
        model=str(folder), messages=CHAT, extra_body=extra, **fields
    )


def test_a_template_of_parts_gets_parts(client: OpenAI, folder: Path) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    parts = [{"role": "user", "content": [{"type": "text", "text": "the quick fox"}]}]
    expected = theirs.apply_chat_template(parts, tokenize=True, return_dict=False)
    reply = answer(client, folder)
    assert list(reply.prompt_token_ids) == expected
    assert "quick" in theirs.decode(reply.prompt_token_ids)


def test_defaults_fill_what_a_request_leaves_out(served: Any, client: OpenAI, folder: Path) -> None:
    greedy = answer(client, folder)
    assert greedy.choices[0].finish_reason == "length" and greedy.usage.completion_tokens == 5
    said = answer(client, folder, temperature=0.0, max_tokens=5)
    assert said.choices[0].token_ids == greedy.choices[0].token_ids
    assert answer(client, folder, max_tokens=9).usage.completion_tokens == 9
    assert (
        "Default sampling parameters, by the checkpoint: max_tokens=5, temperature=0.0"
        in served.log
    )
    assert "not followed in typical_p=0.9" in served.log


@pytest.mark.parametrize("token_id", [7, 1], ids=["generation config", "tokenizer"])
def test_what_the_checkpoint_names_ends_an_answer(
    client: OpenAI, folder: Path, token_id: int
) -> None:
    reply = answer(client, folder, logit_bias={str(token_id): 100.0})
    (choice,) = reply.choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "")
    assert choice.stop_reason is None


def test_a_stop_text_that_is_a_special_token_ends_an_answer(client: OpenAI, folder: Path) -> None:
    reply = answer(client, folder, logit_bias={"2": 100.0}, stop=["zzz", "<|im_start|>"])
    (choice,) = reply.choices
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "<|im_start|>")
    assert choice.message.content == "" and choice.token_ids == [2]


def test_an_added_token_is_one_token(served: Any, folder: Path) -> None:
    import httpx

    body = {"model": str(folder), "prompt": "the<tool>fox"}
    tokens = httpx.post(f"{served.url}/tokenize", json=body, timeout=60).json()["tokens"]
    assert tokens.count(305) == 1
