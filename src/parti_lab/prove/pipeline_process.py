"""Driver processes of `parti prove pipeline`: started, killed, frozen and resumed, with all their child processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from parti.testing import eventually_blocking
from parti_lab.prove.processes import SeenEffect, below, is_alive, json_lines, kill
from parti_lab.prove.spark_process import WITHIN, ProofBroken


class PipelineDriver:
    """One driver process. After `end` it and all its child processes have ended."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.failures: list[str] = []
        self.paused = threading.Event()
        """Set when the driver has stopped itself between the sink and the commit of a batch."""
        self._ready = threading.Event()
        self._log = (Path(config["folder"]) / "driver.log").open("ab")
        command = [sys.executable, "-m", "parti_lab.prove.pipeline_driver", json.dumps(config)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"<PipelineDriver {self._process.pid} {'alive' if self.alive else 'gone'}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """After this returns, the driver's Spark session runs."""
        if not self._ready.wait(WITHIN) or not self.alive:
            raise ProofBroken(f"a pipeline driver did not start: {'; '.join(self.failures[-1:]) or 'see its log'}")

    def kill(self) -> int:
        """SIGKILL of the Python driver and its JVM; their children end by themselves."""
        hit = kill(process for process in below(self._process.pid) if process.is_java)
        self._process.kill()
        self._process.wait()
        return hit + 1

    def kill_workers(self, rng: random.Random) -> int:
        """SIGKILL of some Python processes that run tasks."""
        tree = below(self._process.pid)
        daemons = {process.pid for process in tree if process.is_python_worker}
        workers = [process for process in tree if process.is_python_worker and process.parent in daemons]
        return kill(rng.sample(workers, rng.randint(1, len(workers)))) if workers else 0

    def freeze(self) -> list[SeenEffect]:
        """SIGSTOP of the driver, then of its child processes; returns the processes to resume."""
        os.kill(self._process.pid, signal.SIGSTOP)
        frozen = below(self._process.pid)
        for process in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGSTOP)
        return frozen

    def thaw(self, frozen: list[SeenEffect]) -> None:
        """SIGCONT of all frozen processes."""
        for process in frozen:
            if is_alive(process):
                os.kill(process.pid, signal.SIGCONT)
        os.kill(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        tree = below(self._process.pid)
        self._process.kill()
        self._process.wait()
        kill(tree)
        eventually_blocking(lambda: not any(map(is_alive, tree)), 30, "the end of a driver's processes")
        self._reader.join(30)
        self._log.close()

    def _read(self, output: IO[bytes]) -> None:
        for message in json_lines(output):
            if "ready" in message:
                self._ready.set()
            elif "paused" in message:
                self.paused.set()
            elif "failed" in message:
                self.failures.append(message["failed"])
        self._ready.set()  # the process ended: wake all waiters so that they check
