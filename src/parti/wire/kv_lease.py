"""The right that a key of a bucket stands for: held by renewing it, and lost by the holder's own clock alone.

Time counts as in `control.lease`: from before a renewal was sent, on a clock that also runs while the process is
frozen. The server drops a key that is not renewed, later: so a holder stops before anybody else can take the key,
whatever the network does.
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
    """One taking of one key; the value has to tell it from every other taking."""

    def __init__(self, kv: KeyValue, key: str, value: bytes, clock: Clock, hold: HeldLease) -> None:
        self.epoch = hold.revision
        """The revision of the key when it was taken: each holder has a higher one than the holder before."""
        self.lost = False
        """Somebody else has the key, or it was given back: no renewal brings it back."""
        self._kv = kv
        self._key = key
        self._value = value
        self._clock = clock
        self._hold = hold

    def __repr__(self) -> str:
        return f"<KvLease {self._kv.bucket}/{self._key} epoch={self.epoch} {'valid' if self.remaining else 'lost'}>"

    @classmethod
    async def take(cls, kv: KeyValue, key: str, value: bytes, terms: LeaseTerms, clock: Clock) -> KvLease:
        """`KeyExists` while somebody has it. After any other error it may be ours: then it runs out by itself."""
        hold = HeldLease(terms).sending(clock.now())
        revision = await kv.create(key, value, ttl=int(terms.ttl))
        return cls(kv, key, value, clock, hold.confirmed(hold.beat, revision))

    @property
    def remaining(self) -> float:
        """Seconds for which it surely holds; never negative."""
        return 0.0 if self.lost else self._hold.fence.remaining(self._clock.now())

    async def renew(self) -> bool:
        """False when somebody else has the key. What cannot be known now leaves the lease to its time."""
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
                return True  # the next round tries again
            else:
                self._hold = sent.confirmed(sent.beat, revision)
                return True
        return True

    async def release(self) -> None:
        """Give the key back; when that fails it runs out by itself."""
        if not self.lost:
            self.lost = True
            await self._kv.delete(self._key, revision=self._hold.revision)

    async def _adopt(self) -> bool:
        """Whether the newer revision is a renewal of our own whose answer got lost."""
        try:
            entry = await self._kv.get(self._key)
        except KeyNotFound:
            return False
        except PartiError:
            return True  # not known: the next round will tell, and the clock ends it if none does
        if entry.value != self._value:
            return False
        self._hold = replace(self._hold, revision=entry.revision)
        return True
