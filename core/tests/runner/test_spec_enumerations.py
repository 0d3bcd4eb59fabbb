"""Verification against distributions that were enumerated exactly (`tests/data/spec/README.md`).

A world of five tokens, in which the next depends on the last one only. Each case says with what
probability a speculative step emits which block of tokens.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pegboard.builtin.torch_sampler import TorchProbabilities, TorchSample
from pegboard.interfaces.drafter import Observation, SampledDrafter
from pegboard.interfaces.kernel import KernelContext, SampleRows
from pegboard.runner import rejection
from pegboard.runner.drafts import DraftTable
from pegboard.runner.inputs import StepInputs, build_inputs
from pegboard.runner.rejection import Rejection, inverse_cdf, kept_or_redrawn
from pegboard.runner.rows import Rows
from pegboard.runner.token_choice import Exact, TokenChoice
from pegboard.runner.verification import accept
from pegboard.step import Bool, Drafts, StepBatch
from pegboard.testing.chi_square import p_of_counts

DATA = Path(__file__).parents[3] / "tests" / "data" / "spec" / "exact.json"
SPEC = json.loads(DATA.read_text())
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in SPEC["cases"]}
VOCAB: int = SPEC["vocabulary"]
ROOT: int = SPEC["root_state"]

GRID = 2520
"""All probabilities of the cases, and their quotients, are multiples of 1 / GRID: 1 to 10 divide it. Of
so many coins in the middle between two multiples, exactly that share falls below each."""

NUM_STEPS = 200_000
LEAST_P = 1e-5
"""Of a chi-square test. What is sound is below it once in 100,000 runs; and seeds are fixed."""

Block = tuple[int, ...]


QUICK = ("chain_d3_smooth", "chain_d2_truncated_target", "chain_d2_truncated_draft")
"""Cases of chain rejection that are played in every run."""


def of_rule(*rules: str, slow: Callable[[str], bool] = lambda name: False) -> pytest.MarkDecorator:
    """Parametrizes by the cases of some rules."""
    names = [name for name, case in CASES.items() if case["rule"] in rules]
    cases = [pytest.param(name, marks=[pytest.mark.slow] if slow(name) else []) for name in names]
    return pytest.mark.parametrize("name", cases)


def rows_of(case: dict[str, Any], which: str) -> list[list[Fraction]]:
    """The `target` or the `draft` of a case: of each last token, the next one's probabilities."""
    return [[Fraction(p) for p in row] for row in case[which]]


def blocks_of(case: dict[str, Any]) -> dict[Block, Fraction]:
    return {tuple(map(int, block.split(","))): Fraction(p) for block, p in case["blocks"].items()}


def dense(rows: Sequence[Sequence[Fraction]]) -> torch.Tensor:
    return torch.tensor([[float(p) for p in row] for row in rows], dtype=torch.float64)


# Chain rejection, its rule


@of_rule("chain_rejection")
def test_traces_are_replayed(name: str) -> None:
    case = CASES[name]
    p, q = dense(rows_of(case, "target")), dense(rows_of(case, "draft"))
    assert case["traces"]
    for trace in case["traces"]:
        emitted, state = [], ROOT
        last_u = float(Fraction(trace["last_u"]))
        for token, u in zip(trace["draft"], trace["accept_u"], strict=True):
            coins = torch.tensor([[float(Fraction(u)), last_u]], dtype=torch.float64)
            drafted = torch.tensor([token])
            emitted += kept_or_redrawn(p[[state]], q[[state]], drafted, coins).tolist()
            if emitted[-1] != token:
                break
            state = token
        else:
            emitted += inverse_cdf(p[[state]], torch.tensor([last_u], dtype=torch.float64)).tolist()
        assert emitted == trace["emitted"], trace
        assert len(emitted) - 1 == trace["accepted"]


