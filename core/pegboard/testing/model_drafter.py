"""Contract suite of a `Drafter` that has a model of its own, or reads the target's hidden states.

    class TestMyDrafter(ModelDrafterContract):
        manifest = {"describe": "my_drafter.plan:describe", "promises": ["draft_model"]}

        @pytest.fixture(scope="class")
        def make(self):
            return MyDrafter                 # called with a DrafterContext, as the plugin's factory

        @pytest.fixture(scope="class")
        def draft(self, tmp_path_factory, target):
            return write_my_model(...)       # a folder: the drafter's model for that target

The suite runs the drafter in an engine, watches the context that it is given, and compares with runs
without it. `testing.model_drafters` has two drafters to begin with. `DrafterContract`, which has no
worker, is for the others.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar

import pytest

from pegboard import Engine, SamplingParams
from pegboard.interfaces.drafter import DrafterFacts
from pegboard.interfaces.model import ModelShape
from pegboard.interfaces.speculation_policy import Choice, DraftView, SpeculationPolicy, StepCosts
from pegboard.testing.dict_cache import DictCache
from pegboard.testing.invariance import (
    Case,
    Traces,
    differences,
    run_case,
    various_params,
    various_prompts,
)
from pegboard.testing.tiny import write_tiny_model
from pegboard.testing.watched_drafter import MakeModelDrafter, Notes, watched

PROMPTS = various_prompts((1, 5, 30, 33), range(4, 500))
PARAMS = various_params(len(PROMPTS))

CASES = {
    "together": Case(batch=4),
    "preempted": Case(batch=3, interruptions=3, arrivals=1),
    "in chunks": Case(batch=2, chunk=7, budget=40),
    "in any order": Case(batch=3, disorder=5, budget=24),
    "behind known prefixes": Case(batch=2, arrivals=1, interruptions=2),
}
CACHED = "behind known prefixes"
LEAST_COMPARED = 8
"""Texts that a run and the reference have to have guessed after alike."""

_TORCH_FREE = """
import importlib, sys
importlib.import_module(sys.argv[1])
sys.exit("torch" in sys.modules)
"""


class OnAndOff(SpeculationPolicy):
    """Asks for nodes, and verifies what there is, in every other step."""

    manifest: ClassVar = {"name": "on_and_off"}

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._num_steps = 0

    def choose(
        self, rows: Sequence[DraftView], tokens_left: int, costs: StepCosts
    ) -> Sequence[Choice]:
        self._num_steps += 1
        if self._num_steps % 2:
            return [Choice(0, 0) for _ in rows]
        return [Choice(row.num_drafts, self._num_nodes) for row in rows]


class ModelDrafterContract:
    """The contract of every drafter that names `describe`.

    Attributes:
        manifest: `describe`, `promises` and, where it takes options, `options`, as its manifest has them.
        num_nodes: most nodes a row.
        remembers: whether its nodes depend on more than the known tokens of their row and how many are
            asked for; then they are not compared between runs.
        reads_next_token: whether a slot of its KV depends on the token after its own. The last slot that
            a cache served may then have been written before another token, and nodes of such rows are
            not compared.
        settings: of the config, over those of the suite.
    """

    manifest: ClassVar[Mapping[str, Any]]
    num_nodes: ClassVar[int] = 5
    remembers: ClassVar[bool] = False
    reads_next_token: ClassVar[bool] = False
    settings: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture(scope="class")
    def make(self) -> MakeModelDrafter:
        """The factory under test."""
        raise NotImplementedError("override the fixture `make`")

    @pytest.fixture(scope="class")
    def target(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The folder of the target: a tiny model in float64."""
        return write_tiny_model(tmp_path_factory.mktemp("target") / "m", dtype="float64")

    @pytest.fixture(scope="class")
    def draft(self) -> Path:
        """The folder of the drafter's model."""
        raise NotImplementedError("override the fixture `draft`")

    @pytest.fixture(scope="class")
    def config(self, target: Path, draft: Path) -> dict[str, Any]:
        """The config of an engine with the drafter."""
        return {
            "model": str(target),
            "dtype": "float64",
            "max_model_len": 64,
            "prefix_cache": "none",
            "kv_cache": {"block_size": 4},
            "drafter": {"model": str(draft), "num_speculative_tokens": self.num_nodes},
            **self.settings,
        }

    @pytest.fixture(scope="class")
    def alone(self, config: dict[str, Any]) -> Traces:
        """The outcome of each sequence without the drafter."""
        plain = {key: value for key, value in config.items() if key != "drafter"}
        return run_case(plain, Case(batch=4), PROMPTS, PARAMS)

    @pytest.fixture(scope="class")
    def reference(self, config: dict[str, Any], make: MakeModelDrafter, alone: Traces) -> Notes:
        """The nodes that the drafter proposes for one sequence after the other."""
        return self.play(config, make, Case(batch=1), alone)

    def play(
        self,
        config: Mapping[str, Any],
        make: MakeModelDrafter,
        case: Case,
        alone: Traces,
        **objects: Any,
    ) -> Notes:
        """Runs a case with the drafter, and checks tokens, slots and nodes."""
        notes = Notes()
        objects["drafter"] = watched(make, self.manifest, notes)
        got = run_case(config, case, PROMPTS, PARAMS, **objects)
        assert differences(alone, got, 1e-5) == []
        assert notes.wrong == []
        assert notes.nodes, "nothing was proposed"
        return notes

    def compare(self, reference: Notes, notes: Notes) -> None:
        """After the same known tokens, as many nodes are the same nodes."""
        if self.remembers:
            return
        common = reference.nodes.keys() & notes.nodes.keys()
        if self.reads_next_token:
            common -= notes.behind_hits
        assert len(common) >= LEAST_COMPARED
        for text in common:
            assert notes.nodes[text] == reference.nodes[text], f"nodes after {text}"

    def test_describe_imports_no_torch(self) -> None:
        module = self.manifest["describe"].partition(":")[0]
        argv = [sys.executable, "-c", _TORCH_FREE, module]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr or "torch was imported"

    def test_what_it_describes_is_what_it_builds(
        self, config: dict[str, Any], make: MakeModelDrafter
    ) -> None:
        notes = Notes()
        with Engine(config, drafter=watched(make, self.manifest, notes)) as engine:
            composition = engine.prepared.composition
            engine.submit(PROMPTS[1], SamplingParams(max_tokens=4, ignore_eos=True))
            while engine.has_work():
                engine.step()
            assert not engine.core.cut_off, engine.core.cut_off
        said, target = notes.facts, composition.target.shape
        assert said is not None
        own = composition.models[1:]
        assert len(own) == len(notes.built) == (said.shape is not None), "a model described is made"
        assert notes.taps == {tuple(sorted(said.taps))}
        assert all(tap in target.taps for tap in said.taps)
        assert notes.num_tables == {sum(len(plan.groups) for plan in own)}
        for plan in own:
            wanted = said.shape if isinstance(said.shape, ModelShape) else "registry"
            assert notes.built == [wanted]
            assert plan.shape.vocab_size == target.vocab_size or said.maps_vocabulary
            layers = sorted(layer for group in plan.groups for layer in group.layers)
            assert layers == list(range(plan.shape.num_layers))

    def test_describe_answers_without_a_model(
        self, config: dict[str, Any], make: MakeModelDrafter
    ) -> None:
        """The config may name none; then it is refused for that, or drafts without."""
        notes = Notes()
        with Engine(config, drafter=watched(make, self.manifest, notes)) as engine:
            target = engine.prepared.composition.target.shape
        describe: Callable[..., Any] = resolve_name(self.manifest["describe"])
        assert isinstance(describe(None, target, notes.options), DrafterFacts)

    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("way", CASES)
    def test_no_token_and_no_node_depends_on_how_a_row_came_to_be(
        self,
        config: dict[str, Any],
        make: MakeModelDrafter,
        alone: Traces,
        reference: Notes,
        way: str,
        depth: int,
    ) -> None:
        """Preempted, cut into chunks, served by a cache or a fork."""
        case = CASES[way]
        objects: dict[str, Any] = {}
        config = {**config, "executor": {"depth": depth}}
        if way == CACHED:
            objects["prefix_cache"] = DictCache
            config["prefix_cache"] = "auto"
        notes = self.play(config, make, case, alone, **objects)
        assert way != CACHED or notes.behind_hits, "no cache served a token"
        self.compare(reference, notes)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_drafts_may_stop_and_begin_again(
        self,
        config: dict[str, Any],
        make: MakeModelDrafter,
        alone: Traces,
        reference: Notes,
        depth: int,
    ) -> None:
        """Rows for which no node is asked for are observed all the same."""
        notes = self.play(
            {**config, "executor": {"depth": depth}},
            make,
            Case(batch=3),
            alone,
            speculation_policy=OnAndOff(self.num_nodes),
        )
        assert 0 in notes.asked and max(notes.asked) > 1
        self.compare(reference, notes)
