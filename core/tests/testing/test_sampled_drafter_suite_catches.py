"""The contract suite of drafters that draw: it passes one that does, and catches those that lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegboard.interfaces.drafter import Observation
from pegboard.step import Drafts
from pegboard.testing.drafter import DrafterContract
from pegboard.testing.drawing_drafter import DrawingDrafter
from pegboard.testing.sampled_drafter import SampledDrafterContract
from pegboard.testing.tiny import write_tiny_model


class TestDrawing(SampledDrafterContract):
    @pytest.fixture(scope="class")
    def make(self) -> Callable[..., DrawingDrafter]:
        return lambda context: DrawingDrafter(context, spread=2.5)


class TestDrawingIsADrafter(DrafterContract):
    @pytest.fixture
    def make(self) -> type[DrawingDrafter]:
        return DrawingDrafter


class Sharper(DrawingDrafter):
    """Draws from something else than it says."""

    def propose_sampled(self, seen: Observation) -> Any:
        drafts, drawn_from = super().propose_sampled(seen)
        flatter = drawn_from.sqrt()
        return drafts, flatter / flatter.sum(dim=1, keepdim=True)


class Choosing(DrawingDrafter):
    """Takes the likeliest token from the second one on."""

    def propose_sampled(self, seen: Observation) -> Any:
        drafts, drawn_from = super().propose_sampled(seen)
        likeliest = drawn_from.argmax(dim=1).numpy().astype(np.int32)
        tokens = np.where(drafts.parents < 0, drafts.token_ids, likeliest)
        return changed(drafts, token_ids=tokens), drawn_from


class Doubting(DrawingDrafter):
    """Leaves out what is unlikely, and what follows."""

    def propose_sampled(self, seen: Observation) -> Any:
        drafts, drawn_from = super().propose_sampled(seen)
        likely = drawn_from.numpy()[np.arange(len(drawn_from)), drafts.token_ids] > 0.01
        kept = np.zeros(len(likely), np.bool_)
        for node, parent in enumerate(drafts.parents.tolist()):
            kept[node] = likely[node] and (parent < 0 or kept[node - 1])
        counts = np.diff(np.concatenate(([0], np.cumsum(kept)))[drafts.offsets])
        return changed(
            drafts,
            token_ids=drafts.token_ids[kept],
            parents=drafts.parents[kept],
            offsets=np.array([0, *np.cumsum(counts)], np.int32),
        ), drawn_from[kept]


def changed(drafts: Drafts, **fields: Any) -> Drafts:
    names = ("rows", "offsets", "token_ids", "parents")
    return Drafts(**{name: fields.get(name, getattr(drafts, name)) for name in names})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target") / "m", dtype="float64")


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (Sharper, "test_tokens_are_drawn_from_what_it_says"),
        (Choosing, "test_tokens_are_drawn_from_what_it_says"),
        (Doubting, "test_how_many_nodes_there_are_does_not_depend_on_the_draws"),
    ],
)
def test_a_lie_is_caught(target: Path, kind: type[DrawingDrafter], test: str) -> None:
    suite = SampledDrafterContract()
    with pytest.raises(AssertionError):
        getattr(suite, test)(
            suite.config_of(target, None), lambda context: kind(context, spread=2.5)
        )
