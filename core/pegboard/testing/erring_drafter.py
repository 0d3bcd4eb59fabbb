"""A drafter that guesses as another does, and errs now and then in every way that there is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from pegboard.interfaces.drafter import Observation
from pegboard.step import Drafts, Int32, RowAdmission
from pegboard.testing.guessing_drafter import GuessingDrafter, Outputs


class Mute(Exception):
    """An error whose message cannot be had."""

    def __str__(self) -> str:
        raise ValueError


class Panic(BaseException):
    """A panic of a library in Rust."""


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("no"),
    "SystemExit": lambda: SystemExit(3),
    "RecursionError": RecursionError,
    "MemoryError": MemoryError,
    "StopIteration": StopIteration,
    "Mute": Mute,
    "Panic": Panic,
}


def nodes_of(
    rows: Any, counts: Any, token: int = 0, dtype: Any = np.int32, parents: Any = None
) -> tuple[Any, Any]:
    """So many nodes for each row, all the same token, as a chain where no parents are given."""
    chains = [node - 1 for count in counts for node in range(count)]
    drafts = Drafts(
        rows=np.array(rows, dtype),
        offsets=np.array([0, *np.cumsum(counts)], dtype),
        token_ids=np.full(sum(counts), token, dtype),
        parents=np.array(chains if parents is None else parents, dtype),
    )
    return drafts, np.full(len(drafts.token_ids), 0.5, np.float32)


def _with(changed: Callable[[Drafts, Any], Any]) -> Callable[[Observation], Any]:
    """One node for the first row, and something wrong with it."""
    return lambda seen: changed(*nodes_of(seen.rows[:1], [1]))


def _replaced(**fields: Any) -> Callable[[Observation], Any]:
    names = ("rows", "offsets", "token_ids", "parents")
    return _with(
        lambda drafts, p: (
            Drafts(**{name: fields.get(name, getattr(drafts, name)) for name in names}),
            p,
        )
    )


ANSWERS: dict[str, Callable[[Observation], Any]] = {
    "nothing": lambda seen: None,
    "a number": lambda seen: 3,
    "no probabilities": _with(lambda drafts, p: drafts),
    "three things": _with(lambda drafts, p: (drafts, p, p)),
    "a list of pairs": lambda seen: ([(1, -1)], [0.5]),
    "too many nodes": lambda seen: nodes_of(seen.rows, [int(n) + 1 for n in seen.propose]),
    "a million nodes": lambda seen: nodes_of(seen.rows[:1], [10**6]),
    "a row of nobody": lambda seen: nodes_of([10**6], [1]),
    "a row below the first": lambda seen: nodes_of([-1], [1]),
    "a row twice": lambda seen: nodes_of([*seen.rows[:1], *seen.rows[:1]], [0, 0]),
    "a token of nobody": lambda seen: nodes_of(seen.rows[:1], [1], token=2**31 - 1),
    "a token below the first": lambda seen: nodes_of(seen.rows[:1], [1], token=-1),
    "its own parent": lambda seen: nodes_of(seen.rows[:1], [1], parents=[0]),
    "a parent of nobody": lambda seen: nodes_of(seen.rows[:1], [1], parents=[-2]),
    "a parent to come": lambda seen: nodes_of(seen.rows[:1], [2], parents=[1, -1]),
    "a circle": lambda seen: nodes_of(seen.rows[:1], [2], parents=[1, 0]),
    "int64": lambda seen: nodes_of(seen.rows[:1], [1], dtype=np.int64),
    "float": lambda seen: nodes_of(seen.rows[:1], [1], dtype=np.float64),
    "objects": lambda seen: nodes_of(seen.rows[:1], [1], dtype=object),
    "lists": _replaced(token_ids=[1]),
    "None for an array": _replaced(offsets=None),
    "no offsets": _replaced(offsets=np.zeros(0, np.int32)),
    "offsets from one on": _replaced(offsets=np.array([1, 1], np.int32)),
    "offsets beyond the nodes": _replaced(offsets=np.array([0, 9], np.int32)),
    "offsets that fall": _replaced(offsets=np.array([0, -1], np.int32)),
    "a matrix": _replaced(token_ids=np.zeros((1, 1), np.int32)),
    "a scalar": _replaced(token_ids=np.array(1, np.int32)),
    "NaN": _with(lambda drafts, p: (drafts, p * np.nan)),
    "infinity": _with(lambda drafts, p: (drafts, p * np.inf)),
    "more than certain": _with(lambda drafts, p: (drafts, p + 1)),
    "less than nothing": _with(lambda drafts, p: (drafts, p - 1)),
    "double probabilities": _with(lambda drafts, p: (drafts, p.astype(np.float64))),
    "a probability too many": _with(lambda drafts, p: (drafts, np.tile(p, 2))),
}
"""Answers of `propose` that no verification can use, where it is asked for one node or more."""


class ErringDrafter(GuessingDrafter):
    """Errs in about every sixth call, by an error or an answer of `ANSWERS`, chosen at random.

    Attributes:
        num_errors: so far.
    """

    def __init__(self, outputs: Outputs, right: float, width: int = 1, seed: int = 0) -> None:
        super().__init__(outputs, right, width, seed)
        self._dice = random.Random(f"errs {seed}")
        self.num_errors = 0

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        self._raise_now_and_then()
        super().admit(admission, block_tables)

    def release(self, row: int, num_tokens: int) -> None:
        super().release(row, num_tokens)
        self._raise_now_and_then()

    def propose(self, seen: Observation) -> Any:
        self._raise_now_and_then()
        answer = super().propose(seen)
        if self._errs():
            return self._dice.choice(list(ANSWERS.values()))(seen)
        return answer

    def _raise_now_and_then(self) -> None:
        if self._errs():
            raise self._dice.choice(list(ERRORS.values()))()

    def _errs(self) -> bool:
        errs = self._dice.random() < 1 / 8
        self.num_errors += errs
        return errs
