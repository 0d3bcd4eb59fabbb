"""Contract suite of `AttentionBackend`.

    class TestMyBackend(AttentionContract):
        layout = staticmethod(my_layout)          # as the manifest names it
        features = frozenset({"window", "lse"})   # as the manifest promises them

        @pytest.fixture
        def make(self):
            return MyBackend                      # called with an AttentionContext

Every test runs steps through paged KV in shuffled pages and compares with dense attention in
float64 over each row's own tokens (`DenseAttention`). Pages that belong to nobody hold large
numbers: reading one is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import pytest

from pegboard.interfaces.attention import AttentionBackend, AttentionContext
from pegboard.interfaces.kv import KVGroup, TensorSpec
from pegboard.interfaces.model import AttentionShape
from pegboard.testing.attention_rows import Chunk, PagedRows, Problem

if TYPE_CHECKING:
    import torch

MakeBackend = Callable[[AttentionContext], AttentionBackend]

TREE = (-1, 0, 0, 1, 2, -1)
"""Parents of draft nodes: two branches under the first node, and a second root."""


FORK = (-1, -1, 0, 1, 2, 2)
"""Two paths whose nodes lie between each other."""


def shape(
    heads: int = 5, kv_heads: int = 1, head_dim: int = 24, **settings: float | int | None
) -> AttentionShape:
    """A layer's attention with the usual scale."""
    return AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5, **settings)  # type: ignore[arg-type]


