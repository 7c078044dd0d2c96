"""One checkpoint folder per epoch: nobody reads what a stale driver still writes.

Spark protects a shared checkpoint only by "the first writer of a file wins", whichever driver that is: in one run the
stale driver won and the new one died (docs/evidence/pipeline.md#p8). So each owner works on a copy of its predecessor's
folder, taken once.

The position belongs to the pipeline and not to the way it is run: every driver that starts, with or without a lease,
continues from the newest folder, and no owner's folder is ever older than that of its predecessor.

Epochs are claimed: a claim is a file that only one driver can create, and it names that driver's lease. The owner reads
the last claim, checks its lease, creates the next claim, and then checks that its claim is the last one. So a driver
that froze anywhere before its claim finds the claim taken, a higher one, or no lease, no matter whether its successor
had a lease, or in which bucket. A driver that froze after its claim has an older folder than its successor
(docs/decisions/0011-epochs-of-a-pipeline-are-claimed.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from parti.spark.pipeline.driver.hadoop_fs import HadoopFolder

_ANY = 1 << 63  # above every sequence
_KEPT = 3  # folders of earlier epochs; a stale driver whose folder was deleted fails, as it should
# Commits before offsets: an offset written in between is a batch to be redone; a commit without its offset is invalid.
_LOGS = ("commits", "offsets")
_COPIED = ("metadata", *_LOGS, "parked", "cost.json")


_CLAIM = "owner-"  # beside the folders: the owner of each epoch


def folder(epoch: int) -> str:
    return f"epoch-{epoch:010d}"


def epoch_of(name: str) -> int:
    """The epoch of a folder."""
    return int(name.removeprefix("epoch-"))


@dataclass(frozen=True, slots=True)
class LeaseNote:
    """The lease of an owner: its bucket, and when that was created, because a recreated bucket counts from 1 again."""

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
    """The sequence after which it starts."""


def without_lease(files: HadoopFolder) -> str:
    """The folder of a driver that runs without a lease: the newest one, or a copy of it if a lease guarded it.

    The last owner may only be frozen, and nobody may read what it writes when it wakes. An epoch is claimed each time,
    even if the folder stays: a driver that froze before its own claim must find it taken.
    """
    mine = _claim(files, None, lambda: None)
    newest = (_folders(files) or [folder(0)])[-1]
    # Also a driver that froze between its claim and its folder will create the folder when it wakes.
    since = [epoch for epoch in _claims(files) if epoch_of(newest) <= epoch < mine]
    if any(_lease_in(files, epoch) is not None for epoch in since):
        return _tidied(files, _copied(files, mine))
    for epoch in since:
        files.delete(_claim_file(epoch))  # hourly jobs would leave one claim each
    return _tidied(files, newest)


def prepare(files: HadoopFolder, lease: LeaseNote, check: Callable[[], None]) -> str:
    """The folder of the owner of this lease's term, with a copy of the newest earlier one; unchanged if it exists.

    `check` raises when the lease is no longer held. A stale owner either fails there or gets a folder that is older
    than that of its successor.
    """
    claims = _claims(files)
    mine = claims[-1] if claims and lease_of(files) == lease else _claim(files, lease, check)
    return _tidied(files, _copied(files, mine))


def _claim(files: HadoopFolder, lease: LeaseNote | None, check: Callable[[], None]) -> int:
    """Claim a new epoch, above all that were ever claimed."""
    text = json.dumps(None if lease is None else asdict(lease))
    while True:
        taken = [*_claims(files), *(epoch_of(name) for name in _folders(files))]
        mine = max(taken, default=0) + 1
        check()
        if not files.create(_claim_file(mine), text):
            continue
        if _claims(files)[-1] == mine:
            return mine
        files.delete(_claim_file(mine))  # an old number whose claim was deleted meanwhile, or another driver is ahead


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
    """The folder without files that a driver had only begun to write when it ended.

    Spark writes each entry under another name first. If that was the very first entry, Spark thinks that the folder
    belongs to another query, and no driver could ever start in it (STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY).
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
    """The batch that a query on this checkpoint starts with, if the batch was started before."""
    planned = _numbers(files, f"{checkpoint}/offsets")
    done = _numbers(files, f"{checkpoint}/commits")
    if not planned or (done and done[-1] >= planned[-1]):
        return None
    text = files.read(f"{checkpoint}/offsets/{planned[-1]}") or ""
    before = files.read(f"{checkpoint}/offsets/{planned[-2]}") if len(planned) > 1 else None
    lines = text.splitlines()
    end = json.loads(lines[2])
    planned_at = json.loads(lines[1])["batchTimestampMs"] / 1000
    if "lease" in end:  # in a group, positions are those of its queue, ids are those of the stream behind it
        return Replay(planned[-1], planned_at, _ANY, 0)
    start = json.loads(before.splitlines()[2])["sequence"] if before else end["started"]
    return Replay(planned[-1], planned_at, int(end["sequence"]), int(start))


def _numbers(files: HadoopFolder, folder: str) -> list[int]:
    return sorted(int(name) for name in files.names(folder) if name.isdigit())
