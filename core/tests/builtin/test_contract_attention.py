"""The built-in attention backend keeps its contract."""

from __future__ import annotations

import pytest

from pegboard.builtin.torch_attention import TorchAttention
from pegboard.builtin.torch_attention_layout import layout
from pegboard.testing.attention import AttentionContract, MakeBackend


class TestTorchAttention(AttentionContract):
    layout = staticmethod(layout)
    features = AttentionContract.features | {"skipped"}
    encodings = ("none", "fp8_e4m3", "int8")
    dtypes = ("float32", "float64", "bfloat16")

    @pytest.fixture
    def make(self) -> MakeBackend:
        return TorchAttention
