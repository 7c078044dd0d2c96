"""When an error of parti ends a program through Spark, its one sentence is the last line that is printed.

Spark puts what a source says into a text of its own: an error class and ids before it, then the plan of the query, or
Java frames. That text is made in the JVM, where nothing of parti runs, so that its end is Spark's. What can be had is a
line behind it, in programs whose session `parti.spark.session` made: Python asks `sys.excepthook` what to print.
"""

from __future__ import annotations

import re
import sys
from types import TracebackType
from typing import Final

from parti.errors import PartiError

_OURS: Final = re.compile(r"\bparti(?:\.\w+)*\.([A-Z]\w*: .+)")  # as Spark's worker processes write an exception


def sentence_of(error: BaseException) -> str | None:
    """What parti said, out of the text of a Spark exception; None when it was not parti that failed."""
    if isinstance(error, PartiError):
        return None  # it is its own last line
    found = _OURS.findall(str(error))
    return found[0].strip() if found else None


class LastWords:
    """An excepthook: what was there before prints as ever, then comes the sentence."""

    def __init__(self) -> None:
        self._before = sys.excepthook

    def __repr__(self) -> str:
        return f"<LastWords after {self._before!r}>"

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)
        if (sentence := sentence_of(error)) is not None:
            print(f"\n{sentence}", file=sys.stderr)


def say_last_words() -> None:
    """From now on an error that ends this program is summed up in its last line; called twice it is done once."""
    if not isinstance(sys.excepthook, LastWords):
        sys.excepthook = LastWords()
