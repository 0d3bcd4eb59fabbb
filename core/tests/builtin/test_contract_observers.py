"""The built-in observers keep their contract."""

from __future__ import annotations

import pytest

from pegboard.builtin.log_observer import LogObserver
from pegboard.builtin.metrics_observer import MetricsObserver
from pegboard.testing.observer import MakeObserver, ObserverContract


class TestMetrics(ObserverContract):
    @pytest.fixture
    def make(self) -> MakeObserver:
        return MetricsObserver


class TestLog(ObserverContract):
    @pytest.fixture
    def make(self) -> MakeObserver:
        return LogObserver
