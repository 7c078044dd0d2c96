"""A lease on a key of a bucket: held by renewing the key, and lost by the holder's own clock alone.

Time counts as in `control.lease`: from before a renewal was sent, on a clock that also runs while the process is
frozen. The server drops a key without renewal later than that: so a holder stops before any other process can take the
key, whatever the network does.
"""

from __future__ import annotations

from dataclasses import replace

from parti.clock import Clock
from parti.control.lease import HeldLease, LeaseTerms
from parti.errors import PartiError
from parti.wire.errors import WrongLastSequence
from parti.wire.kv import KeyValue
from parti.wire.kv_model import KeyNotFound


class KvLease:
    """One acquisition of one key; the value must be unique to this acquisition."""

    def __init__(self, kv: KeyValue, key: str, value: bytes, clock: Clock, hold: HeldLease) -> None:
        self.epoch = hold.revision
        """The key's revision when it was taken: each holder has a higher one than the previous holder."""
        self.lost = False
        """Another holder has the key, or it was released: no renewal can restore it."""
        self._kv = kv
        self._key = key
        self._value = value
        self._clock = clock
        self._hold = hold

    def __repr__(self) -> str:
        return f"<KvLease {self._kv.bucket}/{self._key} epoch={self.epoch} {'valid' if self.remaining else 'lost'}>"

    @classmethod
    async def take(cls, kv: KeyValue, key: str, value: bytes, terms: LeaseTerms, clock: Clock) -> KvLease:
        """`KeyExists` while another holder has it. After any other error it may be ours: then it expires by itself."""
        hold = HeldLease(terms).sending(clock.now())
        revision = await kv.create(key, value, ttl=int(terms.ttl))
        return cls(kv, key, value, clock, hold.confirmed(hold.beat, revision))

    @property
    def remaining(self) -> float:
        """Seconds for which the lease is certainly valid; never negative."""
        return 0.0 if self.lost else self._hold.fence.remaining(self._clock.now())

    async def renew(self) -> bool:
        """False when another holder has the key. If the result is unknown, the lease keeps its present deadline."""
        for _ in range(2):
            if self.lost:
                return False
            sent = self._hold.sending(self._clock.now())
            try:
                revision = await self._kv.update(self._key, self._value, sent.revision, ttl=int(sent.terms.ttl))
            except WrongLastSequence:
                if not await self._adopt():
                    return False
            except PartiError:
                return True  # the next round retries
            else:
                self._hold = sent.confirmed(sent.beat, revision)
                return True
        return True

    async def release(self) -> None:
        """Release the key; if that fails, it expires by itself."""
        if not self.lost:
            self.lost = True
            await self._kv.delete(self._key, revision=self._hold.revision)

    async def _adopt(self) -> bool:
        """Whether the newer revision is our own renewal whose reply got lost."""
        try:
            entry = await self._kv.get(self._key)
        except KeyNotFound:
            return False
        except PartiError:
            return True  # unknown: the next round finds out, or the lease expires
        if entry.value != self._value:
            return False
        self._hold = replace(self._hold, revision=entry.revision)
        return True
