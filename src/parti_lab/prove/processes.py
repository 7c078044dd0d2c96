"""Reads the output of processes that we started, and finds and kills their descendants (Linux, /proc)."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True, slots=True)
class SeenEffect:
    """A process as it was when we looked; `started` distinguishes it from a later one with the same pid."""

    pid: int
    parent: int
    started: str
    command: str

    @property
    def is_java(self) -> bool:
        return "java" in self.command.split("\0", 1)[0]

    @property
    def is_python_worker(self) -> bool:
        """Whether it runs tasks: it is forked by pyspark's daemon, which is its parent and has the same command."""
        return "pyspark.daemon" in self.command or "parti_lab.prove.delivery_daemon" in self.command


def below(pid: int) -> list[SeenEffect]:
    """The descendants of `pid`, parents before children; without `pid` itself."""
    everything = list(_all())
    found: list[SeenEffect] = []
    wave = {pid}
    while wave:
        children = [process for process in everything if process.parent in wave]
        found += children
        wave = {process.pid for process in children}
    return found


def kill(processes: Iterable[SeenEffect]) -> int:
    """SIGKILL those that are still the same processes; returns how many were hit."""
    hit = 0
    for process in processes:
        if is_alive(process):
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            hit += 1
    return hit


def is_alive(process: SeenEffect) -> bool:
    """Whether this same process still runs."""
    now = _look(Path("/proc") / str(process.pid))
    return now is not None and now.started == process.started


def _all() -> Iterable[SeenEffect]:
    for entry in Path("/proc").glob("[0-9]*"):
        seen = _look(entry)
        if seen is not None:
            yield seen


def _look(entry: Path) -> SeenEffect | None:
    try:
        stat = (entry / "stat").read_text()
        command = (entry / "cmdline").read_text(errors="replace")
    except OSError:  # the process ended meanwhile
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    return SeenEffect(int(entry.name), int(fields[1]), fields[19], command)


def json_lines(output: IO[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects that a process prints, one per line, until it ends; other output of its libraries is skipped."""
    for line in output:
        try:
            yield json.loads(line)
        except ValueError:
            continue
