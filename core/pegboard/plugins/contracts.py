"""What the host knows of each interface: its class, its hook, the versions it accepts, and what a
manifest entry for it must say."""

from __future__ import annotations

from dataclasses import dataclass

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


def _contract(hook: str, kind: type, version: int, *needs: str) -> Contract:
    return Contract(hook, kind, frozenset({version}), needs)


CONTRACTS: dict[str, Contract] = {
    "kv_allocator": _contract(
        "pegboard_kv_allocators", kv_allocator.KVAllocator, kv_allocator.VERSION
    ),
    "prefix_cache": _contract(
        "pegboard_prefix_caches", prefix_cache.PrefixCache, prefix_cache.VERSION
    ),
    "scheduler": _contract("pegboard_schedulers", scheduler.Scheduler, scheduler.VERSION),
    "speculation_policy": _contract(
        "pegboard_speculation_policies",
        speculation_policy.SpeculationPolicy,
        speculation_policy.VERSION,
    ),
    "drafter": _contract("pegboard_drafters", drafter.Drafter, drafter.VERSION),
    "attention": _contract(
        "pegboard_attention_backends", attention.AttentionBackend, attention.VERSION, "layout"
    ),
    "quantizer": _contract(
        "pegboard_quantizers",
        quantizer.Quantizer,
        quantizer.VERSION,
        "formats",
        "parameters",
        "resident_bytes",
    ),
    "kernel": _contract("pegboard_kernels", kernel.Kernel, kernel.VERSION, "operations"),
    "logits_processor": _contract(
        "pegboard_logits_processors",
        logits_processor.LogitsProcessor,
        logits_processor.VERSION,
    ),
    "checkpoint_source": _contract(
        "pegboard_checkpoint_sources",
        checkpoint.CheckpointSource,
        checkpoint.VERSION,
        "files",
        "describe",
    ),
    "model": _contract("pegboard_models", model.Model, model.VERSION, "architectures", "describe"),
    "executor": _contract("pegboard_executors", executor.Executor, executor.VERSION),
    "kv_transfer": _contract(
        "pegboard_kv_transfers", kv_transfer.KVTransferHost, kv_transfer.VERSION
    ),
    "observer": _contract("pegboard_observers", observer.Observer, observer.VERSION),
    "command": _contract("pegboard_commands", object, command.VERSION),
}
