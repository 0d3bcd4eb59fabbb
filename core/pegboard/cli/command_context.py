"""The context that plugins' commands find in typer's `ctx.obj`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from pegboard.config import Config
from pegboard.config_values import shown
from pegboard.errors import ManifestFunctionFailed, PluginNotInstalled, TokenizerError
from pegboard.interfaces.command import CommandContext, LayerStream, LoadedModel, Tokenizer
from pegboard.interfaces.quantizer import Calibrator

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
        from pegboard.compose import load_text_model

        config = {"model": ref, "quantizer": quantizer, "scheduler": {"max_num_seqs": 1}}
        return load_text_model(self.resolve(config).composition)

    def stream_layers(self, ref: str) -> LayerStream:
        """A model that computes in float32, a decoder layer at a time."""
        from pegboard.cli.streamed_model import StreamedModel

        config = {"model": ref, "dtype": "float32", "scheduler": {"max_num_seqs": 1}}
        return StreamedModel(self.resolve(config))

    def calibrator(self, method: str) -> type[Calibrator]:
        """The class that a quantizer's manifest entry names. Raises PluginNotInstalled when no
        manifest names the method."""
        from pegboard.plugins.claims import foremost, settled
        from pegboard.plugins.discovery import discover
        from pegboard.plugins.known import suggestion
        from pegboard.plugins.loader import resolve_dotted

        catalog = discover()
        offers = catalog.offers("quantizer")
        found = [offer for offer in offers if method in offer.entry.calibrators]
        if not found:
            named = {name for offer in offers for name in offer.entry.calibrators}
            distribution = suggestion("quantizer", method)
            raise PluginNotInstalled(
                method,
                f"no plugin that is installed quantizes by {method!r}",
                key="method",
                allowed=", ".join(sorted(named)),
                fix=f"pip install {distribution}" if distribution else "",
            )
        offer = settled(foremost(catalog, found), "method", fix="uninstall one of them")
        dotted = offer.entry.calibrators[method]
        calibrator = resolve_dotted(dotted, offer.origin)
        if not (isinstance(calibrator, type) and issubclass(calibrator, Calibrator)):
            raise offer.origin.error(
                ManifestFunctionFailed,
                f"its calibrator {dotted!r} is {shown(calibrator)}",
                allowed="a subclass of pegboard.interfaces.quantizer.Calibrator",
            )
        return calibrator

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
