"""The bodies that clients send: the OpenAI API's requests, with vLLM's extensions.

An unknown field is refused by name. So is a known one that would change the answer and is not honoured:
no wish of a client is dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)

from pegboard.config_values import nearest
from pegboard.errors import RequestError
from pegboard.request import (
    MAX_DRAFTS,
    MAX_LOGPROBS,
    MAX_SEED,
    SamplingParams,
    read_speculative,
)
from pegboard.sampling_defaults import SamplingDefaults
from pegboard.server.bounds import AtMost, BytesAtMost
from pegboard.server.prompts import Prompts, read_prompts

Name = Annotated[str, AtMost("name")]
"""A text by which things are told apart; it is kept beside each request."""

MAX_ID_DIGITS = 20
"""Digits of a token id as text. A longer text is no id, and slow to read as a number."""


def _drafts(said: object) -> int | None:
    try:
        return read_speculative(said)
    except RequestError as error:
        # It is told beside the body's other mistakes.
        raise ValueError(str(error).removeprefix("speculative: ")) from None


Drafts = Annotated[
    int | None,
    BeforeValidator(_drafts),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["off", False]},
                {
                    "type": "object",
                    "properties": {
                        "num_speculative_tokens": {
                            "type": "integer",
                            "minimum": 0,
                            "maximum": MAX_DRAFTS,
                        }
                    },
                    "additionalProperties": False,
                },
                {"type": "null"},
            ]
        }
    ),
]
"""Most draft tokens at a time, 0 for none: as `Request.speculative`."""

Harmless = Mapping[str, tuple[Any, ...]]
"""Field to the values that ask for nothing."""

_COMMON: Harmless = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Body(BaseModel):
    """Base of all parts of a request: values are of the right JSON type, fields are known."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Body):
    """Options of a stream.

    Attributes:
        include_usage: send a last chunk that counts the tokens.
        continuous_usage_stats: count them in each chunk, too, as far as they have come.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(Body):
    """The fields of both kinds of completion.

    Attributes:
        model: a served name.
        user: the tenant of the request, among those of the same API key; some schedulers heed it.
        safety_identifier, metadata, prompt_cache_key: about the client; no answer depends on them.
        cache_salt: KV is shared only between requests of the same salt and API key.
        prefix_cache: `read_only`: KV computed before is used, and this request's is not kept for
            others; `off`: neither.
        speculative: `off`: no drafts; `{"num_speculative_tokens": n}`: at most so many at a time. A hint:
            more than the config allows are not used, and under exact verification no token of the answer
            depends on it.
        logit_bias: token id, as text, to a number.
        priority: lower runs earlier, where the scheduler heeds it.
        processors: logits processor's name to its parameters.
        return_token_ids: add each choice's `token_ids` to the answer.
        prompt_in_each_choice: whether the answer then repeats the prompt's in each choice, too.

    The other fields are those of `SamplingParams`.
    """

    not_honoured: ClassVar[Harmless] = _COMMON
    prompt_in_each_choice: ClassVar[bool] = False

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    metadata: Annotated[
        dict[str, str] | None, Field(fail_fast=True), AtMost("metadata", "metadata_characters")
    ] = None
    prompt_cache_key: Name | None = None
    cache_salt: Name | None = None
    prefix_cache: Literal["on", "read_only", "off"] | None = None
    speculative: Drafts = None

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, Field(fail_fast=True), AtMost("logit_bias")] = (
        None
    )
    seed: int | None = None
    n: int | None = None
    stop: Annotated[
        list[str] | None,
        Field(fail_fast=True),
        AtMost("stop", "stop_characters"),
        BeforeValidator(_one_or_more),
    ] = None
    stop_token_ids: Annotated[list[int] | None, Field(fail_fast=True), AtMost("stop_token_ids")] = (
        None
    )
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    processors: Annotated[
        dict[str, dict[str, Any]] | None, Field(fail_fast=True), BytesAtMost("processors")
    ] = None
    return_token_ids: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_fields_by_name(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kept = dict(values)
        for name, value in values.items():
            if name in cls.model_fields:
                continue
            if name not in cls.not_honoured:
                raise RequestError(name[:200], "unknown field", fix=_nearest(name, cls))
            if value not in cls.not_honoured[name]:
                raise RequestError(name, "not supported", fix="leave it out")
            del kept[name]
        return kept

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options", "given without stream", fix="set stream to true")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs", "given with stream", fix="set stream to false")
        return self

    @property
    def scores_only(self) -> bool:
        """Whether nothing is to be generated."""
        return False

    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """The sampling parameters; `defaults` fill fields that the body leaves out.

        Raises:
            RequestError: a field is out of range; it is named.
        """
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        given |= self.sampling_overrides()
        if "logit_bias" in given:
            given["logit_bias"] = _read_logit_bias(given["logit_bias"])
        if given.get("top_k") == -1:  # vLLM's word for all
            given["top_k"] = 0
        if given.get("seed") == -1:  # vLLM's and llama.cpp's word for none
            del given["seed"]
        if -(2**63) <= given.get("seed", 0) < 0:  # OpenAI's seeds are signed
            given["seed"] &= MAX_SEED
        for name in ("stop", "stop_token_ids"):
            given[name] = tuple(given.get(name, ()))
        params = SamplingParams(**defaults.fill(given))
        params.check()
        return params

    def sampling_overrides(self) -> dict[str, Any]:
        """Parameters for which this kind of completion has its own name or default."""
        raise NotImplementedError


_SAMPLING = [
    name for name in SamplingParams.__struct_fields__ if name in GenerationBody.model_fields
]


class CompletionBody(GenerationBody):
    """`POST /v1/completions`.

    Attributes:
        prompt: a text, texts, the token ids of a prompt, or those of several.
        max_tokens: 16 unless given; 0, with echo, only scores the prompt.
        logprobs: so many most likely tokens beside the chosen one.
        echo: begin each answer with its prompt, logprobs included.
    """

    not_honoured: ClassVar[Harmless] = {
        **_COMMON,
        "add_special_tokens": (True,),
        "best_of": (1,),
        "suffix": ("",),
    }
    prompt_in_each_choice: ClassVar[bool] = True

    prompt: Annotated[Prompts, WrapValidator(read_prompts)]
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def scores_only(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """One entry a prompt."""
        return cast(list[str | list[int]], self.prompt)

    def sampling_overrides(self) -> dict[str, Any]:
        overrides: dict[str, Any] = {} if self.max_tokens is not None else {"max_tokens": 16}
        if self.scores_only:
            overrides["max_tokens"] = 1
        if self.logprobs is not None:
            overrides["logprobs"] = self.logprobs
            if self.echo:
                overrides["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return overrides


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class ChatMessage(Body):
    """A message. `developer` is `system` by another name."""

    not_honoured: ClassVar[tuple[str, ...]] = (
        "annotations",
        "audio",
        "function_call",
        "reasoning_content",
        "refusal",
        "tool_calls",
    )

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[TextPart] | None, Field(fail_fast=True), AtMost("parts"), BeforeValidator(_parts)
    ] = None
    name: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_fields(cls, values: Any) -> Any:
        # Clients send an answer's message back as they got it, its empty fields included.
        if not isinstance(values, dict):
            return values
        return {k: v for k, v in values.items() if k not in cls.not_honoured or v != []}

    def for_template(self) -> dict[str, str]:
        """The message as chat templates read it."""
        text = "\n".join(part.text for part in self.content or ())
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({"name": self.name} if self.name else {})


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True), AtMost("messages")]
"""A conversation."""


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`.

    Attributes:
        messages: the conversation, at least one.
        max_completion_tokens: the newer name of `max_tokens`; without either, up to the context.
        logprobs: whether to report the chosen tokens' logprobs.
        top_logprobs: so many most likely tokens beside each.
    """

    not_honoured: ClassVar[Harmless] = {
        **_COMMON,
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "audio": (),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "reasoning_effort": ("none",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None

    def sampling_overrides(self) -> dict[str, Any]:
        overrides: dict[str, Any] = {}
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise RequestError("max_tokens", "differs from max_completion_tokens")
            overrides["max_tokens"] = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs", "given without logprobs", fix="set logprobs to true")
        if self.logprobs:
            overrides["logprobs"] = self.top_logprobs or 0
        return overrides


def _read_logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS):
            raise RequestError("logit_bias", f"the key {key[:50]!r}", allowed="token ids as text")
    return {int(key): float(value) for key, value in bias.items()}


def _nearest(name: str, body: type[GenerationBody]) -> str:
    meant = nearest(name[:50], list(body.model_fields))
    return f"did you mean {meant}?" if meant else "leave it out"
