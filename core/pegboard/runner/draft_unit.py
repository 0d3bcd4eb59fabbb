"""A drafter's side of its worker: a model of its own, and the target's embedding and head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from pegboard.errors import EngineError
from pegboard.interfaces.attention import AttentionBatch
from pegboard.interfaces.drafter import DraftSlots, DraftUnit, UnitTokens
from pegboard.interfaces.model import Model
from pegboard.runner.model_unit import ModelUnit, UnitParts, Units
from pegboard.runner.rows import Rows
from pegboard.step import Bool, Int32, Int64


class DrafterModels:
    """The models that a drafter uses, once the worker has started.

    Attributes:
        unit: its own; None: it has none.
        groups: the numbers of that model's KV groups.
    """

    def __init__(self, slots: DraftSlots) -> None:
        """
        Args:
            slots: what is set aside past a row's last known token.
        """
        self.unit: RunningDraftUnit | None = None
        self.groups = range(0)
        self._slots = slots
        self._target: Model | None = None

    def make(self, parts: UnitParts) -> DraftUnit:
        """Makes its own model, not loaded yet."""
        self.unit = RunningDraftUnit(parts)
        return self.unit

    def bind(self, units: Units, rows: Rows) -> None:
        """The worker has started."""
        self._target = units.target.model
        self._rows = rows
        if self.unit is not None:
            self.groups = self.unit.bind(units, rows)

    @contextmanager
    def observing(self, rows: Int32, num_observed: Int64, propose: Int32) -> Iterator[None]:
        """While a step is observed, its rows have slots. Then none has: their blocks may be another's
        in the next step.

        Args:
            rows: int32 [R], of the step.
            num_observed: int64 [R], tokens observed of each so far.
            propose: int32 [R], nodes asked for.
        """
        if self.unit is None:
            yield
            return
        past = [self._slots.past(num_nodes) for num_nodes in propose.tolist()]
        known = self._rows.num_known[rows] + past
        self.unit.num_slots[rows] = np.where(propose > 0, known, num_observed)
        try:
            yield
        finally:
            self.unit.num_slots[:] = 0

    @property
    def target(self) -> Model:
        """The target.

        Raises:
            EngineError: its weights are not loaded.
        """
        if self._target is None:
            raise EngineError("the target's weights are not loaded yet")
        return self._target


class RunningDraftUnit(DraftUnit):
    """A unit over the rows of the worker, within the slots that were set aside for it.

    Attributes:
        parts: its parts.
        num_slots: int64 [max_num_seqs], slots of each row in the step that is observed.
    """

    def __init__(self, parts: UnitParts) -> None:
        self.parts = parts
        self._unit: ModelUnit | None = None

    def bind(self, units: Units, rows: Rows) -> range:
        """The worker has started, with these units and tables. The numbers of the unit's KV groups."""
        self._unit = units.by_name[self.parts.name]
        self._rows, self._groups = rows, units.numbers(self._unit)
        self.num_slots: Int64 = np.zeros(len(rows.num_known), np.int64)
        return self._groups

    def forward(self, tokens: UnitTokens, hidden: torch.Tensor | None = None) -> torch.Tensor:
        unit = self._running()
        self._check(tokens)
        batch = self._batch(unit, tokens)
        if isinstance(unit.layers, Model):
            if hidden is not None:
                raise EngineError("a model of the registry takes no hidden states beside token ids")
            return unit.forward(tokens.token_ids, batch)[0]
        unit.parts.attention.prepare(batch)
        return unit.layers(tokens.token_ids, batch.positions, hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._running().model.logits(hidden)

    def _running(self) -> ModelUnit:
        if self._unit is None:
            raise EngineError("the drafter's model is not loaded yet")
        return self._unit

    def _check(self, tokens: UnitTokens) -> None:
        counts = np.diff(tokens.offsets)
        if len(counts) != len(tokens.rows) or (counts < 0).any() or not len(counts):
            raise EngineError("a drafter's tokens: rows and offsets disagree")
        if {int(tokens.offsets[0]), int(tokens.offsets[-1]) - len(tokens.token_ids)} != {0}:
            raise EngineError("a drafter's tokens: offsets and token ids disagree")
        ends = tokens.num_computed + counts
        num_slots = np.where(tokens.rows < 0, 0, self.num_slots[tokens.rows])
        skipped = self.parts.shape.attention[0].skipped
        wrong = (tokens.rows < 0) | (tokens.num_computed < skipped) | (ends > num_slots)
        if wrong.any():
            at = int(np.argmax(wrong))
            row = int(tokens.rows[at])
            raise EngineError(
                f"a drafter's tokens of row {row} take slots {tokens.num_computed[at]} to {ends[at]};"
                f" set aside: {num_slots[at]}"
            )

    def _batch(self, unit: ModelUnit, tokens: UnitTokens) -> AttentionBatch:
        starts = tokens.offsets.astype(np.int64)
        num_computed = tokens.num_computed.astype(np.int64)
        counts = np.diff(starts)
        owner = np.repeat(np.arange(len(counts)), counts)
        local = np.arange(len(owner)) - starts[owner]
        depths, ancestors = local, None
        if tokens.parents is not None and (tokens.parents != local - 1).any():
            if not self.parts.masks_trees:
                raise EngineError(
                    "a drafter's tokens are a tree, and its attention has no query_mask"
                )
            depths, ancestors = _tree(tokens.parents, local, starts[owner], int(counts.max()))
        tables = self._rows.tables(self._groups, tokens.rows, int((num_computed + counts).max()))
        positions = num_computed[owner] + depths - self.parts.shape.attention[0].skipped
        return unit.batch(positions, starts, num_computed, tables, ancestors)


def _tree(parents: Int32, local: Int64, first: Int64, width: int) -> tuple[Int64, Bool | None]:
    """Depth of each token, and which of its row's tokens it sees.

    Args:
        parents: int32 [N], as in `UnitTokens`.
        local, first: int64 [N], a token's number in its row, and the index of its row's first token.
        width: most tokens of a row.

    Raises:
        EngineError: a parent that does not precede its token.
    """
    if len(parents) != len(local) or ((parents < -1) | (parents >= local)).any():
        raise EngineError("a drafter's tokens: a parent must precede its token")
    depths = np.zeros(len(local), np.int64)
    ancestors = np.zeros((len(local), width), np.bool_)
    for token in range(len(local)):
        if parents[token] >= 0:
            parent = first[token] + parents[token]
            depths[token] = depths[parent] + 1
            ancestors[token] = ancestors[parent]
        ancestors[token, local[token]] = True
    return depths, ancestors
