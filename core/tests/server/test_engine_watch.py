"""The two clocks, wound by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pegboard.engine.core import EngineCore
from pegboard.interfaces.executor import Doing, Sign, WorkerHealth
from pegboard.server.engine_process import Pulse
from pegboard.server.engine_watch import START_S, TICK_S, EngineWatch
from pegboard.server.messages import Alive, decode_alive


def sign(doing: Doing, age_s: float = 0.0, worst_step_s: float = 0.0) -> Alive:
    return Alive(Sign(doing=doing, step_id=7, age_s=age_s), worst_step_s)


def wait(watch: EngineWatch, seconds: float) -> None:
    for _ in range(round(seconds / TICK_S)):
        watch.tick(TICK_S)


@pytest.mark.parametrize(
    ("last", "limit_s"),
    [(None, START_S), (sign("starting"), START_S), (sign("idle"), 30), (sign("step"), 30)],
)
def test_silence_is_told_of_and_later_ends_the_engine(last: Alive | None, limit_s: float) -> None:
    watch = EngineWatch(silence_s=10, deadline_s=30)
    if last is not None:
        watch.hear(last)
    wait(watch, 9)
    assert watch.silent() is None and watch.lost() is None
    wait(watch, 2)
    said = watch.silent()
    assert said is not None and "silent for 11 s" in said
    assert last is None or str(last.sign) in said
    wait(watch, limit_s - 12)
    assert watch.lost() is None
    wait(watch, 2)
    assert watch.lost() is not None


def test_who_is_silent_from_the_end_of_its_start_on_is_lost_in_time() -> None:
    watch = EngineWatch(silence_s=10, deadline_s=30)
    watch.hear(sign("starting"))
    watch.started()
    wait(watch, 31)
    assert watch.lost() is not None


def test_a_start_may_be_silent_as_long_as_a_step_may_take() -> None:
    watch = EngineWatch(silence_s=10, deadline_s=2 * START_S)
    wait(watch, 2 * START_S - 1)
    assert watch.lost() is None
    wait(watch, 2)
    assert watch.lost() is not None


@pytest.mark.parametrize("last", [None, sign("starting").sign])
def test_a_worker_that_starts_may_be_silent_too(last: Sign | None) -> None:
    watch = EngineWatch(silence_s=10, deadline_s=30)
    for silence_s, is_lost in ((START_S - 1, False), (START_S + 1, True)):
        worker = WorkerHealth(rank=1, sign=last, silence_s=silence_s)
        watch.hear(Alive(sign("starting").sign, 0.0, (worker,)))
        silent, lost = watch.silent(), watch.lost()
        assert silent is not None and silent.startswith("worker 1 has been silent for")
        assert (lost is not None) == is_lost


def test_who_speaks_again_was_not_lost() -> None:
    watch = EngineWatch(silence_s=10, deadline_s=30)
    wait(watch, 29)
    assert watch.silent() is not None
    watch.hear(sign("idle"))
    assert watch.silent() is None
    wait(watch, 9)
    assert watch.silent() is None and watch.lost() is None


@pytest.mark.parametrize(("worst_s", "limit_s"), [(0.0, 30), (1.4, 30), (2.0, 40), (100.0, 2000)])
def test_a_step_may_take_longer_where_steps_took_long(worst_s: float, limit_s: float) -> None:
    watch = EngineWatch(silence_s=10, deadline_s=30)
    watch.hear(sign("step", limit_s - 1, worst_s))
    assert watch.lost() is None
    watch.hear(sign("step", limit_s + 1, worst_s))
    lost = watch.lost()
    assert lost is not None and "step 7 hangs" in lost


def test_a_step_grows_old_while_nothing_is_heard() -> None:
    watch = EngineWatch(silence_s=10, deadline_s=30)
    watch.hear(sign("step", 25))
    wait(watch, 6)
    assert watch.silent() is None
    lost = watch.lost()
    assert lost is not None and "hangs: it has taken 31 s" in lost


def test_rest_and_the_start_take_as_long_as_they_like() -> None:
    watch = EngineWatch(silence_s=10, deadline_s=30)
    resting: tuple[Doing, ...] = ("starting", "idle")
    for doing in resting:
        watch.hear(sign(doing, 10_000))
        assert watch.lost() is None


def test_what_the_server_itself_slept_is_nobodys_silence() -> None:
    watch = EngineWatch(silence_s=10, deadline_s=30)
    watch.hear(sign("idle"))
    watch.tick(3600)
    assert watch.silent() is None and watch.lost() is None


def test_a_worker_that_ended_or_is_silent_is_named() -> None:
    watch = EngineWatch(silence_s=10, deadline_s=30)
    idle = sign("idle").sign
    for silence_s, is_silent, is_lost in (
        (9.0, False, False),
        (11.0, True, False),
        (31.0, True, True),
    ):
        worker = WorkerHealth(rank=1, sign=idle, silence_s=silence_s)
        watch.hear(Alive(idle, 0.0, (worker,)))
        silent, lost = watch.silent(), watch.lost()
        assert (silent is not None, lost is not None) == (is_silent, is_lost)
        assert silent is None or silent.startswith(
            f"worker 1 has been silent for {silence_s:.0f} s"
        )
    ended = WorkerHealth(rank=1, sign=idle, silence_s=0.0, ended="worker 1 was killed")
    watch.hear(Alive(idle, 0.0, (ended,)))
    assert watch.lost() == "worker 1 was killed"


def exits() -> Any:
    raise SystemExit("no \ud800 more")


UNWRITABLE = WorkerHealth(rank=0, sign=None, silence_s=0.0, ended="\ud800")


@pytest.mark.parametrize(
    "health",
    [exits, *(lambda answer=answer: answer for answer in (None, "well", ("well",), (UNWRITABLE,)))],
)
def test_an_executor_that_cannot_say_how_its_workers_are_is_named(health: Any) -> None:
    engine = SimpleNamespace(health=health)
    pulse = Pulse()
    assert decode_alive(pulse.message()).workers == ()
    pulse.watch(cast(EngineCore, engine))
    (worker,) = decode_alive(pulse.message()).workers
    assert worker.ended.startswith("the executor cannot say how its workers are: ")
