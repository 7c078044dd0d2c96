"""Keeps Spark's noise off the terminal, and nothing else.

Spark's launcher cannot redirect the JVM's output, and a Python daemon that ends together with a stopped query prints a
meaningless traceback (docs/evidence/spark.md#s22). Both are written to file descriptor 2, which all children share: so
they are filtered there.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TextIO

_CHATTER: Final = re.compile(
    r"WARNING: Using incubator modules|Using Spark's default log4j profile|Setting default log level to"
    r"|To adjust logging level use|:: loading settings ::"
    r"|[\d/]+ [\d:]+ WARN (NativeCodeLoader: Unable to load native-hadoop|Utils: (Your hostname|Set SPARK_LOCAL_IP)"
    r"|ResolveWriteToStream: spark.sql.adaptive.enabled is not|DAGScheduler: Failed to cancel job group)"
)
_TRACEBACK: Final = "Traceback (most recent call last):"
_DAEMON: Final = "pyspark/daemon.py"
_HARMLESS: Final = "BrokenPipeError: [Errno 32] Broken pipe"
_HELD: Final = 200  # lines of a traceback that are held until its last line shows what it was


class Chatter:
    """Takes lines and returns those worth reading, in order: all except Spark's startup and shutdown messages."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def sift(self, line: str) -> list[str]:
        """What to show now; a traceback is returned as a whole, after its last line."""
        if self._held:
            self._held.append(line)
            if line.startswith((" ", _TRACEBACK)) and len(self._held) < _HELD:
                return []
            whole = self.rest()
            return [] if line.rstrip() == _HARMLESS and any(_DAEMON in one for one in whole) else whole
        if line.startswith(_TRACEBACK):
            self._held.append(line)
            return []
        return [] if _CHATTER.match(line) else [line]

    def rest(self) -> list[str]:
        """The lines that are still held."""
        held, self._held = self._held, []
        return held


@contextmanager
def without_chatter() -> Iterator[None]:
    """Until the block ends, and after it for children that live on, Spark's noise does not reach stderr."""
    sys.stderr.flush()
    terminal = os.dup(2)
    inlet, outlet = os.pipe()
    end, seen = f"{secrets.token_hex(16)}\n".encode(), threading.Event()
    threading.Thread(target=_pass_on, args=(inlet, terminal, end, seen), name="parti-chatter", daemon=True).start()
    os.dup2(outlet, 2)
    try:
        with _our_words(terminal):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.write(outlet, end)
        os.close(outlet)
        seen.wait(5.0)  # show earlier lines before continuing


@contextmanager
def _our_words(terminal: int) -> Iterator[None]:
    """Output of this process goes to the terminal directly: progress bars need one, and descriptor 2 is a pipe now."""
    before = sys.stderr
    if not _is_real(before):
        yield
        return
    with open(os.dup(terminal), "w", buffering=1, encoding="utf-8", errors="replace") as shown:
        sys.stderr = shown
        try:
            yield
        finally:
            sys.stderr = before


def _is_real(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 2
    except (OSError, ValueError):
        return False


def _pass_on(inlet: int, terminal: int, end: bytes, seen: threading.Event) -> None:
    """Runs until the last child has closed its end; the pipe must be read all that time, or the child would block."""
    chatter = Chatter()
    with open(inlet, "rb") as lines, open(terminal, "wb", buffering=0) as shown:
        for line in lines:
            ended = line == end
            found = chatter.rest() if ended else chatter.sift(line.decode("utf-8", "surrogateescape"))
            shown.write("".join(found).encode("utf-8", "surrogateescape"))
            if ended:
                seen.set()
