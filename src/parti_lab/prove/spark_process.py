"""The driver process of `parti prove spark`: started, killed, restarted."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from parti.errors import FatalError
from parti.testing import NeverHappened, eventually_blocking
from parti_lab.prove.processes import SeenEffect, below, is_alive, json_lines, kill

WITHIN = 300.0  # seconds without any progress, on a loaded machine; a cold start of Spark takes 8 to 20


class ProofBroken(FatalError):
    """The experiment itself failed, so it proves nothing: see the message."""


class Driver:
    """The driver process, restarted after each death; its checkpoints stay."""

    module = "parti_lab.prove.spark_driver"

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._log = (Path(config["folder"]) / "driver.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = threading.Event()
        self._answers: list[str] = []
        self._answered = threading.Event()
        self._reader: threading.Thread | None = None
        self.starts = 0
        self.failures: list[str] = []

    def ensure(self) -> None:
        """After this returns, a driver runs and has started its queries."""
        if self._process is not None and self._process.poll() is None and self._ready.is_set():
            return
        self.end()
        self._ready.clear()
        command = [sys.executable, "-m", self.module, json.dumps(self._config)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
        )
        self.starts += 1
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        if not self._ready.wait(WITHIN) or self._process.poll() is not None:
            raise ProofBroken(f"the Spark driver did not start: {'; '.join(self.failures[-1:]) or 'see its log'}")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> int:
        """SIGKILL of the JVM and of the Python process that started it; their child processes end by themselves."""
        assert self._process is not None
        tree = below(self.pid)
        hit = kill(process for process in tree if process.is_java)
        self._process.kill()
        self._process.wait()
        return hit + 1

    def kill_workers(self, rng: random.Random) -> int:
        """SIGKILL of some processes that run tasks, at least one if there are any."""
        workers = _task_workers(below(self.pid))
        return kill(rng.sample(workers, rng.randint(1, len(workers)))) if workers else 0

    def wait_for(self, count: Callable[[], int], at_least: int, what: str) -> None:
        """Return when `count` has reached `at_least`. A driver that ends is restarted; one that stalls is an error.

        Only a stall is an error: on a busy machine each step may take long, which is no failure.
        """
        seen = -1
        while seen < at_least:
            before = seen

            def moved(before: int = before) -> bool:
                self.ensure()
                return count() > before

            try:
                eventually_blocking(moved, WITHIN, "progress")
            except NeverHappened:
                log = Path(self._log.name).read_bytes()[-2000:].decode(errors="replace")
                raise ProofBroken(
                    f"the driver stands still at {seen} of {at_least} {what} for {WITHIN:g} s; its log ends: {log}"
                ) from None
            seen = count()

    def submit(self, job: dict[str, Any]) -> None:
        """Send a job to the running process."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()

    def replay(self, first: int, last: int) -> str:
        """The hash of the range, read by a batch job of the driver."""
        self._answered.clear()
        self.submit({"replay": [first, last]})
        if not self._answered.wait(WITHIN):
            raise ProofBroken("the Spark driver did not answer a replay")
        return self._answers[-1]

    def _heard(self, message: dict[str, Any]) -> None:
        """Handle a message that only other kinds of drivers send."""

    def end(self) -> None:
        """After this returns, the process and all its child processes have ended."""
        if self._process is None:
            return
        tree = below(self.pid)
        self._process.kill()
        self._process.wait()
        kill(tree)
        eventually_blocking(lambda: not any(map(is_alive, tree)), 30, "the end of the driver's processes")
        if self._reader is not None:
            self._reader.join(30)
        self._process = None

    def close(self) -> None:
        self.end()
        self._log.close()

    def _read(self, output: IO[bytes]) -> None:
        for message in json_lines(output):
            if "ready" in message:
                self._ready.set()
            elif "replay" in message:
                self._answers.append(message["replay"])
                self._answered.set()
            elif "failed" in message:
                self.failures.append(message["failed"])
            else:
                self._heard(message)
        self._ready.set()  # the process ended: wake all waiters so that they check


def _task_workers(tree: list[SeenEffect]) -> list[SeenEffect]:
    daemons = {process.pid for process in tree if process.is_python_worker}
    return [process for process in tree if process.is_python_worker and process.parent in daemons]
