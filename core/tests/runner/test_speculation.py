"""Drafts, right or wrong, chains or trees, never change what a sequence says."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from pegboard.errors import EngineError
from pegboard.interfaces.drafter import Drafter, Observation
from pegboard.interfaces.logits_processor import LogitsProcessor
from pegboard.step import Drafts

PROMPTS = {0: list(range(40, 63)), 2: [7, 300, 7, 300, 12], 5: [101]}
PARAMS: dict[int, dict[str, Any]] = {
    0: {},
    2: {"temperature": 1.0, "top_p": 0.9, "seed": 2**64 - 1},
    5: {"temperature": 0.8, "processors": {"penalties": {"frequency_penalty": 1.5}}},
}
LENGTH = 16


@pytest.fixture(scope="module")
def plain() -> dict[tuple[int | None, int], list[int]]:
    """(window, row) -> output without drafts, filled by `expected`."""
    return {}


@pytest.fixture
def expected(make_host: Any, plain: Any) -> Any:
    def outputs(window: int | None = None) -> dict[int, list[int]]:
        if (window, 0) not in plain:
            host = make_host(window=window)
            admit_all(host, num_logprobs=3)
            host.prefill(PROMPTS)
            host.decode(PROMPTS, LENGTH)
            plain.update({(window, row): host.output(row) for row in PROMPTS})
            plain[window, -1] = logprobs(host)
        return {row: plain[window, row] for row in PROMPTS}

    return outputs


def admit_all(host: Any, **params: Any) -> None:
    for row, prompt in PROMPTS.items():
        host.admit(row, prompt, **PARAMS[row], **params)


def logprobs(host: Any) -> dict[int, list[tuple[int, float]]]:
    """Row to (token id, logprob) of its tokens; rows are found by the batches' order."""
    found: dict[int, list[tuple[int, float]]] = {row: [] for row in PROMPTS}
    for result, rows in zip(host.results, host.batches, strict=True):
        for i, row in enumerate(rows):
            part = slice(result.logprobs.offsets[i], result.logprobs.offsets[i + 1])
            found[row] += zip(
                result.logprobs.token_ids[part].tolist(),
                result.logprobs.logprobs[part].tolist(),
                strict=True,
            )
    return found


class Oracle(Drafter):
    """Knows the outputs, and guesses right as often as it is told to.

    Trees hide the right path among siblings.
    """

    def __init__(self, outputs: dict[int, list[int]], share: float, width: int) -> None:
        self._outputs = outputs
        self._random = random.Random(f"{share}/{width}")
        self._share = share
        self._width = width
        self._done: dict[int, int] = {}
        self.final: dict[int, int] = {}

    def admit(self, admission: Any, block_tables: Any) -> None:
        self._done[admission.row] = 0

    def release(self, row: int, num_tokens: int) -> None:
        self.final[row] = num_tokens

    def propose(self, seen: Observation) -> tuple[Drafts, Any]:
        rows, counts, tokens, parents = [], [0], [], []
        for i, row in enumerate(seen.rows.tolist()):
            self._done[row] += int(seen.next_offsets[i + 1] - seen.next_offsets[i])
            coming = self._outputs[row][self._done[row] :]
            nodes = self._nodes(coming, int(seen.propose[i]))
            if nodes:
                rows.append(row)
                counts.append(counts[-1] + len(nodes))
                tokens += [token for token, _ in nodes]
                parents += [parent for _, parent in nodes]
        drafts = Drafts(
            rows=np.array(rows, dtype=np.int32),
            offsets=np.array(counts, dtype=np.int32),
            token_ids=np.array(tokens, dtype=np.int32),
            parents=np.array(parents, dtype=np.int32),
        )
        return drafts, np.linspace(0, 1, len(tokens), dtype=np.float32)

    def _nodes(self, coming: list[int], most: int) -> list[tuple[int, int]]:
        nodes: list[tuple[int, int]] = []
        parent = -1
        for token in coming:
            level = [(token + 1 + k) % 517 for k in range(self._width - 1)]
            right = token if self._random.random() < self._share else (token + 200) % 517
            at = self._random.randrange(self._width)
            level.insert(at, right)
            if len(nodes) + len(level) > most:
                break
            first = len(nodes)
            nodes += [(guess, parent) for guess in level]
            parent = first + at
        return nodes


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("width", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("share", [1.0, 0.0, 0.6], ids=["right", "wrong", "partly right"])
def test_drafts_do_not_change_tokens_or_logprobs(
    make_host: Any, expected: Any, plain: Any, share: float, width: int, window: int | None
) -> None:
    outputs = expected(window)
    host = make_host(drafter=Oracle(outputs, share, width), window=window)
    admit_all(host, num_logprobs=3)
    host.prefill(PROMPTS, propose=8)
    host.decode(PROMPTS, LENGTH, propose=8)
    assert {row: host.output(row, LENGTH) for row in PROMPTS} == outputs
    for row, entries in logprobs(host).items():
        for got, want in zip(entries, plain[window, -1][row], strict=False):
            assert got[0] == want[0]
            assert got[1] == pytest.approx(want[1], abs=1e-5)
    accepted = sum(int(r.num_accepted.sum()) for r in host.results)
    tried = sum(int(r.num_tried.sum()) for r in host.results)
    if share == 1.0:
        # The last tree of a row may be cut within a depth, before the right node.
        assert 0 <= tried - accepted <= (0 if width == 1 else len(PROMPTS))
        assert accepted > 20
        assert len(host.results) < LENGTH // 2
    elif share == 0.0:
        assert accepted == 0 and tried == len(PROMPTS) * (LENGTH - 1)
    else:
        assert 0 < accepted < tried


def test_verify_uses_the_first_nodes(make_host: Any, expected: Any) -> None:
    outputs = expected()
    host = make_host(drafter=Oracle(outputs, share=1.0, width=1))
    admit_all(host)
    host.prefill(PROMPTS, propose=6)
    result = host.step(dict.fromkeys(PROMPTS, 1), verify={0: 2, 2: 0, 5: 6}, propose=6)
    assert result.num_accepted.tolist() == [2, 0, 6]
    assert {row: host.output(row) for row in PROMPTS} == {
        0: outputs[0][:4],
        2: outputs[2][:2],
        5: outputs[5][:8],
    }
    assert result.num_drafts.tolist() == [6, 6, 6]
    assert result.parents is None and len(result.confidences) == 18


def test_drafts_may_be_verified_with_the_last_chunk_of_a_prompt(
    make_host: Any, expected: Any, drafts_of: Any
) -> None:
    outputs = expected()
    host = make_host()
    host.admit(0, PROMPTS[0])
    host.step({0: 10})
    wrong_then_right = ([3, outputs[0][0], outputs[0][1]], [-1, -1, 1])
    result = host.step({0: 13}, verify={0: 3}, drafts=drafts_of({0: wrong_then_right}))
    assert result.num_accepted.tolist() == [2]
    host.decode([0], LENGTH)
    assert host.output(0) == outputs[0]


def test_trees_are_reported_with_their_parents(make_host: Any, expected: Any) -> None:
    drafter = Oracle(expected(), share=1.0, width=2)
    host = make_host(drafter=drafter)
    admit_all(host)
    result = host.step({row: len(prompt) for row, prompt in PROMPTS.items()}, propose=4)
    assert result.num_drafts.tolist() == [4, 4, 4]
    for i in range(3):
        parents = result.parents[4 * i : 4 * i + 4].tolist()
        assert parents[:2] == [-1, -1] and parents[2] == parents[3] in (0, 1)
    assert result.confidences == pytest.approx(np.linspace(0, 1, 12))


def test_a_released_row_drops_its_drafts(make_host: Any, expected: Any) -> None:
    drafter = Oracle(expected(), share=1.0, width=1)
    host = make_host(drafter=drafter)
    host.admit(0, PROMPTS[0])
    host.prefill([0], propose=5)
    num_tokens = len(host.rows[0].tokens)
    host.release(0)
    host.admit(0, PROMPTS[2])
    host.step({0: 5})
    assert drafter.final == {0: num_tokens}
    with pytest.raises(EngineError, match="holds 0 drafts"):
        host.step({0: 1}, verify={0: 1})


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (([517], None), "token 517"),
        (([1, 2], [-1, 1]), "parent 1"),
        (([1, 2], [0, -1]), "parent 0"),
    ],
)
def test_unusable_drafts_are_an_error(
    make_host: Any, drafts_of: Any, nodes: Any, message: str
) -> None:
    host = make_host()
    host.admit(0, PROMPTS[0])
    host.prefill([0])
    with pytest.raises(EngineError, match=message):
        host.step({0: 1}, verify={0: 1}, drafts=drafts_of({0: nodes}))


def test_a_drafter_that_proposes_too_much_is_cut_off(make_host: Any, drafts_of: Any) -> None:
    class Greedy(Oracle):
        def propose(self, seen: Observation) -> tuple[Drafts, Any]:
            return drafts_of({0: ([1, 2, 3], None)}), np.ones(3, dtype=np.float32)

    host = make_host(drafter=Greedy({}, 1.0, 1))
    host.admit(0, PROMPTS[0])
    host.prefill([0], propose=2)
    (result,) = host.results
    assert "3 nodes for row 0; allowed: 2" in result.drafter_failed
    assert result.num_drafts.tolist() == [0]


@pytest.mark.parametrize(
    ("parents", "kept"),
    [
        ([-1, -1, -1, -1], [0]),
        ([-1, 0, 0, 1, 2, 3], [0, 1, 3, 5]),
        ([-1, -1, 1, 2], [0]),
        ([-1, 0, 1, 2], [0, 1, 2, 3]),
        ([-1, 0, 0, 2, 3], [0, 1]),
    ],
)
def test_without_a_mask_a_tree_is_cut_to_its_first_path(
    make_host: Any, drafts_of: Any, parents: list[int], kept: list[int]
) -> None:
    tokens = list(range(30, 30 + len(parents)))
    nodes = {0: (tokens, parents), 2: ([9, 8], None)}

    class Branching(Oracle):
        def propose(self, seen: Observation) -> tuple[Drafts, Any]:
            count = len(parents) + 2
            return drafts_of(nodes), np.linspace(0, 1, count, dtype=np.float32)

    host = make_host(drafter=Branching({0: [], 2: []}, 1.0, 1), verifies_trees=False)
    for row in (0, 2):
        host.admit(row, PROMPTS[row])
    host.prefill([0, 2], propose=6)
    result = host.results[-1]
    assert result.drafter_failed == "" and result.parents is None
    assert result.num_drafts.tolist() == [len(kept), 2]
    table = host.runner._loaded.rows.drafts
    assert table.token_ids[0, : len(kept)].tolist() == [tokens[node] for node in kept]
    assert table.token_ids[2, :2].tolist() == [9, 8]
    every = np.linspace(0, 1, len(parents) + 2, dtype=np.float32)
    assert result.confidences.tolist() == [*every[kept], *every[-2:]]


class Grammar(LogitsProcessor):
    """Forbids what stands in the history already; cannot bear token 3, nor rows on its list."""

    def __init__(self, broken_rows: tuple[int, ...] = ()) -> None:
        self.broken_rows = broken_rows
        self.admitted: set[int] = set()

    def admit(self, row: int, params: Any) -> None:
        if params.get("refuse"):
            raise ValueError("no such grammar")
        self.admitted.add(row)

    def release(self, row: int) -> None:
        self.admitted.remove(row)

    def apply(self, logits: Any, rows: Any) -> None:
        for i, view in enumerate(rows):
            assert view.row in self.admitted and len(view.history) == view.position
            logits[i, view.history.astype(np.int64)] = -np.inf
            if view.row in self.broken_rows or 3 in view.history[view.num_prompt_tokens :]:
                raise ValueError("token 3")


def test_a_failing_processor_ends_only_its_rows(make_host: Any, expected: Any) -> None:
    outputs = expected()
    host = make_host(processors={"grammar": Grammar((2,)), "other": Grammar(), "third": Grammar()})
    host.admit(0, PROMPTS[0])
    host.admit(2, PROMPTS[2], processors={"grammar": {}})
    host.admit(3, PROMPTS[2], processors={"third": {"refuse": True}})
    host.admit(5, PROMPTS[5], processors={"other": {}})
    host.step({0: 5, 2: 2, 3: 5, 5: 1})
    assert host.results[-1].failed == {
        3: "logits processor 'third' failed: ValueError: no such grammar"
    }
    assert host.results[-1].offsets.tolist() == [0, 0, 0, 0, 1]
    result = host.step({0: 18, 2: 3, 5: 1})
    assert result.failed == {2: "logits processor 'grammar' failed: ValueError: token 3"}
    assert result.offsets.tolist() == [0, 1, 1, 2]
    for row in (2, 3):
        host.release(row)
    host.decode([0], LENGTH)
    assert host.output(0) == outputs[0]


def test_a_wrong_guess_cannot_fail_a_request(make_host: Any, drafts_of: Any) -> None:
    params: dict[str, Any] = {"processors": {"grammar": {}}}
    host = make_host(processors={"grammar": Grammar()})
    host.admit(0, PROMPTS[0], **params)
    host.prefill([0])
    host.decode([0], LENGTH)
    outputs = host.output(0)
    assert len(set(outputs)) == LENGTH and not set(outputs) & {3, *PROMPTS[0]}

    host = make_host(processors={"grammar": Grammar()})
    host.admit(0, PROMPTS[0], **params)
    host.prefill([0])
    for guess, num_right in (([3, 3], 0), ([outputs[2], 3], 1), (outputs[4:6], 2)):
        result = host.step({0: 1}, verify={0: 2}, drafts=drafts_of({0: (guess, None)}))
        assert result.failed == {}
        assert result.num_accepted.tolist() == [num_right]
    assert host.output(0) == outputs[:7]
