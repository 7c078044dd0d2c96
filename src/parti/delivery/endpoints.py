"""Endpoints that asked not to be called any more (410): stored in the bucket, respected by every process."""

from __future__ import annotations

import hashlib

import msgspec

from parti.delivery.task import DeliveryTask
from parti.wire.kv import KeyValue

PREFIX = "disabled."
_LONGEST = 1_024  # characters of a name in a record


class Disabled(msgspec.Struct, frozen=True):
    """One endpoint that is not called. The url itself is not stored: its path may be a secret."""

    trigger: str
    database: str
    host: str
    why: str
    since: float


def endpoint_key(task: DeliveryTask) -> str:
    """The key of a trigger's endpoint: another url of the same trigger is another endpoint."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (task.database, task.trigger_id, task.url):
        raw = part.encode(errors="surrogatepass")
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return PREFIX + digest.hexdigest()


class Endpoints:
    """The disabled endpoints this process knows; the watch on the bucket calls `changed`."""

    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket
        self._disabled: set[str] = set()

    def __len__(self) -> int:
        return len(self._disabled)

    def is_disabled(self, task: DeliveryTask) -> bool:
        return bool(self._disabled) and endpoint_key(task) in self._disabled

    def changed(self, key: str, disabled: bool) -> None:
        if disabled:
            self._disabled.add(key)
        else:
            self._disabled.discard(key)

    async def disable(self, task: DeliveryTask, host: str, why: str, now: float) -> None:
        """When this returns, no task of the trigger goes to this url until `enable`."""
        key = endpoint_key(task)
        record = Disabled(task.trigger_id[:_LONGEST], task.database[:_LONGEST], host, why, now)
        await self._bucket.put(key, msgspec.json.encode(record))
        self._disabled.add(key)


async def disabled_endpoints(bucket: KeyValue) -> dict[str, Disabled]:
    """All disabled endpoints, by their hex names."""
    entries = await bucket.entries(f"{PREFIX}*")
    return {entry.key.removeprefix(PREFIX): msgspec.json.decode(entry.value, type=Disabled) for entry in entries}


async def enable(bucket: KeyValue, name: str) -> None:
    """Call the endpoint again."""
    await bucket.delete(f"{PREFIX}{name}")
