"""Config → composition → built parts: the one module that sees config, plugins, planner, engine and
runner.

`prepare` decides everything and starts nothing; `build_engine` makes the host's parts; `build_worker`
makes a worker's, in this process or in one of its own.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from pegboard.checkpoint_ref import locate
from pegboard.config import Config
from pegboard.engine.core import EngineCore
from pegboard.engine.parts import EngineParts
from pegboard.errors import (
    CompositionRefused,
    ConfigError,
    DuplicateName,
    KernelUnusable,
    OptionsInvalid,
    PluginError,
    PluginNotInstalled,
    RequestError,
)
from pegboard.interfaces.attention import AttentionContext
from pegboard.interfaces.checkpoint import CheckpointFacts, TokenizerFacts
from pegboard.interfaces.drafter import DrafterContext
from pegboard.interfaces.executor import ExecutorContext, Worker
from pegboard.interfaces.kernel import Kernel, KernelContext
from pegboard.interfaces.kv_allocator import AllocatorContext
from pegboard.interfaces.logits_processor import ProcessorContext
from pegboard.interfaces.observer import ObserverContext
from pegboard.interfaces.prefix_cache import PrefixCacheContext
from pegboard.interfaces.quantizer import QuantizerContext
from pegboard.interfaces.scheduler import SchedulerContext
from pegboard.interfaces.speculation_policy import SpeculationContext
from pegboard.planner.ledger import Ledger, PoolRequest, account
from pegboard.planner.probe import probe
from pegboard.planner.tensors import check_tensors
from pegboard.plugins.composition import (
    Composition,
    KernelChoice,
    Part,
    Refusal,
    from_json,
    to_json,
)
from pegboard.plugins.contracts import CONTRACTS
from pegboard.plugins.discovery import Catalog, discover
from pegboard.plugins.inspect import inspect_checkpoint, inspect_model
from pegboard.plugins.loader import load_plugins, resolve_dotted
from pegboard.plugins.manifest import Origin, Provides, entry_of
from pegboard.plugins.registry import Registry, check_product, validate_options
from pegboard.plugins.resolver import Inspected, resolve
from pegboard.request import SamplingParams

if TYPE_CHECKING:
    from pegboard.runner.parts import WorkerParts
    from pegboard.tokenizer import Tokenizer

OnTensor = Callable[[str], None]
"""Told the name of each parameter as it is loaded."""


def _ignore(name: str) -> None:
    pass


@dataclass(frozen=True)
class Prepared:
    """A composition that goes together and fits.

    Attributes:
        config: what was asked for.
        composition: what that means.
        ledger: what it will take.
        objects: interface to the object given instead of a name.
    """

    config: Config
    composition: Composition
    ledger: Ledger
    objects: Mapping[str, Any] = field(default_factory=dict)


def prepare(
    config: Config,
    *,
    unusable: frozenset[tuple[str, str]] = frozenset(),
    **objects: Any,
) -> Prepared:
    """Decides everything, and starts nothing. Does not import torch.

    Args:
        config: what is wanted.
        unusable: (operation, kernel family) whose self-test failed on this machine.
        objects: interface name to an object to use instead of a plugin; its class's attribute
            `manifest`, in the schema of a manifest entry, says what it requires and promises.

    Raises:
        CompositionRefused: the parts do not go together or do not fit; it carries every reason.
        PluginNotInstalled, DuplicateName, OptionsInvalid: that is the only reason.
        ConfigError, CheckpointError: the model cannot be found or read.
    """
    catalog = discover(config.plugins.load, config.plugins.disable)
    path = locate(config.model, config.revision)
    facts, source = inspect_checkpoint(catalog, path)
    shape, model = inspect_model(catalog, facts, config.plugins.replace)
    name = config.server.served_model_name
    inspected = Inspected(
        model_name=config.model if name == "auto" else name,
        facts=dataclasses.replace(facts, tokenizer=_tokenizer_facts(config, catalog, facts)),
        source=source,
        shape=shape,
        model=model,
        objects={interface: _part_of(interface, thing) for interface, thing in objects.items()},
        unusable=unusable,
    )
    devices = probe()
    composition = resolve(config, inspected, devices, catalog)
    if isinstance(composition, list):
        raise _refusal(composition)
    pool = PoolRequest(config.kv_cache.memory, config.max_model_len == "auto")
    accounted = account(composition, pool, devices)
    refusals = [*_check_options(composition), *check_tensors(composition)]
    if isinstance(accounted, list):
        refusals += accounted
    if refusals or isinstance(accounted, list):
        raise _refusal(refusals)
    return Prepared(config, *accounted, objects)


def start_engine(prepared: Prepared, on_tensor: OnTensor = _ignore) -> EngineCore:
    """A running engine: weights are loaded.

    A kernel that was chosen by `auto` and fails its self-test is left out, and the composition is
    resolved once more.

    Raises:
        KernelUnusable: a kernel that was named fails its self-test.
    """
    engine = build_engine(prepared, on_tensor)
    try:
        engine.start()
        return engine
    except KernelUnusable as failure:
        engine.close()
        if failure.named:
            raise
        unusable = frozenset({(failure.operation, failure.family)})
    except BaseException:
        engine.close()
        raise
    again = prepare(prepared.config, unusable=unusable, **prepared.objects)
    engine = build_engine(again, on_tensor)
    try:
        engine.start()
    except BaseException:
        engine.close()
        raise
    return engine


def build_engine(prepared: Prepared, on_tensor: OnTensor = _ignore) -> EngineCore:
    """The engine of a composition; no weight is loaded before its `start`."""
    composition, objects = prepared.composition, prepared.objects
    registry = load_plugins(composition.manifests)
    build = partial(_build, registry, composition, objects)
    groups, num_blocks = composition.groups, composition.num_blocks
    cache = build("prefix_cache", PrefixCacheContext(groups, num_blocks, composition.numerics_id))
    ledger = {entry.name: entry.num_bytes for entry in prepared.ledger.entries}
    observing = ObserverContext(composition.model_name, ledger)
    tokenizer = load_tokenizer(prepared)
    return EngineCore(
        EngineParts(
            groups=groups,
            num_blocks=num_blocks,
            allocator=build(
                "kv_allocator",
                AllocatorContext(
                    groups,
                    num_blocks,
                    composition.max_model_len,
                    composition.max_num_batched_tokens,
                    cache,
                ),
            ),
            prefix_cache=cache,
            scheduler=build(
                "scheduler",
                SchedulerContext(
                    composition.max_num_seqs,
                    composition.max_num_batched_tokens,
                    composition.max_model_len,
                ),
            ),
            policy=build(
                "speculation_policy", SpeculationContext(composition.num_speculative_tokens)
            ),
            executor=build("executor", _executor_context(prepared, registry, on_tensor)),
            observers=tuple(_make(registry, part, observing) for part in composition.observers),
            max_num_seqs=composition.max_num_seqs,
            max_num_batched_tokens=composition.max_num_batched_tokens,
            max_model_len=composition.max_model_len,
            vocab_size=composition.shape.vocab_size,
            eos_token_ids=composition.facts.eos_token_ids,
            num_speculative_tokens=composition.num_speculative_tokens,
            taps=(),
            make_detokenizer=_detokenizer_factory(tokenizer),
            processor_params=_processor_params(composition),
            fingerprint=f"{composition.facts.fingerprint}/{composition.numerics_id}",
            seed=composition.seed,
        )
    )


def load_tokenizer(prepared: Prepared) -> Tokenizer | None:
    """The model's tokenizer; None when the checkpoint has none.

    Raises:
        TokenizerError: it has one that cannot be used.
    """
    from pegboard.tokenizer import load_tokenizer as load

    facts = prepared.composition.facts
    if facts.tokenizer.file is None:
        return None
    return load(facts.tokenizer, where=facts.path)


def build_worker(
    composition: Composition,
    registry: Registry,
    objects: Mapping[str, Any],
    on_tensor: OnTensor = _ignore,
) -> Worker:
    """A worker of the composition; no weight is loaded before its `start`.

    Raises:
        KernelUnusable: a kernel fails its self-test.
    """
    from pegboard.runner.runner import Runner

    return Runner(_worker_parts(composition, registry, objects, on_tensor))


def load_worker(path: Path, rank: int) -> tuple[str, Worker]:
    """The digest and the worker of a composition in a file, for a worker's own process."""
    composition = from_json(path.read_bytes())
    worker = build_worker(composition, load_plugins(composition.manifests), {})
    return composition.digest, worker


