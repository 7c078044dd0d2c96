"""Python's garbage collector, set for a process that holds thousands of tasks at once."""

from __future__ import annotations

import gc


def tune_gc() -> None:
    """Look for cycles less often, and never among what was there at the start.

    With Python's own thresholds the collector looks at every task in hand hundreds of times before it is let go: 17 of
    240 us a delivery. For a whole process, so that only a program may call it, never a library.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
