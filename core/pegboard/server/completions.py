"""`/v1/completions`: a body to a call, and what the engine brings to its answer."""

from __future__ import annotations

from collections.abc import AsyncIterator

from msgspec import UNSET

from pegboard.config import LimitsConfig
from pegboard.request import SequenceDelta, TokenLogprob
from pegboard.server.call import Call, Tally, check_limits, gather, make_call
from pegboard.server.logprobs import completion_logprobs
from pegboard.server.protocol import CompletionBody
from pegboard.server.replies import Completion, CompletionChoice, CompletionLogprobs, Usage
from pegboard.server.served_model import ServedModel, TokenTexts
from pegboard.server.submission import Submission


async def completion_call(
    body: CompletionBody, model: ServedModel, limits: LimitsConfig, tenant: str
) -> Call:
    """The call of a body.

    Raises:
        UserError, ApiError: it cannot be honoured.
    """
    model.check_name(body.model)
    params = body.sampling_params()
    check_limits(limits, params, len(body.prompts))
    prompts = [await model.encode(prompt) for prompt in body.prompts]
    for prompt in prompts:
        model.check_length("prompt", len(prompt), params.max_tokens)
    return make_call("cmpl", body, model, params, prompts, tenant)


async def completion_reply(call: Call, submission: Submission, texts: TokenTexts) -> Completion:
    """The whole answer, when all sequences have ended."""
    answers, usage = await gather(call, submission)
    choices = [
        CompletionChoice(
            index=index,
            text=answer.text,
            logprobs=_logprobs(call, tuple(answer.logprobs), texts, 0),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            token_ids=tuple(answer.token_ids) if call.return_token_ids else UNSET,
        )
        for index, answer in enumerate(answers)
    ]
    return _completion(call, choices, usage)


async def completion_chunks(
    call: Call, submission: Submission, texts: TokenTexts
) -> AsyncIterator[Completion]:
    """The answer in chunks; a choice's finish reason comes with its last text."""
    tally = Tally(call)
    offsets = [0] * (len(call.requests) * call.params.n)
    async for delta in submission:
        tally.add(delta)
        index = call.choice_index(delta)
        choice = _chunk_choice(call, delta, index, texts, offsets[index])
        offsets[index] += sum(map(len, choice.logprobs.tokens)) if choice.logprobs else 0
        if choice.text or choice.logprobs or choice.finish_reason or choice.token_ids:
            yield _completion(call, [choice])
    if call.include_usage:
        yield _completion(call, [], tally.usage())


def _chunk_choice(
    call: Call, delta: SequenceDelta, index: int, texts: TokenTexts, offset: int
) -> CompletionChoice:
    return CompletionChoice(
        index=index,
        text=delta.text,
        logprobs=_logprobs(call, delta.logprobs or (), texts, offset),
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        token_ids=delta.token_ids if call.return_token_ids else UNSET,
    )


def _logprobs(
    call: Call, entries: tuple[TokenLogprob, ...], texts: TokenTexts, offset: int
) -> CompletionLogprobs | None:
    if call.params.logprobs is None or not entries:
        return None
    return completion_logprobs(entries, texts, call.params.logprobs, offset)


def _completion(
    call: Call, choices: list[CompletionChoice], usage: Usage | None = None
) -> Completion:
    return Completion(
        id=call.call_id,
        created=call.created,
        model=call.model.name,
        system_fingerprint=call.model.fingerprint,
        choices=choices,
        usage=UNSET if usage is None else usage,
    )
