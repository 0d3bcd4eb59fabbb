"""Runs the logits processors over the rows that were admitted to them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pegboard.interfaces.logits_processor import LogitRow, LogitsProcessor
from pegboard.runner.inputs import StepInputs, node_path
from pegboard.runner.rows import Rows
from pegboard.step import Bool

Int64 = NDArray[np.int64]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Processed:
    """What the processors left.

    Attributes:
        usable: bool [L], logit rows that every processor of their row has seen.
        failed: row to a line, for rows whose request ends.
    """

    usable: Bool
    failed: dict[int, str]


class ProcessorChain:
    """The processors in their order, and who is admitted to each."""

    def __init__(
        self, processors: Mapping[str, LogitsProcessor], rows: Rows, max_num_seqs: int
    ) -> None:
        self._processors = processors
        self._rows = rows
        self._admitted = {name: np.zeros(max_num_seqs, dtype=np.bool_) for name in processors}
        self._refused: dict[int, str] = {}

    def admit(self, row: int, params: Mapping[str, Mapping[str, Any]]) -> None:
        """Admits a row to the processors that its request names. One that raises fails the row."""
        for name, values in params.items():
            try:
                self._processors[name].admit(row, values)
                self._admitted[name][row] = True
            except Exception as error:
                self._refused[row] = _failure(name, error)

    def release(self, row: int) -> None:
        """Takes a row from all processors."""
        self._refused.pop(row, None)
        for name, admitted in self._admitted.items():
            if admitted[row]:
                admitted[row] = False
                self._processors[name].release(row)

    def apply(self, logits: torch.Tensor, inputs: StepInputs) -> Processed:
        """Lets the processors change logits, float32 [L, vocab_size], in place."""
        owners = inputs.rows[inputs.logit_owner]
        failed = {row: self._refused[row] for row in inputs.rows.tolist() if row in self._refused}
        usable = ~np.isin(owners, list(failed))
        for name, admitted in self._admitted.items():
            chosen = np.flatnonzero(admitted[owners] & usable)
            line = self._run(name, logits, chosen, inputs)
            drafts = inputs.logit_nodes[chosen] > 0
            if line is not None and drafts.any():
                # A wrong guess may be what it could not bear, and must not end a request.
                usable[chosen[drafts]] = False
                chosen = chosen[~drafts]
                line = self._run(name, logits, chosen, inputs)
            if line is not None:
                usable[chosen] = False
                failed.update(dict.fromkeys(owners[chosen].tolist(), line))
        return Processed(usable, failed)

    def _run(
        self, name: str, logits: torch.Tensor, chosen: Int64, inputs: StepInputs
    ) -> str | None:
        """Runs a processor on some logit rows; all change, or none does and a line says why."""
        if not len(chosen):
            return None
        index = torch.from_numpy(chosen).to(logits.device)
        changed = logits[index]
        try:
            self._processors[name].apply(changed, [self._view(at, inputs) for at in chosen])
        except Exception as error:
            return _failure(name, error)
        logits[index] = changed
        return None

    def _view(self, at: int, inputs: StepInputs) -> LogitRow:
        i = inputs.owner[inputs.logit_tokens[at]]
        row = int(inputs.rows[i])
        history = self._rows.token_ids[row, : self._rows.num_known[row]]
        if inputs.logit_nodes[at]:
            path = node_path(inputs.node_parents[i], int(inputs.logit_nodes[at]) - 1)
            history = np.concatenate((history, inputs.node_tokens[i, path]))
        return LogitRow(
            row=row,
            position=len(history),
            num_prompt_tokens=int(self._rows.num_prompt[row]),
            history=history,
        )


def _failure(name: str, error: Exception) -> str:
    _log.warning("logits processor %r failed", name, exc_info=error)
    return " ".join(f"logits processor {name!r} failed: {type(error).__name__}: {error}".split())
