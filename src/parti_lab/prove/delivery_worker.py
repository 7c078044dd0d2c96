"""`parti deliver run` as a process that the proof may kill, freeze and stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from parti.clock import SystemClock
from parti.errors import TransientError
from parti.testing.child import spawn
from parti_lab.prove.processes import below, kill

_READY_WITHIN = 60.0
_ENDS_WITHIN = 60.0


class WorkerNotReady(TransientError):
    """The process did not start; the message has its last output."""


class Worker:
    """One process, restarted repeatedly with the same settings."""

    _READY, _LOST = b'"ready"', b"deliver.lease_lost"
    """Log lines of the process: it has joined; one of its leases has expired."""

    def __init__(self, settings: Sequence[str], program: Sequence[str] = ("parti.cli",)) -> None:
        """`program`: the module to run, and its own arguments, which precede those of the command."""
        self._settings = list(settings)
        self._program = list(program)
        self._process: subprocess.Popen[bytes] | None = None
        self._clock = SystemClock()
        self.lease_losses: list[float] = []
        """When the process logged that one of its leases had expired."""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """After this returns the process has joined; it takes partitions as they become free."""
        command = [sys.executable, "-m", *self._program, "deliver", "run", "--json", *self._settings]
        process = self._process = spawn(command)
        ready = threading.Event()
        lines: list[str] = []

        def drain() -> None:  # a full pipe would block the process
            assert process.stdout is not None
            for line in process.stdout:
                if self._READY in line:
                    ready.set()
                if self._LOST in line:
                    self.lease_losses.append(self._clock.now())
                lines[:] = [*lines[-5:], line.decode(errors="replace")]
            ready.set()

        threading.Thread(target=drain, name="parti-prove-worker", daemon=True).start()
        if not ready.wait(_READY_WITHIN) or process.poll() is not None:
            raise WorkerNotReady(f"the worker did not start: {' '.join(lines)}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process only."""
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL; after this returns the process is dead."""
        if self.running:
            assert self._process is not None
            self._process.kill()
            self._process.wait()

    def discard(self) -> None:
        """After this returns, no part of the process runs."""
        self.kill()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(_ENDS_WITHIN)


class SparkWorker(Worker):
    """A driver of the engine spark with its JVM and its tasks: each fault hits all of them.

    It counts as joined when it begins to start: Spark itself starts slowly, and the other driver delivers meanwhile.
    """

    _READY, _LOST = b'"starting"', b"pipeline.lease_lost"

    def signal(self, number: signal.Signals) -> None:
        for pid in (self.pid, *(process.pid for process in below(self.pid))):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        tree = below(self.pid) if self._process is not None else []
        super().kill()
        kill(tree)