@of_rule("chain_rejection", "chain_greedy_draft")
def test_the_rule_has_the_enumerated_distribution(name: str) -> None:
    case = CASES[name]
    targets, drafts = rows_of(case, "target"), rows_of(case, "draft")
    if case["rule"] == "chain_greedy_draft":
        drafts = [[Fraction(t == max_id(row)) for t in range(VOCAB)] for row in drafts]
    found: dict[Block, Fraction] = {}

    def walk(block: Block, weight: Fraction) -> None:
        state = block[-1] if block else ROOT
        if len(block) == case["depth"]:
            outcomes = {(*block, token): p for token, p in enumerate(targets[state])}
        else:
            outcomes = {}
            for token, q in enumerate(drafts[state]):
                if not q:
                    continue
                kept, others = chances(targets[state], drafts[state], token)
                if kept:
                    walk((*block, token), weight * q * kept)
                for other, p in enumerate(others):
                    end = (*block, other)
                    outcomes[end] = outcomes.get(end, Fraction(0)) + q * (1 - kept) * p
        for end, p in outcomes.items():
            found[end] = found.get(end, Fraction(0)) + weight * p

    walk((), Fraction(1))
    assert {block: p for block, p in found.items() if p} == blocks_of(case)


def chances(
    target: Sequence[Fraction], draft: Sequence[Fraction], token: int
) -> tuple[Fraction, list[Fraction]]:
    """With what probability the code keeps a token, and by what others it replaces it: counted over
    coins."""
    p, q = dense([target]), dense([draft])
    grid = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID

    def tokens(coins: torch.Tensor) -> NDArray[np.int64]:
        drafted = torch.full((GRID,), token)
        found = kept_or_redrawn(
            p.expand(GRID, -1), q.expand(GRID, -1), drafted, torch.stack(list(coins), dim=1)
        )
        return found.numpy()

    ones = torch.full_like(grid, 1 - 2.0**-53)
    kept = Fraction(int((tokens(torch.stack((grid, ones))) == token).sum()), GRID)
    if kept == 1:
        return kept, [Fraction(0)] * VOCAB
    counts = np.bincount(tokens(torch.stack((ones, grid))), minlength=VOCAB)
    assert counts[token] == 0
    return kept, [Fraction(int(count), GRID) for count in counts]


def max_id(row: Sequence[Fraction]) -> int:
    return max(range(VOCAB), key=lambda token: (row[token], -token))


# Whole steps


class Drawing(SampledDrafter):
    """Draws chains from the draft of a case, by the very noise that the target's tokens have."""

    def __init__(self, draft: torch.Tensor, seeds: NDArray[np.int64], depth: int) -> None:
        self.draft = draft
        self.seeds = seeds
        self.depth = depth

    def admit(self, admission: Any, block_tables: Any) -> None:
        raise AssertionError

    def release(self, row: int, num_tokens: int) -> None:
        raise AssertionError

    def propose(self, seen: Observation) -> Any:
        drafts, drawn_from = self.propose_sampled(seen)
        return drafts, np.ones(len(drawn_from), np.float32)

    def propose_sampled(self, seen: Observation) -> Any:
        state = torch.full((len(self.seeds),), ROOT)
        tokens, drawn_from = [], []
        for depth in range(self.depth):
            drawn_from.append(self.draft[state])
            logits = drawn_from[-1].log().to(torch.float32)
            state = SAMPLE.sample(
                logits, parameters(self.seeds, np.full_like(self.seeds, 1 + depth))
            )
            tokens.append(state)
        drafts = chains(torch.stack(tokens, dim=1).numpy())
        return drafts, torch.stack(drawn_from, dim=1).flatten(0, 1).to(torch.float32)


CONTEXT = KernelContext("sample", "float", "float32", "cpu", 1)
SAMPLE = TorchSample(CONTEXT)


