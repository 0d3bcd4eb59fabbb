"""Keys and values in codes of a byte, in plain torch: the formula is in `interfaces/attention.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pegboard.interfaces.attention import ENCODINGS, AttentionContext


@dataclass(frozen=True, slots=True)
class Codes:
    """The codes of an encoding: each stands for a number divided by its scale.

    Attributes:
        dtype: of the codes; blocks hold its bytes as `stored`.
        largest: the code of the largest number of a token's head.
    """

    dtype: torch.dtype
    stored: torch.dtype
    largest: float

    def encode(
        self, x: torch.Tensor, fixed: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of x [..., num_kv_heads, head_dim].

        Args:
            x: keys or values.
            fixed: float32 [num_kv_heads], the scales to take; None: each token's and head's own.

        Returns:
            `stored` of x's shape, and float32 [..., num_kv_heads].
        """
        x = x.float()
        size = x.abs().amax(dim=-1)
        scale = size / self.largest if fixed is None else fixed.expand_as(size)
        # A number that is not finite stays so, and is seen when it is read.
        scale = scale.where(size.isfinite(), torch.nan)[..., None]
        numbers = torch.where(scale > 0, x / scale, 0.0).clamp(-self.largest, self.largest)
        if not self.dtype.is_floating_point:
            numbers = numbers.round()
        return numbers.to(self.dtype).view(self.stored), scale[..., 0]

    def decode(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The numbers that codes stand for, float32; shapes as `encode` gives them."""
        return codes.view(self.dtype).float() * scale[..., None]


CODES = {
    "int8": Codes(torch.int8, torch.int8, 127.0),
    "fp8_e4m3": Codes(torch.float8_e4m3fn, torch.uint8, 448.0),
}
"""The codes of each encoding."""


def fixed_scales(context: AttentionContext, encoding: str, layer: int) -> dict[str, torch.Tensor]:
    """The checkpoint's scales of a layer's `k` and `v`; empty where it has none for the encoding."""
    scales = context.kv_scales.get(layer)
    if scales is None or scales.codes != ENCODINGS.get(encoding):
        return {}
    return {
        "k": torch.tensor(scales.k, device=context.device),
        "v": torch.tensor(scales.v, device=context.device),
    }
