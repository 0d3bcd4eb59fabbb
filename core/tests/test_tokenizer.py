"""Tokenizers, against the library that they come from."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import get_args

import pytest
import tokenizers

from pegboard.errors import RequestError, TokenizerError
from pegboard.interfaces.checkpoint import TokenizerFacts
from pegboard.testing.tiny import TokenizerKind, write_tiny_tokenizer
from pegboard.tokenizer import Tokenizer, load_tokenizer

SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_tiny_tokenizer(tmp_path)
    return tmp_path / "tokenizer.json"


@pytest.fixture
def library(file: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(file))


def _load(file: Path, template: str | None = None, *, add_bos: bool | None = None) -> Tokenizer:
    facts = TokenizerFacts(str(file), template, SPECIAL, add_bos)
    return load_tokenizer(facts, where="here")


def test_ids_and_texts_are_the_librarys(file: Path, library: tokenizers.Tokenizer) -> None:
    tokenizer = _load(file)
    for text in ("the dog", "  日本\n😀", "", "a<|im_end|>b"):
        ids = tokenizer.encode(text)
        assert ids == library.encode(text).ids
        assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b")) == "ab"
    assert tokenizer.vocab_size == library.get_vocab_size()
    assert tokenizer.skipped_id("<|im_end|>") == library.token_to_id("<|im_end|>")
    assert tokenizer.skipped_id("the") is None and tokenizer.skipped_id("<|im_end|>x") is None


def test_ids_beyond_the_vocabulary_add_nothing(file: Path) -> None:
    tokenizer = _load(file)
    ids = tokenizer.encode("the dog")
    assert tokenizer.decode([*ids, 516, 2**31 - 1]) == "the dog"
    assert tokenizer.is_skipped(516) and not tokenizer.is_skipped(ids[0])


def test_a_plain_prompt_begins_with_bos_once_where_the_checkpoint_says(
    file: Path, library: tokenizers.Tokenizer
) -> None:
    bos = library.token_to_id("<|endoftext|>")
    plain = library.encode("the dog").ids
    tokenizer = _load(file, add_bos=True)
    assert tokenizer.encode("the dog") == [bos, *plain]
    assert tokenizer.encode("<|endoftext|>the dog") == [bos, *plain]
    assert tokenizer.encode("the dog", special=False) == plain
    assert _load(file, add_bos=False).encode("the dog") == plain


def test_without_a_rule_the_files_own_post_processor_counts(
    file: Path, library: tokenizers.Tokenizer
) -> None:
    bos = library.token_to_id("<|endoftext|>")
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    library.enable_truncation(3)
    library.save(str(file))
    plain = library.encode("the dog and the fox", add_special_tokens=False)
    tokenizer = _load(file)
    ids = tokenizer.encode("the dog and the fox")
    assert ids[0] == bos and ids[1:] == tokenizer.encode("the dog and the fox", special=False)
    assert len(ids) > len(plain.ids) + 1, "a file's truncation would cut prompts silently"


def test_half_a_surrogate_pair_is_the_callers_mistake(file: Path) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        _load(file).encode("a\ud800b")


def test_no_token_is_longer_than_it_says(file: Path) -> None:
    tokenizer = _load(file)
    longest = max(
        len(tokenizer.decode([token_id]).encode()) for token_id in range(tokenizer.vocab_size)
    )
    assert 3 <= longest <= tokenizer.max_token_bytes <= 100


@pytest.mark.parametrize("kind", get_args(TokenizerKind))
def test_the_bytes_of_tokens_joined_are_the_text(tmp_path: Path, kind: TokenizerKind) -> None:
    write_tiny_tokenizer(tmp_path, kind=kind)
    tokenizer = _load(tmp_path / "tokenizer.json")
    for text in ("the dog 日本😀", "the 👩‍👩‍👧", "dog"):
        ids = tokenizer.encode(text)
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
        # SentencePiece's kinds put a space before a text, which decoding takes away again.
        assert joined == text if kind == "byte_level" else joined == " " + text
        assert tokenizer.decode(ids) == text
    (end,) = tokenizer.encode("<|im_end|>", special=False)
    assert tokenizer.token_bytes(end) == b"<|im_end|>"
    assert tokenizer.decode([end]) == "" and tokenizer.decode([end], special=True) == "<|im_end|>"
    assert tokenizer.token_bytes(2**31 - 1) == b"" and tokenizer.token(2**31 - 1) == ""


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "Odd"}}', "\0"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot be used"):
        _load(path)


def test_a_checkpoint_without_tokenizer_says_what_to_do() -> None:
    with pytest.raises(TokenizerError, match="here: tokenizer: the checkpoint has none; fix"):
        load_tokenizer(TokenizerFacts(file=None), where="here")


def test_a_chat_is_encoded_without_a_second_bos(file: Path, library: tokenizers.Tokenizer) -> None:
    facts = TokenizerFacts(str(file), "{{ bos_token }}{{ messages[0].content }}", SPECIAL, True)
    bos = library.token_to_id("<|endoftext|>")
    chat = [{"role": "user", "content": "the dog"}]
    with closing(load_tokenizer(facts, where="here")) as tokenizer:
        assert tokenizer.encode_chat(chat) == [bos, *library.encode("the dog").ids]


def test_a_template_of_ones_own_takes_the_place_of_the_checkpoints(file: Path) -> None:
    facts = TokenizerFacts(str(file), "{{ messages[0].content }}", SPECIAL)
    own = "{{ messages | length }}{{ messages[0].content }}"
    with closing(load_tokenizer(facts, where="here", chat_template=own)) as tokenizer:
        assert tokenizer.render_chat([{"role": "user", "content": "x"}] * 3) == "3x"


def test_a_missing_template_says_what_to_do(file: Path) -> None:
    with pytest.raises(TokenizerError, match="here: chat template: the checkpoint has none; fix"):
        _load(file).render_chat([{"role": "user", "content": "x"}])
