"""Tensors are searched for numbers that are none."""

from __future__ import annotations

import pytest
import torch

from pegboard.errors import CheckpointError
from pegboard_quant.checks import check_no_nan

FINITE = [code for code in range(256) if code & 0x7F != 0x7F]


def test_both_nans_of_e4m3_are_seen_and_nothing_else_is() -> None:
    finite = torch.tensor(FINITE, dtype=torch.uint8)
    check_no_nan("codes", finite.view(torch.float8_e4m3fn))
    for nan in (0x7F, 0xFF):
        codes = torch.tensor([*FINITE, nan], dtype=torch.uint8)
        with pytest.raises(CheckpointError, match="tensor codes: holds NaNs"):
            check_no_nan("codes", codes.view(torch.float8_e4m3fn))


def test_whole_numbers_are_no_nans() -> None:
    check_no_nan("codes", torch.arange(-128, 128, dtype=torch.int8))
