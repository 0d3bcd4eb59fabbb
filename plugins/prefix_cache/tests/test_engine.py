"""Through the engine, on tiny models in float64: what is cached is not computed, and changes no token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pegboard import Engine, SamplingParams
from pegboard.request import SequenceDelta
from pegboard.testing.tiny import write_tiny_model

BLOCK_SIZE = 4
SHARED = list(range(100, 121))
PROMPTS = [[*SHARED, *range(200 + 10 * n, 207 + 10 * n)] for n in range(4)]

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "qwen2": {
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 2,
    },
}
"""Layers that all see everything, that all have a window, and both."""


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param
    return write_tiny_model(folder, request.param, **MODELS[request.param])


def engine_of(model: Path, prefix_cache: Any, **values: Any) -> Engine:
    config = {
        "model": str(model),
        "dtype": "float64",
        "max_model_len": 96,
        "kv_cache": {"block_size": BLOCK_SIZE, **values.pop("kv_cache", {})},
        "prefix_cache": prefix_cache,
        **values,
    }
    return Engine(config)


def answers(
    engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int = 10
) -> list[tuple[tuple[int, ...], int]]:
    """Tokens of each prompt, which are submitted together, and how many of the prompt were cached."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=5, ignore_eos=True)
    requests = [engine.submit(list(prompt), params) for prompt in prompts]
    tokens: dict[str, tuple[int, ...]] = {}
    last: dict[str, SequenceDelta] = {}
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None
            tokens[delta.request_id] = tokens.get(delta.request_id, ()) + delta.token_ids
            last[delta.request_id] = delta
    ids = [request.request_id for request in requests]
    return [(tokens[id_], last[id_].num_cached_tokens) for id_ in ids]


@pytest.fixture(scope="module")
def uncached(model: Path) -> list[tuple[int, ...]]:
    with engine_of(model, "none") as engine:
        return [answers(engine, [prompt])[0][0] for prompt in PROMPTS]


@pytest.mark.parametrize("eviction", ["lru", "priority"])
def test_a_beginning_is_computed_once(model: Path, uncached: Any, eviction: str) -> None:
    with engine_of(model, {"name": "trie", "options": {"eviction": eviction}}) as engine:
        found = [answers(engine, [prompt])[0] for prompt in PROMPTS]
        assert [tokens for tokens, _ in found] == uncached
        whole_blocks = len(SHARED) // BLOCK_SIZE * BLOCK_SIZE
        assert [num_cached for _, num_cached in found] == [0, *[whole_blocks] * 3]


def test_auto_takes_it(model: Path) -> None:
    with engine_of(model, "auto") as engine:
        assert engine.prepared.composition.parts["prefix_cache"].name == "trie"


def test_the_next_turn_finds_the_answer_too(model: Path) -> None:
    with engine_of(model, "trie") as engine, engine_of(model, "none") as other:
        answer, _ = answers(engine, PROMPTS[:1])[0]
        turn = [*PROMPTS[0], *answer, *range(300, 306)]
        tokens, num_cached = answers(engine, [turn])[0]
        # The answer's last token was never computed.
        known = len(PROMPTS[0]) + len(answer) - 1
        assert num_cached == known // BLOCK_SIZE * BLOCK_SIZE
        assert tokens == answers(other, [turn])[0][0]


def test_the_last_token_of_a_known_prompt_is_computed(model: Path, uncached: Any) -> None:
    prompt = PROMPTS[0]
    assert len(prompt) % BLOCK_SIZE == 0
    with engine_of(model, "trie") as engine:
        answers(engine, [prompt])
        tokens, num_cached = answers(engine, [prompt])[0]
    assert (tokens, num_cached) == (uncached[0], len(prompt) - BLOCK_SIZE)


@pytest.mark.parametrize("eviction", ["lru", "priority"])
def test_a_pool_that_is_too_small_changes_no_token(
    model: Path, uncached: Any, eviction: str
) -> None:
    """Room for two sequences of the four, whose blocks evict each other's, again and again."""
    with engine_of(model, "none", max_model_len=40, scheduler={"max_num_seqs": 2}) as engine:
        pool = engine.prepared.ledger
        room = sum(n * size for n, size in zip(pool.num_blocks, pool.block_bytes, strict=True))
    cache = {"name": "trie", "options": {"eviction": eviction}}
    small = {"max_model_len": 40, "kv_cache": {"memory": room}}
    with engine_of(model, cache, **small) as engine:
        for _ in range(3):
            found = answers(engine, [*PROMPTS, PROMPTS[2], *PROMPTS[::-1]])
            assert [tokens for tokens, _ in found] == [
                *uncached,
                uncached[2],
                *uncached[::-1],
            ]
