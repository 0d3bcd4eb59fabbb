"""The suite of KV transfers holds for a transfer through memory, and fails on faulty ones."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis.errors import FlakyFailure

from pegboard.interfaces.kv_transfer import (
    KVTransferHost,
    KVTransferWorker,
    TransferContext,
    TransferPlan,
)
from pegboard.interfaces.prefix_cache import Prefix
from pegboard.testing.kv_transfer import KVTransferContract, MakeTransfer

KV = Sequence[Mapping[str, torch.Tensor]]
Contents = list[dict[str, torch.Tensor]]
"""For each layer, tensors [num_blocks, ...] by name."""

STRIDE = 4
"""Tokens of the largest block of the suite's models."""


@dataclass
class Kept:
    """An exported prefix.

    Attributes:
        key: fingerprint and salt.
        tokens: of whole blocks.
        read: what its blocks hold; None until they are saved.
    """

    key: tuple[str, str]
    tokens: list[int]
    deadline: float
    read: Callable[[], Contents] | None = None


@dataclass
class Store:
    """The state that the engines of one test share."""

    lease_s: float
    kept: dict[str, Kept] = field(default_factory=dict)
    names: itertools.count[int] = field(default_factory=itertools.count)


class MemoryHost(KVTransferHost):
    """Finds the exported prefix with the most tokens in common."""

    def __init__(self, context: TransferContext, store: Store) -> None:
        self.context = context
        self.store = store

    def fetch(self, request_id: str, prefix: Prefix) -> TransferPlan:
        tokens, key = prefix.token_ids.tolist(), self.key(prefix)
        best = TransferPlan("", 0, 0.0)
        for handle, kept in self.store.kept.items():
            num_tokens = self.in_common(tokens, kept.tokens) // STRIDE * STRIDE
            if (
                kept.key == key
                and self.is_there(kept)
                and time.monotonic() < kept.deadline
                and num_tokens > best.num_tokens
            ):
                best = TransferPlan(handle, num_tokens, kept.deadline)
        return best

    def export(self, request_id: str, prefix: Prefix) -> TransferPlan:
        num_tokens = len(prefix.token_ids) // STRIDE * STRIDE
        handle, deadline = f"{next(self.store.names)}", time.monotonic() + self.store.lease_s
        tokens = prefix.token_ids[:num_tokens].tolist()
        self.store.kept[handle] = Kept(self.key(prefix), tokens, deadline)
        return TransferPlan(handle, num_tokens, deadline)

    def key(self, prefix: Prefix) -> tuple[str, str]:
        return self.context.fingerprint, prefix.salt

    def is_there(self, kept: Kept) -> bool:
        return kept.read is not None

    def in_common(self, tokens: Sequence[int], kept: Sequence[int]) -> int:
        pairs = zip(tokens, kept, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


class MemoryWorker(KVTransferWorker):
    """Copies blocks into the store and out of it."""

    def __init__(self, context: TransferContext, store: Store) -> None:
        self.groups = context.groups
        self.store = store
        self.kv: KV = ()

    def bind(self, kv: KV) -> None:
        self.kv = kv

    def save(self, handle: str, blocks: Sequence[Sequence[int]]) -> None:
        contents = self.copied(blocks)
        self.store.kept[handle].read = lambda: contents

    def load(self, handle: str, blocks: Sequence[Sequence[int]]) -> bool:
        kept = self.store.kept.get(handle)
        if kept is None or kept.read is None or self.is_late(kept):
            return False
        for (layer, own), tensors in zip(self.layers(blocks), kept.read(), strict=True):
            for name, tensor in tensors.items():
                self.kv[layer][name][own] = tensor[: len(own)]
        return True

    def is_late(self, kept: Kept) -> bool:
        return time.monotonic() > kept.deadline

    def layers(self, blocks: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]]:
        of_groups = [
            own for group, own in zip(self.groups, blocks, strict=True) for _ in group.layers
        ]
        return [(place, list(own)) for place, own in enumerate(of_groups)]

    def copied(self, blocks: Sequence[Sequence[int]]) -> Contents:
        return [
            {name: tensor[own].clone() for name, tensor in self.kv[layer].items()}
            for layer, own in self.layers(blocks)
        ]


def transfer(
    host: Callable[[TransferContext, Store], MemoryHost] = MemoryHost,
    worker: Callable[[TransferContext, Store], MemoryWorker] = MemoryWorker,
    lease_s: float = 60.0,
) -> MakeTransfer:
    """Makes the halves of engines that share a store."""
    store = Store(lease_s)
    return lambda context: (host(context, store), worker(context, store))


class TestMemoryTransfer(KVTransferContract):
    @pytest.fixture
    def make(self) -> MakeTransfer:
        return transfer()


def test_short_deadlines_are_heeded() -> None:
    SUITE.test_a_late_load_brings_nothing_else(transfer(lease_s=0.2))


class SaltlessHost(MemoryHost):
    """Forgets whose tokens they are."""

    def key(self, prefix: Prefix) -> tuple[str, str]:
        return self.context.fingerprint, ""


