"""Which stream a namespace works on: positions are invalid on any other stream.

A stream that was deleted and recreated counts from 1 again, one restored from an older state reuses sequences, and
another stream never had them. Each of these is another *identity*. Every claim and position carries the identity it was
written under; those of another identity count as "nothing done yet" (`Store.stream`). The bucket's record `live.stream`
names the current identity, so that all members agree.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from parti.backoff import FAST
from parti.clock import Clock
from parti.control.lease import NEVER
from parti.control.records import StreamRecord
from parti.errors import FatalError, PartiError
from parti.manager.kv_store import Store
from parti.observe.logs import get_logger
from parti.wire.api import JetStreamApi
from parti.wire.errors import StreamNotFound

_LOOKS, _BETWEEN = 3, 1.0  # a stream was reset only if repeated checks show it
_LOOK_EVERY = 1.0  # seconds between a member's checks of the stream's identity
_RECORD_EVERY = 15.0  # seconds; the watch reports it too, but can miss it for this long after a server restart


class Replaced(StrEnum):
    """How the stream was replaced; the label of `parti_stream_replaced_total`."""

    RECREATED = "recreated"
    """Deleted and recreated with the same name."""
    REWOUND = "rewound"
    """Its last sequence is below the last one done: restored from an older state, or its end was lost."""
    EXCHANGED = "exchanged"
    """Another stream is configured."""


class NamespaceTaken(FatalError):
    """Live members of this namespace work on another stream: choose another control.namespace."""


class StreamReplaced(FatalError):
    """The stream is not the one that positions were stored for, and control.on_stream_replaced says stop."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """The detected replacement, with its numbers."""

    kind: Replaced
    before: StreamRecord
    now: StreamRecord
    last_seq: int
    """Last sequence of the current stream."""
    done: int
    """The highest sequence that counted as done."""

    def __str__(self) -> str:
        was = f"{self.before.name} made {self.before.created}"
        return f"{was} was {self.kind.value}: its last sequence is {self.last_seq}, {self.done} counted as done"


class StreamIdentity:
    """Detects, at start and while running, whether the stream is still the one that positions refer to."""

    def __init__(
        self, js: JetStreamApi, store: Store, clock: Clock, stream: str, *, template: str, layout: str, ttl: float
    ) -> None:
        """`ttl`: a member without a renewal for this long is dead."""
        self._js = js
        self._store = store
        self._clock = clock
        self._ttl = ttl
        self._mine = StreamRecord(stream, template=template, layout=layout)
        self._in_force: StreamRecord | None = None
        self._highest = 0
        self._backwards = 0
        self._read_again = NEVER
        self._log = get_logger("control", stream=stream)

    def __repr__(self) -> str:
        return f"<StreamIdentity {self._in_force}>"

    async def settle(self, *, start_over: bool) -> Replacement | None:
        """When this returns, the store uses the current identity; returns the replacement if this call found one.

        Raises `NamespaceTaken` while live members of the namespace work on another stream, template or layout, and
        `StreamReplaced` for a replacement when the configuration says stop.
        """
        waits = FAST.delays()
        while True:
            stored, revision = await self._store.stream_record()
            created, last_seq = await self._look()
            now = replace(self._mine, created=created, rewinds=stored.rewinds if stored is not None else 0)
            done = await self._done(stored) if stored is not None else 0
            kind = _kind(stored, now, last_seq, done)
            if kind is Replaced.REWOUND and await self._catches_up(created, done):
                continue
            if stored is not None and (kind is Replaced.EXCHANGED or stored.shape != now.shape):
                await self._refuse_beside_others(stored, now)
            if kind is not None and not start_over:
                assert stored is not None
                raise StreamReplaced(
                    f"{Replacement(kind, stored, now, last_seq, done)}; nothing was touched. "
                    'Set control.on_stream_replaced to "start-over" to work it off from its beginning'
                )
            if kind is Replaced.REWOUND:
                now = replace(now, rewinds=now.rewinds + 1)
            if stored == now or await self._store.write_stream_record(now, revision) is not None:
                break
            await self._clock.sleep(next(waits))
        self._in_force, self._highest, self._backwards = now, last_seq, 0
        self._store.stream, self._store.stream_created = now.identity, now.created
        return Replacement(kind, stored, now, last_seq, done) if kind is not None and stored is not None else None

    async def gone(self) -> str:
        """Why the current identity is no longer valid; empty while it is. Call it about once per second.

        It reads the stream's info each time, but our record of it only sometimes: the watch reports its changes.
        """
        assert self._in_force is not None
        if self._clock.now() >= self._read_again:
            stored, _ = await self._store.stream_record()
            self._read_again = self._clock.now() + _RECORD_EVERY
            if stored is not None and stored.identity != self._in_force.identity:
                return f"another member found the stream replaced: it is {stored.identity} now"
        created, last_seq = await self._look()
        if created != self._in_force.created:
            return f"the stream was recreated at {created}"
        # Twice in a row: a newly elected stream leader may be behind for a moment.
        self._backwards = self._backwards + 1 if last_seq < self._highest else 0
        if self._backwards >= 2:
            return f"the stream went back from sequence {self._highest} to {last_seq}"
        self._highest = max(self._highest, last_seq)
        return ""

    async def _catches_up(self, created: str, done: int) -> bool:
        """Whether the stream's leader was only behind: after an election it may need a moment to catch up."""
        for _ in range(_LOOKS):
            await self._clock.sleep(_BETWEEN)
            found, last_seq = await self._look()
            if found != created or last_seq >= done:
                return True
        return False

    async def _look(self) -> tuple[str, int]:
        info = await self._js.stream_info(self._mine.name)
        return info["created"], int(info["state"]["last_seq"])

    async def _done(self, stored: StreamRecord) -> int:
        """The highest sequence done, or seen in the stream, under the stored identity."""
        self._store.stream = stored.identity
        claims = await self._store.claims()
        highest = self._highest if self._in_force is not None and self._in_force.identity == stored.identity else 0
        reached = [at for each in await self._store.checkpoints() for _, at in each.positions.values()]
        return max([highest, *reached, *(claim.cursor for claim, _ in claims.values())])

    async def _refuse_beside_others(self, stored: StreamRecord, now: StreamRecord) -> None:
        before = await self._beats()
        if before:
            await self._clock.sleep(self._ttl)  # records outlive their members: only a renewal proves a live one
        alive = [worker for worker, beat in (await self._beats()).items() if before.get(worker) != beat]
        if alive:
            raise NamespaceTaken(
                f"namespace {self._store.namespace!r} has live members ({', '.join(sorted(alive)[:5])}) on {stored}, "
                f"and this one is for {now}: give it a control.namespace of its own, or stop those first"
            )
        self._log.warning("stream.exchanged", before=str(stored), now=str(now))

    async def _beats(self) -> dict[str, tuple[str, int]]:
        leases = await self._store.leases()
        held = {str(w): record for w, (record, _) in leases.items() if record is not None and not record.status.stopped}
        return {worker: (record.member.nonce, record.beat) for worker, record in held.items()}


class StreamWatch:
    """One member's check of its stream: calls `replaced` when positions no longer refer to the current stream."""

    def __init__(
        self,
        clock: Clock,
        gone: Callable[[], Awaitable[str]] | None,
        *,
        replaced: Callable[[str], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """`gone`: returns why it is another stream now, or empty; None when there is no stream to check."""
        self._clock = clock
        self._gone = gone
        self._replaced = replaced
        self._failed = failed

    async def run(self) -> None:
        while self._gone is not None:
            await self._clock.sleep(_LOOK_EVERY)
            await self.look()

    async def look(self) -> None:
        if self._gone is None:
            return
        try:
            reason = await self._gone()
        except StreamNotFound as error:
            self._failed(error)  # nothing can be handled; a recreated stream will be detected
            return
        except PartiError:
            return  # NATS is unreachable: degraded mode reports it
        if reason:
            self._replaced(reason)


def _kind(stored: StreamRecord | None, now: StreamRecord, last_seq: int, done: int) -> Replaced | None:
    if stored is None:
        return None
    if stored.name != now.name:
        return Replaced.EXCHANGED
    if stored.created != now.created:
        return Replaced.RECREATED
    return Replaced.REWOUND if done > last_seq else None
