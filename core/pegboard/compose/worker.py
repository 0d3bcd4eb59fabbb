"""A worker's parts, in this process or in one of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, cast

from pegboard.compose.drafter_context import drafter_context, refused, taps_of
from pegboard.compose.kv_scales import read_kv_scales
from pegboard.compose.making import Maker
from pegboard.compose.tied_head import check_tied_head
from pegboard.errors import INTERRUPTS, EngineError, KernelUnusable, PegboardError, PluginFailed
from pegboard.interfaces.attention import AttentionContext
from pegboard.interfaces.drafter import OwnLayers, SampledDrafter
from pegboard.interfaces.executor import Worker
from pegboard.interfaces.kernel import Kernel, KernelContext, LinearKernel, RotaryKernel
from pegboard.interfaces.logits_processor import ProcessorContext
from pegboard.interfaces.quantizer import QuantizerContext
from pegboard.plugins.composition import Composition, KernelChoice, Slice, from_json
from pegboard.plugins.guard import culprit, failure

if TYPE_CHECKING:
    from pegboard.models.layers import LayerBuilder
    from pegboard.runner.model_unit import UnitParts
    from pegboard.runner.parts import WorkerParts
    from pegboard.runner.text_model import TextModel

OnTensor = Callable[[str], None]
"""Told the name of each parameter as it is loaded."""


def ignore(name: str) -> None:
    """The `OnTensor` of those who do not want to know."""


def build_worker(
    composition: Composition, maker: Maker, on_tensor: OnTensor = ignore, rank: int = 0
) -> Worker:
    """A worker of the composition; no weight is loaded before its `start`.

    Raises:
        KernelUnusable: a kernel fails its self-test.
    """
    from pegboard.runner.runner import Runner

    return Runner(worker_parts(composition, maker, on_tensor, rank))


def start_worker(
    data: bytes, digest: str, rank: int, on_built: Callable[[], None], on_tensor: OnTensor
) -> Worker:
    """A worker of a composition that came from another process, with its weights loaded.

    Args:
        data: the composition, as JSON.
        digest: which one it should be.
        rank: which of its workers.
        on_built: called once all parts are made.
        on_tensor: told the name of each parameter as it is loaded.

    Raises:
        EngineError: it is another composition.
        KernelUnusable: a kernel fails its self-test.
        PluginError: a plugin's part cannot be made, or a plugin raised.
    """
    composition = from_json(data)
    if composition.digest != digest:
        raise EngineError(
            f"the worker reads the composition {digest[:12]} as {composition.digest[:12]}; fix: install"
            " the same version of Pegboard where the worker runs"
        )
    _check_versions(composition)
    with blaming(composition):
        worker = build_worker(composition, Maker(composition, {}), on_tensor, rank)
        on_built()
        try:
            worker.start()
        except BaseException:
            worker.close()
            raise
    return worker


def _check_versions(composition: Composition) -> None:
    """Another machine may have other versions installed, which would compute something else."""
    for manifest in composition.manifests:
        name, wanted = manifest.origin.distribution, manifest.origin.version
        found = wanted
        with suppress(PackageNotFoundError):  # a single file; else its import says so
            found = version(name)
        if found != wanted:
            raise EngineError(
                f"the worker has {name} {found}, and the composition was made with {wanted}; fix: install"
                f" {name} {wanted} where the worker runs"
            )


@contextmanager
def blaming(composition: Composition) -> Iterator[None]:
    """Raises PluginFailed when what ended a start was raised in a plugin's files."""
    try:
        yield
    except (PegboardError, *INTERRUPTS):
        raise
    except BaseException as problem:
        origin = culprit(problem, [manifest.origin for manifest in composition.manifests])
        if origin is None:
            raise
        raise failure(PluginFailed, origin, "starting the engine", problem) from problem


