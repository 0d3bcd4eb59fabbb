"""The values that a request is made of, on their way into the engine and out of it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from pegboard.errors import RequestError

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20
MIN_SCALE = 1e-6
"""Least number that a logit is divided by: quotients stay within float32."""
MAX_BIAS = 1e20
"""Most that is added to a logit: it can be divided by MIN_SCALE twice and stay within float32."""

MAX_NESTING = 64
"""Levels of lists and mappings in a logits processor's parameters."""

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""An integer that every process and kernel can hold."""

MAX_DRAFTS = 2**31 - 1
"""Most draft tokens that a request can speak of."""

NumDrafts = Annotated[int, msgspec.Meta(ge=0, le=MAX_DRAFTS)]

Speculative = Literal["off"] | Mapping[str, int]
"""A client's word on drafts: see `read_speculative`."""

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of a request are chosen and when it ends.

    The defaults are those of the OpenAI API, with filters off.

    Attributes:
        max_tokens: most tokens to generate; None means up to the model's context.
        temperature: 0 is greedy; otherwise, from MIN_SCALE on, logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all. Ties go to the lower id.
        top_p: keep the smallest set of most likely tokens whose probability reaches it, in (0, 1].
        min_p: keep tokens at least this fraction as likely as the most likely one, in [0, 1].
        repetition_penalty: makes tokens of prompt and output less likely (Keskar et al. 2019); 1 is
            off.
        presence_penalty: subtracted once from tokens already generated, in [-2, 2].
        frequency_penalty: subtracted for each time a token was generated, in [-2, 2].
        logit_bias: token id to a number added to its logit.
        seed: of the noise, 0 to 2**64 - 1; None: one is drawn at arrival and kept with the request.
        n: sequences to generate from the prompt.
        stop: texts that end a sequence; they are not part of the answer.
        stop_token_ids: token ids that end a sequence, beside the model's own.
        ignore_eos: do not end at the model's end-of-sequence tokens.
        min_tokens: until a sequence has so many tokens, those that would end it are not sampled, and
            stop texts do not end it.
        logprobs: report the chosen token's logprob and that many most likely ones; None: none.
        prompt_logprobs: the same for the prompt's tokens.
        processors: logits processor's name to its own parameters, validated by its plugin.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[Int64, float] = {}
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[Int64, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    processors: dict[str, dict[str, Any]] = {}

    def check(self) -> None:
        """Raises RequestError naming the first field that is of a wrong type or out of range.

        Limits that the operator sets (most sequences, stop texts) are the server's to check.
        """
        _check_types(self, self.__struct_fields__)
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is None:
                continue
            if not low <= value <= high:
                raise RequestError(name, f"{value}", allowed=f"{low:g} to {high:g}")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError("top_p", f"{self.top_p}", allowed="over 0, at most 1")
        if 0.0 < self.temperature < MIN_SCALE:
            raise RequestError(
                "temperature",
                f"{self.temperature}",
                allowed=f"0 (the most likely token), or {MIN_SCALE:g} to 100",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens", f"{self.min_tokens}", allowed=f"at most max_tokens, {self.max_tokens}"
            )
        if any(not text for text in self.stop):
            raise RequestError("stop", "an empty text", allowed="texts of one character or more")
        if self.processors:
            check_plain("processors", self.processors)
        _check_bias(self.logit_bias)


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, 2**31 - 1),
    ("temperature", 0.0, 100.0),
    ("top_k", 0, 2**31 - 1),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", MIN_SCALE, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("seed", 0, MAX_SEED),
    ("n", 1, 2**16),
    ("min_tokens", 0, 2**31 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the engine takes it: token ids in.

    Attributes:
        request_id: unique among the open requests; chosen by the caller.
        prompt_token_ids: at least one id, each below the vocabulary's size.
        params: how to sample and when to end.
        priority: lower runs earlier, where the scheduler heeds it.
        tenant: whose request this is, for fair schedulers.
        cache_salt: only requests of the same salt share KV.
        prefix_cache: `on`: the request uses cached prefixes, and its own are cached; `read_only`: it
            only uses them; `off`: neither.
        speculative: most draft tokens that a step may verify, and a drafter propose, with a sequence; 0:
            none; None: what the config says, which is never exceeded. Under exact verification no token
            depends on it.
        arrival: seconds of a monotonic clock; the engine fills it in when it is 0.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    priority: Int64 = 0
    tenant: str = ""
    cache_salt: str = ""
    prefix_cache: Literal["on", "read_only", "off"] = "on"
    speculative: NumDrafts | None = None
    arrival: float = 0.0

    def check(self) -> None:
        """Raises RequestError naming the first field that is of a wrong type or out of range; the
        prompt's ids are the engine's to check."""
        _check_types(
            self,
            (
                "request_id",
                "priority",
                "tenant",
                "cache_salt",
                "prefix_cache",
                "speculative",
                "arrival",
            ),
        )
        if not isinstance(self.params, SamplingParams):
            raise RequestError(
                "params", f"a {type(self.params).__name__}", allowed="SamplingParams"
            )
        for name in ("request_id", "tenant", "cache_salt"):
            if not _is_utf8(getattr(self, name)):
                raise RequestError(name, "text with half a surrogate pair", allowed="UTF-8 text")
        if not math.isfinite(self.arrival):
            raise RequestError("arrival", f"{self.arrival}", allowed="seconds of a monotonic clock")
        self.params.check()


def read_speculative(said: object) -> int | None:
    """`Request.speculative` of a client's words: `off`, or a mapping with `num_speculative_tokens`. False,
    which YAML reads where `off` is written, is `off`; None, and a mapping without it, ask for nothing.

    Raises:
        RequestError: it is something else.
    """
    if said is None or said == "off" or said is False:
        return None if said is None else 0
    allowed = f"off, or num_speculative_tokens with a number of 0 to {MAX_DRAFTS}"
    if not isinstance(said, Mapping):
        raise RequestError("speculative", _shown(said), allowed=allowed)
    for key in said:
        if key != "num_speculative_tokens":
            raise RequestError("speculative", f"the key {_shown(key)}", allowed=allowed)
    number = said.get("num_speculative_tokens")
    if number is not None and not (type(number) is int and 0 <= number <= MAX_DRAFTS):
        raise RequestError(
            "speculative.num_speculative_tokens", _shown(number), allowed=f"0 to {MAX_DRAFTS}"
        )
    return number


def _shown(value: object) -> str:
    """A value in a message, whatever its size."""
    if isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**20):
        return f"{value}"
    return repr(value[:50]) if isinstance(value, str) else f"a value of type {type(value).__name__}"


