"""Services for commands under test: a tiny model by its formulas, and services that refuse."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pegboard.errors import CheckpointError, ConfigError, TokenizerError
from pegboard.interfaces.command import CommandContext
from pegboard.interfaces.quantizer import Calibrator
from pegboard.testing.dense_decoder import DenseDecoder
from pegboard.testing.streamed_model import TinyStream

if TYPE_CHECKING:
    import tokenizers
    import torch

    from pegboard import Engine

T = TypeVar("T")


class TinyCommandContext(CommandContext):
    """Loads models that `tiny.write_tiny_model` wrote, and notes what it is asked.

    Args:
        failing: the service that refuses: the name of a method, or `forward` for loaded models.

    Attributes:
        asked: names of the services used, in order.
        loaded: models that it loaded.
        streams: models that it opened to be read a layer at a time.
    """

    calibrators: ClassVar[Mapping[str, type[Calibrator]]] = {}
    """Calibrators by method. The suite of a command that asks for one subclasses this with its own."""

    def __init__(self, failing: str = "") -> None:
        self._failing = failing
        self.asked: list[str] = []
        self.loaded: list[TinyLoadedModel] = []
        self.streams: list[TinyStream] = []

    def resolve(self, config: dict[str, Any]) -> Any:
        """The composition of an engine of the config."""
        self.ask("resolve")
        with self._engine(config) as engine:
            return engine.prepared

    def load_model(self, ref: str, quantizer: str = "auto") -> TinyLoadedModel:
        """A model in a folder; however it is stored."""
        self.ask("load_model")
        if not (Path(ref) / "model.safetensors").is_file():
            raise CheckpointError(ref, "no such folder", allowed="a folder of a tiny model")
        self.loaded.append(TinyLoadedModel(Path(ref), self))
        return self.loaded[-1]

    def stream_layers(self, ref: str) -> TinyStream:
        """A model in a folder, a decoder layer at a time."""
        self.ask("stream_layers")
        if not (Path(ref) / "model.safetensors").is_file():
            raise CheckpointError(ref, "no such folder", allowed="a folder of a tiny model")
        with self._engine({"model": ref, "dtype": "float32", "threads": 1}) as engine:
            composition = engine.prepared.composition
        self.streams.append(
            TinyStream(Path(ref), composition.target.facts, composition.target.shape)
        )
        return self.streams[-1]

    def calibrator(self, method: str) -> type[Calibrator]:
        """One of `calibrators`."""
        self.ask("calibrator")
        if method not in self.calibrators:
            raise ConfigError("method", repr(method), allowed=", ".join(self.calibrators))
        return self.calibrators[method]

    def tokenizer(self, ref: str) -> TinyTokenizer:
        """The tokenizer in a model's folder."""
        from tokenizers import Tokenizer

        self.ask("tokenizer")
        if not (Path(ref) / "tokenizer.json").is_file():
            raise TokenizerError(ref, "has no tokenizer")
        return TinyTokenizer(Tokenizer.from_file(str(Path(ref) / "tokenizer.json")))

    def progress(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        """The items."""
        self.ask("progress")
        yield from items

    @property
    def all_closed(self) -> bool:
        """Whether every model that was loaded or opened has been closed."""
        return all(one.closed for one in self.loaded) and all(one.closed for one in self.streams)

    def _engine(self, config: dict[str, Any]) -> Engine:
        from pegboard import Engine

        return Engine(config)

    def ask(self, service: str) -> None:
        """Notes the use of a service, and refuses it if it is the failing one."""
        self.asked.append(service)
        if service == self._failing:
            raise ConfigError(service, "refused by the suite")


class TinyLoadedModel:
    """A model of the Llama family by its formulas."""

    def __init__(self, folder: Path, context: TinyCommandContext) -> None:
        from safetensors.torch import load_file

        config = json.loads((folder / "config.json").read_text())
        self._decoder = DenseDecoder(config, load_file(folder / "model.safetensors"))
        self._context = context
        self.closed = False

    def forward(
        self, token_ids: Sequence[int], taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """float32 logits [num_tokens, vocab_size], and hidden states [num_tokens, hidden_size]."""
        assert not self.closed, "a closed model was run"
        self._context.ask("forward")
        logits, hidden = self._decoder.forward(token_ids)
        return logits.float(), {layer: hidden[layer].float() for layer in taps}

    def close(self) -> None:
        self.closed = True


class TinyTokenizer:
    """A tokenizer of the `tokenizers` library, in the words of `interfaces.command`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids))
        return text
