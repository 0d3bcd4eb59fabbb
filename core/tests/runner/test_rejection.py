"""Verification by rejection in a worker: when tokens are the target's, its coins, drafters that err."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.errors import EngineError
from pegboard.interfaces.drafter import Observation, SampledDrafter
from pegboard.runner.coins import uniforms
from pegboard.runner.rejection import inverse_cdf, kept_or_redrawn
from pegboard.step import Drafts
from pegboard.testing.philox import philox4x32_10

VOCAB = 517
PROMPTS = {0: list(range(40, 63)), 2: [7, 300, 7, 300, 12], 5: [101]}
LENGTH = 10


class Drawing(SampledDrafter):
    """Draws chains of tokens below a bound, all equally likely.

    Args:
        bound: of the tokens.
        change: what becomes of an answer.
    """

    def __init__(
        self, bound: int, change: Callable[[Drafts, torch.Tensor], Any] | None = None
    ) -> None:
        self.dice = np.random.default_rng(3)
        self.bound = bound
        self.change = change or (lambda drafts, drawn_from: (drafts, drawn_from))

    def admit(self, admission: Any, block_tables: Any) -> None:
        pass

    def release(self, row: int, num_tokens: int) -> None:
        pass

    def propose(self, seen: Observation) -> Any:
        raise AssertionError("it is asked for what it draws from")

    def propose_sampled(self, seen: Observation) -> Any:
        counts = seen.propose.tolist()
        num_nodes = sum(counts)
        drafts = Drafts(
            rows=seen.rows.copy(),
            offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            token_ids=self.dice.integers(0, self.bound, num_nodes).astype(np.int32),
            parents=np.array([n - 1 for count in counts for n in range(count)], np.int32),
        )
        drawn_from = torch.zeros(num_nodes, VOCAB)
        drawn_from[:, : self.bound] = 1 / self.bound
        return self.change(drafts, drawn_from)


def outputs(host: Any, temperature: float, **options: Any) -> dict[int, list[int]]:
    for row, prompt in PROMPTS.items():
        host.admit(row, prompt, temperature=temperature, seed=11 + row, top_k=40)
    host.prefill(PROMPTS, **options)
    host.decode(PROMPTS, LENGTH, **options)
    return {row: host.output(row, LENGTH) for row in PROMPTS}


@pytest.fixture(scope="module")
def plain() -> dict[float, dict[int, list[int]]]:
    """Temperature to the outputs without drafts."""
    return {}


@pytest.fixture
def expected(make_host: Any, plain: Any) -> Callable[[float], dict[int, list[int]]]:
    def found(temperature: float) -> dict[int, list[int]]:
        if temperature not in plain:
            plain[temperature] = outputs(make_host(), temperature)
        known: dict[int, list[int]] = plain[temperature]
        return known

    return found


def test_greedy_rows_are_those_without_drafts(make_host: Any, expected: Any) -> None:
    host = make_host(drafter=Drawing(VOCAB), verification="rejection")
    assert outputs(host, 0.0, propose=3) == expected(0.0)
    assert sum(int(result.num_tried.sum()) for result in host.results) > 0


def test_rows_without_drafts_are_those_of_exact_verification(make_host: Any, expected: Any) -> None:
    host = make_host(drafter=Drawing(VOCAB), verification="rejection")
    assert outputs(host, 1.0) == expected(1.0)


def test_a_seed_gives_the_same_tokens_with_the_same_drafts(make_host: Any, expected: Any) -> None:
    """And others than without: if not, nothing was rejected here."""

    def run() -> dict[int, list[int]]:
        host = make_host(drafter=Drawing(VOCAB), verification="rejection")
        return outputs(host, 1.0, propose=3)

    assert run() == run() != expected(1.0)


def test_no_policy_is_told_how_likely_a_guess_was(make_host: Any) -> None:
    """It would verify likely ones more often, and so make them more frequent."""
    host = make_host(drafter=Drawing(20), verification="rejection")
    outputs(host, 1.0, propose=3)
    for result in host.results:
        assert result.confidences.tolist() == [1.0] * int(result.num_drafts.sum())


def test_coins_are_words_of_philox() -> None:
    seeds = np.array([0, 1, 2**64 - 1, 0x299F31D0A4093822], np.uint64)
    positions, indices = np.array([1, 7, 2**31 - 1, 99]), np.array([0, 3, 127, 2**16])
    found = uniforms(seeds, positions, indices)
    for seed, position, index, pair in zip(seeds.tolist(), positions, indices, found, strict=True):
        counter = tuple(np.array([word], np.uint64) for word in (0, position, index, 1))
        words = philox4x32_10(counter, (seed & 0xFFFFFFFF, seed >> 32))  # type: ignore[arg-type]
        high = (int(words[0][0]) << 32 | int(words[1][0])) / 2**64
        low = (int(words[2][0]) << 32 | int(words[3][0])) / 2**64
        assert pair.tolist() == pytest.approx([high, low], abs=2**-52)
        assert 0 <= pair.min() <= pair.max() < 1


def test_what_rounding_leaves_over_is_still_a_token_of_the_target() -> None:
    p = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[1e-30, 1.0, 0.0]], dtype=torch.float64)
    coins = torch.tensor([[0.0, 1 - 2.0**-53]], dtype=torch.float64)
    assert kept_or_redrawn(p, q, torch.tensor([0]), coins).tolist() == [1]
    ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    mass = torch.tensor([[0.0, 0.1, 0.0, 0.3, 0.0]], dtype=torch.float64).expand(2, -1)
    assert inverse_cdf(mass, ends).tolist() == [1, 3]


def _tree(drafts: Drafts, drawn_from: torch.Tensor) -> Any:
    parents = np.full_like(drafts.parents, -1)
    tree = Drafts(
        rows=drafts.rows, offsets=drafts.offsets, token_ids=drafts.token_ids, parents=parents
    )
    return tree, drawn_from


def _beyond(drafts: Drafts, drawn_from: torch.Tensor) -> Any:
    tokens = np.full_like(drafts.token_ids, VOCAB)
    wrong = Drafts(
        rows=drafts.rows, offsets=drafts.offsets, token_ids=tokens, parents=drafts.parents
    )
    return wrong, drawn_from


def _not_drawn(drafts: Drafts, q: torch.Tensor) -> Any:
    tokens = torch.from_numpy(drafts.token_ids.astype(np.int64))[:, None]
    q.scatter_(1, tokens, 0.0)
    return drafts, q / q.sum(dim=1, keepdim=True)


FAULTS: dict[str, tuple[Callable[[Drafts, torch.Tensor], Any], str]] = {
    "nothing": (lambda drafts, q: None, "NoneType"),
    "no drafts": (lambda drafts, q: (None, q), "tuple"),
    "what propose answers": (lambda drafts, q: (drafts, np.ones(3, np.float32)), "ndarray"),
    "None": (lambda drafts, q: (drafts, None), "NoneType"),
    "a row too few": (lambda drafts, q: (drafts, q[1:]), r"\[8, 517\].*\[9, 517\]"),
    "a token too few": (lambda drafts, q: (drafts, q[:, 1:]), r"\[9, 516\].*\[9, 517\]"),
    "double": (lambda drafts, q: (drafts, q.double()), "float64"),
    "negative": (lambda drafts, q: (drafts, q.index_fill(1, torch.tensor([3]), -0.1)), "negative"),
    "NaN": (lambda drafts, q: (drafts, q * torch.nan), "NaN"),
    "infinite": (lambda drafts, q: (drafts, q + torch.inf), "off by inf"),
    "logits": (lambda drafts, q: (drafts, q + 0.1), "sum is off by"),
    "all zero": (lambda drafts, q: (drafts, 0 * q), "sum is off by 1"),
    "another token's": (_not_drawn, "probability 0"),
    "a tree": (_tree, "trees"),
    "a token of nobody": (_beyond, "token 517"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_drafter_that_cannot_have_drawn_so_is_cut_off(
    make_host: Any, expected: Any, fault: str
) -> None:
    change, message = FAULTS[fault]
    host = make_host(drafter=Drawing(VOCAB, change), verification="rejection")
    assert outputs(host, 1.0, propose=3) == expected(1.0)
    (failure,) = [result.drafter_failed for result in host.results if result.drafter_failed]
    with pytest.raises(EngineError, match=message):
        raise EngineError(failure)
    assert not any(result.num_drafts.any() for result in host.results)


def test_what_a_drafter_does_to_its_answer_later_is_nothing(make_host: Any) -> None:
    def run(*, overwrites: bool) -> dict[int, list[int]]:
        last: list[torch.Tensor] = []

        def change(drafts: Drafts, drawn_from: torch.Tensor) -> Any:
            for tensor in last if overwrites else ():
                tensor.fill_(torch.nan)
            last[:] = [drawn_from]
            return drafts, drawn_from

        host = make_host(drafter=Drawing(VOCAB, change), verification="rejection")
        return outputs(host, 1.0, propose=3)

    assert run(overwrites=True) == run(overwrites=False)
