"""Which message ends its process: what the lives of workers tell about the partitions they held. Pure.

Attempts are counted inside a process, so that a message which ends its process would be tried for ever. What survives
is one small record per worker id: written when a process begins and when it ends in order, and in between only while a
partition is under suspicion, because the process that had it before ended without a word.

- one such end says little: a machine dies, somebody sends SIGKILL. The next owner goes on as ever, and notes the count;
- after `max_deliver - 1` of them in a row the owner is *wary*: it starts one message at a time of such partitions, and
  notes which one before it starts. If it ends again, exactly one message is named, and others go free;
- after `max_deliver` ends the message that was named rests in the dead-letter stream, with the reason `crash`.

A partition that has been at work for `SURVIVED` seconds has survived: the count begins anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from parti.model import Member, PartitionId

SURVIVED: Final = 30.0  # seconds at work; what ends a process was in its handler at the last end, so it is met early
_BURIED: Final = 64  # of one partition; more than that behind one position is no accident
REMEMBERED: Final = 4  # lives of one worker id whose end may still matter to somebody


@dataclass(frozen=True, slots=True)
class Life:
    """What one process under one worker id left behind, or says now."""

    member: Member
    ended: bool = False
    """It stopped in order, or its process lives on: its end says nothing, but for a message that it names itself."""
    counts: Mapping[PartitionId, tuple[int, int]] = field(default_factory=lambda: MappingProxyType({}))
    """Partition -> (epoch in which this process had it, ends in a row before that); 0 when it survived here."""
    trial: tuple[PartitionId, int] | None = None
    """The only message under suspicion that was in its handler: partition and stream sequence."""
    buried: Mapping[PartitionId, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Messages whose letters are stored. With lanes of keys the position may still lie below them."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What is held against a partition."""

    ends: int = 0
    """Processes in a row that ended while they had it."""
    suspect: int | None = None
    """The message that was in its handler at the last end, and nothing else that was suspected."""
    buried: tuple[int, ...] = ()

    def wary(self, max_deliver: int) -> bool:
        """Whether messages are to be started one by one, each noted before."""
        return self.ends >= max(1, max_deliver - 1)

    def guilty(self, max_deliver: int) -> int | None:
        """The message to be buried, if its lives are used up."""
        return self.suspect if self.ends >= max_deliver else None


def suspicion(
    partition: PartitionId, lives: Iterable[Life], *, previous: Collection[Member], dead: Collection[Member]
) -> Suspicion:
    """What the next owner of a partition has to reckon with.

    `previous`: who may have had it last, as the claims tell; `dead`: members that act no more, as far as is known.
    """

    def ended_badly(life: Life) -> bool:
        named = life.trial is not None and life.trial[0] == partition
        return life.member in dead and (named or not life.ended)

    last: Life | None = None
    before: Life | None = None
    for life in lives:
        if life.member in previous and ended_badly(life):
            before = life
        held = life.counts.get(partition)
        if held is not None and (last is None or held[0] > last.counts[partition][0]):
            last = life
    buried = last.buried.get(partition, ()) if last is not None else ()
    if last is not None and ended_badly(last):
        return Suspicion(last.counts[partition][1] + 1, _named(last, partition), buried)
    count = last.counts[partition][1] if last is not None else 0
    if count or before is None:
        return Suspicion(count, None, buried)
    return Suspicion(1, _named(before, partition), buried)


def _named(life: Life, partition: PartitionId) -> int | None:
    return life.trial[1] if life.trial is not None and life.trial[0] == partition else None


def survived(life: Life, partition: PartitionId) -> Life:
    """The partition is at work for long enough: nothing is held against it any more."""
    held = life.counts.get(partition)
    return life if held is None else replace(life, counts=MappingProxyType({**life.counts, partition: (held[0], 0)}))


def holding(life: Life, partition: PartitionId, epoch: int, found: Suspicion) -> Life:
    """This process has the partition now, and knows what is held against it."""
    counts = MappingProxyType({**life.counts, partition: (epoch, found.ends)})
    return replace(life, counts=counts, buried=MappingProxyType({**life.buried, partition: found.buried}))


def buried(life: Life, partition: PartitionId, sequence: int) -> Life:
    """The letter of this message is stored."""
    known = (*life.buried.get(partition, ()), sequence)[-_BURIED:]
    return replace(life, buried=MappingProxyType({**life.buried, partition: known}))
