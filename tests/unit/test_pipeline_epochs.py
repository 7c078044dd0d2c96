"""Checkpoint folders of owners: whoever begins goes on from where the last one was, and a stale owner harms nobody."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from parti.spark.pipeline import epochs
from parti.spark.pipeline.epochs import LeaseNote
from parti.spark.pipeline.files import Files
from parti.spark.session import _interrupt_kept


class Disk:
    """`Files` on the local disk, without a JVM."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def names(self, folder: str = "") -> list[str]:
        return sorted(path.name for path in (self.root / folder).iterdir())

    def read(self, name: str) -> str | None:
        return (self.root / name).read_text() if self.exists(name) else None

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(exist_ok=True)
        (self.root / name).write_text(text)

    def delete(self, name: str) -> None:
        path = self.root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def move(self, source: str, target: str) -> None:
        (self.root / source).rename(self.root / target)

    def copy(self, source: str, target: str) -> None:
        (self.root / target).parent.mkdir(exist_ok=True)
        shutil.copy(self.root / source, self.root / target)


Step = st.sampled_from(["plain", "leased", "bucket made anew", "other bucket", "stale"])


@settings(max_examples=40, deadline=None)
@given(st.lists(Step, max_size=25))
def test_the_position_is_never_lost_and_no_owner_is_older_than_its_predecessor(steps):
    with TemporaryDirectory() as root:
        disk = cast(Files, Disk(Path(root)))
        position, newest, term, bucket, created = 0, -1, 0, "a", "1"
        stale: list[tuple[int, LeaseNote]] = []
        for number, step in enumerate(steps):
            if step == "stale" and stale:  # an owner of this bucket that was frozen before it made its folder
                late = epochs.prepare(disk, *stale[-1])
                assert epochs.epoch_of(late) < max(newest, 1)
                disk.write(f"{late}/cost.json", "stale")
                continue
            if step == "plain":
                folder = epochs.without_lease(disk)
                assert epochs.lease_of(disk) is None
                stale.clear()
            else:
                if step == "bucket made anew":
                    term, created = 0, str(number)
                    stale.clear()
                if step == "other bucket":
                    term, bucket = 0, f"b{number}"
                    stale.clear()
                lease = LeaseNote(bucket, created, 6.0)
                term += 2  # the term between was that of one who was frozen at once
                folder = epochs.prepare(disk, term, lease)
                stale.append((term - 1, lease))
            assert int(disk.read(f"{folder}/cost.json") or 0) == position
            assert epochs.epoch_of(folder) >= newest
            newest, position = epochs.epoch_of(folder), position + 1
            disk.write(f"{folder}/cost.json", str(position))


def test_what_a_program_does_on_sigint_stays_its_own():
    before = signal.getsignal(signal.SIGINT)

    def ours(*_: object) -> None: ...

    def sparks(*_: object) -> None: ...

    try:
        for own, after in ((ours, ours), (signal.default_int_handler, sparks)):
            signal.signal(signal.SIGINT, own)
            with _interrupt_kept():
                signal.signal(signal.SIGINT, sparks)
            assert signal.getsignal(signal.SIGINT) is after
    finally:
        signal.signal(signal.SIGINT, before)
