"""Which message ends its process: what the lives of workers tell about the partitions they held. Pure.

Attempts are counted inside a process, so that a message which ends its process would be tried for ever. What survives
is one small record per worker id: written when a process begins and when it ends in order, and in between only while a
partition is under suspicion, because the process that had it before ended without a word.

- after one such end the next owner notes for a while which messages of the partition it starts, before it starts
  them. If it ends too, those that were in their handlers are *suspects*: the one that did it, and its neighbours.
  That somebody had it and is gone the claim says itself: a member that has just joined could not tell;
- the owner after that starts suspects one at a time. Whoever is alone in its handler at the next end was there twice;
- after `max_deliver` ends in a row that message rests in the dead-letter stream, with the reason `crash`.

Somebody who kills processes from outside would have to hit the same message twice. A partition that has been at work
for `SURVIVED` seconds has survived: the count begins anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from parti.model import Member, PartitionId, Tried

NOTED: Final = 5.0  # seconds in which starts are noted: what ended a process was in its handler, and is met early
SURVIVED: Final = 30.0  # seconds at work after which the ends before say nothing any more
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
    trials: tuple[tuple[PartitionId, int], ...] = ()
    """Messages of partitions under suspicion that are in their handlers: partition and stream sequence."""
    suspects: Mapping[PartitionId, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """What was in its handler when the process before this one ended."""
    buried: Mapping[PartitionId, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Messages whose letters are stored. With lanes of keys the position may still lie below them."""
    stream: str = ""
    """When the stream was made that the sequences are of."""
    tried: Mapping[PartitionId, tuple[Tried, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Attempts of this process at messages that were not done when this was written. The last one that a message may
    have is written before it starts."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What is held against a partition."""

    ends: int = 0
    """Processes in a row that ended while they had it."""
    suspects: tuple[int, ...] = ()
    """Messages that were in their handlers at the last end."""
    twice: int | None = None
    """The only one that was there at the last end, and at the one before too."""
    buried: tuple[int, ...] = ()

    def guilty(self, max_deliver: int) -> int | None:
        """The message to be buried, if its lives are used up."""
        return self.twice if self.ends >= max_deliver else None


def suspicion(
    partition: PartitionId,
    lives: Iterable[Life],
    *,
    previous: Collection[Member],
    dead: Collection[Member],
    taken_from: Member | None = None,
) -> Suspicion:
    """What the next owner of a partition has to reckon with.

    `previous`: who may have had it last, as the claims tell; `dead`: members that act no more, as far as is known;
    `taken_from`: who had it last and was gone for certain (`Claim.taken_from`).
    """

    def ended_badly(life: Life) -> bool:
        named = any(each == partition for each, _ in life.trials)
        return (life.member in dead or life.member == taken_from) and (named or not life.ended)

    last: Life | None = None
    before: Life | None = None
    for life in lives:
        if (life.member in previous or life.member == taken_from) and ended_badly(life):
            before = life
        held = life.counts.get(partition)
        if held is not None and (last is None or held[0] > last.counts[partition][0]):
            last = life
    count = last.counts[partition][1] if last is not None else 0
    buried = last.buried.get(partition, ()) if last is not None else ()
    if last is not None and ended_badly(last):
        suspects = tuple(sequence for each, sequence in last.trials if each == partition)
        alone = suspects[0] if len(last.trials) == len(suspects) == 1 else None
        return Suspicion(count + 1, suspects, alone if alone in last.suspects.get(partition, ()) else None, buried)
    if count:
        assert last is not None
        # Who had it after that one may have ended before it could say so.
        ends = count + (before is not None and before is not last and before.member == taken_from)
        return Suspicion(ends, last.suspects.get(partition, ()), None, buried)
    suspects = tuple(sequence for each, sequence in before.trials if each == partition) if before is not None else ()
    return Suspicion(1 if before is not None else 0, suspects, None, buried)


def spent(life: Life, partition: PartitionId, *, dead: bool) -> tuple[Tried, ...]:
    """The attempts of one process at messages of a partition; what it was at when it ended counts as one."""
    tried = life.tried.get(partition, ())
    if not dead or life.ended:
        return tried
    known = {each.sequence for each in tried}
    cut = (sequence for each, sequence in life.trials if each == partition and sequence not in known)
    return (*tried, *(Tried(sequence, 1, ended=True) for sequence in cut))


def blocked(life: Life, message: tuple[PartitionId, int] | None, stream: str) -> Life:
    """The process of this life lives, and has lost its lease: its end says nothing, but for the message it names.

    That one, whose handler blocked the event loop, has used up an attempt.
    """
    if message is None:
        return replace(life, ended=True, trials=life.trials if life.ended else ())
    partition, sequence = message
    before = life.tried if life.stream == stream else {}
    tried = {each.sequence: each for each in before.get(partition, ())}
    known = tried.get(sequence, Tried(sequence, 0))
    tried[sequence] = Tried(sequence, known.attempts + 1, known.timed_out, ended=True)
    named = MappingProxyType({**before, partition: tuple(tried.values())})
    return replace(life, ended=True, trials=(message,), stream=stream, tried=named)


def survived(life: Life, partition: PartitionId) -> Life:
    """The partition is at work for long enough: nothing is held against it any more."""
    held = life.counts.get(partition)
    if held is None:
        return life
    return holding(life, partition, held[0], Suspicion())


def holding(life: Life, partition: PartitionId, epoch: int, found: Suspicion) -> Life:
    """This process has the partition now, and knows what is held against it."""
    counts = MappingProxyType({**life.counts, partition: (epoch, found.ends)})
    suspects = MappingProxyType({**life.suspects, partition: found.suspects})
    buried = MappingProxyType({**life.buried, partition: found.buried})
    return replace(life, counts=counts, suspects=suspects, buried=buried)


def buried(life: Life, partition: PartitionId, sequence: int) -> Life:
    """The letter of this message is stored."""
    known = (*life.buried.get(partition, ()), sequence)[-_BURIED:]
    return replace(life, buried=MappingProxyType({**life.buried, partition: known}))
