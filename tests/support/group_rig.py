"""Groups and their Python members for blocking tests: an event loop in a thread, and what each member handled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parti.groups import (
    ConsumerTemplate,
    ElasticGroups,
    MemberOptions,
    PartitioningFilter,
    StaticGroups,
    elastic_consume,
    static_consume,
)
from parti.testing import eventually_blocking
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions

WITHIN = 90
ACK_WAIT = 15.0  # no test waits for it; with a short one, a process that stalls would lose its pin


class Rig:
    """A connection with its own event loop."""

    def __init__(self, url: str) -> None:
        self.options = ConnectOptions(servers=(url,))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.connection = self.do(connect(self.options))

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WITHIN)

    def close(self) -> None:
        self.do(self.connection.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Group:
    """A group `g` on a stream: the messages published for its members, and what Python and Spark members handled."""

    def __init__(self, rig: Rig, stream: Any, kind: str) -> None:
        self.rig, self.stream, self.kind = rig, stream, kind
        self.groups: Any = (ElasticGroups if kind == "elastic" else StaticGroups)(rig.connection)
        self.python: list[tuple[str, int]] = []
        self.spark: list[tuple[str, int]] = []
        self.spark_rows: list[dict[str, Any]] = []
        self.published: list[tuple[str, int]] = []
        self.sent = 0

    @classmethod
    def elastic(cls, rig: Rig, stream: Any, *members: str) -> Group:
        """An elastic group with eight partitions, by the second token of the subject."""
        group = cls(rig, stream, "elastic")
        filters = [PartitioningFilter(f"{stream.name}.*", (1,))]
        rig.do(group.groups.create(stream.name, "g", max_members=8, filters=filters))
        rig.do(group.groups.add_members(stream.name, "g", members))
        return group

    @classmethod
    def static(cls, rig: Rig, stream: Any) -> Group:
        """A static group with four partitions; m1 has the first two, and only its messages count as published."""
        group = cls(rig, stream, "static")
        rig.do(group.groups.create(stream.name, "g", max_members=4, members=["m1", "m2"]))
        return group

    @contextmanager
    def member(self, name: str, template: ConsumerTemplate | None = None) -> Iterator[Any]:
        """A Python member; each handled message is recorded as (subject, number)."""

        async def handle(message: Any) -> None:
            self.python.append((message.subject, int(message.data)))

        join = elastic_consume if self.kind == "elastic" else static_consume
        options = MemberOptions(template=template or ConsumerTemplate(ack_wait=ACK_WAIT))
        member = self.rig.do(join(self.rig.connection, self.stream.name, "g", name, handle, options))
        try:
            yield member
        finally:
            self.rig.do(member.stop())

    def publish(self, count: int) -> None:
        """Publish `count` more numbered messages over twenty keys; when this returns the members' stream has them."""
        name, first = self.stream.name, self.sent + 1
        self.sent += count
        frames = []
        for number in range(first, self.sent + 1):
            subject = f"{name}.k{number % 20}"
            if self.kind == "elastic" or number % 4 < 2:
                self.published.append((subject, number))
            prefix = "" if self.kind == "elastic" else f"{number % 4}."
            frames.append(f"PUB {prefix}{subject} {len(str(number))}\r\n{number}\r\n".encode())
        self.stream.connection.send(b"".join(frames))
        eventually_blocking(lambda: self.state()["last_seq"] >= self.sent, WITHIN, "all are stored")

    def state(self) -> dict[str, Any]:
        """The state of the stream that members read."""
        queue = f"{self.stream.name}-g" if self.kind == "elastic" else self.stream.name
        return dict(self.stream.connection.api(f"STREAM.INFO.{queue}")["state"])

    def messages_left(self) -> int:
        return int(self.state()["messages"])

    def all_handled(self) -> bool:
        return len(self.python) + len(self.spark) >= len(self.published)

    def wait_all_handled(self) -> None:
        eventually_blocking(self.all_handled, WITHIN, "all is handled")

    def check(self) -> None:
        """Assert that every message was handled once, and by each side in order for its key."""
        assert sorted(self.spark + self.python) == sorted(self.published)
        for handled in (self.spark, self.python):
            highest: dict[str, int] = {}
            for subject, number in handled:
                assert number > highest.get(subject, 0)
                highest[subject] = number
