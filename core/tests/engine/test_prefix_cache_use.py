"""The engine's calls of a prefix cache, for which sequences and when."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pegboard.builtin.fcfs import FCFS
from pegboard.engine import breaker as breaker_module
from pegboard.interfaces.observer import ErrorHappened, Event, Observer
from pegboard.interfaces.prefix_cache import Prefix
from pegboard.interfaces.scheduler import QueueView, StepBuilder

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]

PROMPT = list(range(1, 31))


class Listening(Observer):
    def __init__(self) -> None:
        self.errors: list[ErrorHappened] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, ErrorHappened):
            self.errors.append(event)

    def close(self) -> None: ...


def _recording(base: type) -> type:
    """Notes what it is told and asked, with the priority."""

    class Cache(base):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.used: list[tuple[int, int]] = []
            self.published: list[tuple[int, int]] = []

        def use(self, prefix: Prefix, num_tokens: int) -> None:
            self.used.append((num_tokens, prefix.priority))

        def publish(self, prefix: Prefix, blocks: Sequence[Sequence[int]]) -> Any:
            self.published.append((len(prefix.token_ids), prefix.priority))
            return super().publish(prefix, blocks)

    return Cache


def _cached(engine: Any, name: str, **params: Any) -> int:
    """Runs the prompt alone, and says how much of it a cache served."""
    engine.add(name, PROMPT, max_tokens=3, **params)
    num_tokens: int = engine.run()[name, 0].last.num_cached_tokens
    return num_tokens


def test_modes_say_who_reads_and_who_is_read(bench: Make, dict_cache: Any) -> None:
    engine = bench(cache=dict_cache)
    modes = ("off", "read_only", "on", "off", "read_only", "on")
    found = [_cached(engine, str(i), prefix_cache=mode) for i, mode in enumerate(modes)]
    assert found == [0, 0, 0, 0, 28, 28]


@pytest.mark.parametrize("mode", ["off", "read_only"])
def test_who_does_not_publish_leaves_no_name(bench: Make, dict_cache: Any, mode: str) -> None:
    engine = bench(cache=dict_cache)
    engine.add("a", PROMPT, max_tokens=20, prefix_cache=mode, n=2)
    engine.run()
    assert engine.core.ledger()[0].cached == 0 and not engine.cache.names[0]


def test_a_cache_hears_of_what_was_of_use_and_for_whom(bench: Make, dict_cache: Any) -> None:
    engine = bench(cache=_recording(dict_cache))
    _cached(engine, "a", priority=3)
    assert (engine.cache.used, engine.cache.published[0]) == ([], (28, 3))
    _cached(engine, "b", priority=-1)
    assert engine.cache.used == [(28, -1)]
    _cached(engine, "c", prompt_logprobs=0)
    assert engine.cache.used == [(28, -1)]


def test_a_hit_that_comes_to_nothing_was_of_no_use(bench: Make, dict_cache: Any) -> None:
    class Undecided(FCFS):
        def plan(self, queue: QueueView, step: StepBuilder) -> None:
            super().plan(queue, step)
            for seq in queue.waiting:
                step.preempt(seq)

    engine = bench(cache=_recording(dict_cache), scheduler=Undecided)
    engine.add("a", PROMPT, max_tokens=40)
    for _ in range(3):
        engine.step()
    engine.add("b", PROMPT, max_tokens=3)
    engine.step()
    assert engine.core.num_waiting == 1 and engine.cache.used == []


@pytest.mark.parametrize("depth", [1])
def test_a_preempted_sequence_finds_what_it_had_computed(
    bench: Make, dict_cache: Any, expected: Expected
) -> None:
    class Once(FCFS):
        def plan(self, queue: QueueView, step: StepBuilder) -> None:
            if len(queue.running) == 2 and queue.running[1].num_output == 9:
                assert step.preempt(queue.running[1])
            super().plan(queue, step)

    engine = bench(cache=dict_cache, scheduler=Once)
    engine.add("first", [7], max_tokens=30)
    engine.add("victim", PROMPT, max_tokens=14)
    output = engine.run()["victim", 0]
    assert output.token_ids == expected(PROMPT, 14)
    assert output.last.num_cached_tokens == 0, "of what it found at first"
    num_computed = sum(int(batch.num_tokens.sum()) for batch in engine.worker.batches)
    # 38 of its tokens had KV when it was preempted; nine blocks of four of them were full.
    assert num_computed == 30 + (30 + 13) + (38 - 36)


def _evict_within_a_plan(bench: Make, cache: type, expected: Expected, ask: bool) -> Listening:
    """One plan in which a sequence takes a block whose name another one hopes for."""

    class Asking(FCFS):
        def plan(self, queue: QueueView, step: StepBuilder) -> None:
            if ask:
                assert all(step.num_cached(seq) >= 0 for seq in queue.waiting)
            super().plan(queue, step)

    listening = Listening()
    engine = bench(
        cache=cache,
        scheduler=Asking,
        num_blocks=29,
        max_num_batched_tokens=128,
        observers=(listening,),
    )
    known, other = list(range(45)), list(range(50, 91))
    for name, prompt in (("known", known), ("other", other)):
        engine.add(name, prompt, max_tokens=1)
        engine.run()
    assert engine.core.ledger()[0].free == 7
    engine.add("takes", [96] * 32, max_tokens=1)
    engine.add("hopes", [*known[:44], 9], max_tokens=2)
    engine.step()
    assert len(engine.worker.batches[-1].rows) == 2
    outputs = engine.run()
    assert outputs["hopes", 0].token_ids == expected([*known[:44], 9], 2)
    assert outputs["takes", 0].token_ids == expected([96] * 32, 1)
    return listening


@pytest.mark.parametrize("ask", [False, True])
def test_a_block_given_away_in_this_plan_is_no_hit(
    bench: Make, dict_cache: Any, expected: Expected, ask: bool
) -> None:
    assert not _evict_within_a_plan(bench, dict_cache, expected, ask).errors


@pytest.mark.parametrize("ask", [False, True])
def test_nor_is_it_where_the_cache_says_so(
    bench: Make, dict_cache: Any, expected: Expected, ask: bool
) -> None:
    class Lying(dict_cache):  # type: ignore[misc]
        def evict(self, group: int, num_blocks: int, evictable: Callable[[int], bool]) -> Any:
            kept = dict(self.names[group])
            victims = super().evict(group, num_blocks, evictable)
            self.names[group] = kept
            return victims

    assert _evict_within_a_plan(bench, Lying, expected, ask).errors


def test_what_was_computed_while_the_cache_was_cut_off_may_be_named_later(
    bench: Make, dict_cache: Any, expected: Expected
) -> None:
    """The engine goes on noting what blocks hold, so that no true hit is taken for a lie."""
    listening = Listening()
    engine = bench(cache=dict_cache, observers=(listening,))
    guarded = engine.core._parts.prefix_cache
    engine.add("a", PROMPT, max_tokens=30)
    guarded.breaker.mistake("it erred")
    for _ in range(5):
        engine.step()
    assert not engine.cache.names[0]
    guarded.breaker._until = 0.0
    engine.run()
    assert not engine.core.cut_off and engine.cache.names[0]
    tokens = [*PROMPT, *expected(PROMPT, 30)]
    engine.add("b", tokens, max_tokens=3)
    assert engine.run()["b", 0].last.num_cached_tokens == 56
    assert len(listening.errors) == 1


def test_what_a_plan_gave_away_that_came_to_nothing_is_found_later(
    bench: Make, dict_cache: Any, expected: Expected
) -> None:
    """The victim's blocks lose their names to a newcomer, and are the victim's again."""

    class Stumbling(FCFS):
        num_stumbles = 1

        def plan(self, queue: QueueView, step: StepBuilder) -> None:
            if self.num_stumbles and len(queue.running) == 2 and queue.waiting:
                self.num_stumbles -= 1
                assert step.preempt(queue.running[1])
                assert step.add(queue.waiting[0], 40)
                raise ValueError("oops")
            super().plan(queue, step)

    listening = Listening()
    engine = bench(cache=dict_cache, scheduler=Stumbling, num_blocks=16, observers=(listening,))
    engine.add("oldest", [7], max_tokens=3)
    engine.add("victim", PROMPT, max_tokens=6)
    engine.step()
    engine.add("newcomer", [9] * 40, max_tokens=2)
    engine.step()
    engine.core.abort("newcomer")
    engine.run()
    assert _cached(engine, "again") == 28
    assert engine.outputs["again", 0].token_ids == expected(PROMPT, 3)
    (error,) = listening.errors
    assert "scheduler 'Stumbling' is cut off" in error.message


@pytest.mark.parametrize(
    "layout", [{}, {"block_sizes": (2, 4), "windows": (None, 12)}], ids=["one group", "a window"]
)
def test_the_table_agrees_with_the_cache_whatever_schedulers_do(
    bench: Make,
    dict_cache: Any,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
    layout: dict[str, Any],
) -> None:
    chance = random.Random(5)

    class Erratic(FCFS):
        def plan(self, queue: QueueView, step: StepBuilder) -> None:
            if queue.running and chance.random() < 0.3:
                step.preempt(chance.choice(queue.running))
            super().plan(queue, step)
            if chance.random() < 0.2:
                raise ValueError("oops")

    monkeypatch.setattr(breaker_module, "FIRST_PAUSE_S", 0.0)
    engine = bench(
        cache=dict_cache, scheduler=Erratic, num_blocks=41, max_num_batched_tokens=24, **layout
    )
    known = engine.core._parts.prefix_cache.known
    prompts = {f"{n}": [n % 3] * chance.randrange(9, 20) + [n] * 3 for n in range(24)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=chance.randrange(1, 20), n=1 + int(name) % 2)
        for _ in range(chance.randrange(6)):
            engine.step()
            for group, names in enumerate(engine.cache.names):
                assert set(known.cached(group)) == set(names.values())
                digests = {known.get(group, block).digest for block in names.values()}
                assert len(digests) == len(names), "blocks of different tokens have one digest"
    outputs = engine.run()
    for (name, index), output in outputs.items():
        tokens = output.token_ids
        assert tokens == expected(prompts[name], len(tokens), index=index), output.last.error
    assert not [cut_off for cut_off in engine.core.cut_off if cut_off.part == "prefix_cache"]
