"""The account of a composition: bytes by name, the KV pool's size, the longest sequence it holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import msgspec

from pegboard.config import Config
from pegboard.errors import ManifestFunctionFailed
from pegboard.interfaces.device import DeviceFacts
from pegboard.interfaces.dtypes import ITEM_BYTES
from pegboard.interfaces.kv import KVGroup, TensorSpec
from pegboard.interfaces.model import QUANTIZABLE
from pegboard.interfaces.workload import Workload, logprobs_rows
from pegboard.planner.tensors import weight_of
from pegboard.plugins.choice import INACTIVE
from pegboard.plugins.composition import Composition, Decision, ModelPlan, Part, Refusal
from pegboard.plugins.functions import ask, named_function
from pegboard.plugins.loader import options_of
from pegboard.plugins.model_plan import TARGET
from pegboard.plugins.resolver import MIN_MODEL_LEN

CUDA_FRACTION = 0.9
CPU_FRACTION = 0.25


class LedgerEntry(msgspec.Struct, frozen=True):
    """Bytes that something will take, and the plugin that takes them."""

    name: str
    num_bytes: int
    plugin: str


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a running engine.

    Attributes:
        entries: by name.
        device_bytes: memory of the device.
        available_bytes: of it, free before the start.
        kv_budget_bytes: what the KV pool may take.
        num_blocks: of each KV group, block 0 included.
        block_bytes: of one block of each group, all its layers.
        max_model_len: most tokens a sequence.
        num_full_sequences: sequences of max_model_len that the pool holds at once.
    """

    entries: tuple[LedgerEntry, ...]
    device_bytes: int
    available_bytes: int
    kv_budget_bytes: int
    num_blocks: tuple[int, ...]
    block_bytes: tuple[int, ...]
    max_model_len: int
    num_full_sequences: float

    @property
    def total_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)


def account(
    composition: Composition, config: Config, devices: Sequence[DeviceFacts]
) -> tuple[Composition, Ledger] | list[Refusal]:
    """Sizes the KV pool, and lowers `max_model_len` where it is open and the pool needs it.

    Args:
        composition: without a pool.
        config: says the pool's `memory`, and whether `max_model_len` is open.
        devices: of this machine.

    Returns:
        The composition with layouts and block counts filled in, and its ledger; or every reason why
        it does not fit.
    """
    device = next(device for device in devices if device.kind == composition.device)
    activations = _activations(composition)
    entries = [
        *(entry for plan in composition.models for entry in _weights(plan, composition.dtype)),
        LedgerEntry(
            "activations", activations.num_bytes, composition.target.parts["model"].origin.plugin
        ),
        _logprobs(composition),
        *_rejection(composition),
        *_estimates(composition),
    ]
    fixed = sum(entry.num_bytes for entry in entries)
    models = tuple(
        msgspec.structs.replace(plan, layouts=_layouts(plan)) for plan in composition.models
    )
    block_bytes = _block_bytes(composition, models)
    memory = config.kv_cache.memory
    budget = _budget(memory, device, fixed)
    problem = _does_not_fit(fixed, budget, device)
    if problem is not None:
        lasting = fixed - activations.num_bytes
        if _does_not_fit(lasting, _budget(memory, device, lasting), device) is None:
            problem = _too_busy(composition, activations, lasting, device)
        return [problem]
    max_model_len = composition.max_model_len
    longest = _longest(composition, block_bytes, budget)
    if (longest < max_model_len and config.max_model_len != "auto") or longest < MIN_MODEL_LEN:
        return [_too_long(composition, block_bytes, budget, longest)]
    decisions = composition.decisions
    if longest < max_model_len:
        why = f"the KV pool of {size_text(budget)} holds {longest} tokens of one sequence"
        decisions += (Decision(key="max_model_len", value=str(longest), why=why),)
        max_model_len = longest
    fitted = msgspec.structs.replace(
        composition, models=models, max_model_len=max_model_len, decisions=decisions
    )
    num_blocks = _num_blocks(fitted, block_bytes, budget)
    kv = _kv_entries(fitted, num_blocks, block_bytes)
    ledger = Ledger(
        entries=(*entries, *kv),
        device_bytes=device.total_bytes,
        available_bytes=device.available_bytes,
        kv_budget_bytes=budget,
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        max_model_len=max_model_len,
        num_full_sequences=min(
            (blocks - 1) / _blocks_of(fitted, group, max_model_len)
            for blocks, group in zip(num_blocks, fitted.groups, strict=True)
        ),
    )
    return _with_blocks(fitted, num_blocks), ledger


