"""The server's answers: the OpenAI API's objects, as msgspec structs.

Fields that are UNSET are left out; a field that the API wants present is null instead. `stop_reason`,
`token_ids`, `prompt_token_ids` and `prompt_logprobs` are vLLM's extensions.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

StopReason = int | str | None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts. Each prompt counts once, however many sequences it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Parallel lists, one entry a token; `text_offset` counts characters of the choice's text. The
    first token of an echoed prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """The logprob of one token at one place in the prompt; rank 1 is the likeliest there."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry a prompt token, from token id to its logprob and text; null for the first token."""


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that all completions and their chunks have."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: StopReason
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(_Answer, frozen=True, kw_only=True):
    """The whole answer, and also each chunk of a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    """`bytes` are exact where `token` is only part of a character; null without a tokenizer."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob, frozen=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatReplyMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: StopReason
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletion(_Answer, frozen=True, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatChunk(_Answer, frozen=True, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET


class Tokenized(msgspec.Struct, frozen=True):
    """Answer of `/tokenize`; `token_strs` are the tokens as the vocabulary writes them."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """Answer of `/detokenize`."""

    prompt: str


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pegboard"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


Chunk = Completion | ChatChunk
