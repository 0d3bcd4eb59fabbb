"""Drafters with a model of their own propose what their model says, by independent formulas."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pegboard import SamplingParams
from pegboard.interfaces.observer import ErrorHappened, Event, Observer
from pegboard.testing.dense_decoder import DenseDecoder
from pegboard.testing.dict_cache import DictCache
from pegboard.testing.invariance import Case, Traces, differences, run_case
from pegboard.testing.model_drafter import PARAMS, PROMPTS
from pegboard.testing.model_drafters import Branching, OneLayer, Proposal, SecondModel

RunDrafter = Callable[..., tuple[Traces, Any]]
ProposalsOf = Callable[..., list[Proposal]]

SHOWN = 8
"""Proposals of each case that are compared with the formulas."""

CASES = [
    Case(batch=4),
    Case(batch=2, chunk=7, budget=40),
    Case(batch=3, chunk=7, budget=40, arrivals=1, settings={"executor": {"depth": 2}}),
]
"""The contract suite compares the other ways to run with the first."""


def dense(folder: Path) -> DenseDecoder:
    config = json.loads((folder / "config.json").read_text())
    return DenseDecoder(config, load_file(folder / "model.safetensors"))


@pytest.fixture(scope="module")
def proposals_of(run_drafter: RunDrafter, expected: Traces) -> ProposalsOf:
    """As `run_drafter`: some of what the drafter proposes, where the outcome is the one expected."""

    def proposals_of(
        kind: type[Any],
        model: Path,
        case: Case,
        params: Sequence[SamplingParams] = PARAMS,
        expected: Traces = expected,
        **objects: Any,
    ) -> list[Proposal]:
        got, drafter = run_drafter(kind, model, case, params, **objects)
        assert differences(expected, got, 1e-5) == []
        proposals = [one for one in drafter.proposals if one.token_ids]
        assert len(proposals) >= SHOWN
        return random.Random(1).sample(proposals, SHOWN)

    return proposals_of


def check_second(proposals: Sequence[Proposal], model: DenseDecoder) -> None:
    """Each node is the most likely token after those before it, by the second model alone."""
    for one in proposals:
        logits, _ = model.forward([*one.known, *one.token_ids])
        last = len(one.known) - 1
        assert one.token_ids == tuple(logits[last:-1].argmax(dim=1).tolist())
        assert one.parents == tuple(range(-1, len(one.token_ids) - 1))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_second_model_drafts_what_it_would_say_alone(
    proposals_of: ProposalsOf, second: Path, case: Case
) -> None:
    proposals = proposals_of(SecondModel, second, case)
    check_second(proposals, dense(second))


@pytest.mark.parametrize("depth", [1, 2])
def test_its_kv_is_served_by_a_prefix_cache_with_the_targets(
    proposals_of: ProposalsOf, second: Path, depth: int
) -> None:
    """At each hit the bytes of blocks are compared with those that they had when they were published."""
    settings = {"executor": {"depth": depth}, "kv_cache": {"verify": True}}
    case, listener = Case(batch=2, arrivals=1, settings=settings), Errors()
    objects: dict[str, Any] = {"prefix_cache": DictCache, "observer": [listener]}
    proposals = proposals_of(SecondModel, second, case, **objects)
    check_second(proposals, dense(second))
    assert listener.found == []


def test_a_pool_that_is_too_small_for_all_drafts_changes_no_token(
    proposals_of: ProposalsOf, second: Path
) -> None:
    case = Case(batch=6, pool=230_000)
    proposals = proposals_of(SecondModel, second, case)
    check_second(proposals, dense(second))


def test_the_target_as_its_own_drafter_is_always_right(
    config: dict[str, Any], proposals_of: ProposalsOf, target: Path
) -> None:
    greedy = [SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)] * len(PROMPTS)
    alone = run_case(config, Case(batch=4), PROMPTS, greedy)
    proposals = proposals_of(SecondModel, target, Case(batch=4), greedy, alone)
    texts = [(*PROMPTS[number], *trace.tokens) for (number, _), trace in alone.items()]
    for one in proposals:
        come = next(text for text in texts if text[: len(one.known)] == one.known)
        following = come[len(one.known) : len(one.known) + len(one.token_ids)]
        assert one.token_ids[: len(following)] == following


@pytest.mark.parametrize("kind", [OneLayer, Branching])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_over_the_targets_states_drafts_what_its_formulas_say(
    proposals_of: ProposalsOf,
    target: Path,
    layer: Path,
    kind: type[OneLayer],
    case: Case,
) -> None:
    proposals = proposals_of(kind, layer, case)
    formulas = LayerFormulas(target, layer)
    for one in proposals:
        assert (one.token_ids, one.parents) == formulas.nodes(
            one.known, len(one.token_ids), kind.width
        )


class Errors(Observer):
    """Notes errors."""

    def __init__(self) -> None:
        self.found: list[ErrorHappened] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, ErrorHappened):
            self.found.append(event)

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
