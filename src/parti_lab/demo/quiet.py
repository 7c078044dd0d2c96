"""Only the demonstration's own output reaches the terminal: Spark, its JVM and Python processes write to a log."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def quietly(log: Path) -> Iterator[TextIO]:
    """Until the block ends, stderr of this process and of its child processes goes to `log`.

    Yields a stream that reaches the terminal. Spark's launcher has no option for the JVM's output, and Python workers
    that end beside a stopped query each print a traceback (docs/evidence/spark.md#s22). So the file descriptor is
    redirected.
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
