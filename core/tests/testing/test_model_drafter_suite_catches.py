"""The suite of drafters with a model of their own fails on those that break its contract."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from pegboard.interfaces.drafter import DrafterContext, DrafterFacts, DraftSlots, Observation
from pegboard.step import Drafts, Float32
from pegboard.testing.invariance import Case, Traces, run_case
from pegboard.testing.model_drafter import (
    PARAMS,
    PROMPTS,
    ModelDrafterContract,
    OnAndOff,
)
from pegboard.testing.model_drafters import SecondModel
from pegboard.testing.tiny import write_tiny_model
from pegboard.testing.watched_drafter import Notes


class Suite(ModelDrafterContract):
    manifest: ClassVar = SecondModel.manifest


class Lazy(SecondModel):
    """Does not heed what it is shown while no node is asked for."""

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        if seen.propose.any():
            return super().propose(seen)
        for i, row in enumerate(seen.rows.tolist()):
            new = seen.next_token_ids[seen.next_offsets[i] : seen.next_offsets[i + 1]]
            self.rows[row] += new.tolist()
        none = np.zeros(0, np.int32)
        drafts = Drafts(rows=none, offsets=np.zeros(1, np.int32), token_ids=none, parents=none)
        return drafts, np.zeros(0, np.float32)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    def write(name: str, **sizes: Any) -> Path:
        return write_tiny_model(tmp_path_factory.mktemp(name) / "m", dtype="float64", **sizes)

    return {
        "model": str(write("target")),
        "dtype": "float64",
        "kernels": "torch",
        "attention": "torch",
        "max_model_len": 64,
        "prefix_cache": "none",
        "kv_cache": {"block_size": 4},
        "drafter": {"model": str(write("second", seed=3)), "num_speculative_tokens": 5},
    }


@pytest.fixture(scope="module")
def alone(config: dict[str, Any]) -> Traces:
    plain = {key: value for key, value in config.items() if key != "drafter"}
    return run_case(plain, Case(batch=4), PROMPTS, PARAMS)


def test_slots_that_were_not_declared(
    config: dict[str, Any], alone: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    def describe(*asked: Any) -> DrafterFacts:
        return DrafterFacts(shape="registry", slots=DraftSlots(fixed=-2, a_node=1))

    Suite().play(config, SecondModel, Case(batch=4), alone)
    monkeypatch.setattr("pegboard.testing.model_drafters.describe_second_model", describe)
    with pytest.raises(AssertionError, match="set aside: "):
        Suite().play(config, SecondModel, Case(batch=4), alone)


def test_rows_that_are_not_followed_while_no_node_is_asked_for(
    config: dict[str, Any], alone: Traces
) -> None:
    def drafted(make: Callable[[DrafterContext], SecondModel]) -> Notes:
        policy = OnAndOff(Suite.num_nodes)
        return Suite().play(config, make, Case(batch=3), alone, speculation_policy=policy)

    reference = drafted(SecondModel)
    with pytest.raises(AssertionError):
        Suite().compare(reference, drafted(Lazy))
