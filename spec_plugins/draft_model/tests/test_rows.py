"""The drafter over rows that come and go, on a model whose KV is watched slot by slot."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields

import pytest
import torch

from pegboard.interfaces.drafter import DrafterContext, DraftUnit, UnitTokens
from pegboard.interfaces.kernel import Kernel, SampleKernel, SampleRows
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.model import ModelShape, RopeShape
from pegboard.step import Int32, RowAdmission
from pegboard.testing.drafter import DrafterContract, MakeDrafter, Nodes, Rows
from pegboard_draft_model.drafter import DraftModel
from pegboard_draft_model.options import DraftModelOptions

VOCAB = 517
BLOCK_SIZE = 8
MAX_LEN = 128


def likeliest(text: list[int]) -> int:
    """What the watched model says after a text."""
    return random.Random(hash(tuple(text))).randrange(VOCAB)


@dataclass
class WatchedModel(DraftUnit):
    """Keeps the tokens in each row's slots. A token may be computed only behind slots that hold its text.

    Attributes:
        slots: by row, the tokens in its slots.
        num_passes: forwards so far.
    """

    slots: dict[int, list[int]] = field(default_factory=dict)
    num_passes: int = 0

    def forward(self, tokens: UnitTokens, hidden: torch.Tensor | None = None) -> torch.Tensor:
        self.num_passes += 1
        said: list[int] = []
        assert len(set(tokens.rows.tolist())) == len(tokens.rows)
        for i, row in enumerate(tokens.rows.tolist()):
            new = tokens.token_ids[int(tokens.offsets[i]) : int(tokens.offsets[i + 1])].tolist()
            before = self.slots.get(row, [])[: int(tokens.num_computed[i])]
            assert len(before) == tokens.num_computed[i], (
                f"row {row} reads slots that are not written"
            )
            said += [likeliest([*before, *new[: n + 1]]) for n in range(len(new))]
            self.slots[row] = [*before, *new]
        return torch.tensor(said)[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return 9.0 * torch.nn.functional.one_hot(hidden[:, 0], VOCAB).float()


class Argmax(SampleKernel):
    def self_test(self) -> None: ...

    def sample(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        return logits.argmax(dim=1)


@dataclass(frozen=True, kw_only=True)
class WatchedContext(DrafterContext):
    """A context whose model is watched."""

    unit_made: WatchedModel = field(default_factory=WatchedModel)

    def load_model(self, ref: str, quantizer: str = "auto") -> DraftUnit:
        return self.unit_made

    def kernel(self, operation: str, weight_format: str = "float") -> Kernel:
        return Argmax()


def watched(context: DrafterContext, unit: WatchedModel, max_position: int = 512) -> DrafterContext:
    """The context, of a drafter whose model is watched."""
    shape = ModelShape(
        "Watched", VOCAB, 1, 1, max_position, 1e-5, (), RopeShape(1.0, 2), False, False, ()
    )
    group = KVGroup((0,), 1, 1, BLOCK_SIZE, None, "none", "float32")
    handed = {one.name: getattr(context, one.name) for one in fields(DrafterContext)}
    handed |= {"model": "m", "shape": shape, "groups": (group,)}
    return WatchedContext(**handed, unit_made=unit)


class Served(DraftModel):
    """Slots of tokens that a cache served are written."""

    def __init__(
        self, context: DrafterContext, unit: WatchedModel, max_position: int = 512
    ) -> None:
        options = DraftModelOptions(min_confidence=0)
        super().__init__(watched(context, unit, max_position), options)
        self._slots = unit.slots

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        self._slots[admission.row] = admission.token_ids[: admission.num_cached].tolist()
        super().admit(admission, block_tables)


class TestRows(DrafterContract):
    """Of the suite's rows none is served KV that the model has not written."""

    @pytest.fixture
    def make(self) -> MakeDrafter:
        return lambda context: Served(context, WatchedModel())


