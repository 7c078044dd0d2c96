"""Finds the message that crashes its process, from the records that workers keep about partitions they held. Pure.

Attempts are counted inside a process, so a message that crashes its process would be retried without end. What survives
is one small record per worker id. It is written when a process starts and when it stops cleanly; in between only while
a partition is under suspicion, because the process that had it before ended without a clean stop.

- after one such crash the next owner records, for a while, each message of the partition before it starts it. If this
  owner crashes too, the messages in their handlers are *suspects*: the cause, and its neighbours. The claim itself says
  that a previous owner is gone: a member that has just joined could not tell;
- the owner after that starts suspects one at a time. A message alone in its handler at the next crash was there twice;
- after `max_deliver` crashes in a row that message is stored in the dead-letter stream, with the reason `crash`.

An external kill would have to hit the same message twice. A partition that has been active for `SURVIVED` seconds has
survived: the count restarts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from parti.model import Member, PartitionId, Tried

NOTED: Final = 5.0  # seconds in which starts are recorded: a message that crashed a process is met early
SURVIVED: Final = 30.0  # seconds of activity after which earlier crashes no longer count
_BURIED: Final = 64  # per partition; more than that above one position is not an accident
REMEMBERED: Final = 4  # lives of one worker id whose end may still matter


@dataclass(frozen=True, slots=True)
class Life:
    """The record of one process under one worker id, past or present."""

    member: Member
    ended: bool = False
    """It stopped cleanly, or its process still lives: its end proves nothing, except about a message that it names."""
    counts: Mapping[PartitionId, tuple[int, int]] = field(default_factory=lambda: MappingProxyType({}))
    """Partition -> (epoch in which this process had it, crashes in a row before that); 0 when it survived here."""
    trials: tuple[tuple[PartitionId, int], ...] = ()
    """Messages of partitions under suspicion that are in their handlers: partition and stream sequence."""
    suspects: Mapping[PartitionId, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Messages that were in their handlers when the previous process ended."""
    buried: Mapping[PartitionId, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Messages whose letters are stored. With a lane per key the position may still be below them."""
    stream: str = ""
    """Creation time of the stream that the sequences belong to."""
    tried: Mapping[PartitionId, tuple[Tried, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Attempts of this process at messages that were not done when this was written. The last allowed attempt of a
    message is written before it starts."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """The evidence against a partition's messages."""

    ends: int = 0
    """Number of processes in a row that crashed while they had it."""
    suspects: tuple[int, ...] = ()
    """Messages that were in their handlers at the last crash."""
    twice: int | None = None
    """The only message in its handler at the last crash that was also there at the one before."""
    buried: tuple[int, ...] = ()

    def guilty(self, max_deliver: int) -> int | None:
        """The message to bury, if it has used up its attempts."""
        return self.twice if self.ends >= max_deliver else None


def suspicion(
    partition: PartitionId,
    lives: Iterable[Life],
    *,
    previous: Collection[Member],
    dead: Collection[Member],
    taken_from: Member | None = None,
) -> Suspicion:
    """The suspicion that the next owner of a partition must take into account.

    `previous`: possible last owners according to the claims; `dead`: members known to have stopped acting;
    `taken_from`: the last owner, if it was certainly gone (`Claim.taken_from`).
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
        # A later owner may have ended before it could record its own count.
        ends = count + (before is not None and before is not last and before.member == taken_from)
        return Suspicion(ends, last.suspects.get(partition, ()), None, buried)
    suspects = tuple(sequence for each, sequence in before.trials if each == partition) if before is not None else ()
    return Suspicion(1 if before is not None else 0, suspects, None, buried)


def spent(life: Life, partition: PartitionId, *, dead: bool) -> tuple[Tried, ...]:
    """The attempts of one process at messages of a partition; a message in its handler at the end counts as one."""
    tried = life.tried.get(partition, ())
    if not dead or life.ended:
        return tried
    known = {each.sequence for each in tried}
    cut = (sequence for each, sequence in life.trials if each == partition and sequence not in known)
    return (*tried, *(Tried(sequence, 1, ended=True) for sequence in cut))


def blocked(life: Life, message: tuple[PartitionId, int] | None, stream: str) -> Life:
    """The process of this life lives but lost its lease: its end proves nothing, except about the message it names.

    That message, whose handler blocked the event loop, has used up an attempt.
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
    """The partition has been active long enough: clear its suspicion."""
    held = life.counts.get(partition)
    if held is None:
        return life
    return holding(life, partition, held[0], Suspicion())


def holding(life: Life, partition: PartitionId, epoch: int, found: Suspicion) -> Life:
    """This process owns the partition now, with this suspicion."""
    counts = MappingProxyType({**life.counts, partition: (epoch, found.ends)})
    suspects = MappingProxyType({**life.suspects, partition: found.suspects})
    buried = MappingProxyType({**life.buried, partition: found.buried})
    return replace(life, counts=counts, suspects=suspects, buried=buried)


def buried(life: Life, partition: PartitionId, sequence: int) -> Life:
    """The letter of this message is stored."""
    known = (*life.buried.get(partition, ()), sequence)[-_BURIED:]
    return replace(life, buried=MappingProxyType({**life.buried, partition: known}))
