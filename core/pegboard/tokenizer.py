"""Text to token ids and back, and chat templates. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from pegboard.chat.renderer import MAX_BYTES, ChatRenderer
from pegboard.errors import RequestError, TokenizerError
from pegboard.interfaces.checkpoint import AddedToken, TokenizerFacts
from pegboard.regular_files import MAX_TOKENIZER_BYTES, read_bytes

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load_tokenizer(
    facts: TokenizerFacts, *, where: str, chat_template: str | None = None
) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Args:
        facts: its files and texts.
        where: the checkpoint, for errors.
        chat_template: jinja2 source that takes the place of the checkpoint's.

    Raises:
        TokenizerError: there is none, or it cannot be used.
    """
    if facts.file is None:
        raise TokenizerError(f"{where}: tokenizer", "the checkpoint has none", fix="tokenizer: REF")
    library = _library(facts)
    source = facts.chat_template if chat_template is None else chat_template
    chat = None
    if source is not None:
        chat = ChatRenderer(source, facts.special_tokens, where=where)
    return Tokenizer(library, facts, chat, where=where)


def eos_token_id(facts: TokenizerFacts) -> int | None:
    """The id of the text that the checkpoint calls `eos_token`; None: it calls none so, or one that
    its tokenizer does not know.

    Raises:
        TokenizerError: the tokenizer has to be asked, and cannot be used.
    """
    text = facts.special_tokens.get("eos_token")
    if text is None or facts.file is None or facts.eos_token_id is not None:
        return facts.eos_token_id
    token_id: int | None = _library(facts).token_to_id(text)
    return token_id


def vocabulary(facts: TokenizerFacts) -> dict[str, int]:
    """The tokens of a checkpoint that has a tokenizer, added ones included, and their ids.

    Raises:
        TokenizerError: it cannot be used.
    """
    tokens: dict[str, int] = _library(facts).get_vocab(with_added_tokens=True)
    return tokens


def _library(facts: TokenizerFacts) -> tokenizers.Tokenizer:
    """The tokenizer of the file, with the tokens that other files add to it."""
    assert facts.file is not None
    try:
        content = read_bytes(facts.file, limit=MAX_TOKENIZER_BYTES)
        library = tokenizers.Tokenizer.from_buffer(content)
        known = library.get_added_tokens_decoder()
        texts = {token.content for token in known.values()}
        new = [
            token
            for token in facts.added_tokens
            if token.overrides or not (token.content in texts or token.token_id in known)
        ]
        unknown = [token for token in new if library.token_to_id(token.content) is None]
        library.add_tokens([_added(token) for token in new])
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(
            facts.file,
            f"cannot be used ({error})",
            allowed="a tokenizer.json of the tokenizers library",
        ) from error
    for token in unknown:
        _check_id(library, token, facts.file)
    return library


