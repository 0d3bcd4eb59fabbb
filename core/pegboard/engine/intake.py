"""From a request to sequences. Requests that cannot be honoured are refused here."""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from bisect import bisect_left
from typing import Any

import msgspec
import numpy as np

from pegboard.engine.logprobs import PromptLogprobs
from pegboard.engine.parts import EngineParts
from pegboard.engine.sequence import OpenRequest, Sequence
from pegboard.engine.stops import StopText, TextStream, stop_texts
from pegboard.errors import RequestError, RequestFailed
from pegboard.interfaces.kv_allocator import Answer, Verdict
from pegboard.request import Request, SamplingParams, check_plain

_log = logging.getLogger(__name__)


class Intake:
    """Checks requests, draws their seeds, makes their sequences."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._told: frozenset[str] = frozenset()
        self._num_requests = 0
        self._num_sequences = 0

    def open(self, request: Request) -> OpenRequest:
        """The request with its sequences.

        Raises:
            RequestError: it cannot be honoured.
            RequestFailed: a plugin made unusable parameters of it.
        """
        self._check_ids(request)
        # A token that is not shown would never be found as text.
        stop_tokens = self._stop_tokens(request.params)
        params = msgspec.structs.replace(
            request.params, stop_token_ids=(*request.params.stop_token_ids, *stop_tokens)
        )
        max_known = self._max_known(request)
        eos_ids = frozenset[int]() if params.ignore_eos else frozenset(self._parts.eos_token_ids)
        stop_ids = eos_ids | frozenset(params.stop_token_ids)
        self._check_end(params, stop_ids)
        processors = self._parts.processor_params(params)
        _check_made(processors)
        seed = self._draw_seed() if params.seed is None else params.seed
        opened = OpenRequest(
            request=request,
            arrival=request.arrival or time.monotonic(),
            seed=seed,
            max_known=max_known,
            eos_ids=eos_ids,
            stop_ids=stop_ids,
            stop_tokens=stop_tokens,
            processors=processors,
        )
        self._choose_drafts(opened)
        if params.prompt_logprobs is not None:
            num_prompt = len(request.prompt_token_ids)
            opened.prompt_logprobs = PromptLogprobs(num_prompt, params.prompt_logprobs)
        stop = stop_texts(params.stop, self._max_text(opened))
        opened.sequences.extend(self._sequence(opened, index, stop) for index in range(params.n))
        self._num_requests += 1
        return opened

    def _stop_tokens(self, params: SamplingParams) -> dict[int, str]:
        """Ids of stop texts that are one token each, among tokens that answers do not show."""
        id_of = self._parts.skipped_id
        if id_of is None:
            return {}
        ids = {id_of(text): text for text in params.stop}
        return {token_id: text for token_id, text in ids.items() if token_id is not None}

    def _max_text(self, opened: OpenRequest) -> int | None:
        """Most characters of an answer: each takes a byte at least."""
        token_bytes = self._parts.max_token_bytes
        num_tokens = opened.max_known - len(opened.request.prompt_token_ids)
        return None if token_bytes is None else num_tokens * token_bytes

    def _sequence(self, opened: OpenRequest, index: int, stop: tuple[StopText, ...]) -> Sequence:
        make = self._parts.make_detokenizer
        text = TextStream(make() if make is not None else None, stop)
        self._num_sequences += 1
        return Sequence(self._num_sequences, opened, index, text)

    def _check_ids(self, request: Request) -> None:
        prompt, params = request.prompt_token_ids, request.params
        if not prompt:
            raise RequestError("prompt", "no tokens", allowed="at least one token")
        for kind in set(map(type, prompt)):
            if kind is bool or not issubclass(kind, (int, np.integer)):
                raise RequestError(
                    "prompt", f"a {kind.__name__}", allowed="token ids, whole numbers"
                )
        self._check_range("prompt", min(prompt), max(prompt))
        if params.stop_token_ids:
            self._check_range(
                "stop_token_ids", min(params.stop_token_ids), max(params.stop_token_ids)
            )
        if params.logit_bias:
            self._check_range("logit_bias", min(params.logit_bias), max(params.logit_bias))
        if params.stop and self._parts.make_detokenizer is None:
            raise RequestError(
                "stop", "the model has no tokenizer, so no text", fix="use stop_token_ids"
            )

    def _check_end(self, params: SamplingParams, stop_ids: frozenset[int]) -> None:
        """Raises RequestError if no token may be sampled before the least number of tokens."""
        if params.min_tokens and len(stop_ids) >= self._parts.vocab_size:
            every = frozenset(range(self._parts.vocab_size))
            if stop_ids >= every:
                raise RequestError(
                    "stop_token_ids",
                    f"every token of the vocabulary ends the answer, of min_tokens"
                    f" {params.min_tokens}",
                    allowed="with min_tokens, not all tokens",
                    fix="leave one out, or min_tokens",
                )

    def _check_range(self, param: str, lowest: int, highest: int) -> None:
        limit = self._parts.vocab_size
        for token_id in (lowest, highest):
            if not 0 <= token_id < limit:
                raise RequestError(param, f"token id {token_id}", allowed=f"0 to {limit - 1}")

    def _max_known(self, request: Request) -> int:
        """Most tokens of a sequence of the request: fewer than it asks for if the context or the KV pool
        holds no more."""
        num_prompt, max_len = len(request.prompt_token_ids), self._parts.max_model_len
        if num_prompt >= max_len:
            raise RequestError(
                "prompt",
                f"{num_prompt} tokens",
                allowed=f"at most {max_len - 1}, one less than max_model_len",
                fix="shorten the prompt",
            )
        max_tokens = request.params.max_tokens
        max_known = max_len if max_tokens is None else min(num_prompt + max_tokens, max_len)
        if not self._never_fits(max_known - 1):  # the last token is never computed
            return max_known
        answer = self._parts.allocator.probe(num_prompt)
        if answer.verdict is Verdict.NEVER:
            raise RequestError(
                "prompt",
                f"{num_prompt} tokens need {self._blocks(num_prompt, answer)}",
                fix="shorten the prompt, or raise kv_cache.memory",
            )
        longer = range(num_prompt + 1, max_known)
        return num_prompt + 1 + bisect_left(longer, True, key=self._never_fits)

    def _choose_drafts(self, opened: OpenRequest) -> None:
        """Sets how many draft nodes the request's sequences may have; what it asks for is a hint."""
        stateful = self._parts.stateful_processors & opened.processors.keys()
        opened.keeps_state = bool(stateful)
        most, wanted = self._parts.num_speculative_tokens, opened.request.speculative
        if not stateful:
            opened.max_drafts = most if wanted is None else min(most, wanted)
        elif most:
            for name in sorted(stateful - self._told):
                _log.info(
                    "requests that use logits processor %r run without drafts: it keeps a state that"
                    " cannot be recomputed",
                    name,
                )
            self._told |= stateful

    def _blocks(self, num_slots: int, answer: Answer) -> str:
        """The blocks needed and the blocks there are, of the groups that are too small."""
        needs = (
            (-(-num_slots // group.block_size), total, group.block_size)
            for group, total in zip(self._parts.groups, answer.total, strict=True)
        )
        return ", ".join(
            f"{need} KV blocks of {block_size} tokens where the pool has {total}"
            for need, total, block_size in needs
            if need > total
        )

    def _never_fits(self, num_tokens: int) -> bool:
        return self._parts.allocator.probe(num_tokens).verdict is Verdict.NEVER

    def _draw_seed(self) -> int:
        if self._parts.seed is None:
            return secrets.randbits(64)
        text = f"{self._parts.seed} {self._num_requests}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _check_made(processors: dict[str, dict[str, Any]]) -> None:
    """Raises if a processor's model made values that are not plain; the client's were."""
    for name, values in processors.items():
        try:
            check_plain(name, values)
        except RequestError as problem:
            raise RequestFailed(
                f"what logits processor {name!r} made of its parameters is not plain: {problem.was}"
            ) from problem
