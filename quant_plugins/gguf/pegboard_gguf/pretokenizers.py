"""How byte-level BPE vocabularies split a text before merging, by GGUF's `tokenizer.ggml.pre`.

The patterns are those that the models' own tokenizers were published with, in Oniguruma's syntax.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way of splitting.

    Attributes:
        patterns: applied one after the other to the pieces so far; matches and gaps become pieces.
        ignore_merges: a piece that is a token stays whole, whatever the merges say.
        add_bos: whether a text begins with the bos token where the file does not say.
        nfc: the text is brought to Unicode's normal form C first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
)
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)

GPT2 = PreTokenizer((_GPT2,))
SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
LLAMA3 = PreTokenizer((_WORDS % 3,), ignore_merges=True, add_bos=True)
LLAMA3_WORDS = PreTokenizer((_WORDS % 3,))
QWEN2 = PreTokenizer((_WORDS % 1,), nfc=True)
SINGLE_DIGIT_WORDS = PreTokenizer((_WORDS % 1,))
DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": DEFAULT,
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "olmo": GPT2,
    "mpt": GPT2,
    "jais": GPT2,
    "trillion": GPT2,
    "exaone4": GPT2,
    "granite-docling": GPT2,
    "smollm": SINGLE_DIGITS,
    "starcoder": SINGLE_DIGITS,
    "refact": SINGLE_DIGITS,
    "command-r": SINGLE_DIGITS,
    "codeshell": SINGLE_DIGITS,
    "exaone": SINGLE_DIGITS,
    "minerva-7b": SINGLE_DIGITS,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "falcon3": LLAMA3,
    "pixtral": LLAMA3,
    "dbrx": LLAMA3_WORDS,
    "smaug-bpe": LLAMA3_WORDS,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": SINGLE_DIGIT_WORDS,
    "megrez": SINGLE_DIGIT_WORDS,
    "stablelm2": SINGLE_DIGIT_WORDS,
    "tekken": PreTokenizer((_CASED % ("", "", 1),), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer((_CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", 3),)),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
    ),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
}
