import asyncio
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.clock import Deadline, SimulatedClock, SystemClock, by_clock
from parti.delivery import names
from parti.delivery.park import came_due, due_of


async def test_simulated_sleepers_wake_in_the_order_of_their_time() -> None:
    clock = SimulatedClock()
    woken: list[str] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(name)

    async with asyncio.TaskGroup() as group:
        for name, seconds in (("late", 3.0), ("early", 1.0), ("middle", 2.0)):
            group.create_task(sleeper(name, seconds))
        await asyncio.sleep(0)
        clock.advance(0.5)
        await asyncio.sleep(0)
        assert woken == []
        clock.advance(5.0)
    assert woken == ["early", "middle", "late"]


async def test_a_sleep_of_nothing_returns_without_an_advance() -> None:
    await SimulatedClock().sleep(0)


async def test_a_cancelled_sleeper_does_not_disturb_the_others() -> None:
    clock = SimulatedClock()
    gone = asyncio.create_task(clock.sleep(1))
    stays = asyncio.create_task(clock.sleep(1))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    clock.advance(1)
    await stays
    assert gone.cancelled()


def test_a_step_of_the_wall_clock_does_not_move_deadlines() -> None:
    clock = SimulatedClock()
    deadline = Deadline.after(clock, seconds=10)
    clock.jump_wall(-3600)
    assert deadline.remaining == 10
    clock.advance(10)
    assert deadline.expired
    assert deadline.remaining == 0.0


def test_the_system_clock_counts_while_the_process_is_stopped() -> None:
    script = (
        "import sys; from parti.clock import SystemClock; c = SystemClock(); start = c.now();"
        "print('ready', flush=True); sys.stdin.readline(); print(c.now() - start)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        clock = SystemClock()
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        stopped = clock.now()
        while clock.now() - stopped < 0.2:
            os.sched_yield()
        child.send_signal(signal.SIGCONT)
        child.stdin.write("\n")
        child.stdin.flush()
        assert float(child.stdout.readline()) >= 0.2


class _Interrupted(SimulatedClock):
    """Others have the processor for a while at every look at it."""

    def __init__(self, pauses: list[float]) -> None:
        super().__init__(start=1_000.0)
        self._pauses = list(pauses)

    def _interrupt(self) -> None:
        self.advance(self._pauses.pop(0) if self._pauses else 0.0)

    def now(self) -> float:
        seen = super().now()
        self._interrupt()
        return seen

    def wall(self) -> float:
        seen = super().wall()
        self._interrupt()
        return seen


@given(pauses=st.lists(st.floats(0, 0.1), max_size=6), ahead=st.floats(-2, 2), which=st.integers(0, 2))
def test_nobody_comes_before_a_moment_because_the_clock_was_read_with_a_pause(
    pauses: list[float], ahead: float, which: int
) -> None:
    offset = 1_700_000_000.0 - 1_000.0
    clock = _Interrupted(pauses)
    moment = offset + 1_000.0 + ahead
    until = [
        lambda: by_clock(clock, moment),
        lambda: came_due(moment, clock),
        lambda: due_of({names.DUE: f"{moment:.6f}"}, clock),
    ][which]()
    least = min(moment, offset + 1_001.0) if which else moment  # what has come due waits for a second at most
    assert until + offset >= least - 1e-5
    assert until <= clock.now() + max(0.0, ahead) + 1e-5


@pytest.mark.parametrize("value", ["", "x", "nan", "inf", "-inf", "9" * 400])
def test_a_due_time_that_is_none_keeps_nothing_waiting_for_long(value: str) -> None:
    clock = SimulatedClock()
    assert not due_of({names.DUE: value}, clock) > clock.now() + 1
    assert not due_of({}, clock) > clock.now()
