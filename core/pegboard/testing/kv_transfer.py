"""Contract suite of `KVTransferHost` and `KVTransferWorker`.

    class TestMyTransfer(KVTransferContract):
        @pytest.fixture
        def make(self):
            store = MyStore()               # what the engines of one test share
            return lambda context: (MyHost(context, store), MyWorker(context, store))

The suite plays the engines: each call of `make` is one, with KV of its own, and its blocks hold numbers
that depend on the tokens up to their end. A transfer may bring less than it could; it must not bring
anything else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.kv_transfer import TransferPlan
from pegboard.testing.kv_transfer_engine import Blocks, MakeTransfer, ServedKV

__all__ = ["KVTransferContract", "MakeTransfer"]

LONGEST_WAIT_S = 2.0
"""Deadlines that are further ahead are not waited for."""

_property = settings(deadline=None, suppress_health_check=list(HealthCheck))


class KVTransferContract:
    """The contract of both halves of every transfer.

    Attributes:
        block_sizes: of the KV groups, a tuple for each kind of model to test.
        num_tokens: of a prefix that is long enough to be worth moving.
    """

    block_sizes: ClassVar[tuple[tuple[int, ...], ...]] = ((4,), (2, 4))
    num_tokens: ClassVar[int] = 24

    @pytest.fixture
    def make(self) -> MakeTransfer:
        """Makes both halves of one engine; all engines of a test can reach each other."""
        raise NotImplementedError("override the fixture `make`")

    def pairs(self, make: MakeTransfer) -> list[tuple[ServedKV, ServedKV]]:
        """Two engines, for each kind of model."""
        return [(ServedKV(make, sizes), ServedKV(make, sizes)) for sizes in self.block_sizes]

    def tokens(self, first: int = 0) -> list[int]:
        return list(range(first, first + self.num_tokens))

    def test_nothing_is_brought_that_nobody_exported(self, make: MakeTransfer) -> None:
        for one, _ in self.pairs(make):
            assert one.fetch(self.tokens()).num_tokens == 0

    def test_what_was_exported_comes_bit_for_bit(self, make: MakeTransfer) -> None:
        for one, other in self.pairs(make):
            one.export(self.tokens())
            assert other.bring(self.tokens()) > 0, "another engine's KV does not come"

    def test_a_longer_prompt_gets_its_beginning(self, make: MakeTransfer) -> None:
        for one, other in self.pairs(make):
            kept, _ = one.export(self.tokens())
            assert other.bring([*self.tokens(), *self.tokens(5000)]) <= kept.num_tokens

    def test_tokens_are_compared_to_the_last(self, make: MakeTransfer) -> None:
        for one, other in self.pairs(make):
            one.export(self.tokens())
            for differs in (0, self.num_tokens // 2, self.num_tokens - 1):
                tokens = self.tokens()
                tokens[differs] = 9999
                assert other.bring(tokens) <= differs

    def test_salts_are_kept_apart(self, make: MakeTransfer) -> None:
        for one, other in self.pairs(make):
            one.export(self.tokens(), "a")
            assert other.fetch(self.tokens(), "b").num_tokens == 0

    def test_fingerprints_are_kept_apart(self, make: MakeTransfer) -> None:
        for sizes in self.block_sizes:
            ServedKV(make, sizes, "a model").export(self.tokens())
            assert ServedKV(make, sizes, "another").fetch(self.tokens()).num_tokens == 0

    def test_transfers_do_not_mix(self, make: MakeTransfer) -> None:
        for one, other in self.pairs(make):
            prompts = [self.tokens(100 * number) for number in range(3)]
            for tokens in prompts:
                one.export(tokens)
            plans = [other.fetch(tokens) for tokens in prompts]
            for plan, tokens in reversed(list(zip(plans, prompts, strict=True))):
                if plan.num_tokens:
                    other.load(plan, tokens)

    def test_several_sequences_get_the_same_prefix(self, make: MakeTransfer) -> None:
        for one, other in self.pairs(make):
            one.export(self.tokens())
            plans = [other.fetch(self.tokens()) for _ in range(2)]
            assert [plan.num_tokens > 0 for plan in plans] == [True, True]
            assert None not in [other.load(plan, self.tokens()) for plan in plans]

    def test_what_was_brought_can_be_exported(self, make: MakeTransfer) -> None:
        for one, other in self.pairs(make):
            one.export(self.tokens())
            plan = other.fetch(self.tokens())
            blocks = other.load(plan, self.tokens())
            assert blocks is not None
            brought = self.tokens()[: plan.num_tokens]
            again = other.plan(other.host.export, brought)
            other.offer(again, _first(blocks, again, other.groups))
            third = ServedKV(make, [group.block_size for group in other.groups])
            third.bring(brought)

    def test_an_unknown_handle_fails(self, make: MakeTransfer) -> None:
        for one, _ in self.pairs(make):
            unknown = TransferPlan("no such handle", self.num_tokens, math.inf)
            assert one.load(unknown, self.tokens()) is None

    def test_what_was_never_saved_is_computed(self, make: MakeTransfer) -> None:
        for one, other in self.pairs(make):
            one.plan(one.host.export, self.tokens())
            assert other.bring(self.tokens()) == 0

    def test_a_late_load_brings_nothing_else(self, make: MakeTransfer) -> None:
        one, other = self.pairs(make)[0]
        kept, blocks = one.export(self.tokens())
        plan = other.fetch(self.tokens())
        wait_s = max(kept.deadline, plan.deadline) - time.monotonic()
        if wait_s > LONGEST_WAIT_S:
            pytest.skip(f"its deadlines are {wait_s:.0f} s ahead: test it with short ones too")
        time.sleep(max(0.0, wait_s) + 0.01)
        one.write(blocks, self.tokens(5000))
        other.load(plan, self.tokens())
        other.bring(self.tokens())

    @_property
    @given(
        steps=st.lists(
            st.tuples(
                st.sampled_from(["export", "fetch"]),
                st.integers(0, 1),
                st.lists(st.integers(0, 1), min_size=1, max_size=12),
                st.sampled_from(["", "a"]),
            ),
            max_size=12,
        )
    )
    def test_random_transfers_never_bring_other_tokens(
        self, make: MakeTransfer, steps: list[tuple[str, int, list[int], str]]
    ) -> None:
        for pair in self.pairs(make):
            for kind, which, tokens, salt in steps:
                if kind == "export":
                    pair[which].export(tokens, salt)
                else:
                    pair[which].bring(tokens, salt)


def _first(blocks: Blocks, plan: TransferPlan, groups: Sequence[KVGroup]) -> Blocks:
    """The blocks of a plan's tokens."""
    return tuple(
        own[: plan.num_tokens // group.block_size]
        for own, group in zip(blocks, groups, strict=True)
    )
