"""`pegboard plugins`: what is installed, what it provides, and why something cannot be used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from pegboard.cli.output import print_json, print_lines
from pegboard.config import load_config
from pegboard.plugins.listing import PluginListing, list_plugins


def plugins(
    config: Annotated[
        Path | None, typer.Option("--config", help="A YAML file: its single-file plugins too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List the installed plugins. None of them is imported."""
    listings = list_plugins(load_config(config) if config is not None else None)
    if as_json:
        print_json(listings)
    else:
        print_lines(_lines(listings))


def _lines(listings: Sequence[PluginListing]) -> Iterator[str]:
    for listing in listings:
        yield f"{listing.name}  {listing.distribution} {listing.version}  {listing.origin}"
        if listing.problem is not None:
            yield f"  not usable: {listing.problem}"
        yield from (f"  contested: {claim}" for claim in listing.claims)
        for thing in listing.provides:
            yield f"  {thing.interface:<18}  {thing.name:<14}  {thing.summary}"
