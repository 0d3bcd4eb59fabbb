"""Contract suite of `SampledDrafter`, beside that of `Drafter` which it has to keep too.

    class TestMyDraws(SampledDrafterContract):
        manifest = {"promises": ["probabilities"]}

        @pytest.fixture(scope="class")
        def make(self):
            return MyDrafter                 # called with a DrafterContext, as the plugin's factory

The suite runs the drafter in an engine that verifies by rejection. No check of an engine can tell
whether a token was really drawn from what a drafter says; many of them together can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from pegboard.interfaces.drafter import Drafter, DrafterContext, Observation, SampledDrafter
from pegboard.request import SamplingParams
from pegboard.step import Drafts, Float32, Int32, RowAdmission
from pegboard.testing.drafter import usable_nodes
from pegboard.testing.invariance import Case, run_case
from pegboard.testing.tiny import write_tiny_model

if TYPE_CHECKING:
    import torch

PROMPTS = ((5, 300, 5, 300, 5), (17,), tuple(range(40, 63)))
NUM_BINS = 10
MAX_CHI_SQUARED = 37.3
"""With nine degrees of freedom it is more once in 40,000 runs; and seeds are fixed."""


@dataclass(slots=True)
class Draws:
    """The notes on one run.

    Attributes:
        nodes: of each proposal, the known text, the nodes asked for and the number of nodes.
        places: by depth, where in its distribution each token lies: from 0 for the likeliest to 1.
        wrong: a line for each breach of the contract.
    """

    nodes: list[tuple[tuple[int, ...], int, int]] = field(default_factory=list)
    places: dict[int, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Noting(SampledDrafter):
    """A drafter whose draws are noted."""

    def __init__(self, drafter: Drafter, vocab_size: int, draws: Draws) -> None:
        assert isinstance(drafter, SampledDrafter), "it is no SampledDrafter"
        self.taps = drafter.taps
        self._drafter: SampledDrafter = drafter
        self._vocab_size = vocab_size
        self._draws = draws
        self._dice = np.random.default_rng(7)
        self._rows: dict[int, RowAdmission] = {}
        self._texts: dict[int, list[int]] = {}

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        self._rows[admission.row] = admission
        self._texts[admission.row] = admission.token_ids.tolist()
        self._drafter.admit(admission, block_tables)

    def release(self, row: int, num_tokens: int) -> None:
        self._drafter.release(row, num_tokens)

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        raise AssertionError("drafts are verified by rejection")

    def propose_sampled(self, seen: Observation) -> tuple[Drafts, torch.Tensor]:
        for i, row in enumerate(seen.rows.tolist()):
            new = seen.next_token_ids[seen.next_offsets[i] : seen.next_offsets[i + 1]]
            self._texts[row] += new.tolist()
        try:
            drafts, drawn_from = self._drafter.propose_sampled(seen)
            self._check(seen, drafts, drawn_from)
        except Exception as error:
            self._draws.wrong.append(f"{type(error).__name__}: {error}")
            raise
        self._note(seen, drafts, drawn_from.double().cpu().numpy())
        return drafts, drawn_from

    def _check(self, seen: Observation, drafts: Drafts, drawn_from: torch.Tensor) -> None:
        import torch

        probabilities = np.ones(len(drafts.token_ids), np.float32)
        for row, nodes in usable_nodes(seen, drafts, probabilities, self._vocab_size).items():
            chain = list(range(-1, len(nodes) - 1))
            assert [parent for _, parent in nodes] == chain, f"row {row} got a tree"
        assert drawn_from.dtype == torch.float32
        assert drawn_from.shape == (len(drafts.token_ids), self._vocab_size)
        assert bool((drawn_from >= 0).all())
        assert bool(((drawn_from.sum(dim=1) - 1).abs() < 1e-3).all())

    def _note(self, seen: Observation, drafts: Drafts, drawn_from: NDArray[np.float64]) -> None:
        asked = dict(zip(seen.rows.tolist(), seen.propose.tolist(), strict=True))
        offsets = drafts.offsets.tolist()
        for i, row in enumerate(drafts.rows.tolist()):
            text, count = tuple(self._texts[row]), offsets[i + 1] - offsets[i]
            self._draws.nodes.append((text, asked[row], count))
            if not self._rows[row].temperature:
                continue
            for depth, node in enumerate(range(offsets[i], offsets[i + 1])):
                token, mass = int(drafts.token_ids[node]), drawn_from[node]
                assert mass[token] > 0, "a token was drawn that has no probability"
                likelier = (
                    mass[mass > mass[token]].sum() + mass[:token][mass[:token] == mass[token]].sum()
                )
                share = (likelier + self._dice.random() * mass[token]) / mass.sum()
                self._draws.places.setdefault(depth, []).append(float(share))


class SampledDrafterContract:
    """The contract of every drafter that promises `probabilities`.

    Attributes:
        manifest: as its manifest has it: `promises`, and `describe` and `options` where there are.
        num_nodes: most nodes a row.
        settings: of the config, over those of the suite.
    """

    manifest: ClassVar[Mapping[str, Any]] = {"promises": ["probabilities"]}
    num_nodes: ClassVar[int] = 3
    settings: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture(scope="class")
    def make(self) -> Callable[..., Drafter]:
        """The factory under test."""
        raise NotImplementedError("override the fixture `make`")

    @pytest.fixture(scope="class")
    def draft(self) -> Path | None:
        """The folder of the drafter's model; None: it has none."""
        return None

    @pytest.fixture(scope="class")
    def target(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The folder of the target: a tiny model in float64."""
        return write_tiny_model(tmp_path_factory.mktemp("target") / "m", dtype="float64")

    @pytest.fixture(scope="class")
    def config(self, target: Path, draft: Path | None) -> dict[str, Any]:
        """The config of an engine with the drafter."""
        return self.config_of(target, draft)

    def config_of(self, target: Path, draft: Path | None) -> dict[str, Any]:
        """The same, for a target and the drafter's model."""
        drafter = {"verification": "rejection", "num_speculative_tokens": self.num_nodes}
        return {
            "model": str(target),
            "dtype": "float64",
            "max_model_len": 64,
            "drafter": {"model": None if draft is None else str(draft), **drafter},
            **self.settings,
        }

    def play(
        self,
        config: Mapping[str, Any],
        make: Callable[..., Drafter],
        params: Sequence[SamplingParams],
    ) -> Draws:
        """Runs each prompt with each of the parameters."""
        draws = Draws()

        def noting(context: DrafterContext, *options: Any) -> Drafter:
            return Noting(make(context, *options), context.vocab_size, draws)

        noting.manifest = dict(self.manifest)  # type: ignore[attr-defined]
        prompts = [prompt for prompt in PROMPTS for _ in params]
        run_case(config, Case(batch=16), prompts, [*params] * len(PROMPTS), drafter=noting)
        assert draws.wrong == []
        assert draws.nodes, "nothing was proposed"
        return draws

    def test_tokens_are_drawn_from_what_it_says(
        self, config: dict[str, Any], make: Callable[..., Drafter]
    ) -> None:
        """At each depth they lie anywhere in their distributions, one place as likely as another. (Of one
        position in one sequence there is one draw a depth, so that they have nothing in common.)"""
        params = [
            SamplingParams(temperature=0.8, seed=seed, n=8, max_tokens=10, ignore_eos=True)
            for seed in range(4)
        ]
        draws = self.play(config, make, params)
        for depth, places in draws.places.items():
            counts = np.bincount((np.array(places) * NUM_BINS).astype(int), minlength=NUM_BINS)
            expected = len(places) / NUM_BINS
            assert expected >= 5 or depth, f"{len(places)} draws say little"
            if expected >= 5:
                chi_squared = float(((counts - expected) ** 2 / expected).sum())
                assert chi_squared < MAX_CHI_SQUARED, f"depth {depth}: {counts.tolist()}"

    def test_how_many_nodes_there_are_does_not_depend_on_the_draws(
        self, config: dict[str, Any], make: Callable[..., Drafter]
    ) -> None:
        """A bias makes the target say one thing whatever the seed, and the draws are others."""
        params = [
            SamplingParams(
                temperature=1.0, seed=seed, max_tokens=8, ignore_eos=True, logit_bias={7: 100.0}
            )
            for seed in range(12)
        ]
        draws = self.play(config, make, params)
        counts: dict[tuple[tuple[int, ...], int], set[int]] = {}
        for text, asked, count in draws.nodes:
            counts.setdefault((text, asked), set()).add(count)
        differing = {key: found for key, found in counts.items() if len(found) > 1}
        assert not differing

    def test_greedy_rows_may_be_beside_drawn_ones(
        self, config: dict[str, Any], make: Callable[..., Drafter]
    ) -> None:
        params = [
            SamplingParams(temperature=t, seed=3, max_tokens=8, top_k=5, ignore_eos=True)
            for t in (0.0, 1.0, 0.0, 0.7)
        ]
        self.play(config, make, params)