def worker_parts(
    composition: Composition, maker: Maker, on_tensor: OnTensor = ignore, rank: int = 0
) -> WorkerParts:
    """Built parts and sizes of a worker; kernels have passed their self-tests."""
    from pegboard.runner.draft_unit import DrafterModels
    from pegboard.runner.parts import WorkerParts

    target = composition.target
    units = _UnitMaker(composition, maker, on_tensor)
    placed = [piece for piece in composition.placement if piece.worker == rank]
    made = {piece.model: units.make(piece) for piece in placed}
    own = next((made[plan.name] for plan in composition.models[1:]), None)
    models = DrafterModels(composition.drafter.slots)
    part = composition.parts["drafter"]
    drafter = maker.make(part, drafter_context(composition, models, made[target.name], own))
    if own is not None and models.unit is None:
        allowed = "unit or load_model of its context, once, in its factory"
        raise refused(part, "describes a model and makes none", allowed)
    processing = ProcessorContext(
        target.shape.vocab_size,
        composition.max_num_seqs,
        composition.device,
        target.facts.eos_token_ids,
    )
    if composition.verification == "rejection" and not isinstance(drafter, SampledDrafter):
        raise refused(part, "promises probabilities", "an object of SampledDrafter")
    return WorkerParts(
        units=(made[target.name], *(() if models.unit is None else (models.unit.parts,))),
        max_num_seqs=composition.max_num_seqs,
        max_model_len=composition.max_model_len,
        num_threads=composition.torch_threads,
        processors={
            part.name: maker.make(part, processing) for part in composition.logits_processors
        },
        stateful_processors=composition.stateful_processors,
        drafter=drafter,
        drafter_models=models,
        taps=taps_of(drafter, part, composition),
        verification=composition.verification,
        num_speculative_tokens=composition.num_speculative_tokens,
    )


def load_text_model(composition: Composition) -> TextModel:
    """The target of a composition of one sequence, loaded for commands."""
    from pegboard.runner.text_model import TextModel

    return TextModel(target_unit(composition), composition.torch_threads)


def target_unit(composition: Composition) -> UnitParts:
    """The parts of the target's unit, for commands."""
    units = _UnitMaker(composition, Maker(composition, {}), ignore)
    return units.make(composition.placement[0])


class _UnitMaker:
    """Makes the parts of a worker's units. Models that choose one kernel share it."""

    def __init__(self, composition: Composition, maker: Maker, on_tensor: OnTensor) -> None:
        self._composition = composition
        self._maker = maker
        self._on_tensor = on_tensor
        self._kernels: dict[tuple[str, str, str], Kernel] = {}

    def make(self, piece: Slice) -> UnitParts:
        """The parts of the unit of a placed slice."""
        from pegboard.runner.model_unit import UnitParts

        composition, maker = self._composition, self._maker
        plan = composition.plan(piece.model)
        source = maker.make(plan.parts["checkpoint_source"], plan.facts)
        check_tied_head(plan, source)
        own = {choice.operation: self._kernel(choice) for choice in plan.kernels}
        del own["linear"]
        attention = AttentionContext(
            layers=plan.shape.attention,
            groups=plan.groups,
            max_num_seqs=composition.max_num_seqs,
            dtype=composition.dtype,
            device=piece.device,
            num_threads=composition.num_threads,
            rotary=cast(RotaryKernel, own["rotary"]),
            kv_scales=read_kv_scales(plan, source),
        )
        return UnitParts(
            name=plan.name,
            rank=piece.tensor_rank,
            shape=plan.shape,
            source=source,
            quantizer=maker.make(
                plan.parts["quantizer"], QuantizerContext(plan.facts, composition.dtype)
            ),
            linear_kernels={
                choice.format: cast(LinearKernel, self._kernel(choice))
                for choice in plan.kernels
                if choice.operation == "linear"
            },
            kernels=own,
            attention=maker.make_own(plan.parts["attention"], attention),
            build=maker.factory(plan.parts["model"]) if "model" in plan.parts else _no_layers,
            groups=plan.groups,
            num_blocks=plan.num_blocks,
            layouts=plan.layouts,
            dtype=composition.dtype,
            device=piece.device,
            masks_trees=plan.masks_trees,
            max_positions=composition.max_model_len + composition.slots_past(plan.name),
            on_tensor=self._on_tensor,
        )

    def _kernel(self, choice: KernelChoice) -> Kernel:
        """The kernel of a choice, after its self-test."""
        key = (choice.operation, choice.format, choice.part.name)
        if key in self._kernels:
            return self._kernels[key]
        composition = self._composition
        context = KernelContext(
            choice.operation,
            choice.format,
            composition.dtype,
            composition.device,
            composition.num_threads,
        )
        kernel: Kernel = self._maker.make(choice.part, context)
        try:
            kernel.self_test()
        except INTERRUPTS:
            raise
        except BaseException as problem:
            raise KernelUnusable(
                choice.operation, choice.part.name, str(problem), named=choice.named
            ) from problem
        self._kernels[key] = kernel
        return kernel


def _no_layers(builder: LayerBuilder) -> OwnLayers:
    """Of a model whose layers the drafter builds, before it has said how."""
    raise EngineError("the drafter's layers are not known yet")
