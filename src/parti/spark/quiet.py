"""Spark's chatter stays off the terminal, and nothing else does.

Spark's launcher offers no place for the JVM's output, and a Python daemon that ends beside a stopped query prints a
traceback that means nothing (docs/evidence/spark.md#s22). Both come on file descriptor 2, which all children share: so
that is where it has to be stopped.
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
_HELD: Final = 200  # lines of a traceback that are held until its last one tells what it was


class Chatter:
    """Takes lines and gives back those that are worth reading, in order: all but Spark's greetings and farewells."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def sift(self, line: str) -> list[str]:
        """What to show now; a traceback comes as a whole, behind its last line."""
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
        """What is held still."""
        held, self._held = self._held, []
        return held


@contextmanager
def without_chatter() -> Iterator[None]:
    """Until the block ends, and beyond it for children that live on, Spark's chatter does not reach stderr."""
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
        seen.wait(5.0)  # what came before is shown before we go on


@contextmanager
def _our_words(terminal: int) -> Iterator[None]:
    """What this process says goes to the terminal directly: bars are drawn on one, and descriptor 2 is a pipe now."""
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
    """Until the last child has closed its end; the pipe must be read all that time, or it would stop the child."""
    chatter = Chatter()
    with open(inlet, "rb") as lines, open(terminal, "wb", buffering=0) as shown:
        for line in lines:
            ended = line == end
            found = chatter.rest() if ended else chatter.sift(line.decode("utf-8", "surrogateescape"))
            shown.write("".join(found).encode("utf-8", "surrogateescape"))
            if ended:
                seen.set()
