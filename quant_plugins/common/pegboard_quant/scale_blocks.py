"""Scales of a weight that belong to blocks of it: the whole, a row, a group of a row, a rectangle.

Torch-free: it only calls tensors' methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.quantizer import StoredParameter

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ScaleBlocks:
    """The cut of a weight into blocks; the last ones of a row and of a column may be smaller.

    Attributes:
        shape: of the weight, [out_features, in_features].
        block: rows and columns of a block.
    """

    shape: tuple[int, int]
    block: tuple[int, int]

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks along each axis."""
        rows, columns = (
            -(-size // step) for size, step in zip(self.shape, self.block, strict=True)
        )
        return rows, columns

    @property
    def num_groups(self) -> int:
        """Blocks along a row."""
        return self.grid[1]

    @property
    def group_size(self) -> int | None:
        """`LinearWeight.group_size`: None where the blocks divide the inputs."""
        in_features, step = self.shape[1], self.block[1]
        return None if step >= in_features or in_features % step == 0 else step

    @property
    def stored_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes in which tools keep one number a block: axes of one block may be left out."""
        rows, columns = self.grid
        shapes: list[tuple[int, ...]] = [(rows, columns)]
        if columns == 1:
            shapes.append((rows,))
            if rows == 1:
                shapes.append(())
        return tuple(shapes)

    def stored(self, layer: str, name: str, facts: CheckpointFacts) -> StoredParameter:
        """The parameter `name` of a layer that holds one floating number a block. Where the
        checkpoint has it in none of the shapes that would do, the first of them is declared."""
        fact = facts.tensors.get(f"{layer}.{name}")
        shapes = self.stored_shapes
        shape = fact.shape if fact is not None and fact.shape in shapes else shapes[0]
        return StoredParameter(name, shape, shard_axis=self._shard_axis(shape))

    def spread(self, numbers: torch.Tensor) -> torch.Tensor:
        """A number of each row and group, float32 [out_features, num_groups], from one of each block.
        Rows count from the weight's first one: a row's block does not depend on how it is cut."""
        by_block = numbers.float().reshape(self.grid)
        if self.block[0] == 1:
            return by_block
        return by_block.repeat_interleave(self.block[0], dim=0)[: self.shape[0]].contiguous()

    def _shard_axis(self, shape: tuple[int, ...]) -> dict[str, int | None]:
        """Axes that can be cut where the weight is. Where a block has several rows, two parts may
        need the same one."""
        out = 0 if shape and self.block[0] == 1 else None
        return {"out": out, "in": 1 if len(shape) == 2 and self.grid[1] > 1 else None}
