"""`parti bench pull`: live pulling with explicit acks and 80 filters, and the whole worker on top of it.

Compared in the same run with a raw socket that only acknowledges (no client can be faster), and with nats-py's `fetch`
with an ack per message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from uuid import uuid4

import nats

from parti.errors import PartiError, UsageError
from parti.observe.prometheus import PrometheusMetrics
from parti.testing import NatsServer, NeverHappened, eventually_blocking
from parti.wire.acks import ACK_FRAME
from parti.wire.api import JetStreamApi
from parti.wire.blocking import BlockingConnection
from parti.wire.columns import Deliveries
from parti.wire.connect import connect
from parti.wire.live import LiveConnection
from parti.wire.options import ConnectOptions
from parti.wire.pull import LivePull, PullOwner, PullSettings, ack_frames
from parti.worker import Message, Partition, WorkerConfig, WorkerConsumer
from parti_lab.bench.goals import Figure
from parti_lab.bench.load import best_rate, create_stream, delete_stream, fill
from parti_lab.bench.report import Benchmark, ExperimentOption, RunContext

_SIZE = 128
_FILTERS = 80
_BATCH = 500
_MAX_ACK_PENDING = 5_000
_ACKS_WITHIN = 5.0  # seconds
_REPLY = re.compile(rb"(\$JS\.ACK\.\S+) \d+\r\n")


def run(ctx: RunContext) -> dict[str, Figure]:
    """Each client drains the same messages from a new durable, interleaved, best of several runs."""
    count = int(ctx.options["messages"]) // (2 if ctx.quick else 1)
    runs = 2 if ctx.quick else 5
    rates = {"raw": 0.0, "live": 0.0, "worker": 0.0, "fetch": 0.0}
    with NatsServer() as server, ctx.progress("pull", total=count + len(rates) * runs) as advance:
        options = ConnectOptions(servers=(server.url,))
        stream = f"bench-{uuid4().hex[:8]}"
        create_stream(options, stream, "memory")
        fill(options, stream, count, _SIZE, subjects=_FILTERS, advance=advance)
        clients: dict[str, Callable[[str], None]] = {
            "raw": lambda durable: _raw(options, stream, durable, count),
            "live": lambda durable: asyncio.run(_live(options, stream, durable, count)),
            "worker": lambda durable: asyncio.run(_worker(options, stream, durable, count)),
            "fetch": lambda durable: asyncio.run(_fetch(options, stream, durable, count)),
        }
        for _ in range(runs):
            for name, client in clients.items():
                durable = _create(options, stream)
                rates[name] = max(rates[name], best_rate(count, 1, lambda run=client, to=durable: run(to)))  # type: ignore[misc]
                _check_acked(options, stream, durable, count)
                advance(1)
        delete_stream(options, stream)
    return {
        "messages": count,
        "filters": _FILTERS,
        **{f"{name}_per_s": round(rate) for name, rate in rates.items()},
        "of_raw": round(rates["live"] / rates["raw"], 3),
        "of_fetch": round(rates["live"] / rates["fetch"], 1),
        "worker_of_raw": round(rates["worker"] / rates["raw"], 3),
        "worker_of_fetch": round(rates["worker"] / rates["fetch"], 1),
    }


def _create(options: ConnectOptions, stream: str) -> str:
    durable = f"d-{uuid4().hex[:8]}"
    config = {
        "durable_name": durable,
        "ack_policy": "explicit",
        "max_ack_pending": _MAX_ACK_PENDING,
        "filter_subjects": [f"{stream}.{n}" for n in range(_FILTERS)],
    }
    with BlockingConnection.open(options) as connection:
        connection.api(f"CONSUMER.CREATE.{stream}.{durable}", {"stream_name": stream, "config": config})
    return durable


def _check_acked(options: ConnectOptions, stream: str, durable: str, count: int) -> None:
    with BlockingConnection.open(options) as connection:
        # The server receives acks before it processes them: wait a moment.
        with contextlib.suppress(NeverHappened):
            call = f"CONSUMER.INFO.{stream}.{durable}"
            eventually_blocking(lambda: not connection.api(call)["num_ack_pending"], _ACKS_WITHIN)
        info = connection.api(f"CONSUMER.INFO.{stream}.{durable}")
        if info["num_pending"] or info["num_ack_pending"]:
            raise UsageError(
                f"{durable}: {info['num_pending']} of {count} not delivered, {info['num_ack_pending']} not acked"
            )
        connection.api(f"CONSUMER.DELETE.{stream}.{durable}")


def _raw(options: ConnectOptions, stream: str, durable: str, count: int) -> None:
    """The bound: find the reply subjects, send the acks of a read in one write, keep two pulls open."""
    with BlockingConnection.open(options) as connection:
        inbox = f"_INBOX.{uuid4().hex}"
        connection.subscribe(inbox)
        subject = f"{options.js_prefix}.CONSUMER.MSG.NEXT.{stream}.{durable}"
        body = json.dumps({"batch": _BATCH, "expires": 10_000_000_000}).encode()
        received, asked, rest = 0, 0, b""
        while received < count:
            while asked - received <= _BATCH and asked < count:
                connection.publish(subject, body, inbox)
                asked += _BATCH
            data = rest + connection.socket.recv(1 << 20)
            replies = _REPLY.findall(data)
            received += len(replies)
            connection.send(b"".join([ACK_FRAME % reply for reply in replies]))
            rest = data[data.rfind(b"\r\n") :]  # a line cut in two; a payload is never larger than this
        connection.ping()


async def _live(options: ConnectOptions, stream: str, durable: str, count: int) -> None:
    connection = await LiveConnection.open(options)
    done = asyncio.get_running_loop().create_future()
    received = 0

    def on_batch(deliveries: Deliveries) -> None:
        nonlocal received
        received += len(deliveries)
        connection.write(ack_frames(deliveries))
        if received >= count and not done.done():
            done.set_result(None)

    def on_trouble(error: PartiError) -> None:
        if not done.done():
            done.set_exception(error)

    pull = LivePull(connection, stream, durable, PullOwner(on_batch, on_trouble, lambda: 2 * _BATCH), PullSettings())
    pull.start()
    async with asyncio.timeout(60):
        await done
    pull.stop()
    await connection.close()


async def _worker(options: ConnectOptions, stream: str, durable: str, count: int) -> None:
    """The whole worker: lanes, a handler call per message, positions, acks, metrics."""
    done = asyncio.get_running_loop().create_future()
    handled = 0

    async def handle(message: Message) -> None:  # noqa: ARG001 - it only counts
        nonlocal handled
        handled += 1
        if handled == count and not done.done():
            done.set_result(None)

    config = WorkerConfig(
        stream=stream,
        consumer_prefix="d",
        subject_template=f"{stream}.{{partition}}",
        max_ack_pending=_MAX_ACK_PENDING,
        pull_batch_size=_BATCH,
        update_coalescing_window=0.0,
    )
    connection = await connect(options)
    try:
        worker = WorkerConsumer(JetStreamApi(connection), config, handle, metrics=PrometheusMetrics())
        async with worker, asyncio.timeout(60):
            partitions = [Partition((str(n),)) for n in range(_FILTERS)]
            await worker.update_worker_consumer(durable.removeprefix("d-"), partitions)
            await done
    finally:
        await connection.close()


async def _fetch(options: ConnectOptions, stream: str, durable: str, count: int) -> None:
    client = await nats.connect(list(options.servers))
    try:
        subscription = await client.jetstream().pull_subscribe_bind(durable, stream)
        received = 0
        while received < count:
            messages = await subscription.fetch(_BATCH, timeout=10)
            for message in messages:
                await message.ack()
            received += len(messages)
        await client.flush()
    finally:
        await client.close()


BENCH = Benchmark(
    name="pull",
    help="Live pull and the whole worker, explicit acks, 80 filters, beside the raw-socket bound and nats-py fetch.",
    run=run,
    goals={"of_raw": ">= 0.6", "of_fetch": ">= 3", "worker_of_raw": ">= 0.4", "worker_of_fetch": ">= 2"},
    options=(ExperimentOption("messages", 100_000, "messages to pull and acknowledge"),),
)
