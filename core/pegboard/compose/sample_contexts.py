"""Contexts of a small model that does not exist, to make a plugin's parts with where there is none."""

from __future__ import annotations

from typing import Any, NoReturn

from pegboard.engine.prefix.guarded_cache import GuardedCache
from pegboard.engine.prefix.known_blocks import KnownBlocks
from pegboard.interfaces.attention import AttentionContext
from pegboard.interfaces.drafter import DrafterContext
from pegboard.interfaces.executor import ExecutorContext
from pegboard.interfaces.kernel import KernelContext
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.kv_allocator import AllocatorContext
from pegboard.interfaces.logits_processor import ProcessorContext
from pegboard.interfaces.model import AttentionShape
from pegboard.interfaces.observer import ObserverContext
from pegboard.interfaces.prefix_cache import PrefixCacheContext
from pegboard.interfaces.scheduler import SchedulerContext
from pegboard.interfaces.speculation_policy import SpeculationContext
from pegboard.plugins.choice import INACTIVE
from pegboard.plugins.discovery import discover
from pegboard.plugins.loader import load_plugins

DTYPE = "float32"
GROUP = KVGroup(
    layers=(0, 1),
    num_kv_heads=2,
    head_dim=64,
    block_size=16,
    window=None,
    encoding="none",
    dtype=DTYPE,
)
_NUM_BLOCKS = (65,)
_NUM_SEQS = 4
_BATCHED_TOKENS = 64
_MODEL_LEN = 128
_VOCAB_SIZE = 32
_NUM_DRAFTS = 4


def sample_context(interface: str) -> object | None:
    """A context for a factory of an interface; None where no one can be made up: what reads a
    checkpoint or builds its model needs a real one."""
    match interface:
        case "scheduler":
            return SchedulerContext(_NUM_SEQS, _BATCHED_TOKENS, _MODEL_LEN)
        case "speculation_policy":
            return SpeculationContext(_NUM_DRAFTS)
        case "prefix_cache":
            return _for_cache()
        case "kv_allocator":
            cache = GuardedCache(
                _builtin("prefix_cache", _for_cache(), INACTIVE), KnownBlocks(len(_NUM_BLOCKS))
            )
            return AllocatorContext((GROUP,), _NUM_BLOCKS, _MODEL_LEN, _BATCHED_TOKENS, cache)
        case "observer":
            return ObserverContext("a model", {}, _MODEL_LEN, (GROUP,), _NUM_BLOCKS)
        case "logits_processor":
            return ProcessorContext(_VOCAB_SIZE, _NUM_SEQS, "cpu", (1,))
        case "drafter":
            return DrafterContext(_NUM_DRAFTS, _VOCAB_SIZE, _NUM_SEQS, _MODEL_LEN)
        case "executor":
            return ExecutorContext(
                ("cpu",), _no_worker, _no_worker, lambda: None, lambda name: None
            )
        case "attention":
            shape = AttentionShape(
                2 * GROUP.num_kv_heads, GROUP.num_kv_heads, GROUP.head_dim, 0.125
            )
            rotary = _builtin("kernel", kernel_context("rotary", "float"))
            layers = (shape,) * len(GROUP.layers)
            return AttentionContext(layers, (GROUP,), _NUM_SEQS, DTYPE, "cpu", 1, rotary)
    return None


def kernel_context(operation: str, weight_format: str) -> KernelContext:
    """The context of a kernel's factory, on the CPU."""
    return KernelContext(operation, weight_format, DTYPE, "cpu", 1)


def _for_cache() -> PrefixCacheContext:
    return PrefixCacheContext((GROUP,), _NUM_BLOCKS, "fingerprint")


def _builtin(interface: str, context: object, promise: str = "") -> Any:
    """The core's own part of an interface."""
    catalog = discover()
    offer = next(
        offer
        for offer in catalog.offers(interface)
        if offer.origin.builtin and (not promise or promise in offer.entry.promises)
    )
    registry = load_plugins([catalog.manifest(offer.origin)])
    return registry.build(offer, context)


def _no_worker(rank: int) -> NoReturn:
    raise RuntimeError("a worker was asked for before the executor is started")
