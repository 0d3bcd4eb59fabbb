"""The way of both kinds of completion from a body to requests, and the count of tokens that came back."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec

from pegboard.config import LimitsConfig
from pegboard.errors import RequestError
from pegboard.request import JoinedDeltas, Request, SamplingParams, SequenceDelta
from pegboard.server.caller import Caller
from pegboard.server.protocol import GenerationBody, StreamOptions
from pegboard.server.replies import PromptTokensDetails, Usage
from pegboard.server.served_model import ServedModel
from pegboard.server.submission import Progress, Submission

CHARACTERS_PER_ID = 8
"""Characters that a repeated token id counts for, against the limit of repeated prompts."""


@dataclass(frozen=True)
class Call:
    """One HTTP call on its way through the engine.

    Attributes:
        model_name: what the request calls the model, or the first of its names.
        requests: one a prompt; choice `i * n + k` is sequence k of request i.
        stream_options: of the body, or the defaults.
        num_prompt_logprobs: most likely tokens to show for each place in the prompt; None: the prompt's
            logprobs were not asked for.
        scores_only: the client wants no tokens. The engine generates one all the same, at no cost, and
            the call hides it.
        echo: each prompt's text, which comes before the answer's; None: it does not.
    """

    call_id: str
    created: int
    model: ServedModel
    model_name: str
    params: SamplingParams
    requests: tuple[Request, ...]
    stream_options: StreamOptions
    return_token_ids: bool
    num_prompt_logprobs: int | None
    scores_only: bool = False
    echo: tuple[str, ...] | None = None
    _positions: dict[str, int] = field(default_factory=dict)

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer shows any."""
        return self.params.logprobs is not None or self.params.prompt_logprobs is not None

    @property
    def may_be_large(self) -> bool:
        """Whether the answer shows more than texts."""
        return self.has_logprobs or self.return_token_ids

    def choice_index(self, delta: SequenceDelta) -> int:
        """The number of the delta's sequence among the call's choices."""
        return self._positions[delta.request_id] * self.params.n + delta.index

    def prompt(self, choice: int) -> tuple[int, ...]:
        """The token ids of a choice's prompt."""
        return self.requests[choice // self.params.n].prompt_token_ids

    def choices(self, request_id: str) -> range:
        """The numbers of a request's choices."""
        first = self._positions[request_id] * self.params.n
        return range(first, first + self.params.n)

    def echoed(self, choice: int) -> str | None:
        """The prompt's text, as it stands before the choice's answer; None: it does not."""
        return None if self.echo is None else self.echo[choice // self.params.n]

    async def deltas(self, submission: Submission) -> AsyncIterator[SequenceDelta]:
        """The engine's deltas, less those that the client did not ask for.

        Raises:
            PegboardError: a sequence failed.
        """
        async for delta in submission:
            yield _without_output(delta) if self.scores_only else delta


def make_call(
    prefix: str,
    body: GenerationBody,
    model: ServedModel,
    params: SamplingParams,
    prompts: Sequence[tuple[int, ...]],
    asker: Caller,
    *,
    echo: tuple[str, ...] | None = None,
) -> Call:
    """The call of a body whose prompts have been encoded; `prefix` begins its id.

    Raises:
        RequestError: a value that the engine would not take, or an answer that would be too large.
        ApiError: there is no such model.
    """
    _check_answer(model, body, params, prompts, echo)
    call_id = f"{prefix}-{uuid.uuid4().hex}"
    requests = tuple(
        Request(
            request_id=f"{call_id}-{position}",
            prompt_token_ids=prompt,
            params=params,
            priority=body.priority or 0,
            tenant=asker.namespaced(body.user),
            cache_salt=asker.namespaced(body.cache_salt),
            prefix_cache=body.prefix_cache or "on",
            speculative=body.speculative,
        )
        for position, prompt in enumerate(prompts)
    )
    requests[0].check()  # they differ in their prompts alone, which have been checked
    return Call(
        call_id=call_id,
        created=int(time.time()),
        model=model,
        model_name=model.named(body.model),
        params=params,
        requests=requests,
        stream_options=body.stream_options or StreamOptions(),
        return_token_ids=bool(body.return_token_ids),
        num_prompt_logprobs=body.prompt_logprobs,
        scores_only=body.scores_only,
        echo=echo,
        _positions={request.request_id: i for i, request in enumerate(requests)},
    )


def read_params(body: GenerationBody, model: ServedModel, num_prompts: int) -> SamplingParams:
    """The sampling parameters of a body.

    Raises:
        RequestError: a field is out of range, or asks for more than the operator allows.
        ApiError: there is no such model.
    """
    model.named(body.model)
    params, limits = body.sampling_params(model.sampling_defaults), model.limits
    if params.n > limits.n:
        raise RequestError("n", f"{params.n}", allowed=limits.allowed("n"))
    num_sequences = params.n * num_prompts
    for setting in ("sequences", "queue"):
        if num_sequences > getattr(limits, setting):
            raise RequestError(
                "n",
                f"{num_sequences} sequences, {params.n} for each of {num_prompts} prompts",
                allowed=limits.allowed(setting),
            )
    model.check_params(params)
    return params


def _check_answer(
    model: ServedModel,
    body: GenerationBody,
    params: SamplingParams,
    prompts: Sequence[tuple[int, ...]],
    echo: tuple[str, ...] | None,
) -> None:
    """Raises RequestError when the answer would be larger than the operator allows."""
    limits = model.limits
    num_echoed = params.n * sum(map(len, echo or ()))
    if num_echoed > limits.echo:
        was = f"{num_echoed} characters in all choices"
        raise RequestError("echo", was, allowed=limits.allowed("echo"))
    if body.prompt_in_each_choice and body.return_token_ids and not body.stream:
        num_ids = params.n * sum(map(len, prompts))
        if num_ids * CHARACTERS_PER_ID > limits.echo:
            was = f"{num_ids} token ids of prompts in all choices, {CHARACTERS_PER_ID} characters each"
            raise RequestError("return_token_ids", was, allowed=limits.allowed("echo"))
    num_logprobs = 0
    if params.prompt_logprobs is not None:
        num_tokens = params.n * sum(map(len, prompts))
        num_logprobs += num_tokens * (1 + params.prompt_logprobs)
    if params.logprobs is not None and not body.stream:
        # Without max_tokens they are counted as they come.
        most = [min(params.max_tokens or 0, model.max_model_len - len(ids)) for ids in prompts]
        num_tokens = params.n * sum(most)
        num_logprobs += num_tokens * (1 + params.logprobs)
    if num_logprobs > limits.logprobs:
        raise _too_many_logprobs(num_logprobs, limits)


def _too_many_logprobs(number: int, limits: LimitsConfig) -> RequestError:
    return RequestError(
        "logprobs",
        f"{number} in an answer",
        allowed=limits.allowed("logprobs"),
        fix="ask for fewer, for fewer tokens, or for a stream",
    )


class Tally(Progress):
    """The progress of a call as far as its reader has seen it, and as the answer shows it."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._is_shown = call.stream_options.continuous_usage_stats
        self._num_prompt_tokens = sum(len(r.prompt_token_ids) for r in call.requests)

    @property
    def so_far(self) -> Usage | None:
        """The usage for a chunk in the midst of a stream; None: not asked for."""
        return self.usage() if self._is_shown else None

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            total_tokens=self._num_prompt_tokens + self.num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(self.num_cached_tokens),
        )


async def gather(call: Call, submission: Submission) -> tuple[list[SequenceDelta], Usage]:
    """Waits for all of a call's sequences; each is one delta, in order of the choices.

    Raises:
        PegboardError: one of them failed, or the answer became larger than the operator allows.
    """
    answers = [JoinedDeltas() for _ in range(len(call.requests) * call.params.n)]
    tally, num_logprobs = Tally(call), 0
    async for delta in call.deltas(submission):
        answers[call.choice_index(delta)].add(delta)
        if delta.prompt_logprobs is not None:
            for choice in call.choices(delta.request_id):
                answers[choice].prompt_logprobs = delta.prompt_logprobs
        tally.add(delta)
        num_logprobs += len(delta.logprobs or ()) * (1 + (call.params.logprobs or 0))
        if num_logprobs > call.model.limits.logprobs:
            raise _too_many_logprobs(num_logprobs, call.model.limits)
    return [answer.delta() for answer in answers], tally.usage()


def _without_output(delta: SequenceDelta) -> SequenceDelta:
    return msgspec.structs.replace(
        delta,
        token_ids=(),
        text="",
        logprobs=() if delta.logprobs is not None else None,
        finish_reason=delta.finish_reason and "length",
        stop_reason=None,
        num_output_tokens=0,
    )
