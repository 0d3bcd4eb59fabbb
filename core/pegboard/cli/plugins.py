"""`pegboard plugins`: installed plugins, the things they provide, and faults."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from pegboard.cli.options import LoadLimit
from pegboard.cli.output import print_json, print_lines, print_tracebacks
from pegboard.config import PluginsConfig, load_config
from pegboard.plugins.listing import DISABLED, REPLACED, PluginListing, list_plugins, loadable

MAX_TRIALS = 4
"""Plugins that are loaded at one time, each in a process of its own."""


def plugins(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", help="A YAML file: its single-file plugins too.")
    ] = None,
    load: Annotated[
        bool, typer.Option("--load", help="Import each, and make what can be made of it.")
    ] = False,
    load_limit: LoadLimit = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List the installed plugins. None of them is imported without --load, which ends with status 2 when
    one does not work."""
    chosen = load_config(config).plugins if config is not None else PluginsConfig()
    own = getattr(context.find_root().command, "commands", {})
    listings = [_with_passed_over(listing, own) for listing in list_plugins(chosen)]
    if load:
        listings = _loaded(listings, chosen, load_limit)
    if as_json:
        print_json(listings)
    else:
        print_lines(_lines(listings))
    if load and any(_is_at_fault(listing) for listing in listings):
        raise typer.Exit(2)


def _with_passed_over(listing: PluginListing, own: Container[str]) -> PluginListing:
    """The listing with a line for each command whose name is one of the core's own."""
    lines = tuple(
        f"command {thing.name!r} is the core's own, so this one never runs"
        for thing in listing.provides
        if thing.interface == "command" and thing.name in own
    )
    return msgspec.structs.replace(listing, claims=listing.claims + lines)


def _loaded(
    listings: Sequence[PluginListing], chosen: PluginsConfig, limit_s: float | None
) -> list[PluginListing]:
    """The listings with the findings of loading each."""
    from pegboard.compose.trial import LIMIT_S, try_plugin

    manifests = loadable(chosen)
    num_trials = min(MAX_TRIALS, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_trials) as trials:
        limit = limit_s or LIMIT_S
        verdicts = list(trials.map(lambda manifest: try_plugin(manifest, limit), manifests))
    found = {
        (manifest.origin.plugin, manifest.origin.distribution): verdict
        for manifest, verdict in zip(manifests, verdicts, strict=True)
    }
    loaded = []
    for listing in listings:
        verdict = found.get((listing.name, listing.distribution))
        if verdict is not None:
            print_tracebacks(finding.traceback for finding in verdict.findings)
            listing = msgspec.structs.replace(
                listing,
                faults=tuple(str(finding) for finding in verdict.findings),
                not_made=tuple(str(skipped) for skipped in verdict.skipped),
            )
        loaded.append(listing)
    return loaded


def _is_at_fault(listing: PluginListing) -> bool:
    return bool(listing.faults) or listing.problem not in (None, DISABLED, REPLACED)


def _lines(listings: Sequence[PluginListing]) -> Iterator[str]:
    for listing in listings:
        yield f"{listing.name}  {listing.distribution} {listing.version}  {listing.origin}"
        if listing.problem is not None:
            yield f"  not usable: {listing.problem}"
        yield from (f"  does not work: {fault}" for fault in listing.faults)
        yield from (f"  contested: {claim}" for claim in listing.claims)
        for thing in listing.provides:
            yield f"  {thing.interface:<18}  {thing.name:<14}  {thing.summary}"
        yield from (f"  not made: {thing}" for thing in listing.not_made)
