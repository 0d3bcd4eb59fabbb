"""What a plugin's command is, and what it finds in typer's `ctx.obj`.

`pegboard <name>` calls the command's factory and runs the typer application that it returns. A command
ends with status 0, or by `typer.Exit` with 3 where it is a check that found what it looks for. A user's
mistake is raised as a `UserError`, which becomes one line and status 2; a service's own errors are left
to pass. Anything else that is raised is a bug: a traceback and status 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

VERSION = 0

T = TypeVar("T")


class LoadedModel(Protocol):
    """A model to run by hand, without paging or scheduling. Whoever loaded it closes it."""

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
"""Returns a typer application, a new one each time. It is called when the command is used; help needs
no service."""
