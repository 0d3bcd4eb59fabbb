"""Executors for Pegboard: workers in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard import hookimpl

if TYPE_CHECKING:
    from pegboard.interfaces.executor import Executor, ExecutorContext
    from pegboard_executors.options import ProcessesOptions


@hookimpl
def pegboard_executors() -> dict[str, Callable[[ExecutorContext, ProcessesOptions], Executor]]:
    return {"processes": _make_processes}


def _make_processes(context: ExecutorContext, options: ProcessesOptions) -> Executor:
    from pegboard_executors.processes import ProcessesExecutor

    return ProcessesExecutor(context, options)
