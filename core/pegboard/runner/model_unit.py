"""A model unit: one model in one worker. A worker holds units by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pegboard.errors import EngineError
from pegboard.interfaces.attention import AttentionBackend, AttentionBatch
from pegboard.interfaces.checkpoint import CheckpointSource
from pegboard.interfaces.drafter import OwnLayers
from pegboard.interfaces.kernel import Kernel, LinearKernel
from pegboard.interfaces.kv import KVGroup, TensorSpec
from pegboard.interfaces.model import Model, ModelShape
from pegboard.interfaces.quantizer import Quantizer
from pegboard.models.layers import LayerBuilder
from pegboard.runner import kv_tensors

if TYPE_CHECKING:
    from pegboard.runner.kv_tensors import LayerKV


@dataclass(frozen=True, slots=True)
class UnitParts:
    """The parts of a unit. Nothing is loaded yet.

    Attributes:
        name: of the unit in its worker: `target`, `draft`.
        rank: of the worker among those that hold slices of the model.
        shape: the model.
        source: the open checkpoint.
        quantizer: how linear weights are stored.
        linear_kernels: weight format to its kernel.
        kernels: operation to kernel, all but `linear`.
        attention: the attention backend, the unit's own.
        build: the model's factory, or what makes a drafter's own layers.
        groups: the unit's KV groups.
        num_blocks: of each group, block 0 included.
        layouts: for each group, the tensors of a block of one layer.
        dtype: activation dtype.
        device: `cpu`, `cuda` or `cuda:0`.
        masks_trees: whether its attention has a mask for trees of drafts.
        max_positions: most tokens a row, drafts included.
        on_tensor: told the name of each tensor that was loaded.
    """

    name: str
    rank: int
    shape: ModelShape
    source: CheckpointSource
    quantizer: Quantizer
    linear_kernels: Mapping[str, LinearKernel]
    kernels: Mapping[str, Kernel]
    attention: AttentionBackend
    build: Callable[[LayerBuilder], Model | OwnLayers]
    groups: tuple[KVGroup, ...]
    num_blocks: tuple[int, ...]
    layouts: tuple[tuple[TensorSpec, ...], ...]
    dtype: str
    device: str
    masks_trees: bool
    max_positions: int
    on_tensor: Callable[[str], None]

    def builder(self) -> LayerBuilder:
        """The builder that the model's factory gets."""
        return LayerBuilder(
            shape=self.shape,
            source=self.source,
            quantizer=self.quantizer,
            linear_kernels=self.linear_kernels,
            kernels=self.kernels,
            attention=self.attention,
            dtype=self.dtype,
            device=self.device,
            on_tensor=self.on_tensor,
            max_positions=self.max_positions,
        )


class ModelUnit:
    """A model that runs: weights loaded, KV allocated and bound to its attention backend.

    Attributes:
        parts: what it is made of.
        device: where it is.
        layers: the model, or a drafter's own layers.
        kv: its KV tensors, for each decoder layer.
    """

    def __init__(self, parts: UnitParts) -> None:
        """Loads the weights.

        Raises:
            CheckpointError: one cannot be loaded.
        """
        self.parts = parts
        self.device = torch.device(parts.device)
        self.layers = parts.build(parts.builder())
        self.kv: Sequence[LayerKV] = kv_tensors.allocate(
            parts.groups, parts.num_blocks, parts.layouts, self.device
        )
        parts.attention.bind(self.kv)

    @property
    def model(self) -> Model:
        """Its layers as a model of the registry.

        Raises:
            EngineError: they are a drafter's own.
        """
        if not isinstance(self.layers, Model):
            raise EngineError(f"unit {self.parts.name!r} is no model of the registry")
        return self.layers

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        taps: Sequence[int] = (),
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Runs tokens, int64 [num_tokens], through the model.

        Args:
            batch: where they are; its block tables are those of the unit's groups.
            taps: of `ModelShape.taps`.

        Returns:
            Final hidden states after the last norm, [num_tokens, hidden_size], and the tapped ones by
            layer.
        """
        self.parts.attention.prepare(batch)
        last = self.parts.shape.num_layers
        inner = tuple(tap for tap in taps if tap != last)
        hidden, tapped = self.model.forward(token_ids, batch.positions, inner)
        return hidden, {**tapped, last: hidden} if last in taps else tapped

    def checksums(self, group: int, blocks: Sequence[int]) -> list[int]:
        """A number for each block of one of the unit's groups, of its bytes in all layers."""
        return kv_tensors.block_checksums(self.kv, self.parts.groups[group].layers, blocks)


class Units:
    """A worker's units by name, the target first. KV groups are numbered over all of them."""

    def __init__(self, units: Sequence[ModelUnit]) -> None:
        self.by_name = {unit.parts.name: unit for unit in units}
        self.target = units[0]
        self.groups = tuple(group for unit in units for group in unit.parts.groups)
        self._owners = [(unit, own) for unit in units for own in range(len(unit.parts.groups))]

    def owner(self, group: int) -> tuple[ModelUnit, int]:
        """The unit that has a KV group, and the group's number among its own.

        Raises:
            EngineError: there is no such group.
        """
        if not 0 <= group < len(self._owners):
            raise EngineError(f"KV group {group}; allowed: 0 to {len(self._owners) - 1}")
        return self._owners[group]

    def numbers(self, unit: ModelUnit) -> range:
        """The numbers of a unit's groups."""
        first = next(number for number, (owner, _) in enumerate(self._owners) if owner is unit)
        return range(first, first + len(unit.parts.groups))

    def num_kv_bytes(self) -> int:
        """Bytes of all KV tensors."""
        return sum(kv_tensors.num_bytes(unit.kv) for unit in self.by_name.values())
