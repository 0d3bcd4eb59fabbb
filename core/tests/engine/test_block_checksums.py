"""`kv_cache.verify`: a cached block whose bytes have changed is never served."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import Engine, SamplingParams
from pegboard.cli.check import report
from pegboard.compose import prepare
from pegboard.config import Config
from pegboard.engine.prefix.checksums import BlockChecksums
from pegboard.engine.prefix.known_blocks import KnownBlocks
from pegboard.errors import CompositionRefused
from pegboard.interfaces.executor import Executor, WorkerHealth
from pegboard.interfaces.kv_allocator import Growth
from pegboard.interfaces.observer import ErrorHappened, Event, Observer
from pegboard.interfaces.prefix_cache import Hit, PrefixCacheContext
from pegboard.step import StepBatch, StepResult
from pegboard.testing.dict_cache import DictCache
from pegboard.testing.tiny import write_tiny_model

PROMPT = tuple(range(3, 45))
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)


class Listening(Observer):
    def __init__(self) -> None:
        self.errors: list[ErrorHappened] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, ErrorHappened):
            self.errors.append(event)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


class Verified:
    """An engine on the tiny model that compares blocks, and its worker's KV."""

    def __init__(self, model: Path, **kv_cache: Any) -> None:
        config = {
            "model": str(model),
            "threads": 1,
            "max_model_len": 128,
            "kv_cache": {"block_size": 8, "verify": True, **kv_cache},
        }
        groups = prepare(Config.from_values(config), prefix_cache=_cache(())).composition.groups
        self.listening = Listening()
        self.cache = _cache(groups)
        self.engine = Engine(config, prefix_cache=self.cache, observer=self.listening)

    def run(self, prompt: tuple[int, ...] = PROMPT) -> tuple[tuple[int, ...], int]:
        """The tokens after a prompt, and how many of the prompt's were cached."""
        self.engine.submit(prompt, GREEDY)
        tokens: list[int] = []
        num_cached = 0
        while self.engine.has_work():
            for delta in self.engine.step():
                tokens += delta.token_ids
                num_cached = delta.num_cached_tokens
        return tuple(tokens), num_cached

    def cached_blocks(self) -> list[int]:
        """By the length of what they end."""
        names = self.cache.names[0]
        return [names[key] for key in sorted(names, key=lambda key: len(key[1]))]

    def flip_a_bit(self, layer: int, block: int) -> None:
        kv = self.engine.core._parts.executor._worker._running().units.target.kv
        tensor = list(kv[layer].values())[-1]
        tensor[block].view(torch.uint8).view(-1)[5] ^= 1


def _cache(groups: Any) -> DictCache:
    return DictCache(PrefixCacheContext(groups, (), ""))


@pytest.fixture
def verified(model: Path) -> Any:
    made = Verified(model)
    yield made
    made.engine.close()


def test_what_has_not_changed_is_served(verified: Verified) -> None:
    first, _ = verified.run()
    for _ in range(3):
        assert verified.run() == (first, 40)
    assert verified.run((*PROMPT[:20], 5, 6, 7))[1] == 16
    assert not verified.listening.errors


@pytest.mark.parametrize("layer", [0, -1])
def test_a_changed_block_is_refused_and_the_tokens_stay(verified: Verified, layer: int) -> None:
    first, _ = verified.run()
    block = verified.cached_blocks()[2]
    verified.flip_a_bit(layer, block)
    assert verified.run() == (first, 0)
    [error] = verified.listening.errors
    assert error.kind == "BlockChanged" and f"block {block} of group 0" in error.message
    # Its name is not used again, and nobody is told twice; what ends before it still is.
    assert verified.run() == (first, 0)
    assert verified.run((*PROMPT[:20], 5, 6, 7))[1] == 16
    assert len(verified.listening.errors) == 1


