"""Which of two tasks of a document is the newer one: by the document's own order, and by arrival where it has none.

A replay brings an old task behind newer ones. So `order=latest` goes by `lsn`, then `seq`, then `ts`; a field that one
of the two lacks, or that cannot be compared, says nothing. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

_NUMBER = re.compile(r"[0-9]{1,40}")
_PAIR = re.compile(r"([0-9A-Fa-f]{1,16})/([0-9A-Fa-f]{1,16})")  # as PostgreSQL writes it


class Ordered(Protocol):
    """What a task says of its place in its document's history."""

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
    """The place of the newest; they are given in the order of arrival."""
    best = 0
    for place in range(1, len(tasks)):
        if not is_older(tasks[place], tasks[best]):
            best = place
    return best


def has_order(task: Ordered | None) -> bool:
    """Whether it says anything of its place."""
    return task is not None and bool(task.lsn or task.seq or task.ts)


def _position(lsn: str) -> tuple[int, int, int, str] | None:
    """Comparable with those of the same kind, which is its first part."""
    if _NUMBER.fullmatch(lsn):
        return 1, int(lsn), 0, ""
    if pair := _PAIR.fullmatch(lsn):
        return 2, int(pair[1], 16), int(pair[2], 16), ""
    # Other texts compare where they have one length: zero-padded numbers, ULIDs, ISO times.
    return (3 + len(lsn), 0, 0, lsn) if lsn else None
