"""The drafter: chains of what another model would say, a pass over all rows for each token.

Guessed tokens are computed again once they are known: what lies in KV past the known tokens is void after
the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import torch

from pegboard.interfaces.drafter import DrafterContext, Observation, SampledDrafter, UnitTokens
from pegboard.interfaces.kernel import ProbabilitiesKernel, SampleKernel, SampleRows
from pegboard.step import Drafts, Float32, Int32, Int64, RowAdmission
from pegboard_draft_model.options import DraftModelOptions
from pegboard_draft_model.reading import Reading, ReadTokens
from pegboard_draft_model.rows import SamplingTable

KeepGuesses = Callable[[Int64, int, torch.Tensor, SampleRows], None]
"""Told of each pass: which of the rows that get guesses, at what depth, from which logits and how."""


class DraftModel(SampledDrafter):
    """A second model of the registry."""

    def __init__(self, context: DrafterContext, options: DraftModelOptions) -> None:
        assert context.model is not None
        self._context = context
        self._unit = context.load_model(context.model, options.quantizer)
        self._kernel = cast(SampleKernel, context.kernel("sample"))
        self._vocab_size = context.vocab_size
        self._device = context.device
        self._draws = options.sampling == "noise"
        self._min_confidence = options.min_confidence
        self._tokens = ReadTokens(context)
        self._sampling = SamplingTable(context.max_num_seqs, context.device)

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        self._tokens.admit(admission)
        self._sampling.admit(admission)

    def release(self, row: int, num_tokens: int) -> None:
        """All that is kept of a row is void when it is taken again."""

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        return self._propose(seen, lambda *guesses: None)

    def propose_sampled(self, seen: Observation) -> tuple[Drafts, torch.Tensor]:
        """What the kernel draws from has its filters; a guess that is not drawn is certain."""
        kernel = cast(ProbabilitiesKernel, self._context.kernel("probabilities"))
        shape = (len(seen.rows), max(1, int(seen.propose.max(initial=0))), self._vocab_size)
        # What pads the target's embedding may lie past the draft model's: it draws none of that.
        drawn_from = torch.zeros(shape, device=self._device)

        def keep(rows: Int64, depth: int, logits: torch.Tensor, parameters: SampleRows) -> None:
            found = kernel.probabilities(logits, parameters)
            drawn_from[self._tensor(rows), depth, : found.shape[1]] = found.to(torch.float32)

        drafts, _ = self._propose(seen, keep)
        counts = np.diff(drafts.offsets)
        held = np.arange(shape[1]) < counts[:, None]
        return drafts, drawn_from[: len(counts)][self._tensor(held)]

    def _propose(self, seen: Observation, keep: KeepGuesses) -> tuple[Drafts, Float32]:
        reading = self._tokens.next(seen)
        if not len(reading.rows):
            return _drafts(reading.rows, *_no_nodes(0, 1))
        tokens = UnitTokens(
            reading.rows, reading.offsets, reading.num_read, self._tensor(reading.token_ids)
        )
        hidden = self._unit.forward(tokens)
        if not len(reading.drafted):
            return _drafts(reading.rows[:0], *_no_nodes(0, 1))
        last = reading.offsets[1:][reading.drafted] - 1
        return self._chains(reading, hidden[self._tensor(last.astype(np.int64))], keep)

    def _chains(
        self, reading: Reading, hidden: torch.Tensor, keep: KeepGuesses
    ) -> tuple[Drafts, Float32]:
        """Guesses, one token of all rows after the other.

        hidden: [D, hidden_size], of the rows' last known tokens.
        """
        rows, num_known = reading.rows[reading.drafted], reading.num_known
        token_ids, probabilities, counts = _no_nodes(len(rows), int(reading.num_nodes.max()))
        of_all = np.ones(len(rows), np.float32)
        going = np.arange(len(rows))
        for depth in range(token_ids.shape[1]):
            logits, parameters = self._logits(rows[going], num_known[going] + depth, hidden)
            newest, likely = self._guess(rows[going], logits, parameters)
            keep(going, depth, logits, parameters)
            token_ids[going, depth] = newest.cpu().numpy()
            probabilities[going, depth] = likely
            of_all[going] *= likely
            is_kept = self._is_drawn(rows[going]) | (of_all[going] >= self._min_confidence)
            counts[going] += is_kept
            more = is_kept & (reading.num_nodes[going] > depth + 1)
            slots = num_known[going[more]] + depth
            going = going[more]
            if not len(going):
                break
            tokens = UnitTokens(
                rows[going],
                np.arange(len(going) + 1, dtype=np.int32),
                slots.astype(np.int32),
                newest[self._tensor(np.flatnonzero(more))],
            )
            hidden = self._unit.forward(tokens)
        return _drafts(rows, token_ids, probabilities, counts)

    def _logits(
        self, rows: Int32, positions: Int64, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, SampleRows]:
        """The logits of each row, and how its next token is guessed from them.

        positions: of these tokens.
        """
        # An id past the target's embedding is none of its tokens.
        logits = self._unit.logits(hidden)[:, : self._vocab_size].contiguous()
        drawn_at = np.where(self._is_drawn(rows), self._sampling.temperature[rows], np.float32(0))
        return logits, self._sampling.parameters(rows, positions, drawn_at)

    def _guess(
        self, rows: Int32, logits: torch.Tensor, parameters: SampleRows
    ) -> tuple[torch.Tensor, Float32]:
        """The next token of each row, int64 [R], and the model's probability of it."""
        temperature = self._sampling.temperature[rows]
        token_ids = self._kernel.sample(logits, parameters)
        scale = self._tensor(np.where(temperature > 0, temperature, np.float32(1)))
        log_probs = (logits / scale[:, None]).log_softmax(dim=1)
        likely = log_probs.gather(1, token_ids[:, None])[:, 0].exp().clamp_(max=1)
        return token_ids, likely.cpu().numpy()

    def _is_drawn(self, rows: Int32) -> np.ndarray:
        """Which rows' guesses are drawn; bool [R]."""
        return self._draws & (self._sampling.temperature[rows] > 0)

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _no_nodes(num_rows: int, width: int) -> tuple[Int32, Float32, Int64]:
    """Tokens, probabilities and counts of rows to be filled in."""
    token_ids = np.zeros((num_rows, width), np.int32)
    return token_ids, np.zeros(token_ids.shape, np.float32), np.zeros(num_rows, np.int64)


def _drafts(
    rows: Int32, token_ids: Int32, probabilities: Float32, counts: Int64
) -> tuple[Drafts, Float32]:
    """Chains of the first `counts` tokens of each row of a table."""
    held = np.arange(token_ids.shape[1]) < counts[:, None]
    parents = np.broadcast_to(np.arange(-1, token_ids.shape[1] - 1, dtype=np.int32), held.shape)
    drafts = Drafts(
        rows=rows,
        offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        token_ids=token_ids[held],
        parents=parents[held],
    )
    return drafts, probabilities[held]
