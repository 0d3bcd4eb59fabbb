"""`pegboard bench`: a mixed load over HTTP, and latencies and throughput as its clients see them."""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from pegboard.cli.result_files import HtmlFile, JsonFile, ResultFiles
from pegboard.config import load_config
from pegboard.errors import ConfigError

_KEYS = ("PEGBOARD_API_KEY", "OPENAI_API_KEY")
_TARGET = re.compile(r"\w+:[\d.]+")


class SeveralTargets(TyperCommand):
    """Takes `--goodput ttft:500 itl:50`, as tutorials of other engines have it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Writes `--goodput` before each target that follows one."""
        spread: list[str] = []
        for word in args:
            if len(spread) > 1 and spread[-2] == "--goodput" and _TARGET.fullmatch(word):
                spread.append("--goodput")
            spread.append(word)
        return super().parse_args(ctx, spread)


def bench(  # noqa: PLR0913  # a command has an argument for each thing one may type
    model: Annotated[
        str | None, typer.Argument(help="As for serve, which is then run.", metavar="MODEL")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="A YAML file to serve.", metavar="FILE")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="Sets any key.", metavar="KEY=VALUE")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", "--base-url", help="A server that runs already.", metavar="URL"),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help=f"Of the server at --url; else ${', $'.join(_KEYS)}.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model to ask for; else the server's first.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests in all.", metavar="N")] = 100,
    request_rate: Annotated[
        float, typer.Option(help="Requests a second; inf: as many as may run at once.")
    ] = math.inf,
    burstiness: Annotated[
        float, typer.Option(help="Of the gaps: 1 Poisson, less is burstier, inf an even beat.")
    ] = 1.0,
    max_concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Most requests at once; without a rate: so many clients."),
    ] = None,
    input_len: Annotated[
        str, typer.Option(help="Tokens a prompt: N, LOW:HIGH or lognormal:LOW:HIGH.")
    ] = "32:512",
    output_len: Annotated[str, typer.Option(help="Tokens an answer, likewise.")] = "16:128",
    dataset: Annotated[
        Path | None, typer.Option(help='A file of lines like {"prompt": "Hello"}.', metavar="FILE")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and arrivals.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds for a whole answer.")] = 600.0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help="What a good request keeps to, in ms: ttft:500,itl:50,tpot:40,e2el:5000."
        ),
    ] = None,
    percentiles: Annotated[
        str, typer.Option("--percentiles", "--metric-percentiles", help="Of each latency.")
    ] = "50,90,99",
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Put a load on a server, and say how fast it answers. Latencies count from the time that a request
    was scheduled, so that a server that stalls is not spared the requests that then wait."""
    import asyncio

    from pegboard.bench.measuring import Plan, measure
    from pegboard.bench.options import parse_goodput, parse_lengths, parse_percentiles
    from pegboard.bench.page import page
    from pegboard.bench.report import result
    from pegboard.bench.summary import summary

    plan = Plan(
        model=served_model_name,
        num_prompts=num_prompts,
        request_rate=_positive(request_rate, "--request-rate"),
        burstiness=_positive(burstiness, "--burstiness"),
        max_concurrency=max_concurrency,
        input_lens=parse_lengths(input_len, "--input-len"),
        output_lens=parse_lengths(output_len, "--output-len"),
        dataset=dataset,
        seed=seed,
        timeout_s=_positive(timeout, "--timeout"),
        goodput=parse_goodput(goodput or ()),
        percentiles=parse_percentiles(percentiles),
    )
    files = ResultFiles(json_file, html_file)
    with _server(model, config, sets or (), url, api_key) as (address, key):
        measured = asyncio.run(measure(address, key, plan))
    found = result(measured)
    typer.echo("\n".join(summary(found)))
    files.write(found, page)
    if measured.interrupted:
        raise typer.Exit(130)
    if not found["completed"]:
        raise typer.Exit(1)


def _positive(value: float, flag: str) -> float:
    if not value > 0:
        raise ConfigError(flag, f"{value:g}", allowed="a number over 0")
    return value


@contextmanager
def _server(
    model: str | None,
    config: Path | None,
    sets: Sequence[str],
    url: str | None,
    api_key: str | None,
) -> Iterator[tuple[str, str | None]]:
    """The URL of the server to drive, and the key that it wants."""
    if url is not None:
        if model is not None or config is not None or sets:
            raise ConfigError(
                "--url", "given with a model to serve", fix="leave out one of the two"
            )
        if not url.startswith(("http://", "https://")):
            raise ConfigError("--url", repr(url), allowed="http://HOST:PORT")
        if api_key is not None and not api_key.strip():
            raise ConfigError("--api-key", "a blank key", fix="leave it out, or put a key there")
        yield url, api_key or _key_of(os.environ)
        return
    if model is None and config is None:
        raise ConfigError("--config", "missing", fix="--config FILE, a MODEL, or --url URL")
    from pegboard.bench.own_server import own_server
    from pegboard.server.keys import ADMIN_VARIABLE, read_keys

    settings = load_config(config, {} if model is None else {"model": model}, sets)
    keys = read_keys(settings.server, os.environ)
    arguments = [] if model is None else [model]
    arguments += [] if config is None else ["--config", str(config)]
    arguments += [word for text in sets for word in ("--set", text)]
    # An admin's key: the load's client reads `/metrics`, too.
    key = keys.admin[0] if keys.admin else secrets.token_urlsafe()
    with own_server(arguments, {ADMIN_VARIABLE: key} if keys.api else {}) as address:
        yield address, key if keys.all else None


def _key_of(environment: Mapping[str, str]) -> str | None:
    """The first key that a variable holds; the server's own may hold several."""
    found = (environment.get(name, "").split(",")[0].strip() for name in _KEYS)
    return next(filter(None, found), None)
