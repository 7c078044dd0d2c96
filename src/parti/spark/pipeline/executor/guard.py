"""A time limit for plain handlers, which only a signal can interrupt.

When a call in the main thread runs for longer than the limit, SIGALRM makes it raise `HandlerTimeout` wherever it is. A
call that does not react to the signal (a C library that waits forever), or that runs in another thread, ends the whole
worker process: a retry of its message would race with it. Spark reruns the task elsewhere, and nothing is lost, because
an unfinished task has no effect on the batch.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from parti.worker.errors import HandlerTimeout

_DEAF = 3.0  # times the limit after which a call counts as not reacting to its signal


class Guard:
    """Watches the calls of handlers; a context manager. Without a limit it does nothing."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.since = 0.0
        """When the current call in the main thread started (`time.monotonic`); 0 while none runs. Set by the caller."""
        self.threads: dict[int, float] = {}
        """The same for calls in other threads, by thread."""
        self._interruptible = bool(limit) and threading.current_thread() is threading.main_thread()
        self._before: Any = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Guard:
        if self.limit:
            if self._interruptible:
                self._before = signal.signal(signal.SIGALRM, self._raise)
            self._thread = threading.Thread(target=self._watch, name="parti-guard", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self.since = 0.0
            self._done.set()
            self._thread.join()
            if self._interruptible:
                signal.signal(signal.SIGALRM, self._before)

    def _raise(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a signal handler
        if self.since and time.monotonic() - self.since > self.limit:
            raise HandlerTimeout(f"the handler ran longer than {self.limit:g} s")

    def _watch(self) -> None:
        warned_of = 0.0
        while not self._done.wait(self.limit / 4):
            now, since = time.monotonic(), self.since
            oldest = min(list(self.threads.values()), default=now)
            ran = now - since if since else 0.0
            if ran > _DEAF * self.limit or now - oldest > self.limit:
                print(f"parti: a handler ran on past its {self.limit:g} s: ending this worker", file=sys.stderr)
                sys.stderr.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            if ran > self.limit and warned_of != since and self._interruptible:
                warned_of = since
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
