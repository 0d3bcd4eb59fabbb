"""Contract suite of `Drafter`.

    class TestMyDrafter(DrafterContract):
        @pytest.fixture
        def make(self):
            return MyDrafter                # called with a DrafterContext

The suite plays the runner: sequences take rows, compute chunks, get tokens, and leave. A drafter may
guess anything; its nodes must be usable. The context has no worker: `testing.model_drafter` is the suite
of a drafter with a model of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest

from pegboard.interfaces.drafter import Drafter, DrafterContext, Observation
from pegboard.step import Drafts, Float32, Int32, RowAdmission

if TYPE_CHECKING:
    import torch

MakeDrafter = Callable[[DrafterContext], Drafter]

Nodes = list[tuple[int, int]]
"""(token, parent) of each node of a row."""

Owner = tuple[str, str]
"""The tenant and the salt of a row's request."""


@dataclass(slots=True)
class Row:
    """A sequence in a row; `num_computed` of its tokens were observed, or served by a cache."""

    tokens: list[int]
    num_computed: int = 0
    num_cached: int = 0


class Rows:
    """A drafter, and the rows that it is told of."""

    def __init__(self, drafter: Drafter, context: DrafterContext, hidden_size: int) -> None:
        self.drafter = drafter
        self.context = context
        self.rows: dict[int, Row] = {}
        self._hidden_size = hidden_size

    def admit(
        self,
        row: int,
        tokens: Sequence[int],
        num_cached: int = 0,
        owner: Owner = ("", ""),
        *,
        keeps: bool = True,
    ) -> None:
        self.rows[row] = Row(list(tokens), num_cached, num_cached)
        self.drafter.admit(
            RowAdmission(
                row=row,
                token_ids=np.array(tokens, np.int32),
                num_prompt_tokens=len(tokens),
                seed=7,
                temperature=0.0,
                num_cached=num_cached,
                tenant=owner[0],
                salt=owner[1],
                keeps=keeps,
            ),
            (),
        )

    def release(self, row: int, num_dropped: int = 0) -> None:
        tokens = self.rows.pop(row).tokens
        self.drafter.release(row, len(tokens) - num_dropped)

    def step(
        self,
        chunks: Mapping[int, int],
        new: Mapping[int, Sequence[int]] | None = None,
        propose: Mapping[int, int] | None = None,
    ) -> dict[int, Nodes]:
        """Computes chunks of known tokens, commits new ones, and returns the checked nodes.

        Args:
            chunks: row to a number of known tokens.
            new: row to the tokens committed, all but the last of them accepted drafts.
            propose: row to the most nodes for it.
        """
        new, asked = new or {}, propose or {}
        kept: list[tuple[int, int]] = []
        counts = []
        for number, count in chunks.items():
            row = self.rows[number]
            row.tokens += new.get(number, ())
            accepted = max(0, len(new.get(number, ())) - 1)
            span = range(row.num_computed, row.num_computed + count + accepted)
            kept += [(row.tokens[position], position) for position in span]
            counts.append(len(span))
            row.num_computed = span.stop
        committed = [new.get(number, ()) for number in chunks]
        seen = Observation(
            rows=_frozen(list(chunks)),
            offsets=_starts(counts),
            token_ids=_frozen([token for token, _ in kept]),
            positions=_frozen([position for _, position in kept]),
            taps=self._taps(kept),
            next_offsets=_starts([len(tokens) for tokens in committed]),
            next_token_ids=_frozen([token for tokens in committed for token in tokens]),
            propose=_frozen([asked.get(number, 0) for number in chunks]),
            num_cached=_frozen([self.rows[number].num_cached for number in chunks]),
        )
        return usable_nodes(seen, *self.drafter.propose(seen), self.context.vocab_size)

    def _taps(self, kept: Sequence[tuple[int, int]]) -> dict[int, torch.Tensor]:
        """Hidden states that depend on token and position."""
        if not self.drafter.taps:
            return {}
        import torch

        numbers = torch.tensor(kept, dtype=torch.float64).reshape(-1, 2)
        axis = torch.arange(1, self._hidden_size + 1, dtype=torch.float64)
        hidden = torch.sin(numbers[:, :1] * axis + numbers[:, 1:])
        dtype = getattr(torch, self.context.dtype)
        return {layer: hidden.to(self.context.device, dtype) for layer in self.drafter.taps}