class ModellessHost(MemoryHost):
    """Forgets which model computed them."""

    def key(self, prefix: Prefix) -> tuple[str, str]:
        return "", prefix.salt


class HashingHost(MemoryHost):
    """Knows a prefix by its first block."""

    def in_common(self, tokens: Sequence[int], kept: Sequence[int]) -> int:
        same = tokens[:STRIDE] == kept[:STRIDE]
        return min(len(tokens), len(kept)) if same else 0


class RoundingHost(MemoryHost):
    """Promises a token more than whole blocks."""

    def export(self, request_id: str, prefix: Prefix) -> TransferPlan:
        plan = super().export(request_id, prefix)
        return TransferPlan(plan.handle, len(prefix.token_ids) - 1, plan.deadline)


class TimelessHost(MemoryHost):
    """Gives no time."""

    def fetch(self, request_id: str, prefix: Prefix) -> TransferPlan:
        plan = super().fetch(request_id, prefix)
        return TransferPlan(plan.handle, plan.num_tokens, 0.0)


class MixingHost(MemoryHost):
    """Gives everybody the handle of what was exported last."""

    def fetch(self, request_id: str, prefix: Prefix) -> TransferPlan:
        plan = super().fetch(request_id, prefix)
        last = next(reversed(self.store.kept), "")
        return TransferPlan(last if plan.num_tokens else "", plan.num_tokens, plan.deadline)


class PromisingHost(MemoryHost):
    """Promises what is not saved yet."""

    def is_there(self, kept: Kept) -> bool:
        return True


class OnceWorker(MemoryWorker):
    """Forgets what it has brought."""

    def load(self, handle: str, blocks: Sequence[Sequence[int]]) -> bool:
        loaded = super().load(handle, blocks)
        self.store.kept.pop(handle, None)
        return loaded


class BoastfulWorker(MemoryWorker):
    """Never fails."""

    def load(self, handle: str, blocks: Sequence[Sequence[int]]) -> bool:
        return super().load(handle, blocks) or True


class PlainWorker(MemoryWorker):
    """Knows keys and values alone."""

    def copied(self, blocks: Sequence[Sequence[int]]) -> Contents:
        return [{name: tensors[name] for name in "kv"} for tensors in super().copied(blocks)]


class CarelessWorker(MemoryWorker):
    """Copies a block more."""

    def load(self, handle: str, blocks: Sequence[Sequence[int]]) -> bool:
        loaded = super().load(handle, blocks)
        if loaded:
            self.kv[0]["k"][blocks[0][-1] + 1] = 1.0
        return loaded


class TakingWorker(MemoryWorker):
    """Clears what it has taken."""

    def save(self, handle: str, blocks: Sequence[Sequence[int]]) -> None:
        super().save(handle, blocks)
        self.kv[0]["k"][list(blocks[0])] = 0.0


class LazyWorker(MemoryWorker):
    """Reads the other engine's blocks when they are asked for, however late that is."""

    def save(self, handle: str, blocks: Sequence[Sequence[int]]) -> None:
        self.store.kept[handle].read = lambda: self.copied(blocks)

    def is_late(self, kept: Kept) -> bool:
        return False


SUITE = KVTransferContract()


@pytest.mark.parametrize(
    ("test", "make"),
    [
        (SUITE.test_salts_are_kept_apart, transfer(host=SaltlessHost)),
        (SUITE.test_fingerprints_are_kept_apart, transfer(host=ModellessHost)),
        (SUITE.test_tokens_are_compared_to_the_last, transfer(host=HashingHost)),
        (SUITE.test_what_was_exported_comes_bit_for_bit, transfer(host=RoundingHost)),
        (SUITE.test_what_was_exported_comes_bit_for_bit, transfer(host=TimelessHost)),
        (SUITE.test_transfers_do_not_mix, transfer(host=MixingHost)),
        (SUITE.test_what_was_never_saved_is_computed, transfer(PromisingHost, BoastfulWorker)),
        (SUITE.test_several_sequences_get_the_same_prefix, transfer(worker=OnceWorker)),
        (SUITE.test_an_unknown_handle_fails, transfer(worker=BoastfulWorker)),
        (SUITE.test_what_was_exported_comes_bit_for_bit, transfer(worker=PlainWorker)),
        (SUITE.test_a_longer_prompt_gets_its_beginning, transfer(worker=CarelessWorker)),
        (SUITE.test_what_was_brought_can_be_exported, transfer(worker=TakingWorker)),
        (SUITE.test_a_late_load_brings_nothing_else, transfer(worker=LazyWorker, lease_s=1.0)),
    ],
)
def test_a_faulty_transfer_is_caught(
    test: Callable[[MakeTransfer], None], make: MakeTransfer
) -> None:
    with pytest.raises(AssertionError):
        test(make)


def test_random_transfers_find_a_fault() -> None:
    with pytest.raises((AssertionError, FlakyFailure, ExceptionGroup)):
        SUITE.test_random_transfers_never_bring_other_tokens(transfer(host=SaltlessHost))
