"""Only what we say reaches the terminal: Spark, its JVM and their Python processes write to a log instead."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def quietly(log: Path) -> Iterator[TextIO]:
    """Until the block ends, what this process and those it starts write to stderr goes to `log`.

    Yields a stream that reaches the terminal. Spark's launcher offers no place for the JVM's output, and Python workers
    that end beside a stopped query each print a traceback (docs/evidence/spark.md#s22): the file descriptor is the only
    way.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    with open(log, "ab") as file, os.fdopen(terminal, "w", encoding="utf-8", errors="replace") as shown:
        os.dup2(file.fileno(), 2)
        try:
            yield shown
        finally:
            sys.stderr.flush()
            shown.flush()
            os.dup2(terminal, 2)
