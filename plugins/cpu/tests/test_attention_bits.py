"""A token's output is a fixed function of what it sees: the same bits however it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from pegboard.interfaces.model import AttentionShape
from pegboard.testing.attention_rows import Chunk, PagedRows, Problem
from pegboard_cpu.attention import CPUAttention
from pegboard_cpu.attention_layout import layout

LENGTH = 140
DRAFTS = (-1, -1, 0, 1, 2, 2, 4, 5)
PATH = (0, 2, 4, 6)
"""The first node of each depth; others stand between."""


@dataclass(frozen=True)
class Kind:
    """The inputs of attention."""

    shape: AttentionShape
    encoding: str = "none"


KINDS = {
    "plain": Kind(AttentionShape(6, 2, 24, 0.2)),
    "window": Kind(AttentionShape(8, 1, 64, 0.125, window=70)),
    "cap": Kind(AttentionShape(3, 3, 80, 0.1, soft_cap=2.0)),
    "int8": Kind(AttentionShape(6, 2, 24, 0.2), "int8"),
    "fp8": Kind(AttentionShape(8, 1, 64, 0.125, window=70), "fp8_e4m3"),
}


def paged(kind: Kind, block_size: int = 16, num_threads: int = 1) -> PagedRows:
    problem = Problem(
        (kind.shape,),
        "float32",
        "cpu",
        block_size,
        None,
        4,
        True,
        num_threads,
        poison=torch.nan,
        encoding=kind.encoding,
    )
    return PagedRows(problem, CPUAttention, layout)


def bits(rows: PagedRows, *chunks: Chunk) -> torch.Tensor:
    """Outputs and log-sum-exp of a step's tokens, [num_tokens, elements]."""
    return torch.cat([got.flatten(1) for got, _ in rows.step(chunks)], dim=1)


@cache
def whole_prompt(kind: Kind, row: int = 0, length: int = LENGTH) -> torch.Tensor:
    return bits(paged(kind), Chunk(row, length))


def in_chunks(rows: PagedRows, sizes: Sequence[int]) -> torch.Tensor:
    return torch.cat([bits(rows, Chunk(0, size)) for size in sizes])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("sizes", [(1,) * LENGTH, (64, 64, 12), (7, 1, 57, 1, 70, 4)])
def test_chunks_on_threads_have_the_bits_of_the_whole_prompt(
    name: str, sizes: tuple[int, ...]
) -> None:
    rows = paged(KINDS[name], num_threads=2)
    assert torch.equal(in_chunks(rows, sizes), whole_prompt(KINDS[name]))


@pytest.mark.parametrize("num_threads", [2, 3, 4])
@pytest.mark.parametrize("name", KINDS)
def test_threads_that_share_a_rows_tiles_give_the_same_bits(name: str, num_threads: int) -> None:
    long = LENGTH + 109
    rows = paged(KINDS[name], num_threads=num_threads)
    plain = whole_prompt(KINDS[name], length=long)
    assert torch.equal(in_chunks(rows, (long - 2, 1, 1)), plain)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_blocks_of_every_size_give_the_same_bits(name: str, block_size: int) -> None:
    rows = paged(KINDS[name], block_size)
    assert torch.equal(in_chunks(rows, (100, 1, 39)), whole_prompt(KINDS[name]))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_a_batch_on_threads_has_the_bits_of_a_row_alone(name: str, num_threads: int) -> None:
    rows = paged(KINDS[name], num_threads=num_threads)
    first = bits(rows, Chunk(0, 11), Chunk(1, 1), Chunk(2, LENGTH - 1), Chunk(3, 30))
    second = bits(rows, Chunk(3, 1), Chunk(2, 1), Chunk(0, 20))
    alone = whole_prompt(KINDS[name], row=2)
    assert torch.equal(torch.cat([first[12 : 11 + LENGTH], second[1:2]]), alone)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("context", [3, 61, 64, 126])
def test_a_draft_node_has_the_bits_of_its_path_decoded_plainly(name: str, context: int) -> None:
    rows = paged(KINDS[name])
    bits(rows, Chunk(0, context))
    verified = bits(rows, Chunk(1, 2), Chunk(0, 1, drafts=DRAFTS))[2:]
    path = verified[[0, *(1 + node for node in PATH)]]
    plain = whole_prompt(KINDS[name])[context : context + len(path)]
    assert torch.equal(path, plain)
    rows.accept(0, PATH)
    rest = LENGTH - context - len(path)
    assert torch.equal(bits(rows, Chunk(0, rest)), whole_prompt(KINDS[name])[-rest:])
