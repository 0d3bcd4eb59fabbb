"""From GGUF's tokenizer metadata to a `tokenizer.json` of the tokenizers library.

Two kinds exist among the models that this package reads: byte-level BPE (`gpt2`), and
SentencePiece's BPE (`llama`), whose merges are implied by the scores of its tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property
from itertools import chain

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pegboard.errors import TokenizerError
from pegboard_gguf.metadata import Metadata
from pegboard_gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer

MAX_TOKEN_LENGTH = 2**10
SPACE = "\u2581"  # SentencePiece's visible space

_ID_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_END_KEYS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
    "tokenizer.ggml.fim_pad_token_id",
    "tokenizer.ggml.fim_rep_token_id",
    "tokenizer.ggml.fim_sep_token_id",
)
_END_TEXTS = """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|>
    </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|>
    <|tool_response>
    <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>
    <|file_sep|>
""".split()  # noqa: SIM905 - a list of them would be a page
"""Control tokens that end a text to llama.cpp, whatever ids the file names: many files name but one."""
# Defaults of a SentencePiece file that names no id.
_LLAMA_DEFAULT_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Vocabulary:
    """The tokenizer that a file's metadata describes.

    Args:
        metadata: of a file that has `tokenizer.ggml.model`.

    Raises:
        TokenizerError: a kind that this package does not read, or lists that do not fit together.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self.model = metadata.text("tokenizer.ggml.model")
        if self.model not in ("gpt2", "llama"):
            raise self._fault("tokenizer.ggml.model", f"is {self.model!r}", "gpt2, llama")
        self.tokens = self._read_tokens()
        self.types = self._read_types()

    @property
    def special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token`, ... to their texts."""
        ids = {name: self._token_id(key) for name, key in _ID_KEYS.items()}
        if self.model == "llama":
            for name, token_id in _LLAMA_DEFAULT_IDS.items():
                if _ID_KEYS[name] not in self._metadata and token_id < len(self.tokens):
                    ids[name] = token_id
        return {
            name: self.tokens[token_id] for name, token_id in ids.items() if token_id is not None
        }

    @cached_property
    def eos_sources(self) -> dict[str, tuple[int, ...]]:
        """Keys that name ids which end a text, a turn or a message, to the ids, as llama.cpp counts
        them."""
        ids = {key: self._token_id(key) for key in _END_KEYS}
        if self.model == "llama" and _ID_KEYS["eos_token"] not in self._metadata:
            ids[_ID_KEYS["eos_token"]] = _LLAMA_DEFAULT_IDS["eos_token"]
        named = {key: (token_id,) for key, token_id in ids.items() if token_id is not None}
        known = {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if token in _END_TEXTS and kind == TokenType.CONTROL
        }
        if known.keys() >= {"<|return|>", "<|call|>"} or known.keys() >= {"<|calls|>", "<|flush|>"}:
            known.pop("<|end|>", None)  # there it ends a message, after which the text goes on
        if "<|tool_response>" in known:
            known.pop("</s>", None)
        by_text = tuple(known.values())
        return named | ({"the token's text": by_text} if by_text else {})

    @property
    def eos_token_id(self) -> int | None:
        """The id of `eos_token`."""
        (token_id,) = self.eos_sources.get(_ID_KEYS["eos_token"], (None,))
        return token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, a turn or a message; each once."""
        return tuple(dict.fromkeys(chain.from_iterable(self.eos_sources.values())))

    @property
    def add_bos(self) -> bool:
        """Whether a text begins with the bos token."""
        default = self.model == "llama" or self._pre_tokenizer().add_bos
        return self._metadata.flag("tokenizer.ggml.add_bos_token", default=default)

    @property
    def add_eos(self) -> bool:
        """Whether a text ends with the eos token."""
        return self._metadata.flag("tokenizer.ggml.add_eos_token", default=False)

    def to_json(self) -> str:
        """The text of a `tokenizer.json`."""
        build = self._byte_level if self.model == "gpt2" else self._sentencepiece
        try:
            tokenizer = build()
            tokenizer.add_tokens(self._added_tokens())
            return str(tokenizer.to_str())
        except TokenizerError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise self._fault("tokenizer.ggml", f"cannot be used ({error})") from error

    def _byte_level(self) -> Tokenizer:
        pre_tokenizer = self._pre_tokenizer()
        tokenizer = Tokenizer(
            models.BPE(
                vocab=self._ids(),
                merges=self._stored_merges(),
                ignore_merges=pre_tokenizer.ignore_merges,
            )
        )
        if pre_tokenizer.nfc:
            tokenizer.normalizer = normalizers.NFC()
        splits = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated")
            for pattern in pre_tokenizer.patterns
        ]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self) -> Tokenizer:
        unknown = self.special_tokens.get("unk_token")
        tokenizer = Tokenizer(
            models.BPE(
                vocab=self._ids(),
                merges=self._implied_merges(),
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        visible_spaces = normalizers.Replace(" ", SPACE)
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._metadata.flag("tokenizer.ggml.add_space_prefix", default=True):
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.Prepend(SPACE), visible_spaces]
            )
            steps.append(decoders.Strip(" ", 1, 0))
        else:
            tokenizer.normalizer = visible_spaces
        tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self._metadata.text("tokenizer.ggml.pre", "default")
        if name not in PRE_TOKENIZERS:
            raise self._fault("tokenizer.ggml.pre", f"is {name!r}", ", ".join(PRE_TOKENIZERS))
        return PRE_TOKENIZERS[name]

    def _ids(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    def _stored_merges(self) -> list[tuple[str, str]]:
        known = set(self.tokens)
        merges = []
        for merge in self._metadata.items("tokenizer.ggml.merges"):
            # A token may begin with a space, so the search starts at its second character.
            cut = merge.find(" ", 1)
            left, right = merge[:cut], merge[cut + 1 :]
            if left in known and right in known and left + right in known:
                merges.append((left, right))
        if not merges:
            raise self._fault("tokenizer.ggml.merges", "are missing")
        return merges

    def _implied_merges(self) -> list[tuple[str, str]]:
        """Every way to make a token of two, best score first."""
        scores = self._metadata.items("tokenizer.ggml.scores")
        if len(scores) != len(self.tokens):
            was = f"holds {len(scores)} numbers for {len(self.tokens)} tokens"
            raise self._fault("tokenizer.ggml.scores", was)
        text_types = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
        ids = {
            token: token_id
            for token_id, token in enumerate(self.tokens)
            if self.types[token_id] in text_types
        }
        ranked = []
        for token, token_id in ids.items():
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in ids and right in ids:
                    ranked.append((-scores[token_id], token_id, ids[left], ids[right], left, right))
        ranked.sort()
        return [(left, right) for *_, left, right in ranked]

    def _added_tokens(self) -> list[AddedToken]:
        ends = set(self.eos_token_ids)
        added = []
        for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            special = kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token_id in ends
            if special or kind == TokenType.USER_DEFINED:
                added.append(AddedToken(token, special=special, normalized=False))
        return added

    def _read_tokens(self) -> Sequence[str]:
        tokens = [
            token or f"[EMPTY_{token_id}]"
            for token_id, token in enumerate(self._metadata.items("tokenizer.ggml.tokens"))
        ]
        if not tokens or not all(isinstance(token, str) for token in tokens):
            raise self._fault("tokenizer.ggml.tokens", "are missing", "an array of texts")
        if (longest := max(map(len, tokens))) > MAX_TOKEN_LENGTH:
            was = f"hold one of {longest} characters"
            raise self._fault("tokenizer.ggml.tokens", was, f"{MAX_TOKEN_LENGTH} at most")
        if len(set(tokens)) < len(tokens):
            twice = Counter(tokens).most_common(1)[0][0]
            raise self._fault("tokenizer.ggml.tokens", f"hold {twice!r} twice")
        return tokens

    def _read_types(self) -> Sequence[int]:
        types = self._metadata.items("tokenizer.ggml.token_type")
        if types and len(types) != len(self.tokens):
            was = f"holds {len(types)} entries for {len(self.tokens)} tokens"
            raise self._fault("tokenizer.ggml.token_type", was)
        return types or [TokenType.NORMAL] * len(self.tokens)

    def _token_id(self, key: str) -> int | None:
        return self._metadata.token_id(key, len(self.tokens))

    def _fault(self, key: str, was: str, allowed: str = "") -> TokenizerError:
        return TokenizerError(f"{self._metadata.path}: {key}", was, allowed=allowed)
