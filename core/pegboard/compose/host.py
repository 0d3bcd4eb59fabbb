"""The host's half of an engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pegboard.compose.making import Maker
from pegboard.compose.preparing import Prepared, prepare
from pegboard.compose.processor_params import processor_params
from pegboard.compose.worker import OnTensor, blaming, build_worker, ignore
from pegboard.engine.core import EngineCore
from pegboard.engine.detokenizer import detokenizers
from pegboard.engine.parts import EngineParts
from pegboard.engine.prefix.guarded_cache import GuardedCache
from pegboard.engine.prefix.known_blocks import KnownBlocks
from pegboard.errors import CompositionRefused, KernelUnusable
from pegboard.interfaces.executor import ExecutorContext, Worker, WorkerProgram
from pegboard.interfaces.kv_allocator import AllocatorContext
from pegboard.interfaces.observer import ObserverContext
from pegboard.interfaces.prefix_cache import PrefixCacheContext
from pegboard.interfaces.scheduler import SchedulerContext
from pegboard.interfaces.speculation_policy import SpeculationContext
from pegboard.plugins.choice import INACTIVE
from pegboard.plugins.composition import Composition, Part, to_json

if TYPE_CHECKING:
    from pegboard.tokenizer import Tokenizer

WORKERS_PARTS = ("attention", "drafter", "kernel", "logits_processor", "quantizer")
"""Interfaces of a worker for which an object may be given."""


@dataclass(frozen=True)
class Starting:
    """The listeners to an engine's start.

    Attributes:
        on_engine: told of the engine before any worker is started; its `health` can be asked from then
            on.
        on_built: told once all parts of the workers are made and no weight is loaded.
        on_tensor: told the name of each parameter as it is loaded.
    """

    on_engine: Callable[[EngineCore], None] = lambda engine: None
    on_built: Callable[[], None] = lambda: None
    on_tensor: OnTensor = ignore


def start_engine(
    prepared: Prepared, starting: Starting = Starting()
) -> tuple[EngineCore, Prepared]:
    """A running engine, whose weights are loaded, and the composition that it runs.

    That is another one than was prepared when kernels that `auto` chose fail their self-tests: they
    are left out, and the composition is resolved once more.

    Args:
        prepared: what to start.
        starting: who is told how it goes on.

    Raises:
        KernelUnusable: a kernel that was named fails its self-test.
        PluginError: a plugin's part cannot be made, or a plugin raised.
    """
    unusable: frozenset[tuple[str, str]] = frozenset()
    while True:
        try:
            with blaming(prepared.composition):
                return _started(prepared, starting), prepared
        except KernelUnusable as failure:
            if failure.named:
                raise
            unusable |= {(failure.operation, failure.family)}
        prepared = prepare(prepared.config, unusable=unusable, **prepared.objects)


def _started(prepared: Prepared, starting: Starting) -> EngineCore:
    engine = build_engine(prepared, starting)
    try:
        starting.on_engine(engine)
        engine.start()
    except BaseException:
        engine.close()
        raise
    return engine


def build_engine(prepared: Prepared, starting: Starting = Starting()) -> EngineCore:
    """The engine of a composition; no weight is loaded before its `start`. For the arguments, see
    `start_engine`."""
    composition = prepared.composition
    maker = Maker(composition, prepared.objects)
    groups, num_blocks = composition.groups, composition.num_blocks
    max_model_len = composition.max_model_len

    names: dict[int, str] = {}

    def make(part: Part, context: object) -> Any:
        made = maker.make(part, context)
        names[id(made)] = part.name
        return made

    def build(interface: str, context: object) -> Any:
        return make(composition.parts[interface], context)

    cache = build("prefix_cache", PrefixCacheContext(groups, num_blocks, composition.fingerprint))
    known_blocks = KnownBlocks(len(groups), is_heard=bool(composition.observers))
    guarded = GuardedCache(cache, known_blocks, names[id(cache)])
    scheduling = SchedulerContext(
        composition.max_num_seqs, composition.max_num_batched_tokens, max_model_len
    )
    most_slots = composition.max_num_batched_tokens + composition.max_slots_past
    allocating = AllocatorContext(groups, num_blocks, max_model_len, most_slots, guarded)
    speculating = SpeculationContext(composition.num_speculative_tokens)
    caches_prefixes = INACTIVE not in composition.parts["prefix_cache"].entry.promises
    ledger = {entry.name: entry.num_bytes for entry in prepared.ledger.entries}
    observing = ObserverContext(
        composition.model_name,
        ledger,
        max_model_len,
        groups,
        num_blocks,
        caches_prefixes,
        composition.num_speculative_tokens,
    )
    tokenizer = load_tokenizer(prepared)
    return EngineCore(
        EngineParts(
            groups=groups,
            num_blocks=num_blocks,
            allocator=build("kv_allocator", allocating),
            prefix_cache=guarded,
            scheduler=build("scheduler", scheduling),
            fallback_scheduler=maker.make(_fallback_scheduler(composition), scheduling),
            policy=build("speculation_policy", speculating),
            executor=build("executor", _executor_context(prepared, maker, starting)),
            caches_prefixes=caches_prefixes,
            stateful_processors=composition.stateful_processors,
            verifies_blocks=composition.verifies_kv,
            observers=tuple(make(part, observing) for part in composition.observers),
            max_num_seqs=composition.max_num_seqs,
            max_num_batched_tokens=composition.max_num_batched_tokens,
            depth=composition.depth,
            max_step_s=None if composition.max_step_ms is None else composition.max_step_ms / 1000,
            max_model_len=max_model_len,
            vocab_size=composition.target.shape.vocab_size,
            eos_token_ids=composition.target.facts.eos_token_ids,
            num_speculative_tokens=composition.num_speculative_tokens,
            draft_slots=composition.drafter.slots if len(composition.models) > 1 else None,
            drafter_name=composition.parts["drafter"].name,
            make_detokenizer=None if tokenizer is None else detokenizers(tokenizer),
            max_token_bytes=None if tokenizer is None else tokenizer.max_token_bytes,
            processor_params=processor_params(composition),
            seed=composition.seed,
            skipped_id=None if tokenizer is None else tokenizer.skipped_id,
            name_of=lambda part: names[id(part)],
        )
    )


def _fallback_scheduler(composition: Composition) -> Part:
    """The core's own: the engine goes on with it when the chosen one errs."""
    own = (
        Part(origin=manifest.origin, entry=entry, path="scheduler")
        for manifest in composition.manifests
        for entry in manifest.provides
        if manifest.origin.builtin and entry.interface == "scheduler"
    )
    return next(own, composition.parts["scheduler"])  # the config may leave out the core's own


