"""A worker gives a sequence the same tokens, however its steps are cut."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.errors import EngineError
from pegboard.interfaces import workload
from pegboard.interfaces.workload import MIN_LOGPROBS_ROWS
from pegboard.runner.logprobs import logprobs_of

PROMPT = list(range(40, 63))
OTHER = [7, 300, 7, 300, 12]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 200, "seed": 2**63 + 11, "index": 3}


def generate(host: Any, prompt: list[int], num_tokens: int = 12, **params: Any) -> list[int]:
    host.admit(0, prompt, **params)
    host.prefill([0])
    host.decode([0], num_tokens)
    output: list[int] = host.output(0)
    return output


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_chunks_do_not_change_tokens(make_host: Any, size: int, params: dict[str, Any]) -> None:
    expected = generate(make_host(), PROMPT, **params)
    assert len(set(expected)) > 3
    host = make_host()
    host.admit(0, PROMPT, **params)
    host.prefill([0], size)
    host.decode([0], 12)
    assert host.output(0) == expected


def test_rows_of_a_batch_do_not_meet(make_host: Any) -> None:
    alone = generate(make_host(), PROMPT, **SAMPLED), generate(make_host(), OTHER)
    host = make_host(window=None)
    host.admit(4, PROMPT, **SAMPLED)
    host.step({4: 9})
    host.admit(1, OTHER)
    host.step({4: 3, 1: 5})
    host.step({1: 1, 4: 11})
    host.decode([1, 4], 12)
    assert (host.output(4, 12), host.output(1, 12)) == alone


def test_seed_position_and_index_choose_the_noise(make_host: Any) -> None:
    outputs = [
        tuple(generate(make_host(), PROMPT, temperature=1.0, seed=seed, index=index))
        for seed, index in ((1, 0), (1, 0), (2, 0), (1, 1))
    ]
    assert outputs[0] == outputs[1]
    assert len(set(outputs)) == 3


def test_a_resumed_sequence_goes_on_with_the_same_tokens(make_host: Any) -> None:
    expected = generate(make_host(), PROMPT, **SAMPLED)
    host = make_host()
    host.admit(0, PROMPT, **SAMPLED)
    host.prefill([0])
    host.decode([0], 5)
    known = list(host.rows[0].tokens)
    host.release(0)
    host.admit(3, known, num_prompt_tokens=len(PROMPT), **SAMPLED)
    host.prefill([3], 8)
    host.decode([3], 12)
    assert host.output(3) == expected


def test_a_released_row_leaves_nothing_behind(make_host: Any) -> None:
    expected = generate(make_host(), OTHER)
    host = make_host()
    biased = {"logit_bias": {"logit_bias": {9: 100.0}}}
    assert generate(host, PROMPT, temperature=1.0, processors=biased) == [9] * 12
    host.release(0)
    assert generate(host, OTHER) == expected


def test_a_fork_copies_blocks_of_all_groups(make_host: Any) -> None:
    expected = generate(make_host(), PROMPT, 14)
    host = make_host()
    host.admit(0, PROMPT)
    host.prefill([0])
    host.decode([0], 3)
    host.fork(0, 2)
    # The parent's next tokens are written beside the child's, not over them.
    host.decode([0], 14)
    host.decode([2], 14)
    assert host.output(2) == expected == host.output(0)


def test_logprobs_are_of_the_raw_distribution(make_host: Any) -> None:
    plain = make_host()
    plain.admit(0, PROMPT, num_logprobs=5)
    plain.prefill([0])
    bent = make_host()
    bias = {"logit_bias": {"logit_bias": {3: 1000.0}}}
    bent.admit(0, PROMPT, num_logprobs=5, temperature=0.5, processors=bias)
    bent.prefill([0])
    before, after = plain.results[-1].logprobs, bent.results[-1].logprobs
    assert bent.output(0) == [3] and after.token_ids.tolist() == [3]
    assert np.array_equal(before.top_ids, after.top_ids)
    assert np.array_equal(before.top_logprobs, after.top_logprobs)
    assert before.ranks.tolist() == [1] and before.top_ids[0, 0] == before.token_ids[0]
    assert after.ranks[0] > 1 and after.logprobs[0] < before.logprobs[0]
    assert np.all(np.diff(before.top_logprobs[0]) <= 0)


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_prompt_logprobs_are_those_of_decoding_the_same_tokens(make_host: Any, size: int) -> None:
    host = make_host()
    host.admit(0, PROMPT, num_logprobs=2)
    host.prefill([0])
    host.decode([0], 6)
    decoded = [r.logprobs for r in host.results]
    whole = list(host.rows[0].tokens)

    host = make_host()
    host.admit(1, OTHER)  # a row that does not ask
    host.admit(0, whole, num_prompt_logprobs=3)
    host.prefill([1, 0], size)
    parts = [r.prompt_logprobs for r in host.results if r.prompt_logprobs is not None]
    token_ids = np.concatenate([p.token_ids for p in parts])
    assert token_ids.tolist() == whole[1:]
    assert all(len(p.token_ids) == p.offsets[-1] and p.top_ids.shape[1] == 3 for p in parts)
    tail = slice(len(PROMPT) - 1, None)
    for name in ("logprobs", "ranks"):
        got = np.concatenate([getattr(p, name) for p in parts])[tail]
        assert got == pytest.approx(np.concatenate([getattr(d, name) for d in decoded]), abs=1e-5)
    top = np.concatenate([p.top_ids for p in parts])[tail, :2]
    assert np.array_equal(top, np.concatenate([d.top_ids for d in decoded]))


def test_logits_for_logprobs_exist_a_few_rows_at_a_time(
    make_host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []

    def run() -> Any:
        host = make_host()
        model = host.runner._loaded.units.target.model
        logits = model.logits

        def counted(hidden: torch.Tensor) -> Any:
            rows.append(len(hidden))
            return logits(hidden)

        monkeypatch.setattr(model, "logits", counted)
        host.admit(0, [*PROMPT, *OTHER] * 3, num_prompt_logprobs=3)
        host.prefill([0])
        return host.results[0].prompt_logprobs

    whole = run()
    assert max(rows) == len(whole.token_ids) > 3 * MIN_LOGPROBS_ROWS
    rows.clear()
    monkeypatch.setattr(workload, "MAX_LOGPROBS_BYTES", 1)
    cut = run()
    assert max(rows) == MIN_LOGPROBS_ROWS
    for name in ("token_ids", "ranks", "top_ids"):
        assert np.array_equal(getattr(cut, name), getattr(whole, name))
    assert cut.top_logprobs == pytest.approx(whole.top_logprobs, abs=1e-5)


def test_of_equal_logits_the_lower_ids_are_reported() -> None:
    logits = torch.zeros(3, 50)
    logits[1, 7] = logits[1, 30] = 1.0
    logits[2] = torch.arange(50.0)
    token_ids, counts = np.array([0, 30, 49]), np.array([1, 2])
    found = logprobs_of(lambda places: logits[places], token_ids, counts, 4, 50)
    assert found.top_ids.tolist() == [[0, 1, 2, 3], [7, 30, 0, 1], [49, 48, 47, 46]]
    assert found.ranks.tolist() == [1, 1, 1]


def test_only_rows_that_asked_get_logprobs(make_host: Any) -> None:
    host = make_host()
    host.admit(0, PROMPT)
    host.admit(1, OTHER, num_logprobs=0)
    host.admit(2, OTHER, num_logprobs=4)
    result = host.step({0: len(PROMPT), 1: 5, 2: 5})
    assert result.logprobs.offsets.tolist() == [0, 0, 1, 2]
    assert result.logprobs.top_ids.shape == (2, 4)
    assert host.step({0: 1}).logprobs is None


def test_taps_are_the_inputs_of_layers(make_host: Any) -> None:
    from pegboard.builtin.no_drafter import NoDrafter

    class Recorder(NoDrafter):
        taps = (-1, 1)

        def __init__(self) -> None:
            self.seen: list[Any] = []

        def propose(self, seen: Any) -> Any:
            self.seen.append(seen)
            return super().propose(seen)

    def recorded(size: int) -> tuple[list[int], list[int], dict[int, torch.Tensor]]:
        drafter = Recorder()
        host = make_host(drafter=drafter)
        host.admit(0, PROMPT)
        host.prefill([0], size)
        host.decode([0], 5)
        tokens = np.concatenate([s.token_ids for s in drafter.seen]).tolist()
        positions = np.concatenate([s.positions for s in drafter.seen]).tolist()
        assert tokens == host.rows[0].tokens[:-1]
        following = np.concatenate([s.next_token_ids for s in drafter.seen]).tolist()
        assert following == host.output(0)
        taps = {k: torch.cat([s.taps[k] for s in drafter.seen]) for k in (-1, 1)}
        return tokens, positions, taps

    tokens, positions, whole = recorded(1000)
    assert positions == list(range(len(tokens)))
    for layer, hidden in recorded(4)[2].items():
        torch.testing.assert_close(hidden, whole[layer])
    assert not torch.allclose(whole[-1], whole[1])


def test_disagreement_with_the_host_is_an_error(make_host: Any) -> None:
    host = make_host()
    host.admit(0, PROMPT)
    host.prefill([0])
    host.rows[0].tokens.append(5)
    with pytest.raises(EngineError, match="row 0 knows 24 tokens"):
        host.step({0: 2})


def test_blocks_of_another_encoding_are_refused(make_host: Any, monkeypatch: Any) -> None:
    import msgspec

    host = make_host()
    execute = host.runner.execute

    def with_int8(batch: Any) -> Any:
        groups = tuple(msgspec.structs.replace(g, encoding="int8") for g in batch.groups)
        return execute(msgspec.structs.replace(batch, groups=groups))

    monkeypatch.setattr(host.runner, "execute", with_int8)
    host.admit(0, PROMPT)
    with pytest.raises(EngineError, match="the host's encoding is 'int8', this worker's 'none'"):
        host.prefill([0])


def test_checksums_are_of_a_blocks_bytes_in_its_groups_layers(
    make_host: Callable[..., Any],
) -> None:
    host = make_host()
    host.admit(0, PROMPT)
    host.prefill([0])

    blocks = list(range(1, 20))

    def checksums(group: int) -> list[int]:
        found: list[int] = host.runner.call("block_checksums", group, blocks)
        return found

    before = [checksums(group) for group in (0, 1)]
    # Each layer of the model is a group of its own.
    for group, layer in enumerate(host.runner._running().units.target.kv):
        for tensor in layer.values():
            last_byte = tensor[7].view(torch.uint8).view(-1)[-1]
            last_byte ^= 1
            changed = [a != b for a, b in zip(before[group], checksums(group), strict=True)]
            assert changed == [block == 7 for block in blocks]
            assert checksums(1 - group) == before[1 - group]
            last_byte ^= 1
    assert [checksums(group) for group in (0, 1)] == before


@pytest.mark.parametrize(
    ("lag", "is_pending", "is_refused"),
    [(1, False, False), (2, True, False), (1, True, True), (2, False, True)],
)
def test_a_last_token_that_the_host_has_not_heard_of_is_pending_and_no_other(
    make_host: Any,
    monkeypatch: pytest.MonkeyPatch,
    lag: int,
    is_pending: bool,
    is_refused: bool,
) -> None:
    import msgspec

    host = make_host()
    host.admit(0, PROMPT)
    host.prefill([0])
    execute = host.runner.execute

    def changed(batch: Any) -> Any:
        fence, pending = batch.step_id - lag, np.array([is_pending])
        return execute(msgspec.structs.replace(batch, fence=fence, pending=pending))

    monkeypatch.setattr(host.runner, "execute", changed)
    if is_refused:
        with pytest.raises(EngineError, match=f"pending={is_pending}"):
            host.step({0: 1})
    else:
        host.step({0: 1})
        assert len(host.output(0)) == 2


@pytest.mark.parametrize("question", [("colour",), ("block_checksums",), ("memory", 1)])
def test_other_questions_are_refused(make_host: Callable[..., Any], question: Any) -> None:
    with pytest.raises(
        EngineError, match=f"unknown question '{question[0]}'; allowed: memory, block_"
    ):
        make_host().runner.call(*question)


def test_close_frees_the_kv(make_host: Callable[..., Any]) -> None:
    host = make_host()
    kv = [t for layer in host.runner._running().units.target.kv for t in layer.values()]
    assert host.runner.call("memory") == {"kv": sum(t.nbytes for t in kv)}
    held = weakref.ref(kv[0])
    del kv
    host.runner.close()
    host.runner.close()
    gc.collect()
    assert held() is None
    with pytest.raises(EngineError, match="not running"):
        host.runner.call("memory")
