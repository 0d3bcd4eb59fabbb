"""Drafters with a model of their own: what they guess is what their model says, and changes no token."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pegboard import Config, SamplingParams
from pegboard.builtin.torch_attention import TorchAttention
from pegboard.cli.check import report
from pegboard.compose import prepare
from pegboard.errors import EngineError
from pegboard.interfaces import drafter
from pegboard.interfaces.drafter import DrafterContext, Observation, UnitTokens
from pegboard.interfaces.kernel import LinearKernel, PackedWeight
from pegboard.interfaces.observer import ErrorHappened, Event, Observer, StepDone
from pegboard.interfaces.quantizer import LinearWeight
from pegboard.runner import guarded_drafter
from pegboard.testing.dense_decoder import DenseDecoder
from pegboard.testing.dict_cache import DictCache
from pegboard.testing.invariance import (
    Case,
    Traces,
    differences,
    run_case,
    various_params,
    various_prompts,
)
from pegboard.testing.model_drafters import Branching, OneLayer, Proposal, SecondModel
from pegboard.testing.tiny import write_tiny_model

PROMPTS = various_prompts((1, 5, 30, 33), range(4, 500))
PARAMS = various_params(len(PROMPTS))
NUM_NODES = 5
SHOWN = 8
"""Proposals of each case that are compared with the formulas."""

CASES = [
    Case(batch=4),
    Case(batch=2, chunk=7, budget=40),
    Case(batch=7, interruptions=3, arrivals=1),
    Case(batch=3, disorder=5, budget=24),
    Case(batch=3, chunk=7, budget=40, arrivals=1, settings={"executor": {"depth": 2}}),
    Case(batch=4, interruptions=2, settings={"executor": {"depth": 2}}),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target") / "m", dtype="float64")


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of other sizes, in whose heads the target's kernels do not fit by chance."""
    folder = tmp_path_factory.mktemp("second") / "m"
    sizes: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    return write_tiny_model(folder, dtype="float64", seed=3, num_hidden_layers=3, **sizes)


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """The target's first layer again, behind a product that mixes embedding and hidden state."""
    folder = tmp_path_factory.mktemp("layer") / "m"
    folder.mkdir()
    tensors = load_file(target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    size = config["hidden_size"]
    own = {name: one for name, one in tensors.items() if name.startswith("model.layers.0.")}
    noise = torch.randn(
        (size, 2 * size), generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    own["fc.weight"] = noise / (2 * size) ** 0.5
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"architectures": ["OneLayer"]}))
    return folder


@pytest.fixture(scope="module")
def config(target: Path) -> dict[str, Any]:
    return {
        "model": str(target),
        "dtype": "float64",
        "kernels": "torch",
        "attention": "torch",
        "max_model_len": 64,
        "prefix_cache": "none",
        "kv_cache": {"block_size": 4},
    }


@pytest.fixture(scope="module")
def expected(config: dict[str, Any]) -> Traces:
    return run_case(config, Case(batch=4), PROMPTS, PARAMS)


def dense(folder: Path) -> DenseDecoder:
    config = json.loads((folder / "config.json").read_text())
    return DenseDecoder(config, load_file(folder / "model.safetensors"))


def recorded(kind: type[Any], made: list[Any]) -> Callable[[DrafterContext], Any]:
    """The factory of a drafter that the test can look into."""

    def make(context: DrafterContext) -> Any:
        made.append(kind(context))
        return made[-1]

    make.manifest = kind.manifest  # type: ignore[attr-defined]
    return make


def proposals_of(
    config: dict[str, Any],
    kind: type[Any],
    model: Path,
    case: Case,
    expected: Traces,
    params: Sequence[SamplingParams] = PARAMS,
    **objects: Any,
) -> list[Proposal]:
    """Some of what a drafter proposes in a case, whose tokens are the ones expected."""
    made: list[Any] = []
    drafting = {"drafter": {"model": str(model), "num_speculative_tokens": NUM_NODES}}
    factory = recorded(kind, made)
    got = run_case(config | drafting, case, PROMPTS, params, drafter=factory, **objects)
    assert differences(expected, got, 1e-5) == []
    proposals = [one for one in made[0].proposals if one.token_ids]
    assert len(proposals) >= SHOWN
    return random.Random(1).sample(proposals, SHOWN)