def load_tokenizer(prepared: Prepared) -> Tokenizer | None:
    """The model's tokenizer; None when the checkpoint has none.

    Raises:
        TokenizerError: it has one that cannot be used.
    """
    from pegboard.tokenizer import load_tokenizer as load

    facts = prepared.composition.target.facts
    if facts.tokenizer.file is None:
        return None
    return load(facts.tokenizer, where=facts.path)


def _executor_context(prepared: Prepared, maker: Maker, starting: Starting) -> ExecutorContext:
    composition = prepared.composition

    def worker(rank: int) -> Worker:
        built = build_worker(composition, maker, starting.on_tensor, rank)
        starting.on_built()
        return built

    return ExecutorContext(
        devices=composition.devices,
        worker=worker,
        worker_program=lambda rank: _worker_program(prepared, rank),
        on_built=starting.on_built,
        on_tensor=starting.on_tensor,
        depth=composition.depth,
    )


def _worker_program(prepared: Prepared, rank: int) -> WorkerProgram:
    tied = [interface for interface in WORKERS_PARTS if interface in prepared.objects]
    if tied:
        executor = prepared.composition.parts["executor"].name
        raise CompositionRefused(
            [
                f"{interface}: an object of this process, which the worker of executor {executor!r}, in"
                " another one, cannot have; fix: give a plugin's name, or executor: local"
                for interface in tied
            ]
        )
    argv = [sys.executable, "-P", "-m", "pegboard.runner_main", str(rank)]
    return WorkerProgram(argv, to_json(prepared.composition), prepared.composition.digest)
