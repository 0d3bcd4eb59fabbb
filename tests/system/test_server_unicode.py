"""A streamed answer is the plain one, to the character, with each kind of tokenizer."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any, get_args

import httpx
import pytest
import tokenizers

from pegboard.testing.tiny import TokenizerKind, write_tiny_model

QUICK = ("byte_level", "byte_fallback")
"""Tokenizers that may cut a character; each kind is a server of its own."""

KINDS = [
    kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow)
    for kind in get_args(TokenizerKind)
]

PIECES = [
    *(
        "the",
        " dog",
        " ",
        "\n",
        ".",
        "<|im_end|>",
        "\0",
        "é",
        "ü",
        "e\u0301",
        "日本",
        "語",
        "한국",
        "中",
    ),
    *("😀", "👩‍👩‍👧", "❤️", "\u200d", "\ufe0f", "🇩🇪", "\ufffd", "𝔘", "עברית", "नमस्ते", "\u2028"),
]
STOPS = ["日本", "e", "👩‍", "\ufffd\ufffd\ufffd"]
NUM_TOKENS = 14
NUM_TOGETHER = 2


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest, serve: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, tokenizers.Tokenizer]:
    """The URL of a model with a kind of tokenizer, and the tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    write_tiny_model(folder, tokenizer=request.param, num_hidden_layers=1)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return serve(folder, "--served-model-name", "tiny").url, library


def prompts(count: int) -> list[str]:
    draw = random.Random(7)
    return ["".join(draw.choices(PIECES, k=draw.randint(1, 2))) for _ in range(count)]


def until_stop(text: str) -> str:
    """The text before the stop text that is complete first; of several, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in STOPS if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


async def streamed(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> tuple[list[str], list[Any]]:
    texts = [""] * NUM_TOGETHER
    ids: list[Any] = [[] for _ in range(NUM_TOGETHER)]
    async with client.stream("POST", "/v1/completions", json={**fields, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                texts[choice["index"]] += choice["text"]
                ids[choice["index"]] += choice["token_ids"]
    return texts, ids


async def compare(
    client: httpx.AsyncClient, library: tokenizers.Tokenizer, group: list[str], stop: bool
) -> str:
    # The answers are made of the prompts' tokens, in any order: of whole characters and broken ones.
    known = {token_id for prompt in group for token_id in library.encode(prompt).ids}
    fields = {
        "prompt": group,
        "max_tokens": NUM_TOKENS,
        "seed": len(group[0]),
        "ignore_eos": True,
        "return_token_ids": True,
        "logit_bias": {str(token_id): 20.0 for token_id in known},
        "stop": STOPS if stop else None,
    }
    plain = (await client.post("/v1/completions", json=fields)).json()["choices"]
    texts, ids = await streamed(client, fields)
    assert texts == [choice["text"] for choice in plain]
    assert ids == [choice["token_ids"] for choice in plain]
    for text, token_ids in zip(texts, ids, strict=True):
        whole = library.decode(token_ids, skip_special_tokens=True)
        assert text == (until_stop(whole) if stop else whole)
    return "".join(texts)


def run(served: tuple[str, tokenizers.Tokenizer], count: int) -> None:
    url, library = served
    listed = prompts(count)
    groups = [listed[i : i + NUM_TOGETHER] for i in range(0, count, NUM_TOGETHER)]

    async def run() -> str:
        seen = ""
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            for i in range(0, len(groups), 16):
                few = enumerate(groups[i : i + 16])
                answers = (compare(client, library, g, bool(n % 2)) for n, g in few)
                seen += "".join(await asyncio.gather(*answers))
        return seen

    seen = asyncio.run(run())
    assert any(character > "\u2000" and character != "\ufffd" for character in seen)
    assert ("\ufffd" in seen) == (
        "ByteLevel" in library.to_str() or "ByteFallback" in library.to_str()
    )


def test_streamed_and_plain_answers_are_the_same(
    served: tuple[str, tokenizers.Tokenizer],
) -> None:
    run(served, 48)


@pytest.mark.slow
def test_a_thousand_streamed_and_plain_answers_are_the_same(
    served: tuple[str, tokenizers.Tokenizer],
) -> None:
    run(served, 1000)
