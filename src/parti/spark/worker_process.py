"""Spark's Python worker processes: makes the next task in such a process cheaper."""

from __future__ import annotations

import gc
import os
from collections import Counter

_TASKS: Counter[int] = Counter()  # by process, because workers are forked from a daemon
_UNSETTLED = 3  # pyspark imports pandas and more only after the first task's results


def settle() -> None:
    """Exempt everything this worker process has imported so far from garbage collection; call it when a task starts.

    Spark's daemon collects after every task, and walking the objects of pyspark, pyarrow and pandas took 40 ms of CPU
    each time: as much as a small batch costs in all, and at the same time as the commit of that batch.
    """
    pid = os.getpid()
    if _TASKS[pid] < _UNSETTLED:
        _TASKS[pid] += 1
        gc.freeze()
