"""The model as the server knows it: its name, its tokenizer, its context."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from pegboard.config import LimitsConfig
from pegboard.errors import RequestError, TokenizerError
from pegboard.request import SamplingParams
from pegboard.sampling_defaults import SamplingDefaults
from pegboard.server.chat_renderer import QueuedChatRenderer
from pegboard.server.failures import ApiError

if TYPE_CHECKING:
    from pegboard.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """
    Attributes:
        names: under which it is served, at least one.
        root: its reference in the config.
        created: when it was loaded, in seconds of Unix time.
        vocab_size: token ids are below it.
        max_model_len: most tokens of a prompt and its answer together.
        fingerprint: of everything that decides its tokens.
        tokenizer: None: the checkpoint has none, and prompts are token ids.
        renderer: of its chat template; None: it has none.
        limits: on requests.
        sampling_defaults: the checkpoint's, for fields that a request leaves out.
        encoding: the thread that encodes texts.
    """

    names: tuple[str, ...]
    root: str
    created: int
    vocab_size: int
    max_model_len: int
    fingerprint: str
    tokenizer: Tokenizer | None
    renderer: QueuedChatRenderer | None
    limits: LimitsConfig
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    encoding: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))

    def named(self, name: str | None) -> str:
        """The name by which a request calls the model; the first name if it gives none.

        Raises:
            ApiError: 404, it asks for another model.
        """
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist; served: {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return name

    def check_params(self, params: SamplingParams) -> None:
        """Raises RequestError naming a field with a token id that the model does not have."""
        self.check_ids("stop_token_ids", params.stop_token_ids)
        self.check_ids("logit_bias", tuple(params.logit_bias))

    def check_ids(self, param: str, token_ids: Sequence[int]) -> None:
        """Raises RequestError when the model does not have one of the ids."""
        for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    param, f"token id {token_id}", allowed=f"0 to {self.vocab_size - 1}"
                )

    def check_num_ids(self, param: str, token_ids: Sequence[int]) -> None:
        """Raises ApiError when there are more ids than the context holds."""
        if len(token_ids) > self.max_model_len:
            raise self._overflow(param, f"{len(token_ids)} were given; fix: send fewer at a time")

    def check_prompt(self, prompt: str | Sequence[int]) -> None:
        """Refuses prompts that are wrong or too long before they are tokenized.

        Raises:
            RequestError, ApiError: ids are out of range, or too many for the context; or the text is too
                long for any tokens to fit.
        """
        if isinstance(prompt, str):
            self._check_texts("prompt", [prompt])
        else:
            self.check_length("prompt", len(prompt))
            self.check_ids("prompt", prompt)

    async def encode(self, prompt: str | Sequence[int], *, special: bool = True) -> tuple[int, ...]:
        """The token ids of a prompt that has been checked. Raises RequestError without a tokenizer."""
        if not isinstance(prompt, str):
            return tuple(prompt)
        tokenizer = self.need_tokenizer("prompt")
        return await self._encoded(tokenizer, prompt, special)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        special: bool = False,
    ) -> tuple[int, ...]:
        """The token ids of a conversation in the model's chat template.

        Raises:
            UserError: the model has no tokenizer or template, or its template refuses the messages.
            ApiError: they cannot fit the context.
        """
        tokenizer = self.need_tokenizer("messages")
        if self.renderer is None:
            raise TokenizerError(
                "chat template",
                "the checkpoint has none",
                fix="start the server with --chat-template FILE, or use /v1/completions",
            )
        self._check_texts("messages", [text for message in messages for text in message.values()])
        text = await self.renderer.render(
            messages, max_bytes=self._max_bytes, add_generation_prompt=add_generation_prompt
        )
        return await self._encoded(tokenizer, text, special)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of token ids; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(token_ids, special=special)

    def check_length(self, param: str, num_prompt_tokens: int) -> None:
        """Raises RequestError for a prompt of no tokens, ApiError 400 where the context has no room for
        an answer. An answer that asks for more tokens than there is room for is cut."""
        if not num_prompt_tokens:
            raise RequestError(param, "no tokens", allowed="at least one token")
        if num_prompt_tokens >= self.max_model_len:
            raise self._overflow(
                param,
                f"{num_prompt_tokens + 1} were requested: {num_prompt_tokens} in the {param}, "
                f"at least 1 in the completion; fix: shorten the {param}",
            )

    def need_tokenizer(self, param: str) -> Tokenizer:
        """The tokenizer. Raises RequestError naming the field that needs one."""
        if self.tokenizer is None:
            raise RequestError(
                param,
                "the model has no tokenizer",
                fix="send token ids to /v1/completions, with return_token_ids",
            )
        return self.tokenizer

    async def _encoded(self, tokenizer: Tokenizer, text: str, special: bool) -> tuple[int, ...]:
        """In the one thread of all texts: however many come at once, they take one core at most."""
        encode = partial(tokenizer.encode, text, special=special)
        ids = await asyncio.get_running_loop().run_in_executor(self.encoding, encode)
        return tuple(ids)

    @property
    def _max_bytes(self) -> int:
        """Most bytes of UTF-8 of a text that is tokenized."""
        most = self.need_tokenizer("prompt").max_token_bytes
        return self.max_model_len * min(most, self.limits.bytes_per_token)

    def _check_texts(self, param: str, texts: Sequence[str]) -> None:
        """Raises ApiError when the texts are together too long to be tokenized."""
        self.need_tokenizer(param)
        limit = self._max_bytes
        # A character has one to four bytes; most texts need no counting.
        if 4 * sum(map(len, texts)) <= limit:
            return
        if sum(len(text.encode(errors="replace")) for text in texts) > limit:
            raise self._overflow(
                param,
                f"the {param} has more bytes than so many tokens have; allowed: {limit} "
                f"(server.limits.bytes_per_token: {self.limits.bytes_per_token}); fix: shorten it",
            )

    def _overflow(self, param: str, reason: str) -> ApiError:
        # Clients know an overflow by this sentence or by the code.
        sentence = (
            f"this model's maximum context length is {self.max_model_len} tokens, but {reason}"
        )
        return ApiError(400, sentence, param=param, code="context_length_exceeded")


class TokenTexts:
    """The text of single tokens, for logprobs; looked up once each."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._raw: dict[int, bytes] = {}

    def raw(self, token_id: int) -> bytes:
        """The token's UTF-8, perhaps part of a character."""
        if self._tokenizer is None:
            return b""
        if (raw := self._raw.get(token_id)) is None:
            raw = self._raw[token_id] = self._tokenizer.token_bytes(token_id)
        return raw

    def text(self, token_id: int) -> str:
        """The token by itself; U+FFFD stands for a part of a character."""
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        return self.raw(token_id).decode(errors="replace")

    def bytes(self, token_id: int) -> list[int] | None:
        """The token's UTF-8, None without a tokenizer."""
        return None if self._tokenizer is None else list(self.raw(token_id))

    def is_shown(self, token_id: int) -> bool:
        """Whether an answer's text holds the token."""
        return self._tokenizer is not None and not self._tokenizer.is_skipped(token_id)
