"""Health shows records that delivery must store and cannot, until they are stored or belong to another process."""

from __future__ import annotations

import asyncio

import pytest

from parti.clock import SimulatedClock
from parti.config.deliver import DeliverSection
from parti.delivery.errors import LeaseLost
from parti.delivery.recorder import DeliveryRecorder
from parti.delivery.retrying import RetryWhileOwner
from parti.errors import TransientError
from parti.observe.metrics import NO_METRICS


class Owned:
    """A lease that somebody else may take."""

    lost = False

    def check(self) -> float:
        if self.lost:
            raise LeaseLost("another process has it")
        return 1.0


async def pass_time(clock: SimulatedClock) -> None:
    clock.advance(5.0)
    for _ in range(5):  # turns of the loop, in which whoever woke up goes on
        await asyncio.sleep(0)


@pytest.mark.parametrize("ends", ["stored", "lost"])
async def test_what_cannot_be_stored_for_long_shows_until_it_is_stored_or_lost(ends: str) -> None:
    clock, lease, away = SimulatedClock(), Owned(), True
    recorder = DeliveryRecorder(DeliverSection(), NO_METRICS, clock)

    async def store() -> str:
        if away:
            raise TransientError("the server is away")
        return "stored"

    storing = asyncio.create_task(RetryWhileOwner(lease, recorder, clock)(store))  # type: ignore[arg-type]
    for _ in range(8):
        await pass_time(clock)
        assert recorder.stuck() is None or clock.now() > 30
    assert "the server is away" in (recorder.stuck() or "")
    if ends == "stored":
        away = False
    else:
        lease.lost = True
    await pass_time(clock)
    assert recorder.stuck() is None
    if ends == "stored":
        assert await storing == "stored"
    else:
        with pytest.raises(LeaseLost):
            await storing
