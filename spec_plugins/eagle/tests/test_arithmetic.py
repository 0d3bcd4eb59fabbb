"""The head's arithmetic, row by row, against a straight reading of the papers' formulas in float64.

EAGLE: arXiv 2401.15077; EAGLE-2: 2406.16858; EAGLE-3: 2503.01840. A floor of acceptance does not see
positions that stand still, a normed state that is fed back, or provisional rows that stay: rows do.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pegboard import Engine, SamplingParams
from pegboard.interfaces.drafter import DrafterContext, Observation, UnitTokens
from pegboard.interfaces.speculation_policy import Choice, DraftView, StepCosts
from pegboard.step import Drafts, Float32, Int32, RowAdmission
from pegboard.testing.dict_cache import DictCache
from pegboard.testing.invariance import Case, run_case, various_params, various_prompts
from pegboard.testing.model_drafter import OnAndOff
from pegboard.testing.sample import Draw, reference_token
from pegboard_eagle.drafter import EagleDrafter
from pegboard_eagle.options import EagleOptions

PROMPTS = various_prompts((1, 2, 18, 23), range(4, 500))
PARAMS = various_params(len(PROMPTS))

LAYOUTS = (
    "EAGLE-1",
    "EAGLE-1, all its own",
    "EAGLE-3",
    "EAGLE-3 of the whole vocabulary",
    "EAGLE-3 of speculators",
    "EAGLE-3.1",
    "EAGLE-3, taps normed together",
)

Row = tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]
"""Keys and values of each layer, and the state."""


class Reading:
    """A head, a row at a time. Row t pairs feature t with token t + 1 and stands at position t."""

    def __init__(self, folder: Path, head: Any, target: Path) -> None:
        self.head = head
        stored = {k: v for k, v in load_file(folder / "model.safetensors").items()}
        self.ids = None
        if head.draft_vocab is not None:
            self.ids = [i + int(d) for i, d in enumerate(stored["d2t"])]
        cut = len(head.prefix)
        self.w = {name[cut:]: w for name, w in stored.items() if name not in ("d2t", "t2d")}
        of_target = load_file(target / "model.safetensors")
        self.embedding = self.w.get("embed_tokens.weight", of_target["model.embed_tokens.weight"])
        self.lm_head = self.w.get("lm_head.weight", of_target["lm_head.weight"])

    def feature(self, taps: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The feature of a token's tapped states."""
        if not self.head.is_third:
            (state,) = taps.values()
            return state
        states = [taps[tap] for tap in self.head.taps]
        if "fc_norm" in self.head.has:
            states = [rms(x, self.w[f"fc_norm.{i}.weight"]) for i, x in enumerate(states)]
        joined = torch.cat(states)
        if "input_norm" in self.head.has:
            joined = rms(joined, self.w["input_norm.weight"])
        return self.w["fc.weight"] @ joined

    def row(self, feature: torch.Tensor, token: int, position: int, past: Sequence[Row]) -> Row:
        """A row behind those that it sees."""
        w, head = self.w, self.head
        embedded = self.embedding[token]
        first = head.layer
        if head.is_third:
            normed = rms(feature, w[f"{first}.hidden_norm.weight"])
            embedded = rms(embedded, w[f"{first}.input_layernorm.weight"])
            inputs = torch.cat((embedded, normed))
            x = normed if head.config.get("norm_before_residual") else feature
        else:
            x = inputs = w["fc.weight"] @ torch.cat((embedded, feature))
            if "fc.bias" in head.has:
                x = inputs = inputs + w["fc.bias"]
        keys, values = [], []
        for number in range(head.num_layers):
            name = first if not number else f"layers.{number}"
            if number:
                inputs = rms(x, w[f"{name}.input_layernorm.weight"])
            q, k, v = (
                (w[f"{name}.self_attn.{part}_proj.weight"] @ inputs).view(-1, head.head_dim)
                for part in "qkv"
            )
            if "qk_norm" in head.has:
                q = rms(q, w[f"{name}.self_attn.q_norm.weight"])
                k = rms(k, w[f"{name}.self_attn.k_norm.weight"])
            q, k = (rotated(part, position, head.theta) for part in (q, k))
            keys.append(k)
            values.append(v)
            seen_k = torch.stack([*(one[0][number] for one in past), k])
            seen_v = torch.stack([*(one[1][number] for one in past), v])
            share = head.heads // head.kv_heads
            outs = []
            for h in range(head.heads):
                scores = seen_k[:, h // share] @ q[h] / math.sqrt(head.head_dim)
                outs.append(scores.softmax(dim=0) @ seen_v[:, h // share])
            x = x + w[f"{name}.self_attn.o_proj.weight"] @ torch.cat(outs)
            inner = rms(x, w[f"{name}.post_attention_layernorm.weight"])
            gate = w[f"{name}.mlp.gate_proj.weight"] @ inner
            up = w[f"{name}.mlp.up_proj.weight"] @ inner
            x = x + w[f"{name}.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        return keys, values, x

    def log_probs(self, state: torch.Tensor) -> torch.Tensor:
        """Of the draft vocabulary."""
        if self.head.is_third:
            state = rms(state, self.w["norm.weight"])
        return (self.lm_head @ state).log_softmax(dim=0)

    def fed_back(self, state: torch.Tensor) -> torch.Tensor:
        """What stands for the next feature: the state as it is, but in EAGLE-3.1."""
        normed = self.head.config.get("norm_output") and self.head.is_speculators
        return rms(state, self.w["norm.weight"]) if normed else state

    def target_id(self, draft_id: int) -> int:
        return draft_id if self.ids is None else self.ids[draft_id]

    def rows(self, tokens: Sequence[int], features: Sequence[torch.Tensor]) -> list[Row]:
        """The rows of known tokens."""
        found: list[Row] = []
        for t, feature in enumerate(features):
            found.append(self.row(feature, tokens[t + 1], t, found))
        return found


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-5) * weight


def rotated(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Halves-first rotation of [heads, head_dim]; frequencies in float32, as in training."""
    half = x.shape[-1] // 2
    exponents = torch.arange(half, dtype=torch.float32) * 2 / x.shape[-1]
    angles = position * (1.0 / theta**exponents).double()
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@dataclass(frozen=True)
class Node:
    """A node of a tree that is read: `path` are its ancestors' numbers."""

    score: float
    log_prob: float
    draft_id: int
    parent: int
    depth: int


class Tree:
    """The tree over known rows, read a node at a time."""

    def __init__(self, reading: Reading, rows: Sequence[Row]) -> None:
        self.reading = reading
        self.known = list(rows)
        self.nodes: list[Node] = []
        self._rows: dict[int, Row] = {}

    def children(self, parent: int) -> torch.Tensor:
        """Log probabilities of what follows a node; -1: the last known token."""
        return self.reading.log_probs(self._row(parent)[2])

    def add(self, parent: int, draft_id: int, log_prob: float) -> int:
        above = self.nodes[parent] if parent >= 0 else None
        score = log_prob + (above.score if above else 0.0)
        depth = above.depth + 1 if above else 0
        self.nodes.append(Node(score, log_prob, draft_id, parent, depth))
        return len(self.nodes) - 1

    def _row(self, number: int) -> Row:
        if number < 0:
            return self.known[-1]
        if number not in self._rows:
            node = self.nodes[number]
            path, at = [], node.parent
            while at >= 0:
                path.append(self._row(at))
                at = self.nodes[at].parent
            feature = self.reading.fed_back(self._row(node.parent)[2])
            token = self.reading.target_id(node.draft_id)
            past = [*self.known, *reversed(path)]
            self._rows[number] = self.reading.row(
                feature, token, len(self.known) + node.depth, past
            )
        return self._rows[number]


def eagle2(
    reading: Reading, rows: Sequence[Row], num_nodes: int, depth: int, top_k: int
) -> tuple[Tree, list[int]]:
    """The algorithm of EAGLE-2; chains are trees of one child a node."""
    tree = Tree(reading, rows)
    frontier = [-1]
    for _ in range(depth):
        level = []
        for parent in frontier:
            best = tree.children(parent).topk(top_k)
            for log_prob, draft_id in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                level.append(tree.add(parent, draft_id, log_prob))
        frontier = sorted(level, key=lambda n: -tree.nodes[n].score)[:top_k]
    every = sorted(range(len(tree.nodes)), key=lambda n: -tree.nodes[n].score)
    return tree, every[:num_nodes]


def best_tree(
    reading: Reading, rows: Sequence[Row], num_nodes: int, depth: int
) -> tuple[Tree, list[int]]:
    """The nodes with the best scores of the whole tree, every token a child of every node: no node's
    score is over its parent's, so the best of all that are not taken yet is always at hand."""
    tree = Tree(reading, rows)
    open_nodes: list[tuple[float, int, int]] = []

    def offer(parent: int) -> None:
        score = tree.nodes[parent].score if parent >= 0 else 0.0
        for draft_id, log_prob in enumerate(tree.children(parent).tolist()):
            heapq.heappush(open_nodes, (-(score + log_prob), parent, draft_id))

    offer(-1)
    taken: list[int] = []
    while len(taken) < num_nodes:
        score, parent, draft_id = heapq.heappop(open_nodes)
        above = tree.nodes[parent].score if parent >= 0 else 0.0
        taken.append(tree.add(parent, draft_id, -score - above))
        if tree.nodes[taken[-1]].depth + 1 < depth:
            offer(taken[-1])
    return tree, taken


@dataclass
class Proposal:
    """Nodes, and what they follow: the row's tokens, and as what it was admitted."""

    row: RowAdmission
    tokens: list[int]
    taps: list[Mapping[int, torch.Tensor]]
    nodes: list[tuple[int, int, float]]
    asked: int


class Recorder(EagleDrafter):
    """Notes observed states and what is proposed."""

    def __init__(self, context: DrafterContext, options: EagleOptions, notes: Notes) -> None:
        super().__init__(context, options)
        self.notes = notes
        self.tokens: dict[int, list[int]] = {}
        self.rows: dict[int, RowAdmission] = {}
        self.has_extended = False

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        super().admit(admission, block_tables)
        self.notes.num_missing = self._features.num_missing
        self.tokens[admission.row] = admission.token_ids.tolist()
        self.rows[admission.row] = admission

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        try:
            return self._noted(seen)
        except Exception as error:
            self.notes.wrong.append(repr(error))
            raise

    def _noted(self, seen: Observation) -> tuple[Drafts, Float32]:
        for i, row in enumerate(seen.rows.tolist()):
            new = seen.next_token_ids[seen.next_offsets[i] : seen.next_offsets[i + 1]]
            self.tokens[row] += new.tolist()
            for at in range(seen.offsets[i], seen.offsets[i + 1]):
                known = tuple(self.tokens[row][: int(seen.positions[at]) + 1])
                self.notes.taps[known] = {tap: x[at].clone() for tap, x in seen.taps.items()}
        self.has_extended = False
        drafts, probabilities = super().propose(seen)
        asked = dict(zip(seen.rows.tolist(), seen.propose.tolist(), strict=True))
        for i, row in enumerate(drafts.rows.tolist()):
            part = slice(drafts.offsets[i], drafts.offsets[i + 1])
            nodes = zip(
                drafts.token_ids[part].tolist(),
                drafts.parents[part].tolist(),
                probabilities[part].tolist(),
                strict=True,
            )
            tokens = list(self.tokens[row])
            taps = [self.notes.taps[tuple(tokens[: t + 1])] for t in range(len(tokens) - 1)]
            self.notes.proposals.append(
                Proposal(self.rows[row], tokens, taps, list(nodes), asked[row])
            )
        return drafts, probabilities

    def _run(self, tokens: UnitTokens, hidden: torch.Tensor) -> torch.Tensor:
        out = super()._run(tokens, hidden)
        if not self.has_extended:  # the first run of a step is of known tokens
            self.has_extended = True
            for i, row in enumerate(tokens.rows.tolist()):
                for at in range(tokens.offsets[i], tokens.offsets[i + 1]):
                    slot = int(tokens.num_computed[i] + at - tokens.offsets[i])
                    known = tuple(self.tokens[row][: slot + 1])
                    self.notes.rows.append((known, out[at].clone()))
        return out


class Notes:
    """Of one run: proposals, the state of each row of a known token, and by known tokens the tapped
    states of the last; siblings that are forked compute them once."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.num_missing = 0
        self.taps: dict[tuple[int, ...], Mapping[int, torch.Tensor]] = {}
        self.proposals: list[Proposal] = []
        self.rows: list[tuple[tuple[int, ...], torch.Tensor]] = []


class Trees(EagleOptions):
    """An object's options are its defaults."""

    top_k: int = 3
    depth: int = 4


class LikelyTrees(Trees):
    min_confidence: float = 0.02


class LikelyChains(EagleOptions):
    min_confidence: float = 0.05


class Drawn(EagleOptions):
    sampled: bool = True


class WideTrees(EagleOptions):
    top_k: int = 5
    depth: int = 3


def recorder(options: type[EagleOptions], notes: Notes) -> Callable[..., Recorder]:
    """The factory of a recorder."""

    def make(context: DrafterContext, options: EagleOptions) -> Recorder:
        return Recorder(context, options, notes)

    make.manifest = {  # type: ignore[attr-defined]
        "describe": "pegboard_eagle.layout:describe",
        "options": f"{options.__module__}:{options.__name__}",
        "promises": ["draft_model"],
    }
    return make


class Seldom(OnAndOff):
    """Asks for nodes in one step of seven."""

    def choose(
        self, rows: Sequence[DraftView], tokens_left: int, costs: StepCosts
    ) -> Sequence[Choice]:
        self._num_steps += 1
        asked = 0 if self._num_steps % 7 else self._num_nodes
        return [Choice(row.num_drafts, asked) for row in rows]


def play(
    target: Path,
    draft: Path,
    num_nodes: int,
    options: type[EagleOptions],
    params: Sequence[SamplingParams] = PARAMS,
    **objects: Any,
) -> Notes:
    """Runs prompts of several lengths together, in chunks, preempted now and then."""
    notes = Notes()
    config = {
        "model": str(target),
        "dtype": "float64",
        "max_model_len": 64,
        "prefix_cache": "none",
        "kv_cache": {"block_size": 4},
        "drafter": {
            "model": str(draft),
            "num_speculative_tokens": num_nodes,
        },
    }
    case = Case(batch=3, chunk=7, interruptions=3)
    run_case(config, case, PROMPTS, params, drafter=recorder(options, notes), **objects)
    assert notes.wrong == [] and notes.proposals
    return notes


def readings(notes: Notes, reading: Reading) -> Iterator[tuple[Proposal, list[Row]]]:
    """Each proposal with the rows of its known tokens, read from scratch."""
    for proposal in notes.proposals:
        features = [reading.feature(taps) for taps in proposal.taps]
        yield proposal, reading.rows(proposal.tokens, features)


def check_nodes(proposal: Proposal, tree: Tree, chosen: Sequence[int]) -> None:
    number = {node: i for i, node in enumerate(chosen)}
    wanted = [tree.nodes[node] for node in chosen]
    tokens = [tree.reading.target_id(node.draft_id) for node in wanted]
    parents = [number.get(node.parent, -1) for node in wanted]
    assert [(token, parent) for token, parent, _ in proposal.nodes] == list(
        zip(tokens, parents, strict=True)
    )
    probabilities = [math.exp(node.log_prob) for node in wanted]
    np.testing.assert_allclose([p for _, _, p in proposal.nodes], probabilities, rtol=1e-4)


@pytest.fixture(scope="module")
def read(
    target_folder: Path,
    heads: Mapping[str, Any],
    write: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, Reading]]:
    """Writes and reads the head of a layout."""

    def read(layout: str) -> tuple[Path, Reading]:
        folder = write(tmp_path_factory.mktemp("head") / "h", heads[layout])
        return folder, Reading(folder, heads[layout], target_folder)

    return read


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chains_and_rows_are_those_of_the_formulas(
    target_folder: Path, read: Callable[[str], tuple[Path, Reading]], layout: str
) -> None:
    folder, reading = read(layout)
    notes = play(target_folder, folder, 4, EagleOptions)
    states = {}
    for proposal, rows in readings(notes, reading):
        check_nodes(proposal, *eagle2(reading, rows, proposal.asked, proposal.asked, 1))
        for t, row in enumerate(rows):
            states[tuple(proposal.tokens[: t + 2])] = row[2]
    compared = [(states[known], state) for known, state in notes.rows if known in states]
    assert len(compared) > 100
    for wanted, state in compared:
        torch.testing.assert_close(state, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layout", ["EAGLE-1", "EAGLE-3", "EAGLE-3.1"])
def test_trees_are_those_of_eagle_2(
    target_folder: Path, read: Callable[[str], tuple[Path, Reading]], layout: str
) -> None:
    folder, reading = read(layout)
    notes = play(target_folder, folder, 9, Trees)
    for proposal, rows in readings(notes, reading):
        depth = min(4, proposal.asked)
        check_nodes(proposal, *eagle2(reading, rows, proposal.asked, depth, 3))


def test_a_tree_of_no_more_nodes_than_children_is_the_best_of_all(
    target_folder: Path, read: Callable[[str], tuple[Path, Reading]]
) -> None:
    folder, reading = read("EAGLE-3")
    notes = play(target_folder, folder, 5, WideTrees)
    for proposal, rows in list(readings(notes, reading))[::3]:
        check_nodes(proposal, *best_tree(reading, rows, proposal.asked, 3))


def test_tokens_that_waited_are_computed_as_they_were(
    target_folder: Path, read: Callable[[str], tuple[Path, Reading]]
) -> None:
    """Rows for which nothing is asked wait within a block."""
    folder, reading = read("EAGLE-3")
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=heat, seed=3)
        for heat in (0.0, 1.0, 0.0, 0.8)
    ]
    notes = play(target_folder, folder, 3, EagleOptions, params, speculation_policy=Seldom(3))
    states = {}
    for proposal, rows in readings(notes, reading):
        check_nodes(proposal, *eagle2(reading, rows, proposal.asked, proposal.asked, 1))
        for t, row in enumerate(rows):
            states[tuple(proposal.tokens[: t + 2])] = row[2]
    compared = [(states[known], state) for known, state in notes.rows if known in states]
    assert len(compared) > 100
    for wanted, state in compared:
        torch.testing.assert_close(state, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [LikelyChains, LikelyTrees])
def test_nodes_are_proposed_as_long_as_their_path_is_likely(
    target_folder: Path,
    read: Callable[[str], tuple[Path, Reading]],
    options: type[EagleOptions],
) -> None:
    folder, reading = read("EAGLE-3")
    notes = play(target_folder, folder, 6, options)
    top_k, least = options().top_k, math.log(options().min_confidence)
    lengths = set()
    for proposal, rows in readings(notes, reading):
        depth = proposal.asked if top_k == 1 else min(4, proposal.asked)
        tree, every = eagle2(reading, rows, proposal.asked, depth, top_k)
        likely = [node for node in every if tree.nodes[node].score >= least]
        lengths.add(len(likely))
        check_nodes(proposal, tree, likely)
    assert len(lengths) > 2


def test_drawn_chains_have_the_noise_of_the_targets_tokens(
    target_folder: Path, read: Callable[[str], tuple[Path, Reading]]
) -> None:
    folder, reading = read("EAGLE-3")
    notes = play(target_folder, folder, 3, Drawn)
    num_sampled = 0
    for proposal, rows in readings(notes, reading):
        row, tree, parent = proposal.row, Tree(reading, rows), -1
        num_sampled += row.temperature > 0
        for depth, (token, _, probability) in enumerate(proposal.nodes):
            log_probs = tree.children(parent)
            logits = np.full(reading.embedding.shape[0], -np.inf, np.float32)
            logits[reading.ids] = log_probs.numpy()
            draw = Draw(
                row.temperature,
                row.top_k,
                row.top_p,
                row.min_p,
                row.seed,
                len(proposal.tokens) + depth,
                row.index,
            )
            wanted, nearness = reference_token(logits, draw)
            if nearness < 1e-4:
                break
            assert token == wanted
            assert reading.ids is not None
            draft_id = reading.ids.index(token)
            heat = row.temperature or 1.0
            likely = (log_probs / heat).softmax(dim=0)[draft_id].item()
            assert probability == pytest.approx(likely, rel=1e-4)
            parent = tree.add(parent, draft_id, log_probs[draft_id].item())
    assert num_sampled > 20


def test_a_warm_cache_has_every_feature_and_they_are_counted_with_the_blocks(
    target_folder: Path, read: Callable[[str], tuple[Path, Reading]]
) -> None:
    folder, reading = read("EAGLE-3")
    config = {
        "model": str(target_folder),
        "dtype": "float64",
        "prefix_cache": "auto",
        "kv_cache": {"block_size": 4, "memory": "8MiB"},
        "max_model_len": 64,
        "drafter": {"model": str(folder), "num_speculative_tokens": 3, "policy": "fixed"},
    }
    notes = Notes()
    with Engine(config, drafter=recorder(EagleOptions, notes), prefix_cache=DictCache) as engine:
        *_, size = engine.prepared.ledger.block_bytes
        head = reading.head
        feature = reading.embedding.shape[1]
        assert size == 8 * (4 * 2 * head.kv_heads * head.head_dim + feature)
        for length in (23, 23, 30):
            engine.submit([*PROMPTS[3][:20], *range(7, 7 + length - 20)], PARAMS[0])
            while engine.has_work():
                engine.step()
    hits = [proposal for proposal in notes.proposals if proposal.row.num_cached]
    assert hits and notes.wrong == [] and notes.num_missing == 0
    for proposal, rows in readings(notes, reading):
        check_nodes(proposal, *eagle2(reading, rows, proposal.asked, proposal.asked, 1))
