"""API calls about consumers, with those that nats-py lacks: action, priority groups, unpin, pause, reset.

To set a consumer to a position, check `can_reset` first; on older servers use `consumer_remake`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Literal

from parti.errors import TransientError, UsageError
from parti.wire.api_call import ApiCaller, Json
from parti.wire.errors import ConsumerDoesNotExist, ConsumerNotFound
from parti.wire.names import token

Action = Literal["", "create", "update"]
RESET_SINCE = (2, 14, 0)
_OF_SERVER = "_nats."  # keys that the server itself writes into the metadata


class UpdateNotKept(TransientError):
    """The consumer does not match the update: another client changed it at the same time. Retry."""


def filters_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The subjects that a consumer of this configuration filters, in order; none means the whole stream."""
    single = config.get("filter_subject")
    return tuple(sorted([single] if single else config.get("filter_subjects") or ()))


def _names(stream: str, consumer: str) -> str:
    return f"{token(stream, what='stream')}.{token(consumer, what='consumer')}"


class ConsumerCalls(ApiCaller):
    """Create, change and control consumers; configurations are plain dicts and keep fields unknown to parti."""

    async def consumer_create(self, stream: str, config: Mapping[str, Any], *, action: Action = "") -> Json:
        """Create or update the consumer `config["name"]` (or `durable_name`), and return its info.

        `action` "create" refuses an existing one with another configuration (10148), "update" a missing one (10149).
        An update to an empty filter list is refused here: the server would match the whole stream
        (docs/evidence/jetstream.md#j2).
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

    async def consumer_update(self, stream: str, config: Mapping[str, Any]) -> Json:
        """Give an existing consumer this configuration, and return its info; a former single filter is removed.

        A restarted server answers its first update with the previous configuration (measured on 2.15.1). A caller that
        trusts this reply would write the old filters back with the next update, and never receive a message again. So a
        reply that differs is requested once more, and then raises `UpdateNotKept`.
        """
        wanted = {key: value for key, value in config.items() if key != "filter_subject"}
        info = await self.consumer_create(stream, wanted, action="update")
        if not _says(info, wanted):
            info = await self.consumer_info(stream, info["name"])
        if not _says(info, wanted):
            raise UpdateNotKept(
                f"consumer {info['name']!r} filters {filters_of(info['config'])} after it was told otherwise: try again"
            )
        return info

    async def consumer_remake(self, stream: str, config: Mapping[str, Any], *, guarded: bool) -> Json:
        """Does what a reset does, for servers without it: deletes the durable and recreates it from `config`.

        An interest stream deletes messages without a consumer (measured on 2.12.8), so there, with `guarded`, a second
        consumer keeps them while ours is missing. It is deleted last, and replaced only while ours exists: a crash or
        an error at any point leaves one extra consumer, never a gap, and the call may be repeated.
        """
        name = config["durable_name"]
        guard = {**config, "name": f"{name}-guard", "durable_name": f"{name}-guard"}
        if guarded and await self._is_there(stream, name):
            await self._away(stream, guard["name"])
            await self.consumer_create(stream, guard, action="create")
        await self._away(stream, name)
        info = await self.consumer_create(stream, config, action="create")
        if guarded:
            await self._away(stream, guard["name"])
        return info

    async def _is_there(self, stream: str, consumer: str) -> bool:
        try:
            await self.consumer_info(stream, consumer)
        except (ConsumerNotFound, ConsumerDoesNotExist):
            return False
        return True

    async def _away(self, stream: str, consumer: str) -> None:
        with contextlib.suppress(ConsumerNotFound, ConsumerDoesNotExist):
            await self.consumer_delete(stream, consumer)

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

    async def consumer_unpin(self, stream: str, consumer: str, group: str) -> None:
        """Remove the pin from the pinned client of `group`; the client with the next pull gets it."""
        self.require((2, 11, 0), "unpinning")
        await self.request(f"CONSUMER.UNPIN.{_names(stream, consumer)}", {"group": group})

    @property
    def can_reset(self) -> bool:
        """Whether the connected server has `consumer_reset`; assumed if its version is unknown."""
        return self.connection.server_version == (0, 0, 0) or self.connection.server_version >= RESET_SINCE

    async def consumer_reset(self, stream: str, consumer: str, seq: int | None = None) -> Json:
        """Forget pending messages and deliver from `seq` on, or from the ack floor + 1.

        The consumer's own sequence starts at 1 again. Acks of earlier deliveries are ignored until the redelivery.
        During a leader change there may be no reply: repeat until one comes, and pull only then
        (docs/evidence/cluster.md#c8).
        """
        self.require(RESET_SINCE, "resetting a consumer")
        body = {"seq": seq} if seq is not None else {}
        return await self.request(f"CONSUMER.RESET.{_names(stream, consumer)}", body)


def _says(info: Json, wanted: Mapping[str, Any]) -> bool:
    found = info["config"]
    return filters_of(found) == filters_of(wanted) and _metadata(found) == _metadata(wanted)


def _metadata(config: Mapping[str, Any]) -> dict[str, str]:
    return {key: value for key, value in (config.get("metadata") or {}).items() if not key.startswith(_OF_SERVER)}
