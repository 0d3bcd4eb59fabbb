"""A tokenizer made of metadata gives the ids of the tokenizer that the metadata describes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from pegboard.errors import TokenizerError
from pegboard.interfaces.checkpoint import CheckpointFacts, TokenizerFacts
from pegboard_gguf.describe import describe

TEXTS = [
    "The capital of France is Paris.",
    "don't, DON'T, I'll we've you'Re he'd",
    "numbers 1 12 123 1234567 3.14159 1e-9 x2y ²½Ⅷ ٣٤ 日2",
    "  two  three   four\t\ttabs\n\n\nlines \r\n crlf \n  end  ",
    " \n \n x",
    "emoji 😀😀 family 👨‍👩‍👧‍👦 flag 🇩🇪 skin 👍🏽",
    "日本語のテキスト、한국어 텍스트, 中文文本。",
    "Größe naïve cafe\u0301 Ελληνικά Русский العربية हिन्दी",
    "code: if (x != y) { return a[i]->b++; } // ok <<>> ~|^$+=",
    "zero\u200bwidth nbsp\u00a0em\u2003ideographic\u3000",
    "CamelCase snake_case UPPER lower McDonald iPhone",
    "",
    " ",
]
SEEN = ["the quick brown fox jumps over the lazy dog " * 4, *TEXTS[:4], *TEXTS[8:11]]
CORPUS = [*TEXTS * 3, "the quick brown fox jumps over the lazy dog " * 20]

MODEL = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def _facts(write_gguf: Any, metadata: dict[str, Any]) -> TokenizerFacts:
    return _checkpoint(write_gguf, metadata).tokenizer


def _checkpoint(write_gguf: Any, metadata: dict[str, Any]) -> CheckpointFacts:
    rows = len(metadata["tokenizer.ggml.tokens"])
    embedding = np.zeros((rows, 32), np.float32)
    path = write_gguf(
        MODEL | metadata, {"token_embd.weight": (embedding, gguf.GGMLQuantizationType.F32)}
    )
    return describe(path)


def _tokenizer(write_gguf: Any, metadata: dict[str, Any]) -> Tokenizer:
    file = _facts(write_gguf, metadata).file
    assert file is not None
    return Tokenizer.from_file(file)


def _byte_level(splits: Sequence[Any], ignore_merges: bool = False) -> Tokenizer:
    """A trained byte-level tokenizer, as its authors would publish it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(splits))
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _metadata(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """A byte-level tokenizer as llama.cpp's converter writes it."""
    import json

    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
    }


def _split(pattern: str) -> list[Any]:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


# The pre-tokenizers that the models' authors published, written down apart from the package's own.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUBLISHED: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "llama-bpe": _split(LLAMA3),
    "tekken": _split(TEKKEN),
}


@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level_ids_are_those_of_the_published_tokenizer(write_gguf: Any, pre: str) -> None:
    published = _byte_level(PUBLISHED[pre], ignore_merges=pre in ("llama-bpe", "tekken"))
    tokenizer = _tokenizer(write_gguf, _metadata(published, pre))
    for text in TEXTS:
        ids = published.encode(text).ids
        assert tokenizer.encode(text).ids == ids, text
        assert tokenizer.decode(ids) == text


def test_qwen2_ids_are_those_of_transformers(write_gguf: Any) -> None:
    import json

    from transformers import Qwen2Tokenizer
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    trained = _byte_level(_split(PRETOKENIZE_REGEX))
    model = json.loads(trained.to_str())["model"]
    merges: Any = [tuple(merge) for merge in model["merges"]]
    theirs = Qwen2Tokenizer(vocab=model["vocab"], merges=merges)
    tokenizer = _tokenizer(write_gguf, _metadata(trained, "qwen2"))
    for text in TEXTS:
        assert tokenizer.encode(text).ids == theirs.encode(text), text


def test_smollm2_ids_and_texts_are_those_of_transformers(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    # It reads no `pre`, and so leaves a space before a number such as ² with it.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PUBLISHED["smollm"])
    file = describe(smollm2).tokenizer.file
    assert file is not None
    ours = Tokenizer.from_file(file)
    marked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    for text in [*TEXTS, marked]:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_the_default_kind_splits_punctuation_and_digits_in_threes(write_gguf: Any) -> None:
    splits = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    metadata = _metadata(_byte_level(splits), "default")
    tokenizer = _tokenizer(write_gguf, metadata)
    assert tokenizer.pre_tokenizer is not None
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("1234567 a==b")]
    assert pieces == ["123", "456", "7", "Ġa", "==", "b"]
    del metadata["tokenizer.ggml.pre"]
    assert _tokenizer(write_gguf, metadata).encode("1234567").ids == tokenizer.encode("1234567").ids


