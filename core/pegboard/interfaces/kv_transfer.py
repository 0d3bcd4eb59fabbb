"""`KVTransfer`: how KV leaves and enters. The host half decides, the worker half moves bytes.

A finished prefix leaves by `export` on the host, and `save` under the plan's handle on the worker; a
new sequence gets it by `fetch` and `load`, in the same engine or in another one of the same
fingerprint. KV is brought only for tokens that are equal from the first on, of the same salt. What
fails is computed: a transfer can cost time and never change a token.

A plugin provides the host half under its name, and the worker half under the name with `.worker`
appended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.prefix_cache import Prefix

if TYPE_CHECKING:
    import torch

VERSION = 2


@dataclass(frozen=True, slots=True)
class TransferContext:
    """The context of a transfer's factory.

    Attributes:
        groups: KV groups.
        fingerprint: of everything that changes KV content; only equal ones may exchange KV.
    """

    groups: tuple[KVGroup, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """KV to fetch for a new sequence, or to keep of a finished one.

    Attributes:
        handle: names the transfer for the worker half.
        num_tokens: tokens that it brings, from the first on: at most the prefix's, and a multiple of
            every group's block size; 0: nothing, compute all.
        deadline: seconds of the monotonic clock; later, the tokens are computed instead.
    """

    handle: str
    num_tokens: int
    deadline: float


class KVTransferHost(ABC):
    """Decides, on the host."""

    @abstractmethod
    def fetch(self, request_id: str, prefix: Prefix) -> TransferPlan:
        """The plan of the transfer for a new sequence."""

    @abstractmethod
    def export(self, request_id: str, prefix: Prefix) -> TransferPlan:
        """Whether a finished prefix is kept for another engine; its blocks are pinned until the
        deadline."""


class KVTransferWorker(ABC):
    """Moves bytes, on a worker.

    Blocks are, for each group, the plan's `num_tokens` / block size of them, in the tokens' order.
    """

    @abstractmethod
    def load(self, handle: str, blocks: Sequence[Sequence[int]]) -> bool:
        """Fills blocks, every tensor of every layer, and touches no others; False: failed, compute
        instead. A handle fails that is unknown, or whose blocks were never saved."""

    @abstractmethod
    def save(self, handle: str, blocks: Sequence[Sequence[int]]) -> None:
        """Offers blocks under the handle. They are read only, and hold other tokens once the plan's
        deadline has passed."""

    @abstractmethod
    def bind(self, kv: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Takes views of the KV tensors: of each KV group in turn, those of each of its layers, by the
        names of `TensorSpec`. Several models may have a layer of the same number."""
