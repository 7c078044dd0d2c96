"""The range reader with an event loop: the same content, few batches waiting, and no thread left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from parti.errors import DataLoss, UsageError
from parti.testing import Direction, FaultProxy, NatsServer, eventually
from parti.wire.async_ranges import AsyncRangeReader
from parti.wire.blocking import BlockingConnection
from parti.wire.errors import StreamNotFound
from parti.wire.options import ConnectOptions
from parti.wire.ranges import ReadEnded
from support.stored_input import Message, consumers, create, numbered, publish, rows, varied

COUNT = 40_000


@pytest.fixture
def large(connection: BlockingConnection, name: str) -> str:
    """The name of a stream of 40 MB."""
    create(connection, name)
    publish(connection, name, (Message(f"{name}.k", b"%08d" % index + bytes(1000)) for index in range(COUNT)))
    return name


@pytest.fixture
async def reader(server: NatsServer) -> AsyncIterator[AsyncRangeReader]:
    opened = AsyncRangeReader(ConnectOptions(servers=(server.url,)), patience=60)
    yield opened
    await opened.close()
    assert reading_threads() == []


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "parti-range"]


async def test_a_range_is_read_completely_and_the_reader_serves_many_reads(
    connection: BlockingConnection, reader: AsyncRangeReader, name: str
) -> None:
    create(connection, name)
    sent = publish(connection, name, varied(name, 3000))
    assert rows([batch async for batch in reader.read(name, 0, 3000)]) == numbered(sent)
    assert reading_threads() == []
    assert rows([batch async for batch in reader.read(name, 10, 60)]) == numbered(sent[10:60], 11)
    assert [batch async for batch in reader.read(name, 5, 5)] == []


async def test_errors_arrive_typed(connection: BlockingConnection, reader: AsyncRangeReader, name: str) -> None:
    with pytest.raises(StreamNotFound):
        [batch async for batch in reader.read(name, 0, 1)]
    create(connection, name, max_msgs=10)
    publish(connection, name, varied(name, 20))
    with pytest.raises(DataLoss) as caught:
        [batch async for batch in reader.read(name, 0, 20)]
    assert caught.value.first_available == 11
    with pytest.raises(UsageError, match="unknown columns"):
        [batch async for batch in reader.read(name, 0, 20, columns=("colour",))]
    assert sum([batch.num_rows async for batch in reader.read(name, 10, 20)]) == 10


async def test_a_slow_consumer_holds_the_read_back(server: NatsServer, large: str) -> None:
    """40 MB are asked for; with nobody taking them only a few batches and pulls may leave the server."""
    with FaultProxy(server.url) as proxy:
        reader = AsyncRangeReader(ConnectOptions(servers=(proxy.url,)))
        async with aclosing(reader.read(large, 0, COUNT, path="consumer")) as batches:
            first = await anext(batches)
            moved: list[int] = []

            def at_rest() -> bool:
                moved.append(proxy.bytes_to_client)
                return len(moved) > 20 and len(set(moved[-20:])) == 1

            await eventually(at_rest, 60.0, "no more bytes come")
            assert moved[-1] < 30 << 20
            assert reader._handover is not None
            assert reader._handover._ready.qsize() <= 2
            total = first.num_rows + sum([batch.num_rows async for batch in batches])
        assert total == COUNT
        await reader.close()
    assert reading_threads() == []


async def test_leaving_early_ends_the_thread_and_leaves_no_consumer(
    connection: BlockingConnection, reader: AsyncRangeReader, large: str
) -> None:
    for _ in range(3):
        async with aclosing(reader.read(large, 0, COUNT, path="consumer")) as batches:
            await anext(batches)
        assert reading_threads() == []
    await eventually(lambda: consumers(connection, large) == [], what="no consumer left")
    assert sum([batch.num_rows async for batch in reader.read(large, 0, 1000)]) == 1000


async def test_cancelling_a_read_that_waits_for_the_network_ends_its_thread_and_connection(
    server: NatsServer, large: str
) -> None:
    with FaultProxy(server.url) as proxy:
        reader = AsyncRangeReader(ConnectOptions(servers=(proxy.url,)))
        begun = asyncio.Event()

        async def read_all() -> None:
            async with aclosing(reader.read(large, 0, COUNT, path="direct")) as batches:
                async for _ in batches:
                    proxy.half_open(Direction.TO_CLIENT)
                    begun.set()

        task = asyncio.create_task(read_all())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert reading_threads() == []
        proxy.heal()
        await eventually(lambda: proxy.live == 0, what="the connection is gone")
        assert sum([batch.num_rows async for batch in reader.read(large, 0, 1000)]) == 1000
        await reader.close()


async def test_cancelling_mid_read_leaves_the_reader_usable(reader: AsyncRangeReader, large: str) -> None:
    for after in (0, 1, 3):
        taken = asyncio.Semaphore(0)

        async def read_all(counted: asyncio.Semaphore = taken) -> None:
            async with aclosing(reader.read(large, 0, COUNT)) as batches:
                async for _ in batches:
                    counted.release()

        task = asyncio.create_task(read_all())
        for _ in range(after):
            await taken.acquire()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert reading_threads() == []
    assert sum([batch.num_rows async for batch in reader.read(large, 0, COUNT)]) == COUNT


async def test_closing_ends_a_read_under_way_with_an_error_never_short(reader: AsyncRangeReader, large: str) -> None:
    begun = asyncio.Event()

    async def read_all() -> int:
        total = 0
        async for batch in reader.read(large, 0, COUNT):
            total += batch.num_rows
            begun.set()
            await asyncio.sleep(0.01)
        return total

    task = asyncio.create_task(read_all())
    await begun.wait()
    await reader.close()
    assert reading_threads() == []
    with pytest.raises(ReadEnded):
        await task
    with pytest.raises(UsageError, match="closed"):
        await anext(reader.read(large, 0, 1))


async def test_a_second_read_at_the_same_time_is_refused(reader: AsyncRangeReader, large: str) -> None:
    async with aclosing(reader.read(large, 0, COUNT)) as batches:
        await anext(batches)
        with pytest.raises(UsageError, match="under way"):
            await anext(reader.read(large, 0, 10))


async def test_the_loop_goes_on_while_a_range_is_read(reader: AsyncRangeReader, large: str) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counter = asyncio.create_task(count_turns())
    assert sum([batch.num_rows async for batch in reader.read(large, 0, COUNT)]) == COUNT
    counter.cancel()
    assert turns > 10
