"""Members of the Go reference beside our own, and their common group."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from parti.groups import (
    ConsumerTemplate,
    ElasticGroups,
    ElasticMember,
    GroupMessage,
    MemberOptions,
    PartitioningFilter,
    elastic_consume,
)
from parti.testing import eventually
from parti.testing.child import spawn
from parti.testing.reference import reference_environment
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection

PEER = Path(__file__).parents[1] / "interop" / "peer" / "main.go"


TEMPLATE = ConsumerTemplate(ack_wait=2)  # as `cg` has it: the same consumer, in every field


class Go:
    """A Go implementation and its command line. Its members consume until they are ended."""

    def __init__(self, name: str, binary: Path, directory: Path, url: str) -> None:
        self.name, self.binary, self.url = name, binary, url
        self.environ = reference_environment(directory, url)
        self.running: list[subprocess.Popen[bytes]] = []

    def consume(self, kind: str, stream: str, group: str, member: str) -> subprocess.Popen[bytes]:
        words = ["consume", kind, stream, group, member]
        if self.name == "reference":
            words = [kind, "--sleep", "2ms", "consume", stream, group, member]
        process = spawn(["/usr/bin/env", *self._environment(), str(self.binary), *self._server(), *words])
        self.running.append(process)
        return process

    def call(self, reference: list[str], peer: list[str], stdin: str = "") -> None:
        words = reference if self.name == "reference" else peer
        command = [str(self.binary), *self._server(), *words]
        subprocess.run(command, env=self.environ, input=stdin, text=True, check=True, capture_output=True, timeout=60)

    def _server(self) -> list[str]:
        return [] if self.name == "reference" else [self.url]

    def _environment(self) -> list[str]:
        return [f"XDG_CONFIG_HOME={self.environ['XDG_CONFIG_HOME']}"]

    def end(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.kill()
            process.communicate()


class Bench:
    """An elastic group on a fresh stream."""

    def __init__(self, connection: Connection, stream: str) -> None:
        self.connection, self.stream, self.queue = connection, stream, f"{stream}-g"
        self.api = JetStreamApi(connection)
        self.groups = ElasticGroups(connection)
        self.seen: list[int] = []
        self.published = 0

    async def stream_only(self) -> None:
        await self.api.stream_create({"name": self.stream, "subjects": [f"{self.stream}.*"]})

    async def create(self, members: list[str]) -> None:
        await self.stream_only()
        filters = [PartitioningFilter(f"{self.stream}.*", (1,))]
        await self.groups.create(self.stream, "g", max_members=6, filters=filters)
        await self.groups.add_members(self.stream, "g", members)

    async def join(self, member: str) -> ElasticMember:
        async def handler(message: GroupMessage) -> None:
            self.seen.append(message.sequence)

        options = MemberOptions(template=TEMPLATE)
        return await elastic_consume(self.connection, self.stream, "g", member, handler, options)

    async def publish(self, count: int = 30) -> list[str]:
        """Publish, wait until all of it is consumed, and return the subjects."""
        subjects = [f"{self.stream}.{n}" for n in range(self.published, self.published + count)]
        for subject in subjects:
            await self.api.publish(subject, b"x")
        self.published += count
        await self.drained()
        return subjects

    async def drained(self) -> None:
        async def empty() -> bool:
            info = await self.api.stream_info(self.queue)
            source = (info.get("sources") or [{}])[0]
            return bool(info["state"]["messages"] == 0 and info["state"]["last_seq"] >= self.published and source)

        await eventually(empty, timeout=60, what="an empty work queue")

    async def joined(self, member: str) -> str:
        """When the member's consumer was created."""

        async def there() -> Any:
            names = await self.api.consumer_names(self.queue)
            if member not in names:
                return None
            return (await self.api.consumer_info(self.queue, member))["created"]

        return str(await eventually(there, timeout=60, what=f"the consumer of {member}"))
