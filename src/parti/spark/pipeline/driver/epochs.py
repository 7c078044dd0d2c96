"""One checkpoint folder per epoch: what a stale driver still writes, nobody reads.

Spark guards a shared checkpoint only by "the first writer of a file wins", whoever that is: in a run the stale driver
won and the new one died (docs/evidence/pipeline.md#p8). So each owner works on a copy of its predecessor's folder,
taken once.

The position belongs to the pipeline and not to the way it is run: whoever begins, with a lease or without, goes on from
the newest folder there is, and no owner's folder is ever older than that of its predecessor.

Epochs are claimed: a claim is a file that only one can make, and says by whose lease. Between seeing which is the last
one and making the next, the owner looks at its lease, and afterwards whether its claim is the last one. So a driver
that was frozen anywhere before its claim finds another's in its place or above it, or no lease, whatever lease, bucket
or none its successor had; one that was frozen after it has a folder that is older than its successor's
(docs/decisions/0011-epochs-of-a-pipeline-are-claimed.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from parti.spark.pipeline.driver.hadoop_fs import HadoopFolder

_ANY = 1 << 63  # above every sequence
_KEPT = 3  # folders of earlier epochs; a stale driver whose folder is gone fails, as it should
# Commits before offsets: an offset written in between is a batch to be redone; a commit without its offset is nonsense.
_LOGS = ("commits", "offsets")
_COPIED = ("metadata", *_LOGS, "parked", "cost.json")


_CLAIM = "owner-"  # beside the folders: who has which epoch


def folder(epoch: int) -> str:
    return f"epoch-{epoch:010d}"


def epoch_of(name: str) -> int:
    """The epoch of a folder."""
    return int(name.removeprefix("epoch-"))


@dataclass(frozen=True, slots=True)
class LeaseNote:
    """By which lease an owner works: its bucket, and when that was made, for one made anew counts from 1 again."""

    bucket: str
    created: str
    ttl: float
    term: int = 0


def lease_of(files: HadoopFolder) -> LeaseNote | None:
    """The lease of this checkpoint's last owner; None when it had none."""
    claims = _claims(files)
    return _lease_in(files, claims[-1]) if claims else None


def _lease_in(files: HadoopFolder, epoch: int) -> LeaseNote | None:
    found = json.loads(files.read(_claim_file(epoch)) or "null")
    return None if found is None else LeaseNote(**found)


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


def without_lease(files: HadoopFolder) -> str:
    """The folder of a driver that runs without a lease: the newest there is, or a copy of it if a lease guarded it.

    Its last owner may only be frozen, and what it still writes when it wakes must be nobody's. An epoch is claimed each
    time, also where the folder stays: one that was frozen before its own claim must find it taken.
    """
    mine = _claim(files, None, lambda: None)
    newest = (_folders(files) or [folder(0)])[-1]
    # Also one that has claimed and was frozen before it made its folder will make it when it wakes.
    since = [epoch for epoch in _claims(files) if epoch_of(newest) <= epoch < mine]
    if any(_lease_in(files, epoch) is not None for epoch in since):
        return _tidied(files, _copied(files, mine))
    for epoch in since:
        files.delete(_claim_file(epoch))  # jobs that run every hour would leave one each
    return _tidied(files, newest)


def prepare(files: HadoopFolder, lease: LeaseNote, check: Callable[[], None]) -> str:
    """The folder of the owner of this lease's term, holding a copy of the newest earlier one; left alone if it exists.

    `check` raises when the lease is not held any more. A stale owner either fails there or gets a folder that is older
    than that of its successor.
    """
    claims = _claims(files)
    mine = claims[-1] if claims and lease_of(files) == lease else _claim(files, lease, check)
    return _tidied(files, _copied(files, mine))


def _claim(files: HadoopFolder, lease: LeaseNote | None, check: Callable[[], None]) -> int:
    """An epoch of one's own, above all that were ever claimed."""
    text = json.dumps(None if lease is None else asdict(lease))
    while True:
        taken = [*_claims(files), *(epoch_of(name) for name in _folders(files))]
        mine = max(taken, default=0) + 1
        check()
        if not files.create(_claim_file(mine), text):
            continue
        if _claims(files)[-1] == mine:
            return mine
        files.delete(_claim_file(mine))  # an old number, which was forgotten meanwhile, or somebody is ahead already


def _copied(files: HadoopFolder, epoch: int) -> str:
    mine = folder(epoch)
    if files.exists(mine):
        return mine
    earlier = [name for name in _folders(files) if name < mine]
    if earlier:
        _copy(files, earlier[-1], mine)
    for name in earlier[:-_KEPT]:
        files.delete(name)
    for old in _claims(files) if len(earlier) > _KEPT else ():
        if old < epoch_of(earlier[-_KEPT]):
            files.delete(_claim_file(old))
    return mine


def _tidied(files: HadoopFolder, name: str) -> str:
    """The folder without what a driver had only begun to write when it ended.

    Spark writes each entry under another name first. Where that was the very first one it takes the folder for somebody
    else's, and no driver could ever begin in it (STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY).
    """
    for log in _LOGS:
        for begun in [entry for entry in files.names(f"{name}/{log}") if entry.endswith(".tmp")]:
            files.delete(f"{name}/{log}/{begun}")
    return name


def _claim_file(epoch: int) -> str:
    return f"{_CLAIM}{epoch:010d}.json"


def _claims(files: HadoopFolder) -> list[int]:
    return [
        int(name.removeprefix(_CLAIM).removesuffix(".json"))
        for name in files.names()
        if name.startswith(_CLAIM) and name.endswith(".json")
    ]


def _copy(files: HadoopFolder, source: str, target: str) -> None:
    fresh = f"{target}.copying"
    files.delete(fresh)
    for name in _COPIED:
        if files.exists(f"{source}/{name}"):
            files.copy(f"{source}/{name}", f"{fresh}/{name}")
    if files.exists(fresh):
        files.move(fresh, target)


def _folders(files: HadoopFolder) -> list[str]:
    return [name for name in files.names() if name.startswith("epoch-") and "." not in name]


def replay_of(files: HadoopFolder, checkpoint: str) -> Replay | None:
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


def _numbers(files: HadoopFolder, folder: str) -> list[int]:
    return sorted(int(name) for name in files.names(folder) if name.isdigit())
