"""API calls about consumers, with those that nats-py lacks: action, priority groups, unpin, pause, reset."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from parti.errors import UsageError
from parti.wire.api_call import ApiCaller, Json
from parti.wire.names import token

Action = Literal["", "create", "update"]


def _names(stream: str, consumer: str) -> str:
    return f"{token(stream, what='stream')}.{token(consumer, what='consumer')}"


class ConsumerCalls(ApiCaller):
    """Create, change and steer consumers; configurations are plain dicts and keep fields unknown to parti."""

    async def consumer_create(self, stream: str, config: Mapping[str, Any], *, action: Action = "") -> Json:
        """Create or update the consumer `config["name"]` (or `durable_name`), and return its info.

        `action` "create" refuses an existing one with another configuration (10148), "update" a missing one (10149).
        An update to an empty filter list is refused here: the server would match the whole stream (JETSTREAM.md 4.1).
        """
        consumer = config.get("name") or config.get("durable_name")
        if not consumer:
            raise UsageError("a consumer needs a name: set name or durable_name")
        if "filter_subjects" in config and not config["filter_subjects"]:
            raise UsageError("an empty filter_subjects list matches the whole stream: leave it out if that is meant")
        if config.get("priority_groups"):
            self.require((2, 11, 0), "a priority group")
        body = {"stream_name": stream, "config": dict(config), "action": action}
        return await self.request(f"CONSUMER.CREATE.{_names(stream, consumer)}", body)

    async def consumer_info(self, stream: str, consumer: str) -> Json:
        return await self.request(f"CONSUMER.INFO.{_names(stream, consumer)}")

    async def consumer_delete(self, stream: str, consumer: str) -> None:
        await self.request(f"CONSUMER.DELETE.{_names(stream, consumer)}")

    async def consumer_names(self, stream: str) -> list[str]:
        call = f"CONSUMER.NAMES.{token(stream, what='stream')}"
        return [name async for page in self.pages(call, "consumers") for name in page]

    async def consumer_list(self, stream: str) -> list[Json]:
        """The infos of all consumers of the stream."""
        call = f"CONSUMER.LIST.{token(stream, what='stream')}"
        return [info async for page in self.pages(call, "consumers") for info in page]

    async def consumer_pause(self, stream: str, consumer: str, until: datetime | None) -> Json:
        """Deliver nothing until then; a time in the past or None resumes at once."""
        self.require((2, 11, 0), "pausing a consumer")
        body = {"pause_until": until.astimezone(UTC).isoformat().replace("+00:00", "Z")} if until else {}
        return await self.request(f"CONSUMER.PAUSE.{_names(stream, consumer)}", body)

    async def consumer_unpin(self, stream: str, consumer: str, group: str) -> None:
        """Take the pin away from the pinned client of `group`; the next pull gets it."""
        self.require((2, 11, 0), "unpinning")
        await self.request(f"CONSUMER.UNPIN.{_names(stream, consumer)}", {"group": group})

    async def consumer_reset(self, stream: str, consumer: str, seq: int | None = None) -> Json:
        """Forget what is pending and deliver from `seq` on, or from the ack floor + 1.

        The consumer's own sequence starts at 1 again. Acks of earlier deliveries are ignored until the redelivery.
        During a leadership change no answer may come: repeat until it does, and pull only then (CLUSTER.md 3.6).
        """
        self.require((2, 14, 0), "resetting a consumer")
        body = {"seq": seq} if seq is not None else {}
        return await self.request(f"CONSUMER.RESET.{_names(stream, consumer)}", body)