def _added(token: AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _check_id(library: tokenizers.Tokenizer, token: AddedToken, file: str) -> None:
    """Raises TokenizerError where the library has given a new token another id than its file says."""
    token_id = library.token_to_id(token.content)
    if None not in (token.token_id, token_id) and token_id != token.token_id:
        raise TokenizerError(
            file,
            f"lacks the added token {token.content!r:.80} of id {token.token_id}, and would give it"
            f" {token_id}",
            fix="a tokenizer.json that has it",
        )


class Tokenizer:
    """A tokenizer of the tokenizers library, with the checkpoint's rules for bos and chats.

    Attributes:
        vocab_size: ids that it knows, added tokens included; the model's vocabulary may be padded.
        chat: renders its conversations, in a process of its own; None: it has no chat template.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        facts: TokenizerFacts,
        chat: ChatRenderer | None,
        *,
        where: str,
    ) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self.chat = chat
        self._where = where
        self._add_bos = facts.add_bos
        self._bos_id = self._token_id(facts.special_tokens, "bos_token")
        add_eos = facts.add_eos and facts.add_bos is not None
        self._last_id = self._token_id(facts.special_tokens, "eos_token") if add_eos else None
        self.vocab_size: int = library.get_vocab_size()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written in the text become their ids.

        Args:
            text: to encode.
            special: add the special tokens, such as bos, that the checkpoint's rule adds to a plain
                prompt. A prompt that begins with bos gets no second one. A rendered chat has them.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        by_file = special and self._add_bos is None
        try:
            # Other threads run meanwhile, which `encode` does not let them.
            (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=by_file)
        except TypeError as error:  # the library's word for text that UTF-8 cannot hold
            raise RequestError(
                None, "the text holds half of a surrogate pair", allowed="valid Unicode"
            ) from error
        ids: list[int] = encoding.ids
        if special and self._add_bos and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        if special and self._last_id is not None:
            ids.append(self._last_id)
        return ids

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids; ids beyond the vocabulary add nothing.

        Args:
            token_ids: to decode.
            special: show special tokens, which add nothing otherwise.
        """
        text: str = self._library.decode(token_ids, skip_special_tokens=not special)
        return text

    def token(self, token_id: int) -> str:
        """The token as the vocabulary writes it; empty for an id beyond it."""
        text: str | None = self._library.id_to_token(token_id)
        return text or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of the token within a text; they may be part of a character.

        A special token stands for its own text; an id beyond the vocabulary for nothing.
        """
        token: str | None = self._library.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._special_ids:
            return token.encode()
        if token_id in self._byte_ids:
            return bytes.fromhex(token[3:5])
        if self._bytes_of_characters:
            values = [self._bytes_of_characters.get(character) for character in token]
            # The decoder takes a token with another character, an added one, for plain text.
            return token.encode() if None in values else bytes(v for v in values if v is not None)
        for written, meant in self._replacements:
            token = token.replace(written, meant)
        return token.encode()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        max_bytes: int = MAX_BYTES,
    ) -> str:
        """The prompt of a conversation, by the chat template.

        Args:
            messages: `role`, `content` and what else the template reads; a key whose value is None
                counts as absent.
            tools: JSON schemas of functions, for templates that know tools.
            add_generation_prompt: end with the beginning of the assistant's answer.
            max_bytes: most bytes of UTF-8 that the prompt may have.

        Raises:
            TokenizerError: the checkpoint has no chat template, or one that cannot be used.
            RequestError: the template refuses the messages, or takes too long or too much memory.
        """
        if self.chat is None:
            raise TokenizerError(
                f"{self._where}: chat template",
                "the checkpoint has none",
                fix="give one with chat_template, or use plain completions",
            )
        given = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        return self.chat.render(
            given,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            max_bytes=max_bytes,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins."""
        return self.encode(self.render_chat(messages), special=False)

    def close(self) -> None:
        """Ends the process that renders conversations. Idempotent; another one starts it again."""
        if self.chat is not None:
            self.chat.close()

    def is_skipped(self, token_id: int) -> bool:
        """Whether `decode` leaves the token out."""
        return token_id in self._special_ids or self._library.id_to_token(token_id) is None

    def skipped_id(self, text: str) -> int | None:
        """The id of the token that is written so, where `decode` leaves it out; None: there is none."""
        token_id: int | None = self._library.token_to_id(text)
        return token_id if token_id in self._special_ids else None

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one byte whose text depends on the bytes around it."""
        return token_id in self._byte_ids

    @cached_property
    def joins_bytes(self) -> bool:
        """Whether any text is the UTF-8 of its tokens' bytes, independent of their neighbours."""
        return [step["type"] for step in self._decoders] == ["ByteLevel"]

    @cached_property
    def max_token_bytes(self) -> int:
        """No token adds more bytes of UTF-8 to a text than this."""
        # In byte-level vocabularies a character stands for one byte, and invalid bytes become
        # U+FFFD, three bytes each.
        texts = self._library.get_vocab(with_added_tokens=True)
        return max(max(len(text.encode()), 3 * len(text)) for text in texts)

    @cached_property
    def _decoders(self) -> list[dict[str, Any]]:
        """The steps of the decoder, as the file writes them."""
        if self._library.decoder is None:
            return []
        decoder: dict[str, Any] = json.loads(self._library.decoder.__getstate__())
        return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]

    @cached_property
    def _bytes_of_characters(self) -> dict[str, int]:
        """Characters that stand for a byte each; none where the vocabulary is not byte-level."""
        if not any(step["type"] == "ByteLevel" for step in self._decoders):
            return {}
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {
            chr(256 + index): byte for index, byte in enumerate(others)
        }

    @cached_property
    def _replacements(self) -> list[tuple[str, str]]:
        """Pieces of tokens, and the texts that the decoder puts in their place."""
        pairs = []
        for step in self._decoders:
            if step["type"] == "Metaspace":
                pairs.append((step["replacement"], " "))
            if step["type"] == "Replace" and "String" in step["pattern"]:
                pairs.append((step["pattern"]["String"], step["content"]))
        return pairs

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._library.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def _byte_ids(self) -> frozenset[int]:
        """Byte-fallback tokens (`<0x0A>`), where the decoder reads them as bytes."""
        if not any(step["type"] == "ByteFallback" for step in self._decoders):
            return frozenset()
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        return frozenset(
            token_id for token, token_id in vocabulary.items() if _BYTE_TOKEN.fullmatch(token)
        )

    def _token_id(self, special_tokens: Mapping[str, str], name: str) -> int | None:
        text = special_tokens.get(name)
        token_id: int | None = None if text is None else self._library.token_to_id(text)
        return token_id
