"""Config, checkpoint, model, devices and manifests in; a composition, or every reason against it, out.

Pure and total: what it says depends on its arguments (and on which packages are installed), it
imports no plugin and raises nothing. It knows no bytes: the plan
sizes the pool afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pegboard.config import Choice, Config
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.device import DTYPES, DeviceFacts
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.model import ModelShape
from pegboard.plugins.checks import attends, check_parts, layout_of, numerics_of, reads, unread
from pegboard.plugins.choice import INACTIVE, Chooser, Wanted
from pegboard.plugins.composition import Composition, Decision, Part, Refusal
from pegboard.plugins.discovery import Catalog
from pegboard.plugins.kernels import choose_kernels, numerics_id, settle_quantizer
from pegboard.plugins.manifest import OBJECT, Manifest

DEFAULT_BLOCK_SIZE = 16
DEFAULT_NUM_SPECULATIVE_TOKENS = 4
DEFAULT_MAX_STEP_MS = 200
MAX_THREADS_PER_CORE = 8
"""More threads than that for each core can only be a mistake, and each has a stack."""
MIN_MODEL_LEN = 2
"""A token of the prompt and one of the output."""


def listed_formats(quantizer: Part) -> tuple[str, ...]:
    """The weight formats that a quantizer's manifest lists."""
    assert not isinstance(quantizer.entry.formats, str)
    return quantizer.entry.formats


def as_it_is(quantizer: Part) -> tuple[Part, ...]:
    """A quantizer whose options leave nothing open."""
    return (quantizer,)


@dataclass(frozen=True)
class Inspected:
    """What was read of checkpoint and model before resolving.

    Attributes:
        model_name: under which the model is served.
        facts, source: the checkpoint and the part that reads it.
        shape, model: the model and the part that builds it.
        objects: interface to the parts that stand for objects given in Python.
        unusable: (operation, kernel family) whose self-test failed on this machine.
        formats: what a quantizer makes of the checkpoint's weights.
        alternatives: a quantizer with what its options may stand for, best first.
    """

    model_name: str
    facts: CheckpointFacts
    source: Part
    shape: ModelShape
    model: Part
    objects: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    unusable: frozenset[tuple[str, str]] = frozenset()
    formats: Callable[[Part], tuple[str, ...]] = listed_formats
    alternatives: Callable[[Part], tuple[Part, ...]] = as_it_is


def resolve(
    config: Config,
    inspected: Inspected,
    devices: Sequence[DeviceFacts],
    catalog: Catalog,
) -> Composition | list[Refusal]:
    """The composition that a config means on this machine, or every reason why there is none."""
    facts, shape = inspected.facts, inspected.shape
    decisions: list[Decision] = []
    refusals: list[Refusal] = []
    device = _device(config, devices, decisions, refusals)
    dtype = _dtype(config, facts, device, decisions, refusals)
    chooser = Chooser(
        catalog=catalog,
        objects=inspected.objects,
        device=device,
        dtype=dtype,
        head_sizes=frozenset(layer.head_dim for layer in shape.attention),
        refusals=refusals,
        decisions=decisions,
    )
    max_model_len = _max_model_len(config, shape, chooser)
    num_threads = _num_threads(config, chooser)
    parts = _choose_parts(config, inspected, chooser)
    if "quantizer" in parts:
        alternatives = inspected.alternatives(parts["quantizer"])
        parts["quantizer"] = settle_quantizer(
            chooser, alternatives, inspected.formats, config, inspected.unusable
        )
    kernels = choose_kernels(
        chooser,
        inspected.formats(parts["quantizer"]) if "quantizer" in parts else (),
        parts.get("attention"),
        config,
        inspected.unusable,
    )
    processors = chooser.every(
        "logits_processor", _several("logits_processor", config.logits_processors)
    )
    observers = chooser.every("observer", _several("observer", config.observers))
    groups = _groups(config, shape, dtype, parts.get("attention"), chooser)
    used = [*parts.values(), *(kernel.part for kernel in kernels), *processors, *observers]
    check_parts(config, shape, parts, used, chooser)
    if refusals:
        return _once(refusals)
    invariant = [kernel.row_invariant for kernel in kernels]
    numerics = numerics_of(config, invariant, parts["attention"], chooser)
    if numerics is None:
        return _once(refusals)
    return Composition(
        model_name=inspected.model_name,
        facts=facts,
        shape=shape,
        dtype=dtype,
        device=device.kind,
        num_threads=num_threads,
        seed=config.seed,
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_step_ms=_max_step_ms(config, numerics, chooser),
        draft_model=config.drafter.model,
        num_speculative_tokens=_num_speculative_tokens(config, parts["drafter"]),
        verifies_kv=config.kv_cache.verify,
        parts=parts,
        kernels=kernels,
        logits_processors=processors,
        observers=observers,
        groups=groups,
        layouts=(),
        num_blocks=(),
        numerics=numerics,
        numerics_id=numerics_id(kernels, parts, device, dtype, groups),
        manifests=_manifests(catalog, used),
        decisions=tuple(decisions),
    )


