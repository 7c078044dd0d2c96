"""Checkpoint folders of owners: a new owner continues where the last one was, and a stale owner does no harm."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parti.spark.pipeline.driver import epochs
from parti.spark.pipeline.driver.epochs import LeaseNote
from parti.spark.pipeline.driver.hadoop_fs import HadoopFolder, create_here
from parti.spark.session import _interrupt_kept


class Disk:
    """`HadoopFolder` on the local disk, without a JVM."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def names(self, folder: str = "") -> list[str]:
        return sorted(path.name for path in (self.root / folder).iterdir()) if self.exists(folder) else []

    def read(self, name: str) -> str | None:
        return (self.root / name).read_text() if self.exists(name) else None

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def create(self, name: str, text: str) -> bool:
        return create_here(self.root / name, text)

    def delete(self, name: str) -> None:
        path = self.root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def move(self, source: str, target: str) -> None:
        (self.root / source).rename(self.root / target)

    def copy(self, source: str, target: str) -> None:
        (self.root / target).parent.mkdir(exist_ok=True)
        copy: Any = shutil.copytree if (self.root / source).is_dir() else shutil.copy
        copy(self.root / source, self.root / target)


class Frozen(Disk):
    """The disk as a driver sees it that stands still before one of its calls, until others have been and gone."""

    def __init__(self, disk: Disk, calls: int, meanwhile: Callable[[], None]) -> None:
        super().__init__(disk.root)
        self.left = calls
        self.meanwhile = meanwhile

    def __getattribute__(self, name: str) -> Any:
        if name in ("exists", "names", "read", "create", "delete", "move", "copy"):
            self.left -= 1
            if self.left == 0:
                self.meanwhile()
        return super().__getattribute__(name)


class Killed(Exception):
    """The end of a driver."""


class Lost(Exception):
    """What a lease says that is not held any more."""


def held() -> None: ...


class Owners:
    """Drivers one after the other on one checkpoint; each does a step of the work, which is the position."""

    def __init__(self, root: str) -> None:
        self.disk = Disk(Path(root))
        self.position, self.newest = 0, -1
        self.bucket, self.created, self.term = "a", "1", 0

    def elected(self, kind: str) -> LeaseNote | None:
        if kind == "plain":
            return None
        if kind != "leased":
            self.term = 0
            self.bucket, self.created = (
                (self.bucket, f"{self.created}x") if "anew" in kind else (f"{self.bucket}b", "1")
            )
        self.term += 1
        return LeaseNote(self.bucket, self.created, 6.0, self.term)

    def begins(self, lease: LeaseNote | None) -> None:
        disk = cast(HadoopFolder, self.disk)
        for _ in range(2):  # a query that is started again in the same term goes on in the same folder
            folder = epochs.without_lease(disk) if lease is None else epochs.prepare(disk, lease, held)
            assert epochs.lease_of(disk) == lease
            assert int(disk.read(f"{folder}/cost.json") or 0) == self.position
            assert epochs.epoch_of(folder) >= self.newest
            for log in ("offsets", "commits"):
                assert not [name for name in disk.names(f"{folder}/{log}") if "tmp" in name]  # Spark would not begin
                disk.write(f"{folder}/{log}/.{self.position}.an-id.tmp", "")  # as one does that is killed meanwhile
            self.newest, self.position = epochs.epoch_of(folder), self.position + 1
            disk.write(f"{folder}/cost.json", str(self.position))

    def freezes(self, lease: LeaseNote, calls: int, successors: list[str]) -> None:
        """An owner stands still before that many calls; others take over; then it goes on, and does its worst."""
        frozen = False

        def meanwhile() -> None:
            nonlocal frozen
            frozen = True
            for kind in successors:
                self.begins(self.elected(kind))

        def check() -> None:
            if frozen:
                raise Lost

        try:
            late = epochs.prepare(cast(HadoopFolder, Frozen(self.disk, calls, meanwhile)), lease, check)
        except (Lost, FileNotFoundError):  # its folder is older than those that are kept: it fails, as it should
            assert frozen
            return
        if frozen:
            assert epochs.epoch_of(late) < self.newest
            self.disk.write(f"{late}/cost.json", "stale")
        else:  # it was done before it would have stood still
            self.newest = epochs.epoch_of(late)

    def dies(self, lease: LeaseNote | None, calls: int) -> None:
        """An owner is killed before that many calls, if it makes so many."""

        def killed() -> None:
            raise Killed

        disk = cast(HadoopFolder, Frozen(self.disk, calls, killed))
        with contextlib.suppress(Killed):
            self.newest = epochs.epoch_of(
                epochs.without_lease(disk) if lease is None else epochs.prepare(disk, lease, held)
            )


Kind = st.sampled_from(["plain", "leased", "leased", "bucket recreated", "other bucket"])
Freeze = st.tuples(st.integers(1, 25), st.lists(Kind, min_size=1, max_size=6))
Death = st.integers(1, 25)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(Kind, st.none() | Freeze | Death), max_size=8))
@example([("leased", (4, ["plain"]))])  # a successor without a lease, that claimed nothing: seldom drawn
@example([("plain", None), ("leased", (6, ["plain", "leased"]))])
@example([("plain", None), ("leased", (6, ["plain"] * 3))])  # whose claims forget those before them
def test_the_position_is_never_lost_and_no_owner_is_older_than_its_predecessor(steps: Any) -> None:
    """Whatever leases owners have or have not, and wherever one of them was frozen or killed on its way."""
    with TemporaryDirectory() as root:
        owners = Owners(root)
        for kind, fate in steps:
            lease = owners.elected(kind)
            if isinstance(fate, int):
                owners.dies(lease, fate)
                lease = owners.elected(kind)
            elif lease is not None and fate is not None:
                owners.freezes(lease, *fate)
                lease = owners.elected("leased")
            owners.begins(lease)


@pytest.mark.parametrize("kind", ["plain", "leased"])
def test_claims_and_folders_of_long_ago_are_forgotten(tmp_path: Path, kind: Any) -> None:
    owners = Owners(str(tmp_path))
    for _ in range(20):
        owners.begins(owners.elected(kind))
    assert len(owners.disk.names()) <= 9


@pytest.mark.parametrize("there", [True, False])
def test_of_all_who_make_a_file_at_once_one_has_made_it(tmp_path: Path, there: Any) -> None:
    if there:
        create_here(tmp_path / "claim", "before")
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda number: create_here(tmp_path / "claim", str(number)), range(64)))
    assert sum(made) == (0 if there else 1)
    assert (tmp_path / "claim").read_text() == ("before" if there else str(made.index(True)))
    assert [path.name for path in tmp_path.iterdir()] == ["claim"]


def test_what_a_program_does_on_sigint_stays_its_own() -> None:
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
