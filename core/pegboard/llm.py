"""The engine in the caller's process: `LLM` for texts in bulk, `Engine` for a loop of one's own."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pegboard.compose import Prepared, Starting, load_tokenizer, prepare, start_engine
from pegboard.config import Config, load_config
from pegboard.errors import RequestError, TokenizerError
from pegboard.progress import progress_bar
from pegboard.request import (
    FinishReason,
    JoinedDeltas,
    Request,
    SamplingParams,
    SequenceDelta,
    Speculative,
    TokenLogprob,
    read_speculative,
)
from pegboard.tokenizer import Tokenizer

logger = logging.getLogger("pegboard")

PrefixCacheMode = Literal["on", "read_only", "off"]
"""See `Request.prefix_cache`."""


@dataclass(frozen=True)
class Output:
    """One generated sequence.

    Attributes:
        text: decoded, without the stop text; "" when the model has no tokenizer.
        token_ids: generated ids.
        finish_reason: why it ended.
        stop_reason: the stop text or token id that was hit.
        logprobs: one a token, when asked for.
        error: with finish_reason `error`, what happened.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprob, ...] | None
    error: str | None = None


@dataclass(frozen=True)
class Result:
    """A prompt and what was generated from it; `text` and the like are the first sequence's.

    Attributes:
        prompt: as it was given.
        prompt_token_ids: its ids.
        outputs: n sequences.
        prompt_logprobs: one a prompt token (the first is None), when asked for.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Output, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason


class Engine:
    """Submit token ids, step, read deltas.

    Args:
        config: a `Config`, the path of a config file, or a mapping of its keys.
        show_progress: draw a progress bar while weights load, on a terminal.
        objects: interface name (`scheduler`, `drafter`, ...) to what is used instead of a plugin: an
            object, its class, or a function that makes one of the interface's context; a list of them
            for `kernel`, `logits_processor`, `observer`.

    Attributes:
        default_params: of requests without parameters: the API's defaults, and over them what the
            checkpoint's generation config says (`generation_config="none"`: nothing).

    Raises:
        UserError: config, model, plugins and machine do not go together.
    """

    def __init__(
        self,
        config: Config | Path | str | Mapping[str, Any],
        *,
        show_progress: bool = False,
        **objects: Any,
    ) -> None:
        self.prepared: Prepared = prepare(_config(config), **objects)
        self.tokenizer: Tokenizer | None = load_tokenizer(self.prepared)
        self.default_params = SamplingParams(**self.prepared.sampling_defaults.values)
        self.prepared.sampling_defaults.log(logger)
        self._numbers = itertools.count()
        total = self.prepared.composition.num_parameters
        with _bar("Loading weights", total, show_progress) as advance:
            self._core, self.prepared = start_engine(
                self.prepared, Starting(on_tensor=lambda name: advance(1))
            )

    def submit(  # noqa: PLR0913  # an argument for each field of a request
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        prefix_cache: PrefixCacheMode = "on",
        speculative: Speculative | None = None,
    ) -> Request:
        """Queues a request; its sequences' deltas come from `step`. See `Request` for what the other
        arguments mean.

        Args:
            speculative: `off`: no drafts; `{"num_speculative_tokens": n}`: at most so many at a time, and
                never more than the config allows. None: as many as that. Under exact verification no token
                depends on it.

        Raises:
            RequestError: it cannot be honoured.
        """
        request = Request(
            request_id=f"request-{next(self._numbers)}" if request_id is None else request_id,
            prompt_token_ids=tuple(prompt_token_ids),
            params=self.default_params if params is None else params,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            prefix_cache=prefix_cache,
            speculative=read_speculative(speculative),
        )
        self._core.add(request)
        return request

    def step(self) -> list[SequenceDelta]:
        """Runs one step and returns what it added."""
        return self._core.step()

    def has_work(self) -> bool:
        """Whether any request is open."""
        return self._core.has_work()

    def abort(self, request: Request | str) -> None:
        """Ends a request; a finished or unknown one is ignored. Its sequences get a last delta."""
        self._core.abort(request if isinstance(request, str) else request.request_id)

    def reset_prefix_cache(self) -> None:
        """Forgets all KV kept for later requests; running ones go on.

        Raises:
            EngineError: the engine is broken, or closed.
        """
        self._core.reset_prefix_cache()

    @property
    def core(self) -> Any:
        """The `EngineCore`: queue, ledger, counts."""
        return self._core

    def close(self) -> None:
        """Frees all memory. Idempotent."""
        self._core.close()
        if self.tokenizer is not None:
            self.tokenizer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class LLM:
    """Texts in, texts out, in order.

    Args:
        model: a folder, a file, a hub id, or `pkg://package/file`.
        show_progress: draw progress bars, on a terminal.
        objects: interface name to an object to use instead of a plugin.
        settings: keys of the config (`dtype="float32"`, `scheduler={"max_num_seqs": 8}`).
    """

    def __init__(
        self,
        model: str | Path,
        *,
        show_progress: bool = True,
        objects: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._show_progress = show_progress
        config = Config.from_values({"model": str(model), **settings})
        self.engine = Engine(config, show_progress=show_progress, **(objects or {}))

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises TokenizerError when the checkpoint has none."""
        if self.engine.tokenizer is None:
            where = self.engine.prepared.composition.target.facts.path
            raise TokenizerError(where, "has no tokenizer", fix="give token ids, or set tokenizer")
        return self.engine.tokenizer

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        prefix_cache: PrefixCacheMode = "on",
        speculative: Speculative | None = None,
    ) -> list[Result]:
        """Generates from each prompt, a text or token ids; results stand in the prompts' order.

        Args:
            prompts: one text, or several texts or lists of ids.
            params: for all, or one for each prompt; None: `Engine.default_params`.
            cache_salt, prefix_cache: as in `Request`, for all.
            speculative: for all: see `Engine.submit`.

        Raises:
            RequestError: a prompt or its parameters cannot be honoured; nothing was generated.
        """
        listed: Sequence[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else prompts
        each = self._params(params, len(listed))
        ids = [self._ids(prompt) for prompt in listed]
        return self._run(ids, listed, each, cache_salt, prefix_cache, speculative)

    def chat(
        self,
        conversations: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        prefix_cache: PrefixCacheMode = "on",
        speculative: Speculative | None = None,
    ) -> list[Result]:
        """Answers one conversation (a list of messages with `role` and `content`) or several; the
        other arguments are those of `generate`.

        Raises:
            RequestError, TokenizerError: as `generate`; the model has no chat template.
        """
        one = bool(conversations) and isinstance(conversations[0], Mapping)
        listed: Sequence[Any] = [conversations] if one else conversations
        max_bytes = self.engine.prepared.composition.max_model_len * self.tokenizer.max_token_bytes
        texts = [self.tokenizer.render_chat(messages, max_bytes=max_bytes) for messages in listed]
        ids = [self.tokenizer.encode(text, special=False) for text in texts]
        each = self._params(params, len(listed))
        return self._run(ids, texts, each, cache_salt, prefix_cache, speculative)

    def close(self) -> None:
        """Frees all memory. Idempotent."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.engine.default_params] * count
        if len(params) != count:
            raise RequestError(
                "params", f"{len(params)} for {count} prompts", allowed="one, or one a prompt"
            )
        return list(params)

    def _run(
        self,
        ids: Sequence[Sequence[int]],
        prompts: Sequence[str | Sequence[int]],
        params: Sequence[SamplingParams],
        cache_salt: str,
        prefix_cache: PrefixCacheMode,
        speculative: Speculative | None,
    ) -> list[Result]:
        requests: list[Request] = []
        gathered: dict[tuple[str, int], JoinedDeltas] = {}
        total = sum(one.n for one in params)
        try:
            for prompt_ids, one in zip(ids, params, strict=True):
                requests.append(
                    self.engine.submit(
                        prompt_ids,
                        one,
                        cache_salt=cache_salt,
                        prefix_cache=prefix_cache,
                        speculative=speculative,
                    )
                )
            with _bar("Generating", total, self._show_progress) as advance:
                while self.engine.has_work():
                    for delta in self.engine.step():
                        gathered.setdefault((delta.request_id, delta.index), JoinedDeltas()).add(
                            delta
                        )
                        advance(delta.finish_reason is not None)
        except BaseException:
            for request in requests:
                self.engine.abort(request)
            while self.engine.has_work():
                self.engine.step()
            raise
        return [
            _result(request, prompt, gathered)
            for request, prompt in zip(requests, prompts, strict=True)
        ]


def _result(
    request: Request,
    prompt: str | Sequence[int],
    gathered: Mapping[tuple[str, int], JoinedDeltas],
) -> Result:
    sequences = [gathered[request.request_id, index].delta() for index in range(request.params.n)]
    return Result(
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=request.prompt_token_ids,
        outputs=tuple(map(_output, sequences)),
        prompt_logprobs=next(filter(None, (one.prompt_logprobs for one in sequences)), None),
    )


def _output(sequence: SequenceDelta) -> Output:
    assert sequence.finish_reason is not None
    return Output(
        text=sequence.text,
        token_ids=sequence.token_ids,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        logprobs=sequence.logprobs,
        error=sequence.error,
    )


def _config(config: Config | Path | str | Mapping[str, Any]) -> Config:
    if isinstance(config, Config):
        return config
    if isinstance(config, Mapping):
        return Config.from_values(config)
    return load_config(Path(config))


@contextmanager
def _bar(label: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar with one task; yields what advances it."""
    with progress_bar(hidden=not shown) as progress:
        task = progress.add_task(label, total=total)
        yield lambda count: progress.advance(task, count)