def _device(
    config: Config,
    devices: Sequence[DeviceFacts],
    decisions: list[Decision],
    refusals: list[Refusal],
) -> DeviceFacts:
    kinds = {device.kind: device for device in devices}
    if config.device == "auto":
        kind = "cuda" if "cuda" in kinds else "cpu"
        decisions.append(Decision(key="device", value=kind, why=kinds[kind].name))
        return kinds[kind]
    if config.device not in kinds:
        refusals.append(
            Refusal(
                code="device",
                plugin="",
                message=f"device: {config.device} is not on this machine; found: {', '.join(kinds)}",
            )
        )
    return kinds.get(config.device, devices[0])


def _dtype(
    config: Config,
    facts: CheckpointFacts,
    device: DeviceFacts,
    decisions: list[Decision],
    refusals: list[Refusal],
) -> str:
    allowed = DTYPES.get(device.kind, DTYPES["cuda"])
    if config.dtype != "auto":
        if config.dtype not in allowed:
            refusals.append(
                Refusal(
                    code="dtype",
                    plugin="",
                    message=f"dtype: {config.dtype} does not run on {device.kind};"
                    f" allowed: {', '.join(allowed)}",
                )
            )
        return str(config.dtype)
    if device.kind == "cpu":
        decisions.append(Decision(key="dtype", value="float32", why="the device is a CPU"))
        return "float32"
    stored = str(facts.config.get("dtype") or facts.config.get("torch_dtype") or "bfloat16")
    dtype = stored if stored in ("bfloat16", "float16") else "bfloat16"
    decisions.append(Decision(key="dtype", value=dtype, why=f"the checkpoint is in {stored}"))
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


def _choose_parts(config: Config, inspected: Inspected, chooser: Chooser) -> dict[str, Part]:
    facts = inspected.facts
    quantizer = _wanted("quantizer", "quantizer", config.quantizer)
    quantizer.known_as = (layout_of(facts), facts.quantization or "none")
    methods = {m for one in chooser.catalog.offers("quantizer") for m in one.entry.methods}
    quantizer.unread = unread(methods - {"none"}, facts)
    found = {
        "checkpoint_source": inspected.source,
        "model": inspected.model,
        "quantizer": chooser.choose(
            quantizer,
            lambda entry: reads(entry, facts),
        ),
        "attention": chooser.choose(
            _wanted("attention", "attention", config.attention),
            lambda entry: attends(entry, inspected.shape, _encoding(config)),
        ),
        "kv_allocator": chooser.choose(
            _wanted("kv_allocator", "kv_cache.allocator", config.kv_cache.allocator)
        ),
        "prefix_cache": chooser.choose(
            _wanted("prefix_cache", "prefix_cache", config.prefix_cache)
        ),
        "scheduler": chooser.choose(_wanted("scheduler", "scheduler", config.scheduler)),
        "speculation_policy": chooser.choose(
            _wanted("speculation_policy", "drafter.policy", config.drafter.policy)
        ),
        "drafter": chooser.choose(_wanted("drafter", "drafter", config.drafter)),
        "executor": chooser.choose(_wanted("executor", "executor", config.executor)),
    }
    return {interface: part for interface, part in found.items() if part is not None}


def _wanted(interface: str, key: str, choice: Choice) -> Wanted:
    return Wanted(
        interface, key, choice.name, choice.options, f"{key}.options", is_named=choice.is_named
    )


def _several(interface: str, choices: Sequence[Choice]) -> list[Wanted]:
    key = f"{interface}s" if interface == "observer" else "logits_processors"
    return [_wanted(interface, f"{key}[{i}]", choice) for i, choice in enumerate(choices)]


def _encoding(config: Config) -> str:
    return "none" if config.kv_cache.encoding == "auto" else config.kv_cache.encoding


def _groups(
    config: Config, shape: ModelShape, dtype: str, attention: Part | None, chooser: Chooser
) -> tuple[KVGroup, ...]:
    legal = attention.entry.requires.block_sizes if attention is not None else ()
    wanted = config.kv_cache.block_size
    if wanted == "auto":
        block_size = DEFAULT_BLOCK_SIZE if not legal or DEFAULT_BLOCK_SIZE in legal else legal[0]
        chooser.decide("kv_cache.block_size", block_size, "the default that the attention allows")
    else:
        block_size = wanted
        if legal and block_size not in legal and attention is not None:
            chooser.refuse(
                "block_size",
                f"kv_cache.block_size: {attention.name} has no blocks of {block_size} tokens;"
                f" allowed: {', '.join(map(str, legal))}",
                plugin=attention.origin.plugin,
            )
    layers: dict[tuple[int, int, int | None], list[int]] = {}
    for layer, attention_of in enumerate(shape.attention):
        key = (attention_of.num_kv_heads, attention_of.head_dim, attention_of.window)
        layers.setdefault(key, []).append(layer)
    return tuple(
        KVGroup(tuple(members), heads, head_dim, block_size, window, _encoding(config), dtype)
        for (heads, head_dim, window), members in layers.items()
    )


def _num_speculative_tokens(config: Config, drafter: Part) -> int:
    if INACTIVE in drafter.entry.promises:
        return 0
    wanted = config.drafter.num_speculative_tokens
    return DEFAULT_NUM_SPECULATIVE_TOKENS if wanted == "auto" else wanted


def _manifests(catalog: Catalog, parts: Sequence[Part]) -> tuple[Manifest, ...]:
    origins = {part.origin for part in parts if part.origin.distribution != OBJECT}
    return tuple(catalog.manifest(origin) for origin in sorted(origins, key=str))


def _once(refusals: Sequence[Refusal]) -> list[Refusal]:
    return list(dict.fromkeys(refusals))
