"""Contract suite of `AttentionBackend`.

    class TestMyBackend(AttentionContract):
        layout = staticmethod(my_layout)          # as the manifest names it
        features = frozenset({"window", "lse"})   # as the manifest promises them
        encodings = ("none", "int8")              # as the manifest lists them

        @pytest.fixture
        def make(self):
            return MyBackend                      # called with an AttentionContext

Every test runs for every encoding: steps through paged KV in shuffled blocks, compared with dense
attention in float64 over each row's own tokens (`DenseAttention`), as their encoding gives them back.
Blocks that belong to nobody hold large numbers: reading one is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import pytest

from pegboard.interfaces.attention import (
    ENCODINGS,
    AttentionBackend,
    AttentionContext,
    KVScales,
)
from pegboard.interfaces.kv import KVGroup, TensorSpec
from pegboard.interfaces.model import AttentionShape
from pegboard.testing.attention_encoding import SIZES, ReadBack
from pegboard.testing.attention_rows import Chunk, PagedRows, Problem
from pegboard.testing.attention_tokens import values_alone

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
    """The contract of every backend; tests of a feature run if `features` names it."""

    @staticmethod
    def layout(group: KVGroup) -> Sequence[TensorSpec]:
        """The tensors of a block, as the manifest's `layout` gives them."""
        raise NotImplementedError("override `layout`")

    features: ClassVar[frozenset[str]] = frozenset({"window", "soft_cap", "query_mask", "lse"})
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    encodings: ClassVar[tuple[str, ...]] = ("none",)
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

    encoding = "none"
    """The encoding that the test runs for."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "each_encoding" in metafunc.fixturenames:
            metafunc.parametrize("each_encoding", self.encodings, indirect=True)

    @pytest.fixture(autouse=True)
    def each_encoding(self, request: pytest.FixtureRequest) -> None:
        self.encoding = request.param

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
        kv_scales: Mapping[int, KVScales] | None = None,
        loudness: float = 0.0,
    ) -> PagedRows:
        """Rows in shuffled blocks, and the dense reference of each."""
        problem = Problem(
            layers=layers or (shape(head_dim=self.head_dims[0]),),
            dtype=dtype or self.dtypes[0],
            device=self.device,
            block_size=block_size or self.block_sizes[0],
            rotary_dim=rotary_dim,
            num_rows=num_rows,
            lse="lse" in self.features,
            encoding=self.encoding,
            kv_scales=kv_scales or {},
            loudness=loudness,
        )
        return PagedRows(problem, make, self.layout)

    def alone(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers as values of one head, padded with zeros: [num_rows, 1, head_dim]."""
        import torch

        head_dim = self.head_dims[0]
        values = torch.nn.functional.pad(numbers, (0, -len(numbers) % head_dim))
        return values.view(-1, 1, head_dim).to(self.device, getattr(torch, self.dtypes[0]))

    def group(self, values: torch.Tensor) -> KVGroup:
        """A group of one layer with such values."""
        _, heads, head_dim = values.shape
        size = self.block_sizes[0]
        return KVGroup((0,), heads, head_dim, size, None, self.encoding, self.dtypes[0])

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

    def test_only_the_rows_own_blocks_are_written(self, make: MakeBackend) -> None:
        rows = self.rows(make)
        before = rows.snapshot()
        self.check(rows, Chunk(0, 9), Chunk(1, 2))
        rows.assert_unowned_blocks_equal(before)

    def test_window(self, make: MakeBackend) -> None:
        self.needs("window")
        rows = self.rows(make, shape(head_dim=self.head_dims[0], window=6))
        self.check(rows, Chunk(0, 17), Chunk(1, 3))
        rows.forget_blocks_before_window()
        for _ in range(8):
            self.check(rows, Chunk(0, 1), Chunk(1, 2))
            rows.forget_blocks_before_window()

    def test_groups_with_and_without_a_window(self, make: MakeBackend) -> None:
        self.needs("window")
        wide, narrow = (
            shape(head_dim=self.head_dims[0]),
            shape(head_dim=self.head_dims[0], window=5),
        )
        rows = self.rows(make, narrow, wide, narrow)
        self.check(rows, Chunk(0, 11), Chunk(1, 4))
        self.check(rows, Chunk(1, 1), Chunk(0, 3))

    @pytest.mark.parametrize("window", [None, 6])
    def test_skipped_tokens_have_no_keys(self, make: MakeBackend, window: int | None) -> None:
        self.needs("skipped")
        if window:
            self.needs("window")
        for skipped in (1, self.block_sizes[0] + 1):
            rows = self.rows(
                make, shape(head_dim=self.head_dims[0], window=window, skipped=skipped)
            )
            self.check(rows, Chunk(0, 9), Chunk(1, 1))
            rows.forget_blocks_before_window()
            self.check(rows, Chunk(0, 1), Chunk(1, 12), Chunk(2, 2))
            if "query_mask" in self.features:
                self.check(rows, Chunk(0, 1, drafts=TREE), Chunk(2, 1, drafts=FORK))
                rows.accept(0, nodes=(0, 2, 4))
            rows.fork(0, 3)
            self.check(rows, Chunk(0, 2), Chunk(3, 1))

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

    def test_copied_blocks_continue_apart(self, make: MakeBackend) -> None:
        rows = self.rows(make)
        self.check(rows, Chunk(0, 10))
        rows.fork(0, 1)
        self.check(rows, Chunk(0, 1), Chunk(1, 1))
        self.check(rows, Chunk(1, 5))
        self.check(rows, Chunk(0, 5))

    def test_static_scales(self, make: MakeBackend) -> None:
        """Scales by layer and head, some too small for the largest numbers; one layer has none."""
        if self.encoding == "none":
            pytest.skip("nothing is scaled")
        one = shape(4, 2, self.head_dims[0])
        largest = SIZES[self.encoding][-1]
        small, large = float(1.0 / largest), float(8.0 / largest)
        scales = KVScales(ENCODINGS[self.encoding], (small, large), (large, small))
        rows = self.rows(make, one, one, kv_scales={1: scales})
        self.check(rows, Chunk(0, 9), Chunk(1, 3))
        rows.fork(0, 2)
        self.check(rows, Chunk(0, 1), Chunk(1, 2), Chunk(2, 5))

    @pytest.mark.parametrize("codes", sorted(set(ENCODINGS.values())))
    def test_static_scales_of_other_codes_are_not_taken(
        self, make: MakeBackend, codes: str
    ) -> None:
        if codes == ENCODINGS.get(self.encoding):
            pytest.skip("these are the encoding's own")
        rows = self.rows(make, kv_scales={0: KVScales(codes, (100.0,), (100.0,))})
        self.check(rows, Chunk(0, 9))
        self.check(rows, Chunk(0, 1))

    def test_tokens_do_not_share_a_scale(self, make: MakeBackend) -> None:
        """Heads and tokens of very unlike size, in one block."""
        if self.encoding == "none":
            pytest.skip("nothing is scaled")
        rows = self.rows(make, shape(4, 2, self.head_dims[0]), loudness=3.0)
        self.check(rows, Chunk(0, 9), Chunk(1, 3))
        self.check(rows, Chunk(0, 1), Chunk(1, 2))

    def test_every_number_of_the_encoding_and_all_half_way_between_two(
        self, make: MakeBackend
    ) -> None:
        if self.encoding == "none":
            pytest.skip("numbers are kept as they are")
        import numpy as np
        import torch

        sizes = SIZES[self.encoding]
        half_way = (sizes[1:] + sizes[:-1]) / 2
        numbers = np.concatenate([sizes, half_way, [1.5 * sizes[-1], 1e30]])
        values = self.alone(torch.from_numpy(np.concatenate([numbers, -numbers])))
        scales = KVScales(ENCODINGS[self.encoding], (1.0,), (1.0,))
        got = values_alone(make, self.layout, self.group(values), values, scales)
        expected = ReadBack(self.encoding, scales.v)(values.cpu())
        assert torch.equal(got.double().cpu(), expected)

    def test_heads_of_zeros_and_of_the_smallest_numbers(self, make: MakeBackend) -> None:
        import torch

        values = self.alone(torch.tensor([0.0, 1e-45, 1e-38, 1e-30, 1e-4]))
        values = values.flatten()[:5, None, None].expand(5, 1, self.head_dims[0]).contiguous()
        got = values_alone(make, self.layout, self.group(values), values)
        assert got.isfinite().all() and not got[0].any()
        assert torch.allclose(got[3:], values[3:], rtol=0.01, atol=0)

    @pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")], ids=str)
    @pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
    def test_what_is_not_finite_is_not_hidden(
        self, make: MakeBackend, static: bool, number: float
    ) -> None:
        import torch

        values = self.alone(torch.ones(3 * self.head_dims[0], dtype=torch.float64))
        values[1, 0, 5] = number
        codes = ENCODINGS.get(self.encoding, "int8")
        scales = KVScales(codes, (1.0,), (1.0,)) if static else None
        got = values_alone(make, self.layout, self.group(values), values, scales)
        assert torch.equal(got[[0, 2]], torch.ones_like(got[[0, 2]]))
        assert not got[1, 0, 5].isfinite()

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
