"""Objects given in Python stand for plugins, of every interface of which that makes sense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from pegboard import Engine, errors
from pegboard.builtin.fcfs import FCFS
from pegboard.compose import prepare
from pegboard.config import Config
from pegboard.interfaces.kernel import SiluMulKernel
from pegboard.interfaces.logits_processor import LogitsProcessor
from pegboard.interfaces.observer import Event, Observer
from pegboard.interfaces.scheduler import QueueView, Scheduler, SchedulerContext, StepBuilder
from pegboard.plugins.loader import load_plugins
from pegboard.request import SamplingParams
from pegboard.testing.guessing_drafter import GuessingDrafter

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


def run(engine: Engine) -> list[int]:
    with engine:
        engine.submit([1, 2, 3], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
        tokens: list[int] = []
        while engine.has_work():
            tokens += [token for delta in engine.step() for token in delta.token_ids]
    return tokens


def factory_of(config: Config, interface: str) -> tuple[Any, list[Any]]:
    """A function that makes what a config's engine has for an interface, and the contexts it got."""
    composition = prepare(config).composition
    part = {**composition.target.parts, **composition.parts}[interface]
    made: list[Any] = []
    factory = load_plugins(composition.manifests).factory(part)

    def make(context: Any, *options: Any) -> Any:
        made.append(context)
        return factory(context, *options)

    said = msgspec.to_builtins(part.entry)
    make.manifest = {key: value for key, value in said.items() if value}  # type: ignore[attr-defined]
    return make, made


@pytest.mark.parametrize(
    "interface",
    ["scheduler", "kv_allocator", "prefix_cache", "speculation_policy", "attention", "executor"],
)
def test_a_factory_instead_of_a_name_gets_the_context(config_of: Configure, interface: str) -> None:
    config = config_of()
    make, made = factory_of(config, interface)
    # A policy without a drafter would have nothing to decide on.
    given: dict[str, Any] = {interface: make}
    if interface == "speculation_policy":
        given["drafter"] = GuessingDrafter({}, 1.0)
    assert run(Engine(config, **given)) == run(Engine(config))
    assert [type(context).__module__ for context in made] == [f"pegboard.interfaces.{interface}"]


def test_a_class_instead_of_a_name_is_made_with_the_context(config_of: Configure) -> None:
    class Mine(FCFS):
        contexts: ClassVar[list[SchedulerContext]] = []

        def __init__(self, context: SchedulerContext) -> None:
            self.contexts.append(context)
            super().__init__(context)

    config = config_of()
    assert run(Engine(config, scheduler=Mine)) == run(Engine(config))
    assert [context.max_model_len for context in Mine.contexts] == [64]


class Unfinished(Scheduler):
    """Without plan."""


def raising(context: SchedulerContext) -> Scheduler:
    raise KeyError("max_wait")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            object(),
            r"an object of object without plan; allowed: an object of .*Scheduler, its class",
        ),
        (object, r"the class object without plan"),
        (Unfinished, r"the class Unfinished without plan"),
        (Observer, r"the class Observer without plan"),
        (5, r"an object of int without plan"),
        (lambda context: object(), r"'<lambda>' is an object of object without plan"),
        (raising, r"'raising' failed: KeyError: 'max_wait'"),
        (lambda: FCFS(SchedulerContext(1, 1, 1)), r"'<lambda>' failed: TypeError: .*argument"),
    ],
)
def test_what_is_no_part_and_makes_none_is_refused(
    config_of: Configure, given: Any, said: str
) -> None:
    with pytest.raises((errors.InterfaceNotSatisfied, errors.FactoryFailed), match=said) as caught:
        Engine(config_of(), scheduler=given)
    assert "; allowed: " in str(caught.value) or "; fix: mend " in str(caught.value)


def test_an_interface_that_no_object_can_stand_for(config_of: Configure) -> None:
    with pytest.raises(errors.ConfigError, match="cannot be an object"):
        Engine(config_of(), schedular=object())


