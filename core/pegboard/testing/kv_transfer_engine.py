"""An engine that exports and fetches KV whose content is known, for the suite of KV transfers."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pegboard.interfaces.kv import KVGroup, TensorSpec
from pegboard.interfaces.kv_transfer import (
    KVTransferHost,
    KVTransferWorker,
    TransferContext,
    TransferPlan,
)
from pegboard.interfaces.prefix_cache import Prefix
from pegboard.testing.prefix_cache import prefix

if TYPE_CHECKING:
    import torch

MakeTransfer = Callable[[TransferContext], tuple[KVTransferHost, KVTransferWorker]]
"""Makes both halves of one engine."""

Blocks = tuple[Sequence[int], ...]

NUM_BLOCKS = 400
HEAD_DIM = 8
LAYERS_A_GROUP = 2


def layout(group: KVGroup) -> tuple[TensorSpec, ...]:
    """Tensors of a block of one layer, of more kinds than the usual two."""
    shape = (group.block_size, group.num_kv_heads, group.head_dim)
    return (
        TensorSpec("k", shape, "float32"),
        TensorSpec("v", shape, "int8"),
        TensorSpec("v_scale", shape[:2], "float16"),
    )


class ServedKV:
    """An engine: both halves of a transfer, and KV whose content is known.

    Attributes:
        host, worker: under test.
        kv: the tensors of each layer by name, group after group, as `bind` gets them.
    """

    def __init__(
        self, make: MakeTransfer, block_sizes: Sequence[int], fingerprint: str = "model"
    ) -> None:
        self.groups = tuple(
            KVGroup(
                tuple(range(LAYERS_A_GROUP)),
                num_kv_heads=1,
                head_dim=HEAD_DIM,
                block_size=size,
                window=None,
                encoding="none",
                dtype="float32",
                model=f"model {index}",
            )
            for index, size in enumerate(block_sizes)
        )
        self._fingerprint = f"{fingerprint} in blocks of {block_sizes}"
        self.host, self.worker = make(TransferContext(self.groups, self._fingerprint))
        self.kv = [_zeros(group) for group in self.groups for _ in group.layers]
        self.worker.bind(self.kv)
        self._stride = math.lcm(*block_sizes)
        self._next_block = [1] * len(self.groups)
        self._num_requests = 0

    def export(self, tokens: Sequence[int], salt: str = "") -> tuple[TransferPlan, Blocks]:
        """Computes a prefix and offers it; the blocks are those that stay pinned."""
        plan = self.plan(self.host.export, tokens, salt)
        blocks = self.new_blocks(plan.num_tokens)
        self.write(blocks, tokens, salt)
        self.offer(plan, blocks)
        return plan, blocks

    def offer(self, plan: TransferPlan, blocks: Blocks) -> None:
        """Saves blocks, if the plan keeps any, and checks that KV stays as it is."""
        if plan.num_tokens:
            before = _copied(self.kv)
            self.worker.save(plan.handle, blocks)
            assert _differing(before, self.kv) == [], "saving changed KV"

    def fetch(self, tokens: Sequence[int], salt: str = "") -> TransferPlan:
        """The plan for a new sequence with these tokens."""
        return self.plan(self.host.fetch, tokens, salt)

    def plan(
        self,
        ask: Callable[[str, Prefix], TransferPlan],
        tokens: Sequence[int],
        salt: str = "",
    ) -> TransferPlan:
        """The host's answer for a new request, checked."""
        self._num_requests += 1
        plan = ask(f"request-{id(self)}-{self._num_requests}", prefix(tokens, salt))
        assert 0 <= plan.num_tokens <= len(tokens)
        assert plan.num_tokens % self._stride == 0, "part of a block cannot be moved"
        if plan.num_tokens:
            assert time.monotonic() < plan.deadline < math.inf, "no deadline that can be met"
        return plan

    def load(self, plan: TransferPlan, tokens: Sequence[int], salt: str = "") -> Blocks | None:
        """Loads into new blocks, and checks all of KV; None: it failed."""
        blocks = self.new_blocks(plan.num_tokens)
        before = _copied(self.kv)
        loaded = self.worker.load(plan.handle, blocks)
        assert loaded in (True, False)
        touched = {
            (layer, block)
            for index, own in enumerate(blocks)
            for layer in _places(index)
            for block in own
        }
        assert set(_differing(before, self.kv)) <= touched, "other blocks were written to"
        if not loaded:
            return None
        expected = _copied(self.kv)
        self.write(blocks, tokens, salt, into=expected)
        assert _differing(expected, self.kv) == [], "a block does not hold its tokens"
        return blocks

    def bring(self, tokens: Sequence[int], salt: str = "") -> int:
        """Fetches and loads; the number of tokens that are there then."""
        plan = self.fetch(tokens, salt)
        if not plan.num_tokens or self.load(plan, tokens, salt) is None:
            return 0
        return plan.num_tokens

    def new_blocks(self, num_tokens: int) -> Blocks:
        """Blocks that were never handed out, for each group."""
        blocks = []
        for index, group in enumerate(self.groups):
            first = self._next_block[index]
            self._next_block[index] += num_tokens // group.block_size
            blocks.append(range(first, self._next_block[index]))
        return tuple(blocks)

    def write(
        self,
        blocks: Blocks,
        tokens: Sequence[int],
        salt: str = "",
        into: Sequence[Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        """Writes the content of the tokens into blocks, as computing them would."""
        kv = self.kv if into is None else into
        for index, (group, own) in enumerate(zip(self.groups, blocks, strict=True)):
            for entry, block in enumerate(own):
                known = tuple(tokens[: (entry + 1) * group.block_size])
                for layer in _places(index):
                    for name, tensor in kv[layer].items():
                        of = (self._fingerprint, salt, known, layer, name)
                        tensor[block] = _content(of, tensor[block])


def _places(group: int) -> range:
    """The places of a group's layers among those of all groups."""
    return range(group * LAYERS_A_GROUP, (group + 1) * LAYERS_A_GROUP)


def _zeros(group: KVGroup) -> dict[str, torch.Tensor]:
    import torch

    return {
        spec.name: torch.zeros((NUM_BLOCKS, *spec.shape), dtype=getattr(torch, spec.dtype))
        for spec in layout(group)
    }


def _content(of: tuple[object, ...], like: torch.Tensor) -> torch.Tensor:
    """Numbers that only these tokens have, in the shape and dtype of another tensor."""
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(repr(of).encode()))
    return torch.randint(-100, 100, like.shape, generator=generator).to(like.dtype)


def _copied(kv: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    return [{name: tensor.clone() for name, tensor in layer.items()} for layer in kv]


def _differing(
    one: Sequence[Mapping[str, torch.Tensor]], other: Sequence[Mapping[str, torch.Tensor]]
) -> list[tuple[int, int]]:
    """(layer, block) pairs in which some tensor differs."""
    return [
        (layer, block)
        for layer, tensors in enumerate(one)
        for name, tensor in tensors.items()
        for block in (tensor != other[layer][name]).flatten(1).any(1).nonzero().flatten().tolist()
    ]
