"""Name look-ups that hang, are late or are stale, and what they cost healthy names."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from parti.delivery import lookups
from parti.delivery.guard import AddrInfo
from parti.delivery.lookups import LookupLate, Lookups, is_definite
from parti.testing import eventually


class Resolver:
    """Answers at once, but for names that begin with "hang": those when they are let go."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.let_go = threading.Event()
        self.fails: dict[str, OSError] = {}

    def __call__(self, host: str) -> Sequence[AddrInfo]:
        self.asked[host] += 1
        if host.startswith("hang"):
            self.let_go.wait(60)
        if host in self.fails:
            raise self.fails[host]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]


@pytest.fixture
def resolver() -> Iterator[Resolver]:
    made = Resolver()
    yield made
    made.let_go.set()


async def test_names_that_hang_cost_the_others_nothing(resolver: Resolver) -> None:
    names = Lookups(0.2, resolver)
    hanging = [asyncio.create_task(names(f"hang{number}")) for number in range(32)]
    await eventually(lambda: len(resolver.asked) == 32)
    for number in range(200):
        assert await names(f"well{number}")
    late = await asyncio.gather(*hanging, return_exceptions=True)
    assert all(isinstance(answer, LookupLate) for answer in late)
    # They were late: whoever asks again hears so at once, and no second thread hangs.
    for number in range(32):
        with pytest.raises(LookupLate):
            await names(f"hang{number}")
    assert max(resolver.asked.values()) == 1
    # Any number of them leaves threads to the others.
    more = [asyncio.create_task(names(f"hang-more{number}")) for number in range(100)]
    await asyncio.wait(more)
    assert await names("well-again")
    resolver.let_go.set()
    await eventually(lambda: "running=0" in repr(names))
    assert await names("hang0")


async def test_a_late_answer_counts_when_it_comes(resolver: Resolver) -> None:
    names = Lookups(0.05, resolver)
    with pytest.raises(LookupLate) as late:
        await names.known("hang")
    assert late.value.wait > 0
    resolver.let_go.set()
    await eventually(lambda: "running=0" in repr(names))
    await names.known("hang")
    assert resolver.asked["hang"] == 1


async def test_many_requests_for_one_name_are_one_look_up(resolver: Resolver) -> None:
    names = Lookups(30, resolver)
    waiting = [asyncio.create_task(names("hang")) for _ in range(50)]
    await eventually(lambda: resolver.asked["hang"] == 1)
    resolver.let_go.set()
    assert all(await asyncio.gather(*waiting))
    assert resolver.asked["hang"] == 1


async def test_what_was_known_is_used_while_it_cannot_be_looked_up(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Lookups(30, resolver)
    await names("well")
    monkeypatch.setattr(lookups, "_FRESH", 0.0)
    monkeypatch.setattr(lookups, "_REFRESH", 0.01)
    resolver.fails["well"] = socket.gaierror(socket.EAI_AGAIN, "for now")
    for _ in range(3):
        assert await names("well")
    monkeypatch.setattr(lookups, "_STALE", 0.0)
    with pytest.raises(LookupLate):
        await names("well")


async def test_that_there_is_no_such_name_is_an_answer_and_any_other_failure_is_none(resolver: Resolver) -> None:
    names = Lookups(30, resolver)
    resolver.fails["none"] = socket.gaierror(socket.EAI_NONAME, "no")
    resolver.fails["again"] = socket.gaierror(socket.EAI_AGAIN, "for now")
    resolver.fails["files"] = OSError(24, "Too many open files")
    for _ in range(2):
        with pytest.raises(socket.gaierror) as none:
            await names("none")
        assert is_definite(none.value)
        for name in ("again", "files"):
            with pytest.raises(LookupLate):
                await names(name)
    assert resolver.asked == {"none": 1, "again": 1, "files": 1}  # none of them is asked in a circle
