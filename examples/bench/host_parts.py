"""Prefix caches and allocators of the installed plugins, made without an engine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from replay import MakeParts
from thin_model import write_thin_model

from pegboard.compose import prepare
from pegboard.config import Config
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.kv_allocator import AllocatorContext, KVAllocator
from pegboard.interfaces.prefix_cache import PrefixCache, PrefixCacheContext
from pegboard.plugins.loader import load_plugins, options_of

MAX_MODEL_LEN = 8192


def make_parts(prefix_cache: str | dict[str, Any], block_size: int) -> MakeParts:
    """Makes pairs of a cache, as the config key `prefix_cache` says, and a paged allocator.

    Raises:
        UserError: the plugin is missing, or its options are wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = write_thin_model(Path(folder) / "thin")
        config = {"model": str(model), "prefix_cache": prefix_cache}
        composition = prepare(Config.model_validate(config)).composition
    registry = load_plugins(composition.manifests)
    groups = (KVGroup((0,), 1, 8, block_size, None, "none", "float32"),)

    def build(interface: str, context: object) -> Any:
        part = composition.parts[interface]
        return registry.build(part, context, options_of(part))

    def make(num_blocks: int) -> tuple[PrefixCache, KVAllocator]:
        counts = (num_blocks + 1,)
        cache = build("prefix_cache", PrefixCacheContext(groups, counts, "replay"))
        limits = MAX_MODEL_LEN, MAX_MODEL_LEN
        return cache, build("kv_allocator", AllocatorContext(groups, counts, *limits, cache))

    return make
