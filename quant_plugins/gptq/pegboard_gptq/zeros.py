"""The zeros of GPTQ checkpoints, which are stored in several ways that files do not always tell."""

from __future__ import annotations

import logging

import torch

from pegboard.errors import CheckpointError
from pegboard_gptq.config import GPTQSettings
from pegboard_quant.bitstream import unpack

_log = logging.getLogger(__name__)

_WORD = 2**32


def zeros_of(
    words: torch.Tensor, num_outputs: int, settings: GPTQSettings, name: str
) -> torch.Tensor:
    """The zeros of a layer, uint8 [groups, out].

    Args:
        words: int32 [groups, words], streams of fields.
        num_outputs: fields of a row.
        settings: what the config says of the layer.
        name: of the tensor.

    Raises:
        CheckpointError: config and fields contradict each other.
    """
    bits = settings.bits
    fields = unpack(words, bits, num_outputs)
    middle = 1 << (bits - 1)
    # The config's word for the format is wrong in files in the wild. Of symmetric ones the fields
    # themselves tell it.
    if settings.symmetric is not False and _all_are(fields, middle - 1, middle):
        return torch.full_like(fields, middle)
    if settings.symmetric:
        raise CheckpointError(
            f"tensor {name}",
            f"holds zeros from {int(fields.min())} to {int(fields.max())}, and the config says sym",
            allowed=f"{middle - 1} (format gptq) or {middle} (gptq_v2) everywhere",
            fix="get config and weights from one checkpoint",
        )
    return _plus_one(words, fields, settings, name) if settings.zeros_less_one else fields


def _all_are(fields: torch.Tensor, *allowed: int) -> bool:
    """Whether all fields are one and the same of these numbers."""
    return any(bool((fields == number).all()) for number in allowed)


def _plus_one(
    words: torch.Tensor, fields: torch.Tensor, settings: GPTQSettings, name: str
) -> torch.Tensor:
    """Fields that were stored less one. Those of a zero of 0 are full, and what their writer did to
    the neighbours depends on it."""
    bits = settings.bits
    most = (1 << bits) - 1
    if not bool((fields == most).any()):
        return fields + 1
    if settings.borrowed and _fills_words(bits):
        ones = sum(1 << shift for shift in range(0, 32, bits))
        whole = (words.long() % _WORD + ones) % _WORD
        return unpack(_as_int32(whole), bits, fields.shape[1])
    _log.warning("%s: stored zeros of %d are taken for 0 less one", name, most)
    return (fields + 1) & most


def _fills_words(bits: int) -> bool:
    return 32 % bits == 0


def _as_int32(words: torch.Tensor) -> torch.Tensor:
    """int64 of [0, 2**32) as the int32 of the same bits."""
    return torch.where(words >= _WORD // 2, words - _WORD, words).to(torch.int32)
