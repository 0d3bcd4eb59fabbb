"""`pegboard eval`: how well a config predicts a text, and how far it is from another."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pegboard.cli.result_files import HtmlFile, JsonFile, ResultFiles
from pegboard.errors import ConfigError
from pegboard.progress import progress_bar

if TYPE_CHECKING:
    from pegboard.eval.generation import Agreement, Prompts, Speed
    from pegboard.eval.quality import Quality
    from pegboard.eval.report import Limits, Result
    from pegboard.eval.subject import Reading, Subject
    from pegboard.interfaces.command import LoadedModel


def evaluate(  # noqa: PLR0913  # a command has an argument for each thing one may type
    config: Annotated[
        str | None, typer.Option("--config", help="A: a YAML file or a model.", metavar="A")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="Sets any key of A.", metavar="KEY=VALUE")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", help="B, likewise: what A is compared with.", metavar="B"),
    ] = None,
    against_sets: Annotated[
        list[str] | None,
        typer.Option("--against-set", help="Sets any key of B.", metavar="KEY=VALUE"),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="A text file.", metavar="TEXT")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Most of its tokens to use.", metavar="N")
    ] = 20_000,
    window: Annotated[
        int, typer.Option(min=2, help="Tokens that are read at once.", metavar="N")
    ] = 512,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="From window to window; else they meet.", metavar="N"),
    ] = None,
    new_tokens: Annotated[
        int, typer.Option(min=2, help="To generate after each prompt.", metavar="N")
    ] = 32,
    no_generation: Annotated[
        bool, typer.Option("--no-generation", help="No greedy texts, resident memory and speed.")
    ] = False,
    max_kl: Annotated[
        float | None, typer.Option("--max-kl", help="Most mean KL divergence, nats.")
    ] = None,
    max_perplexity_ratio: Annotated[
        float | None, typer.Option("--max-perplexity-ratio", help="Most of A's over B's.")
    ] = None,
    min_top1: Annotated[
        float | None, typer.Option("--min-top1", help="Least share of equal best tokens.")
    ] = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Measure a config on a text: perplexity, memory, speed; and against another: KL divergence from it,
    agreement of most likely tokens and of greedy texts, error layer by layer. Ends with status 3 when a
    limit is passed."""
    from pegboard.eval.page import page
    from pegboard.eval.report import Limits
    from pegboard.eval.subject import Reading, common_tokens, subject

    limits = Limits(max_kl=max_kl, max_perplexity_ratio=max_perplexity_ratio, min_top1=min_top1)
    limits.check()
    if against is None and (limits.any or against_sets):
        raise ConfigError("--against", "missing", fix="name the config to compare with")
    files = ResultFiles(json_file, html_file)
    text = _read(data)
    subjects = [subject("--config", config, sets or ())]
    if against is not None:
        subjects.append(subject("--against", against, against_sets or ()))
    token_ids, bos = common_tokens(subjects, text)
    stride = stride or window - (bos is not None)
    reading = Reading(str(data), token_ids[:max_tokens], bos, window, stride)
    quality = _quality(subjects, reading)
    generated = None if no_generation else _generate(subjects, reading, new_tokens)
    result = _result(subjects, reading, quality, generated, limits)
    _show(result)
    files.write(result, page)
    if result.passed:
        raise typer.Exit(3)


def _read(data: Path | None) -> str:
    if data is None:
        raise ConfigError("--data", "missing", fix="--data TEXT, a file")
    try:
        text = data.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--data", str(error), allowed="a text file") from error
    if not text.strip():
        raise ConfigError("--data", f"{data} is empty", allowed="a text of at least 2 tokens")
    return text


def _quality(subjects: Sequence[Subject], reading: Reading) -> Quality:
    from pegboard.eval.quality import compare, score

    windows = reading.windows
    with ExitStack() as opened, progress_bar() as bar:
        models = [opened.enter_context(closing(_load(one, reading.length))) for one in subjects]
        tracked = bar.track(windows, description="Reading")
        if len(models) == 1:
            return score(models[0], tracked)
        return compare(models[0], models[1], tracked, _common_layers(subjects))


def _load(subject: Subject, length: int) -> LoadedModel:
    """A model with room for one window. Whether it fits is decided with those before it loaded."""
    from pegboard.compose import load_text_model, prepare

    longest = subject.prepared.composition.max_model_len
    if length > longest:
        raise ConfigError("--window", str(length), allowed=f"2 to {longest}, for {subject.ref}")
    config = subject.config(
        max_model_len=length,
        scheduler={"max_num_seqs": 1, "max_num_batched_tokens": length},
        drafter="none",
        prefix_cache="none",
    )
    return load_text_model(prepare(config).composition)


def _common_layers(subjects: Sequence[Subject]) -> Sequence[int]:
    """The decoder layers whose inputs can be compared: all or none."""
    shapes = [one.prepared.composition.target.shape for one in subjects]
    sizes = {(shape.num_layers, shape.hidden_size) for shape in shapes}
    return range(min(sizes)[0]) if len(sizes) == 1 else ()


def _generate(
    subjects: Sequence[Subject], reading: Reading, num_tokens: int
) -> tuple[list[Speed], Agreement | None]:
    """Speed and memory of each, and how their greedy texts agree."""
    from pegboard.eval import generation

    prompts = _prompts(subjects, reading, num_tokens)
    configs = {
        # Without a prefix cache, for rounds repeat their prompts.
        one.flag: one.config(prefix_cache="none").model_dump(mode="json", exclude_unset=True)
        for one in subjects
    }
    with progress_bar() as bar:
        task = bar.add_task("Generating", total=generation.num_jobs(len(configs)))
        speeds, texts = generation.measure(configs, prompts, lambda: bar.advance(task))
    listed = list(texts.values())
    agreement = None
    if len(listed) == 2:
        agreement = generation.agreement(listed[0], listed[1], num_tokens)
    return list(speeds.values()), agreement


def _prompts(subjects: Sequence[Subject], reading: Reading, num_tokens: int) -> Prompts:
    from pegboard.eval.generation import prompts_of

    most = min(one.prepared.composition.max_model_len for one in subjects)
    if num_tokens >= most - 1:
        raise ConfigError("--new-tokens", str(num_tokens), allowed=f"2 to {most - 2}")
    return prompts_of(reading.token_ids, reading.bos, num_tokens, most)


def _result(
    subjects: Sequence[Subject],
    reading: Reading,
    quality: Quality,
    generated: tuple[list[Speed], Agreement | None] | None,
    limits: Limits,
) -> Result:
    from pegboard.eval.report import Result, passed, side

    nothing: tuple[Sequence[Speed | None], None] = ([None] * len(subjects), None)
    speeds, greedy = generated or nothing
    a, *others = (
        side(one.ref, one.prepared, speed) for one, speed in zip(subjects, speeds, strict=True)
    )
    return Result(
        a=a,
        b=others[0] if others else None,
        text=reading.text(),
        quality=quality,
        greedy=greedy,
        limits=limits,
        passed=tuple(passed(limits, quality)),
    )


def _show(result: Result) -> None:
    from rich.console import Console

    from pegboard.eval.summary import lead, tables

    console = Console()
    typer.echo(lead(result.text, result.quality.num_tokens))
    for table in tables(result):
        console.print(table, highlight=False)
    for line in result.passed:
        typer.echo(f"limit: {line}", err=True)
