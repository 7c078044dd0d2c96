"""What goes wrong is told in one sentence: Spark shows our errors without a page of Python frames around them.

A Python process of Spark's writes the exception that ended it, and ends; `SPARK_HIDE_TRACEBACK` makes it write the
error alone. It is set here at the very moment one of our own errors passes, so that nobody else's frames are hidden.
Errors that are not ours keep their frames: they need them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from parti.errors import PartiError


@contextmanager
def plainly() -> Iterator[None]:
    """For the outermost of our code in a process of Spark's; elsewhere nothing is changed."""
    try:
        yield
    except PartiError:
        if os.environ.get("SPARK_PYTHON_RUNTIME") == "PYTHON_WORKER":
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise
