"""`parti bench group`: a member's throughput beside other clients, and the cost of many partitions with a backlog."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import nats
import nats.js.api as js_api

from parti.groups import (
    ConsumerTemplate,
    ElasticGroups,
    GroupMessage,
    HandlerOptions,
    MemberMapping,
    MemberOptions,
    Order,
    PartitioningFilter,
    elastic_consume,
)
from parti.progress import Advance
from parti.testing import NatsServer, eventually
from parti.testing.reference import ReferenceUnavailable, build_reference, reference_environment
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection, connect
from parti.wire.options import ConnectOptions
from parti_lab.bench.goals import Figure
from parti_lab.bench.load import create_stream, fill
from parti_lab.bench.report import Benchmark, ExperimentOption, RunContext

_SIZE, _KEYS, _PARTITIONS, _GROUP = 128, 2_000, 16, "g"
_SHARES = (1, 4, 16)


async def run(ctx: RunContext) -> dict[str, Figure]:
    """Each client drains the same messages; then members with more and more partitions drain a backlog on disk."""
    strict = int(ctx.options["strict_messages"]) // (2 if ctx.quick else 1)
    lanes = int(ctx.options["messages"]) // (2 if ctx.quick else 1)
    rounds = 2 if ctx.quick else 5
    figures: dict[str, Figure] = {"keys": _KEYS, "partitions": _PARTITIONS}
    with NatsServer() as server, ctx.progress("groups", total=4 * rounds + 2 * len(_SHARES)) as advance:
        options = ConnectOptions(servers=(server.url,))
        async with await connect(options) as connection:
            load = _Load(connection, options, advance)
            for name, count, member in (
                ("strict", strict, MemberOptions(template=ConsumerTemplate(ack_wait=5))),
                ("lanes", lanes, _lanes()),
            ):
                await load.prepare(name, count)
                rates = {"member": 0.0, "fetch": 0.0}
                for _ in range(rounds):
                    rates["member"] = max(rates["member"], await load.member(name, count, member))
                    rates["fetch"] = max(rates["fetch"], await load.fetch(name, count, 1 if name == "strict" else 500))
                figures |= {f"{name}_{client}_per_s": round(rate) for client, rate in rates.items()}
                figures[f"{name}_of_fetch"] = round(rates["member"] / rates["fetch"], 2)
            figures |= await load.reference("strict", strict)
            figures |= await load.cliff(lanes)
    return figures


def _lanes() -> MemberOptions:
    return MemberOptions(
        template=ConsumerTemplate(ack_wait=30, max_ack_pending=1_000), handlers=HandlerOptions(order=Order.KEY)
    )


class _Load:
    def __init__(self, connection: Connection, options: ConnectOptions, advance: Advance) -> None:
        self.connection, self.options, self.advance = connection, options, advance
        self.api = JetStreamApi(connection)
        self.groups = ElasticGroups(connection)

    async def prepare(self, stream: str, count: int, storage: str = "memory") -> None:
        await asyncio.to_thread(create_stream, self.options, stream, storage)
        await asyncio.to_thread(fill, self.options, stream, count, _SIZE, _KEYS)

    async def _queue(self, groups: ElasticGroups, stream: str, count: int) -> None:
        """A new group whose work queue holds all messages."""
        filters = [PartitioningFilter(f"{stream}.*", (1,))]
        await groups.create(stream, _GROUP, max_members=_PARTITIONS, filters=filters)

        async def filled() -> bool:
            return await self._left(stream) >= count

        ready: bool = await eventually(filled, timeout=120, what="the work queue")
        assert ready

    async def _drain(
        self, stream: str, count: int, options: MemberOptions, *, compact: bool = False, member: str = "m"
    ) -> float:
        """Messages per second of one member, from the first to the last."""
        seen, times = 0, [0.0, 0.0]
        done = asyncio.Event()

        async def handler(message: GroupMessage) -> None:  # noqa: ARG001
            nonlocal seen
            if not seen:
                times[0] = time.perf_counter()
            seen += 1
            if seen == count:
                times[1] = time.perf_counter()
                done.set()

        consumer = await elastic_consume(self.connection, stream, _GROUP, member, handler, options, compact=compact)
        try:
            async with asyncio.timeout(120):
                await done.wait()
        finally:
            await consumer.stop()
        return (count - 1) / (times[1] - times[0])

    async def member(self, stream: str, count: int, options: MemberOptions) -> float:
        await self._queue(self.groups, stream, count)
        await self.groups.add_members(stream, _GROUP, ["m"])
        rate = await self._drain(stream, count, options)
        await self.groups.delete(stream, _GROUP)
        self.advance(1)
        return rate

    async def fetch(self, stream: str, count: int, batch: int) -> float:
        """nats-py's `fetch` and `ack` over the same work queue, with the same limit of unacknowledged messages."""
        await self._queue(self.groups, stream, count)
        client = await nats.connect(list(self.options.servers))
        try:
            config = js_api.ConsumerConfig(
                name="f",
                ack_policy=js_api.AckPolicy.EXPLICIT,
                max_ack_pending=1 if batch == 1 else 1_000,
                filter_subjects=[f"{partition}.{stream}.*" for partition in range(_PARTITIONS)],
            )
            await client.jetstream().add_consumer(f"{stream}-{_GROUP}", config)
            subscription = await client.jetstream().pull_subscribe_bind("f", f"{stream}-{_GROUP}")
            seen, started = 0, time.perf_counter()
            while seen < count:
                for message in await subscription.fetch(min(batch, count - seen), timeout=10):
                    await message.ack()
                    seen += 1
            rate = count / (time.perf_counter() - started)
        finally:
            await client.close()
        await self.groups.delete(stream, _GROUP)
        self.advance(1)
        return rate

    async def reference(self, stream: str, count: int) -> dict[str, Figure]:
        """The reference's CLI as the member, if it can be built; else the reason."""
        with tempfile.TemporaryDirectory() as directory:
            try:
                binary = await asyncio.to_thread(build_reference, Path(directory))
            except ReferenceUnavailable as error:
                return {"reference": f"not measured: {error}"}
            await self._queue(self.groups, stream, count)
            await self.groups.add_members(stream, _GROUP, ["m"])
            environ = reference_environment(Path(directory), self.options.servers[0])
            arguments = ["elastic", "--sleep", "0s", "consume", stream, _GROUP, "m"]
            rate = await _timed(
                lambda: asyncio.create_subprocess_exec(
                    binary, *arguments, stdout=asyncio.subprocess.DEVNULL, env=environ
                ),
                lambda: self._left(stream),
                count,
            )
            await self.groups.delete(stream, _GROUP)
        return {"reference_per_s": round(rate)}

    async def _left(self, stream: str) -> int:
        return int((await self.api.stream_info(f"{stream}-{_GROUP}"))["state"]["messages"])

    async def cliff(self, count: int) -> dict[str, Figure]:
        """A member with 1, 4 and 16 of the partitions and a backlog on disk, in both layouts."""
        stream = "disk"
        await self.prepare(stream, count, "file")
        figures: dict[str, Figure] = {}
        for compact in (False, True):
            groups = ElasticGroups(self.connection, compact=compact)
            for share in _SHARES:
                await self._queue(groups, stream, count)
                # Partitions with the same remainder, as the compact layout assigns them to a member.
                mine = list(range(0, _PARTITIONS, _PARTITIONS // share)) if compact else list(range(share))
                rest = [partition for partition in range(_PARTITIONS) if partition not in mine]
                mapping = [MemberMapping("m", tuple(mine)), *([MemberMapping("rest", tuple(rest))] if rest else [])]
                await groups.set_mappings(stream, _GROUP, mapping)
                mapped = await self._pending(stream, mine)
                rate = await self._drain(stream, mapped, _lanes(), compact=compact)
                figures[f"{'compact' if compact else 'filters'}_{share}_per_s"] = round(rate)
                await groups.delete(stream, _GROUP)
                self.advance(1)
        figures["compact_gain_16"] = round(float(figures["compact_16_per_s"]) / float(figures["filters_16_per_s"]), 1)
        return figures

    async def _pending(self, stream: str, partitions: list[int]) -> int:
        """Messages of these partitions in the work queue."""
        found = 0
        async for page in self.api.stream_subjects(f"{stream}-{_GROUP}"):
            for subject, count in page.items():
                tokens = subject.split(".")
                number = int(tokens[tokens.index(stream) - 1])
                found += count if number in partitions else 0
        return found


async def _timed(
    start: Callable[[], Awaitable[asyncio.subprocess.Process]], left: Callable[[], Awaitable[int]], count: int
) -> float:
    """Messages per second of another program, measured by what is left in the work queue."""
    process = await start()
    try:

        async def moved() -> int:
            now = await left()
            return now if now < count else 0

        first: int = await eventually(moved, timeout=30, what="the first message")
        begun = time.perf_counter()

        async def empty() -> bool:
            return await left() == 0

        finished: bool = await eventually(empty, timeout=120, what="an empty work queue")
        assert finished
        return first / (time.perf_counter() - begun)
    finally:
        process.terminate()
        await process.wait()


BENCH = Benchmark(
    name="group",
    help="A group member beside the reference's CLI or nats-py fetch, and the cost of 1, 4 and 16 partitions on disk.",
    run=run,
    goals={"lanes_of_fetch": ">= 1", "compact_gain_16": ">= 2"},
    options=(
        ExperimentOption("strict_messages", 4_000, "messages handled strictly one after the other"),
        ExperimentOption("messages", 30_000, "messages handled in lanes, and of the backlog on disk"),
    ),
)