def _check_types(values: SamplingParams | Request, names: Iterable[str]) -> None:
    """Raises RequestError naming the first field whose value is not of its type."""
    kinds = _KINDS[type(values)]
    for name in names:
        try:
            msgspec.convert(getattr(values, name), kinds[name], strict=True)
        except (msgspec.ValidationError, TypeError, OverflowError) as problem:
            raise RequestError(name, str(problem)) from None


def _is_utf8(text: str) -> bool:
    """Whether messages and digests can hold the text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_plain(param: str, values: Any) -> None:
    """Raises RequestError for values that no message can carry, or that are nested too deeply for those
    who copy them."""
    try:
        msgspec.msgpack.encode(values)
    except (TypeError, ValueError, OverflowError, RecursionError) as problem:
        raise RequestError(param, str(problem), allowed="plain values") from None
    level = [values]
    for _ in range(MAX_NESTING):
        level = [item for value in level for item in _items(value)]
        if not level:
            return
    raise RequestError(
        param, "values nested too deeply", allowed=f"lists and mappings {MAX_NESTING} deep"
    )


def _items(value: Any) -> Iterable[Any]:
    """The items of a list or mapping."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def _check_bias(logit_bias: dict[int, float]) -> None:
    """Raises RequestError for an id or a number that is out of range."""
    for token_id, bias in logit_bias.items():
        if token_id < 0 or not abs(bias) <= MAX_BIAS:
            raise RequestError(
                "logit_bias",
                f"{token_id}: {bias}",
                allowed=f"a token id to a number of -{MAX_BIAS:g} to {MAX_BIAS:g}",
            )


_KINDS: dict[type, dict[str, Any]] = {
    kind: {field.name: field.type for field in msgspec.structs.fields(kind)}
    for kind in (SamplingParams, Request)
}


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The logprob of one position's token, and of the most likely tokens there.

    Logprobs are of the model's distribution in float32, before processors, filters and temperature.

    Attributes:
        token_id: the token at this position.
        logprob: its natural logarithm of probability.
        rank: 1 for the most likely token.
        top_ids: the most likely ids, best first, as many as were asked for.
        top_logprobs: theirs.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class SequenceDelta(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that one step added to one sequence; the last delta carries a finish reason.

    Attributes:
        request_id: the request.
        index: the sequence, 0 to n - 1.
        token_ids: new tokens, in order.
        text: new text, safe to show: it never needs to be taken back. Empty without a tokenizer.
        logprobs: one a token, when asked for.
        prompt_logprobs: when asked for, once a request, with its first tokens: one a prompt token; the
            first is None, since nothing precedes it.
        finish_reason: None while it goes on. `stop`: a stop token or text; `length`: max_tokens or
            the context; `abort`: the caller ended it; `error`: `error` says why.
        stop_reason: the stop text or token id that was hit, None for end-of-sequence.
        error: one line, with finish_reason `error`.
        num_prompt_tokens: the prompt's length.
        num_cached_tokens: how many of them were not computed, thanks to a cache.
        num_output_tokens: tokens generated so far, these included.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


class JoinedDeltas:
    """A sequence's deltas, joined as they come.

    Attributes:
        token_ids: int32, of all deltas.
        logprobs: of all deltas; None: not asked for.
        prompt_logprobs: see `SequenceDelta`.
        last: the latest delta, which tells counts and reasons; None: there was none.
    """

    __slots__ = ("_texts", "last", "logprobs", "prompt_logprobs", "token_ids")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.token_ids = array("i")
        self.logprobs: list[TokenLogprob] | None = None
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.last: SequenceDelta | None = None

    def add(self, delta: SequenceDelta) -> None:
        self._texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.last = delta

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def delta(self) -> SequenceDelta:
        """All of them as one. At least one was added."""
        assert self.last is not None
        if len(self._texts) == 1 and self.prompt_logprobs is self.last.prompt_logprobs:
            return self.last
        return msgspec.structs.replace(
            self.last,
            token_ids=tuple(self.token_ids),
            text=self.text,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=self.prompt_logprobs,
        )
