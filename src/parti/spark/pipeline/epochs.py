"""One checkpoint folder per epoch: what a stale driver still writes, nobody reads.

Spark guards a shared checkpoint only by "the first writer of a file wins", whoever that is: in a run the stale driver
won and the new one died (docs/evidence/pipeline.md#p8). So each owner works on a copy of its predecessor's folder,
taken once.

The position belongs to the pipeline and not to the way it is run: whoever begins, with a lease or without, goes on from
the newest folder there is, and no owner's folder is ever older than that of its predecessor.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from parti.spark.pipeline.files import Files

_ANY = 1 << 63  # above every sequence
_KEPT = 3  # folders of earlier epochs; a stale driver whose folder is gone fails, as it should
# Commits before offsets: an offset written in between is a batch to be redone; a commit without its offset is nonsense.
_COPIED = ("metadata", "commits", "offsets", "parked", "cost.json")


_LEASED = "standby.json"  # beside the folders: which lease guards them


def folder(epoch: int) -> str:
    return f"epoch-{epoch:010d}"


def epoch_of(name: str) -> int:
    """The epoch of a folder."""
    return int(name.removeprefix("epoch-"))


@dataclass(frozen=True, slots=True)
class LeaseNote:
    """Which lease guards the folders: its bucket, and when that was made; and the folder behind which it counts."""

    bucket: str
    created: str
    ttl: float
    base: int = 0
    """A bucket that was made anew counts from 1 again, and its first owner must still be later than all before."""


def lease_of(files: Files) -> LeaseNote | None:
    """The lease of this checkpoint's last owner; None when it had none."""
    found = files.read(_LEASED)
    return None if found is None else LeaseNote(**json.loads(found))


@dataclass(frozen=True, slots=True)
class Replay:
    """The batch that the predecessor planned and did not commit."""

    batch: int
    planned_at: float
    """Unix seconds."""
    last: int
    """Its last sequence."""
    first: int
    """The sequence behind which it begins."""


def without_lease(files: Files) -> str:
    """The folder of a driver that runs without a lease: the newest there is, or a copy of it if a lease guarded it.

    Its last owner may only be frozen, and what it still writes when it wakes must be nobody's.
    """
    newest = (_folders(files) or [folder(0)])[-1]
    if lease_of(files) is None:
        return newest
    mine = folder(epoch_of(newest) + 1)
    _copy(files, newest, mine)
    files.delete(_LEASED)
    return mine


def prepare(files: Files, term: int, lease: LeaseNote) -> str:
    """The folder of the owner of this term, holding a copy of the newest earlier one; left alone if it exists.

    A stale owner that comes here late makes a folder that is older than that of its successor.
    """
    note = lease_of(files)
    if note is None or (note.bucket, note.created) != (lease.bucket, lease.created):
        note = replace(lease, base=max((epoch_of(name) for name in _folders(files)), default=0))
        files.write(_LEASED, json.dumps(asdict(note)))
    mine = folder(note.base + term)
    if files.exists(mine):
        return mine
    earlier = [name for name in _folders(files) if name < mine]
    if earlier:
        _copy(files, earlier[-1], mine)
    for name in earlier[:-_KEPT]:
        files.delete(name)
    return mine


def _copy(files: Files, source: str, target: str) -> None:
    fresh = f"{target}.copying"
    files.delete(fresh)
    for name in _COPIED:
        if files.exists(f"{source}/{name}"):
            files.copy(f"{source}/{name}", f"{fresh}/{name}")
    if files.exists(fresh):
        files.move(fresh, target)


def _folders(files: Files) -> list[str]:
    return [name for name in files.names() if name.startswith("epoch-") and "." not in name]


def replay_of(files: Files, checkpoint: str) -> Replay | None:
    """The batch that a query on this checkpoint begins with, when it was begun before."""
    planned = _numbers(files, f"{checkpoint}/offsets")
    done = _numbers(files, f"{checkpoint}/commits")
    if not planned or (done and done[-1] >= planned[-1]):
        return None
    text = files.read(f"{checkpoint}/offsets/{planned[-1]}") or ""
    before = files.read(f"{checkpoint}/offsets/{planned[-2]}") if len(planned) > 1 else None
    lines = text.splitlines()
    end = json.loads(lines[2])
    planned_at = json.loads(lines[1])["batchTimestampMs"] / 1000
    if "lease" in end:  # of a group: positions are those of its queue, ids are those of the stream behind it
        return Replay(planned[-1], planned_at, _ANY, 0)
    start = json.loads(before.splitlines()[2])["sequence"] if before else end["started"]
    return Replay(planned[-1], planned_at, int(end["sequence"]), int(start))


def _numbers(files: Files, folder: str) -> list[int]:
    return sorted(int(name) for name in files.names(folder) if name.isdigit())
