"""`/v1/completions`: from a body to a call, and from the engine's deltas to the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec
from msgspec import UNSET

from pegboard.request import SequenceDelta, TokenLogprob
from pegboard.server.call import Call, Tally, make_call, read_params
from pegboard.server.caller import Caller
from pegboard.server.logprobs import ChoiceLogprobs, joined, prompt_logprobs
from pegboard.server.protocol import CompletionBody
from pegboard.server.replies import Completion, CompletionChoice, CompletionLogprobs, Usage
from pegboard.server.served_model import ServedModel, TokenTexts
from pegboard.server.submission import Submission


async def completion_call(body: CompletionBody, model: ServedModel, asker: Caller) -> Call:
    """The call of a body.

    Raises:
        UserError, ApiError: it cannot be honoured.
    """
    params = read_params(body, model, len(body.prompts))
    for prompt in body.prompts:
        model.check_prompt(prompt)
    prompts = []
    for prompt in body.prompts:
        prompts.append(await model.encode(prompt))
        model.check_length("prompt", len(prompts[-1]))
    echo = await _texts(body, model) if body.echo else None
    return make_call("cmpl", body, model, params, prompts, asker, echo=echo)


async def _texts(body: CompletionBody, model: ServedModel) -> tuple[str, ...]:
    """The prompts as texts."""
    return tuple(
        [
            prompt if isinstance(prompt, str) else await asyncio.to_thread(model.decode, prompt)
            for prompt in body.prompts
        ]
    )


def completion_reply(
    call: Call, answers: Sequence[SequenceDelta], usage: Usage, texts: TokenTexts
) -> Completion:
    """The whole answer, when all sequences have ended."""
    return _completion(call, [_choice(call, i, a, texts) for i, a in enumerate(answers)], usage)


async def completion_chunks(
    call: Call, submission: Submission, texts: TokenTexts
) -> AsyncIterator[Completion]:
    """The answer in chunks; a choice's finish reason comes with its last text."""
    tally = Tally(call)
    streams: dict[int, _ChoiceStream] = {}
    prompts: dict[str, Sequence[TokenLogprob | None]] = {}
    async for delta in call.deltas(submission):
        tally.add(delta)
        index = call.choice_index(delta)
        if index not in streams:
            streams[index] = _ChoiceStream(call, index, texts)
        if delta.prompt_logprobs is not None:
            prompts[delta.request_id] = delta.prompt_logprobs
        stream, values = streams[index], prompts.get(delta.request_id, ())
        if stream.echoes and call.has_logprobs:
            choice = await asyncio.to_thread(stream.next, delta, values)
        else:
            choice = stream.next(delta, values)
        if choice.text or choice.logprobs or choice.finish_reason or choice.token_ids:
            yield _completion(call, [choice], tally.so_far)
    if call.stream_options.include_usage:
        yield _completion(call, [], tally.usage())


class _ChoiceStream:
    """One choice, in one delta or many; the first echoes the prompt where that was asked for."""

    def __init__(self, call: Call, index: int, texts: TokenTexts) -> None:
        self._call = call
        self._index = index
        self._logprobs = ChoiceLogprobs(texts, call.params.logprobs or 0)
        self._echo = call.echoed(index)

    @property
    def echoes(self) -> bool:
        """Whether the next chunk begins with the prompt."""
        return self._echo is not None

    def next(
        self, delta: SequenceDelta, prompt_logprobs: Sequence[TokenLogprob | None]
    ) -> CompletionChoice:
        echo, self._echo = self._echo, None
        return CompletionChoice(
            index=self._index,
            text=(echo or "") + delta.text,
            logprobs=self._columns(delta, echo, prompt_logprobs),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._call.return_token_ids else UNSET,
        )

    def _columns(
        self,
        delta: SequenceDelta,
        echo: str | None,
        prompt_logprobs: Sequence[TokenLogprob | None],
    ) -> CompletionLogprobs | None:
        if self._call.params.logprobs is None:
            return None
        parts = []
        if echo is not None:
            prompt = self._call.prompt(self._index)
            parts.append(self._logprobs.prompt(echo, prompt, prompt_logprobs))
        if delta.logprobs:
            parts.append(self._logprobs.answer(delta.logprobs))
        return joined(parts)


def _choice(call: Call, index: int, answer: SequenceDelta, texts: TokenTexts) -> CompletionChoice:
    choice = _ChoiceStream(call, index, texts).next(answer, answer.prompt_logprobs or ())
    return msgspec.structs.replace(
        choice,
        prompt_token_ids=call.prompt(index) if call.return_token_ids else UNSET,
        prompt_logprobs=prompt_logprobs(call, answer, texts),
    )


def _completion(
    call: Call, choices: list[CompletionChoice], usage: Usage | None = None
) -> Completion:
    return Completion(
        id=call.call_id,
        created=call.created,
        model=call.model_name,
        system_fingerprint=call.model.fingerprint,
        choices=choices,
        usage=UNSET if usage is None else usage,
    )