def _with_blocks(composition: Composition, num_blocks: Sequence[int]) -> Composition:
    """The composition with the number of blocks of each KV group."""
    left = iter(num_blocks)
    models = tuple(
        msgspec.structs.replace(plan, num_blocks=tuple(islice(left, len(plan.groups))))
        for plan in composition.models
    )
    return msgspec.structs.replace(composition, models=models)


def _weights(plan: ModelPlan, dtype: str) -> list[LedgerEntry]:
    quantizer = plan.parts["quantizer"]
    resident = named_function(quantizer, "resident_bytes")
    options = options_of(quantizer)
    item = ITEM_BYTES[dtype]
    sums: dict[str, int] = {}
    for parameter in plan.shape.parameters:
        if parameter.kind in QUANTIZABLE:
            size = resident(weight_of(parameter), plan.facts, dtype, options)
        else:
            size = math.prod(parameter.shape) * item
        name = {"embedding": "embedding", "head": "head"}.get(parameter.kind, "layers")
        sums[name] = sums.get(name, 0) + size
    return [
        LedgerEntry(f"{_whose(plan.name)}weights: {name}", size, quantizer.origin.plugin)
        for name, size in sums.items()
    ]


def _whose(model: str) -> str:
    """The prefix of ledger lines of models other than the target."""
    return "" if model == TARGET else f"{model}: "


@dataclass(frozen=True)
class _Activations:
    """Bytes beside weights and KV: hidden states and the widest products of a layer, which grow with
    the tokens of a step; the logits of sampled rows, and the tables of token ids and blocks, which grow
    with the sequences."""

    of_tokens: int
    of_sequences: int

    @property
    def num_bytes(self) -> int:
        return self.of_tokens + self.of_sequences


def _activations(composition: Composition) -> _Activations:
    tokens, sequences = composition.max_num_batched_tokens, composition.max_num_seqs
    sampled = min(sequences * (1 + composition.num_speculative_tokens), tokens)
    of_tokens = of_sequences = 0
    for plan in composition.models:
        shape, attention = plan.shape, plan.shape.attention[0]
        widest = 2 * shape.intermediate_size + shape.hidden_size
        heads = 3 * attention.num_heads * attention.head_dim
        hidden = widest + heads + 2 * shape.hidden_size
        of_tokens += tokens * hidden * ITEM_BYTES[composition.dtype]
        of_sequences += 3 * sampled * shape.vocab_size * ITEM_BYTES["float32"]
    taps = len(composition.drafter.taps) * composition.target.shape.hidden_size
    of_tokens += 2 * tokens * taps * ITEM_BYTES[composition.dtype]
    tables = sequences * composition.max_model_len * ITEM_BYTES["int32"]
    return _Activations(of_tokens, of_sequences + 2 * tables)


def _logprobs(composition: Composition) -> LedgerEntry:
    """Logits of the places whose logprobs are made at a time, their logarithms, and comparisons."""
    vocab_size = composition.target.shape.vocab_size
    rows = logprobs_rows(vocab_size)
    num_bytes = 3 * rows * vocab_size * ITEM_BYTES["float32"]
    plugin = composition.target.parts["model"].origin.plugin
    return LedgerEntry(f"logprobs, of {rows} places at a time", num_bytes, plugin)


