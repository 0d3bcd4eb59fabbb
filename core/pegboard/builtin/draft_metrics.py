"""The metrics of speculation that `MetricsObserver` keeps where there is a drafter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pegboard.builtin.metric_families import LABELS, PREFIX, MetricMaker
from pegboard.interfaces.observer import NoDrafts, RequestArrived, StepDone

_FEW_TOKENS = (*range(9), 12, 16, 24, 32, 48, 64)


class DraftMetrics(Collector):
    """A step adds few numbers; what follows from them is worked out when somebody looks. A node of a tree
    is a draft token, and its depth is its position."""

    def __init__(self, make: MetricMaker, num_nodes: int) -> None:
        """
        Args:
            num_nodes: most of a draft.
        """
        make.own(self)
        without = make.counter(
            "spec_decode_requests_without_drafts",
            "Requests without drafts: they said so, or a logits processor keeps a state",
            ("reason",),
        )
        self._requests_without = {
            reason: without.labels(*make.labels, reason) for reason in get_args(NoDrafts)
        }
        self._labels = make.labels
        self._num_nodes = num_nodes
        self._without = 0
        self._asked = self._proposed = 0
        self._drafting_s = self._verifying_s = 0.0
        # Entry n: how many drafts had n.
        self._verified, self._tried, self._accepted = ([0] * (num_nodes + 1) for _ in range(3))

    def arrived(self, event: RequestArrived) -> None:
        if event.without_drafts is not None:
            self._requests_without[event.without_drafts].inc()

    def done(self, event: StepDone) -> None:
        drafts = event.drafts
        self._drafting_s += event.drafting_s
        if drafts is None:
            self._without += len(event.inter_token_s)
            return
        self._asked += drafts.num_asked
        self._proposed += drafts.num_proposed
        if drafts.verified:
            self._verifying_s += event.forward_s + event.sampling_s
        # A row of a sequence that ended meanwhile is among the drafts, and not among those with tokens.
        num_verifying = _add(self._verified, drafts.verified)
        self._without += max(0, len(event.inter_token_s) - num_verifying)
        _add(self._tried, drafts.tried)
        _add(self._accepted, drafts.accepted)

    def collect(self) -> Iterator[Metric]:
        total = _weighted(self._accepted)
        for name, text, value in (
            ("num_drafts", "Drafts verified, one a row and step", sum(self._verified)),
            ("num_draft_tokens", "Draft tokens verified", _weighted(self._verified)),
            ("num_accepted_tokens", "Draft tokens accepted", total),
            ("num_asked_tokens", "Draft tokens that the drafter might give", self._asked),
            ("num_proposed_tokens", "Draft tokens that it gave", self._proposed),
            ("drafting_seconds", "Drafting", self._drafting_s),
            ("verifying_seconds", "Forward and sampling of steps with drafts", self._verifying_s),
        ):
            family = CounterMetricFamily(f"{PREFIX}spec_decode_{name}", text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family
        yield self._by_position("num_accepted_tokens_per_pos", "Accepted", self._accepted)
        yield self._by_position(
            "num_tried_tokens_per_pos", "Compared: all before it was right", self._tried
        )
        without = self._without
        yield self._histogram(
            "chosen_tokens",
            "Draft tokens verified with a decoding sequence in a step, 0 included",
            [self._verified[0] + without, *self._verified[1:]],
        )
        yield self._histogram(
            "tokens_per_step",
            "Tokens that a step gave a decoding sequence",
            [0, self._accepted[0] + without, *self._accepted[1:]],
        )

    def _by_position(self, name: str, text: str, counts: Sequence[int]) -> Metric:
        """Of so many drafts with each length, those that have a position, 0 for the first."""
        family = CounterMetricFamily(
            f"{PREFIX}spec_decode_{name}", text, labels=(*LABELS, "position")
        )
        left = sum(counts)
        for position in range(self._num_nodes):
            left -= counts[position]
            family.add_metric((*self._labels, str(position)), left)
        return family

    def _histogram(self, name: str, text: str, counts: Sequence[int]) -> Metric:
        family = HistogramMetricFamily(f"{PREFIX}spec_decode_{name}", text, labels=LABELS)
        bounds = [bound for bound in _FEW_TOKENS if bound < len(counts) - 1] + [len(counts) - 1]
        buckets = [(f"{bound:.1f}", sum(counts[: bound + 1])) for bound in bounds]
        family.add_metric(self._labels, [*buckets, ("+Inf", sum(counts))], _weighted(counts))
        return family


def _add(totals: list[int], counts: Sequence[int]) -> int:
    """Adds counts to totals of as many entries or more; returns their sum."""
    for value, count in enumerate(counts):
        totals[value] += count
    return sum(counts)


def _weighted(counts: Sequence[int]) -> int:
    return sum(value * count for value, count in enumerate(counts))
