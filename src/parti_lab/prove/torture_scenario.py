"""A torture scenario: a seed decides its shape, its faults and its load. Pure: same seed, same scenario.

Faults come in bouts. Those of one bout overlap or follow each other closely; between two bouts the fleet must
recover, and the recovery time is measured.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from parti.errors import UsageError


class TortureKind(StrEnum):
    """The kinds of faults."""

    RESTART = "restart"
    """SIGTERM, `returning`, restarted with the same instance name."""
    RETURN = "return"
    """Stopped with `returning`, and back at once in the same process: the shortest possible absence."""
    LEAVE = "leave"
    """SIGTERM, partitions handed over, a new process joins."""
    ADD = "add"
    REMOVE = "remove"
    """The source omits a partition for a while, then lists it again."""
    SOURCE = "source"
    """The source raises for a while, and the leader leaves meanwhile."""
    KILL = "kill"
    """SIGKILL, restarted at once with the same instance name."""
    REPLACE = "replace"
    """SIGKILL, replaced by a process without an instance name."""
    LEADER = "leader"
    """SIGKILL of the leader, restarted in place."""
    FREEZE = "freeze"
    CUT = "cut"
    HOLE = "hole"
    """Connections stay open but transfer no data."""
    SERVER_KILL = "server-kill"
    SERVER_FREEZE = "server-freeze"
    OUTAGE = "outage"
    STEPDOWN = "stepdown"
    NODE = "node"
    DURABLE_DELETE = "durable-delete"
    DURABLE_EDIT = "durable-edit"
    DURABLE_FILES = "durable-files"
    """The files of a durable are deleted at the server: it still delivers, but refuses every change."""
    CLAIM = "claim"
    LEASE = "lease"
    LEADER_RECORD = "leader-record"
    ASSIGNMENT = "assignment"
    POSITION = "position"
    REMAKE = "remake"
    """The stream is deleted and recreated."""
    NAMESPACE = "namespace"
    """A second fleet with its own namespace on the same stream."""
    HANG = "hang"
    """A handler never ends; handler_timeout must end it."""
    HANG_STOP = "hang-stop"
    """A handler never ends, there is no handler_timeout, and its worker gets a SIGTERM."""
    BASE = "base"
    """A handler raises a BaseException."""
    EXIT = "exit"
    """A handler raises SystemExit."""
    BLOCK = "block"
    """A handler blocks the event loop beyond the lease."""
    STARVE = "starve"
    """Every process, servers included, freezes again and again, for up to one and a half leases, as on an overloaded
    machine."""


PLANNED: Final = frozenset(
    {
        TortureKind.RESTART,
        TortureKind.RETURN,
        TortureKind.LEAVE,
        TortureKind.ADD,
        TortureKind.REMOVE,
        TortureKind.SOURCE,
    }
)
RECORDS: Final = frozenset(
    {TortureKind.CLAIM, TortureKind.LEASE, TortureKind.LEADER_RECORD, TortureKind.ASSIGNMENT, TortureKind.POSITION}
)
_SINGLE: Final = frozenset({TortureKind.SERVER_KILL, TortureKind.SERVER_FREEZE, TortureKind.OUTAGE})
_CLUSTER: Final = frozenset({TortureKind.STEPDOWN, TortureKind.NODE})
# At most one of these per scenario: they change the meaning of the rest of the run.
_ONCE: Final = frozenset(
    {
        TortureKind.REMAKE,
        TortureKind.NAMESPACE,
        TortureKind.OUTAGE,
        TortureKind.HANG_STOP,
        TortureKind.HANG,
        TortureKind.NODE,
        TortureKind.STARVE,
    }
)
HOTTEST: Final = 1.6  # load of the busiest partition, as a multiple of the mean (see `TortureTraffic`)
RETENTIONS: Final = ("limits", "workqueue", "interest")
LAYOUTS: Final = ("per-worker", "per-partition")
LANES: Final = ("partition", "key")
STORAGES: Final = ("file", "memory")


@dataclass(frozen=True, slots=True)
class TortureFault:
    """One fault: its time within the bout, its duration, and its target (a number, modulo the possible targets)."""

    offset: float
    kind: TortureKind
    seconds: float
    target: int

    def __str__(self) -> str:
        length = f" {self.seconds:g}s" if self.seconds else ""
        return f"+{self.offset:g}s {self.kind}#{self.target}{length}"


@dataclass(frozen=True, slots=True)
class Restrict:
    """Limits what may be drawn; empty means no limit."""

    retention: str = ""
    layout: str = ""
    lanes: str = ""
    storage: str = ""
    replicas: int = 0
    faults: frozenset[TortureKind] = frozenset()
    quick: bool = False
    workers: int = 0
    partitions: int = 0
    rate: float = 0.0
    takes: float = 0.0
    ttl: float = 0.0

    @classmethod
    def parse(cls, faults: str = "", **options: Any) -> Restrict:
        """Parse the command's options, which are named like the fields; UsageError names the allowed values."""
        found = cls(**options, faults=cls._kinds(faults))
        allowed = {"retention": RETENTIONS, "layout": LAYOUTS, "lanes": LANES, "storage": STORAGES}
        for name, words in allowed.items():
            word = getattr(found, name)
            if word and word not in words:
                raise UsageError(f"--{name} {word!r}: choose one of {', '.join(words)}")
        if found.replicas not in (0, 1, 3):
            raise UsageError(f"--replicas {found.replicas}: choose 1 or 3")
        return found

    @staticmethod
    def _kinds(faults: str) -> frozenset[TortureKind]:
        kinds: set[TortureKind] = set()
        for word in filter(None, (part.strip() for part in faults.split(","))):
            if word == "planned":
                kinds |= PLANNED
            elif word == "records":
                kinds |= RECORDS
            elif word in list(TortureKind):
                kinds.add(TortureKind(word))
            else:
                raise UsageError(f"--faults {word!r}: choose among planned, records, {', '.join(TortureKind)}")
        return frozenset(kinds)


