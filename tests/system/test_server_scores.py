"""Logprobs, echo, least lengths and `/tokenize`, against transformers and the tokenizers library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers

from pegboard.testing.tiny import write_tiny_model

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "the quick brown fox 日本 👩‍👩‍👧 jumps"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=True)


@pytest.fixture(scope="module")
def http(serve: Any, model: Path) -> Iterator[httpx.Client]:
    served = serve(model, "--served-model-name", "tiny", "--dtype", "float32")
    with httpx.Client(base_url=served.url, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def library(model: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture(scope="module")
def logprobs(model: Path) -> Any:
    """Teacher-forced logprobs of the next token after each of some ids, [num_ids, vocabulary]."""
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def of(token_ids: list[int]) -> Any:
        with torch.no_grad():
            logits = theirs(torch.tensor([token_ids])).logits[0]
        return torch.log_softmax(logits, dim=-1).numpy()

    return of


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_echo_with_no_tokens_scores_the_prompt(
    http: httpx.Client, library: tokenizers.Tokenizer, logprobs: Any
) -> None:
    ids = library.encode(PROMPT).ids
    answer = post(http, COMPLETIONS, prompt=PROMPT, echo=True, max_tokens=0, logprobs=3)
    (choice,) = answer["choices"]
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(ids)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    expected = logprobs(ids)
    np.testing.assert_allclose(
        found["token_logprobs"][1:],
        [expected[i, token_id] for i, token_id in enumerate(ids[1:])],
        atol=1e-4,
    )
    for i, top in enumerate(found["top_logprobs"][1:]):
        best = np.sort(expected[i])[::-1][:3]
        assert max(top.values()) == pytest.approx(best[0], abs=1e-4)
        assert len(top) <= 4


def test_scoring_as_the_evaluation_harness_asks_for_it(
    http: httpx.Client, library: tokenizers.Tokenizer, logprobs: Any
) -> None:
    context, continuation = library.encode("the lazy").ids, library.encode(" dog and the").ids
    ids = context + continuation
    answer = post(
        http,
        COMPLETIONS,
        model="tiny",
        prompt=[ids, ids],
        temperature=0,
        max_tokens=1,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    for choice in answer["choices"]:
        total = sum(choice["logprobs"]["token_logprobs"][len(context) : -1])
        rows = range(len(context) - 1, len(ids) - 1)
        assert total == pytest.approx(sum(logprobs(ids)[i, ids[i + 1]] for i in rows), abs=1e-3)
        assert choice["text"].startswith("the lazy dog and the")


def test_offsets_say_where_each_token_begins_in_the_text(http: httpx.Client) -> None:
    fields = {"prompt": PROMPT, "echo": True, "max_tokens": 12, "logprobs": 0, "seed": 3}
    (choice,) = post(http, COMPLETIONS, **fields)["choices"]
    columns = choice["logprobs"]
    assert columns["top_logprobs"] is None
    offsets = [*columns["text_offset"], len(choice["text"])]
    assert offsets == sorted(offsets)
    whole = 0
    for token, begin, end in zip(columns["tokens"], offsets, offsets[1:], strict=False):
        if token and "\ufffd" not in token and not token.startswith("<|"):
            whole += 1
            assert choice["text"][begin:end] == token
    assert whole > 8


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_a_streamed_echo_is_the_plain_one(http: httpx.Client, max_tokens: int) -> None:
    fields = {
        "prompt": [PROMPT, "the dog"],
        "n": 2,
        "echo": True,
        "max_tokens": max_tokens,
        "logprobs": 2,
        "seed": 3,
    }
    plain = post(http, COMPLETIONS, **fields)["choices"]
    texts = [""] * 4
    columns: list[dict[str, list[Any]]] = [{} for _ in texts]
    with http.stream("POST", COMPLETIONS, json={**fields, "stream": True}) as stream:
        for chunk in events(stream):
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
                for name, values in (choice["logprobs"] or {}).items():
                    columns[choice["index"]].setdefault(name, []).extend(values)
    assert texts == [choice["text"] for choice in plain]
    assert columns == [choice["logprobs"] for choice in plain]


def events(stream: httpx.Response) -> Iterator[Any]:
    for line in stream.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_prompt_logprobs_in_both_endpoints(
    http: httpx.Client, library: tokenizers.Tokenizer, logprobs: Any
) -> None:
    messages = [{"role": "user", "content": "the dog"}]
    plain = post(
        http, COMPLETIONS, prompt=PROMPT, max_tokens=1, prompt_logprobs=2, return_token_ids=True
    )
    chat = post(
        http, CHAT, messages=messages, max_tokens=1, prompt_logprobs=2, return_token_ids=True
    )
    assert plain["choices"][0]["prompt_token_ids"] == library.encode(PROMPT).ids
    for place in (plain["choices"][0], chat):
        ids, entries = place["prompt_token_ids"], place["prompt_logprobs"]
        expected = logprobs(ids)
        assert len(entries) == len(ids) and entries[0] is None
        for i, entry in enumerate(entries[1:]):
            token_id = ids[i + 1]
            itself = entry[str(token_id)]
            assert itself["logprob"] == pytest.approx(expected[i, token_id], abs=1e-4)
            assert itself["rank"] == 1 + int((expected[i] > expected[i, token_id] + 1e-6).sum())
            best = {int(other) for other, value in entry.items() if value["rank"] <= 2}
            assert best == set(np.argsort(-expected[i])[:2].tolist())


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_shows_its_prompts_logprobs(http: httpx.Client, stream: bool) -> None:
    """Though the engine computes them, and hands them out, once for each prompt."""
    fields: dict[str, Any] = {"echo": True, "max_tokens": 3, "logprobs": 2, "stream": stream}
    fields["ignore_eos"] = True
    alone = [
        post(http, COMPLETIONS, **{**fields, "stream": False}, prompt=prompt)["choices"][0]
        for prompt in (PROMPT, "the dog")
    ]
    fields |= {"prompt": [PROMPT, "the dog"], "n": 5}
    columns: list[dict[str, list[Any]]] = [{} for _ in range(10)]
    with http.stream("POST", COMPLETIONS, json=fields) as answer:
        for part in events(answer) if stream else [json.loads(answer.read())]:
            for choice in part["choices"]:
                for name, values in (choice["logprobs"] or {}).items():
                    columns[choice["index"]].setdefault(name, []).extend(values)
    for index, found in enumerate(columns):
        whole = alone[index // 5]["logprobs"]
        num_prompt = len(whole["tokens"]) - 3
        assert {len(values) for values in found.values()} == {num_prompt + 3}
        for name in ("tokens", "text_offset"):
            assert found[name][:num_prompt] == whole[name][:num_prompt]
        values, expected = (some["token_logprobs"][1:num_prompt] for some in (found, whole))
        assert values == pytest.approx(expected, abs=1e-4)


def test_bytes_are_exact_where_a_token_is_part_of_a_character(
    http: httpx.Client, library: tokenizers.Tokenizer
) -> None:
    # A vocabulary this small has a token for each byte of these.
    text, sent = "é日😀", []
    for token_id in library.encode(text).ids:
        answer = post(
            http,
            CHAT,
            messages=[{"role": "user", "content": "x"}],
            max_tokens=1,
            logprobs=True,
            logit_bias={str(token_id): 1e6},
        )
        (entry,) = answer["choices"][0]["logprobs"]["content"]
        # In byte-level vocabularies each byte of these characters is a token.
        assert entry["token"] == "\ufffd"
        sent += entry["bytes"]
    assert bytes(sent).decode() == text


def test_nothing_ends_before_the_least_number_of_tokens(
    http: httpx.Client, library: tokenizers.Tokenizer
) -> None:
    eos, the = library.token_to_id("<|im_end|>"), library.encode("the").ids[0]
    eager: dict[str, Any] = {
        "prompt": PROMPT,
        "max_tokens": 9,
        "logit_bias": {str(i): 1e4 for i in (eos, the)},
        "stop_token_ids": [the],
        "stop": ["q"],
        "seed": 5,
        "return_token_ids": True,
    }

    def lengths(**more: Any) -> tuple[list[int], str]:
        (choice,) = post(http, COMPLETIONS, **eager, **more)["choices"]
        return choice["token_ids"], choice["finish_reason"]

    ids, reason = lengths()
    assert (len(ids), reason) == (1, "stop")
    for least in (2, 5):
        ids, reason = lengths(min_tokens=least)
        assert (len(ids), reason) == (least + 1, "stop")
        assert not {eos, the} & set(ids[:-1])
    ids, reason = lengths(min_tokens=9)
    assert (len(ids), reason) == (9, "length")


def test_stop_texts_do_not_count_before_the_least_number_of_tokens(
    http: httpx.Client, library: tokenizers.Tokenizer
) -> None:
    dot = library.encode("!").ids[0]
    fields = {"prompt": "the", "max_tokens": 8, "logit_bias": {str(dot): 1e4}, "stop": "!!"}
    assert post(http, COMPLETIONS, **fields)["choices"][0]["text"] == ""
    (choice,) = post(http, COMPLETIONS, min_tokens=4, **fields)["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == "!!!"


def test_tokenize_and_detokenize(http: httpx.Client, library: tokenizers.Tokenizer) -> None:
    found = post(http, "/tokenize", prompt=PROMPT, return_token_strs=True)
    encoding = library.encode(PROMPT)
    assert found == {
        "count": len(encoding.ids),
        "max_model_len": 512,
        "tokens": encoding.ids,
        "token_strs": encoding.tokens,
    }
    assert post(http, "/detokenize", tokens=found["tokens"]) == {"prompt": PROMPT}
    messages = [{"role": "user", "content": "the dog"}]
    chat = post(http, "/tokenize", messages=messages)
    rendered = "<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n"
    assert chat["tokens"] == library.encode(rendered).ids
    assert chat["token_strs"] is None
    assert post(http, "/detokenize", model="tiny", tokens=chat["tokens"]) == {"prompt": rendered}
    bare = post(http, "/tokenize", messages=messages, add_generation_prompt=False)
    assert bare["tokens"] == library.encode(rendered.removesuffix("<|im_start|>assistant\n")).ids
    usage = post(http, CHAT, messages=messages, max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == chat["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": "a" * 100_000}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("/detokenize", {"tokens": [517]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_name(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