@dataclass
class World:
    """Rows of a drafter, and its model."""

    rows: Rows
    unit: WatchedModel

    def step(
        self, chunks: dict[int, int], new: dict[int, list[int]], asked: dict[int, int]
    ) -> None:
        """Steps, and checks guesses and KV against the whole text of each row."""
        found = self.rows.step(chunks, new, asked)
        for row in chunks:
            text = self.rows.rows[row].tokens
            self.check(text, found.get(row, []), asked.get(row, 0) if row in new else 0)
            num_observed = self.rows.rows[row].num_computed
            read = self.unit.slots.setdefault(row, [])
            del read[num_observed:]  # as after every step
            assert read == text[: len(read)]
            # What waits is part of a block.
            assert len(read) >= num_observed // BLOCK_SIZE * BLOCK_SIZE

    def check(self, text: list[int], nodes: Nodes, asked: int) -> None:
        assert len(nodes) == asked
        for depth, (token, parent) in enumerate(nodes):
            before = [token for token, _ in nodes[:depth]]
            assert (token, parent) == (likeliest([*text, *before]), depth - 1)


@pytest.fixture
def world() -> World:
    unit = WatchedModel()
    context = DrafterContext(4, VOCAB, 8, MAX_LEN)
    return World(Rows(Served(context, unit), context, 1), unit)


@pytest.mark.parametrize("seed", range(20))
def test_guesses_and_kv_are_those_of_the_whole_text(world: World, seed: int) -> None:
    """Rows that come and go, in chunks, with drafts now and then, of which some are accepted."""
    chance = random.Random(seed)
    rows = world.rows
    for _ in range(60):
        for row in list(rows.rows):
            if chance.random() < 0.05 or len(rows.rows[row].tokens) > MAX_LEN - 12:
                rows.release(row)
        free = [row for row in range(8) if row not in rows.rows]
        if free and chance.random() < 0.5:
            prompt = [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 40))]
            num_cached = chance.choice([0, 0, len(prompt) // BLOCK_SIZE * BLOCK_SIZE])
            num_cached = min(num_cached, len(prompt) - 1)
            rows.admit(free[0], prompt, num_cached)
        chunks, new, asked = {}, {}, {}
        for row, one in rows.rows.items():
            left = len(one.tokens) - one.num_computed
            if chance.random() < 0.2:
                continue
            chunks[row] = chance.randrange(1, left + 1)
            if chunks[row] == left:
                new[row] = [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 6))]
                asked[row] = chance.choice([0, 0, 0, 1, 2, 4])
        if chunks:
            world.step(chunks, new, asked)


def test_a_row_that_is_not_asked_for_is_read_a_block_at_a_time(world: World) -> None:
    world.rows.admit(0, [1, 2, 3])
    world.step({0: 3}, {0: [4]}, {0: 0})
    before = world.unit.num_passes
    for token in range(5, 5 + 2 * BLOCK_SIZE):
        world.step({0: 1}, {0: [token]}, {0: 0})
    assert world.unit.num_passes - before == 2
    world.step({0: 1}, {0: [99]}, {0: 4})


def test_prompts_are_read_at_once(world: World) -> None:
    """Siblings begin with copies of the block that a prompt ends in."""
    world.rows.admit(0, list(range(11)))
    world.step({0: 6}, {}, {})
    assert len(world.unit.slots[0]) == 6
    world.step({0: 5}, {0: [7]}, {0: 0})
    assert world.unit.slots[0] == list(range(11))


def test_nothing_is_read_past_the_models_context() -> None:
    unit = WatchedModel()
    context = DrafterContext(4, VOCAB, 8, MAX_LEN)
    rows = Rows(Served(context, unit, max_position=10), context, 1)
    rows.admit(0, list(range(7)))
    rows.admit(1, list(range(20)))
    assert len(rows.step({0: 7, 1: 20}, {0: [1], 1: [1]}, {0: 4, 1: 4})[0]) == 3
    for number, left in enumerate((2, 1, 0, 0)):
        found = rows.step({0: 1, 1: 1}, {0: [number], 1: [number]}, {0: 4, 1: 4})
        assert len(found.get(0, [])) == left and not found.get(1)
    assert max(map(len, unit.slots.values())) == 10


def test_ids_past_its_embedding_are_read_as_its_last() -> None:
    unit = WatchedModel()
    context = DrafterContext(4, VOCAB + 90, 8, MAX_LEN)
    rows = Rows(Served(context, unit), context, 1)
    rows.admit(0, [VOCAB, 3, VOCAB + 80])
    rows.step({0: 3}, {0: [VOCAB + 1]}, {0: 1})
    assert unit.slots[0] == [VOCAB - 1, 3, VOCAB - 1, VOCAB - 1]