def parameters(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> SampleRows:
    """Those of rows with temperature 1 and no filters."""
    one = torch.ones(len(seeds))
    none = torch.zeros(len(seeds), dtype=torch.int64)
    return SampleRows(
        temperature=one,
        top_k=none,
        top_p=one,
        min_p=0 * one,
        seed=torch.from_numpy(seeds),
        position=torch.from_numpy(positions),
        index=none,
    )


def chains(tokens: NDArray[np.int64]) -> Drafts:
    """The drafts of rows 0, 1, ... from tokens [num_rows, depth]."""
    num_rows, depth = tokens.shape
    return Drafts(
        rows=np.arange(num_rows, dtype=np.int32),
        offsets=np.arange(0, num_rows * depth + 1, depth, dtype=np.int32),
        token_ids=tokens.flatten().astype(np.int32),
        parents=np.tile(np.arange(-1, depth - 1), num_rows).astype(np.int32),
    )


def step_inputs(num_rows: int, num_nodes: int, fill: Callable[[DraftTable], None]) -> StepInputs:
    """A step of rows that know one token each and verify so many nodes, with which `fill` fills the
    table."""
    rows = Rows(num_rows, 2, VOCAB, (), keeps_trees=True)
    rows.num_known[:] = 1
    fill(rows.drafts)
    every, ones = np.arange(num_rows, dtype=np.int32), np.ones(num_rows, np.int32)
    batch = StepBatch(
        step_id=0,
        fence=-1,
        released=(),
        admitted=(),
        groups=(),
        rows=every,
        num_computed=0 * ones,
        num_tokens=ones,
        sample=ones.astype(np.bool_),
        verify=num_nodes * ones,
        propose=0 * ones,
        pending=np.zeros(num_rows, np.bool_),
    )
    return build_inputs(rows, batch)


def emitted(inputs: StepInputs, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each row's block as one number, its tokens plus 1 as digits."""
    usable: Bool = np.ones(len(tokens), np.bool_)
    accepted = accept(inputs, tokens, usable)
    width = accepted.token_ids.shape[1]
    digits = np.where(np.arange(width) < accepted.num_committed[:, None], accepted.token_ids + 1, 0)
    return digits.astype(np.int64) @ (10 ** np.arange(width))


def number(block: Block) -> int:
    return sum((token + 1) * 10**at for at, token in enumerate(block))


def played(
    case: dict[str, Any], choose: Callable[[torch.Tensor], TokenChoice], num_steps: int = NUM_STEPS
) -> NDArray[np.int64]:
    """Steps with seeds 0, 1, ... through drafter, choice and walk; each row's block as a number.

    Args:
        choose: makes the way to verify, of memory for distributions.
    """
    depth = case["depth"]
    target, draft = dense(rows_of(case, "target")), dense(rows_of(case, "draft"))
    seeds = np.arange(num_steps, dtype=np.int64)
    drafter = Drawing(draft, seeds, depth)
    seen = Observation(
        rows=np.arange(num_steps, dtype=np.int32),
        offsets=np.zeros(0, np.int32),
        token_ids=np.zeros(0, np.int32),
        positions=np.zeros(0, np.int32),
        taps={},
        next_offsets=np.zeros(0, np.int32),
        next_token_ids=np.zeros(0, np.int32),
        propose=np.full(num_steps, depth, np.int32),
        num_cached=np.zeros(0, np.int32),
    )
    choice = choose(torch.zeros(num_steps, depth, VOCAB))
    inputs = step_inputs(num_steps, depth, lambda table: choice.propose(drafter, seen, table))
    owner, node = inputs.logit_owner, inputs.logit_nodes
    last = np.where(node > 0, inputs.node_tokens[owner, node - 1], ROOT)
    logits = target[torch.from_numpy(last.astype(np.int64))].log().to(torch.float32)
    rows = parameters(seeds[owner], inputs.positions[inputs.logit_tokens] + 1)
    return emitted(inputs, choice.draw(logits, rows, inputs))


def by_rejection(drawn_from: torch.Tensor) -> TokenChoice:
    return Rejection(SAMPLE, TorchProbabilities(CONTEXT), drawn_from)


def p_value(blocks: NDArray[np.int64], expected: dict[Block, Fraction]) -> float:
    """Of a chi-square test of blocks against their probabilities."""
    counts = dict(
        zip(*(found.tolist() for found in np.unique(blocks, return_counts=True)), strict=True)
    )
    return p_of_counts(counts, {number(block): p for block, p in expected.items()})


@of_rule("chain_rejection", slow=lambda name: name not in QUICK)
def test_seeded_steps_have_the_enumerated_distribution(name: str) -> None:
    assert p_value(played(CASES[name], by_rejection), blocks_of(CASES[name])) > LEAST_P


@of_rule("chain_match_gumbel", slow=lambda name: "d3" in name)
def test_exact_steps_have_the_enumerated_distribution(name: str) -> None:
    """The drafter draws by the noise of the target's tokens, which are then mostly the same."""
    blocks = played(CASES[name], lambda _: Exact(SAMPLE))
    assert p_value(blocks, blocks_of(CASES[name])) > LEAST_P


def test_redrawing_from_the_target_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = CASES["chain_d1_smooth"], CASES["wrong_resample_d1"]
    assert (right["target"], right["draft"]) == (wrong["target"], wrong["draft"])
    monkeypatch.setattr(rejection, "left_over", lambda p, q: p)
    blocks = played(right, by_rejection)
    assert p_value(blocks, blocks_of(right)) < 1e-100
    # A token that is drawn again after it was refused counts as kept here: blocks differ, tokens do not.
    assert p_value(blocks % 10, firsts(wrong["first_token"])) > LEAST_P
    assert p_value(blocks % 10, firsts(right["first_token"])) < 1e-100


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wrong_stale_q_k2", "tree_k2_d1"])
def test_stale_probabilities_of_a_second_candidate_are_seen(name: str) -> None:
    """Two candidates without replacement, each verified as one of a chain is: right where the second's
    distribution leaves the first out."""
    case, num_steps = CASES[name], 1_000_000
    target, draft = dense(rows_of(case, "target")), dense(rows_of(case, "draft"))
    dice = np.random.default_rng(3)
    p, q = target[ROOT].expand(num_steps, -1), draft[ROOT].expand(num_steps, -1)
    first = torch.from_numpy(dice.choice(VOCAB, num_steps, p=draft[ROOT].numpy()))
    without = q.scatter(1, first[:, None], 0)
    coins = torch.from_numpy(dice.random((4, num_steps, 2)))
    second = inverse_cdf(without, coins[2, :, 0].contiguous())
    tokens = kept_or_redrawn(p, q, first, coins[0])
    at = torch.nonzero(tokens != first)[:, 0]
    rest = rejection.left_over(p[at], q[at])
    again = q[at] if "stale" in name else without[at] / without[at].sum(dim=1, keepdim=True)
    tokens[at] = kept_or_redrawn(
        rest / rest.sum(dim=1, keepdim=True), again, second[at], coins[1, at]
    )
    wrong = p_value(tokens.numpy() + 1, firsts(case["target"][ROOT]))
    assert wrong < 1e-20 if "stale" in name else wrong > LEAST_P
    assert p_value(tokens.numpy() + 1, firsts(case["first_token"])) > LEAST_P


def firsts(row: Sequence[str]) -> dict[Block, Fraction]:
    return {(token,): Fraction(p) for token, p in enumerate(row) if Fraction(p)}


# Exact verification, its walk


def walked(inputs: StepInputs, sampled: NDArray[np.int64], weights: list[Fraction]) -> Any:
    """Blocks that rows of those weights emit, and the sum of the weights of each."""
    found: dict[int, Fraction] = {}
    for block, weight in zip(emitted(inputs, sampled).tolist(), weights, strict=True):
        found[block] = found.get(block, Fraction(0)) + weight
    return found


def in_numbers(case: dict[str, Any]) -> dict[int, Fraction]:
    return {number(block): p for block, p in blocks_of(case).items()}


@of_rule("chain_match_independent", "chain_match_gumbel", "chain_sampled_draft_as_onehot")
def test_exact_chains_have_the_enumerated_distribution(name: str) -> None:
    """Every draft with every outcome of the target. A difference is the same whatever was drafted."""
    case = CASES[name]
    targets, drafts = rows_of(case, "target"), rows_of(case, "draft")
    rule = gumbel_matches if case["rule"] == "chain_match_gumbel" else independent_matches
    paths: list[tuple[Block, Block, Fraction]] = [((), (), Fraction(1))]
    for _ in range(case["depth"]):
        longer = []
        for drafted, sampled, weight in paths:
            state = drafted[-1] if drafted else ROOT
            for token, p, match in rule(targets[state], drafts[state]):
                longer.append(((*drafted, token), (*sampled, token), weight * match))
                other = (token + 1) % VOCAB
                longer.append(((*drafted, other), (*sampled, token), weight * (p - match)))
        paths = [path for path in longer if path[2]]
    ended = [
        (drafted, (*sampled, token), weight * p)
        for drafted, sampled, weight in paths
        for token, p in enumerate(targets[drafted[-1]])
    ]
    drafts_of = chains(np.array([drafted for drafted, _, _ in ended]))
    inputs = step_inputs(
        len(ended),
        case["depth"],
        lambda table: table.put(drafts_of, np.ones(len(drafts_of.token_ids), np.float32)),
    )
    targets_own = np.array([tokens for _, tokens, _ in ended]).flatten()
    found = walked(inputs, targets_own, [weight for _, _, weight in ended])
    assert {block: p for block, p in found.items() if p} == in_numbers(case)


Match = Iterator[tuple[int, Fraction, Fraction]]
"""The target's token, its probability, and that of drafting it too."""


def independent_matches(p: Sequence[Fraction], q: Sequence[Fraction]) -> Match:
    return ((token, p[token], p[token] * q[token]) for token in range(VOCAB))


def gumbel_matches(p: Sequence[Fraction], q: Sequence[Fraction]) -> Match:
    for token in range(VOCAB):
        both = Fraction(0)
        if p[token] and q[token]:
            ratios = (max(p[u] / p[token], q[u] / q[token]) for u in range(VOCAB))
            both = 1 / sum(ratios, Fraction(0))
        yield token, p[token], both


@of_rule("tree_top_k", "chain_greedy_draft")
def test_exact_trees_have_the_enumerated_distribution(name: str) -> None:
    case = CASES[name]
    targets, drafts = rows_of(case, "target"), rows_of(case, "draft")
    nodes: list[tuple[int, int, int]] = []  # token, parent, depth

    def grow(topology: Any, parent: int, depth: int) -> None:
        row = drafts[nodes[parent][0] if nodes and parent >= 0 else ROOT]
        best = sorted(range(VOCAB), key=lambda token: (-row[token], token))
        for token, below in zip(best, topology, strict=False):
            if row[token]:
                nodes.append((token, parent, depth))
                grow(below, len(nodes) - 1, depth + 1)

    grow(case["topology"], -1, 1)
    texts = list(itertools.product(range(VOCAB), repeat=case["depth"] + 1))
    weights = []
    for text in texts:
        weight = Fraction(1)
        for last, token in itertools.pairwise((ROOT, *text)):
            weight *= targets[last][token]
        weights.append(weight)
    tree = Drafts(
        rows=np.arange(len(texts), dtype=np.int32),
        offsets=np.arange(0, len(texts) * len(nodes) + 1, len(nodes), dtype=np.int32),
        token_ids=np.tile([token for token, _, _ in nodes], len(texts)).astype(np.int32),
        parents=np.tile([parent for _, parent, _ in nodes], len(texts)).astype(np.int32),
    )
    inputs = step_inputs(
        len(texts),
        len(nodes),
        lambda table: table.put(tree, np.ones(len(tree.token_ids), np.float32)),
    )
    # The target says the text; at a node of depth d its token d + 1, and only the node on the way counts.
    depths = np.array([0, *(depth for _, _, depth in nodes)])
    sampled = np.array(texts)[:, depths].flatten()
    found = walked(inputs, sampled, weights)
    assert {block: p for block, p in found.items() if p} == in_numbers(case)
