"""Finds the Java that Spark runs on: JAVA_HOME, then PATH, then the install locations of Linux distributions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

OLDEST: Final = 17  # Spark 4 does not start on an older Java
JVM_FOLDERS: Final = Path("/usr/lib/jvm")
_VERSION: Final = re.compile(r'version "([^"]+)"')


@dataclass(frozen=True, slots=True)
class Java:
    """A Java installation that runs. Spark uses it when JAVA_HOME is set to `home`."""

    home: Path
    version: str
    origin: str

    @property
    def major(self) -> int:
        """17 for "17.0.9", 8 for "1.8.0_402"."""
        numbers = [int(part) for part in re.findall(r"\d+", self.version)]
        if len(numbers) > 1 and numbers[0] == 1:
            return numbers[1]
        return numbers[0] if numbers else 0


def find_java(environ: Mapping[str, str] | None = None, folders: Path = JVM_FOLDERS) -> Java | None:
    """The first Java that is new enough, in the order above; else the newest one that is too old; else None."""
    environ = os.environ if environ is None else environ
    too_old: list[Java] = []
    for program, origin in _candidates(environ, folders):
        java = _inspect(program, origin)
        if java is None:
            continue
        if java.major >= OLDEST:
            return java
        too_old.append(java)
    return max(too_old, key=lambda java: java.major, default=None)


def _candidates(environ: Mapping[str, str], folders: Path) -> Iterator[tuple[Path, str]]:
    if environ.get("JAVA_HOME"):
        yield Path(environ["JAVA_HOME"]) / "bin" / "java", "JAVA_HOME"
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path:
        yield Path(on_path), "PATH"
    for program in sorted(folders.glob("*/bin/java")):
        yield program, str(program.parent.parent)


def _inspect(program: Path, origin: str) -> Java | None:
    try:
        done = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(done.stderr + done.stdout)
    # /usr/bin/java is a chain of links into the real home, and JAVA_HOME must be the real home.
    return Java(program.resolve().parent.parent, found[1], origin) if found else None
