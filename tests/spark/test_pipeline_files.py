"""Files beside a checkpoint, through Hadoop: a claim is made once, on each file system that `file:` may mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from parti.spark.pipeline import epochs
from parti.spark.pipeline.epochs import LeaseNote
from parti.spark.pipeline.files import Files, create_here
from parti.spark.session import FAST_CHECKPOINTS

RAW = FAST_CHECKPOINTS["spark.hadoop.fs.file.impl"]


@pytest.fixture(params=["checksummed", "raw"])
def files(spark, tmp_path: Path, request: pytest.FixtureRequest) -> Files:
    """On the local disk as Hadoop has it, and as sessions with fast checkpoints have it."""
    found = Files(spark, str(tmp_path / "checkpoint"))
    if request.param == "raw":
        raw = spark._jvm.org.apache.hadoop.fs.FileSystem.newInstance(_raw(spark))
        found._fs = raw
    return found


def _raw(spark):
    conf = spark._jvm.org.apache.hadoop.conf.Configuration(spark._jsc.hadoopConfiguration())
    conf.set("fs.file.impl", RAW)
    conf.set("fs.defaultFS", "file:///")
    return conf


def test_of_all_who_make_a_claim_one_has_made_it_and_anybody_can_read_it(files):
    assert files.create("claim", "first")
    assert not files.create("claim", "second")
    assert files.read("claim") == "first"
    assert files.names() == ["claim"]


def test_owners_follow_each_other_there(files):
    lease = LeaseNote("bucket", "now", 6.0, 1)
    first = epochs.prepare(files, lease, lambda: None)
    files.write(f"{first}/cost.json", "{}")
    assert epochs.prepare(files, lease, lambda: None) == first
    second = epochs.without_lease(files)
    assert epochs.epoch_of(second) > epochs.epoch_of(first)
    assert files.read(f"{second}/cost.json") == "{}"
    assert epochs.without_lease(files) == second


def test_where_there_are_no_links_a_claim_is_made_once_as_well(tmp_path, monkeypatch):
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refused)
    assert create_here(tmp_path / "claim", "first")
    assert not create_here(tmp_path / "claim", "second")
    assert [path.name for path in tmp_path.iterdir()] == ["claim"]
    assert (tmp_path / "claim").read_text() == "first"
