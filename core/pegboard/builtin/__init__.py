"""The built-in implementation of each interface, registered through the same hooks as everybody's.

Hook implementations only; what they make is imported when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from pegboard import hookimpl

Factories = Mapping[str, Callable[..., Any]]


def _from(module: str, name: str) -> Any:
    """A factory that imports its module when it is called."""

    def factory(*arguments: object) -> object:
        return getattr(import_module(f"pegboard.{module}"), name)(*arguments)

    return factory


@hookimpl
def pegboard_kv_allocators() -> Factories:
    return {"paged": _from("builtin.paged_allocator", "PagedAllocator")}


@hookimpl
def pegboard_prefix_caches() -> Factories:
    return {"none": _from("builtin.no_cache", "NoCache")}


@hookimpl
def pegboard_schedulers() -> Factories:
    return {"fcfs": _from("builtin.fcfs", "FCFS")}


@hookimpl
def pegboard_speculation_policies() -> Factories:
    return {
        "adaptive": _from("builtin.adaptive.policy", "AdaptivePolicy"),
        "fixed": _from("builtin.fixed_policy", "FixedPolicy"),
    }


@hookimpl
def pegboard_drafters() -> Factories:
    return {"none": _from("builtin.no_drafter", "NoDrafter")}


@hookimpl
def pegboard_attention_backends() -> Factories:
    return {"torch": _from("builtin.torch_attention", "TorchAttention")}


@hookimpl
def pegboard_quantizers() -> Factories:
    return {"none": _from("builtin.unquantized", "Unquantized")}


@hookimpl
def pegboard_kernels() -> Factories:
    return {"torch": _from("builtin.torch_kernels", "torch_kernel")}


@hookimpl
def pegboard_logits_processors() -> Factories:
    return {
        "penalties": _from("builtin.processors", "Penalties"),
        "logit_bias": _from("builtin.processors", "LogitBias"),
        "min_tokens": _from("builtin.processors", "MinTokens"),
    }


@hookimpl
def pegboard_checkpoint_sources() -> Factories:
    return {"safetensors": _from("builtin.safetensors_source", "SafetensorsSource")}


@hookimpl
def pegboard_models() -> Factories:
    return {"llama": _from("models.llama", "build")}


@hookimpl
def pegboard_executors() -> Factories:
    return {"local": _from("builtin.local_executor", "LocalExecutor")}


@hookimpl
def pegboard_observers() -> Factories:
    return {
        "metrics": _from("builtin.metrics_observer", "MetricsObserver"),
        "log": _from("builtin.log_observer", "LogObserver"),
    }
