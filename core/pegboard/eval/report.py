"""A comparison as plain values, and the limits that it is held to."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING

import msgspec

from pegboard.errors import ConfigError
from pegboard.eval.generation import Agreement, Speed
from pegboard.eval.quality import Quality

if TYPE_CHECKING:
    from pegboard.compose import Prepared


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the configs.

    Attributes:
        ref: as it was named on the command line.
        model: the config's.
        about: dtype, quantizer with its options, kernels of linear layers.
        weight_bytes, total_bytes: of the ledger: all weights, and with activations and KV pool.
        speed: measured, unless generation was left out.
    """

    ref: str
    model: str
    about: dict[str, str]
    weight_bytes: int
    total_bytes: int
    speed: Speed | None = None


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """The text that the models read, and its windows.

    Attributes:
        file: its path.
        num_tokens: of it that were used.
        window, stride: tokens.
        num_windows: each read by itself.
        bos: the token that each window begins with; None: none does.
    """

    file: str
    num_tokens: int
    window: int
    stride: int
    num_windows: int
    bos: int | None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The most by which A may differ from B; None: any amount."""

    max_kl: float | None = None
    max_perplexity_ratio: float | None = None
    min_top1: float | None = None

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return any(value is not None for value in msgspec.structs.astuple(self))

    def check(self) -> None:
        """Raises ConfigError for a limit that no result could keep or pass."""
        for flag, value in self.flags().items():
            high = 1.0 if flag == "--min-top1" else float("inf")
            if value is not None and not 0 <= value <= high:
                allowed = "0 to 1" if high == 1.0 else "a number, 0 or more"
                raise ConfigError(flag, f"{value:g}", allowed=allowed)

    def flags(self) -> dict[str, float | None]:
        """The limits by the flags that set them."""
        values = msgspec.structs.asdict(self).items()
        return {"--" + name.replace("_", "-"): value for name, value in values}


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, as `--json` writes it.

    Attributes:
        pegboard_version, date: of the run; the date in UTC.
        a, b: the configs.
        text: that they read.
        quality: how they did.
        greedy: how their texts agree, unless generation was left out or there is no B.
        limits: on the differences.
        passed: a line for each limit that was passed.
    """

    pegboard_version: str = msgspec.field(default_factory=lambda: version("pegboard"))
    date: str = msgspec.field(
        default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
    )
    a: Side
    b: Side | None
    text: Text
    quality: Quality
    greedy: Agreement | None
    limits: Limits
    passed: tuple[str, ...]


def side(ref: str, prepared: Prepared, speed: Speed | None) -> Side:
    """A config, with its measurements."""
    composition, entries = prepared.composition, prepared.ledger.entries
    quantizer = composition.target.parts["quantizer"]
    options = ", ".join(f"{key} {value}" for key, value in quantizer.options.items())
    linear = sorted(
        f"{kernel.format} ({kernel.part.name})"
        for kernel in composition.target.kernels
        if kernel.operation == "linear"
    )
    return Side(
        ref=ref,
        model=composition.model_name,
        about={
            "dtype": composition.dtype,
            "quantizer": quantizer.name + (f" ({options})" if options else ""),
            "linear layers": ", ".join(linear),
            "KV encoding": ", ".join(sorted({g.encoding for g in composition.groups})),
        },
        weight_bytes=sum(e.num_bytes for e in entries if e.name.startswith("weights")),
        total_bytes=prepared.ledger.total_bytes,
        speed=speed,
    )


def passed(limits: Limits, quality: Quality) -> Iterator[str]:
    """A line for each limit that the result does not keep; what is not a number keeps none."""
    found = quality.divergence
    if found is None:
        return
    within = {
        "--max-kl": ("KL divergence", found.kl_mean, float.__le__),
        "--max-perplexity-ratio": ("perplexity ratio", found.perplexity_ratio, float.__le__),
        "--min-top1": ("top-1 agreement", found.top1_agreement, float.__ge__),
    }
    for flag, limit in limits.flags().items():
        name, value, keeps = within[flag]
        if limit is not None and not keeps(value, limit):
            yield f"{name} {value:.6g} passes {flag} {limit:g}"