def usable_nodes(
    seen: Observation, drafts: Drafts, probabilities: Float32, vocab_size: int
) -> dict[int, Nodes]:
    """Row to its nodes.

    Raises:
        AssertionError: they are no answer to what was observed.
    """
    most = dict(zip(seen.rows.tolist(), seen.propose.tolist(), strict=True))
    rows, offsets = drafts.rows.tolist(), drafts.offsets.tolist()
    num_nodes = len(drafts.token_ids)
    for array in (drafts.rows, drafts.offsets, drafts.token_ids, drafts.parents):
        assert array.dtype == np.int32 and array.ndim == 1
    assert probabilities.dtype == np.float32 and probabilities.shape == (num_nodes,)
    assert bool(((probabilities >= 0) & (probabilities <= 1)).all())
    assert len(set(rows)) == len(rows) and offsets[0] == 0 and offsets[-1] == num_nodes
    assert len(offsets) == len(rows) + 1 and len(drafts.parents) == num_nodes
    assert offsets == sorted(offsets)
    found = {}
    for i, row in enumerate(rows):
        part = slice(offsets[i], offsets[i + 1])
        tokens, parents = drafts.token_ids[part].tolist(), drafts.parents[part].tolist()
        assert len(tokens) <= most.get(row, 0), f"too many nodes for row {row}"
        assert all(0 <= token < vocab_size for token in tokens)
        assert all(-1 <= parent < node for node, parent in enumerate(parents))
        found[row] = list(zip(tokens, parents, strict=True))
    return found


