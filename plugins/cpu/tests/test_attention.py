"""Attention over blocks full of NaN equals dense attention, at odd shapes and on several threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pegboard.errors import ConfigError
from pegboard.interfaces.attention import AttentionContext
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.model import AttentionShape
from pegboard.testing.attention_reference import ReferenceRotary
from pegboard.testing.attention_rows import Chunk, PagedRows, Problem
from pegboard_cpu.attention import CPUAttention
from pegboard_cpu.attention_layout import layout

TREE = (-1, -1, 0, 1, 2, 0, 4)


@pytest.fixture(autouse=True)
def outputs_start_as_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives
    yield
    torch.use_deterministic_algorithms(False)


def paged(
    shape: AttentionShape,
    block_size: int = 16,
    num_threads: int = 1,
    rotary_dim: int | None = None,
    num_rows: int = 3,
) -> PagedRows:
    problem = Problem(
        (shape,), "float32", "cpu", block_size, rotary_dim, num_rows, True, num_threads, torch.nan
    )
    return PagedRows(problem, CPUAttention, layout)


def check(rows: PagedRows, *chunks: Chunk) -> None:
    for got, expected in rows.step(chunks):
        torch.testing.assert_close(got, expected.float(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [24, 64, 80, 128])
def test_odd_shapes_equal_dense_attention(head_dim: int, group: int, block_size: int) -> None:
    shape = AttentionShape(2 * group, 2, head_dim, head_dim**-0.5)
    rows = paged(shape, block_size, num_threads=2)
    check(rows, Chunk(0, 66), Chunk(1, 3), Chunk(2, 1))
    check(rows, Chunk(1, 9), Chunk(0, 1), Chunk(2, 2))
    check(rows, Chunk(2, 1), Chunk(1, 1, drafts=TREE), Chunk(0, 1, drafts=TREE))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (5, 0.7), (70, None), (None, 30.0)])
def test_windows_and_caps_on_threads_equal_dense_attention(
    window: int | None, soft_cap: float | None, num_threads: int
) -> None:
    shape = AttentionShape(6, 2, 24, 0.3, window=window, soft_cap=soft_cap)
    rows = paged(shape, block_size=3, num_threads=num_threads)
    check(rows, Chunk(0, 130), Chunk(1, 50))
    rows.forget_blocks_before_window()
    for _ in range(2):
        check(rows, Chunk(1, 20), Chunk(0, 1, drafts=TREE))
        rows.forget_blocks_before_window()


@pytest.mark.parametrize("rotary_dim", [0, 2, 10, 20])
def test_heads_that_fill_no_vector_and_turn_in_part(rotary_dim: int) -> None:
    rows = paged(AttentionShape(3, 3, 20, 0.2), block_size=8, rotary_dim=rotary_dim)
    check(rows, Chunk(0, 66), Chunk(1, 1))
    check(rows, Chunk(0, 1), Chunk(1, 1))


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    rows = paged(AttentionShape(2, 1, 64, 40.0))
    for got, expected in rows.step([Chunk(0, 130), Chunk(1, 2)]):
        # Scores are in the thousands: their own rounding is what shows.
        torch.testing.assert_close(got, expected.float(), rtol=1e-3, atol=1e-3)


def test_an_encoding_that_it_lacks_is_refused() -> None:
    allowed = "none, fp8_e4m3, int8"
    with pytest.raises(ConfigError, match=rf"kv_cache\.encoding: 'int4'.*allowed: {allowed}"):
        layout(KVGroup((0,), 2, 24, 16, None, "int4", "float32"))


def test_another_dtype_is_refused() -> None:
    context = AttentionContext((), (), 1, "bfloat16", "cpu", 1, ReferenceRotary())
    with pytest.raises(ConfigError, match=r"dtype: 'bfloat16'.*allowed: float32"):
        CPUAttention(context)
