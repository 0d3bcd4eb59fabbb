"""`KVTransfer`: how KV leaves and enters. The host half decides, the worker half moves bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.prefix_cache import Prefix

if TYPE_CHECKING:
    import torch

VERSION = 0


@dataclass(frozen=True, slots=True)
class TransferContext:
    """What a transfer's factory gets.

    Attributes:
        groups: KV groups.
        fingerprint: of everything that changes KV content; only equal ones may exchange KV.
    """

    groups: tuple[KVGroup, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """KV to fetch for a new sequence.

    Attributes:
        handle: names the transfer for the worker half.
        num_tokens: tokens that it brings, from the first on; 0: nothing, compute all.
        deadline: seconds of the monotonic clock; later, the tokens are computed instead.
    """

    handle: str
    num_tokens: int
    deadline: float


class KVTransferHost(ABC):
    """Decides, on the host."""

    @abstractmethod
    def fetch(self, request_id: str, prefix: Prefix) -> TransferPlan:
        """What another engine holds for a new sequence."""

    @abstractmethod
    def export(self, request_id: str, prefix: Prefix) -> TransferPlan:
        """Whether a finished prefix is kept for another engine; its pages are pinned until the
        deadline."""


class KVTransferWorker(ABC):
    """Moves bytes, on a worker."""

    @abstractmethod
    def load(self, handle: str, pages: Sequence[Sequence[int]]) -> bool:
        """Fills pages, a group's in order; False: failed, compute instead."""

    @abstractmethod
    def save(self, handle: str, pages: Sequence[Sequence[int]]) -> None:
        """Offers pages under the handle."""

    @abstractmethod
    def bind(self, kv: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Takes views of the KV tensors, as `AttentionBackend.bind` does."""
