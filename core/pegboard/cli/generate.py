"""`pegboard generate`: text from prompts, in this process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from pegboard.config import Config
from pegboard.config_values import shown
from pegboard.errors import ConfigError, TokenizerError
from pegboard.progress import progress_bar
from pegboard.request import JoinedDeltas, SamplingParams, SequenceDelta

if TYPE_CHECKING:
    from pegboard.llm import Engine


class Completion(msgspec.Struct, kw_only=True):
    """One sequence of one prompt, as `--json` prints it."""

    prompt: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    error: str | None


def generate(  # noqa: PLR0913  # a command has an argument for each thing one may type
    config: Config,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="A file with a prompt a line.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep tokens up to this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens at least so likely.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends it.")] = None,
    n: Annotated[int, typer.Option("-n", help="Texts for each prompt.")] = 1,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on at the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line.")] = False,
) -> None:
    """Generate text from prompts. One text is shown as it grows; of several, each when all ended."""
    prompts = [*(prompt or ()), *(_lines_of(prompt_file) if prompt_file is not None else ())]
    if not prompts:
        raise ConfigError("--prompt", "missing", fix='--prompt "The capital of France is"')
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop=tuple(stop or ()),
        n=n,
        ignore_eos=ignore_eos,
    )
    params.check()
    streamed = len(prompts) == n == 1 and not as_json
    completions = _complete(config, prompts, params, chat=chat, streamed=streamed)
    if not streamed:
        _print(completions, as_json=as_json)
    _fail_on_errors(completions)


def _lines_of(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--prompt-file", str(error), allowed="a text file") from error


def _complete(
    config: Config, prompts: Sequence[str], params: SamplingParams, *, chat: bool, streamed: bool
) -> list[Completion]:
    """Every sequence of every prompt, in order; the only one is printed on the way if streamed."""
    from pegboard.llm import Engine

    encoded = _token_ids(config, prompts, chat=chat)
    prompt_of: dict[str, str] = {}
    gathered: dict[tuple[str, int], JoinedDeltas] = {}
    with Engine(config, show_progress=True) as engine:
        for prompt, token_ids in zip(prompts, encoded, strict=True):
            request = engine.submit(token_ids, params)
            prompt_of[request.request_id] = prompt
            gathered |= {(request.request_id, index): JoinedDeltas() for index in range(params.n)}
        for delta in _with_progress(engine, len(gathered), params.max_tokens or 0, streamed):
            gathered[delta.request_id, delta.index].add(delta)
            if streamed:
                typer.echo(delta.text, nl=False)
    if streamed:
        typer.echo()
    return [
        Completion(
            prompt=prompt_of[whole.request_id],
            index=whole.index,
            text=whole.text,
            token_ids=whole.token_ids,
            finish_reason=whole.finish_reason,
            error=whole.error,
        )
        for whole in (deltas.delta() for deltas in gathered.values())
    ]


def _token_ids(config: Config, prompts: Sequence[str], *, chat: bool) -> list[list[int]]:
    """Token ids of each prompt, or of a chat that begins with it; before weights are loaded."""
    from pegboard.compose import load_tokenizer, prepare

    prepared = prepare(config)
    tokenizer = load_tokenizer(prepared)
    if tokenizer is None:
        path = prepared.composition.target.facts.path
        raise TokenizerError(path, "has no tokenizer", fix="--tokenizer FOLDER")
    if not chat:
        return [tokenizer.encode(prompt) for prompt in prompts]
    with contextlib.closing(tokenizer):
        return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in prompts]


def _with_progress(
    engine: Engine, num_sequences: int, max_tokens: int, streamed: bool
) -> Iterator[SequenceDelta]:
    """The deltas of all steps, with a bar of tokens unless the text itself is shown as it grows."""
    total = num_sequences * max_tokens
    with progress_bar(hidden=streamed and sys.stdout.isatty()) as bar:
        task = bar.add_task("Generating", total=total)
        while engine.has_work():
            for delta in engine.step():
                yield delta
                if delta.finish_reason is not None:
                    total -= max_tokens - delta.num_output_tokens
                bar.update(task, advance=len(delta.token_ids), total=total)


def _print(completions: Sequence[Completion], *, as_json: bool) -> None:
    for number, completion in enumerate(completions, start=1):
        if as_json:
            typer.echo(msgspec.json.encode(completion))
        else:
            typer.echo(f"--- {number}/{len(completions)}: {shown(completion.prompt)}")
            typer.echo(completion.text)


def _fail_on_errors(completions: Sequence[Completion]) -> None:
    failed = [completion for completion in completions if completion.error is not None]
    for completion in failed:
        typer.echo(f"error: {shown(completion.prompt)}: {completion.error}", err=True)
    if failed:
        raise typer.Exit(1)
