"""Drafters and speculation policies that err, and trees where nothing masks them: no token changes, and
no request ends."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from pegboard import Config, Engine, SamplingParams
from pegboard.cli.check import report
from pegboard.compose import prepare
from pegboard.engine import breaker
from pegboard.errors import InterfaceNotSatisfied
from pegboard.interfaces.drafter import Drafter
from pegboard.interfaces.speculation_policy import (
    Choice,
    DraftView,
    SpeculationPolicy,
    StepCosts,
)
from pegboard.testing.erring_drafter import ERRORS, ErringDrafter, Panic
from pegboard.testing.guessing_drafter import GuessingDrafter
from pegboard.testing.invariance import (
    Case,
    Traces,
    differences,
    run_case,
    various_params,
    various_prompts,
)

PROMPTS = various_prompts((1, 5, 3, 24, 17, 31, 8, 2, 9), range(2, 517))
PARAMS = various_params(len(PROMPTS))

MASKLESS = """# /// pegboard
# [plugin]
# name = "maskless"
# [[provides]]
# interface = "attention"
# version = {version}
# name = "maskless"
# summary = "The reference, which knows of no tree"
# layout = "pegboard.builtin.torch_attention_layout:layout"
# encodings = ["none"]
# promises = ["window", "soft_cap", "lse"]
# ///
from dataclasses import replace

from pegboard import hookimpl
from pegboard.builtin.torch_attention import TorchAttention


class Maskless(TorchAttention):
    def prepare(self, batch):
        super().prepare(replace(batch, ancestors=None))


@hookimpl
def pegboard_attention_backends():
    return {{"maskless": Maskless}}
"""


@pytest.fixture(scope="module")
def maskless(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings under which attention has no `query_mask`."""
    from pegboard.interfaces.attention import VERSION

    file = tmp_path_factory.mktemp("plugin") / "maskless.py"
    file.write_text(MASKLESS.format(version=VERSION))
    return {"plugins": {"load": [str(file)]}, "attention": "maskless"}


