"""Config, checkpoint, model, devices and manifests in; a composition, or every reason against it, out.

Pure and total: what it says depends on its arguments (and on which packages are installed), it
imports no plugin and raises nothing. It knows no bytes: the plan
sizes the pool afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from pegboard.config import Config
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.device import DTYPES, DeviceFacts
from pegboard.interfaces.model import ModelShape
from pegboard.plugins.checks import check_parts, numerics_of
from pegboard.plugins.choice import INACTIVE, Chooser, Findings, Wanted
from pegboard.plugins.composition import Composition, ModelPlan, Part, Refusal, Slice
from pegboard.plugins.discovery import Catalog
from pegboard.plugins.kernels import check_all_used
from pegboard.plugins.manifest import OBJECT, Manifest
from pegboard.plugins.model_plan import InspectedDrafter, InspectedModel, plan_model

DEFAULT_MAX_STEP_MS = 200
MAX_THREADS_PER_CORE = 8
"""More threads than that for each core can only be a mistake, and each has a stack."""
MIN_MODEL_LEN = 2
"""A token of the prompt and one of the output."""


@dataclass(frozen=True)
class Inspected:
    """The inspected models, before resolving.

    Attributes:
        model_name: under which the model is served.
        target: the model whose tokens are answered.
        drafter: what a drafter needs.
        objects: interface to the parts that stand for objects given in Python.
        unusable: (operation, kernel family) whose self-test failed on this machine.
    """

    model_name: str
    target: InspectedModel
    drafter: Callable[[Part], InspectedDrafter]
    objects: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    unusable: frozenset[tuple[str, str]] = frozenset()


def resolve(
    config: Config,
    inspected: Inspected,
    devices: Sequence[DeviceFacts],
    catalog: Catalog,
) -> Composition | list[Refusal]:
    """The composition that a config means on this machine, or every reason why there is none."""
    target, findings = inspected.target, Findings()
    device = _device(config, devices, findings)
    chooser = Chooser(
        refusals=findings.refusals,
        decisions=findings.decisions,
        config=config,
        catalog=catalog,
        objects=inspected.objects,
        unusable=inspected.unusable,
        device=device,
        dtype=_dtype(config, target.facts, device, findings),
        head_sizes=_head_sizes(target),
    )
    max_model_len = _max_model_len(config, target.shape, chooser)
    num_threads = _num_threads(config, chooser)
    plan = plan_model(target, chooser)
    parts = _choose_parts(config, chooser)
    drafter = inspected.drafter(parts["drafter"]) if "drafter" in parts else InspectedDrafter()
    chooser.refusals += drafter.refusals
    models = [plan]
    if drafter.model is not None:
        models.append(_draft_plan(drafter.model, chooser))
    processors = chooser.every("logits_processor", "logits_processors", config.logits_processors)
    observers = chooser.every("observer", "observers", config.observers)
    every = {**plan.parts, **parts}
    kernels = [kernel for model in models for kernel in model.kernels]
    check_all_used(chooser, kernels)
    used = [*every.values(), *(kernel.part for kernel in kernels), *processors, *observers]
    for model in models[1:]:
        used += model.parts.values()
    check_parts(target.shape, every, used, chooser)
    if chooser.refusals:
        return list(dict.fromkeys(chooser.refusals))
    numerics = numerics_of(plan, config.drafter.verification)
    return Composition(
        model_name=inspected.model_name,
        models=tuple(models),
        placement=_placement(config, models, device),
        dtype=chooser.dtype,
        device=device.kind,
        num_threads=num_threads,
        seed=config.seed,
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_step_ms=_max_step_ms(config, numerics, chooser),
        depth=_depth(config, parts, chooser),
        draft_model=config.drafter.model,
        drafter=drafter.facts,
        num_speculative_tokens=_num_speculative_tokens(config, parts["drafter"]),
        verification=config.drafter.verification,
        verifies_kv=config.kv_cache.verify,
        parts=parts,
        logits_processors=processors,
        observers=observers,
        numerics=numerics,
        manifests=_manifests(catalog, used),
        decisions=tuple(chooser.decisions),
    )


def _draft_plan(model: InspectedModel, chooser: Chooser) -> ModelPlan:
    """The plan of the drafter's own model, by the same rules; but its numbers change no token, so it may
    take any kernel."""
    own = replace(
        chooser,
        config=chooser.config.model_copy(update={"numerics": "auto"}),
        objects={name: given for name, given in chooser.objects.items() if name != "quantizer"},
        head_sizes=_head_sizes(model),
        refusals=[],
        decisions=[],
        chosen={},
    )
    plan = plan_model(model, own)
    for interface in ("model", "checkpoint_source"):
        if interface in plan.parts:
            own.refuse_misfits(interface, plan.parts[interface])
    chooser.refusals += [
        structs.replace(refusal, message=f"drafter.model: {refusal.message}")
        for refusal in own.refusals
        if refusal not in chooser.refusals  # one that concerns the target too
    ]
    for decision in own.decisions:
        chooser.decide(f"{model.name}: {decision.key}", decision.value, decision.why)
    return plan


def _head_sizes(model: InspectedModel) -> frozenset[int]:
    return frozenset(layer.head_dim for layer in model.shape.attention)


def _placement(
    config: Config, models: Sequence[ModelPlan], device: DeviceFacts
) -> tuple[Slice, ...]:
    """A worker for each stage and tensor rank, with a slice of each model."""
    split = config.executor.tensor_parallel
    num_workers = split * config.executor.pipeline_parallel
    is_numbered = device.kind != "cpu" and num_workers > 1
    return tuple(
        Slice(
            model=plan.name,
            worker=worker,
            device=f"{device.kind}:{worker}" if is_numbered else device.kind,
            tensor_rank=worker % split,
            stage=worker // split,
        )
        for worker in range(num_workers)
        for plan in models
    )


def _device(config: Config, devices: Sequence[DeviceFacts], findings: Findings) -> DeviceFacts:
    kinds = {device.kind: device for device in devices}
    if config.device == "auto":
        kind = "cuda" if "cuda" in kinds else "cpu"
        findings.decide("device", kind, kinds[kind].name)
        return kinds[kind]
    if config.device not in kinds:
        found = ", ".join(kinds)
        message = f"device: {config.device} is not on this machine; found: {found}"
        findings.refuse("device", message)
    return kinds.get(config.device, devices[0])


def _dtype(config: Config, facts: CheckpointFacts, device: DeviceFacts, findings: Findings) -> str:
    allowed = DTYPES.get(device.kind, DTYPES["cuda"])
    if config.dtype != "auto":
        if config.dtype not in allowed:
            findings.refuse(
                "dtype",
                f"dtype: {config.dtype} does not run on {device.kind};"
                f" allowed: {', '.join(allowed)}",
            )
        return str(config.dtype)
    if device.kind == "cpu":
        findings.decide("dtype", "float32", "the device is a CPU")
        return "float32"
    stored = str(facts.config.get("dtype") or facts.config.get("torch_dtype") or "bfloat16")
    dtype = stored if stored in ("bfloat16", "float16") else "bfloat16"
    findings.decide("dtype", dtype, f"the checkpoint is in {stored}")
    return dtype


def _max_model_len(config: Config, shape: ModelShape, chooser: Chooser) -> int:
    if config.max_model_len == "auto":
        chooser.decide("max_model_len", shape.max_position, "the model's context")
        return shape.max_position
    if config.max_model_len > shape.max_position:
        chooser.refuse(
            "max_model_len",
            f"max_model_len: {config.max_model_len} is more than the model's context"
            f" of {shape.max_position} tokens",
            fix=f"max_model_len: {shape.max_position}",
        )
    if config.max_model_len < MIN_MODEL_LEN:
        chooser.refuse(
            "max_model_len",
            f"max_model_len: {config.max_model_len} has no room for a token of the prompt and one of"
            " the output",
            fix=f"max_model_len: {MIN_MODEL_LEN} or more",
        )
    return config.max_model_len


def _max_step_ms(config: Config, numerics: str, chooser: Chooser) -> int | None:
    key, wanted = "scheduler.max_step_ms", config.scheduler.max_step_ms
    if wanted == "auto" and numerics == "fast":
        chooser.decide(key, "none", "numerics are fast: how a prompt is cut would change bits")
        return None
    if wanted == "auto":
        chooser.decide(key, DEFAULT_MAX_STEP_MS, "the default: how a prompt is cut changes no bit")
        return DEFAULT_MAX_STEP_MS
    if wanted is not None and numerics == "fast":
        why = "named in the config; numerics are fast, so how a prompt is cut changes bits"
        chooser.decide(key, wanted, why)
    return wanted


def _depth(config: Config, parts: Mapping[str, Part], chooser: Chooser) -> int:
    key, wanted = "executor.depth", config.executor.depth
    if wanted != "auto":
        return wanted
    executor, drafter = parts["executor"], parts["drafter"]
    if INACTIVE not in drafter.entry.promises:
        chooser.decide(
            key, 1, f"what drafter {drafter.name!r} guesses is known when a step is over"
        )
        return 1
    chooser.decide(key, executor.entry.depth, f"executor {executor.name!r} states it")
    return executor.entry.depth


def _num_threads(config: Config, chooser: Chooser) -> int:
    cores = chooser.device.num_threads
    if config.threads == "auto":
        return cores
    if config.threads > MAX_THREADS_PER_CORE * cores:
        chooser.refuse(
            "threads",
            f"threads: {config.threads}; allowed: at most {MAX_THREADS_PER_CORE * cores},"
            f" {MAX_THREADS_PER_CORE} for each core that this process may use",
            fix=f"threads: {cores}",
        )
    return config.threads


def _choose_parts(config: Config, chooser: Chooser) -> dict[str, Part]:
    """Providers of the interfaces that have one, beside the models' own."""
    found = {
        interface: chooser.choose(Wanted(interface, key, choice))
        for interface, key, choice in (
            ("kv_allocator", "kv_cache.allocator", config.kv_cache.allocator),
            ("prefix_cache", "prefix_cache", config.prefix_cache),
            ("scheduler", "scheduler", config.scheduler),
            ("speculation_policy", "drafter.policy", config.drafter.policy),
            ("drafter", "drafter", config.drafter),
            ("executor", "executor", config.executor),
        )
    }
    return {interface: part for interface, part in found.items() if part is not None}


def _num_speculative_tokens(config: Config, drafter: Part) -> int:
    if INACTIVE in drafter.entry.promises:
        return 0
    wanted = config.drafter.num_speculative_tokens
    return drafter.entry.speculative_tokens if wanted == "auto" else wanted


def _manifests(catalog: Catalog, parts: Sequence[Part]) -> tuple[Manifest, ...]:
    origins = {part.origin for part in parts if part.origin.distribution != OBJECT}
    return tuple(catalog.manifest(origin) for origin in sorted(origins, key=str))
