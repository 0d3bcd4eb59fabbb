"""Tokens that other files than `tokenizer.json` name, against transformers on the same folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from pegboard.builtin.tokenizer_files import tokenizer_facts
from pegboard.errors import CheckpointError, TokenizerError
from pegboard.testing.tiny import write_tiny_tokenizer
from pegboard.tokenizer import Tokenizer, load_tokenizer

SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast"}
SIZE = 305
"""Of the tiny vocabulary: the id of the first token that is added."""


def flags(content: str, **others: bool) -> dict[str, Any]:
    common = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"content": content, **common, "special": False, **others}


NAMED = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
CASES: dict[str, dict[str, Any]] = {
    "added_tokens.json": {"added_tokens.json": {"<tool>": SIZE, "<think>": SIZE + 1}},
    "added_tokens.json, some called special": {
        "added_tokens.json": {"<think>": SIZE + 1, "<tool>": SIZE},
        "special_tokens_map.json": {
            **NAMED,
            "pad_token": "<tool>",
            "extra_special_tokens": ["<think>"],
        },
    },
    "special_tokens_map.json": {
        "special_tokens_map.json": {
            **NAMED,
            "unk_token": {"content": "<unk>", "lstrip": True, "rstrip": False, "normalized": False},
            "additional_special_tokens": ["<tool>", "<|im_start|>"],
        },
    },
    "the map's word against the settings'": {
        "tokenizer_config.json": SETTINGS | {"eos_token": "<|endoftext|>"},
        "special_tokens_map.json": {"eos_token": "<|im_start|>"},
    },
    "additional tokens in the settings": {
        "tokenizer_config.json": SETTINGS | NAMED | {"additional_special_tokens": ["<tool>"]},
    },
    "extra tokens in the settings": {
        "tokenizer_config.json": SETTINGS | NAMED | {"extra_special_tokens": ["<tool>", "<think>"]},
    },
    "extra tokens with names": {
        "tokenizer_config.json": SETTINGS | {"extra_special_tokens": {"tool_token": "<tool>"}},
    },
    "a name of the model's own": {
        "tokenizer_config.json": SETTINGS | NAMED | {"image_token": "<tool>"},
    },
    "added_tokens_decoder": {
        "tokenizer_config.json": SETTINGS
        | NAMED
        | {
            "added_tokens_decoder": {
                str(SIZE + 1): flags("<think>", rstrip=True),
                str(SIZE): flags("<tool>", special=True, lstrip=True),
                "260": flags("the", single_word=True),
                "1": flags("<|im_end|>", special=True),
            },
        },
        # Passed over, as there is the other.
        "added_tokens.json": {"<other>": SIZE + 2},
        "special_tokens_map.json": {"eos_token": "<|im_start|>"},
    },
    "a plain word that ends texts": {
        "tokenizer_config.json": SETTINGS | {"eos_token": "the", "bos_token": None},
    },
    # The library heeds the post-processor of tokenizer.json alone.
    "what begins and ends a prompt": {
        "tokenizer_config.json": SETTINGS | NAMED | {"add_bos_token": True, "add_eos_token": True},
    },
    "what begins no prompt": {
        "tokenizer_config.json": SETTINGS | NAMED | {"add_bos_token": False},
    },
    "what ends a prompt": {
        "tokenizer_config.json": SETTINGS | NAMED | {"add_eos_token": True, "bos_token": None},
    },
}
TEXTS = [
    "the <tool> dog<think> and <unk> the<|im_end|>",
    "a <other>b thedog dog the",
    " <|im_start|>the<tool>\n<think>  ",
    "",
]


def folder_of(path: Path, files: Mapping[str, Any], *, begins: bool = False) -> Path:
    write_tiny_tokenizer(path)
    library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    assert library.get_vocab_size() == SIZE
    if begins:
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 2)]
        )
        library.save(str(path / "tokenizer.json"))
    for name, content in ({"tokenizer_config.json": SETTINGS | NAMED} | dict(files)).items():
        (path / name).write_text(json.dumps(content))
    return path


def ours(folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_facts(folder), where="here")


@pytest.mark.parametrize("begins", [False, True], ids=["plain", "with a post-processor"])
@pytest.mark.parametrize("case", CASES)
def test_ids_and_texts_are_those_of_transformers(tmp_path: Path, case: str, begins: bool) -> None:
    from transformers import AutoTokenizer

    folder = folder_of(tmp_path / "m", CASES[case], begins=begins)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    facts = tokenizer_facts(folder)
    tokenizer = ours(folder)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert tokenizer.encode(text) == ids, text
        plain = theirs.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, special=False) == plain
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, special=True) == theirs.decode(ids)
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert facts.special_tokens.get(name) == getattr(theirs, name), name
    assert tokenizer.vocab_size == len(theirs)


def test_a_new_token_that_cannot_have_its_id_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", {"added_tokens.json": {"<tool>": SIZE + 7}})
    with pytest.raises(
        TokenizerError, match=r"lacks the added token '<tool>' of id 312, and would"
    ):
        ours(folder)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("added_tokens.json", {"<tool>": "5"}, r"added_tokens\.json: \{'<tool>': '5'\}"),
        ("added_tokens.json", {"<tool>": -1}, r"added_tokens\.json: .*texts to ids"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, "added_tokens_decoder"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": flags("a")}}, "_decoder {'x'"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": "a"}}, "ids to objects"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {"content": 7}}}, "ids to"),
    ],
)
def test_files_that_hold_something_else_are_refused(
    tmp_path: Path, file: str, content: Any, said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        tokenizer_facts(folder_of(tmp_path / "m", {file: content}))
