"""A worker's parts, in this process or in one of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pegboard.compose.drafter_taps import taps_of
from pegboard.compose.kv_scales import read_kv_scales
from pegboard.compose.making import Maker
from pegboard.compose.tied_head import check_tied_head
from pegboard.errors import INTERRUPTS, KernelUnusable
from pegboard.interfaces.attention import AttentionContext
from pegboard.interfaces.checkpoint import CheckpointSource
from pegboard.interfaces.drafter import DrafterContext
from pegboard.interfaces.executor import Worker
from pegboard.interfaces.kernel import Kernel, KernelContext, LinearKernel, RotaryKernel
from pegboard.interfaces.logits_processor import ProcessorContext
from pegboard.interfaces.quantizer import QuantizerContext
from pegboard.plugins.composition import (
    Composition,
    KernelChoice,
    from_json,
)
from pegboard.plugins.loader import load_plugins

if TYPE_CHECKING:
    from pegboard.runner.parts import WorkerParts

OnTensor = Callable[[str], None]
"""Told the name of each parameter as it is loaded."""


def ignore(name: str) -> None:
    """The `OnTensor` of those who do not want to know."""


def build_worker(composition: Composition, maker: Maker, on_tensor: OnTensor = ignore) -> Worker:
    """A worker of the composition; no weight is loaded before its `start`.

    Raises:
        KernelUnusable: a kernel fails its self-test.
    """
    from pegboard.runner.runner import Runner

    return Runner(worker_parts(composition, maker, on_tensor))


def load_worker(path: Path, rank: int) -> tuple[str, Worker]:
    """The digest and the worker of a composition in a file, for a worker's own process."""
    composition = from_json(path.read_bytes())
    worker = build_worker(composition, Maker(load_plugins(composition.manifests), {}))
    return composition.digest, worker


def worker_parts(composition: Composition, maker: Maker, on_tensor: OnTensor) -> WorkerParts:
    """Built parts and sizes of a worker; kernels have passed their self-tests."""
    from pegboard.runner.parts import WorkerParts

    made = [(choice, _kernel(maker, composition, choice)) for choice in composition.kernels]
    kernels = {choice.operation: kernel for choice, kernel in made if choice.operation != "linear"}
    linear = {
        choice.format: cast(LinearKernel, kernel)
        for choice, kernel in made
        if choice.operation == "linear"
    }
    processing = ProcessorContext(
        composition.shape.vocab_size,
        composition.max_num_seqs,
        composition.device,
        composition.facts.eos_token_ids,
    )

    def build(interface: str, context: object) -> Any:
        return maker.make(composition.parts[interface], context)

    drafter = build(
        "drafter",
        DrafterContext(
            composition.num_speculative_tokens,
            composition.shape.vocab_size,
            composition.max_num_seqs,
            composition.max_model_len,
            composition.draft_model,
            composition.dtype,
            composition.device,
            composition.num_threads,
        ),
    )
    source = build("checkpoint_source", composition.facts)
    check_tied_head(composition, source)

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
        num_threads=composition.torch_threads,
        kernels=kernels,
        linear_kernels=linear,
        attention=build("attention", _attention_context(composition, kernels, source)),
        source=source,
        quantizer=build("quantizer", QuantizerContext(composition.facts, composition.dtype)),
        build_model=maker.factory(composition.parts["model"]),
        processors={
            part.name: maker.make(part, processing) for part in composition.logits_processors
        },
        drafter=drafter,
        taps=taps_of(drafter, composition.parts["drafter"], composition.shape),
        verifies_trees=composition.verifies_trees,
        on_tensor=on_tensor,
    )


def _kernel(maker: Maker, composition: Composition, choice: KernelChoice) -> Kernel:
    """The kernel of a choice, after its self-test."""
    context = KernelContext(
        choice.operation,
        choice.format,
        composition.dtype,
        composition.device,
        composition.num_threads,
    )
    kernel: Kernel = maker.make(choice.part, context)
    try:
        kernel.self_test()
    except INTERRUPTS:
        raise
    except BaseException as problem:
        raise KernelUnusable(
            choice.operation, choice.part.name, str(problem), named=choice.named
        ) from problem
    return kernel


def _attention_context(
    composition: Composition, kernels: Mapping[str, Kernel], source: CheckpointSource
) -> AttentionContext:
    return AttentionContext(
        layers=composition.shape.attention,
        groups=composition.groups,
        max_num_seqs=composition.max_num_seqs,
        dtype=composition.dtype,
        device=composition.device,
        num_threads=composition.num_threads,
        rotary=cast(RotaryKernel, kernels["rotary"]),
        kv_scales=read_kv_scales(composition, source),
    )
