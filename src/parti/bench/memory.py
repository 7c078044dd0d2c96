"""The memory of this process and all it started, sampled while a block runs (Linux; 0 elsewhere)."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Self

_EVERY = 0.2  # seconds: a few percent of a core for a JVM's page tables, and no peak of a second is missed


class PeakMemory:
    """`peak` is the largest sum of proportional set sizes seen: pages that forked workers share count once."""

    def __init__(self) -> None:
        self.peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="parti-peak-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY):
            self.peak = max(self.peak, sum(_proportional(pid) for pid in _family(os.getpid())))


def _family(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it ended while we looked
            continue
        parent = int(text[text.rindex(")") + 2 :].split()[1])
        parents.setdefault(parent, []).append(int(stat.parent.name))
    found, at = [root], 0
    while at < len(found):
        found += parents.get(found[at], [])
        at += 1
    return found


def _proportional(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it ended while we looked
        return 0
    line = next((line for line in text.splitlines() if line.startswith("Pss:")), "Pss: 0")
    return int(line.split()[1]) * 1024