class DrafterContract:
    """The contract of every drafter.

    Attributes:
        remembers: whether it keeps what it learned of sequences that are gone, for others.
        vocab_size, hidden_size: of the target that the suite plays.
        model: reference of the drafter's own model.
        device: `cpu` or `cuda`.
    """

    remembers: ClassVar[bool] = False
    vocab_size: ClassVar[int] = 517
    hidden_size: ClassVar[int] = 40
    model: ClassVar[str | None] = None
    device: ClassVar[str] = "cpu"

    @pytest.fixture
    def make(self) -> MakeDrafter:
        """The factory under test."""
        raise NotImplementedError("override the fixture `make`")

    def start(self, make: MakeDrafter, num_nodes: int = 4) -> Rows:
        """A drafter without rows."""
        context = DrafterContext(
            num_nodes, self.vocab_size, 8, 128, self.model, "float32", self.device
        )
        return Rows(make(context), context, self.hidden_size)

    def text(self, length: int, seed: int = 1) -> list[int]:
        """Tokens that repeat themselves, so that something can be guessed."""
        chance = random.Random(seed)
        phrase = [chance.randrange(self.vocab_size) for _ in range(5)]
        return (phrase * (length // 5 + 1))[:length]

    def test_taps_are_layers(self, make: MakeDrafter) -> None:
        taps = self.start(make).drafter.taps
        assert all(type(tap) is int and tap >= -1 for tap in taps), f"taps: {taps!r}"

    def test_rows_are_taken_back_while_their_sequences_run(self, make: MakeDrafter) -> None:
        """The runner does so when a drafter that erred is tried again."""
        rows, text = self.start(make), self.text(60)
        for row in (0, 4):
            rows.admit(row, text[:20])
        new = text[20:22]
        rows.step({0: 20, 4: 7}, {0: new}, {0: 4})
        for row in (0, 4):
            rows.release(row, num_dropped=row)
        rows.admit(4, text[:25])
        rows.step({4: 25}, {4: text[25:26]}, {4: 4})
        rows.step({4: 1}, {4: text[26:27]}, {4: 4})

    def test_nodes_can_be_used(self, make: MakeDrafter) -> None:
        rows = self.start(make)
        text = self.text(60)
        rows.admit(3, text[:20])
        rows.step({3: 20}, {3: text[20:21]}, {3: 4})
        for at in range(21, 50):
            rows.step({3: 1}, {3: text[at : at + 1]}, {3: 4})

    def test_no_more_than_asked_for(self, make: MakeDrafter) -> None:
        rows = self.start(make)
        text = self.text(60)
        rows.admit(0, text[:20])
        rows.step({0: 20}, {0: text[20:21]}, {0: 4})
        for at, most in zip(range(21, 40), [0, 1, 2, 3, 4] * 4, strict=False):
            assert len(rows.step({0: 1}, {0: text[at : at + 1]}, {0: most}).get(0, ())) <= most

    def test_chunks_of_a_prompt_bring_no_drafts(self, make: MakeDrafter) -> None:
        rows = self.start(make)
        text = self.text(30)
        rows.admit(1, text[:21])
        for _ in range(3):
            assert rows.step({1: 7}).get(1, []) == []
        rows.step({1: 0}, {1: text[21:22]}, {1: 4})

    def test_accepted_spans_are_followed(self, make: MakeDrafter) -> None:
        rows = self.start(make)
        text = self.text(60)
        rows.admit(0, text[:10])
        rows.step({0: 10}, {0: text[10:11]}, {0: 4})
        for at in range(11, 56, 5):
            rows.step({0: 1}, {0: text[at : at + 5]}, {0: 4})

    def test_tokens_that_a_cache_served_are_not_observed(self, make: MakeDrafter) -> None:
        rows = self.start(make)
        text = self.text(40)
        rows.admit(2, text[:30], num_cached=28)
        rows.step({2: 2}, {2: text[30:31]}, {2: 4})
        rows.step({2: 1}, {2: text[31:32]}, {2: 4})

    def test_rows_come_and_go_in_any_order(self, make: MakeDrafter) -> None:
        rows, chance = self.start(make), random.Random(4)
        for turn in range(60):
            row = chance.randrange(8)
            if row in rows.rows and (chance.random() < 0.3 or len(rows.rows[row].tokens) > 100):
                rows.release(row, num_dropped=chance.randrange(2))
            elif row not in rows.rows:
                rows.admit(row, self.text(chance.randrange(1, 20), seed=turn))
            chunks, new = {}, {}
            for number, one in rows.rows.items():
                chunks[number] = len(one.tokens) - one.num_computed
                new[number] = self.text(chance.randrange(1, 4), seed=turn)
            rows.step(chunks, new, dict.fromkeys(chunks, 4))

    def test_a_row_is_guessed_by_its_own_tokens(self, make: MakeDrafter) -> None:
        if self.remembers:
            pytest.skip("the drafter keeps what it learned of others")
        first, second = self.text(40, seed=1), self.text(40, seed=2)

        def guesses(rows: Rows, *beside: int) -> list[Nodes]:
            rows.admit(5, first[:20])
            for row in beside:
                rows.admit(row, second[:20])
            found = [rows.step({5: 20, **dict.fromkeys(beside, 20)}, {5: first[20:21]}, {5: 4})]
            found += [rows.step({5: 1}, {5: first[at : at + 1]}, {5: 4}) for at in range(21, 35)]
            return [nodes.get(5, []) for nodes in found]

        alone = guesses(self.start(make))
        assert guesses(self.start(make), 0, 6) == alone
        assert guesses(self.after(make, second)) == alone

    @pytest.mark.parametrize("other", [("", "b"), ("a", ""), ("b", "a")])
    def test_what_it_keeps_of_a_sequence_is_for_its_tenant_and_salt(
        self, make: MakeDrafter, other: Owner
    ) -> None:
        """Else how fast an answer comes tells what others were answered."""
        text = self.text(40)
        after = self.after(make, text, ("a", "b"))
        assert self.guesses(after, text, other) == self.guesses(self.start(make), text, other)

    @pytest.mark.parametrize("why", ["request", "reset", "reset while it ran"])
    def test_it_keeps_nothing_that_it_may_not(self, make: MakeDrafter, why: str) -> None:
        text = self.text(40)
        rows = self.start(make)
        self.run(rows, text, keeps=why != "request")
        if why == "reset while it ran":
            rows.drafter.forget()
        rows.release(5)
        if why == "reset":
            rows.drafter.forget()
        assert self.guesses(rows, text) == self.guesses(self.start(make), text)

    def guesses(self, rows: Rows, text: Sequence[int], owner: Owner = ("", "")) -> list[Nodes]:
        """Those for a row that has the text, a token after the other."""
        rows.admit(5, text[:3], owner=owner)
        found = [rows.step({5: 3}, {5: text[3:4]}, {5: 4})]
        found += [rows.step({5: 1}, {5: text[at : at + 1]}, {5: 4}) for at in range(4, 9)]
        return [nodes.get(5, []) for nodes in found]

    def after(self, make: MakeDrafter, text: Sequence[int], owner: Owner = ("", "")) -> Rows:
        """A drafter that saw a sequence end."""
        rows = self.start(make)
        self.run(rows, text, owner)
        rows.release(5)
        return rows

    def run(
        self, rows: Rows, text: Sequence[int], owner: Owner = ("", ""), *, keeps: bool = True
    ) -> None:
        """A sequence whose output is the second half of a text."""
        half = len(text) // 2
        rows.admit(5, text[:half], owner=owner, keeps=keeps)
        rows.step({5: half}, {5: text[half:]}, {5: 4})


def _starts(counts: Sequence[int]) -> Int32:
    return _frozen([0, *np.cumsum(counts).tolist()])


def _frozen(values: Sequence[int]) -> Int32:
    array: Int32 = np.array(values, np.int32)
    array.setflags(write=False)
    return array
