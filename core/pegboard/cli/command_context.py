"""What plugins' commands find in typer's `ctx.obj`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from pegboard.config import Config
from pegboard.errors import TokenizerError
from pegboard.interfaces.command import CommandContext, LoadedModel, Tokenizer

if TYPE_CHECKING:
    from pegboard.compose import Prepared

T = TypeVar("T")


class EngineCommandContext(CommandContext):
    """The services, each by what the engine itself is built with."""

    def resolve(self, config: dict[str, Any]) -> Prepared:
        """The prepared composition."""
        from pegboard.compose import prepare

        return prepare(Config.from_values(config))

    def load_model(self, ref: str, quantizer: str = "auto") -> LoadedModel:
        """A model with room for one text."""
        from pegboard.cli.single_text_model import SingleTextModel

        config = {"model": ref, "quantizer": quantizer, "scheduler": {"max_num_seqs": 1}}
        return SingleTextModel(self.resolve(config))

    def tokenizer(self, ref: str) -> Tokenizer:
        """The model's tokenizer. Raises TokenizerError when it has none."""
        from pegboard.compose import load_tokenizer

        tokenizer = load_tokenizer(self.resolve({"model": ref}))
        if tokenizer is None:
            raise TokenizerError(ref, "has no tokenizer")
        return tokenizer

    def progress(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        """The items, with a progress bar on a terminal."""
        from pegboard.progress import progress_bar

        with progress_bar() as bar:
            yield from bar.track(items, total=total, description=label)
