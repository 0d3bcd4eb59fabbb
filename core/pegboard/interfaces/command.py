"""What a plugin's command finds in typer's `ctx.obj`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

VERSION = 0

T = TypeVar("T")


class LoadedModel(Protocol):
    """A model to run by hand, without paging or scheduling."""

    def forward(
        self, token_ids: Sequence[int], taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """float32 logits [num_tokens, vocab_size] of one text, and the tapped hidden states
        [num_tokens, hidden_size] by decoder layer."""
        ...

    def close(self) -> None: ...


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class CommandContext(ABC):
    """The engine's services for commands. Filled by `pegboard.cli`."""

    @abstractmethod
    def resolve(self, config: dict[str, Any]) -> Any:
        """The prepared composition of a config, as `pegboard check` sees it.

        Raises:
            UserError: it does not go together.
        """

    @abstractmethod
    def load_model(self, ref: str, quantizer: str = "auto") -> LoadedModel:
        """A model by reference (folder, file, hub id, `pkg://`)."""

    @abstractmethod
    def tokenizer(self, ref: str) -> Tokenizer:
        """The tokenizer of a model."""

    @abstractmethod
    def progress(self, items: Iterable[T], label: str, total: int | None = None) -> Iterable[T]:
        """The items, with a progress bar on a terminal."""


CommandFactory = Callable[[], Any]
"""Returns a typer application."""