@dataclass(frozen=True, slots=True)
class TortureScenario:
    """Everything that a run of one seed does."""

    seed: int
    retention: str
    layout: str
    lanes: str
    storage: str
    replicas: int
    workers: int
    partitions: int
    keys: int
    rate: float
    ttl: float
    takes: float
    """Mean seconds of a handler: up to 80 % of the capacity of the busiest partition's lane."""
    retry: float
    """Seconds before a failed message is retried."""
    literal: bool
    """The template names one subject per partition, instead of a wildcard."""
    timeout: float
    """worker.handler_timeout; 0 means none."""
    bouts: tuple[tuple[TortureFault, ...], ...] = field(default=())

    @property
    def kinds(self) -> frozenset[TortureKind]:
        return frozenset(fault.kind for bout in self.bouts for fault in bout)

    @property
    def planned_only(self) -> bool:
        """Whether no repeat at all is allowed."""
        return self.kinds <= PLANNED

    def shape(self) -> str:
        return (
            f"{self.retention} {self.layout} lanes={self.lanes} {self.storage} R{self.replicas} workers={self.workers} "
            f"partitions={self.partitions}x{self.keys} rate={self.rate:g} takes={1000 * self.takes:g}ms "
            f"ttl={self.ttl:g} retry={self.retry:g}s{' literal' if self.literal else ''}"
        )

    def schedule(self) -> str:
        return " | ".join("; ".join(map(str, bout)) for bout in self.bouts)


def draw(seed: int, restrict: Restrict | None = None) -> TortureScenario:
    """The scenario of this seed."""
    restrict = restrict or Restrict()
    rng = random.Random(f"torture {seed}")
    # Always drawn in this order: a restricted run keeps the rest of its seed's shape.
    retention = _one(rng, RETENTIONS, restrict.retention)
    layout = _one(rng, LAYOUTS, restrict.layout)
    lanes = _one(rng, LANES, restrict.lanes)
    storage = _one(rng, ("file", "file", "file", "memory"), restrict.storage)
    drawn_replicas = 3 if rng.random() < 0.15 else 1
    replicas = restrict.replicas or (1 if restrict.quick else drawn_replicas)
    workers = rng.randint(4, 6)
    partitions = rng.choice((8, 12, 16, 24, 40))
    keys = rng.randint(3, 8)
    busy = rng.choice((0.0, 0.2, 0.5, 0.8))
    rate = rng.choice((200.0, 350.0, 500.0))
    ttl = rng.choice((2.0, 2.4, 3.0))
    retry = rng.choice((0.05, 0.5, 2.0))
    literal = rng.random() < 0.4
    planned = rng.random() < 0.25
    if restrict.quick or replicas == 3:  # three servers and six workers are too many for two cores
        workers, partitions = 4, min(partitions, 16)
    workers, partitions = restrict.workers or workers, restrict.partitions or partitions
    rate, ttl = restrict.rate or rate, restrict.ttl or ttl
    allowed = possible(retention, storage, replicas) & (restrict.faults or frozenset(TortureKind))
    if planned and allowed & PLANNED and not restrict.faults:
        allowed &= PLANNED
    if restrict.quick:
        allowed -= {TortureKind.OUTAGE, TortureKind.NAMESPACE, TortureKind.HANG_STOP}
    if not allowed:
        raise UsageError(f"none of these faults is possible with {retention}, {storage} and R{replicas}")
    bouts = _bouts(rng, allowed, quick=restrict.quick, ttl=ttl)
    kinds = {fault.kind for bout in bouts for fault in bout}
    return TortureScenario(
        seed=seed,
        retention=retention,
        layout=layout,
        lanes=lanes,
        storage=storage,
        replicas=replicas,
        workers=workers,
        partitions=partitions,
        keys=keys,
        rate=rate,
        ttl=ttl,
        takes=restrict.takes or round(min(0.06, busy * partitions / rate / HOTTEST), 4),
        retry=retry,
        literal=literal and lanes == "partition",
        timeout=1.0 if TortureKind.HANG in kinds else 0.0,
        bouts=bouts,
    )


