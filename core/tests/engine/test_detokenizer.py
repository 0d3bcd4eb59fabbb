"""Pieces of text, joined, are the text of the whole, whatever the tokens are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from pegboard.engine.detokenizer import (
    CONTEXT,
    Decoder,
    IncrementalDetokenizer,
    detokenizers,
)
from pegboard.engine.parts import Detokenizer
from pegboard.interfaces.checkpoint import TokenizerFacts
from pegboard.tokenizer import Tokenizer as PegboardTokenizer

Make = Callable[[Decoder], Detokenizer]

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "日本語 한국어 Größe 😀👨‍👩‍👧 naïve",
    "  spaces   and\n\nlines\t",
] * 4
SPECIAL = ["<s>", "</s>"]


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("  added text", special=False, normalized=False)])
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """As Llama 2's: bytes of a run are characters together, or U+FFFD each."""
    tokens = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [*"▁abcdefghij", "▁▁", "▁▁▁", "▁the", "▁fox", "é", "日", "�"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _wordpiece() -> Tokenizer:
    words = [*SPECIAL, "<unk>", "the", "fox", "##es", "##'", ".", "!", "n", "##'t"]
    tokenizer = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


TOKENIZERS = {
    "byte-level": _byte_level(),
    "byte-fallback": _byte_fallback(),
    "unigram": _unigram(),
    "wordpiece": _wordpiece(),
}


def _quickest(decoder: Decoder) -> Detokenizer:
    return detokenizers(decoder)()


EITHER = pytest.mark.parametrize("make", [IncrementalDetokenizer, _quickest])


def _wrapped(library: Tokenizer) -> PegboardTokenizer:
    return PegboardTokenizer(library, TokenizerFacts(file=None), None, where="test")


@st.composite
def _cut_sequences(draw: Callable[..., list[list[int]]], size: int) -> list[list[int]]:
    """Token ids in portions: random ones, runs of one, and ids beyond the vocabulary."""
    # Low ids are special tokens and single bytes: more of those, and runs of them.
    ids = st.integers(0, size + 3) | st.integers(0, min(size, 262))
    runs = st.lists(ids, max_size=6) | st.builds(lambda i, n: [i] * n, ids, st.integers(1, 30))
    return draw(st.lists(runs, max_size=12))


@pytest.mark.parametrize(
    ("name", "make"),
    [*((name, IncrementalDetokenizer) for name in TOKENIZERS), ("byte-level", _quickest)],
)
@settings(max_examples=5 * settings().max_examples)
@given(data=st.data())
def test_pieces_join_to_the_decoded_whole(name: str, make: Make, data: st.DataObject) -> None:
    library = TOKENIZERS[name]
    portions = data.draw(_cut_sequences(library.get_vocab_size()))
    detokenizer = make(_wrapped(library))
    text = "".join([detokenizer.add(portion) for portion in portions]) + detokenizer.finish()
    # The library itself, all at once, is the measure.
    whole = list(chain.from_iterable(portions))
    assert text == library.decode(whole, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("byte-level", IncrementalDetokenizer),
        ("byte-level", _quickest),
        ("byte-fallback", IncrementalDetokenizer),
    ],
)
@settings(max_examples=5 * settings().max_examples)
@given(data=st.binary(max_size=60))
def test_any_bytes_one_token_each(name: str, make: Make, data: bytes) -> None:
    library = TOKENIZERS[name]
    if name == "byte-level":
        ids = [_byte_level_id(library, byte) for byte in data]
    else:
        ids = [_id(library, f"<0x{byte:02X}>") for byte in data]
    detokenizer = make(_wrapped(library))
    text = "".join([detokenizer.add([token_id]) for token_id in ids]) + detokenizer.finish()
    assert text == library.decode(ids)
    if name == "byte-level":
        assert text == data.decode("utf-8", errors="replace")


def _byte_level_id(library: Tokenizer, byte: int) -> int:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [other for other in range(256) if other not in printable]
    character = chr(byte) if byte in printable else chr(256 + others.index(byte))
    return _id(library, character)


def _id(library: Tokenizer, token: str) -> int:
    token_id = library.token_to_id(token)
    assert token_id is not None
    return token_id


@EITHER
@pytest.mark.parametrize("text", ["日本", "a😀b", "👨‍👩‍👧", "é"])
def test_no_piece_shows_half_a_character(make: Make, text: str) -> None:
    library = TOKENIZERS["byte-level"]
    detokenizer = make(_wrapped(library))
    pieces = [detokenizer.add([_byte_level_id(library, byte)]) for byte in text.encode()]
    assert "".join(pieces) == text  # nothing is left for `finish`
    assert all("\ufffd" not in piece for piece in pieces)


@EITHER
def test_text_appears_as_soon_as_it_is_certain(make: Make) -> None:
    library = TOKENIZERS["byte-level"]
    detokenizer = make(_wrapped(library))
    ids = library.encode("the quick brown fox").ids
    shown = ""
    for count, token_id in enumerate(ids, start=1):
        shown += detokenizer.add([token_id])
        assert shown == library.decode(ids[:count])


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    library = TOKENIZERS["byte-fallback"]
    euro = [_id(library, f"<0x{byte:02X}>") for byte in "€\n€".encode()]
    end, special = _id(library, "a"), _id(library, "</s>")
    detokenizer = IncrementalDetokenizer(_wrapped(library))
    # A special token is not decoded and so does not end the run.
    assert [detokenizer.add([token_id]) for token_id in [*euro, special]] == [""] * 8
    assert detokenizer.add([end]) == "€\n€a"


def test_added_tokens_stand_for_their_own_text() -> None:
    """Such a token's characters are not the vocabulary's names of bytes."""
    library = _byte_level()
    library.add_tokens([AddedToken("<|a b|>"), AddedToken("Ġ"), AddedToken("€")])
    ids = [_id(library, token) for token in ("t", "<|a b|>", "Ġ", "€", "t")]
    detokenizer = _quickest(_wrapped(library))
    assert "".join([detokenizer.add([token_id]) for token_id in ids]) == library.decode(ids)


class _Counting:
    """A decoder that notes how much it was given."""

    def __init__(self, tokenizer: PegboardTokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_decoded = 0
        self.is_skipped = tokenizer.is_skipped
        self.is_byte = tokenizer.is_byte

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return self.tokenizer.decode(token_ids)


@pytest.mark.parametrize(
    ("name", "token"),
    [("byte-level", "t"), ("byte-level", "Ģ"), ("byte-level", "</s>"), ("byte-fallback", "<0xFF>")],
)
def test_the_work_for_a_token_does_not_grow(name: str, token: str) -> None:
    """Also for runs that never make a character, or never make text."""
    library = TOKENIZERS[name]
    token_id = _id(library, token)
    decoder = _Counting(_wrapped(library))
    detokenizer = IncrementalDetokenizer(decoder)
    for _ in range(2000):
        detokenizer.add([token_id])
    detokenizer.finish()
    assert decoder.num_decoded <= 2000 * (3 * CONTEXT + 1)


def test_a_decoder_that_says_nothing_of_its_tokens_will_do() -> None:
    class Letters:
        def decode(self, token_ids: Sequence[int]) -> str:
            return "".join(chr(97 + token_id) for token_id in token_ids)

    detokenizer = IncrementalDetokenizer(Letters())
    pieces = [detokenizer.add([index % 26]) for index in range(100)]
    assert pieces == [chr(97 + index % 26) for index in range(100)]
    assert detokenizer.finish() == ""
