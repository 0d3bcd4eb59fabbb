"""The kind of a server and the fields that it understands, found out before the load begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from pegboard.bench.exchange import COMPLETIONS, error_message
from pegboard.bench.prompts import WORDS, Prompt
from pegboard.errors import ConfigError

_EXTENSIONS: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True, "return_token_ids": True},
    {"ignore_eos": True},
    {},
)
"""Fields beyond OpenAI's that help to measure; the most helpful set first, the empty one last."""


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Tokens(msgspec.Struct):
    tokens: list[int]


@dataclass(frozen=True)
class Endpoint:
    """A model that is served.

    Attributes:
        model: its name.
        max_model_len: most tokens of prompt and answer; None: it does not say.
        token_ids: of ordinary words; none: the server does not tell how it reads them.
    """

    model: str
    max_model_len: int | None
    token_ids: tuple[int, ...]


async def find_endpoint(http: httpx.AsyncClient, model: str | None) -> Endpoint:
    """Asks the server what it serves.

    Args:
        model: the name to ask for; None: the first that the server lists.

    Raises:
        ConfigError: it cannot be reached, wants another key, or does not have the model.
    """
    try:
        response = await http.get("/v1/models")
    except httpx.HTTPError as error:
        was = f"{http.base_url} cannot be reached ({error or type(error).__name__})"
        raise ConfigError("--url", was, fix="start the server, or let --config start one") from None
    if response.status_code in (401, 403):
        said = error_message(response.content)
        raise ConfigError("--api-key", f"the server refuses it: {said}")
    cards = _cards(response)
    if model is None and not cards:
        was = f"{http.base_url} lists no models at /v1/models (HTTP {response.status_code})"
        raise ConfigError("--served-model-name", was, fix="name the model")
    unlisted = _Card(model or "")
    card = next((card for card in cards if model in (None, card.id)), unlisted)
    return Endpoint(card.id, card.max_model_len, await _word_ids(http, card.id))


async def find_extensions(
    http: httpx.AsyncClient, endpoint: Endpoint, prompt: Prompt
) -> dict[str, Any]:
    """The fields beyond OpenAI's that the server takes. Asks for an answer, so the model is warm.

    Raises:
        ConfigError: it answers none of the requests.
    """
    asked = Prompt(prompt.beginning(), output_len=2)
    for extensions in _EXTENSIONS:
        body = request_body(endpoint.model, asked, extensions)
        try:
            response = await http.post(COMPLETIONS, content=body)
        except httpx.HTTPError as error:
            was = f"the first request got no answer ({type(error).__name__}: {error})"
            raise ConfigError(str(http.base_url), was) from None
        if response.status_code == httpx.codes.OK:
            return extensions
        if response.status_code not in (400, 422):
            break
    said = f"HTTP {response.status_code}: {error_message(response.content)}"
    raise ConfigError(str(http.base_url), f"the first request was refused: {said}")


def request_body(model: str, prompt: Prompt, extensions: dict[str, Any]) -> bytes:
    """A streamed greedy completion."""
    body = {
        "model": model,
        "prompt": prompt.content,
        "max_tokens": prompt.output_len,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return msgspec.json.encode(body | extensions)


def _cards(response: httpx.Response) -> list[_Card]:
    try:
        return msgspec.json.decode(response.content, type=_Cards).data
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []


async def _word_ids(http: httpx.AsyncClient, model: str) -> tuple[int, ...]:
    """The token ids of words inside a text, by vLLM's `/tokenize`."""
    body = {"model": model, "prompt": " " + " ".join(WORDS), "add_special_tokens": False}
    try:
        response = await http.post("/tokenize", content=msgspec.json.encode(body))
        tokens = msgspec.json.decode(response.content, type=_Tokens).tokens
    except (httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError):
        return ()
    return tuple(sorted(set(tokens)))
