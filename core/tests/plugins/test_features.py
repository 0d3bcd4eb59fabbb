"""What needs a feature of another part is chosen where that has it, and refused where it is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pegboard import errors
from pegboard.compose import prepare
from pegboard.config import Config

Configure = Callable[..., Config]
Install = Callable[..., Path]

MANIFEST = """
[plugin]
name = "{name}"

[[provides]]
interface = "prefix_cache"
version = 1
name = "sharer"
summary = "A cache of the test"
priority = 99

[provides.requires]
features = ["kv_allocator.sharing"]

[[provides]]
interface = "kv_allocator"
version = 1
name = "private"
summary = "An allocator of the test"
"""


@pytest.fixture
def sharer(install: Install) -> None:
    """A prefix cache `sharer`, and an allocator `private` that shares no blocks."""
    install("sharer", MANIFEST)


@pytest.mark.usefixtures("sharer")
def test_auto_takes_what_the_other_part_serves(config_of: Configure) -> None:
    composition = prepare(config_of(prefix_cache="auto")).composition
    assert composition.parts["prefix_cache"].name == "sharer"


@pytest.mark.usefixtures("sharer")
def test_auto_does_without_what_the_other_part_does_not_serve(config_of: Configure) -> None:
    private = {"allocator": "private", "memory": "8MiB"}
    composition = prepare(config_of(prefix_cache="auto", kv_cache=private)).composition
    assert composition.parts["prefix_cache"].name == "none"
    (why,) = [d.why for d in composition.decisions if d.key == "prefix_cache"]
    assert "sharer (needs kv_allocator.sharing, which 'private' does not have)" in why


@pytest.mark.usefixtures("sharer")
@pytest.mark.parametrize("wanted", ["on", "sharer"])
def test_what_is_asked_for_is_refused_with_the_reason(config_of: Configure, wanted: str) -> None:
    private = {"allocator": "private", "memory": "8MiB"}
    with pytest.raises(errors.CompositionRefused, match=r"needs kv_allocator\.sharing"):
        prepare(config_of(prefix_cache=wanted, kv_cache=private))
