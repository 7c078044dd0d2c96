import ast
import asyncio
import random
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from statistics import median, pstdev

import pytest

import parti
import parti_lab
from parti.backoff import Backoff, retry
from parti.clock import SimulatedClock
from parti.errors import AuthFailed, ConfigError, PartiError, RequestTimeout


def endless(seed: int) -> Backoff:
    return Backoff(max_tries=None, rng=random.Random(seed))


def waits(seed: int, count: int) -> list[float]:
    return list(islice(endless(seed).delays(), count))


def test_the_median_wait_grows_at_every_step_until_the_cap() -> None:
    samples = [waits(seed, 12) for seed in range(400)]
    medians = [median(step) for step in zip(*samples, strict=True)]
    growing = medians[:6]
    assert all(later > 1.35 * earlier for earlier, later in pairwise(growing))
    # The Go library's formula settles at 2.5 x base = 0.5 s; this one must come close to the cap.
    assert medians[-1] > 3.1


def test_no_wait_is_shorter_than_the_base_or_longer_than_the_cap() -> None:
    for seed in range(200):
        assert all(0.2 <= wait <= 5.0 for wait in waits(seed, 40))


def test_before_the_cap_is_near_every_wait_is_longer_than_the_one_before() -> None:
    for seed in range(100):
        first = [wait for wait in waits(seed, 12) if wait <= 5.0 / 2.2]
        assert first == sorted(first)


@pytest.mark.parametrize("step", [0, 1, 5, 30])
def test_workers_are_spread_by_more_than_fifty_milliseconds_at_every_step(step: int) -> None:
    assert pstdev([waits(seed, step + 1)[step] for seed in range(300)]) >= 0.05


def test_any_three_workers_start_their_retries_apart() -> None:
    for trio in range(60):
        starts = [sum(waits(trio * 3 + worker, 5)) for worker in range(3)]
        assert len(set(starts)) == 3
    spreads = [pstdev([sum(waits(trio * 3 + worker, 5)) for worker in range(3)]) for trio in range(60)]
    assert median(spreads) >= 0.05


def test_the_same_seed_gives_the_same_waits() -> None:
    assert waits(7, 20) == waits(7, 20)
    assert waits(7, 20) != waits(8, 20)


def test_six_tries_have_five_waits_between_them() -> None:
    assert len(list(Backoff(rng=random.Random(1)).delays())) == 5
    assert list(Backoff(max_tries=1).delays()) == []


@pytest.mark.parametrize(
    "backoff", [{"base": 0.0}, {"base": 6.0}, {"multiplier": 1.0}, {"max_tries": 0}, {"cap": -1.0}]
)
def test_a_backoff_that_cannot_work_is_refused(backoff: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Backoff(**backoff)  # type: ignore[arg-type]


class Flaky:
    """Fails a number of times, then answers; notes at what time it was called."""

    def __init__(self, clock: SimulatedClock, failures: int, error: PartiError) -> None:
        self.clock, self.failures, self.error = clock, failures, error
        self.called_at: list[float] = []

    async def __call__(self) -> str:
        self.called_at.append(self.clock.now())
        if len(self.called_at) <= self.failures:
            raise self.error
        return "done"


async def run_on(clock: SimulatedClock, task: "asyncio.Task[str]") -> None:
    for _ in range(3000):
        if task.done():
            return
        clock.advance(0.01)
        await asyncio.sleep(0)
    raise AssertionError("the task did not end within 30 simulated seconds")


async def test_a_retriable_error_is_tried_again_after_the_waits_of_the_backoff() -> None:
    clock = SimulatedClock()
    op = Flaky(clock, 3, RequestTimeout("no answer"))
    seen: list[tuple[int, float]] = []
    backoff = Backoff(rng=random.Random(3))
    task = asyncio.create_task(
        retry(op, backoff=backoff, clock=clock, on_retry=lambda tries, wait, _: seen.append((tries, wait)))
    )
    await run_on(clock, task)
    assert task.result() == "done"
    assert [tries for tries, _ in seen] == [1, 2, 3]
    for (_, wait), before, after in zip(seen, op.called_at, op.called_at[1:], strict=False):
        assert after - before == pytest.approx(wait, abs=0.03)


async def test_the_last_error_is_raised_after_the_last_try_and_not_before() -> None:
    clock = SimulatedClock()
    op = Flaky(clock, 99, RequestTimeout("no answer"))
    task = asyncio.create_task(retry(op, backoff=Backoff(rng=random.Random(4)), clock=clock))
    await run_on(clock, task)
    assert isinstance(task.exception(), RequestTimeout)
    assert len(op.called_at) == 6


async def test_a_final_error_is_raised_at_once() -> None:
    clock = SimulatedClock()
    op = Flaky(clock, 99, AuthFailed("wrong password"))
    with pytest.raises(AuthFailed):
        await retry(op, backoff=Backoff(), clock=clock)
    assert len(op.called_at) == 1


async def test_the_caller_may_decide_what_is_worth_another_try() -> None:
    clock = SimulatedClock()
    op = Flaky(clock, 99, RequestTimeout("no answer"))
    with pytest.raises(RequestTimeout):
        await retry(op, backoff=Backoff(), clock=clock, classify=lambda _: False)
    assert len(op.called_at) == 1


async def test_a_cancelled_retry_stops_waiting() -> None:
    clock = SimulatedClock()
    op = Flaky(clock, 99, RequestTimeout("no answer"))
    task = asyncio.create_task(retry(op, backoff=Backoff(), clock=clock))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(op.called_at) == 1


def test_two_backoffs_share_no_randomness() -> None:
    one, other = Backoff(), Backoff()
    assert one.rng is not other.rng
    assert list(one.delays()) != list(other.delays())


def test_no_module_or_class_makes_randomness_that_all_its_users_would_share() -> None:
    """Made at import, a fork copies it: workers that should be spread would wait in step."""
    shared = []
    for package in (parti, parti_lab):
        for path in Path(package.__path__[0]).rglob("*.py"):
            tree = ast.parse(path.read_text())
            calls = [n for n in at_import(tree) if isinstance(n, ast.Call)]
            shared += [f"{path.name}:{n.lineno}" for n in calls if ast.unparse(n.func) in ("random.Random", "Random")]
    assert shared == []


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported: all of it but the bodies of its functions."""
    for field, value in ast.iter_fields(node):
        if isinstance(node, ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef) and field == "body":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from at_import(child)
