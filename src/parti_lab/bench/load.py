"""The baselines of the benchmarks: a filled stream, the raw-socket bound, and nats-py's `fetch`.

The raw bound is a socket that receives the same deliveries and discards them; no client can be faster. Every comparison
is a ratio within one run on one server.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from uuid import uuid4

import nats
import nats.js.api as js_api

from parti.errors import ConnectionFailed
from parti.wire.blocking import BlockingConnection
from parti.wire.options import ConnectOptions

_CHUNK = 500  # messages between two awaited acks: without waiting, the server drops what it cannot queue


def create_stream(options: ConnectOptions, stream: str, storage: str, **config: object) -> None:
    """A new stream `stream` on the subjects `<stream>.>`."""
    with BlockingConnection.open(options) as connection:
        body = {
            "name": stream,
            "subjects": [f"{stream}.>"],
            "storage": storage,
            "allow_direct": True,
            "num_replicas": 1,
        }
        connection.api(f"STREAM.CREATE.{stream}", body | config)


def delete_stream(options: ConnectOptions, stream: str) -> None:
    with BlockingConnection.open(options) as connection:
        connection.api(f"STREAM.DELETE.{stream}")


def fill(
    options: ConnectOptions,
    stream: str,
    count: int,
    size: int,
    subjects: int = 2_000,
    advance: Callable[[int], None] = lambda _steps: None,
) -> float:
    """Store `count` messages of `size` bytes over `subjects` subjects; returns the acknowledged rate per second."""
    payload = bytes(range(256)) * (size // 256 + 1)
    payload = payload[:size].replace(b"\r", b" ").replace(b"\n", b" ")
    started = time.perf_counter()
    with BlockingConnection.open(options) as connection:
        for first in range(0, count, _CHUNK):
            last = min(first + _CHUNK, count) - 1
            connection.send(b"".join(_put(stream, n % subjects, payload) for n in range(first, last)))
            connection.request(f"{stream}.{last % subjects}", payload)
            advance(last - first + 1)
        stored = connection.api(f"STREAM.INFO.{stream}")["state"]["messages"]
    if stored != count:
        raise ConnectionFailed(f"stream {stream!r} holds {stored} of {count} messages: the server dropped some")
    return count / (time.perf_counter() - started)


def _put(stream: str, subject: int, payload: bytes) -> bytes:
    return b"PUB %s.%d %d\r\n%s\r\n" % (stream.encode(), subject, len(payload), payload)


def best_rate(count: int, runs: int, measure: Callable[[], None]) -> float:
    """The highest rate of several runs: the machine is shared, and disturbances only slow a run down."""
    best = 0.0
    for _ in range(runs):
        gc.collect()
        started = time.perf_counter()
        measure()
        best = max(best, count / (time.perf_counter() - started))
    return best


def raw_read(options: ConnectOptions, stream: str, size: int) -> None:
    """Receive the whole stream through an AckNone consumer and discard the bytes."""
    with BlockingConnection.open(options) as connection:
        consumer = f"raw-{uuid4().hex}"
        config = {"name": consumer, "ack_policy": "none", "deliver_policy": "all", "mem_storage": True}
        answer = connection.api(
            f"CONSUMER.CREATE.{stream}.{consumer}", {"stream_name": stream, "config": config, "action": "create"}
        )
        inbox = f"_INBOX.{uuid4().hex}"
        connection.subscribe(inbox)
        next_pull = f"{options.js_prefix}.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        _drain(connection, next_pull, inbox, int(answer["num_pending"]), size)


def _drain(connection: BlockingConnection, next_pull: str, inbox: str, total: int, size: int) -> None:
    """Keeps two pulls of 8 MB in flight, like the range reader: with more, the server cuts off a slow consumer.

    The last message of a pull is recognised by its reply subject, which ends in the number of messages left.
    """
    batch = (8 << 20) // (size + 128)
    ends = [*range(total - batch, 0, -batch), 0]
    buffer = bytearray(4 << 20)
    view, kept = memoryview(buffer), 64
    connection.socket.settimeout(connection.options.request_timeout)
    body = b'{"batch":%d,"expires":60000000000}' % batch
    for _ in ends[:2]:
        connection.publish(next_pull, body, inbox)
    asked, done = 2, 0
    while done < len(ends):
        got = connection.socket.recv_into(view[kept:])
        if not got:
            raise ConnectionFailed("the server closed the connection during the raw read")
        while done < len(ends) and buffer.find(b".%d %d\r\n" % (ends[done], size), 0, kept + got) >= 0:
            done += 1
            if asked < len(ends):
                connection.publish(next_pull, body, inbox)
                asked += 1
        buffer[:kept] = buffer[got : kept + got]  # a line may be split across two reads


def fetch_read(options: ConnectOptions, stream: str, count: int, batch: int = 500) -> None:
    """The same messages through nats-py's pull subscription: `fetch` with no acks and no conversion."""
    asyncio.run(_fetch_read(options, stream, count, batch))


async def _fetch_read(options: ConnectOptions, stream: str, count: int, batch: int) -> None:
    client = await nats.connect(list(options.servers))
    try:
        config = js_api.ConsumerConfig(ack_policy=js_api.AckPolicy.NONE, mem_storage=True)
        subscription = await client.jetstream().pull_subscribe(f"{stream}.>", stream=stream, config=config)
        received = 0
        while received < count:
            received += len(await subscription.fetch(min(batch, count - received), timeout=10))
    finally:
        await client.close()