def _tokenizer_facts(config: Config, catalog: Catalog, facts: CheckpointFacts) -> TokenizerFacts:
    """The checkpoint's tokenizer, or the one that the config names instead."""
    tokenizer = facts.tokenizer
    if config.tokenizer != "auto":
        path = locate(config.tokenizer, None)
        if path.name == "tokenizer.json":
            tokenizer = dataclasses.replace(tokenizer, file=str(path))
        else:
            tokenizer = inspect_checkpoint(catalog, path)[0].tokenizer
    if config.chat_template != "auto":
        try:
            template = Path(config.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise ConfigError("chat_template", str(problem), fix="name a jinja2 file") from None
        tokenizer = dataclasses.replace(tokenizer, chat_template=template)
    return tokenizer


def _part_of(interface: str, thing: object) -> Part:
    """The part that stands for an object given in Python."""
    if interface not in CONTRACTS:
        raise ConfigError(interface, "no such interface", allowed=", ".join(CONTRACTS))
    kind = type(thing)
    origin = Origin(
        plugin=kind.__name__, distribution="object", version="", module=kind.__module__, path=""
    )
    check_product(thing, interface, kind.__name__, origin)
    manifest = getattr(kind, "manifest", None)
    if manifest is None:
        entry = Provides(
            interface=interface,
            version=max(CONTRACTS[interface].versions),
            name=kind.__name__,
            summary="an object",
        )
    else:
        entry = entry_of({"interface": interface, **manifest}, origin)
    return Part(origin=origin, entry=entry, path=interface)


def _refusal(refusals: Sequence[Refusal]) -> PluginError | CompositionRefused:
    """Every reason; an error of its own kind when there is one reason alone."""
    kinds: dict[str, type[PluginError]] = {
        "not_installed": PluginNotInstalled,
        "duplicate_name": DuplicateName,
        "options": OptionsInvalid,
    }
    only = refusals[0]
    if len(refusals) == 1 and only.code in kinds:
        return kinds[only.code](only.plugin, only.message, fix=only.fix)
    return CompositionRefused([str(refusal) for refusal in refusals])


def _check_options(composition: Composition) -> list[Refusal]:
    """Options that do not fit their models."""
    refusals = []
    for part in (
        *composition.parts.values(),
        *composition.logits_processors,
        *composition.observers,
    ):
        try:
            _options(part)
        except OptionsInvalid as problem:
            refusals.append(Refusal(code="options", plugin=part.origin.plugin, message=problem.was))
    return refusals


def _options(part: Part) -> BaseModel | None:
    """The part's options, validated; None when it takes none."""
    dotted = part.entry.options
    model = None if dotted is None else resolve_dotted(dotted, part.origin)
    return validate_options(part, model)


def _build(
    registry: Registry,
    composition: Composition,
    objects: Mapping[str, Any],
    interface: str,
    context: object,
) -> Any:
    """The interface's object: the one that was given, or one that its plugin's factory makes."""
    if interface in objects:
        return objects[interface]
    return _make(registry, composition.parts[interface], context)


def _make(registry: Registry, part: Part, context: object) -> Any:
    return registry.build(part, context, _options(part))


def _executor_context(
    prepared: Prepared, registry: Registry, on_tensor: OnTensor
) -> ExecutorContext:
    composition, objects = prepared.composition, prepared.objects
    return ExecutorContext(
        devices=(composition.device,),
        worker=lambda rank: build_worker(composition, registry, objects, on_tensor),
        worker_command=lambda rank: _worker_command(composition, rank),
    )


def _worker_command(composition: Composition, rank: int) -> list[str]:
    """argv of a worker's process; the composition travels in a private file."""
    handle, name = tempfile.mkstemp(prefix="pegboard-", suffix=".json")
    with os.fdopen(handle, "wb") as file:
        file.write(to_json(composition))
    return [sys.executable, "-m", "pegboard.runner_main", name, str(rank)]


def _detokenizer_factory(tokenizer: Tokenizer | None) -> Callable[[], Any] | None:
    from pegboard.engine.detokenizer import IncrementalDetokenizer

    return None if tokenizer is None else lambda: IncrementalDetokenizer(tokenizer)


def _processor_params(
    composition: Composition,
) -> Callable[[SamplingParams], dict[str, dict[str, Any]]]:
    """A function from a request's parameters to those of each logits processor that acts on it."""
    defaults = SamplingParams()
    models = {
        part.name: (part.entry.fields, _params_model(part))
        for part in composition.logits_processors
    }

    def params_of(sampling: SamplingParams) -> dict[str, dict[str, Any]]:
        for name in sampling.processors:
            if name not in models:
                raise RequestError(
                    f"processors.{name}", "no such logits processor", allowed=", ".join(models)
                )
        acting = {}
        for name, (fields, model) in models.items():
            values = {
                key: getattr(sampling, key)
                for key in fields
                if getattr(sampling, key) != getattr(defaults, key)
            }
            values |= sampling.processors.get(name, {})
            if values or name in sampling.processors:
                acting[name] = _validated(name, values, model)
        return acting

    return params_of


def _params_model(part: Part) -> type[BaseModel] | None:
    dotted = part.entry.params
    return None if dotted is None else resolve_dotted(dotted, part.origin)


def _validated(name: str, values: dict[str, Any], model: type[BaseModel] | None) -> dict[str, Any]:
    if model is None:
        return values
    try:
        return model.model_validate(values).model_dump()
    except ValidationError as problem:
        first = problem.errors()[0]
        path = ".".join(("processors", name, *map(str, first["loc"])))
        raise RequestError(path, first["msg"]) from None


def _worker_parts(
    composition: Composition,
    registry: Registry,
    objects: Mapping[str, Any],
    on_tensor: OnTensor,
) -> WorkerParts:
    from pegboard.runner.parts import WorkerParts

    build = partial(_build, registry, composition, objects)
    made = [(choice, _kernel(registry, composition, choice)) for choice in composition.kernels]
    kernels = {choice.operation: kernel for choice, kernel in made if choice.operation != "linear"}
    linear = {choice.format: kernel for choice, kernel in made if choice.operation == "linear"}
    processing = ProcessorContext(
        composition.shape.vocab_size, composition.max_num_seqs, composition.device
    )
    family = composition.parts["model"].name
    return WorkerParts(
        shape=composition.shape,
        groups=composition.groups,
        num_blocks=composition.num_blocks,
        layouts=composition.layouts,
        max_num_seqs=composition.max_num_seqs,
        max_num_batched_tokens=composition.max_num_batched_tokens,
        max_model_len=composition.max_model_len,
        dtype=composition.dtype,
        device=composition.device,
        num_threads=composition.num_threads,
        kernels=kernels,
        linear_kernels=linear,
        attention=build("attention", _attention_context(composition, kernels)),
        source=build("checkpoint_source", composition.facts),
        quantizer=build("quantizer", QuantizerContext(composition.facts, composition.dtype)),
        build_model=registry.factory("model", family),
        processors={
            part.name: _make(registry, part, processing) for part in composition.logits_processors
        },
        drafter=build(
            "drafter",
            DrafterContext(
                composition.num_speculative_tokens,
                composition.shape.vocab_size,
                composition.max_num_seqs,
                composition.max_model_len,
            ),
        ),
        on_tensor=on_tensor,
    )


def _kernel(registry: Registry, composition: Composition, choice: KernelChoice) -> Kernel:
    """The kernel of a choice, after its self-test."""
    context = KernelContext(
        choice.operation,
        choice.format,
        composition.dtype,
        composition.device,
        composition.num_threads,
    )
    kernel: Kernel = _make(registry, choice.part, context)
    try:
        kernel.self_test()
    except Exception as problem:
        raise KernelUnusable(
            choice.operation, choice.part.name, str(problem), named=choice.named
        ) from problem
    return kernel


def _attention_context(composition: Composition, kernels: Mapping[str, Kernel]) -> AttentionContext:
    return AttentionContext(
        layers=composition.shape.attention,
        groups=composition.groups,
        max_num_seqs=composition.max_num_seqs,
        dtype=composition.dtype,
        device=composition.device,
        num_threads=composition.num_threads,
        rotary=kernels["rotary"],  # type: ignore[arg-type]  # chosen for operation `rotary`
    )
