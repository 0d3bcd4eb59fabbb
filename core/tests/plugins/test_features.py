"""A part that needs a feature of another is chosen where that has it, and refused where it is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pegboard import errors
from pegboard.compose import prepare
from pegboard.config import Config
from pegboard.plugins.contracts import CONTRACTS
from pegboard.plugins.listing import list_plugins

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
version = 2
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


ALTERNATIVES = """
[plugin]
name = "{name}"

[[provides]]
interface = "attention"
version = {version}
name = "either"
summary = "Of the test"
priority = -1
layout = "pegboard.builtin.torch_attention_layout:layout"

[[provides.requires]]
devices = ["cpu"]
dtypes = ["float64"]
block_sizes = [8, 32]

[[provides.requires]]
dtypes = ["float32"]
block_sizes = [64]

[[provides]]
interface = "prefix_cache"
version = {cache_version}
name = "chooser"
summary = "Of the test"

[[provides.requires]]
packages = ["no_such_package"]

[[provides.requires]]
features = ["kv_allocator.sharing"]

[[provides]]
interface = "kv_allocator"
version = {allocator_version}
name = "private"
summary = "An allocator of the test"
"""


@pytest.fixture
def either(install: Install) -> None:
    """Attention, and a prefix cache, each with alternatives in what it requires."""
    versions = {"{version}": "attention", "{cache_version}": "prefix_cache"}
    versions |= {"{allocator_version}": "kv_allocator"}
    manifest = ALTERNATIVES
    for mark, interface in versions.items():
        manifest = manifest.replace(mark, str(max(CONTRACTS[interface].versions)))
    install("either", manifest)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(("dtype", "block_size"), [("float64", 8), ("float32", 64)])
def test_of_alternatives_the_one_that_holds_says_what_goes(
    config_of: Configure, dtype: str, block_size: int
) -> None:
    config = config_of(attention="either", dtype=dtype)
    (group,) = prepare(config).composition.groups
    assert group.block_size == block_size


@pytest.mark.usefixtures("either")
def test_where_no_alternative_holds_each_is_told(config_of: Configure) -> None:
    with pytest.raises(errors.CompositionRefused) as caught:
        prepare(config_of(attention="either", dtype="float16"))
    assert any(
        "runs in float64, not in float16, or runs in float32, not in float16" in reason
        for reason in caught.value.reasons
    )
    private = {"allocator": "private", "memory": "8MiB"}
    with pytest.raises(errors.CompositionRefused, match=r"'chooser' needs kv_allocator\.sharing"):
        prepare(config_of(prefix_cache="chooser", kv_cache=private))
    assert prepare(config_of(prefix_cache="chooser"))


@pytest.mark.usefixtures("either")
def test_a_package_of_one_alternative_is_not_missed() -> None:
    (listing,) = [one for one in list_plugins() if one.name == "either"]
    assert listing.problem is None


def test_alternatives_are_at_least_one(install: Install) -> None:
    manifest = MANIFEST.replace("[provides.requires]\nfeatures = [", "requires = [] #")
    install("none", manifest)
    (listing,) = [one for one in list_plugins() if one.name == "none"]
    assert listing.problem is not None and "requires" in listing.problem
