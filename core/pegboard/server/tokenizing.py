"""`/tokenize` and `/detokenize`: vLLM's ways of asking how a model reads a text."""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import Field, model_validator

from pegboard.errors import RequestError
from pegboard.server.protocol import Body, Messages, Name
from pegboard.server.replies import Detokenized, Tokenized
from pegboard.server.served_model import ServedModel


class TokenizeBody(Body):
    """`POST /tokenize`: a text, or a conversation.

    Attributes:
        model: a served name.
        prompt: the text.
        messages: the conversation, put into the model's chat template.
        add_special_tokens: add bos and the like, as for a completion's prompt; a rendered
            conversation has them already, so for it the default is no.
        add_generation_prompt: end a conversation with the beginning of the assistant's answer.
        return_token_strs: answer with the tokens' texts, too.
    """

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_that_one_is_given(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt", "", allowed="either prompt or messages")
        if self.prompt is not None and self.add_generation_prompt is not None:
            raise RequestError("add_generation_prompt", "given without messages")
        return self


class DetokenizeBody(Body):
    """`POST /detokenize`: token ids, no more than a prompt may have."""

    model: Name | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


async def tokenize(body: TokenizeBody, model: ServedModel) -> Tokenized:
    """Raises UserError or ApiError when the model cannot read it."""
    model.named(body.model)
    param = "messages" if body.prompt is None else "prompt"
    tokenizer = model.need_tokenizer(param)
    if body.prompt is not None:
        model.check_prompt(body.prompt)
        token_ids = await model.encode(body.prompt, special=body.add_special_tokens is not False)
    else:
        token_ids = await model.encode_chat(
            [message.for_template() for message in body.messages or ()],
            add_generation_prompt=body.add_generation_prompt is not False,
            special=body.add_special_tokens is True,
        )
    token_strs = None
    if body.return_token_strs:
        token_strs = await asyncio.to_thread(lambda: list(map(tokenizer.token, token_ids)))
    return Tokenized(len(token_ids), model.max_model_len, token_ids, token_strs)


async def detokenize(body: DetokenizeBody, model: ServedModel) -> Detokenized:
    """Special tokens are shown. Raises UserError or ApiError when the model does not have the ids."""
    model.named(body.model)
    model.need_tokenizer("tokens")
    model.check_num_ids("tokens", body.tokens)
    model.check_ids("tokens", body.tokens)
    return Detokenized(await asyncio.to_thread(model.decode, body.tokens, special=True))
