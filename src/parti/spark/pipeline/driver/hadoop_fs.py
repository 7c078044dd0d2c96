"""Small files and folders beside a checkpoint, on any file system that Spark can write to."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from parti.errors import FatalError


class HadoopFolder:
    """Hadoop's file system behind one root folder, through the session's JVM. For the driver only."""

    def __init__(self, spark: Any, root: str) -> None:
        self._spark = spark
        self._jvm = spark._jvm
        self._conf = spark._jsc.hadoopConfiguration()
        self.root = root.rstrip("/")
        self._fs = self._path("").getFileSystem(self._conf)

    def __repr__(self) -> str:
        return f"<HadoopFolder {self.root}>"

    def at(self, name: str) -> str:
        """The address of a file or folder, as Spark takes it."""
        return f"{self.root}/{name}" if name else self.root

    def within(self, root: str) -> HadoopFolder:
        """The same file system with another root folder."""
        return HadoopFolder(self._spark, root)

    def exists(self, name: str) -> bool:
        return bool(self._fs.exists(self._path(name)))

    def names(self, folder: str = "") -> list[str]:
        """The sorted names in a folder; empty when there is no such folder."""
        if not self.exists(folder):
            return []
        return sorted(str(status.getPath().getName()) for status in self._fs.listStatus(self._path(folder)))

    def read(self, name: str) -> str | None:
        """The text of a small file, None when there is none."""
        if not self.exists(name):
            return None
        stream = self._fs.open(self._path(name))
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def write(self, name: str, text: str) -> None:
        """Replace a small file; a reader sees the old text or the new one, or briefly no file."""
        fresh = self._path(f"{name}.new")
        stream = self._fs.create(fresh, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        self.move(f"{name}.new", name)

    def create(self, name: str, text: str) -> bool:
        """Create a small file that must not exist; False when it exists. Of two concurrent callers, one succeeds.

        Needs an atomic `create` without overwriting: HDFS, object stores with conditional writes, and the local disk,
        for which this class does it itself, because Hadoop's version there is not atomic.
        """
        path = self._path(name)
        # Not `getScheme`: Hadoop's raw local file system, used by fast checkpoints, does not implement it.
        if self._fs.getUri().getScheme() == "file":
            return create_here(Path(self._fs.makeQualified(path).toUri().getPath()), text)
        try:
            stream = self._fs.create(path, False)
        except Exception as error:
            if "FileAlreadyExists" in str(error) or self.exists(name):
                return False
            raise
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        return True

    def move(self, source: str, target: str) -> None:
        """Rename, replacing the target; afterwards the target exists, or an error was raised."""
        if self.exists(target):
            self.delete(target)
        if not self._fs.rename(self._path(source), self._path(target)):
            raise FatalError(f"{self.at(source)} could not be renamed to {self.at(target)}: see the file system's log")

    def delete(self, name: str) -> None:
        self._fs.delete(self._path(name), True)

    def copy(self, source: str, target: str) -> None:
        """Copy a file, or a folder with its content; afterwards the target exists, or an error was raised."""
        utils = self._jvm.org.apache.hadoop.fs.FileUtil
        if not utils.copy(self._fs, self._path(source), self._fs, self._path(target), False, True, self._conf):
            raise FatalError(f"{self.at(source)} could not be copied to {self.at(target)}: see the file system's log")

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self.at(name))


def create_here(path: Path, text: str) -> bool:
    """Create a file on the local disk that must not exist, atomically and with its content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fresh.write_text(text)
    try:
        os.link(fresh, path)
    except FileExistsError:
        return False
    except OSError:  # a mounted object store, or a share, has no hard links: only the name is created atomically
        try:
            with path.open("x") as made:
                made.write(text)
        except FileExistsError:
            return False
    finally:
        fresh.unlink()
    return True
