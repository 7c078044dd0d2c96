"""parti's errors appear as one sentence: Spark shows them without a page of Python frames around them.

A Python process of Spark writes the exception that ended it, and ends; `SPARK_HIDE_TRACEBACK` makes it write only the
error. The variable is set here only when one of parti's own errors passes, so that no other frames are hidden. Other
errors keep their frames, because those are needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from parti.errors import PartiError


@contextmanager
def plainly() -> Iterator[None]:
    """For the outermost parti code in a Spark process; elsewhere it changes nothing."""
    try:
        yield
    except PartiError:
        if os.environ.get("SPARK_PYTHON_RUNTIME") == "PYTHON_WORKER":
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise
