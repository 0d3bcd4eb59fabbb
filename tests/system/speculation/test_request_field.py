"""A request's own word on drafts, `speculative`: its number is kept to, and no token depends on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegboard import LLM, Engine, SamplingParams
from pegboard.errors import RequestError
from pegboard.interfaces.drafter import Drafter, Observation
from pegboard.request import SequenceDelta
from pegboard.step import Drafts, Float32, Int32, RowAdmission
from pegboard.testing.guessing_drafter import GuessingDrafter, Outputs
from pegboard.testing.tiny import write_tiny_model

NUM_NODES = 5
NUM_TOKENS = 14
PROMPTS = [tuple(range(start, start + length)) for start, length in ((5, 3), (60, 9), (90, 17))]
PARAMS = [
    SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1, **more)
    for more in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 4, "n": 2}, {"seed": 9})
]
MOST: dict[Any, int] = {
    None: NUM_NODES,
    "off": 0,
    0: 0,
    1: 1,
    2: 2,
    NUM_NODES: NUM_NODES,
    2**31 - 1: NUM_NODES,
}
"""What a request says, a number for `num_speculative_tokens`, and the most nodes that it may have."""

Tokens = dict[tuple[int, int], list[SequenceDelta]]


def said(value: Any) -> Any:
    return {"num_speculative_tokens": value} if isinstance(value, int) else value


class Watched(Drafter):
    """Passes on what another drafter proposes, and notes what it was asked for and shown."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.limits: dict[int, int | None] = {}
        self.asked: list[tuple[int | None, int]] = []
        self.num_shown: dict[int, int] = {}
        self.num_released: list[tuple[int, int]] = []

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        self._inner.admit(admission, block_tables)
        self.limits[admission.row] = admission.speculative
        self.num_shown[admission.row] = admission.num_cached

    def release(self, row: int, num_tokens: int) -> None:
        self._inner.release(row, num_tokens)
        self.num_released.append((self.num_shown.pop(row), num_tokens))

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        counts = np.diff(seen.offsets).tolist()
        for row, count, propose in zip(
            seen.rows.tolist(), counts, seen.propose.tolist(), strict=True
        ):
            self.num_shown[row] += count
            self.asked.append((self.limits[row], propose))
        return self._inner.propose(seen)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny"), dtype="float64", num_hidden_layers=1)
    return {"model": str(model), "dtype": "float64", "threads": 1, "prefix_cache": "none"}


def run(engine: Engine, words: list[Any]) -> Tokens:
    """The deltas of each sequence, by its prompt's number and its index."""
    ids = [
        engine.submit(prompt, params, speculative=word).request_id
        for prompt, params, word in zip(PROMPTS, PARAMS, words, strict=True)
    ]
    found: Tokens = {}
    while engine.has_work():
        for delta in engine.step():
            found.setdefault((ids.index(delta.request_id), delta.index), []).append(delta)
    assert not engine.core.cut_off, engine.core.cut_off
    return found


def answers(deltas: Tokens) -> dict[tuple[int, int], Any]:
    return {
        key: [
            (token, each.logprobs[i])
            for each in one
            if each.logprobs
            for i, token in enumerate(each.token_ids)
        ]
        for key, one in deltas.items()
    }


@pytest.fixture(scope="module")
def plain(config: dict[str, Any]) -> Tokens:
    with Engine(config) as engine:
        return run(engine, [None] * 3)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("width", [1, 2])
def test_each_request_has_its_own_number_and_no_token_changes(
    config: dict[str, Any], plain: Tokens, width: int, depth: int
) -> None:
    outputs: Outputs = {
        (PROMPTS[number], index): [token for delta in deltas for token in delta.token_ids]
        for (number, index), deltas in plain.items()
    }
    drafting = {**config, "drafter": {"num_speculative_tokens": NUM_NODES, "policy": "fixed"}}
    drafting["executor"] = {"depth": depth}
    listed = list(MOST)
    made: list[Watched] = []

    def drafter(context: Any) -> Watched:
        made.append(Watched(GuessingDrafter(outputs, right=1.0, width=width)))
        return made[-1]

    with Engine(drafting, drafter=drafter) as engine:
        for shift in range(len(listed)):
            values = [listed[(shift + number) % len(listed)] for number in range(3)]
            deltas = run(engine, [said(value) for value in values])
            assert answers(deltas) == answers(plain), values
            for (number, _), one in deltas.items():
                most = MOST[values[number]] // width
                gained = [len(delta.token_ids) - 1 for delta in one[1:]]
                # All guesses are right, so that each draft is accepted to its end.
                assert max(gained) == min(most, NUM_TOKENS), (values[number], gained)
    (watched,) = made
    assert {limit for limit, _ in watched.asked} == set(MOST.values())
    assert all(limit is not None and propose <= limit for limit, propose in watched.asked)
    for num_shown, num_tokens in watched.num_released:
        # It saw all that was computed, of rows without drafts too; the last token never is.
        assert num_shown >= num_tokens - 1


def test_without_a_drafter_it_is_a_hint(config: dict[str, Any], plain: Tokens) -> None:
    with Engine(config) as engine:
        deltas = run(engine, ["off", {"num_speculative_tokens": 3}, {}])
    assert answers(deltas) == answers(plain)


def test_offline_generation_takes_it_for_all_prompts(config: dict[str, Any]) -> None:
    settings = {**config, "drafter": "ngram"}
    with LLM(settings.pop("model"), show_progress=False, **settings) as llm:

        def answer(word: Any) -> list[tuple[int, ...]]:
            results = llm.generate(PROMPTS, PARAMS, speculative=word)
            return [output.token_ids for result in results for output in result.outputs]

        assert answer("off") == answer({"num_speculative_tokens": 1}) == answer(None)


@pytest.mark.parametrize("word", ["on", True, {"num_speculative_tokens": True}, {"k": 1}])
def test_what_it_cannot_mean_is_refused_and_nothing_is_queued(
    config: dict[str, Any], word: Any
) -> None:
    with Engine(config) as engine:
        with pytest.raises(RequestError, match="speculative"):
            engine.submit(PROMPTS[0], speculative=word)
        assert not engine.has_work()