def _rejection(composition: Composition) -> Iterator[LedgerEntry]:
    """The distributions that drafts were drawn from, as the drafter and the worker hold them, and what is
    computed of a few of them at a time."""
    if composition.verification == "exact":
        return
    vocab_size = composition.target.shape.vocab_size
    held = 2 * composition.max_num_seqs * composition.num_speculative_tokens * ITEM_BYTES["float32"]
    computed = 6 * logprobs_rows(vocab_size) * ITEM_BYTES["float64"]
    yield LedgerEntry(
        "probabilities of drafts",
        (held + computed) * vocab_size,
        composition.parts["drafter"].origin.plugin,
    )


def _estimates(composition: Composition) -> Iterator[LedgerEntry]:
    """The parts' own estimates of memory beside weights and KV."""
    for plan in composition.models:
        kernels = (choice.part for choice in plan.kernels)
        yield from _estimates_of((*plan.parts.values(), *kernels), plan, composition)
    others = (
        *composition.parts.values(),
        *composition.logits_processors,
        *composition.observers,
    )
    yield from _estimates_of(others, composition.target, composition)


def _estimates_of(
    parts: Iterable[Part], plan: ModelPlan, composition: Composition
) -> Iterator[LedgerEntry]:
    workload = Workload(
        shape=plan.shape,
        dtype=composition.dtype,
        device=composition.device,
        max_num_seqs=composition.max_num_seqs,
        max_num_batched_tokens=composition.max_num_batched_tokens,
        max_model_len=composition.max_model_len,
        num_speculative_tokens=composition.num_speculative_tokens,
    )
    named = {(part.entry.interface, part.name): part for part in parts}
    for (interface, name), part in named.items():
        if part.entry.estimate is not None:
            num_bytes = ask(part, "estimate", replace(workload, options=options_of(part)))
            line = f"{_whose(plan.name)}{interface}: {name}"
            yield LedgerEntry(line, num_bytes, part.origin.plugin)


def _layouts(plan: ModelPlan) -> tuple[tuple[TensorSpec, ...], ...]:
    attention = plan.parts["attention"]
    layouts = tuple(tuple(ask(attention, "layout", group)) for group in plan.groups)
    for spec in (spec for layout in layouts for spec in layout):
        if spec.dtype not in ITEM_BYTES or min(spec.shape, default=0) < 1:
            raise attention.origin.error(
                ManifestFunctionFailed,
                f"its layout {attention.entry.layout!r} answered a tensor {spec.name!r} of"
                f" {spec.dtype} {list(spec.shape)}",
                allowed=f"sizes from 1 on, and {', '.join(ITEM_BYTES)}",
            )
    return layouts


def _block_bytes(composition: Composition, models: Sequence[ModelPlan]) -> tuple[int, ...]:
    """Of a block of each group, with what the drafter keeps beside one of its first group's."""
    num_bytes = [
        len(group.layers) * sum(math.prod(spec.shape) * ITEM_BYTES[spec.dtype] for spec in layout)
        for plan in models
        for group, layout in zip(plan.groups, plan.layouts, strict=True)
    ]
    if len(models) > 1:
        kept = composition.drafter.kept_a_block * ITEM_BYTES[composition.dtype]
        num_bytes[len(models[0].groups)] += kept
    return tuple(num_bytes)


def _budget(memory: int | float | str, device: DeviceFacts, fixed: int) -> int:
    if memory == "auto":
        if device.kind == "cpu":
            return int(CPU_FRACTION * device.available_bytes)
        memory = CUDA_FRACTION
    if isinstance(memory, float):
        return int(memory * device.total_bytes) - fixed
    return int(memory)


def _does_not_fit(fixed: int, budget: int, device: DeviceFacts) -> Refusal | None:
    """The refusal of a pool that does not fit beside the other memory; None: it fits."""
    if budget <= 0 or fixed + budget > device.total_bytes:
        return Refusal(
            code="memory",
            message=f"kv_cache.memory: weights and activations take {size_text(fixed)} and the KV pool"
            f" would get {size_text(budget)}, but {device.name} has {size_text(device.total_bytes)}",
            fix="lower kv_cache.memory, or take a smaller model or dtype",
        )
    if fixed > device.available_bytes:
        return Refusal(
            code="memory",
            message=f"weights and activations take {size_text(fixed)}, but only"
            f" {size_text(device.available_bytes)} of {device.name} are free",
            fix="free memory, or take a smaller model or dtype",
        )
    return None


