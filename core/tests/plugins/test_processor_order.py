"""The order in which logits processors run, which decides what is sampled where they disagree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from pegboard import Engine
from pegboard.config import Config
from pegboard.interfaces.logits_processor import LogitsProcessor
from pegboard.request import SamplingParams

Configure = Callable[..., Config]

TWO_PROCESSORS = """# /// pegboard
# plugin = {name = "insisting"}
# provides = [
#   {interface = "logits_processor", version = 1, name = "seven", summary = "Nothing but 7"},
#   {interface = "logits_processor", version = 1, name = "nine", summary = "Nothing but 9"},
# ]
# ///
from pegboard import hookimpl
from pegboard.interfaces.logits_processor import LogitsProcessor


class Only(LogitsProcessor):
    def __init__(self, token_id):
        self.token_id = token_id

    def admit(self, row, params):
        pass

    def apply(self, logits, rows):
        logits.zero_()[:, self.token_id] = 1.0

    def release(self, row):
        pass


@hookimpl
def pegboard_logits_processors():
    return {"seven": lambda context: Only(7), "nine": lambda context: Only(9)}
"""

BOTH: dict[str, dict[str, Any]] = {"seven": {}, "nine": {}}


class Only(LogitsProcessor):
    """Nothing but one token."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def admit(self, row: int, params: Any) -> None:
        pass

    def apply(self, logits: torch.Tensor, rows: Any) -> None:
        logits.zero_()[:, self.token_id] = 1.0

    def release(self, row: int) -> None:
        pass


class Only11(Only):
    manifest: ClassVar = {"name": "eleven"}


class Only13(Only):
    manifest: ClassVar = {"name": "thirteen"}


@pytest.fixture
def config(tmp_path: Path, config_of: Configure) -> Callable[..., Config]:
    """(names) -> a config that lists these processors."""
    path = tmp_path / "insisting.py"
    path.write_text(TWO_PROCESSORS)

    def config(*names: str) -> Config:
        return config_of(
            plugins={"load": [str(path)]}, logits_processors=[{"name": name} for name in names]
        )

    return config


def sampled(engine: Engine, **params: Any) -> list[int]:
    engine.submit([1, 2, 3], SamplingParams(max_tokens=1, temperature=0, **params))
    return [token for delta in engine.step() for token in delta.token_ids]


@pytest.mark.parametrize(
    ("names", "last"),
    [
        (("seven", "nine"), 9),
        (("nine", "seven"), 7),
        (("nine", "seven", "penalties", "logit_bias"), 7),
    ],
)
def test_the_configs_run_in_the_configs_order_after_the_built_in_ones(
    config: Callable[..., Config], names: tuple[str, ...], last: int
) -> None:
    with Engine(config(*names)) as engine:
        processors = engine.prepared.composition.logits_processors
        own = [part.name for part in processors if part.origin.builtin]
        assert own == sorted(own)
        assert [part.name for part in processors] == [*own, *(n for n in names if n not in own)]
        for asked in (BOTH, dict(reversed(BOTH.items()))):
            assert sampled(engine, processors=asked, logit_bias={5: 50.0}) == [last]


def test_objects_run_last_in_their_own_order(config: Callable[..., Config]) -> None:
    objects = {"eleven": Only11(11), "thirteen": Only13(13)}
    asked: dict[str, dict[str, Any]] = {"eleven": {}, "thirteen": {}, **BOTH}
    for names in (list(objects), list(reversed(objects))):
        given = [objects[name] for name in names]
        with Engine(config("seven", "nine"), logits_processor=given) as engine:
            assert sampled(engine, processors=asked) == [given[-1].token_id]


def test_a_bias_is_penalized(config: Callable[..., Config]) -> None:
    """(logit + 100) / 2 of a token of the prompt is less than logit + 70 of another."""
    with Engine(config()) as engine:
        biased = {3: 100.0, 9: 70.0}
        assert sampled(engine, logit_bias=biased) == [3]
        assert sampled(engine, logit_bias=biased, repetition_penalty=2.0) == [9]
