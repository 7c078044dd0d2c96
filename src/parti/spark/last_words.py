"""When a parti error ends a program through Spark, the last line printed is parti's one-sentence message.

Spark wraps the error of a source in its own text: an error class and ids before it, then the plan of the query, or Java
frames. The JVM builds that text, so parti cannot change its end. parti can only print one more line after it, through
`sys.excepthook`, in programs whose session `parti.spark.session` created.
"""

from __future__ import annotations

import re
import sys
from types import TracebackType
from typing import Final

from parti.errors import PartiError

_OURS: Final = re.compile(r"\bparti(?:\.\w+)*\.([A-Z]\w*: .+)")  # Spark's worker processes write exceptions like this


def sentence_of(error: BaseException) -> str | None:
    """parti's message, extracted from the text of a Spark exception; None when the error is not from parti."""
    if isinstance(error, PartiError):
        return None  # it is its own last line
    found = _OURS.findall(str(error))
    return found[0].strip() if found else None


class LastWords:
    """An excepthook: calls the previous hook, then prints the message."""

    def __init__(self) -> None:
        self._before = sys.excepthook

    def __repr__(self) -> str:
        return f"<LastWords after {self._before!r}>"

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)
        if (sentence := sentence_of(error)) is not None:
            print(f"\n{sentence}", file=sys.stderr)


def say_last_words() -> None:
    """From now on the last line of an error that ends this program is parti's message; a second call does nothing."""
    if not isinstance(sys.excepthook, LastWords):
        sys.excepthook = LastWords()
