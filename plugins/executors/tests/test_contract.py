"""The plugin keeps the contract of what it provides: on one machine, over TCP, and started by another."""

from __future__ import annotations

import pytest

from pegboard.interfaces.executor import Executor, ExecutorContext
from pegboard.testing.executor import ExecutorContract, MakeExecutor
from pegboard_executors.options import ProcessesOptions
from pegboard_executors.processes import ProcessesExecutor


class TestProcesses(ExecutorContract):
    own_processes = True

    @pytest.fixture
    def make(self) -> MakeExecutor:
        return _maker()


class TestTwoProcesses(TestProcesses):
    num_workers = 2


@pytest.mark.slow
class TestProcessesOverTcp(TestTwoProcesses):
    @pytest.fixture
    def make(self) -> MakeExecutor:
        return _maker(address="127.0.0.1", launch=("env", "STARTED_BY=another"))


def _maker(**options: object) -> MakeExecutor:
    def make(context: ExecutorContext) -> Executor:
        return ProcessesExecutor(context, ProcessesOptions.model_validate(options))

    return make
