"""A Spark query as a member of an elastic group beside a Go member; the test drives its reader as Spark does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from parti.groups import partitions_of, predict
from parti.spark.source.options import SourceOptions
from parti.spark.source.stream_reader import JetStreamStreamReader
from parti.testing import NatsServer, eventually
from parti.testing.reference import ReferenceUnavailable, build_peer
from parti.wire.connect import Connection
from support.go_peer import PEER, Bench, Go

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SEQUENCE = StructType([StructField("sequence", LongType())])
WITHIN = 90


@pytest.fixture
def go(server: NatsServer, tmp_path: Path) -> Iterator[Go]:
    try:
        binary = build_peer(tmp_path, [PEER])
    except ReferenceUnavailable as error:
        pytest.skip(f"the Go member cannot be built here: {error}")
    made = Go("peer", binary, tmp_path, server.url)
    yield made
    made.end()


class Query:
    """Batch after batch in a thread, until it is stopped."""

    def __init__(self, url: str, stream: str) -> None:
        options = {"servers": url, "stream": stream, "group": "g", "member": "spark", "groupAckWait": "15s"}
        self.reader = JetStreamStreamReader(SEQUENCE, SourceOptions.parse(options, streaming=True))
        self.seen: list[int] = []
        self._stopped = threading.Event()

    def run(self) -> None:
        start = self.reader.initialOffset()
        try:
            while not self._stopped.wait(0.01):  # as Spark between two triggers
                end = self.reader.latestOffset(start, self.reader.getDefaultReadLimit())
                for part in self.reader.partitions(start, end) if end != start else []:
                    for batch in self.reader.read(part):
                        self.seen += batch.column("sequence").to_pylist()
                start = end
        finally:
            self.reader.stop()

    def stop(self) -> None:
        self._stopped.set()


async def test_a_query_shares_a_group_with_a_go_member_and_takes_its_partitions_over(
    connection: Connection, go: Go, server: NatsServer, name: str
) -> None:
    bench = Bench(connection, name)
    await bench.create(["go", "spark"])
    go.consume("elastic", name, "g", "go")
    await bench.joined("go")
    record = (await bench.groups.get(name, "g")).record
    query = Query(server.url, name)

    async def publish(count: int) -> None:
        for number in range(bench.published, bench.published + count):
            await bench.api.publish(f"{name}.{number}", b"x")
        bench.published += count

        async def empty() -> bool:
            state = (await bench.api.stream_info(bench.queue))["state"]
            return bool(state["messages"] == 0 and state["last_seq"] >= bench.published)

        await eventually(empty, timeout=WITHIN, what="an empty work queue")

    running = asyncio.create_task(asyncio.to_thread(query.run))
    try:
        await publish(40)
        own = set(partitions_of(record, "spark"))
        assert query.seen == [n for n in range(1, 41) if predict(record, f"{name}.{n - 1}") in own]
        await bench.groups.drop_members(name, "g", ["go"])
        before = len(query.seen)
        await publish(40)
        assert len(query.seen) > before
        await eventually(lambda: _filters(bench), timeout=WITHIN, what="all partitions are the query's")
        before = len(query.seen)
        await publish(40)
        assert len(query.seen) == before + 40
        assert len(set(query.seen)) == len(query.seen)
    finally:
        query.stop()
        await running


async def _filters(bench: Bench) -> bool:
    names = await bench.api.consumer_names(bench.queue)
    if names != ["spark"]:
        return False
    return len((await bench.api.consumer_info(bench.queue, "spark"))["config"]["filter_subjects"]) == 6