def check_second(proposals: Sequence[Proposal], model: DenseDecoder) -> None:
    """Each node is the most likely token after those before it, by the second model alone."""
    for one in proposals:
        logits, _ = model.forward([*one.known, *one.token_ids])
        last = len(one.known) - 1
        assert one.token_ids == tuple(logits[last:-1].argmax(dim=1).tolist())
        assert one.parents == tuple(range(-1, len(one.token_ids) - 1))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_second_model_drafts_what_it_would_say_alone(
    config: dict[str, Any], second: Path, expected: Traces, case: Case
) -> None:
    proposals = proposals_of(config, SecondModel, second, case, expected)
    check_second(proposals, dense(second))


@pytest.mark.parametrize("depth", [1, 2])
def test_its_kv_is_served_by_a_prefix_cache_with_the_targets(
    config: dict[str, Any], second: Path, expected: Traces, depth: int
) -> None:
    """At each hit the bytes of blocks are compared with those that they had when they were published."""
    settings = {"executor": {"depth": depth}, "kv_cache": {"verify": True}}
    case, listener = Case(batch=2, arrivals=1, settings=settings), Listener()
    config = {key: value for key, value in config.items() if key != "prefix_cache"}
    objects: dict[str, Any] = {"prefix_cache": DictCache, "observer": [listener]}
    proposals = proposals_of(config, SecondModel, second, case, expected, **objects)
    check_second(proposals, dense(second))
    assert listener.errors == []


def test_a_pool_that_is_too_small_for_all_drafts_changes_no_token(
    config: dict[str, Any], second: Path, expected: Traces
) -> None:
    case = Case(batch=6, pool=230_000)
    proposals = proposals_of(config, SecondModel, second, case, expected)
    check_second(proposals, dense(second))


def test_the_target_as_its_own_drafter_is_always_right(
    config: dict[str, Any], target: Path, expected: Traces
) -> None:
    greedy = [SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)] * len(PROMPTS)
    alone = run_case(config, Case(batch=4), PROMPTS, greedy)
    proposals = proposals_of(config, SecondModel, target, Case(batch=4), alone, greedy)
    texts = [(*PROMPTS[number], *trace.tokens) for (number, _), trace in alone.items()]
    for one in proposals:
        come = next(text for text in texts if text[: len(one.known)] == one.known)
        following = come[len(one.known) : len(one.known) + len(one.token_ids)]
        assert one.token_ids[: len(following)] == following


@pytest.mark.parametrize("kind", [OneLayer, Branching])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_over_the_targets_states_drafts_what_its_formulas_say(
    config: dict[str, Any],
    target: Path,
    layer: Path,
    expected: Traces,
    kind: type[OneLayer],
    case: Case,
) -> None:
    proposals = proposals_of(config, kind, layer, case, expected)
    formulas = LayerFormulas(target, layer)
    for one in proposals:
        assert (one.token_ids, one.parents) == formulas.nodes(
            one.known, len(one.token_ids), kind.width
        )


Fault = Callable[[SecondModel, Observation], Any]


def _raise(error: BaseException) -> Any:
    raise error


def _past_its_slots(drafter: SecondModel, seen: Observation) -> Any:
    """Writes to blocks that are another row's."""
    row, length = seen.rows[:1], len(drafter.rows[int(seen.rows[0])])
    ids = torch.zeros(NUM_NODES + 2, dtype=torch.int64)
    tokens = UnitTokens(row, np.array([0, len(ids)], np.int32), np.array([length], np.int32), ids)
    return drafter.unit.forward(tokens)


def _in_a_row_of_no_step(drafter: SecondModel, seen: Observation, number: int) -> Any:
    row = np.array([number], np.int32)
    offsets, ids = np.array([0, 1], np.int32), torch.zeros(1, dtype=torch.int64)
    return drafter.unit.forward(UnitTokens(row, offsets, np.array([0], np.int32), ids))


def _parents_that_do_not_precede(drafter: SecondModel, seen: Observation) -> Any:
    offsets, ids = np.array([0, 1], np.int32), torch.zeros(1, dtype=torch.int64)
    start, parents = seen.positions[:1], np.array([0], np.int32)
    return drafter.unit.forward(UnitTokens(seen.rows[:1], offsets, start, ids, parents))


def _tokens_that_its_model_has_not(drafter: SecondModel, seen: Observation) -> Any:
    ids = torch.full((1,), 10**6, dtype=torch.int64)
    offsets = np.array([0, 1], np.int32)
    return drafter.unit.forward(UnitTokens(seen.rows[:1], offsets, seen.positions[:1], ids))


