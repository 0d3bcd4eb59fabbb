"""The engine as its caller sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from pegboard.errors import EngineError, RequestError
from pegboard.interfaces.observer import Event, Observer, SequenceFinished, StepDone
from pegboard.interfaces.scheduler import (
    QueueView,
    Scheduler,
    SchedulerContext,
    StepBuilder,
)
from pegboard.request import Request, SamplingParams

Make = Callable[..., Any]
Expected = Callable[..., tuple[int, ...]]


def test_output_is_what_the_model_says_and_ends_at_max_tokens(
    bench: Make, expected: Expected
) -> None:
    engine = bench()
    engine.add("a", [1, 2, 3], max_tokens=20, seed=5)
    output = engine.run()["a", 0]
    assert output.token_ids == expected([1, 2, 3], 20, 5)
    assert output.last.finish_reason == "length"
    assert (output.last.num_prompt_tokens, output.last.num_output_tokens) == (3, 20)


def test_every_sequence_of_a_request_has_its_own_noise(bench: Make, expected: Expected) -> None:
    engine = bench(max_num_seqs=2)
    engine.add("a", [1, 2, 3], max_tokens=6, n=5)
    outputs = engine.run()
    assert {key: output.token_ids for key, output in outputs.items()} == {
        ("a", index): expected([1, 2, 3], 6, 0, index) for index in range(5)
    }


def test_without_max_tokens_a_sequence_fills_the_context(bench: Make, expected: Expected) -> None:
    engine = bench(max_model_len=30)
    engine.add("a", [1, 2, 3])
    engine.add("b", [4, 5], max_tokens=1000)
    outputs = engine.run()
    assert outputs["a", 0].token_ids == expected([1, 2, 3], 27)
    assert outputs["b", 0].token_ids == expected([4, 5], 28)
    assert outputs["b", 0].last.finish_reason == "length"


def test_end_of_sequence_ends_unless_ignored(bench: Make, expected: Expected) -> None:
    tokens = expected([1, 2, 3], 12)
    eos = tokens[5]
    cut = tokens.index(eos) + 1
    engine = bench(eos_token_ids=(eos,))
    engine.add("ends", [1, 2, 3], max_tokens=12)
    engine.add("goes on", [1, 2, 3], max_tokens=12, ignore_eos=True)
    outputs = engine.run()
    ended, ignored = outputs["ends", 0], outputs["goes on", 0]
    assert ended.token_ids == tokens[:cut]
    assert (ended.last.finish_reason, ended.last.stop_reason) == ("stop", None)
    assert ignored.token_ids == tokens and ignored.last.finish_reason == "length"


def test_a_stop_token_is_named_even_if_it_is_the_last_allowed(
    bench: Make, expected: Expected
) -> None:
    tokens = expected([1, 2, 3], 12)
    cut = tokens.index(tokens[7]) + 1
    engine = bench()
    engine.add("a", [1, 2, 3], max_tokens=cut, stop_token_ids=(tokens[7],))
    output = engine.run()["a", 0]
    assert output.token_ids == tokens[:cut]
    assert (output.last.finish_reason, output.last.stop_reason) == ("stop", tokens[7])


class Letters:
    """Token 0 is `a`, token 26 is `a` again."""

    def add(self, token_ids: Any) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)

    def finish(self) -> str:
        return "!"


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(bench: Make, expected: Expected) -> None:
    text = Letters().add(expected([1, 2, 3], 30))
    stop = text[12:15]
    engine = bench(make_detokenizer=Letters)
    engine.add("a", [1, 2, 3], max_tokens=30, stop=("never there", stop))
    engine.add("b", [1, 2, 3], max_tokens=30)
    outputs = engine.run()
    stopped, whole = outputs["a", 0], outputs["b", 0]
    assert stopped.text == text[: text.index(stop)]
    assert len(stopped.token_ids) == text.index(stop) + 3
    assert (stopped.last.finish_reason, stopped.last.stop_reason) == ("stop", stop)
    assert whole.text == text + "!"


def test_tokens_after_a_stop_are_dropped_from_a_verified_span(
    bench: Make, expected: Expected
) -> None:
    tokens = expected([1, 2, 3], 40)
    for stop in tokens[5:15]:
        engine = bench(num_speculative_tokens=6)
        engine.add("a", [1, 2, 3], max_tokens=40, stop_token_ids=(stop,))
        output = engine.run()["a", 0]
        kept = tokens[: tokens.index(stop) + 1]
        assert output.token_ids == kept
        engine.add("b", [9], max_tokens=1)  # the release travels with the next batch
        engine.run()
        assert engine.worker.released[0][1] == 3 + len(kept)


@pytest.mark.parametrize(
    ("param", "prompt", "params"),
    [
        ("prompt", [], {}),
        ("prompt", [1, 97], {}),
        ("prompt", [-1], {}),
        ("prompt", [1] * 128, {}),
        ("prompt", [1] * 100, {}),
        ("stop", [1], {"stop": ("x",)}),
        ("stop_token_ids", [1], {"stop_token_ids": (97,)}),
        ("logit_bias", [1], {"logit_bias": {97: 1.0}}),
        ("top_p", [1], {"top_p": 0.0}),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    bench: Make, param: str, prompt: list[int], params: dict[str, Any]
) -> None:
    engine = bench(num_blocks=16)
    with pytest.raises(RequestError) as caught:
        engine.add("a", prompt, **params)
    assert caught.value.param == param
    assert not engine.core.has_work()


def test_a_refusal_for_lack_of_kv_says_the_numbers(bench: Make) -> None:
    engine = bench(num_blocks=16)
    engine.add("fits", [1] * 60, max_tokens=1)
    with pytest.raises(RequestError, match=r"prompt: 61 tokens need 16 KV blocks.*pool has 15"):
        engine.add("a", [1] * 61, max_tokens=1)


@pytest.mark.parametrize("num_prompt", [1, 10, 59, 60])
@pytest.mark.parametrize("max_tokens", [None, 1000, 90])
@pytest.mark.parametrize(
    ("block_sizes", "num_blocks", "most"),
    [((4,), 16, 61), ((4, 5), (40, 13), 61), ((7, 3), (10, 40), 64)],
)
def test_an_answer_is_cut_where_the_pool_ends(
    bench: Make,
    expected: Expected,
    num_prompt: int,
    max_tokens: int | None,
    block_sizes: tuple[int, ...],
    num_blocks: Any,
    most: int,
) -> None:
    windows = (None,) * len(block_sizes)
    engine = bench(block_sizes=block_sizes, windows=windows, num_blocks=num_blocks)
    params = {} if max_tokens is None else {"max_tokens": max_tokens}
    engine.add("a", [1] * num_prompt, **params)
    output = engine.run()["a", 0]
    assert output.token_ids == expected([1] * num_prompt, most - num_prompt)
    assert output.last.finish_reason == "length"


def test_an_open_request_id_is_refused(bench: Make) -> None:
    engine = bench()
    engine.add("a", [1], max_tokens=2)
    with pytest.raises(RequestError, match="request_id"):
        engine.add("a", [1], max_tokens=2)
    engine.run()
    engine.outputs.clear()
    engine.add("a", [1], max_tokens=2)
    assert len(engine.run()["a", 0].token_ids) == 2


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 9])
def test_abort_in_every_state(bench: Make, expected: Expected, num_steps: int) -> None:
    engine = bench(max_num_batched_tokens=8, max_num_seqs=2)
    engine.add("gone", list(range(20)), max_tokens=20, n=3)
    engine.add("stays", [1, 2], max_tokens=9)
    for _ in range(num_steps):
        engine.step()
    engine.core.abort("gone")
    engine.core.abort("gone")
    engine.core.abort("unknown")
    outputs = engine.run()
    assert outputs["stays", 0].token_ids == expected([1, 2], 9)
    for index in range(3):
        output = outputs["gone", index]
        assert output.last.finish_reason == "abort"
        assert output.token_ids == expected(range(20), 20, 0, index)[: len(output.token_ids)]


def test_a_row_that_failed_ends_its_request_alone(bench: Make, expected: Expected) -> None:
    engine = bench()
    engine.worker.fail_rows = lambda row: row.tokens[0] == 7 and len(row.tokens) > 3
    engine.add("fails", [7, 8], max_tokens=9, n=2)
    engine.add("fine", [1, 2], max_tokens=9)
    outputs = engine.run()
    assert outputs["fine", 0].token_ids == expected([1, 2], 9)
    for index in range(2):
        last = outputs["fails", index].last
        assert (last.finish_reason, last.error) == ("error", "the processor failed")


@pytest.mark.parametrize("depth", [1])
def test_a_failing_executor_ends_all_requests(bench: Make) -> None:
    engine = bench(max_num_seqs=1)
    engine.add("runs", [1, 2], max_tokens=9)
    engine.add("waits", [1, 2], max_tokens=9)
    engine.step()
    engine.worker.raises = RuntimeError("worker 0 died")
    with pytest.raises(EngineError, match="worker 0 died"):
        engine.step()
    outputs = engine.run()
    for name in ("runs", "waits"):
        last = outputs[name, 0].last
        assert last.finish_reason == "error" and "worker 0 died" in (last.error or "")
    with pytest.raises(EngineError, match="worker 0 died"):
        engine.add("late", [1])


class Lazy(Scheduler):
    def __init__(self, context: SchedulerContext) -> None: ...

    def plan(self, queue: QueueView, step: StepBuilder) -> None: ...


def test_a_queue_that_never_moves_is_failed_with_the_ledger(bench: Make) -> None:
    engine = bench(scheduler=Lazy, fallback_scheduler=Lazy(SchedulerContext(8, 64, 128)))
    engine.add("a", [1, 2], max_tokens=9)
    engine.add("b", [1, 2], max_tokens=9)
    outputs = engine.run(max_steps=100)
    for name in "ab":
        last = outputs[name, 0].last
        assert last.finish_reason == "error" and "total=64" in (last.error or "")


class Listener(Observer):
    def __init__(self, raises: bool = False) -> None:
        self.events: list[Event] = []
        self.raises = raises
        self.closed = 0

    def observe(self, event: Event) -> None:
        self.events.append(event)
        if self.raises:
            raise ValueError("no ears")

    def close(self) -> None:
        self.closed += 1


def test_observers_hear_and_a_raising_one_is_cut_off(
    bench: Make, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = Listener(), Listener(raises=True)
    engine = bench(observers=(bad, good), max_num_batched_tokens=8)
    with caplog.at_level(logging.ERROR):
        engine.add("a", [1] * 20, max_tokens=5, n=2)
    engine.run()
    assert len(bad.events) == 1 and "Listener" in caplog.text
    steps = [event for event in good.events if isinstance(event, StepDone)]
    assert sum(step.num_output_tokens for step in steps) == 10
    # The second sequence has the first one's prompt but for its last token.
    assert sum(step.num_prefill_tokens for step in steps) == 20 + 1
    assert sum(step.num_decode_tokens for step in steps) == 8
    assert sum(len(step.first_token_s) for step in steps) == 2
    assert sum(len(step.inter_token_s) for step in steps) == 8
    ends = [event for event in good.events if isinstance(event, SequenceFinished)]
    assert sorted(end.index for end in ends) == [0, 1]
    for end in ends:
        assert end.admitted is not None and end.first_token is not None
        assert end.arrival <= end.admitted <= end.first_token <= end.finished
    engine.core.close()
    engine.core.close()
    assert (good.closed, bad.closed, engine.worker.closed) == (1, 1, 1)


def _seeds(bench: Make, seed: int | None) -> list[int]:
    engine = bench(seed=seed)
    for name in "abc":
        engine.add(name, [1, 2, 3], max_tokens=2, seed=None, n=2)
    engine.add("own", [1, 2, 3], max_tokens=2, seed=11)
    engine.run()
    admitted = [admission for batch in engine.worker.batches for admission in batch.admitted]
    # Second sequences begin a step later, as forks of the first.
    assert [admission.index for admission in admitted] == [0, 0, 0, 0, 1, 1, 1]
    seeds = [admission.seed for admission in admitted]
    assert seeds[3] == 11 and seeds[4:] == seeds[:3]
    return seeds[:4]


def test_seeds_are_drawn_once_a_request(bench: Make) -> None:
    assert _seeds(bench, 3) == _seeds(bench, 3)
    assert _seeds(bench, 3)[:3] != _seeds(bench, 4)[:3]
    assert _seeds(bench, None)[:3] != _seeds(bench, None)[:3]
    assert len(set(_seeds(bench, 3))) == 4


def test_logprobs_come_with_their_tokens(bench: Make, expected: Expected) -> None:
    engine = bench(num_speculative_tokens=4)
    engine.add("a", [1, 2, 3], max_tokens=15, logprobs=2)
    engine.add("b", [1, 2, 3], max_tokens=15, logprobs=0)
    engine.add("c", [1, 2, 3], max_tokens=15)
    outputs = engine.run()
    for name, num_top in (("a", 2), ("b", 0)):
        logprobs = [value for delta in outputs[name, 0].deltas for value in delta.logprobs]
        assert tuple(value.token_id for value in logprobs) == expected([1, 2, 3], 15)
        assert all(value.logprob == -value.token_id for value in logprobs)
        assert {len(value.top_ids) for value in logprobs} == {num_top}
    assert all(delta.logprobs is None for delta in outputs["c", 0].deltas)


def test_prompt_logprobs_come_once_whole_and_ignore_the_cache(bench: Make, dict_cache: Any) -> None:
    engine = bench(cache=dict_cache, max_num_batched_tokens=5)
    prompt = list(range(1, 24))
    engine.add("warm", prompt, max_tokens=3)
    engine.run()
    engine.add("cached", prompt, max_tokens=3)
    engine.add("asks", prompt, max_tokens=3, prompt_logprobs=1)
    outputs = engine.run()
    first, *others = outputs["asks", 0].deltas
    assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
    values = first.prompt_logprobs[1:]
    assert [value.token_id for value in values if value is not None] == prompt[1:]
    assert all(delta.prompt_logprobs is None for delta in others)
    assert outputs["cached", 0].last.num_cached_tokens == 20
    assert outputs["asks", 0].last.num_cached_tokens == 0


def test_salts_share_no_kv_and_tenants_do(bench: Make, dict_cache: Any) -> None:
    engine = bench(cache=dict_cache)
    for name, salt, tenant in (("a", "x", "1"), ("b", "y", "1"), ("c", "x", "2")):
        engine.add(name, range(20), max_tokens=3, cache_salt=salt, tenant=tenant)
        engine.run()
    assert [engine.outputs[name, 0].last.num_cached_tokens for name in "abc"] == [0, 0, 16]


def test_processor_parameters_are_asked_for_and_sent(bench: Make) -> None:
    def params_of(params: SamplingParams) -> dict[str, dict[str, Any]]:
        if params.presence_penalty > 1:
            raise RequestError("presence_penalty", "too much")
        return {"penalties": {"presence": params.presence_penalty}}

    engine = bench(processor_params=params_of)
    with pytest.raises(RequestError):
        engine.add("a", [1], presence_penalty=2.0)
    engine.add("b", [1], presence_penalty=0.5, max_tokens=1)
    engine.run()
    (admission,) = engine.worker.batches[0].admitted
    assert admission.processors == {"penalties": {"presence": 0.5}}


@pytest.mark.parametrize("depth", [1])
def test_a_waiting_request_is_passed_over_for_an_earlier_arrival(bench: Make) -> None:
    engine = bench(max_num_seqs=1)
    engine.add("late", [1, 2], max_tokens=2)
    early = Request(
        request_id="early",
        prompt_token_ids=(3,),
        params=SamplingParams(max_tokens=2, seed=0),
        arrival=1e-9,
    )
    engine.core.add(early)
    assert [delta.request_id for delta in engine.step()] == ["early"]
    engine.run()
