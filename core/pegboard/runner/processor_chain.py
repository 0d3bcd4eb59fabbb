"""Runs the logits processors over the rows that were admitted to them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pegboard.errors import INTERRUPTS, described
from pegboard.interfaces.logits_processor import LogitRow, LogitsProcessor
from pegboard.runner.inputs import StepInputs, node_path
from pegboard.runner.rows import Rows
from pegboard.step import Bool, Int64, copy_plain, read_only

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Processed:
    """The logits after the processors.

    Attributes:
        usable: bool [L], logit rows that every processor of their row has seen.
        failed: row to a line, for rows whose request ends.
    """

    usable: Bool
    failed: dict[int, str]


class ProcessorChain:
    """The processors in their order, and who is admitted to each."""

    def __init__(
        self, processors: Mapping[str, LogitsProcessor], stateful: frozenset[str], rows: Rows
    ) -> None:
        """
        Args:
            stateful: names of those that are called once for each token, with one row.
        """
        self._processors = processors
        self._stateful = stateful
        self._rows = rows
        self._admitted = {name: np.zeros(len(rows.num_known), np.bool_) for name in processors}
        self._refused: dict[int, str] = {}

    def admit(self, row: int, params: Mapping[str, Mapping[str, Any]]) -> None:
        """Admits a row to the processors that its request names, and to no other. One that raises
        fails the row."""
        for name, values in params.items():
            try:
                # Theirs to keep: nobody else sees what a processor does to them.
                self._processors[name].admit(row, copy_plain(values))
                self._admitted[name][row] = True
            except INTERRUPTS:
                raise
            except BaseException as error:
                self._refused[row] = _failure(name, error)

    def release(self, row: int) -> None:
        """Takes a row from all processors. One that raises has none the less lost the row."""
        self._refused.pop(row, None)
        for name, admitted in self._admitted.items():
            if admitted[row]:
                admitted[row] = False
                try:
                    self._processors[name].release(row)
                except INTERRUPTS:
                    raise
                except BaseException:
                    _log.exception("logits processor %r: releasing row %d raised", name, row)

    def apply(self, logits: torch.Tensor, inputs: StepInputs) -> Processed:
        """Lets the processors change logits, float32 [L, vocab_size], in place."""
        owners = inputs.rows[inputs.logit_owner]
        failed: dict[int, str] = {}
        usable = np.ones(len(owners), dtype=np.bool_)
        if self._refused:
            refused = set(inputs.rows.tolist()) & self._refused.keys()
            failed = {row: self._refused[row] for row in refused}
            usable = ~np.isin(owners, list(failed))
        for name, admitted in self._admitted.items():
            chosen = np.flatnonzero(admitted[owners] & usable)
            for at, line in self._run(name, logits, chosen, inputs).items():
                usable[at] = False
                # A wrong guess may be what it could not bear, and must not end a request.
                if not inputs.logit_nodes[at]:
                    failed[int(owners[at])] = line
        return Processed(usable, failed)

    def _run(
        self, name: str, logits: torch.Tensor, chosen: Int64, inputs: StepInputs
    ) -> dict[int, str]:
        """Runs a processor on some logit rows, together; if it raises, on each alone.

        Returns:
            A line for each logit row that it failed on; their logits are as they were.
        """
        if not len(chosen):
            return {}
        if len(chosen) == 1 or name not in self._stateful:
            try:
                self._change(name, logits, chosen, inputs)
                return {}
            except INTERRUPTS:
                raise
            except BaseException as error:
                if len(chosen) == 1:
                    at = int(chosen[0])
                    return {at: _failure(name, error, is_guess=bool(inputs.logit_nodes[at]))}
        failures: dict[int, str] = {}
        for at in chosen:
            failures |= self._run(name, logits, at[None], inputs)
        return failures

    def _change(self, name: str, logits: torch.Tensor, chosen: Int64, inputs: StepInputs) -> None:
        """All of the rows change, or it raises and none does."""
        changed = logits[torch.from_numpy(chosen).to(logits.device)]
        shape, dtype = changed.shape, changed.dtype
        self._processors[name].apply(changed, [self._view(at, inputs) for at in chosen])
        if (changed.shape, changed.dtype) != (shape, dtype):
            raise ValueError(
                f"it made {changed.dtype} {list(changed.shape)} of {dtype} {list(shape)} logits"
            )
        logits[torch.from_numpy(chosen).to(logits.device)] = changed

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
            history=read_only(history),
        )


def _failure(name: str, error: BaseException, *, is_guess: bool = False) -> str:
    # A matcher may raise at every wrong guess: that is no news.
    level = logging.DEBUG if is_guess else logging.WARNING
    _log.log(level, "logits processor %r failed", name, exc_info=error)
    return f"logits processor {name!r} failed: {described(error)}"
