"""Generated cases on the engine spark: all share one session, because starting Spark costs more than a case.

Faults hit the processes of that session: its Python workers are killed in the middle of a batch, the whole session
freezes beyond its lease, the pipeline is stopped cleanly and continues from its checkpoint, the server is killed.
Failover from one driver to another is tested by the rounds, which have two real drivers (`delivery`).
"""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from parti.clock import SystemClock
from parti_lab.prove.delivery_names import HANGING
from parti_lab.prove.delivery_worker import Worker
from parti_lab.prove.processes import below
from parti_lab.prove.spark_process import WITHIN, Driver, ProofBroken

SPARK_TASKS = 2  # deliver at the same time


class SharedSpark(Driver):
    """The process with the session."""

    module = "parti_lab.prove.delivery_spark_main"

    def __init__(self, folder: Path) -> None:
        super().__init__({"folder": str(folder)})
        self.folder = folder
        self.hanging = folder / "names-hang"
        """While this file exists, the names of the proof cannot be looked up."""
        self.lease_losses: list[float] = []
        self._clock = SystemClock()
        self._stopped = threading.Event()
        os.environ[HANGING] = str(self.hanging)  # the JVM passes its environment to the workers

    def run(self, words: list[str]) -> None:
        """Start a pipeline with these settings, unless one runs."""
        self.ensure()
        self.submit({"run": words})

    def stop(self) -> int:
        """Stop the pipeline cleanly; returns an exit code."""
        self._stopped.clear()
        self.submit({"stop": 1})
        if not self._stopped.wait(WITHIN):
            raise ProofBroken(f"the pipeline did not stop within {WITHIN:g} s; see {self._log.name}")
        return 0

    def _heard(self, message: dict[str, Any]) -> None:
        if "stopped" in message:
            self._stopped.set()
        elif message.get("event") == "pipeline.lease_lost":
            self.lease_losses.append(self._clock.now())


class SharedWorker(Worker):
    """One case's pipeline in the shared session, with the interface of a worker process."""

    def __init__(self, spark: SharedSpark, words: list[str], rng: random.Random) -> None:
        super().__init__(words)
        self._spark = spark
        spark.lease_losses = self.lease_losses
        self._rng = rng
        self._runs = False

    @property
    def pid(self) -> int:
        return self._spark.pid

    @property
    def running(self) -> bool:
        return self._runs

    def start(self) -> None:
        self._spark.run(self._settings)
        self._runs = True

    def signal(self, number: signal.Signals) -> None:
        for pid in (self.pid, *(process.pid for process in below(self.pid))):
            with suppress(ProcessLookupError):  # Spark ends workers that it does not need
                os.kill(pid, number)

    def kill(self) -> None:
        """SIGKILL of processes that run its tasks; Spark runs the tasks again."""
        self._spark.kill_workers(self._rng)

    def stop(self) -> int:
        self._runs = False
        return self._spark.stop()

    def discard(self) -> None:
        if self._runs:
            self.stop()
