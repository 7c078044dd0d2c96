"""Files beside a checkpoint, through Hadoop: a claim is created once, on each file system that `file:` may mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parti.errors import FatalError
from parti.spark.pipeline.driver import epochs
from parti.spark.pipeline.driver.epochs import LeaseNote
from parti.spark.pipeline.driver.hadoop_fs import HadoopFolder, create_here
from parti.spark.session import FAST_CHECKPOINTS

RAW = FAST_CHECKPOINTS["spark.hadoop.fs.file.impl"]


@pytest.fixture(params=["checksummed", "raw"])
def files(spark: Any, tmp_path: Path, request: pytest.FixtureRequest) -> HadoopFolder:
    """On the local disk as Hadoop has it, and as sessions with fast checkpoints have it."""
    found = HadoopFolder(spark, str(tmp_path / "checkpoint"))
    if request.param == "raw":
        raw = spark._jvm.org.apache.hadoop.fs.FileSystem.newInstance(_raw(spark))
        found._fs = raw
    return found


def _raw(spark: Any) -> Any:
    conf = spark._jvm.org.apache.hadoop.conf.Configuration(spark._jsc.hadoopConfiguration())
    conf.set("fs.file.impl", RAW)
    conf.set("fs.defaultFS", "file:///")
    return conf


def test_of_all_who_make_a_claim_one_has_made_it_and_anybody_can_read_it(files: HadoopFolder) -> None:
    assert files.create("claim", "first")
    assert not files.create("claim", "second")
    assert files.read("claim") == "first"
    assert files.names() == ["claim"]


def test_owners_follow_each_other_there(files: HadoopFolder) -> None:
    lease = LeaseNote("bucket", "now", 6.0, 1)
    first = epochs.prepare(files, lease, lambda: None)
    files.write(f"{first}/cost.json", "{}")
    assert epochs.prepare(files, lease, lambda: None) == first
    second = epochs.without_lease(files)
    assert epochs.epoch_of(second) > epochs.epoch_of(first)
    assert files.read(f"{second}/cost.json") == "{}"
    assert epochs.without_lease(files) == second


def test_where_there_are_no_links_a_claim_is_made_once_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refused)
    assert create_here(tmp_path / "claim", "first")
    assert not create_here(tmp_path / "claim", "second")
    assert [path.name for path in tmp_path.iterdir()] == ["claim"]
    assert (tmp_path / "claim").read_text() == "first"


class Refuses:
    """The real file system, but for one call that answers False, as HDFS does where it cannot do it."""

    def __init__(self, real: Any, call: str) -> None:
        self._real, self._call = real, call

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: False) if name == self._call else getattr(self._real, name)


def test_a_rename_that_the_file_system_refuses_is_an_error_and_what_was_there_is_kept(files: HadoopFolder) -> None:
    files.write("batch.new/rows", "rows")
    files._fs = Refuses(files._fs, "rename")
    with pytest.raises(FatalError, match=r"batch\.new could not be renamed to .*batch"):
        files.move("batch.new", "batch")
    assert files.read("batch.new/rows") == "rows"


def test_a_small_file_whose_rename_is_refused_is_no_silent_success(files: HadoopFolder) -> None:
    files._fs = Refuses(files._fs, "rename")
    with pytest.raises(FatalError, match=r"could not be renamed"):
        files.write("cost.json", "{}")


def test_a_copy_is_there_or_an_error(files: HadoopFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write("a/rows", "rows")
    files.copy("a", "b")
    assert files.read("b/rows") == "rows"

    class Jvm:
        """Only FileUtil is another, whose copy answers False."""

        def __getattr__(self, name: str) -> Any:
            return Refuses(self, "copy") if name == "FileUtil" else self

    monkeypatch.setattr(files, "_path", lambda name: name)
    monkeypatch.setattr(files, "_jvm", Jvm())
    with pytest.raises(FatalError, match=r"a could not be copied to .*c"):
        files.copy("a", "c")
