"""Parked messages between batches: stored in the checkpoint, joined with the next batch, retried when due.

The state after batch N is a folder `parked/N`. A replay of batch N reads `parked/N-1` as the first run did and rewrites
`parked/N`, so it is exact without a log. Rows are written to a temporary folder and renamed when complete: the folder's
name says that it is complete. There is no marker file, because a Hadoop setting can disable those.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from parti.errors import FatalError
from parti.spark.pipeline.driver.hadoop_fs import HadoopFolder
from parti.spark.pipeline.executor.blocks import DDL, Packing

MOST = 100_000
"""Maximum of parked messages; they are part of every batch, so more of them would slow down everything else."""


class TooManyParked(FatalError):
    """Nearly everything fails: the fault is not in single messages. Find it, then start the pipeline again."""


class CheckpointParking:
    """The parked messages of one query. `due` is a local file that tells the reader when the next one is due."""

    def __init__(self, files: HadoopFolder, folder: str, due: Path) -> None:
        self._files = files
        self._folder = folder
        self._due = due

    def __repr__(self) -> str:
        return f"<CheckpointParking {self._folder}>"

    def joined(self, frame: Any, number: int, packing: Packing) -> Any:
        """The blocks of the batch, together with those of the parked messages."""
        self._files.delete(f"{self._folder}/{number - 2}")
        before = f"{self._folder}/{number - 1}"
        if not self._files.exists(before):
            return frame
        parked = frame.sparkSession.read.parquet(self._files.at(before))
        return frame.unionByName(parked.coalesce(1).sortWithinPartitions("sequence").mapInArrow(packing.pack, DDL))

    def store(self, parked: Any, number: int, count: int, due: float | None) -> None:
        """Store these rows, which are parked after this batch, and write down when the first of them is due."""
        name = f"{self._folder}/{number}"
        if count > MOST:
            raise TooManyParked(f"{count} messages are parked, more than {MOST}: the batch is not committed")
        if due is None:
            self._files.delete(name)
            with contextlib.suppress(FileNotFoundError):
                self._due.unlink()
            return
        fresh = f"{self._folder}/.{number}"
        parked.coalesce(1).write.mode("overwrite").parquet(self._files.at(fresh))
        self._files.move(fresh, name)
        self.announce(due)

    def resume(self, spark: Any, last_batch: int) -> None:
        """Write down when the first message that an earlier run parked is due."""
        from pyspark.sql import functions as f

        name = f"{self._folder}/{last_batch}"
        if self._files.exists(name):
            self.announce(spark.read.parquet(self._files.at(name)).agg(f.min("parked_until")).first()[0])

    def announce(self, due: float) -> None:
        """Tell the reader when to make a batch even if nothing new comes."""
        fresh = self._due.with_suffix(".new")
        fresh.write_text(repr(due))
        os.replace(fresh, self._due)
