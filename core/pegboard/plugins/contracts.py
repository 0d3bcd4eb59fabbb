"""The host's knowledge of each interface: its class, its hook, the versions it accepts, and what a
manifest entry for it must say."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from pegboard.interfaces import (
    attention,
    checkpoint,
    command,
    drafter,
    executor,
    kernel,
    kv_allocator,
    kv_transfer,
    logits_processor,
    model,
    observer,
    prefix_cache,
    quantizer,
    scheduler,
    speculation_policy,
)


@dataclass(frozen=True)
class Contract:
    """One interface, as the host sees it.

    Attributes:
        hook: the hook that returns its factories.
        kind: the class that a factory's product must be an instance of.
        versions: versions of the interface that this core accepts.
        needs: manifest fields that an entry must have.
    """

    hook: str
    kind: type
    versions: frozenset[int]
    needs: tuple[str, ...] = ()


def _contract(hook: str, module: ModuleType, kind: type, *needs: str) -> Contract:
    return Contract(hook, kind, frozenset({module.VERSION}), needs)


CONTRACTS: dict[str, Contract] = {
    "kv_allocator": _contract("pegboard_kv_allocators", kv_allocator, kv_allocator.KVAllocator),
    "prefix_cache": _contract("pegboard_prefix_caches", prefix_cache, prefix_cache.PrefixCache),
    "scheduler": _contract("pegboard_schedulers", scheduler, scheduler.Scheduler),
    "speculation_policy": _contract(
        "pegboard_speculation_policies", speculation_policy, speculation_policy.SpeculationPolicy
    ),
    "drafter": _contract("pegboard_drafters", drafter, drafter.Drafter),
    "attention": _contract(
        "pegboard_attention_backends", attention, attention.AttentionBackend, "layout"
    ),
    "quantizer": _contract(
        "pegboard_quantizers",
        quantizer,
        quantizer.Quantizer,
        "formats",
        "parameters",
        "resident_bytes",
    ),
    "kernel": _contract("pegboard_kernels", kernel, kernel.Kernel, "operations"),
    "logits_processor": _contract(
        "pegboard_logits_processors", logits_processor, logits_processor.LogitsProcessor
    ),
    "checkpoint_source": _contract(
        "pegboard_checkpoint_sources", checkpoint, checkpoint.CheckpointSource, "files", "describe"
    ),
    "model": _contract("pegboard_models", model, model.Model, "architectures", "describe"),
    "executor": _contract("pegboard_executors", executor, executor.Executor),
    "kv_transfer": _contract("pegboard_kv_transfers", kv_transfer, kv_transfer.KVTransferHost),
    "observer": _contract("pegboard_observers", observer, observer.Observer),
    "command": _contract("pegboard_commands", command, object),
}
