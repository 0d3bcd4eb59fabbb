"""The contract suite of attention fails on backends that keep encoded KV wrongly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pegboard.builtin.torch_attention import TorchAttention
from pegboard.builtin.torch_attention_codes import CODES, Codes
from pegboard.builtin.torch_attention_layout import layout
from pegboard.interfaces.attention import AttentionContext
from pegboard.testing.attention import AttentionContract, MakeBackend

Encoded = tuple[torch.Tensor, torch.Tensor]


class ScaleOfAllTokens(Codes):
    """A scale that the step's tokens share."""

    def encode(self, x: torch.Tensor, fixed: torch.Tensor | None) -> Encoded:
        shared = x.float().abs().amax(dim=(0, 2)) / self.largest
        return super().encode(x, shared if fixed is None else fixed)


class ScaleOfAllHeads(Codes):
    """A scale that a token's heads share."""

    def encode(self, x: torch.Tensor, fixed: torch.Tensor | None) -> Encoded:
        if fixed is not None:
            return super().encode(x, fixed)
        codes, scale = super().encode(x.flatten(1)[:, None], None)
        return codes.view(x.shape), scale.expand(x.shape[:2])


class Truncated(Codes):
    """Codes that are not rounded to the nearest."""

    def encode(self, x: torch.Tensor, fixed: torch.Tensor | None) -> Encoded:
        _, scale = super().encode(x, fixed)
        numbers = (x.float() / scale[..., None]).clamp(-self.largest, self.largest)
        return numbers.trunc().to(self.dtype).view(self.stored), scale


class HalfAwayFromZero(Codes):
    """Codes of numbers half way between two are the larger ones, as C's `round` gives them."""

    def encode(self, x: torch.Tensor, fixed: torch.Tensor | None) -> Encoded:
        return super().encode(torch.where(x == 0, x, x * (1 + 1e-6)), fixed)


class Unclamped(Codes):
    """Numbers beyond the largest wrap around."""

    def encode(self, x: torch.Tensor, fixed: torch.Tensor | None) -> Encoded:
        _, scale = super().encode(x, fixed)
        return (x.float() / scale[..., None]).round().to(torch.int64).to(torch.int8), scale


class OwnTokensAsTheyAre(TorchAttention):
    """Reads the step's own keys and values before they were encoded."""

    def _write(self, layer: int, name: str, x: torch.Tensor) -> None:
        super()._write(layer, name, x)
        self._own = {**getattr(self, "_own", {}), (layer, name): x}

    def _read(self, layer: int, name: str, slots: torch.Tensor) -> torch.Tensor:
        read = super()._read(layer, name, slots)
        written = self._write_slots[self._group_of[layer]]
        for token, slot in enumerate(written.tolist()):
            read[slots == slot] = self._own[layer, name][token].to(read.dtype)
        return read


class CopiesNoScales(TorchAttention):
    def copy_blocks(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None:
        for layer in self._groups[group].layers:
            for name in "kv":
                self._kv[layer][name][target] = self._kv[layer][name][source]


class MovesNoScales(TorchAttention):
    def move_slots(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None:
        for layer in self._groups[group].layers:
            for name in "kv":
                self._flat[layer][name][target] = self._flat[layer][name][source]


def without_static_scales(context: AttentionContext) -> TorchAttention:
    return TorchAttention(replace(context, kv_scales={}))


class Suite(AttentionContract):
    layout = staticmethod(layout)


Test = Callable[[Suite, MakeBackend], None]

CODERS: list[tuple[type[Codes], str, Test]] = [
    (ScaleOfAllTokens, "int8", Suite.test_tokens_do_not_share_a_scale),
    (ScaleOfAllTokens, "fp8_e4m3", Suite.test_tokens_do_not_share_a_scale),
    (ScaleOfAllHeads, "int8", Suite.test_tokens_do_not_share_a_scale),
    (ScaleOfAllHeads, "fp8_e4m3", Suite.test_tokens_do_not_share_a_scale),
    (Truncated, "int8", Suite.test_layers_keep_their_own_kv),
    (
        HalfAwayFromZero,
        "int8",
        Suite.test_every_number_of_the_encoding_and_all_half_way_between_two,
    ),
    (
        HalfAwayFromZero,
        "fp8_e4m3",
        Suite.test_every_number_of_the_encoding_and_all_half_way_between_two,
    ),
    (Unclamped, "int8", Suite.test_static_scales),
]
BACKENDS: list[tuple[MakeBackend, Test]] = [
    (OwnTokensAsTheyAre, Suite.test_layers_keep_their_own_kv),
    (CopiesNoScales, Suite.test_copied_blocks_continue_apart),
    (MovesNoScales, Suite.test_moves_read_before_they_write),
    (MovesNoScales, Suite.test_the_accepted_path_is_compacted),
    (without_static_scales, Suite.test_static_scales),
]


def suite(encoding: str) -> Suite:
    made = Suite()
    made.encoding = encoding
    return made


@pytest.mark.parametrize(("coder", "encoding", "test"), CODERS)
def test_wrong_codes(
    coder: type[Codes], encoding: str, test: Test, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = CODES[encoding]
    test(suite(encoding), TorchAttention)
    wrong = coder(right.dtype, right.stored, right.largest)
    monkeypatch.setitem(CODES, encoding, wrong)
    with pytest.raises(AssertionError):
        test(suite(encoding), TorchAttention)


@pytest.mark.parametrize("encoding", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize(("make", "test"), BACKENDS)
def test_wrong_blocks(make: MakeBackend, test: Test, encoding: str) -> None:
    with pytest.raises(AssertionError):
        test(suite(encoding), make)
