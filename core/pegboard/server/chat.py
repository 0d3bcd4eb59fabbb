"""`/v1/chat/completions`: from a body to a call, and from the engine's deltas to the answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from msgspec import UNSET

from pegboard.request import SequenceDelta, TokenLogprob
from pegboard.server.call import Call, Tally, make_call, read_params
from pegboard.server.caller import Caller
from pegboard.server.logprobs import chat_logprobs, prompt_logprobs
from pegboard.server.protocol import ChatBody
from pegboard.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatReplyMessage,
    Usage,
)
from pegboard.server.served_model import ServedModel, TokenTexts
from pegboard.server.submission import Submission


async def chat_call(body: ChatBody, model: ServedModel, asker: Caller) -> Call:
    """The call of a body.

    Raises:
        UserError, ApiError: it cannot be honoured.
    """
    params = read_params(body, model, num_prompts=1)
    prompt = await model.encode_chat([message.for_template() for message in body.messages])
    model.check_length("messages", len(prompt))
    return make_call("chatcmpl", body, model, params, [prompt], asker)


def chat_reply(
    call: Call, answers: Sequence[SequenceDelta], usage: Usage, texts: TokenTexts
) -> ChatCompletion:
    """The whole answer, when all sequences have ended."""
    choices = [
        ChatChoice(
            index=index,
            message=ChatReplyMessage(content=answer.text),
            logprobs=_logprobs(call, answer.logprobs or (), texts),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            token_ids=answer.token_ids if call.return_token_ids else UNSET,
        )
        for index, answer in enumerate(answers)
    ]
    return ChatCompletion(
        id=call.call_id,
        created=call.created,
        model=call.model_name,
        system_fingerprint=call.model.fingerprint,
        choices=choices,
        usage=usage,
        prompt_token_ids=call.prompt(0) if call.return_token_ids else UNSET,
        prompt_logprobs=prompt_logprobs(call, answers[0], texts),
    )


async def chat_chunks(
    call: Call, submission: Submission, texts: TokenTexts
) -> AsyncIterator[ChatChunk]:
    """The answer in chunks: each choice's role, its texts, its finish reason."""
    tally = Tally(call)
    for index in range(call.params.n):
        opening = ChatDelta(role="assistant", content="")
        yield _chunk(call, [ChatChunkChoice(index=index, delta=opening)], tally.so_far)
    async for delta in call.deltas(submission):
        tally.add(delta)
        if delta.text or delta.logprobs or (call.return_token_ids and delta.token_ids):
            yield _chunk(call, [_content(call, delta, texts)], tally.so_far)
        if delta.finish_reason is not None:
            yield _chunk(call, [_finish(delta)], tally.so_far)
    if call.stream_options.include_usage:
        yield _chunk(call, [], tally.usage())


def _content(call: Call, delta: SequenceDelta, texts: TokenTexts) -> ChatChunkChoice:
    return ChatChunkChoice(
        index=delta.index,
        delta=ChatDelta(content=delta.text),
        logprobs=_logprobs(call, delta.logprobs or (), texts),
        token_ids=delta.token_ids if call.return_token_ids else UNSET,
    )


def _finish(delta: SequenceDelta) -> ChatChunkChoice:
    return ChatChunkChoice(
        index=delta.index,
        delta=ChatDelta(),
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
    )


def _logprobs(
    call: Call, entries: tuple[TokenLogprob, ...], texts: TokenTexts
) -> ChatLogprobs | None:
    if call.params.logprobs is None:
        return None
    return chat_logprobs(entries, texts)


def _chunk(call: Call, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
    return ChatChunk(
        id=call.call_id,
        created=call.created,
        model=call.model_name,
        system_fingerprint=call.model.fingerprint,
        choices=choices,
        usage=UNSET if usage is None else usage,
    )