FAULTS: dict[str, Fault] = {
    "raises": lambda drafter, seen: _raise(ValueError("no")),
    "is out of memory": lambda drafter, seen: _raise(torch.OutOfMemoryError("no")),
    "answers something else": lambda drafter, seen: None,
    "writes past its slots": _past_its_slots,
    "writes to a row of no step": lambda drafter, seen: _in_a_row_of_no_step(drafter, seen, 99),
    "counts rows from the end": lambda drafter, seen: _in_a_row_of_no_step(drafter, seen, -1),
    "gives parents that do not precede": _parents_that_do_not_precede,
    "gives tokens that its model has not": _tokens_that_its_model_has_not,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_drafter_that_errs_is_cut_off_and_requests_go_on(
    config: dict[str, Any], second: Path, expected: Traces, fault: str
) -> None:
    class Erring(SecondModel):
        num_calls = 0

        def guess(self, seen: Observation) -> Any:
            self.num_calls += 1
            if self.num_calls == 3:
                return FAULTS[fault](self, seen)
            return super().guess(seen)

    made: list[Any] = []
    drafting = {"drafter": {"model": str(second), "num_speculative_tokens": NUM_NODES}}
    got = run_case(
        config | drafting,
        Case(batch=3, chunk=9),
        PROMPTS,
        PARAMS,
        may_be_cut_off=["drafter"],
        drafter=recorded(Erring, made),
    )
    assert made[0].num_calls == 3
    assert differences(expected, got, 1e-5) == []


def test_a_model_drafter_has_no_slots_once_it_has_proposed(
    config: dict[str, Any], second: Path, expected: Traces
) -> None:
    """By the time of `release` the blocks of a row may be another's."""
    refusals: list[str] = []

    class WritesLate(SecondModel):
        def release(self, row: int, num_tokens: int) -> None:
            offsets, ids = np.array([0, 1], np.int32), torch.zeros(1, dtype=torch.int64)
            late = UnitTokens(np.array([row], np.int32), offsets, np.array([0], np.int32), ids)
            with pytest.raises(EngineError) as refused:
                self.unit.forward(late)
            refusals.append(str(refused.value))
            super().release(row, num_tokens)

    proposals = proposals_of(config, WritesLate, second, Case(batch=3), expected)
    check_second(proposals, dense(second))
    assert refusals and all("slots 0 to 1; set aside: 0" in line for line in refusals)


def test_a_model_drafter_that_is_far_too_slow_is_cut_off(
    config: dict[str, Any], second: Path, expected: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_drafter, "MAX_CALL_S", 0.0)
    made: list[Any] = []
    drafting = {"drafter": {"model": str(second), "num_speculative_tokens": NUM_NODES}}
    got = run_case(
        config | drafting,
        Case(batch=3),
        PROMPTS,
        PARAMS,
        may_be_cut_off=["drafter"],
        drafter=recorded(SecondModel, made),
    )
    assert made[0].proposals == []
    assert differences(expected, got, 1e-5) == []


class NoMask(TorchAttention):
    """Does not say that it masks trees."""

    manifest: ClassVar[dict[str, Any]] = {
        "layout": "pegboard.builtin.torch_attention_layout:layout",
        "promises": ["window", "soft_cap"],
    }


@pytest.mark.parametrize(("kind", "drafts"), [(OneLayer, True), (Branching, False)])
def test_trees_need_attention_that_masks_them(
    config: dict[str, Any],
    layer: Path,
    expected: Traces,
    kind: type[OneLayer],
    drafts: bool,
) -> None:
    """Each model has a backend of its own, made by the class."""
    made: list[Any] = []
    config = {key: value for key, value in config.items() if key != "attention"}
    drafting = {"drafter": {"model": str(layer), "num_speculative_tokens": NUM_NODES}}
    got = run_case(
        config | drafting,
        Case(batch=3),
        PROMPTS,
        PARAMS,
        may_be_cut_off=[] if drafts else ["drafter"],
        drafter=recorded(kind, made),
        attention=NoMask,
    )
    assert any(one.token_ids for one in made[0].proposals) == drafts
    assert differences(expected, got, 1e-5) == []


PLUGIN = f"""# /// pegboard
# plugin = {{name = "second_model"}}
# [[provides]]
# interface = "drafter"
# version = {drafter.VERSION}
# name = "second_model"
# summary = "A second model of the registry"
# promises = ["draft_model"]
# describe = "pegboard.testing.model_drafters:describe_second_model"
# ///
from pegboard import hookimpl


@hookimpl
def pegboard_drafters():
    from pegboard.testing.model_drafters import SecondModel

    return {{"second_model": SecondModel}}
"""


@pytest.mark.parametrize("executor", ["local", "processes"])
def test_a_plugin_brings_its_model_to_whichever_worker(
    config: dict[str, Any], second: Path, expected: Traces, tmp_path: Path, executor: str
) -> None:
    file = tmp_path / "second_model.py"
    file.write_text(PLUGIN)
    config |= {
        "plugins": {"load": [str(file)]},
        "drafter": {
            "name": "second_model",
            "model": str(second),
            "num_speculative_tokens": NUM_NODES,
        },
        "executor": executor,
    }
    listener = Listener()
    got = run_case(config, Case(batch=4), PROMPTS, PARAMS, observer=[listener])
    assert differences(expected, got, 1e-5) == []
    assert listener.num_tried > 0
    wanted = Config.from_values(config)
    prepared = prepare(wanted)
    found = report(wanted, prepared.composition, prepared.ledger)
    assert any(note.startswith(f"drafter: its model is {second}") for note in found["notes"])


class Listener(Observer):
    """Counts drafts, and notes errors."""

    def __init__(self) -> None:
        self.num_tried = 0
        self.errors: list[ErrorHappened] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.num_tried += event.num_tried
        elif isinstance(event, ErrorHappened):
            self.errors.append(event)

    def close(self) -> None:
        pass


class LayerFormulas:
    """`OneLayer` over whole texts, in float64: each path of a tree by itself."""

    def __init__(self, target: Path, layer: Path) -> None:
        self.target = dense(target)
        self.tensors = load_file(target / "model.safetensors")
        self.config = json.loads((target / "config.json").read_text())
        own = load_file(layer / "model.safetensors")
        self.fc = own.pop("fc.weight")
        self.layer = DenseDecoder(self.config, own)

    def nodes(
        self, known: Sequence[int], num_nodes: int, width: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        features = self._features(known[:-1])
        inputs = self._inputs(known[1:], features)
        token_ids: list[int] = []
        parents: list[int] = []
        # Of each node whose children are wanted: the inputs up to it, and the state after it.
        open_nodes = [(-1, inputs, self.layer.layer(0, inputs)[-1])]
        while open_nodes:
            parent, before, state = open_nodes.pop(0)
            logits = state @ self.tensors["lm_head.weight"].T
            for token in logits.float().topk(width).indices.tolist():
                if len(token_ids) == num_nodes:
                    return tuple(token_ids), tuple(parents)
                token_ids.append(token)
                parents.append(parent)
                rows = torch.cat((before, self._inputs([token], state[None])))
                after = self.layer.layer(0, rows)[-1]
                open_nodes.append((len(token_ids) - 1, rows, after))
        raise AssertionError("a tree has no end of its own")

    def _features(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The target's states after the final norm."""
        _, taps = self.target.forward(token_ids)
        last = self.config["num_hidden_layers"] - 1
        hidden = self.target.layer(last, taps[last])
        root = (hidden.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        features: torch.Tensor = hidden / root * self.tensors["model.norm.weight"]
        return features

    def _inputs(self, token_ids: Sequence[int], features: torch.Tensor) -> torch.Tensor:
        embedded = self.tensors["model.embed_tokens.weight"][list(token_ids)]
        return torch.cat((embedded, features), dim=1) @ self.fc.T


class OnlyPacked(LinearKernel):
    """Runs what a quantized target has, and nothing of a float drafter."""

    manifest: ClassVar[dict[str, Any]] = {
        "operations": [{"operation": "linear", "formats": ["uint4"]}]
    }

    def self_test(self) -> None:
        raise AssertionError

    def prepare(self, weight: LinearWeight) -> PackedWeight:
        raise AssertionError

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        raise AssertionError

    def gather_rows(self, weight: PackedWeight, row_ids: torch.Tensor) -> torch.Tensor:
        raise AssertionError


def test_a_kernel_that_one_of_the_models_uses_is_used(tmp_path: Path) -> None:
    quantized = Path(__file__).parents[1] / "data" / "quant" / "gptq-4b-g32-sym"
    vocab_size = json.loads((quantized / "config.json").read_text())["vocab_size"]
    draft = write_tiny_model(tmp_path / "draft", vocab_size=vocab_size)
    config = Config.from_values(
        {"model": str(quantized), "max_model_len": 64, "drafter": {"model": str(draft)}}
    )
    found = prepare(config, drafter=SecondModel, kernel=OnlyPacked())
    target, second = (
        {kernel.part.name for kernel in plan.kernels} for plan in found.composition.models
    )
    assert "OnlyPacked" in target - second
