"""Python's garbage collector, set for a process that holds thousands of tasks at once."""

from __future__ import annotations

import gc


def tune_gc() -> None:
    """Look for cycles less often, and never among objects that existed at the start.

    With Python's default thresholds the collector visits every task in flight hundreds of times: 17 of 240 us per
    delivery. This setting is global to the process, so only a program may call it, never a library.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
