"""The consumer that a member pulls from: what the member knows of it, and what the server says."""

from __future__ import annotations

from typing import Any

from parti.groups.message import Holding
from parti.groups.puller import Puller
from parti.wire.api import JetStreamApi
from parti.wire.errors import ConsumerNotFound


class MemberConsumer:
    """Stream and name of the member's consumer, and its state as this instance last saw it."""

    def __init__(self, api: JetStreamApi, place: tuple[str, str], puller: Puller) -> None:
        self.stream, self.name = place
        self.filters: tuple[str, ...] = ()
        """The filters of the consumer this instance pulls from, or pulled from last."""
        self.created = ""
        """Creation time of that consumer; a consumer of the same name with another creation time is a different one."""
        self.pin: str | None = None
        self.uncertain = False
        """Something happened since the pin was last settled: messages in flight may belong to another instance."""
        self._api = api
        self._puller = puller

    @property
    def holding(self) -> Holding:
        """The consumer and pin of current deliveries."""
        return (self.created, self._puller.pin)

    async def found(self) -> dict[str, Any] | None:
        """The server's consumer of this name, whichever instance created it."""
        try:
            return await self._api.consumer_info(self.stream, self.name)
        except ConsumerNotFound:
            return None

    async def info(self) -> dict[str, Any] | None:
        """The consumer's info, if it is the one that this instance pulled from."""
        found = await self.found()
        return found if found is not None and self.created and found["created"] == self.created else None

    async def created_now(self) -> str:
        """Creation time of the server's consumer; empty when there is none."""
        found = await self.found()
        return str(found["created"]) if found is not None else ""
