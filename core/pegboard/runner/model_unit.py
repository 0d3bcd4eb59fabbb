"""A model unit: one model in one worker. A worker holds units by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from pegboard.errors import EngineError
from pegboard.interfaces.attention import AttentionBatch
from pegboard.interfaces.drafter import OwnLayers
from pegboard.interfaces.kv import KVGroup, TensorSpec
from pegboard.interfaces.model import Model
from pegboard.models.layers import LayerBuilder
from pegboard.runner import kv_tensors
from pegboard.step import Bool, Int32, Int64


@dataclass(frozen=True, kw_only=True)
class UnitParts(LayerBuilder):
    """The parts of a unit: the builder of its layers, and its KV. Nothing is loaded yet.

    Attributes:
        name: of the unit in its worker: `target`, `draft`.
        rank: of the worker among those that hold slices of the model.
        max_positions: most tokens a row, drafts included.
        build: the model's factory, or what makes a drafter's own layers.
        groups: the unit's KV groups.
        num_blocks: of each group, block 0 included.
        layouts: for each group, the tensors of a block of one layer.
        masks_trees: whether its attention has a mask for trees of drafts; without one, of each tree the
            path of first children is verified.
    """

    name: str
    rank: int
    max_positions: int
    build: Callable[[LayerBuilder], Model | OwnLayers]
    groups: tuple[KVGroup, ...]
    num_blocks: tuple[int, ...]
    layouts: tuple[tuple[TensorSpec, ...], ...]
    masks_trees: bool


class ModelUnit:
    """A model that runs: weights loaded, KV allocated and bound to its attention backend.

    Attributes:
        parts: its parts.
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
        # A builder of its own: what it keeps of the weights is gone with it.
        self.layers = parts.build(replace(parts))
        self.kv: Sequence[kv_tensors.LayerKV] = kv_tensors.allocate(
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

    def batch(
        self,
        positions: Int64,
        starts: Int64,
        num_computed: Int64,
        block_tables: Iterable[Int32],
        ancestors: Bool | None,
    ) -> AttentionBatch:
        """The metadata of a forward from the host's arrays; see `AttentionBatch` for their meaning.

        Args:
            starts: its `query_starts`.
        """

        def tensor(array: NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        return AttentionBatch(
            positions=tensor(positions),
            query_starts=torch.from_numpy(starts),
            num_computed=torch.from_numpy(num_computed),
            block_tables=tuple(map(tensor, block_tables)),
            ancestors=None if ancestors is None else tensor(ancestors),
        )

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
        layers = (layer for unit in self.by_name.values() for layer in unit.kv)
        return sum(tensor.nbytes for layer in layers for tensor in layer.values())