def _too_busy(
    composition: Composition, activations: _Activations, lasting: int, device: DeviceFacts
) -> Refusal:
    """All would fit but for the activations: the setting that makes the most of them is at fault."""
    if activations.of_tokens > activations.of_sequences:
        key, value, size = "max_num_batched_tokens", composition.max_num_batched_tokens, "tokens"
        num_bytes, also = activations.of_tokens, ""
    else:
        key, value, size = "max_num_seqs", composition.max_num_seqs, "sequences"
        num_bytes = activations.of_sequences
        also = f" of up to {composition.max_model_len} tokens"
    return Refusal(
        code="memory",
        message=f"scheduler.{key}: the activations of {value} {size}{also} take {size_text(num_bytes)},"
        f" beside weights of {size_text(lasting)}, and {device.name} has"
        f" {size_text(device.total_bytes)}, of which {size_text(device.available_bytes)} are free",
        fix=f"lower scheduler.{key}" + (" or max_model_len" if also else ""),
    )


def _blocks_of(composition: Composition, group: KVGroup, num_tokens: int) -> int:
    """Blocks that a sequence of so many tokens holds at most at one time."""
    past = composition.slots_past(group.model)
    held = num_tokens + past
    if group.window is not None:
        held = min(
            held, group.window + composition.max_num_batched_tokens + past + group.block_size
        )
    return math.ceil(held / group.block_size)


def _sequence_bytes(composition: Composition, block_bytes: Sequence[int], num_tokens: int) -> int:
    """Bytes of a pool that holds one sequence; each group's block 0 included."""
    return sum(
        (1 + _blocks_of(composition, group, num_tokens)) * size
        for group, size in zip(composition.groups, block_bytes, strict=True)
    )


def _longest(composition: Composition, block_bytes: Sequence[int], budget: int) -> int:
    """The longest sequence, up to max_model_len, that the budget holds."""
    low, high = 0, composition.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if _sequence_bytes(composition, block_bytes, middle) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def _num_blocks(
    composition: Composition, block_bytes: Sequence[int], budget: int
) -> tuple[int, ...]:
    """The worst case, or what the budget holds of it, split in proportion to it."""
    sequences = composition.max_num_seqs
    if INACTIVE not in composition.parts["prefix_cache"].entry.promises:
        sequences *= 2
    least = [
        _blocks_of(composition, group, composition.max_model_len) for group in composition.groups
    ]
    spare = budget - sum((1 + n) * size for n, size in zip(least, block_bytes, strict=True))
    another = sum(n * size for n, size in zip(least, block_bytes, strict=True))
    more = min(sequences - 1, spare / another)
    return tuple(1 + n + int(more * n) for n in least)


def _kv_entries(
    composition: Composition, num_blocks: Sequence[int], block_bytes: Sequence[int]
) -> list[LedgerEntry]:
    entries = []
    for group, blocks, size in zip(composition.groups, num_blocks, block_bytes, strict=True):
        kind = "full" if group.window is None else f"window {group.window}"
        plugin = composition.plan(group.model).parts["attention"].origin.plugin
        name = (
            f"KV: {blocks} blocks of {group.block_size} tokens, {len(group.layers)} layers, {kind}"
        )
        entries.append(LedgerEntry(_whose(group.model) + name, blocks * size, plugin))
    return entries


def _too_long(
    composition: Composition, block_bytes: Sequence[int], budget: int, longest: int
) -> Refusal:
    needed = _sequence_bytes(composition, block_bytes, composition.max_model_len)
    return Refusal(
        code="max_model_len",
        message=f"max_model_len: one sequence of {composition.max_model_len} tokens takes"
        f" {size_text(needed)} of KV, and the pool has {size_text(budget)}",
        fix=f"max_model_len: {longest}" if longest >= MIN_MODEL_LEN else "raise kv_cache.memory",
    )


def size_text(num_bytes: int) -> str:
    """A size in the larger unit of which it has one."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