def test_a_block_that_is_handed_out_anew_is_trusted_again(model: Path) -> None:
    verified = Verified(model, memory=40 * 8 * 24 * 2 * 2 * 4)
    try:
        num_blocks = verified.engine.core.ledger()[0].total
        first, _ = verified.run()
        verified.flip_a_bit(0, verified.cached_blocks()[2])
        assert verified.run() == (first, 0)
        for number in range(2 * num_blocks // 4):
            verified.run(tuple(100 + number for _ in range(40)))
        verified.run()
        assert verified.run() == (first, 40)
        assert len(verified.listening.errors) == 1
    finally:
        verified.engine.close()


def test_a_reset_forgets_what_was_changed(verified: Verified) -> None:
    first, _ = verified.run()
    verified.flip_a_bit(0, verified.cached_blocks()[0])
    assert verified.run() == (first, 0)
    verified.engine.reset_prefix_cache()
    assert verified.run() == (first, 0)
    assert verified.run() == (first, 40)


def test_check_says_that_it_is_slow(model: Path) -> None:
    prepared = prepare(Config(model=str(model), kv_cache={"verify": True}), prefix_cache=_cache(()))
    assert report(prepared.config, prepared.composition, prepared.ledger)["verify_kv"] is True


def test_without_a_prefix_cache_it_would_do_nothing(model: Path) -> None:
    with pytest.raises(
        CompositionRefused, match=r"kv_cache\.verify: true, but prefix_cache 'none'"
    ):
        prepare(Config(model=str(model), prefix_cache="none", kv_cache={"verify": True}))


class Ranks(Executor):
    """Workers whose blocks are numbers."""

    def __init__(self, num_ranks: int) -> None:
        self.blocks = [
            {block: 10 * block + rank for block in range(9)} for rank in range(num_ranks)
        ]

    def start(self) -> None: ...

    def execute(self, batch: StepBatch) -> Future[StepResult]:
        raise NotImplementedError

    def call(self, method: str, *arguments: Any) -> list[Any]:
        group, blocks = arguments
        return [[held[block] + group for block in blocks] for held in self.blocks]

    def health(self) -> tuple[WorkerHealth, ...]:
        return ()

    def close(self) -> None: ...


def filled(num_groups: int, *blocks: int) -> KnownBlocks:
    """A table in which these blocks of each group hold something."""
    known = KnownBlocks(num_groups)
    for group in range(num_groups):
        known.fill(group, blocks, [bytes([block]) for block in blocks])
    return known


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_change_on_any_rank_counts(rank: int) -> None:
    executor, told = Ranks(3), list[str]()
    known = filled(2, 1, 2, 3)
    checksums = BlockChecksums(known, executor, told.append)
    for group in (0, 1):
        checksums.note(group, (1, 2, 3))
    assert checksums.confirm(((1, 2, 3), (0, 0, 3)))
    executor.blocks[rank][2] += 1
    assert checksums.confirm(((1,), (0, 0, 3))) and not told
    assert not checksums.confirm(((1, 2), (1,)))
    assert len(told) == 1 and "block 2 of group 0" in told[0]
    assert checksums.distrusts(Hit(8, ((1, 2), (1, 3))))
    assert not checksums.distrusts(Hit(8, ((1, 3), (1, 2))))
    assert known.hand_out(Growth((((0, 2),), ()), ((), ())))
    checksums.note(0, known.fill(0, (2,), (b"new",)))
    assert not checksums.distrusts(Hit(8, ((1, 2), (1, 3))))
    assert checksums.confirm(((1, 2), (1,)))


def test_a_block_nobody_has_a_checksum_of_has_changed() -> None:
    told: list[str] = []
    checksums = BlockChecksums(filled(1, 4), Ranks(1), told.append)
    assert not checksums.confirm(((4,),)) and told


Make = Callable[..., Any]


def test_blocks_that_left_the_window_are_not_read(
    bench: Make, dict_cache: Any, expected: Callable[..., tuple[int, ...]]
) -> None:
    engine = bench(cache=dict_cache, windows=(8,), verifies_blocks=True)
    asked: list[int] = []

    def checksums(method: str, group: int, blocks: list[int]) -> list[list[int]]:
        asked.extend(blocks)
        return [list(blocks)]

    engine.worker.call = checksums
    for name in "ab":
        engine.add(name, range(30), max_tokens=20)
        engine.run()
    assert engine.outputs["b", 0].token_ids == expected(range(30), 20)
    assert engine.outputs["b", 0].last.num_cached_tokens > 0
    assert asked and 0 not in asked
