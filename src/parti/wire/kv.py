"""Key-value buckets with compare-and-set and TTL, over raw publishes and reads from the stream's leader.

nats-py's own bucket drops the TTL on update, and after an expiry with markers its `get` returns None and its `create`
fails (docs/evidence/jetstream.md#j20), which would block the takeover of a lease.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from parti.errors import ConfigError, UsageError
from parti.wire.api import JetStreamApi, expectations
from parti.wire.errors import MessageNotFound, StreamNameExists, WrongLastSequence
from parti.wire.kv_model import (
    Change,
    Entry,
    KeyExists,
    KeyNotFound,
    Operation,
    SnapshotDone,
    check_bucket,
    check_key,
    check_pattern,
    operation_of,
)
from parti.wire.stored import StoredMessage
from parti.wire.watch import KvWatch, WatchSettings

_NANOSECONDS = 1_000_000_000
# A create that finds a marker retries on the marker's revision; each further round means that another client was
# faster, so that after a few rounds the key is contended.
_CREATE_ROUNDS = 8
_DEFAULT_WATCH = WatchSettings()
_DEFAULT_MARKER_TTL = 3600  # seconds; far longer than any disconnect that a lease survives


class KeyValue:
    """One bucket. Every write returns its revision; a write whose reply is lost raises `UnknownOutcome`.

    Nothing is retried silently. Reads go to the stream's leader: replicas were stale in 3.5 to 15 % of the reads right
    after a write (docs/evidence/cluster.md#c5).
    """

    def __init__(self, api: JetStreamApi, bucket: str, *, shortest_ttl: int = 1) -> None:
        """Use an existing bucket; `open` also checks that it exists, `ensure` creates it."""
        self.api = api
        self.shortest_ttl = shortest_ttl
        self.bucket = check_bucket(bucket)
        self.stream = f"KV_{bucket}"
        self._subjects = f"$KV.{bucket}."
        # With a JetStream domain or prefix, writes must use it too (ADR-8).
        self._writes = self._subjects if api.prefix == "$JS.API" else f"{api.prefix}.{self._subjects}"

    def __repr__(self) -> str:
        return f"<KeyValue {self.bucket}>"

    @classmethod
    async def open(cls, api: JetStreamApi, bucket: str) -> KeyValue:
        """Open an existing bucket; raises `StreamNotFound` if there is none."""
        info = await api.stream_info(cls(api, bucket).stream)
        return cls(api, bucket, shortest_ttl=_shortest_ttl(info["config"]))

    @classmethod
    async def ensure(
        cls,
        api: JetStreamApi,
        bucket: str,
        *,
        replicas: int = 1,
        storage: str = "file",
        history: int = 1,
        ttl: int | None = None,
        marker_ttl: int | None = None,
        max_value_size: int = -1,
        description: str = "",
    ) -> KeyValue:
        """The bucket, created if it does not exist; the configuration of an existing one is never changed.

        `ttl` limits every value's lifetime in seconds; each write may set its own too. `marker_ttl` is how long the
        server keeps markers of expired keys (0: no markers): watchers disconnected for longer, or of a bucket without
        markers, detect an expiry later, by comparison. By default a bucket without history keeps markers for an hour;
        one with history has none, since with both the server raises every TTL to that of the markers.
        """
        api.require((2, 11, 0), "a bucket with TTL per key")
        if marker_ttl is None:
            marker_ttl = _DEFAULT_MARKER_TTL if history == 1 else 0
        if marker_ttl and history != 1:
            raise ConfigError(f"markers with history {history} would raise every TTL to {marker_ttl} s: use history 1")
        kv = cls(api, bucket)
        config: dict[str, Any] = {
            "name": kv.stream,
            "subjects": [f"{kv._subjects}>"],
            "description": description,
            "storage": storage,
            "num_replicas": replicas,
            "max_msgs_per_subject": history,
            "max_age": (ttl or 0) * _NANOSECONDS,
            "max_msg_size": max_value_size,
            "discard": "new",
            "allow_rollup_hdrs": True,
            "deny_delete": True,
            "allow_direct": True,
            "allow_msg_ttl": True,
        }
        if marker_ttl:
            config["subject_delete_marker_ttl"] = marker_ttl * _NANOSECONDS
        try:
            found = (await api.stream_create(config))["config"]
        except StreamNameExists:
            found = (await api.stream_info(kv.stream))["config"]
            if not found.get("allow_msg_ttl") or (marker_ttl and not found.get("subject_delete_marker_ttl")):
                raise ConfigError(
                    f"the bucket {bucket!r} exists without TTL per key or without delete markers: set allow_msg_ttl "
                    f"and subject_delete_marker_ttl on the stream {kv.stream!r}, or choose another bucket"
                ) from None
        return cls(api, bucket, shortest_ttl=_shortest_ttl(found))

    async def get(self, key: str) -> Entry:
        """The live value; raises `KeyNotFound` for a key never written, deleted or expired."""
        try:
            message = await self.api.msg_get(self.stream, last_by_subj=self._subjects + check_key(key))
        except MessageNotFound:
            raise KeyNotFound(f"the key {key!r} of {self.bucket} does not exist", key=key) from None
        return self._live(key, message)

    def _live(self, key: str, message: StoredMessage) -> Entry:
        operation = operation_of(message.headers)
        if operation is not Operation.PUT:
            raise KeyNotFound(f"the key {key!r} of {self.bucket} is gone: {operation}", key=key, revision=message.seq)
        return Entry(key, message.data, message.seq, message.time_ns)

    async def put(self, key: str, value: bytes, *, ttl: int | None = None) -> int:
        """Write unconditionally; returns the new revision. `ttl` is in whole seconds."""
        return await self._write(key, value, expectations(ttl=self._lease(ttl)))

    async def update(self, key: str, value: bytes, revision: int, *, ttl: int | None = None) -> int:
        """Write if `revision` is still the key's last one, and return the new revision; else `WrongLastSequence`.

        `ttl` restarts with each update: that is how a lease is renewed. Without it the value never expires.
        """
        return await self._write(key, value, expectations(last_subject_seq=revision, ttl=self._lease(ttl)))

    async def create(self, key: str, value: bytes, *, ttl: int | None = None) -> int:
        """Write if the key has no value (never written, deleted or expired), return the revision; else `KeyExists`."""
        revision = 0
        for _ in range(_CREATE_ROUNDS):
            try:
                return await self._write(key, value, expectations(last_subject_seq=revision, ttl=self._lease(ttl)))
            except WrongLastSequence:
                try:
                    found = await self.get(key)
                except KeyNotFound as gone:
                    revision = gone.revision
                else:
                    break
        else:
            raise KeyExists(
                f"the key {key!r} of {self.bucket} changes faster than it can be created", key=key, revision=0
            )
        raise KeyExists(
            f"the key {key!r} of {self.bucket} exists at revision {found.revision}", key=key, revision=found.revision
        )

    async def delete(self, key: str, *, revision: int | None = None) -> int:
        """Write a delete marker; with `revision` only if it is still the last one, else `WrongLastSequence`."""
        headers = expectations(last_subject_seq=revision) | {"KV-Operation": "DEL"}
        return await self._write(key, b"", headers)

    async def purge(self, key: str, *, revision: int | None = None, ttl: int | None = None) -> int:
        """Remove the key's history and write a marker, which expires after `ttl` seconds; `revision` as in `delete`."""
        headers = expectations(last_subject_seq=revision, ttl=self._lease(ttl)) | {
            "KV-Operation": "PURGE",
            "Nats-Rollup": "sub",
        }
        return await self._write(key, b"", headers)

    def _lease(self, ttl: int | None) -> int | None:
        if ttl is not None and ttl < self.shortest_ttl:
            raise UsageError(
                f"the bucket {self.bucket} would keep the key for {self.shortest_ttl} s instead of {ttl} s, because it "
                "has delete markers and history: use a bucket with history 1"
            )
        return ttl

    async def _write(self, key: str, value: bytes, headers: dict[str, str]) -> int:
        ack = await self.api.publish(self._writes + check_key(key), value, headers=headers)
        return ack.seq

    def watch(
        self, pattern: str = ">", settings: WatchSettings = _DEFAULT_WATCH
    ) -> AsyncGenerator[Change | SnapshotDone, None]:
        """Yields the state of every matching key, then `SnapshotDone`, then each change; see `KvWatch`."""
        return KvWatch(self.api, self.stream, self._subjects, check_pattern(pattern), settings).changes()

    async def entries(self, pattern: str = ">") -> list[Entry]:
        """The current live entries that match."""
        found = [change async for change in self._snapshot(pattern) if change.value is not None]
        return [Entry(change.key, change.value or b"", change.revision, change.time_ns) for change in found]

    async def states(self, pattern: str = ">") -> list[Change]:
        """The current state of every matching key, including removed keys that left a marker."""
        return [change async for change in self._snapshot(pattern)]

    async def keys(self, pattern: str = ">") -> list[str]:
        """The current live keys that match, sorted."""
        return sorted([c.key async for c in self._snapshot(pattern, values=False) if c.operation is Operation.PUT])

    async def _snapshot(self, pattern: str, *, values: bool = True) -> AsyncIterator[Change]:
        watch = KvWatch(self.api, self.stream, self._subjects, check_pattern(pattern), WatchSettings(values))
        async with aclosing(watch.changes()) as changes:
            async for change in changes:
                if isinstance(change, SnapshotDone):
                    return
                yield change


def _shortest_ttl(config: Mapping[str, Any]) -> int:
    """With markers and history the server silently raises shorter TTLs to that of the markers (nats-server #6741)."""
    if config.get("max_msgs_per_subject") == 1:
        return 1
    return max(1, int(config.get("subject_delete_marker_ttl") or 0) // _NANOSECONDS)
