"""Streams with known content for range reads: the published messages, and the result of a complete read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from parti.errors import NoResponders
from parti.testing import eventually_blocking, insist_blocking
from parti.wire.blocking import BlockingConnection

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Message:
    subject: str
    data: bytes
    headers: Headers = ()

    def frame(self) -> bytes:
        if not self.headers:
            return b"PUB %s %d\r\n%s\r\n" % (self.subject.encode(), len(self.data), self.data)
        block = b"NATS/1.0\r\n" + b"".join(f"{key}: {value}\r\n".encode() for key, value in self.headers) + b"\r\n"
        sizes = (self.subject.encode(), len(block), len(block) + len(self.data))
        return b"HPUB %s %d %d\r\n" % sizes + block + self.data + b"\r\n"


def create(connection: BlockingConnection, stream: str, **config: Any) -> None:
    """Create a stream on `<stream>.>`; with replicas Direct Get is on, as the range reader's small path needs it."""
    body = {"name": stream, "subjects": [f"{stream}.>"], "allow_direct": True, **config}
    insist_blocking(lambda: connection.api(f"STREAM.CREATE.{stream}", body), what="the stream is created")


def publish(connection: BlockingConnection, stream: str, messages: Iterable[Message]) -> list[Message]:
    """Store the messages in this order; after this returns the stream holds them all."""
    published = list(messages)
    before = last_sequence(connection, stream)
    for start in range(0, len(published), 500):
        connection.send(b"".join(message.frame() for message in published[start : start + 500]))
    eventually_blocking(lambda: last_sequence(connection, stream) == before + len(published), 60.0, "all stored")
    return published


def publish_acked(connection: BlockingConnection, message: Message) -> int:
    """Store one message; returns its sequence as the stream's leader acknowledged it.

    While a cluster elects a leader, or a node does not know the stream yet, no server stores the message: it is resent.
    """

    def acked() -> int:
        try:
            answer = json.loads(connection.request(message.subject, message.data).data)
        except NoResponders:
            return 0
        return int(answer["seq"])

    return eventually_blocking(acked, 60.0, "somebody takes the message")


def last_sequence(connection: BlockingConnection, stream: str) -> int:
    return int(insist_blocking(lambda: connection.api(f"STREAM.INFO.{stream}"))["state"]["last_seq"])


def delete(connection: BlockingConnection, stream: str, sequences: Iterable[int]) -> None:
    for sequence in sequences:
        connection.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True})


def consumers(connection: BlockingConnection, stream: str) -> list[str]:
    return list(connection.api(f"CONSUMER.NAMES.{stream}")["consumers"] or [])


def varied(stream: str, count: int, *, size: int = 40, subjects: int = 20) -> Iterator[Message]:
    """Messages with and without headers, some empty, some that look like frames; all are different."""
    for index in range(count):
        match index % 7:
            case 0:
                data = b""
            case 1:
                data = b"\r\nMSG a 1 5\r\nhello\r\n" + b"%d" % index
            case _:
                data = (b"%d " % index) * (size // len(b"%d " % index))
        headers: Headers = (("k", str(index)), ("k", "again"), ("empty", "")) if index % 3 == 0 else ()
        yield Message(f"{stream}.k{index % subjects}", data, headers)


def rows(batches: Iterable[pa.RecordBatch]) -> list[tuple[int, Message]]:
    """The messages that a read returned, in order."""
    found = []
    for batch in batches:
        for row in batch.to_pylist():
            headers = tuple((entry["key"], entry["value"].decode()) for entry in row["headers"] or ())
            found.append((row["sequence"], Message(row["subject"], row["data"], headers)))
    return found


def numbered(messages: Iterable[Message], first: int = 1) -> list[tuple[int, Message]]:
    """The messages that a complete read must return."""
    return list(enumerate(messages, start=first))
