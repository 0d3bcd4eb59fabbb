"""The native attention backend keeps its contract."""

from __future__ import annotations

import pytest

from pegboard.testing.attention import AttentionContract, MakeBackend
from pegboard_cpu.attention import CPUAttention
from pegboard_cpu.attention_layout import layout


class TestCPUAttention(AttentionContract):
    layout = staticmethod(layout)
    features = AttentionContract.features | {"skipped"}
    encodings = ("none", "fp8_e4m3", "int8")
    row_invariant = True

    @pytest.fixture
    def make(self) -> MakeBackend:
        return CPUAttention
