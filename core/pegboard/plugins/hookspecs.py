"""Every hook, on one page.

Hooks run once, at start-up, when the plugins that a composition names are registered; never inside
a step. Each takes no arguments and returns a mapping from name to factory, one hook an interface. The
names must be those of the plugin's manifest. A factory is called as `factory(context)`, or as
`factory(context, options)` where the manifest entry names an options model, with the context that the
interface's file documents. Of two plugins that provide one name neither wins: that is an error, which
only `plugins.replace` in the config settles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pluggy

hookspec = pluggy.HookspecMarker("pegboard")
hookimpl = pluggy.HookimplMarker("pegboard")

Factories = Mapping[str, Callable[..., Any]]


@hookspec
def pegboard_kv_allocators() -> Factories:  # type: ignore[empty-body]
    """`KVAllocator` by name. Called in the engine's process; context: `AllocatorContext`."""


@hookspec
def pegboard_prefix_caches() -> Factories:  # type: ignore[empty-body]
    """`PrefixCache` by name. Called in the engine's process; context: `PrefixCacheContext`."""


@hookspec
def pegboard_schedulers() -> Factories:  # type: ignore[empty-body]
    """`Scheduler` by name. Called in the engine's process; context: `SchedulerContext`."""


@hookspec
def pegboard_speculation_policies() -> Factories:  # type: ignore[empty-body]
    """`SpeculationPolicy` by name. Called in the engine's process; context: `SpeculationContext`."""


@hookspec
def pegboard_drafters() -> Factories:  # type: ignore[empty-body]
    """`Drafter` by name. Called in every worker; context: `DrafterContext`."""


@hookspec
def pegboard_attention_backends() -> Factories:  # type: ignore[empty-body]
    """`AttentionBackend` by name. Called in every worker; context: `AttentionContext`."""


@hookspec
def pegboard_quantizers() -> Factories:  # type: ignore[empty-body]
    """`Quantizer` by name. Called in every worker; context: `QuantizerContext`."""


@hookspec
def pegboard_kernels() -> Factories:  # type: ignore[empty-body]
    """`Kernel` factory by the name of a kernel family. Called in every worker, once for each
    operation and format chosen; context: `KernelContext`."""


@hookspec
def pegboard_logits_processors() -> Factories:  # type: ignore[empty-body]
    """`LogitsProcessor` by name. Called in every worker; context: `ProcessorContext`."""


@hookspec
def pegboard_checkpoint_sources() -> Factories:  # type: ignore[empty-body]
    """`CheckpointSource` by name. Called in every worker; context: `CheckpointFacts`."""


@hookspec
def pegboard_models() -> Factories:  # type: ignore[empty-body]
    """`Model` by the name of its family. Called in every worker while weights load; context:
    `pegboard.models.layers.LayerBuilder`."""


@hookspec
def pegboard_executors() -> Factories:  # type: ignore[empty-body]
    """`Executor` by name. Called in the engine's process; context: `ExecutorContext`."""


@hookspec
def pegboard_kv_transfers() -> Factories:  # type: ignore[empty-body]
    """`KVTransferHost` by name, and `KVTransferWorker` by name with `.worker` appended; context:
    `TransferContext`."""


@hookspec
def pegboard_observers() -> Factories:  # type: ignore[empty-body]
    """`Observer` by name. Called in the engine's process; context: `ObserverContext`."""


@hookspec
def pegboard_commands() -> Factories:  # type: ignore[empty-body]
    """A typer application's factory by the command's name. Called when the command is used; takes
    nothing. Its functions find a `CommandContext` in `ctx.obj`."""
