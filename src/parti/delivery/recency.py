"""Which of two tasks of a document is newer: by the document's own order, and by arrival where it has none.

A replay brings an old task behind newer ones. So `order=latest` compares `lsn`, then `seq`, then `ts`; a field that one
of the two lacks, or that cannot be compared, is skipped. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

_NUMBER = re.compile(r"[0-9]{1,40}")
_PAIR = re.compile(r"([0-9A-Fa-f]{1,16})/([0-9A-Fa-f]{1,16})")  # PostgreSQL's notation


class Ordered(Protocol):
    """The fields by which a task states its place in its document's history."""

    @property
    def lsn(self) -> str: ...
    @property
    def seq(self) -> int: ...
    @property
    def ts(self) -> int: ...


def is_older(task: Ordered | None, other: Ordered | None) -> bool:
    """Whether `task`, which came later, is older than `other`, which came before it."""
    if task is None or other is None:
        return False
    ours, theirs = _position(task.lsn), _position(other.lsn)
    if ours is not None and theirs is not None and ours[0] == theirs[0] and ours != theirs:
        return ours < theirs
    if task.seq and other.seq and task.seq != other.seq:
        return task.seq < other.seq
    return bool(task.ts and other.ts and task.ts < other.ts)


def newest(tasks: Sequence[Ordered | None]) -> int:
    """The index of the newest task; the tasks are given in order of arrival."""
    best = 0
    for place in range(1, len(tasks)):
        if not is_older(tasks[place], tasks[best]):
            best = place
    return best


def has_order(task: Ordered | None) -> bool:
    """Whether the task states its place."""
    return task is not None and bool(task.lsn or task.seq or task.ts)


def _position(lsn: str) -> tuple[int, int, int, str] | None:
    """Comparable with positions of the same kind, which is the first part."""
    if _NUMBER.fullmatch(lsn):
        return 1, int(lsn), 0, ""
    if pair := _PAIR.fullmatch(lsn):
        return 2, int(pair[1], 16), int(pair[2], 16), ""
    # Other texts are compared if they have the same length: zero-padded numbers, ULIDs, ISO times.
    return (3 + len(lsn), 0, 0, lsn) if lsn else None
