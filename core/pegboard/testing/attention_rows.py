"""Rows in shuffled blocks that drive an attention backend beside the dense reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pegboard.interfaces.attention import (
    ENCODINGS,
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    KVScales,
    RotaryTable,
)
from pegboard.interfaces.kv import KVGroup, TensorSpec
from pegboard.interfaces.model import AttentionShape
from pegboard.testing.attention_encoding import ReadBack
from pegboard.testing.attention_reference import (
    DenseAttention,
    ReferenceRotary,
    rotate_reference,
)

if TYPE_CHECKING:
    import torch

MAX_POSITION = 256
POISON = 1e4
"""The numbers in blocks that nobody owns; a result shows if they are read."""

POISON_CODE = 99


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row's part of a step: its next tokens, then draft nodes by their parents.

    A parent of -1 is the row's last token.
    """

    row: int
    num_tokens: int
    drafts: tuple[int, ...] = ()

    def depth(self, node: int) -> int:
        parent = self.drafts[node]
        return 1 if parent < 0 else 1 + self.depth(parent)

    def sibling(self, node: int) -> int:
        """The number of earlier nodes of the node's depth."""
        return [self.depth(other) for other in range(node)].count(self.depth(node))

    def ancestors(self, node: int) -> set[int]:
        parent = self.drafts[node]
        return {node} if parent < 0 else {node} | self.ancestors(parent)


@dataclass(frozen=True, slots=True)
class Problem:
    """The problem that a backend is made for.

    Attributes:
        layers: attention of each layer; layers of one window share a KV group, and all skip as many
            tokens.
        rotary_dim: elements of a head that are rotated; None: all; 0: no rotation.
        lse: also compare the log of the sum of exponentials.
        num_threads: threads that the backend may use.
        poison: what blocks hold before they are written, codes apart; NaN spoils even what is
            multiplied by zero.
        encoding: of the blocks.
        kv_scales: by layer, static scales, of the encoding or of another.
        loudness: how unlike the sizes of keys and values are among tokens and heads: what is drawn is
            times e to the power of normal numbers times this.
    """

    layers: tuple[AttentionShape, ...]
    dtype: str
    device: str
    block_size: int
    rotary_dim: int | None
    num_rows: int
    lse: bool
    num_threads: int = 1
    poison: float = POISON
    encoding: str = "none"
    kv_scales: Mapping[int, KVScales] = field(default_factory=dict)
    loudness: float = 0.0

    def read_back(self, layer: int) -> tuple[ReadBack, ReadBack]:
        """Functions that read keys and values back from a layer's blocks."""
        scales = self.kv_scales.get(layer)
        if scales is None or scales.codes != ENCODINGS.get(self.encoding):
            return ReadBack(self.encoding), ReadBack(self.encoding)
        return ReadBack(self.encoding, scales.k), ReadBack(self.encoding, scales.v)

    def groups(self) -> tuple[KVGroup, ...]:
        windows = list(dict.fromkeys(layer.window for layer in self.layers))
        groups = []
        for window in windows:
            members = tuple(i for i, layer in enumerate(self.layers) if layer.window == window)
            first = self.layers[members[0]]
            groups.append(
                KVGroup(
                    members,
                    first.num_kv_heads,
                    first.head_dim,
                    self.block_size,
                    window,
                    self.encoding,
                    self.dtype,
                )
            )
        return tuple(groups)


