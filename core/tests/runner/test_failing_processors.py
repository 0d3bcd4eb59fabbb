"""A logits processor that fails, or leaves nothing to sample from, ends the rows that it failed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.interfaces.drafter import Drafter, Observation
from pegboard.interfaces.logits_processor import LogitsProcessor
from pegboard.step import Drafts
from pegboard.testing.erring_drafter import Mute, Panic

PROMPTS = {0: [40, 41, 42], 1: [7, 300, 7], 2: [101], 3: [5, 6]}
LENGTH = 6

Change = Callable[[torch.Tensor, int, Any], object]


class Doing(LogitsProcessor):
    """Does something to the rows that ask for it."""

    def __init__(self, change: Change) -> None:
        self.change = change
        self.asked: dict[int, bool] = {}

    def admit(self, row: int, params: Any) -> None:
        self.asked[row] = params.get("fail", False)
        params.clear()

    def apply(self, logits: torch.Tensor, rows: Any) -> None:
        for i, view in enumerate(rows):
            if self.asked[view.row]:
                self.change(logits, i, view)
            else:
                logits[i, 3] += 1.0

    def release(self, row: int) -> None:
        if self.asked.pop(row):
            raise Panic


def _raise(error: BaseException) -> Change:
    def change(logits: torch.Tensor, i: int, view: Any) -> None:
        logits[:] = 0.0
        raise error

    return change


CHANGES: dict[str, Change] = {
    "raise": _raise(ValueError("no")),
    "exit": _raise(SystemExit(3)),
    "panic": _raise(Panic()),
    "an error that cannot be shown": _raise(Mute()),
    "resize": lambda logits, i, view: logits.resize_(1, 3),
    "history": lambda logits, i, view: view.history.sort(),
    "nothing left": lambda logits, i, view: logits[i].fill_(-torch.inf),
    "one NaN": lambda logits, i, view: logits[i, 5:6].fill_(torch.nan),
    "all NaN": lambda logits, i, view: logits[i].fill_(torch.nan),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("change", CHANGES)
def test_only_the_rows_that_it_fails_on_end(
    make_host: Any, change: str, temperature: float
) -> None:
    def outputs(failing: set[int]) -> dict[int, list[int]]:
        host = make_host(processors={"doing": Doing(CHANGES[change])})
        for row, prompt in PROMPTS.items():
            params = {"doing": {"fail": row in failing}}
            host.admit(row, prompt, temperature=temperature, top_p=0.9, processors=params)
        host.prefill(PROMPTS)
        assert set(host.results[-1].failed) == failing
        for row in failing:
            assert host.num_output(row) == 0
            host.release(row)
        host.decode(PROMPTS.keys() - failing, LENGTH)
        return {row: host.output(row) for row in PROMPTS.keys() - failing}

    whole = outputs(set())
    assert outputs({1, 2}) == {row: whole[row] for row in (0, 3)}


class Writing(Drafter):
    """Writes to whatever it gets, and guesses nothing."""

    def __init__(self) -> None:
        self.num_refused = 0

    def admit(self, admission: Any, block_tables: Any) -> None:
        self._write(admission.token_ids)

    def release(self, row: int, num_tokens: int) -> None:
        pass

    def propose(self, seen: Observation) -> tuple[Drafts, Any]:
        for name in (
            "rows",
            "offsets",
            "token_ids",
            "positions",
            "next_offsets",
            "next_token_ids",
            "propose",
        ):
            self._write(getattr(seen, name))
        none = np.zeros(0, dtype=np.int32)
        drafts = Drafts(rows=none, offsets=np.zeros(1, np.int32), token_ids=none, parents=none)
        return drafts, np.zeros(0, dtype=np.float32)

    def _write(self, array: Any) -> None:
        try:
            array += 1
        except ValueError:
            self.num_refused += 1


def test_a_drafter_cannot_write_to_what_it_is_shown(make_host: Any) -> None:
    drafter = Writing()
    outputs = []
    for host in (make_host(), make_host(drafter=drafter)):
        for row, prompt in PROMPTS.items():
            host.admit(row, prompt)
        host.prefill(PROMPTS, 2)
        host.decode(PROMPTS, LENGTH)
        outputs.append([host.output(row) for row in PROMPTS])
    assert outputs[0] == outputs[1]
    assert drafter.num_refused > 0


def test_each_worker_of_a_process_computes_with_its_own_threads(
    make_host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make_host()
    host.admit(0, PROMPTS[0])
    torch.set_num_threads(2)
    try:
        host.step({0: 3})
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)