@pytest.fixture(scope="module")
def sentencepiece_model() -> sentencepiece.SentencePieceProcessor:
    """A tiny SentencePiece BPE with byte fallback, as Llama 2 and Mistral have."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SEEN * 5),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def _sentencepiece_metadata(model: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    types = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
        for i in range(len(model))
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(len(model))],
        "tokenizer.ggml.scores": [model.get_score(i) for i in range(len(model))],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }


def test_llama_ids_and_texts_are_those_of_sentencepiece(
    write_gguf: Any, sentencepiece_model: sentencepiece.SentencePieceProcessor
) -> None:
    tokenizer = _tokenizer(write_gguf, _sentencepiece_metadata(sentencepiece_model))
    assert any(sentencepiece_model.is_byte(i) for i in sentencepiece_model.encode("日本語"))
    for text in TEXTS:
        ids = sentencepiece_model.encode(text)
        assert tokenizer.encode(text).ids == ids, text
        assert tokenizer.decode(ids) == sentencepiece_model.decode(ids)


def test_without_the_prefix_a_space_is_neither_added_nor_taken(
    write_gguf: Any, sentencepiece_model: sentencepiece.SentencePieceProcessor
) -> None:
    metadata = _sentencepiece_metadata(sentencepiece_model)
    tokenizer = _tokenizer(write_gguf, metadata | {"tokenizer.ggml.add_space_prefix": False})
    for text in ("the fox", " the fox"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("the fox").ids != tokenizer.encode(" the fox").ids


def test_kinds_of_tokens_decide_what_is_read_and_what_is_shown(write_gguf: Any) -> None:
    metadata = _metadata(_byte_level(PUBLISHED["gpt-2"]), "gpt-2")
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["<tool>", "  two spaces", "[PAD]", "<end of turn>"]
    metadata["tokenizer.ggml.token_type"] += [3, 4, 5, 1]
    metadata["tokenizer.ggml.eot_token_id"] = size + 3
    tokenizer = _tokenizer(write_gguf, metadata)
    ids = tokenizer.encode("x<tool>y  two spacesz[PAD]<end of turn>").ids
    assert {size, size + 1, size + 3} <= set(ids) and size + 2 not in ids
    # Control tokens and those that end a turn are not shown; user-defined ones are text.
    assert tokenizer.decode(ids) == "xy  two spacesz[PAD]"


def test_facts_say_how_prompts_begin_and_answers_end(write_gguf: Any) -> None:
    metadata = _metadata(_byte_level(_split(LLAMA3)), "llama-bpe")
    metadata |= {"tokenizer.ggml.padding_token_id": 2**32 - 1, "tokenizer.chat_template": "{{ 1 }}"}
    facts = _facts(write_gguf, metadata)
    assert facts.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert facts.chat_template == "{{ 1 }}"
    assert facts.add_bos is True  # by rule of this kind
    assert _facts(write_gguf, metadata | {"tokenizer.ggml.pre": "qwen2"}).add_bos is False
    assert _facts(write_gguf, metadata | {"tokenizer.ggml.add_bos_token": False}).add_bos is False


def test_what_ends_a_text_is_what_ends_it_in_llama_cpp(write_gguf: Any) -> None:
    metadata = _metadata(_byte_level(PUBLISHED["gpt-2"]), "gpt-2")
    size = len(metadata["tokenizer.ggml.tokens"])
    more = ["<|eot_id|>", "<|im_start|>", "<|im_end|>", "</s>", "<turn>", "<|fim_pad|>"]
    metadata["tokenizer.ggml.tokens"] += more
    # A token that is text may be written like one that ends a text.
    metadata["tokenizer.ggml.token_type"] += [3, 3, 3, 1, 3, 3]
    metadata["tokenizer.ggml.eom_token_id"] = size + 4
    facts = _checkpoint(write_gguf, metadata)
    assert facts.eos_token_ids == (0, size + 4, size, size + 2, size + 5)
    assert facts.config["eos_token_id"] == list(facts.eos_token_ids)
    assert dict(facts.eos_sources) == {
        "tokenizer.ggml.eos_token_id": (0,),
        "tokenizer.ggml.eom_token_id": (size + 4,),
        "the token's text": (0, size, size + 2, size + 5),
    }
    metadata["tokenizer.ggml.tokens"][size : size + 3] = ["<|return|>", "<|call|>", "<|other|>"]
    metadata |= {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eom_token_id": 1}
    # There <|end|> ends a message, after which the text goes on.
    assert _checkpoint(write_gguf, metadata).eos_token_ids == (1, size, size + 1, size + 5)


def test_what_a_file_recommends_for_sampling_is_told(write_gguf: Any) -> None:
    metadata = _metadata(_byte_level(PUBLISHED["gpt-2"]), "gpt-2")
    sampling = {
        "temp": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "penalty_repeat": 1.05,
        "penalty_last_n": 64,
        "mirostat": 2,
        "xtc_probability": 0.0,
    }
    metadata |= {f"general.sampling.{key}": value for key, value in sampling.items()}
    assert dict(_checkpoint(write_gguf, metadata).generation) == {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.05,
        "general.sampling.penalty_last_n": 64,
        "general.sampling.mirostat": 2,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "sesame"}, r"tokenizer\.ggml\.pre: is 'sesame'; allowed: default,"),
        ({"tokenizer.ggml.model": "t5"}, r"tokenizer\.ggml\.model: is 't5'; allowed: gpt2, llama"),
        ({"tokenizer.ggml.merges": ["no such"]}, r"tokenizer\.ggml\.merges: are missing"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, r"tokenizer\.ggml\.tokens: hold 'a' twice"),
        ({"tokenizer.ggml.token_type": [1, 1]}, r"token_type: holds 2 entries for \d+ tokens"),
    ],
)
def test_tokenizers_that_cannot_be_used_are_refused_by_name(
    write_gguf: Any, change: dict[str, Any], message: str
) -> None:
    metadata = _metadata(_byte_level(PUBLISHED["gpt-2"]), "gpt-2")
    with pytest.raises(TokenizerError, match=message):
        _facts(write_gguf, metadata | change)


def test_a_file_without_a_tokenizer_says_so(tiny_file: Path) -> None:
    assert describe(tiny_file).tokenizer == TokenizerFacts(file=None)
