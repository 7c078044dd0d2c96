import asyncio
import os
import signal
import subprocess
import sys

from parti.clock import Deadline, SimulatedClock, SystemClock, seeded


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


def test_the_same_seed_gives_the_same_run() -> None:
    assert [seeded(5).random() for _ in range(3)] == [seeded(5).random() for _ in range(3)]
