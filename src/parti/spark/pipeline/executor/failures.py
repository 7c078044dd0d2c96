"""The cause of a failure, without the stack traces of two languages around it."""

from __future__ import annotations

import re

from parti.errors import FatalError

_LONGEST = 1_500
_NOISE = (
    "at ",
    "File ",
    "...",
    "JVM stacktrace",
    "Traceback",
    "During handling",
    "The above exception",
    "SQLSTATE",
    "^",
    "~",
)
_TELLS = re.compile(r"^(?:[\w.]+\.)?([A-Z]\w+: .*)")


class BatchFailed(FatalError):
    """A batch failed: the message says why. It is replayed when the pipeline is started again."""


def first_cause(error: BaseException) -> str:
    """The lines of an error that say what happened; in Spark's errors the Python lines come last, and say most."""
    text = str(error).partition("=== Streaming Query ===")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(_NOISE)]
    named = [match[1] for line in kept if (match := _TELLS.match(line)) and "py4j" not in line and "Caused" not in line]
    own = [line for line in named if not line.startswith(("SparkException", "PythonException", "Py4J"))]
    chosen = own[-2:] or named[:2] or kept[:2] or [type(error).__name__]
    text = " | ".join(dict.fromkeys(chosen))
    if len(lines) == 1 and not isinstance(error, FatalError):
        text = f"{type(error).__name__}: {lines[0]}"
    return text[:_LONGEST]
