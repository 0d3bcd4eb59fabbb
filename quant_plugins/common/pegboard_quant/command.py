"""`pegboard quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from pegboard.errors import ConfigError

if TYPE_CHECKING:
    from pegboard_quant.quantize import Report
    from pegboard_quant.recipe import Recipe


def application() -> typer.Typer:
    """The command, a new one each time."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name="quantize")(quantize)
    return app


def quantize(  # noqa: PLR0913 - one a flag
    ctx: typer.Context,
    model: Annotated[str, typer.Option(help="Folder, file, hub id or pkg:// to quantize.")],
    out: Annotated[
        Path,
        typer.Option(help="New folder, or that of a run that was broken off."),
    ],
    method: Annotated[str | None, typer.Option(help="gptq, awq, smoothquant, fp8, rtn.")] = None,
    data: Annotated[Path | None, typer.Option(help="Text file that inputs are made of.")] = None,
    bits: Annotated[int | None, typer.Option(help="Bits of a weight.")] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Inputs that share a scale; -1: all.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="YAML file: settings and rules by name.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting: KEY=VALUE.")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Most texts that are cut from the file.")
    ] = 128,
    length: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 512,
) -> None:
    """Write a quantized copy of a model, one decoder layer in memory at a time."""
    from pegboard_quant.quantize import Job
    from pegboard_quant.quantize import quantize as run

    rules, named = _recipe(recipe, method)
    given = {"bits": bits, "group_size": group_size}
    job = Job(
        model=model,
        method=named,
        out=out,
        recipe=rules,
        recipe_name="recipe" if recipe is None else recipe.name,
        said={key: value for key, value in given.items() if value is not None}
        | _said(settings or []),
        data=data,
        num_texts=samples,
        text_length=length,
    )
    for line in _lines(run(job, ctx.obj), out):
        typer.echo(line)


def _recipe(file: Path | None, method: str | None) -> tuple[Recipe, str]:
    """The recipe, and the method that it or the command line names."""
    from pegboard_quant.recipe import Recipe, read_recipe

    recipe = Recipe() if file is None else read_recipe(file)
    named = method or recipe.method
    if named is None:
        raise ConfigError("method", "is not given", fix="--method gptq")
    if recipe.method not in (None, named):
        raise ConfigError("method", f"{named!r}, and the recipe says {recipe.method!r}")
    return recipe, named


def _said(settings: list[str]) -> dict[str, Any]:
    """`KEY=VALUE` texts as a mapping, values read as YAML."""
    said: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        try:
            said[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            equals = ""
        if not equals:
            raise ConfigError("--set", repr(setting), allowed="KEY=VALUE")
    return said


def _lines(report: Report, out: Path) -> list[str]:
    ratio = report.bytes_before / max(report.bytes_after, 1)
    return [
        *report.notes,
        f"{out}: {report.num_quantized} weights quantized, {report.num_kept} kept;"
        f" {report.bytes_after / 1e6:.1f} MB, {ratio:.2f} times smaller than the model was stored",
    ]
