"""A plugin's command, and its context in typer's `ctx.obj`.

`pegboard <name>` calls the command's factory and runs the typer application that it returns. A command
ends with status 0, or by `typer.Exit` with 3 where it is a check that found what it looks for. A user's
mistake is raised as a `UserError`, which becomes one line and status 2; those that the context's methods
raise are left to pass. Anything else that is raised is a bug: a traceback and status 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pegboard.interfaces.quantizer import Calibrator, StreamedLayer

if TYPE_CHECKING:
    import torch

    from pegboard.interfaces.checkpoint import CheckpointFacts
    from pegboard.interfaces.model import ModelShape

VERSION = 0

T = TypeVar("T")


class LoadedModel(Protocol):
    """A model to run by hand, without paging or scheduling. Its loader closes it."""

    def forward(
        self, token_ids: Sequence[int], taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """float32 logits [num_tokens, vocab_size] of one text, and the tapped hidden states
        [num_tokens, hidden_size] by decoder layer."""

    def close(self) -> None: ...


class LayerStream(Protocol):
    """A model of which one decoder layer at a time is in memory, in float32 whatever the checkpoint's
    dtype. Its opener closes it.

    Attributes:
        facts: the checkpoint.
        shape: the model.
        num_threads: threads that it computes with; the same number gives the same bits.
        max_tokens: tokens of the longest text that it runs.
    """

    @property
    def facts(self) -> CheckpointFacts: ...
    @property
    def shape(self) -> ModelShape: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...

    def parameter(self, name: str) -> torch.Tensor:
        """Float32 values of one of the shape's parameters, in memory of its own.

        Raises:
            CheckpointError: it is missing or damaged.
        """

    def layer(self, index: int, inputs: Sequence[torch.Tensor]) -> StreamedLayer:
        """A decoder layer, and what each text brings to it.

        Args:
            index: of the layer.
            inputs: float32 [num_tokens, hidden_size] for each text: rows of the embedding, or the
                outputs of the layer before.

        Raises:
            CheckpointError: one of its parameters is missing or damaged.
        """

    def close(self) -> None: ...


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class CommandContext(ABC):
    """The core's services for commands. `pegboard.cli` makes it."""

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
    def stream_layers(self, ref: str) -> LayerStream:
        """A model by reference, a decoder layer at a time."""

    @abstractmethod
    def calibrator(self, method: str) -> type[Calibrator]:
        """The class that makes checkpoints of a quantization method; its plugin is imported.

        Raises:
            UserError: nothing installed quantizes by that method.
        """

    @abstractmethod
    def tokenizer(self, ref: str) -> Tokenizer:
        """The tokenizer of a model."""

    @abstractmethod
    def progress(self, items: Iterable[T], label: str, total: int | None = None) -> Iterable[T]:
        """The items, with a progress bar on a terminal."""


CommandFactory = Callable[[], Any]
"""Returns a typer application, a new one each time. It is called when the command is used; help needs
no service."""