class AttentionContract:
    """What every backend keeps; what a feature adds runs where `features` names it."""

    @staticmethod
    def layout(group: KVGroup) -> Sequence[TensorSpec]:
        """The tensors of a block, as the manifest's `layout` gives them."""
        raise NotImplementedError("override `layout`")

    features: ClassVar[frozenset[str]] = frozenset({"window", "soft_cap", "query_mask", "lse"})
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    device: ClassVar[str] = "cpu"
    head_dims: ClassVar[tuple[int, ...]] = (24, 64)
    block_sizes: ClassVar[tuple[int, ...]] = (4, 16)
    row_invariant: ClassVar[bool] = False
    tolerance: ClassVar[dict[str, float]] = {
        "float64": 1e-10,
        "float32": 2e-5,
        "bfloat16": 4e-2,
        "float16": 5e-3,
    }

    @pytest.fixture
    def make(self) -> MakeBackend:
        """The factory under test."""
        raise NotImplementedError("override the fixture `make`")

    def rows(
        self,
        make: MakeBackend,
        *layers: AttentionShape,
        dtype: str | None = None,
        block_size: int | None = None,
        rotary_dim: int | None = None,
        num_rows: int = 4,
    ) -> PagedRows:
        """Rows in shuffled pages, and the dense reference of each."""
        problem = Problem(
            layers=layers or (shape(head_dim=self.head_dims[0]),),
            dtype=dtype or self.dtypes[0],
            device=self.device,
            block_size=block_size or self.block_sizes[0],
            rotary_dim=rotary_dim,
            num_rows=num_rows,
            lse="lse" in self.features,
        )
        return PagedRows(problem, make, self.layout)

    def needs(self, feature: str) -> None:
        """Skips the test of a feature that the backend does not promise."""
        if feature not in self.features:
            pytest.skip(f"the backend does not promise {feature}")

    def check(self, rows: PagedRows, *chunks: Chunk) -> None:
        """Runs a step and compares outputs, and the log-sum-exp where promised."""
        for got, expected in rows.step(chunks):
            kinds = (rows.problem.dtype, str(got.dtype).removeprefix("torch."))
            tolerance = max(self.tolerance[kind] for kind in kinds)
            assert got.shape == expected.shape
            error = (got.double().cpu() - expected).abs().max().item()
            assert error < tolerance * max(1.0, expected.abs().max().item()), f"off by {error}"

    @pytest.mark.parametrize("index", range(2))
    def test_prefill_then_decode(self, make: MakeBackend, index: int) -> None:
        head_dim = self.head_dims[min(index, len(self.head_dims) - 1)]
        block_size = self.block_sizes[min(index, len(self.block_sizes) - 1)]
        for dtype in self.dtypes:
            rows = self.rows(make, shape(head_dim=head_dim), dtype=dtype, block_size=block_size)
            self.check(rows, Chunk(0, 13))
            for _ in range(6):
                self.check(rows, Chunk(0, 1))

    @pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
    def test_grouped_heads(self, make: MakeBackend, heads: int, kv_heads: int) -> None:
        rows = self.rows(make, shape(heads, kv_heads, self.head_dims[0]))
        self.check(rows, Chunk(0, 9), Chunk(1, 3))
        self.check(rows, Chunk(0, 1), Chunk(1, 2))

    @pytest.mark.parametrize("size", [1, 3, 7, 40])
    def test_chunks(self, make: MakeBackend, size: int) -> None:
        rows = self.rows(make)
        for start in range(0, 40, size):
            self.check(rows, Chunk(1, min(size, 40 - start)))

    def test_prefills_and_decodes_share_a_step(self, make: MakeBackend) -> None:
        rows = self.rows(make)
        self.check(rows, Chunk(0, 21), Chunk(2, 5))
        self.check(rows, Chunk(2, 1), Chunk(1, 17), Chunk(0, 1))
        self.check(rows, Chunk(3, 1), Chunk(0, 4), Chunk(1, 1), Chunk(2, 9))

    @pytest.mark.parametrize("part", ["half", "none"])
    def test_partial_and_no_rotation(self, make: MakeBackend, part: str) -> None:
        rotary_dim = self.head_dims[0] // 2 if part == "half" else 0
        rows = self.rows(make, rotary_dim=rotary_dim)
        self.check(rows, Chunk(0, 9))
        self.check(rows, Chunk(0, 1))

    def test_layers_keep_their_own_kv(self, make: MakeBackend) -> None:
        one = shape(head_dim=self.head_dims[0])
        rows = self.rows(make, one, one, one)
        self.check(rows, Chunk(0, 7), Chunk(1, 4))
        self.check(rows, Chunk(0, 1), Chunk(1, 1))

    def test_entries_that_are_not_a_rows_may_be_anything(self, make: MakeBackend) -> None:
        rows = self.rows(make)
        self.check(rows, Chunk(0, 9), Chunk(1, 2))
        rows.stale_entry = 2**31 - 1
        self.check(rows, Chunk(0, 1), Chunk(1, 1))
        rows.stale_entry = -1
        self.check(rows, Chunk(0, 1), Chunk(1, 1))

    def test_only_the_rows_own_pages_are_written(self, make: MakeBackend) -> None:
        rows = self.rows(make)
        before = rows.snapshot()
        self.check(rows, Chunk(0, 9), Chunk(1, 2))
        rows.assert_unowned_pages_equal(before)

    def test_window(self, make: MakeBackend) -> None:
        self.needs("window")
        rows = self.rows(make, shape(head_dim=self.head_dims[0], window=6))
        self.check(rows, Chunk(0, 17), Chunk(1, 3))
        rows.forget_pages_before_window()
        for _ in range(8):
            self.check(rows, Chunk(0, 1), Chunk(1, 2))
            rows.forget_pages_before_window()

    def test_groups_with_and_without_a_window(self, make: MakeBackend) -> None:
        self.needs("window")
        wide, narrow = (
            shape(head_dim=self.head_dims[0]),
            shape(head_dim=self.head_dims[0], window=5),
        )
        rows = self.rows(make, narrow, wide, narrow)
        self.check(rows, Chunk(0, 11), Chunk(1, 4))
        self.check(rows, Chunk(1, 1), Chunk(0, 3))

    def test_soft_cap(self, make: MakeBackend) -> None:
        self.needs("soft_cap")
        rows = self.rows(make, shape(head_dim=self.head_dims[0], soft_cap=1.5))
        self.check(rows, Chunk(0, 11), Chunk(1, 4))
        self.check(rows, Chunk(1, 1), Chunk(0, 1))

    def test_draft_trees(self, make: MakeBackend) -> None:
        self.needs("query_mask")
        rows = self.rows(make)
        self.check(rows, Chunk(0, 9), Chunk(1, 6))
        self.check(rows, Chunk(0, 1, drafts=TREE), Chunk(1, 1), Chunk(2, 5))

    def test_draft_trees_within_a_window(self, make: MakeBackend) -> None:
        self.needs("query_mask")
        self.needs("window")
        rows = self.rows(make, shape(head_dim=self.head_dims[0], window=4))
        self.check(rows, Chunk(0, 9), Chunk(1, 3))
        self.check(rows, Chunk(0, 1, drafts=TREE), Chunk(1, 1, drafts=(-1, 0, 1, 2)))

    def test_the_accepted_path_is_compacted(self, make: MakeBackend) -> None:
        self.needs("query_mask")
        rows = self.rows(make)
        self.check(rows, Chunk(0, 9))
        self.check(rows, Chunk(0, 1, drafts=TREE))
        rows.accept(0, nodes=(0, 2, 4))
        self.check(rows, Chunk(0, 1))
        self.check(rows, Chunk(0, 3))

    def test_moves_read_before_they_write(self, make: MakeBackend) -> None:
        rows = self.rows(make)
        self.check(rows, Chunk(0, 12))
        rows.rotate_tokens(0, first=3, last=9)
        self.check(rows, Chunk(0, 2))

    def test_copied_pages_continue_apart(self, make: MakeBackend) -> None:
        rows = self.rows(make)
        self.check(rows, Chunk(0, 10))
        rows.fork(0, 1)
        self.check(rows, Chunk(0, 1), Chunk(1, 1))
        self.check(rows, Chunk(1, 5))
        self.check(rows, Chunk(0, 5))

    def test_row_invariant_backends_give_the_same_bits(self, make: MakeBackend) -> None:
        if not self.row_invariant:
            pytest.skip("the backend does not promise row_invariant")
        import torch

        for dtype in self.dtypes:
            alone, together, chunked = (self.rows(make, dtype=dtype) for _ in range(3))
            whole = _output(alone, Chunk(2, 33))
            beside = _output(together, Chunk(0, 5), Chunk(1, 1), Chunk(2, 33), Chunk(3, 18))[6:39]
            pieces = torch.cat([_output(chunked, Chunk(2, 7)), _output(chunked, Chunk(2, 26))])
            assert torch.equal(whole, beside) and torch.equal(whole, pieces)

    def test_row_invariant_backends_verify_with_the_bits_of_decoding(
        self, make: MakeBackend
    ) -> None:
        self.needs("query_mask")
        if not self.row_invariant:
            pytest.skip("the backend does not promise row_invariant")
        import torch

        for dtype in self.dtypes:
            plain, drafted = (self.rows(make, dtype=dtype) for _ in range(2))
            _output(drafted, Chunk(0, 62))
            verified = _output(drafted, Chunk(1, 5), Chunk(0, 1, drafts=FORK), Chunk(2, 1))
            _output(plain, Chunk(0, 62))
            decoded = torch.cat([_output(plain, Chunk(0, 1)) for _ in range(4)])
            # The last token and the path of each depth's first node, after the other row's tokens.
            assert torch.equal(verified[[5, 6, 8, 10]], decoded)


def _output(rows: PagedRows, *chunks: Chunk) -> torch.Tensor:
    return next(iter(rows.step(chunks)))[0]