def possible(retention: str, storage: str, replicas: int) -> frozenset[TortureKind]:
    """The faults that a fleet of this shape must survive.

    On an interest stream the server itself drops messages when somebody else removes the interest, and a memory stream
    on one server does not survive a restart: no client can prevent either. A work queue refuses a second consumer.
    """
    kinds = set(TortureKind) - (_CLUSTER if replicas == 1 else _SINGLE)
    if retention == "interest":
        kinds -= {TortureKind.DURABLE_DELETE, TortureKind.DURABLE_EDIT, TortureKind.DURABLE_FILES}
    if retention == "workqueue":
        kinds -= {TortureKind.NAMESPACE}
    if storage == "memory":
        kinds -= {TortureKind.SERVER_KILL, TortureKind.OUTAGE, TortureKind.NODE}
    if storage == "memory" or replicas > 1:
        kinds -= {TortureKind.DURABLE_FILES}
    return frozenset(kinds)


def _bouts(
    rng: random.Random, allowed: Iterable[TortureKind], *, quick: bool, ttl: float
) -> tuple[tuple[TortureFault, ...], ...]:
    kinds = sorted(allowed)
    used: set[TortureKind] = set()
    bouts: list[tuple[TortureFault, ...]] = []
    for _ in range(2 if quick else rng.choice((2, 2, 3))):
        bout: list[TortureFault] = []
        for _ in range(rng.choice((1, 2, 2, 3))):
            free = [kind for kind in kinds if kind not in (used & _ONCE) and _fits(kind, used)]
            if not free:
                break
            kind = rng.choice(free)
            used.add(kind)
            bout.append(
                TortureFault(round(rng.uniform(0, 1.5), 2), kind, _length(rng, kind, quick, ttl), rng.randrange(1000))
            )
        if bout:
            bouts.append(tuple(sorted(bout, key=lambda fault: fault.offset)))
    return tuple(bouts)


def _fits(kind: TortureKind, used: set[TortureKind]) -> bool:
    """Whether the kind fits the used ones: a hang with a handler_timeout and one without exclude each other."""
    return not ({kind, *used} >= {TortureKind.HANG, TortureKind.HANG_STOP})


def _length(rng: random.Random, kind: TortureKind, quick: bool, ttl: float) -> float:
    match kind:
        case TortureKind.FREEZE:
            long = 4.0 if quick else rng.choice((3.0, 5.0, 8.0, 15.0))
            return round(rng.uniform(1.0, long), 2)
        case TortureKind.CUT | TortureKind.HOLE:
            return round(rng.uniform(0.5, 4.0 if quick else 7.0), 2)
        case TortureKind.SERVER_KILL:
            return round(rng.uniform(0.1, 2.0), 2)
        case TortureKind.SERVER_FREEZE:
            return round(rng.uniform(0.5, 3.0 if quick else 5.0), 2)
        case TortureKind.NODE:
            return round(rng.uniform(2.0, 5.0), 2)
        case TortureKind.OUTAGE:
            return 10.0
        case TortureKind.STEPDOWN | TortureKind.REMOVE | TortureKind.SOURCE:
            return round(rng.uniform(1.0, 3.0), 2)
        case TortureKind.STARVE:
            return round(rng.uniform(3.0, 5.0 if quick else 12.0), 2)
        case TortureKind.BLOCK:
            return round(ttl + rng.uniform(0.5, 3.0), 2)
        case _:
            return 0.0


def _one(rng: random.Random, words: tuple[str, ...], given: str) -> str:
    drawn = rng.choice(words)
    return given or drawn
