"""Paged attention in plain torch: the reference that every other backend is tested against.

    scores = cap(scale * q k^T), -inf where not visible
    out    = softmax(scores) v

Queries of a step are cut into tiles. A tile is a batch of equally long query spans, each with the KV
slots that its queries may see, padded to a common length and masked. Short spans (decodes and
verifications) of many rows share a tile; a long span (prefill) has tiles of its own. Arithmetic is in
float32, in float64 for float64 models; KV in codes is decoded a tile at a time. torch's fused function
computes the formula where it can, and the formula itself where scores are capped or the LSE is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from pegboard.builtin.torch_attention_codes import CODES, fixed_scales
from pegboard.builtin.torch_attention_layout import SPAN, TILE_ELEMENTS, layout
from pegboard.interfaces.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    RotaryTable,
)
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.model import AttentionShape
from pegboard.step import Int64


@dataclass(frozen=True, slots=True)
class _Tile:
    """Spans of Q queries of B rows, and the L KV slots that they may see.

    Attributes:
        tokens: int64 [B, Q], the queries among the step's tokens.
        is_whole: whether they are all of the step's tokens, in order.
        slots: int64 [B, L], block * block_size + offset.
        visible: bool [B, Q, L]; None: every query sees all slots.
    """

    tokens: torch.Tensor
    is_whole: bool
    slots: torch.Tensor
    visible: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Piece:
    """Query spans to become a tile: `count` queries from the `first` on, of each of `rows`."""

    rows: Int64
    first: int
    count: int


class TorchAttention(AttentionBackend):
    """Grouped queries, windows, soft caps, draft trees and LSE, over KV in its plain dtype or
    in codes."""

    def __init__(self, context: AttentionContext) -> None:
        self._layers = context.layers
        self._groups = context.groups
        self._rotary = context.rotary
        self._device = torch.device(context.device)
        self._group_of = {
            layer: g for g, group in enumerate(self._groups) for layer in group.layers
        }
        for group in self._groups:
            layout(group)  # refuses an encoding that this backend does not have
        self._fixed = [
            fixed_scales(context, self._groups[self._group_of[layer]].encoding, layer)
            for layer in range(len(self._layers))
        ]
        self._kv: Sequence[Mapping[str, torch.Tensor]] = ()
        self._flat: list[dict[str, torch.Tensor]] = []
        self._positions = torch.empty(0, dtype=torch.int64)
        self._write_slots: list[torch.Tensor] = []
        self._tiles: list[list[_Tile]] = []
        self._gathered = _Gathered()

    def bind(self, kv: Sequence[Mapping[str, torch.Tensor]]) -> None:
        self._kv = kv
        # by slot: [num_blocks * block_size, num_kv_heads, head_dim]
        self._flat = [
            {name: blocks.flatten(0, 1) for name, blocks in layer.items()} for layer in kv
        ]

    def prepare(self, batch: AttentionBatch) -> None:
        self._positions = batch.positions
        step = _Step(batch)
        self._write_slots = []
        self._tiles = []
        for g, group in enumerate(self._groups):
            table = batch.block_tables[g].cpu().numpy()
            shape = self._layers[group.layers[0]]
            slots = _slots(table[step.owner], step.number[:, None], group.block_size)[:, 0]
            self._write_slots.append(torch.from_numpy(slots).to(self._device))
            self._tiles.append(
                [self._tile(step, piece, table, group) for piece in _pieces(step, shape, group)]
            )

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: RotaryTable | None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        g = self._group_of[layer]
        if rotary is not None:
            both = torch.cat((q, k), dim=1)
            rotated = self._rotary.rotate(both, self._positions, rotary.cos, rotary.sin)
            q, k = torch.split_with_sizes(rotated, [q.shape[1], k.shape[1]], dim=1)
        self._write(layer, "k", k)
        self._write(layer, "v", v)
        shape, tiles = self._layers[layer], self._tiles[g]
        if len(tiles) == 1 and tiles[0].is_whole and lse is None:
            batched = q.reshape(*tiles[0].tokens.shape, *q.shape[1:])
            k, v = (self._read(layer, name, tiles[0].slots) for name in "kv")
            return _attend_tile(batched, k, v, tiles[0], shape)[0].flatten(0, 1)
        out = torch.empty_like(q)
        for tile in tiles:
            k, v = (self._read(layer, name, tile.slots) for name in "kv")
            out[tile.tokens], log_sum = _attend_tile(
                q[tile.tokens], k, v, tile, shape, with_lse=lse is not None
            )
            if lse is not None and log_sum is not None:
                lse[tile.tokens] = log_sum.to(lse.dtype)
        return out

    def _write(self, layer: int, name: str, x: torch.Tensor) -> None:
        """Keys or values of the step's tokens, into the layer's blocks."""
        g, flat = self._group_of[layer], self._flat[layer]
        encoding, slots = self._groups[g].encoding, self._write_slots[g]
        if encoding == "none":
            flat[name].index_copy_(0, slots, x.to(flat[name].dtype))
            return
        codes, scale = CODES[encoding].encode(x, self._fixed[layer].get(name))
        flat[name].index_copy_(0, slots, codes)
        flat[f"{name}_scale"].index_copy_(0, slots, scale)

    def _read(self, layer: int, name: str, slots: torch.Tensor) -> torch.Tensor:
        """Keys or values [B, L, num_kv_heads, head_dim] of slots [B, L]; valid until the next call."""
        flat, encoding = self._flat[layer], self._groups[self._group_of[layer]].encoding
        kept = self._gathered(name, flat[name], slots)
        if encoding == "none":
            return kept
        return CODES[encoding].decode(kept, flat[f"{name}_scale"][slots])

    def copy_blocks(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None:
        pairs = list(zip(source.tolist(), target.tolist(), strict=True))
        for layer in self._groups[group].layers:
            for tensor in self._kv[layer].values():
                for from_block, to_block in pairs:
                    tensor[to_block].copy_(tensor[from_block])

    def move_slots(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None:
        for layer in self._groups[group].layers:
            for flat in self._flat[layer].values():
                flat[target] = flat[source]

    def _tile(self, step: _Step, piece: _Piece, table: Int64, group: KVGroup) -> _Tile:
        rows = piece.rows[:, None]
        local = piece.first + np.arange(piece.count)
        tokens = step.starts[rows] + local
        end = step.num_computed[rows] + piece.first + piece.count
        skipped = self._layers[group.layers[0]].skipped
        begin = step.window_begin(tokens, group.window, skipped)[:, None]
        key = begin + np.arange(int((end - begin).max()))
        valid = key < end
        # Padding reads the row's own last token: what other blocks hold may be anything.
        key = np.minimum(key, end - 1)
        visible = step.visible(tokens, rows, key, group.window, skipped) & valid[:, None, :]
        slots = _slots(table[piece.rows], key, group.block_size)

        def to_device(values: NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(values).to(self._device)

        every = np.arange(len(step.owner))
        return _Tile(
            tokens=to_device(tokens),
            is_whole=np.array_equal(tokens.ravel(), every),
            slots=to_device(slots),
            visible=None if visible.all() else to_device(visible),
        )


class _Gathered:
    """Keys and values of a tile's slots, in memory that the next tile reuses: pages that the system
    hands out anew for each tile would cost as much as the attention itself."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, blocks: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[num_slots, num_kv_heads, head_dim] by [B, L] -> [B, L, num_kv_heads, head_dim], valid until
        the next call with the name."""
        shape = (*slots.shape, *blocks.shape[1:])
        size = math.prod(shape)
        memory = self._memory.get(name)
        if memory is None or memory.numel() < size or memory.dtype != blocks.dtype:
            self._memory[name] = memory = blocks.new_empty(size)
        out = memory[:size].view(-1, *blocks.shape[1:])
        return torch.index_select(blocks, 0, slots.flatten(), out=out).view(shape)


class _Step:
    """A step's metadata as numpy arrays; `number` is a token's in its row."""

    def __init__(self, batch: AttentionBatch) -> None:
        self.starts: Int64 = batch.query_starts.numpy()
        self.lengths: Int64 = np.diff(self.starts)
        self.num_computed: Int64 = batch.num_computed.numpy()
        self.owner: Int64 = np.repeat(np.arange(len(self.lengths)), self.lengths)
        local = np.arange(len(self.owner)) - self.starts[self.owner]
        self.number: Int64 = self.num_computed[self.owner] + local
        self.position: Int64 = batch.positions.cpu().numpy()
        self.ancestors = None if batch.ancestors is None else batch.ancestors.cpu().numpy()

    def window_begin(self, tokens: Int64, window: int | None, skipped: int) -> Int64:
        """The first token that any query of each span sees; tokens: [B, Q] -> [B]."""
        if window is None:
            return np.full(len(tokens), skipped, dtype=np.int64)
        # A key's position is at most its number less the skipped tokens, so no key before this one is
        # in the window.
        begin: Int64 = self.position[tokens].min(axis=1) - window + 1
        return begin.clip(min=0) + skipped

    def visible(
        self, tokens: Int64, rows: Int64, key: Int64, window: int | None, skipped: int
    ) -> NDArray[np.bool_]:
        """Whether queries [B, Q] see the keys [B, L], by causality, tree and window: [B, Q, L]."""
        computed = self.num_computed[rows]
        in_step = np.maximum(key - computed, 0)
        if self.ancestors is None:
            sees = key[:, None, :] <= self.number[tokens][:, :, None]
        else:
            sees = self.ancestors[tokens[:, :, None], in_step[:, None, :]]
            sees |= (key < computed)[:, None, :]
        if window is not None:
            in_kv = key - skipped
            position = np.where(key < computed, in_kv, self.position[self.starts[rows] + in_step])
            sees &= position[:, None, :] > self.position[tokens][:, :, None] - window
        return sees


def _pieces(step: _Step, shape: AttentionShape, group: KVGroup) -> Iterator[_Piece]:
    """Cuts the step's queries into spans, and puts equally long short ones together."""
    context = step.num_computed + step.lengths
    for length in np.unique(step.lengths).tolist():
        rows = np.flatnonzero(step.lengths == length)
        if length > SPAN:
            for row in rows:
                for first in range(0, length, SPAN):
                    yield _Piece(np.array([row]), first, min(SPAN, length - first))
            continue
        # Rows of like context side by side, so that little is padding.
        rows = rows[np.argsort(-context[rows], kind="stable")]
        width = max(shape.num_heads * length, group.num_kv_heads * group.head_dim)
        while len(rows):
            seen = int(min(context[rows[0]], (group.window or 2**62) + length))
            count = max(1, TILE_ELEMENTS // (seen * width))
            yield _Piece(rows[:count], 0, length)
            rows = rows[count:]


def _slots(table: Int64, tokens: Int64, block_size: int) -> Int64:
    """Slots of tokens [B, L] of rows; table: [B, blocks]."""
    blocks = np.take_along_axis(table, tokens // block_size, axis=1).astype(np.int64)
    slots: Int64 = blocks * block_size + tokens % block_size
    return slots


def _attend_tile(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tile: _Tile,
    shape: AttentionShape,
    *,
    with_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A tile's output, in q's dtype, and its LSE.

    q: [B, Q, num_heads, head_dim]; k, v: [B, L, num_kv_heads, head_dim], of the tile's slots.
    """
    wide = q if q.dtype == torch.float64 else q.float()
    k, v = k.to(wide.dtype), v.to(wide.dtype)
    if with_lse or shape.soft_cap is not None:
        out, lse = _attend(wide, k, v, tile.visible, shape)
        return out.to(q.dtype), lse
    return _attend_fused(wide, k, v, tile.visible, shape).to(q.dtype), None


def _attend_fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    shape: AttentionShape,
) -> torch.Tensor:
    """The output of `_attend` for uncapped scores: the query heads that share a KV head become more
    queries of one head."""
    batch, num_queries, num_heads, head_dim = q.shape
    per_kv = num_heads // shape.num_kv_heads
    queries = q.view(batch, num_queries, shape.num_kv_heads, per_kv, head_dim)
    queries = queries.permute(0, 2, 3, 1, 4).flatten(2, 3)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    mask = None if visible is None else visible.repeat(1, per_kv, 1).unsqueeze(1)
    out = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=shape.scale)
    out = out.view(batch, shape.num_kv_heads, per_kv, num_queries, head_dim)
    return out.permute(0, 3, 1, 2, 4).reshape(q.shape)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    shape: AttentionShape,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a tile: a KV head at a time, with all query heads that share it.

    Args:
        q: [B, Q, num_heads, head_dim]; float32 or float64, as k and v are.
        k, v: [B, L, num_kv_heads, head_dim].
        visible: bool [B, Q, L]; None: all.

    Returns:
        Output [B, Q, num_heads, head_dim] and LSE [B, Q, num_heads], in the same dtype.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    per_kv = num_heads // shape.num_kv_heads
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3])
    for head in range(shape.num_kv_heads):
        sharing = slice(head * per_kv, (head + 1) * per_kv)
        queries = q[:, :, sharing].reshape(batch, num_queries * per_kv, head_dim)
        scores = torch.bmm(queries, k[:, :, head].transpose(1, 2)).mul_(shape.scale)
        if shape.soft_cap is not None:
            scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
        scores = scores.view(batch, num_queries, per_kv, -1)
        if visible is not None:
            scores = scores.masked_fill_(~visible[:, :, None], -torch.inf)
        peak = scores.amax(dim=-1, keepdim=True)
        weights = scores.sub_(peak).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        attended = torch.bmm(weights.flatten(1, 2), v[:, :, head])
        out[:, :, sharing] = attended.view(batch, num_queries, per_kv, head_dim) / total
        lse[:, :, sharing] = (peak + total.log())[..., 0]
    return out, lse