class PagedRows:
    """Rows whose KV lies in shuffled blocks of a backend, and the dense reference of each.

    A token's q, k and v depend on its row, position and layer alone, and lie beside each other, as a
    joined projection leaves them. The first draft node of each depth has those of the token that a
    plain decode computes at its position. Of encoded blocks, no key or value lies about half way between
    two codes, where a rotation's last bit would choose.

    Attributes:
        problem: what the backend was made for.
        backend: under test.
        stale_entry: what block tables hold where a row has no block; None: other rows' blocks.
    """

    def __init__(
        self,
        problem: Problem,
        make: Callable[[AttentionContext], AttentionBackend],
        layout: Callable[[KVGroup], Sequence[TensorSpec]],
    ) -> None:
        import torch

        self.problem = problem
        self.stale_entry: int | None = None
        self.groups = problem.groups()
        self._skipped = problem.layers[0].skipped
        self._generator = torch.Generator().manual_seed(11)
        self._dtype: torch.dtype = getattr(torch, problem.dtype)
        self._max_blocks = -(-MAX_POSITION // problem.block_size)
        self._free = self._shuffled_blocks()
        self._tables: list[list[list[int]]] = [
            [[] for _ in self.groups] for _ in range(problem.num_rows)
        ]
        self._dense = [[DenseAttention(s) for s in problem.layers] for _ in range(problem.num_rows)]
        self._nodes: dict[tuple[int, int], DenseAttention] = {}
        self.backend = make(
            AttentionContext(
                layers=problem.layers,
                groups=self.groups,
                max_num_seqs=problem.num_rows,
                dtype=problem.dtype,
                device=problem.device,
                num_threads=problem.num_threads,
                rotary=ReferenceRotary(),
                kv_scales=problem.kv_scales,
            )
        )
        self._kv = self._allocate(layout)
        self.backend.bind(self._kv)
        self._rotary = self._table()

    @property
    def num_blocks(self) -> int:
        return self._max_blocks * self.problem.num_rows + 3

    def _shuffled_blocks(self) -> list[list[int]]:
        import torch

        order = torch.randperm(self.num_blocks - 1, generator=self._generator) + 1
        return [order.tolist() for _ in self.groups]

    def _allocate(
        self, layout: Callable[[KVGroup], Sequence[TensorSpec]]
    ) -> list[dict[str, torch.Tensor]]:
        import torch

        tensors: list[dict[str, torch.Tensor]] = [{} for _ in self.problem.layers]
        for group in self.groups:
            for layer in group.layers:
                for spec in layout(group):
                    dtype: torch.dtype = getattr(torch, spec.dtype)
                    tensors[layer][spec.name] = torch.full(
                        (self.num_blocks, *spec.shape),
                        self.problem.poison if dtype.is_floating_point else POISON_CODE,
                        dtype=dtype,
                        device=self.problem.device,
                    )
        return tensors

    def _table(self) -> RotaryTable | None:
        import torch

        rotary_dim = self.problem.rotary_dim
        if rotary_dim == 0:
            return None
        half = (rotary_dim or self.problem.layers[0].head_dim) // 2
        inverse = 100.0 ** -(torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(MAX_POSITION, dtype=torch.float64)[:, None] * inverse
        dtype = torch.float64 if self.problem.dtype == "float64" else torch.float32
        device = self.problem.device
        return RotaryTable(angles.cos().to(device, dtype), angles.sin().to(device, dtype))

    def length(self, row: int) -> int:
        """Tokens of a row whose KV is in place."""
        return len(self._dense[row][0].positions)

    def step(self, chunks: Sequence[Chunk]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Runs all layers of a step; yields (from the backend, from the reference) pairs.

        Draft nodes stay in the blocks and leave the reference; `accept` puts the accepted ones back.
        """
        import torch

        for chunk in chunks:
            self._reserve(chunk.row, self.length(chunk.row) + chunk.num_tokens + len(chunk.drafts))
        batch = self._batch(chunks)
        self.backend.prepare(batch)
        num_tokens = batch.positions.numel()
        positions = batch.positions.cpu()
        for index, layer in enumerate(self.problem.layers):
            q, k, v = self._projections(index, chunks)
            expected, expected_lse = self._reference(index, chunks, positions, q, k, v)
            lse = None
            if self.problem.lse:
                lse = torch.full(
                    (num_tokens, layer.num_heads), torch.nan, device=self.problem.device
                )
            out = self.backend.forward(index, q, k, v, self._rotary, lse)
            yield out, expected
            if lse is not None:
                yield lse, expected_lse

    def _reserve(self, row: int, num_tokens: int) -> None:
        for table, free in zip(self._tables[row], self._free, strict=True):
            while len(table) * self.problem.block_size < num_tokens + self._skipped:
                table.append(free.pop())

    def _batch(self, chunks: Sequence[Chunk]) -> AttentionBatch:
        import torch

        positions: list[int] = []
        starts = [0]
        for chunk in chunks:
            start = self.length(chunk.row)
            last = start + chunk.num_tokens - 1
            positions += range(start, last + 1)
            positions += [last + chunk.depth(node) for node in range(len(chunk.drafts))]
            starts.append(len(positions))
        device = self.problem.device
        return AttentionBatch(
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            query_starts=torch.tensor(starts, dtype=torch.int64),
            num_computed=torch.tensor(
                [self.length(c.row) + self._skipped for c in chunks], dtype=torch.int64
            ),
            block_tables=tuple(
                self._block_table(g, chunks).to(device) for g in range(len(self.groups))
            ),
            ancestors=self._ancestors(chunks, starts),
        )

    def _block_table(self, group: int, chunks: Sequence[Chunk]) -> torch.Tensor:
        import torch

        stale = self._tables[chunks[-1].row][group] or [0]
        table = torch.empty((len(chunks), self._max_blocks), dtype=torch.int32)
        for index, chunk in enumerate(chunks):
            mine = self._tables[chunk.row][group]
            for entry in range(self._max_blocks):
                block = mine[entry] if entry < len(mine) else None
                if block is None or block == 0:
                    other = stale[entry % len(stale)]
                    block = self.stale_entry if self.stale_entry is not None else other
                table[index, entry] = block
        return table

    def _ancestors(self, chunks: Sequence[Chunk], starts: Sequence[int]) -> torch.Tensor | None:
        import torch

        if not any(chunk.drafts for chunk in chunks):
            return None
        width = max(chunk.num_tokens + len(chunk.drafts) for chunk in chunks)
        mask = torch.zeros((starts[-1], width), dtype=torch.bool)
        for start, chunk in zip(starts, chunks, strict=False):
            for j in range(chunk.num_tokens):
                mask[start + j, : j + 1] = True
            for node in range(len(chunk.drafts)):
                token = start + chunk.num_tokens + node
                mask[token, : chunk.num_tokens] = True
                for ancestor in chunk.ancestors(node):
                    mask[token, chunk.num_tokens + ancestor] = True
        return mask.to(self.problem.device)

    def _projections(self, layer: int, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, ...]:
        """q, k and v of a step's tokens: views of one tensor."""
        import torch

        shape = self.problem.layers[layer]
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        tokens = []
        for chunk in chunks:
            start = self.length(chunk.row)
            keys = [(start + j, 0) for j in range(chunk.num_tokens)]
            last = start + chunk.num_tokens - 1
            keys += [
                (last + chunk.depth(node), chunk.sibling(node)) for node in range(len(chunk.drafts))
            ]
            for position, sibling in keys:
                seed = ((chunk.row * 64 + layer) * 64 + sibling) * MAX_POSITION + position
                tokens.append(self._token(layer, seed, position))
        joined = torch.stack(tokens).to(self.problem.device)
        return torch.split_with_sizes(joined, heads, dim=1)

    def _token(self, layer: int, seed: int, position: int) -> torch.Tensor:
        """q, k and v of a token, [heads, head_dim], whose codes are decided."""
        import torch

        shape = self.problem.layers[layer]
        size = (shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        generator = torch.Generator().manual_seed(seed)
        of_keys, of_values = self.problem.read_back(layer)
        while True:
            token = torch.randn(size, generator=generator, dtype=torch.float64)
            sizes = torch.randn(size[0], 1, generator=generator, dtype=torch.float64)
            token = (token * (self.problem.loudness * sizes).exp()).to(self._dtype)
            k, v = token[shape.num_heads :].view(2, shape.num_kv_heads, shape.head_dim)
            k = self._rotated(k[None], torch.tensor([position]))[0]
            if of_keys.is_decided(k) and of_values.is_decided(v):
                return token

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self._rotary is None:
            return x.double()
        rotated = rotate_reference(x, positions, self._rotary.cos.cpu(), self._rotary.sin.cpu())
        return rotated.to(x.dtype).double()

    def _reference(
        self,
        layer: int,
        chunks: Sequence[Chunk],
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        q, k, v = q.cpu(), k.cpu(), v.cpu()
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        of_keys, of_values = self.problem.read_back(layer)
        k, v = of_keys(k), of_values(v)
        outputs, sums, token = [], [], 0
        for chunk in chunks:
            dense = self._dense[chunk.row][layer]
            start = len(dense.positions)
            count = chunk.num_tokens + len(chunk.drafts)
            for j in range(count):
                dense.keys.append(k[token + j])
                dense.values.append(v[token + j])
                dense.positions.append(int(positions[token + j]))
            for j in range(count):
                visible = list(range(start + min(j + 1, chunk.num_tokens)))
                if j >= chunk.num_tokens:
                    node = j - chunk.num_tokens
                    visible += [start + chunk.num_tokens + a for a in chunk.ancestors(node)]
                out, total = dense.attend(q[token + j], int(positions[token + j]), visible)
                outputs.append(out)
                sums.append(total)
            self._set_drafts_aside(chunk, layer, dense, start + chunk.num_tokens)
            token += count
        return torch.stack(outputs), torch.stack(sums)

    def _set_drafts_aside(self, chunk: Chunk, layer: int, dense: DenseAttention, kept: int) -> None:
        self._nodes[chunk.row, layer] = DenseAttention(
            dense.shape, dense.keys[kept:], dense.values[kept:], dense.positions[kept:]
        )
        del dense.keys[kept:], dense.values[kept:], dense.positions[kept:]

    def _slot(self, group: int, row: int, token: int) -> int:
        entry, offset = divmod(token + self._skipped, self.problem.block_size)
        return self._tables[row][group][entry] * self.problem.block_size + offset

    def accept(self, row: int, nodes: Sequence[int]) -> None:
        """Keeps a path of the draft nodes of the row's last step, and compacts it."""
        start = self.length(row)
        sources = [start + node for node in nodes]
        self._move(row, sources, list(range(start, start + len(nodes))))
        for layer, dense in enumerate(self._dense[row]):
            aside = self._nodes[row, layer]
            dense.keys += [aside.keys[node] for node in nodes]
            dense.values += [aside.values[node] for node in nodes]
            dense.positions += [aside.positions[node] for node in nodes]

    def rotate_tokens(self, row: int, first: int, last: int) -> None:
        """Moves each token of [first, last) one slot on, the last one to the first's slot."""
        sources = list(range(first, last))
        targets = [*sources[1:], first]
        self._move(row, sources, targets)
        for dense in self._dense[row]:
            for values in (dense.keys, dense.values):
                values[first:last] = [values[last - 1], *values[first : last - 1]]

    def _move(self, row: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        import torch

        for group in range(len(self.groups)):
            self.backend.move_slots(
                group,
                torch.tensor([self._slot(group, row, token) for token in sources]),
                torch.tensor([self._slot(group, row, token) for token in targets]),
            )

    def fork(self, row: int, child: int) -> None:
        """Gives `child` copies of all the row's blocks."""
        import torch

        self._reserve(child, self.length(row))
        for group in range(len(self.groups)):
            num_slots = self.length(row) + self._skipped
            count = math.ceil(num_slots / self.problem.block_size)
            self.backend.copy_blocks(
                group,
                torch.tensor(self._tables[row][group][:count]),
                torch.tensor(self._tables[child][group][:count]),
            )
        for mine, theirs in zip(self._dense[row], self._dense[child], strict=True):
            theirs.keys, theirs.values = list(mine.keys), list(mine.values)
            theirs.positions = list(mine.positions)

    def forget_blocks_before_window(self) -> None:
        """Drops table entries of window groups that no later token sees."""
        for row, tables in enumerate(self._tables):
            for group, table in zip(self.groups, tables, strict=True):
                if group.window is not None:
                    first = max(0, self.length(row) - group.window + 1) + self._skipped
                    for entry in range(min(first // self.problem.block_size, len(table))):
                        table[entry] = 0

    def snapshot(self) -> list[dict[str, torch.Tensor]]:
        return [{name: t.clone() for name, t in tensors.items()} for tensors in self._kv]

    def assert_unowned_blocks_equal(self, before: list[dict[str, torch.Tensor]]) -> None:
        """Nothing but block 0 and the rows' own blocks changed since the snapshot."""
        import torch

        for g, group in enumerate(self.groups):
            owned = {0} | {block for tables in self._tables for block in tables[g]}
            others = [block for block in range(self.num_blocks) if block not in owned]
            for layer in group.layers:
                for name, tensor in self._kv[layer].items():
                    assert torch.equal(tensor[others], before[layer][name][others])
