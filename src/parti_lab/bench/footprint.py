"""Peak memory and CPU time of this process and its descendants while a block runs (Linux only, else 0)."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Self

_EVERY = 0.2  # seconds: costs a few percent of a core for a JVM's page tables, and catches every peak of a second


class Footprint:
    """`peak` is the largest sum of proportional set sizes seen: pages shared by forked workers count once.

    `cpu_s` is the CPU time of all processes; unlike wall time, it hardly grows when the machine is busy.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._cpu: dict[int, float] = {}
        self._before: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="parti-footprint", daemon=True)

    def __enter__(self) -> Self:
        self._before = {pid: _cpu(pid) for pid in _family(os.getpid())}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def cpu_s(self) -> float:
        return sum(self._cpu.values()) - sum(self._before.values())

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY):
            family = _family(os.getpid())
            self.peak = max(self.peak, sum(_proportional(pid) for pid in family))
            for pid in family:
                self._cpu[pid] = max(_cpu(pid), self._cpu.get(pid, 0.0))


def _family(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it ended meanwhile
            continue
        parent = int(text[text.rindex(")") + 2 :].split()[1])
        parents.setdefault(parent, []).append(int(stat.parent.name))
    found, at = [root], 0
    while at < len(found):
        found += parents.get(found[at], [])
        at += 1
    return found


def _cpu(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it ended meanwhile
        return 0.0
    user, system = text[text.rindex(")") + 2 :].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _proportional(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it ended meanwhile
        return 0
    line = next((line for line in text.splitlines() if line.startswith("Pss:")), "Pss: 0")
    return int(line.split()[1]) * 1024
