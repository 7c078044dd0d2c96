"""Writes claims as a member, by CAS. Whatever the result, the member then learns what the bucket holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from parti.backoff import FOREVER
from parti.clock import Clock
from parti.control.signals import WriteFailed
from parti.errors import PartiError
from parti.manager.host import Host
from parti.manager.kv_store import Store
from parti.model import Claim, PartitionId


class ClaimWriter:
    """The member's own transitions: ready, release, accept, caught up."""

    def __init__(self, host: Host, feed: Callable[[PartitionId, WriteFailed], None]) -> None:
        self._host = host
        self._feed = feed

    def write(self, claim: Claim, expected: int) -> None:
        if self._host.may_act():
            self._host.spawn(self._write(claim, expected), "parti-claim")

    async def _write(self, claim: Claim, expected: int) -> None:
        host = self._host
        if host.lives is not None:
            await host.lives.about_to_write(claim)
        stamped = stamp(claim, host.clock)
        revision = await host.store.write_claim(stamped, expected)
        if revision is not None:
            host.heard_claim(stamped, revision)
            return
        self._feed(claim.partition, WriteFailed())
        await hear_again(host, host.store, claim.partition)


async def hear_again(host: Host, store: Store, partition: PartitionId) -> None:
    """Read the claim from the bucket's leader, retrying until it is known, and pass it to all parts of this member."""
    waits = FOREVER.delays()
    while True:
        try:
            claim, revision = await store.claim(partition)
        except PartiError:
            await host.clock.sleep(next(waits))
            continue
        if isinstance(claim, Claim):
            host.heard_claim(claim, revision)
        elif claim is not None:
            host.heard_claim_gone(partition, revision, claim.expected)
        return


def stamp(claim: Claim, clock: Clock) -> Claim:
    """The claim with the time of this write, for human readers."""
    return replace(claim, updated=round(clock.wall(), 3))