@pytest.fixture(scope="module")
def alone(small_config: dict[str, Any]) -> Traces:
    return run_case(small_config, Case(batch=1), PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def outputs(alone: Traces) -> dict[tuple[tuple[int, ...], int], tuple[int, ...]]:
    """Each sequence's output, for drafters."""
    return {(PROMPTS[number], index): trace.tokens for (number, index), trace in alone.items()}


class Moody(SpeculationPolicy):
    """Wants any drafts, and errs now and then.

    Attributes:
        num_trees: rows shown so far whose nodes are no chain.
    """

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self.num_trees = 0

    def choose(self, rows: Sequence[DraftView], tokens_left: int, costs: StepCosts) -> Any:
        dice = self._dice
        for row in rows:
            assert len(row.parents) == len(row.confidences) == row.num_drafts
            self.num_trees += list(row.parents) != list(range(-1, row.num_drafts - 1))
        mood = dice.random()
        if mood < 0.1:
            raise dice.choice(list(ERRORS.values()))()
        if mood < 0.2:
            return dice.choice([None, [], [(99, 0)] * len(rows), [(0, 0.5)] * len(rows)])
        return [Choice(dice.randint(0, row.num_drafts), dice.randint(0, 6)) for row in rows]


def drafting(name: str, policy: str = "fixed") -> dict[str, Any]:
    return {"drafter": {"name": name, "num_speculative_tokens": 6, "policy": policy}}


WAYS = list(itertools.product(range(3), (True, False), (1, 3), (0.0, 0.02)))
"""Seed, whether attention masks trees, guesses a depth, and seconds until the drafter is tried again."""
FEW = [(0, True, 1, 0.0), (1, True, 3, 0.02), (2, False, 3, 0.0), (0, False, 1, 0.02)]


@pytest.mark.parametrize(
    ("seed", "masks", "width", "pause"),
    [*FEW, *(pytest.param(*way, marks=pytest.mark.slow) for way in WAYS if way not in FEW)],
)
def test_a_drafter_that_errs_changes_no_token(
    small_config: dict[str, Any],
    maskless: dict[str, Any],
    alone: Traces,
    outputs: Any,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    masks: bool,
    width: int,
    pause: float,
) -> None:
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", pause)
    monkeypatch.setattr(breaker, "MAX_PAUSE_S", 2 * pause)
    drafter = ErringDrafter(outputs, 0.7, width, seed)
    settings = drafting("ErringDrafter") | ({} if masks else maskless)
    settings["executor"] = {"depth": 1 + seed % 2}
    case = Case(
        batch=(5, 2, 17)[seed],
        chunk=(None, 7, 3)[seed],
        interruptions=seed or None,
        arrivals=2,
        settings=settings,
    )
    got = run_case(
        small_config, case, PROMPTS, PARAMS, drafter=drafter, may_be_cut_off=("drafter",)
    )
    assert differences(alone, got, tolerance=1e-5) == []
    assert drafter.num_errors > (0 if pause else 3)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
@pytest.mark.parametrize("width", [1, 3])
def test_no_policy_changes_a_token(
    small_config: dict[str, Any],
    alone: Traces,
    outputs: Any,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    width: int,
) -> None:
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(breaker, "MAX_PAUSE_S", 0.0)
    policy = Moody(seed)
    case = Case(
        batch=(5, 2, 17)[seed],
        chunk=(None, 7, 3)[seed],
        budget=(20, 2048, 64)[seed],
        interruptions=seed or None,
        arrivals=2,
        settings=drafting("GuessingDrafter", "auto")
        | {"executor": {"depth": 2 if width > 1 else 1}},
    )
    got = run_case(
        small_config,
        case,
        PROMPTS,
        PARAMS,
        drafter=GuessingDrafter(outputs, 0.7, width),
        speculation_policy=policy,
        may_be_cut_off=("speculation_policy",),
    )
    assert differences(alone, got, tolerance=1e-5) == []
    assert (policy.num_trees > 0) == (width > 1)


@pytest.mark.parametrize("right", [1.0, 0.0, 0.5], ids=["right", "wrong", "partly right"])
def test_trees_without_a_mask_change_no_token(
    small_config: dict[str, Any],
    maskless: dict[str, Any],
    alone: Traces,
    outputs: Any,
    right: float,
) -> None:
    settings = drafting("GuessingDrafter") | maskless
    drafter = GuessingDrafter(outputs, right, width=3)
    got = run_case(small_config, Case(batch=5, settings=settings), PROMPTS, PARAMS, drafter=drafter)
    assert differences(alone, got, tolerance=1e-5) == []


def test_check_says_that_trees_are_cut(
    small_config: dict[str, Any], maskless: dict[str, Any]
) -> None:
    def notes(**settings: Any) -> list[str]:
        asked = Config.from_values(small_config | settings)
        objects: dict[str, Any] = (
            {"drafter": GuessingDrafter({}, 1.0)} if "drafter" in settings else {}
        )
        prepared = prepare(asked, **objects)
        found: list[str] = report(asked, prepared.composition, prepared.ledger)["notes"]
        return found

    line = "drafter: trees are cut to their first path: attention 'maskless' has no query_mask"
    assert line in notes(**maskless, **drafting("GuessingDrafter"))
    assert line not in notes(**maskless)
    assert not [note for note in notes(**drafting("GuessingDrafter")) if "trees" in note]


@pytest.mark.parametrize("taps", [(3,), (-2,), (0, 1, 40), ("last",), (0.5,), None, 3], ids=repr)
def test_taps_that_do_not_exist_are_refused_before_weights_load(
    small_config: dict[str, Any], taps: Any
) -> None:
    class Tapping(GuessingDrafter):
        pass

    Tapping.taps = taps
    with pytest.raises(InterfaceNotSatisfied) as caught:
        Engine(small_config | drafting("Tapping"), drafter=Tapping({}, 1.0))
    named = taps[-1] if isinstance(taps, tuple) and isinstance(taps[-1], int) else taps
    assert f"drafter 'Tapping' wants taps: {named!r}" in str(caught.value)
    assert "allowed: layers 0 to 1 of the model, -1" in str(caught.value)


def _raising(error: BaseException) -> property:
    def taps(_: Any) -> Any:
        raise error

    return property(taps)


@pytest.mark.parametrize(
    ("taps", "said"),
    [
        (_raising(ZeroDivisionError("no")), "reading its taps failed: ZeroDivisionError: no"),
        (_raising(Panic()), "reading its taps failed: Panic"),
        (property(lambda _: itertools.count()), "wants taps: 3; allowed"),
        (property(lambda _: itertools.repeat(0)), "wants more than 4 taps"),
    ],
    ids=["raises", "panics", "counts", "repeats"],
)
def test_taps_that_cannot_be_read_are_the_drafters_fault(
    small_config: dict[str, Any], taps: property, said: str
) -> None:
    class Tapping(GuessingDrafter):
        pass

    Tapping.taps = taps  # type: ignore[assignment]
    with pytest.raises(InterfaceNotSatisfied) as caught:
        Engine(small_config | drafting("Tapping"), drafter=Tapping({}, 1.0))
    assert said in str(caught.value) and "Tapping" in str(caught.value)


def test_an_engine_tells_what_its_drafter_did_and_brings_it_back(
    small_config: dict[str, Any], outputs: Any, alone: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Once(GuessingDrafter):
        def __init__(self) -> None:
            super().__init__(outputs, 1.0)
            self.num_asked = 0

        def propose(self, seen: Any) -> Any:
            self.num_asked += 1
            if self.num_asked == 2:
                raise ValueError("no guess")
            return super().propose(seen)

    drafter: Drafter = Once()
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with Engine(small_config | drafting("Once"), drafter=drafter) as engine:

        def run() -> tuple[tuple[int, ...], int]:
            engine.submit(PROMPTS[0], params)
            tokens: list[int] = []
            num_steps = 0
            while engine.has_work():
                tokens += (token for delta in engine.step() for token in delta.token_ids)
                num_steps += 1
            return tuple(tokens), num_steps

        assert engine.core.cut_off == ()
        assert run()[0] == alone[0, 0].tokens
        (cut_off,) = engine.core.cut_off
        assert (cut_off.part, cut_off.name) == ("drafter", "Once")
        assert cut_off.reason.startswith("ValueError: no guess (test_drafter_faults.py:")
        assert run() == (alone[0, 0].tokens, 6)
        drafting_breaker = engine.core._speculation.drafter
        later = drafting_breaker._clock() + breaker.FIRST_PAUSE_S
        monkeypatch.setattr(drafting_breaker, "_clock", lambda: later)
        tokens, num_steps = run()
        assert tokens == alone[0, 0].tokens and num_steps < 6
        assert engine.core.cut_off == () and not drafting_breaker.is_on_trial