def test_a_part_that_nothing_could_ask_needs_a_manifest(config_of: Configure) -> None:
    """Without operations no kernel is ever chosen: it would be left out without a word."""

    class Quiet(SiluMulKernel):
        def self_test(self) -> None:
            pass

        def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    with pytest.raises(errors.ManifestInvalid, match=r"lacks operations.*manifest of Quiet"):
        Engine(config_of(), kernel=Quiet())


@pytest.mark.parametrize(
    ("values", "interface"),
    [
        ({"scheduler": "fcfs"}, "scheduler"),
        ({"executor": {"name": "local"}}, "executor"),
        ({"kv_cache": {"allocator": "paged"}}, "kv_allocator"),
        ({"drafter": "none"}, "drafter"),
    ],
)
def test_a_name_in_the_config_beside_an_object_is_refused(
    config_of: Configure, values: dict[str, Any], interface: str
) -> None:
    key = {"kv_allocator": "kv_cache.allocator"}.get(interface, interface)
    given: dict[str, Any] = {interface: lambda context: None}
    with pytest.raises(errors.CompositionRefused, match=rf"^{key}: '.*was given for it; fix"):
        prepare(config_of(**values), **given)


def test_settings_of_an_object_stand_beside_it(config_of: Configure) -> None:
    drafter = GuessingDrafter({}, 1.0)
    open_name = config_of(drafter={"num_speculative_tokens": 3})
    own_name = config_of(drafter={"name": "GuessingDrafter", "num_speculative_tokens": 3})
    for config in (open_name, own_name):
        assert prepare(config, drafter=drafter).composition.num_speculative_tokens == 3


def test_a_drafter_states_how_many_tokens_are_drafted_where_the_config_does_not(
    config_of: Configure,
) -> None:
    class Eager(GuessingDrafter):
        manifest: ClassVar[dict[str, Any]] = {"speculative_tokens": 7}

    for drafter, number in ((GuessingDrafter({}, 1.0), 4), (Eager({}, 1.0), 7)):
        composition = prepare(config_of(), drafter=drafter).composition
        assert composition.num_speculative_tokens == number


class Silu(SiluMulKernel):
    manifest: ClassVar[dict[str, Any]] = {"operations": [{"operation": "silu_mul"}]}

    def self_test(self) -> None:
        pass

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate) * up


def test_kernels_that_would_run_nothing_are_refused(config_of: Configure) -> None:
    class Elsewhere(Silu):
        manifest: ClassVar[dict[str, Any]] = {
            "operations": [{"operation": "silu_mul", "devices": ["cuda"]}]
        }

    with pytest.raises(errors.CompositionRefused, match="kernel: Elsewhere has no kernel that"):
        prepare(config_of(), kernel=Elsewhere())
    both = config_of(kernels={"silu_mul": "torch"})
    with pytest.raises(errors.CompositionRefused, match=r"^kernels\.silu_mul: 'torch', but Silu"):
        prepare(both, kernel=Silu())
    assert prepare(config_of(kernels="torch"), kernel=Silu())


def test_a_name_that_stands_twice_is_refused(config_of: Configure) -> None:
    class Mine(LogitsProcessor):
        manifest: ClassVar = {"name": "penalties"}

        def admit(self, row: int, params: Any) -> None:
            pass

        def apply(self, logits: torch.Tensor, rows: Any) -> None:
            pass

        def release(self, row: int) -> None:
            pass

    with pytest.raises(
        errors.CompositionRefused, match=r"^observers\[1\]: 'log' stands in observers\[0\] too"
    ):
        prepare(config_of(observers=["log", {"name": "log"}]))
    with pytest.raises(errors.CompositionRefused, match=r"^logits_processor: 'penalties', but pen"):
        prepare(config_of(), logits_processor=Mine())


def test_options_in_the_config_beside_an_object_are_refused(config_of: Configure) -> None:
    config = config_of(scheduler={"options": {"max_wait": 1}})
    with pytest.raises(errors.OptionsInvalid, match=r"scheduler\.options: an object was given"):
        Engine(config, scheduler=FCFS(SchedulerContext(1, 8, 64)))
