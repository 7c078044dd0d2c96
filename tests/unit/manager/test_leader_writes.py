"""The leader's writes in flight: never two for one key, never the same twice, and no wanted write is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from parti.manager.leader_writes import LeaderWrites, Tell


class Server:
    """Answers when told to; notes what it was asked, and how much at once."""

    def __init__(self, limit: int = 8) -> None:
        self.asked: list[tuple[str, int]] = []
        self.told: list[tuple[str, int]] = []
        self.most = 0
        self.follow_up: dict[tuple[str, int], int] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.open: dict[tuple[str, int], asyncio.Future[None]] = {}
        self.writes: LeaderWrites[tuple[str, int]] = LeaderWrites(self.perform, self.spawn, limit=limit)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def want(self, key: str, value: int) -> None:
        self.writes.want(key, (key, value))

    async def perform(self, wish: tuple[str, int]) -> Tell | None:
        self.asked.append(wish)
        assert wish[0] not in [key for key, _ in self.open]
        self.open[wish] = asyncio.get_running_loop().create_future()
        self.most = max(self.most, len(self.open))
        try:
            await self.open[wish]
        finally:
            del self.open[wish]

        def tell() -> None:
            self.told.append(wish)
            if wish in self.follow_up:
                self.want(wish[0], self.follow_up[wish])

        return tell

    async def answer(self, key: str, value: int) -> None:
        self.open[key, value].set_result(None)
        await self.turns()

    async def turns(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_what_is_on_its_way_is_not_sent_again() -> None:
    server = Server()
    for _ in range(100):
        server.want("p", 1)
        await server.turns()
    await server.answer("p", 1)
    assert server.asked == server.told == [("p", 1)]


async def test_the_newest_wish_replaces_the_one_that_waits_and_follows_the_one_on_its_way() -> None:
    server = Server()
    server.want("p", 1)
    await server.turns()
    server.want("p", 2)
    server.want("p", 3)
    await server.turns()
    assert server.asked == [("p", 1)]
    await server.answer("p", 1)
    assert server.asked == [("p", 1), ("p", 3)]


async def test_what_is_wanted_because_of_an_answer_is_sent_at_once() -> None:
    """Dropping it as 'still on its way' is what stalled the fleet when a broker broke."""
    server = Server()
    server.follow_up["p", 1] = 2
    server.want("p", 1)
    await server.turns()
    await server.answer("p", 1)
    assert server.asked == [("p", 1), ("p", 2)]


async def test_a_wish_that_is_taken_back_for_the_one_on_its_way_is_not_sent() -> None:
    server = Server()
    server.want("p", 1)
    await server.turns()
    server.want("p", 2)
    server.want("p", 1)
    await server.answer("p", 1)
    assert server.asked == [("p", 1)]


async def test_no_more_than_the_limit_are_on_their_way_and_all_have_their_turn() -> None:
    server = Server(limit=3)
    for n in range(20):
        server.want(f"p{n}", 0)
    while True:
        await server.turns()
        if not server.open:
            break
        await server.answer(*next(iter(server.open)))
    assert server.most == 3
    assert server.told == [(f"p{n}", 0) for n in range(20)]


async def test_a_key_whose_write_was_cancelled_is_free_again() -> None:
    server = Server()
    server.want("p", 1)
    await server.turns()
    server.open["p", 1].cancel()
    await server.turns()
    server.want("p", 1)
    await server.turns()
    assert server.asked == [("p", 1), ("p", 1)]
    assert server.told == []


async def test_after_the_term_nothing_that_waits_is_sent() -> None:
    server = Server(limit=1)
    server.want("p", 1)
    server.want("q", 1)
    server.want("p", 2)
    await server.turns()
    server.writes.forget()
    await server.answer("p", 1)
    assert server.asked == [("p", 1)]
    assert repr(server.writes) == "<LeaderWrites under_way=0 waiting=0>"
