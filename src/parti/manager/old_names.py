"""Recognises durables of earlier versions, whose names had no namespace, so that their work continues under new names.

They carry no seal, so they do not name their namespace. One counts as ours when its configuration looks like ours and
it is younger than our bucket: a namespace has its bucket before its first durable. An older durable existed before this
namespace and does not belong to it.
"""

from __future__ import annotations

from typing import Any, Final

from parti.wire.api import JetStreamApi
from parti.wire.errors import ConsumerDoesNotExist, ConsumerNotFound, StreamNotFound
from parti.wire.stored import parse_time
from parti.worker.seal import is_unsealed

_LOOK_EVERY: Final = 5.0  # seconds; during a rolling upgrade, old processes may still create them


class OldNames:
    """The stream's durables from earlier versions; lists the names at most once in five seconds, on demand."""

    def __init__(self, js: JetStreamApi, stream: str, bucket: str) -> None:
        """`bucket`: the stream of the namespace's bucket."""
        self._js = js
        self._stream = stream
        self._bucket = bucket
        self._since: int | None = None
        self._names: frozenset[str] = frozenset()
        self._looked = float("-inf")

    def __repr__(self) -> str:
        return f"<OldNames {self._stream} consumers={len(self._names)}>"

    async def find(self, name: str, now: float) -> dict[str, Any] | None:
        """The info of the durable with this old name; None when this namespace has none."""
        if now - self._looked >= _LOOK_EVERY:
            self._names = frozenset(await self._js.consumer_names(self._stream))
            self._looked = now
        if name not in self._names:
            return None
        try:
            info = await self._js.consumer_info(self._stream, name)
        except (ConsumerNotFound, ConsumerDoesNotExist):
            self._names -= {name}
            return None
        return info if await self.is_ours(info) else None

    async def is_ours(self, info: dict[str, Any]) -> bool:
        """Whether a consumer with an old name may be one of this namespace."""
        if not is_unsealed(info["config"]):
            return False
        if self._since is None:
            try:
                self._since = parse_time((await self._js.stream_info(self._bucket))["created"])
            except StreamNotFound:
                return False
        return parse_time(info["created"]) >= self._since
