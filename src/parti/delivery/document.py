"""One document: where its oldest task is, and what waits behind it."""

from __future__ import annotations

import asyncio
from collections import deque
from enum import Enum, auto

from parti.delivery.lease import SlotLease
from parti.delivery.names import token
from parti.delivery.pending import Pending, Wake


class Mode(Enum):
    """Where the document's oldest task is."""

    LIVE = auto()
    """In memory."""
    PARKED = auto()
    """On the server, until a wake-up comes; tasks that come meanwhile are parked behind it."""
    DRAINING = auto()
    """On the server, and its turn has come; tasks that come meanwhile wait in memory."""


class Document:
    """One document."""

    __slots__ = ("busy", "called", "key", "mode", "nudge", "queue", "reading", "task", "through", "wake")

    def __init__(self, key: str, mode: Mode) -> None:
        self.key = key
        self.mode = mode
        self.queue: deque[Pending] = deque()
        self.wake: Wake | None = None
        self.called = False  # the turn of its parked head has come
        self.through = 0  # tasks up to this sequence of the task stream are parked, or were handled before
        self.reading: Pending | None = None  # the parked head, while it is in memory
        self.task: asyncio.Task[None] | None = None
        self.busy = False  # in the middle of a step that a stop should let finish
        self.nudge: asyncio.Event | None = None  # set while it pauses

    def __repr__(self) -> str:
        return f"<Document {self.key[:8]} {self.mode.name.lower()} queued={len(self.queue)}>"


class Sending:
    """The right to send, as a lane asks for it: a stop waits for a request already sent, not for an earlier look-up."""

    __slots__ = ("_lane", "_lease", "epoch", "partition")

    def __init__(self, lane: Document, lease: SlotLease) -> None:
        self._lane = lane
        self._lease = lease
        self.partition, self.epoch = lease.partition, lease.epoch

    def __repr__(self) -> str:
        return f"<Sending {self._lane!r} {self._lease!r}>"

    def check(self) -> float:
        left = self._lease.check()
        self._lane.busy = True
        return left


def alone_token(held: Pending) -> str:
    """A token that no other task of the document has, even if the stream was recreated and counts from 1 again."""
    return token(f"{held.source.rpartition(':')[2]}-{held.first_seen:.3f}")


def alone_key(held: Pending) -> str:
    """The key of a lane for this task only: no document and no other task has this key."""
    return f"{held.key}-{alone_token(held)}"


def is_alone(key: str) -> bool:
    return "-" in key


def place(source: str, stream: str) -> int:
    """The sequence in the task stream, from "<stream>:<sequence>"; 0 when it names another stream."""
    name, _, sequence = source.rpartition(":")
    return int(sequence) if name == stream and sequence.isdecimal() else 0
