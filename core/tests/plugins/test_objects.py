"""Objects given in Python stand for plugins, of every interface of which that makes sense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from pegboard import Engine, errors
from pegboard.config import Config
from pegboard.interfaces.kernel import SiluMulKernel
from pegboard.interfaces.logits_processor import LogitsProcessor
from pegboard.interfaces.observer import Event, Observer
from pegboard.interfaces.scheduler import QueueView, Scheduler, StepBuilder
from pegboard.request import SamplingParams

Configure = Callable[..., Config]


def test_an_object_instead_of_a_name(config_of: Configure) -> None:

    class Counting(Scheduler):
        plans = 0

        def plan(self, queue: QueueView, step: StepBuilder) -> None:
            self.plans += 1
            for seq in [*queue.running, *queue.waiting]:
                step.add(seq, seq.num_pending)

    scheduler = Counting()
    with Engine(config_of(), scheduler=scheduler) as engine:
        engine.submit([1, 2, 3])
        while engine.has_work():
            engine.step()
    assert scheduler.plans > 0


def test_objects_for_interfaces_of_which_there_are_several(config_of: Configure) -> None:
    import torch

    class Listening(Observer):
        def __init__(self) -> None:
            self.events: list[Event] = []

        def observe(self, event: Event) -> None:
            self.events.append(event)

        def close(self) -> None:
            pass

    class Only7(LogitsProcessor):
        manifest: ClassVar = {"name": "only_7"}

        def admit(self, row: int, params: Any) -> None:
            pass

        def apply(self, logits: torch.Tensor, rows: Any) -> None:
            logits[:, 7] = 1e9

        def release(self, row: int) -> None:
            pass

    class Counting(SiluMulKernel):
        manifest: ClassVar = {"operations": [{"operation": "silu_mul"}]}
        calls = 0

        def self_test(self) -> None:
            pass

        def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return torch.nn.functional.silu(gate) * up

    listening, kernel = [Listening(), Listening()], Counting()
    config = config_of()
    with Engine(config, observer=listening, logits_processor=Only7(), kernel=kernel) as engine:
        params = SamplingParams(max_tokens=3, processors={"only_7": {}})
        engine.submit([1, 2, 3], params)
        tokens: list[int] = []
        while engine.has_work():
            tokens += [token for delta in engine.step() for token in delta.token_ids]
    assert tokens == [7, 7, 7]
    assert kernel.calls > 0
    assert listening[0].events and len(listening[0].events) == len(listening[1].events)


def test_an_object_of_the_wrong_kind_is_refused(config_of: Configure) -> None:
    with pytest.raises(errors.InterfaceNotSatisfied, match="without plan"):
        Engine(config_of(), scheduler=object())
    with pytest.raises(errors.ConfigError, match="cannot be an object"):
        Engine(config_of(), schedular=object())
