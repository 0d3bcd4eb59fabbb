"""`pegboard train-eagle`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import yaml

from pegboard.errors import ConfigError

if TYPE_CHECKING:
    from pegboard_eagle.training.acceptance import Acceptance

Precision = Literal["auto", "float32", "bfloat16"]


def application() -> typer.Typer:
    """The command, a new one each time."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name="train-eagle")(train_eagle)
    return app


def train_eagle(  # noqa: PLR0913 - one a flag
    ctx: typer.Context,
    model: Annotated[str, typer.Option(help="Folder, file, hub id or pkg:// of the target.")],
    data: Annotated[
        Path, typer.Option(help="Prompts: one a line, or JSON lines in a file *.jsonl.")
    ],
    out: Annotated[
        Path, typer.Option(help="New folder for the head, or that of a run that was broken off.")
    ],
    held_out: Annotated[
        Path | None,
        typer.Option(help="Prompts to try the head on; without, every 20th of --data."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Of the target's engine: KEY=VALUE, keys with dots."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 192,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Longer prompts are left out.")
    ] = 256,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="Of the answers; 0: greedy.")
    ] = 0.0,
    batch: Annotated[int, typer.Option(min=1, max=512, help="Answers written at once.")] = 64,
    draft_vocab: Annotated[
        int, typer.Option(min=2, help="Most tokens that the head draws.")
    ] = 8192,
    intermediate_size: Annotated[
        int | None, typer.Option(min=1, help="Of the head's MLP; without, the target's.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Times each answer is learnt.")] = 8,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of answers that a step learns, about.")
    ] = 1536,
    learning_rate: Annotated[float, typer.Option(min=0.0, max=1.0, help="The highest.")] = 1e-3,
    warm_up: Annotated[int, typer.Option(min=0, help="Steps over which it rises.")] = 20,
    steps: Annotated[int, typer.Option(min=1, max=16, help="Guesses ahead that are trained.")] = 5,
    decay: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Weight of a guess, of the one before.")
    ] = 0.8,
    feature_weight: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="Weight of the target's features.")
    ] = 0.5,
    report_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of an answer that the head is tried on.")
    ] = 128,
    seed: Annotated[int, typer.Option(min=0, max=2**32, help="Of order and sampling.")] = 0,
    precision: Annotated[
        str, typer.Option(help="Of products in training: float32, bfloat16, auto (the faster).")
    ] = "auto",
) -> None:
    """Train an EAGLE-3 head for a model on answers that the model writes itself."""
    from pegboard_eagle.training.loss import LossOptions
    from pegboard_eagle.training.precision import in_bfloat16
    from pegboard_eagle.training.prompts import read_prompts
    from pegboard_eagle.training.run import Job, train_head
    from pegboard_eagle.training.trainer import TrainOptions

    job = Job(
        config=_config(model, settings or []),
        prompts=read_prompts(data, "data"),
        held_out=None if held_out is None else read_prompts(held_out, "held-out"),
        out=out,
        max_tokens=max_tokens,
        max_prompt_tokens=max_prompt_tokens,
        temperature=temperature,
        seed=seed,
        batch=batch,
        draft_vocab=draft_vocab,
        intermediate_size=intermediate_size,
        report_tokens=report_tokens,
        train=TrainOptions(
            epochs=epochs,
            batch_size=batch_tokens,
            learning_rate=learning_rate,
            warm_up=warm_up,
            seed=seed,
            loss=LossOptions(steps, decay, feature_weight),
            in_bfloat16=in_bfloat16(precision),
        ),
    )
    for line in _lines(train_head(job, ctx.obj), out):
        typer.echo(line)


def _config(model: str, settings: list[str]) -> dict[str, Any]:
    """The config of the target's engine: the model, and `KEY=VALUE` texts with values read as YAML."""
    config: dict[str, Any] = {"model": model}
    for setting in settings:
        path, equals, value = setting.partition("=")
        *sections, key = path.split(".")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError("--set", f"{setting}: {section} is no section")
        try:
            place[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            equals = ""
        if not equals:
            raise ConfigError("--set", repr(setting), allowed="KEY=VALUE")
    if wrong := sorted({"drafter", "scheduler", "max_model_len"} & config.keys()):
        raise ConfigError("--set", f"{', '.join(wrong)}: training sets it itself")
    return config


def _lines(found: list[Acceptance], out: Path) -> list[str]:
    lines = [
        f"{'tree' if one.options else 'chain'} of {one.num_speculative_tokens}:"
        f" {one.tokens_a_step:.2f} tokens a step; right up to each position:"
        f" {' '.join(f'{share:.2f}' for share in one.reached)}"
        for one in found
    ]
    return [*lines, f"{out}: the head; drafter: {{name: eagle, model: {out}}}"]
