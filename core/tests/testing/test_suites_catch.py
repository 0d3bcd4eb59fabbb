"""Each contract suite fails on an implementation that breaks its contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pegboard.builtin.fcfs import FCFS
from pegboard.builtin.paged_allocator import PagedAllocator
from pegboard.builtin.processors import Penalties
from pegboard.builtin.torch_attention import TorchAttention
from pegboard.builtin.torch_attention_layout import layout
from pegboard.builtin.torch_kernels import TorchLinear, TorchRMSNorm
from pegboard.builtin.torch_sampler import TorchSample
from pegboard.interfaces.attention import AttentionBatch
from pegboard.interfaces.kernel import PackedWeight, SampleRows
from pegboard.interfaces.kv_allocator import AllocatorContext, Growth, KVLedger, Owner
from pegboard.interfaces.logits_processor import LogitRow
from pegboard.interfaces.scheduler import QueueView, SequenceView, StepBuilder
from pegboard.testing.attention import AttentionContract
from pegboard.testing.kernels import LinearContract, RMSNormContract
from pegboard.testing.kv_allocator import PinnedPagesContract, context, group
from pegboard.testing.logits_processor import LogitsProcessorContract
from pegboard.testing.sample import SampleContract
from pegboard.testing.scheduler import SchedulerContract


class LeakyAllocator(PagedAllocator):
    """Forgets to give back what waited for a step."""

    def fence(self, step_id: int) -> None:
        pass


class GreedyAllocator(PagedAllocator):
    """Hands out a page more than was asked for."""

    def grow(self, owner: Owner, num_tokens: int, lookahead: int = 0) -> Growth | None:
        return super().grow(owner, num_tokens, lookahead + 4)


class BoastfulAllocator(PagedAllocator):
    """Counts page 0."""

    def ledger(self) -> tuple[KVLedger, ...]:
        return tuple(
            KVLedger(one.total + 1, one.free + 1, one.held, one.cached, one.pinned)
            for one in super().ledger()
        )


@pytest.mark.parametrize("make", [LeakyAllocator, GreedyAllocator, BoastfulAllocator])
def test_broken_allocators(make: Callable[[AllocatorContext], PagedAllocator]) -> None:
    suite = PinnedPagesContract()
    with pytest.raises(AssertionError):
        suite.test_release_waits_for_the_fence(make(context((group(4),), (11,))))
        suite.test_growing_appends_and_repeating_changes_nothing(make(context((group(4),), (11,))))
        suite.test_a_transaction_that_ends_well_holds(make(context((group(4),), (11,))))


def test_random_operations_find_a_broken_allocator() -> None:
    with pytest.raises((AssertionError, ExceptionGroup)):
        PinnedPagesContract().test_random_operations_agree_with_sets(BoastfulAllocator)


class StubbornScheduler(FCFS):
    """Never preempts: a full pool stops everything."""

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        for seq in [*queue.running, *queue.waiting]:
            step.add(seq, seq.num_pending)


class RememberingScheduler(FCFS):
    """Keeps views from step to step, of sequences that are gone."""

    _seen: Sequence[SequenceView] = ()

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        for seq in self._seen:
            step.add(seq, 1)
        self._seen = [*queue.running, *queue.waiting]
        super().plan(queue, step)


class InsistentScheduler(FCFS):
    """Asks until it gets what it wants."""

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        for seq in [*queue.running, *queue.waiting]:
            while not step.add(seq, seq.num_pending):
                pass


@pytest.mark.parametrize("make", [StubbornScheduler, RememberingScheduler, InsistentScheduler])
def test_broken_schedulers(make: Any) -> None:
    suite = SchedulerContract()
    with pytest.raises(AssertionError):
        suite.test_a_full_pool_does_not_stop_the_work(make)
        suite.test_sequences_may_vanish_between_steps(make)


class LeftoverAttention(TorchAttention):
    """Does not hear of draft trees."""

    def prepare(self, batch: AttentionBatch) -> None:
        super().prepare(
            AttentionBatch(
                batch.positions, batch.query_starts, batch.num_computed, batch.block_tables
            )
        )


class ForgetfulAttention(TorchAttention):
    """Does not copy pages."""

    def copy_blocks(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None:
        pass


class HastyAttention(TorchAttention):
    """Writes before all is read."""

    def move_slots(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None:
        for i in range(len(source)):
            super().move_slots(group, source[i : i + 1], target[i : i + 1])


class AttentionSuite(AttentionContract):
    layout = staticmethod(layout)


def test_broken_attention() -> None:
    suite = AttentionSuite()
    with pytest.raises(AssertionError):
        suite.test_draft_trees(LeftoverAttention)
    with pytest.raises(AssertionError):
        suite.test_copied_pages_continue_apart(ForgetfulAttention)
    with pytest.raises(AssertionError):
        suite.test_moves_read_before_they_write(HastyAttention)


class RoundingLinear(TorchLinear):
    """Computes in bfloat16."""

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        return super().linear(x, weight).bfloat16().to(x.dtype)


class CarelessNorm(TorchRMSNorm):
    """Leaves out epsilon."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return super().rms_norm(x, weight, 0.0)


def test_broken_kernels() -> None:
    with pytest.raises(AssertionError):
        LinearContract().test_linear_is_the_product(RoundingLinear)
    with pytest.raises(AssertionError):
        RMSNormContract().test_epsilon_counts(CarelessNorm)


class SeedlessSample(TorchSample):
    """Ignores which sequence of a request it samples for."""

    def sample(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        same = SampleRows(
            rows.temperature,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            rows.seed,
            rows.position,
            torch.zeros_like(rows.index),
        )
        return super().sample(logits, same)


def test_a_broken_sampler() -> None:
    with pytest.raises(AssertionError):
        SampleContract().test_seed_position_and_sequence_change_the_noise(SeedlessSample)


class CountingPenalties(Penalties):
    """Its penalty grows with the calls, so that drafts leave a trace."""

    _calls = 0

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> None:
        self._calls += 1
        super().apply(logits, rows)
        logits -= torch.arange(logits.shape[1]) % 2 * self._calls


class PenaltiesSuite(LogitsProcessorContract):
    params = ({"repetition_penalty": 1.3}, {"presence_penalty": 0.7})


def test_a_broken_processor() -> None:
    with pytest.raises(AssertionError):
        PenaltiesSuite().test_drafts_leave_no_trace(CountingPenalties)
