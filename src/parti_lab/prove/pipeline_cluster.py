"""A standalone Spark cluster on loopback for `parti prove pipeline`: a master, two workers, and their executors."""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pyspark

from parti.java import find_java
from parti_lab.prove.processes import SeenEffect, below, kill
from parti_lab.prove.spark_process import WITHIN, ProofBroken

_WORKERS = 2


class StandaloneCluster:
    """A master with two workers. After `end` all three and all their child processes have ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []
        self.url = self._start(r"Starting Spark master at (spark://\S+)", "master.Master", "--port", "0")
        for _ in range(_WORKERS):
            # Room for the executors of two drivers: one runs the pipeline, the other waits with its session ready.
            arguments = ("-c", "2", "-m", "2g", self.url)
            self._start(r"(Successfully registered with master)", "worker.Worker", *arguments)

    def __repr__(self) -> str:
        return f"<StandaloneCluster {self.url} executors={len(self._executors())}>"

    def kill_executor(self, rng: random.Random) -> int:
        """SIGKILL of one executor JVM; its worker starts a new one."""
        executors = self._executors()
        return kill([rng.choice(executors)]) if executors else 0

    def kill_workers(self, rng: random.Random) -> int:
        """SIGKILL of some Python processes that run tasks."""
        tree = self._below()
        daemons = {process.pid for process in tree if process.is_python_worker}
        workers = [process for process in tree if process.is_python_worker and process.parent in daemons]
        return kill(rng.sample(workers, rng.randint(1, len(workers)))) if workers else 0

    def end(self) -> None:
        tree = self._below()
        for process in reversed(self._started):
            process.kill()
        for process in self._started:
            process.wait(WITHIN)
        kill(tree)
        for thread in self._threads:
            thread.join(WITHIN)

    def _executors(self) -> list[SeenEffect]:
        return [process for process in self._below() if "CoarseGrainedExecutorBackend" in process.command]

    def _below(self) -> list[SeenEffect]:
        return [seen for process in self._started for seen in below(process.pid)]

    def _start(self, ready: str, kind: str, *arguments: str) -> str:
        """Start a process, and return what `ready` finds in a line of its log."""
        command = [str(Path(pyspark.__path__[0]) / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}"]
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--webui-port", "0", *arguments],
            env=self._environment(),
            cwd=self._folder,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self._started.append(process)
        assert process.stderr is not None
        found = next((match[1] for line in process.stderr if (match := re.search(ready, line))), None)
        if found is None:
            raise ProofBroken(f"{kind} of the Spark cluster ended before it was ready")
        reading = threading.Thread(target=_read_on, args=(process.stderr,), daemon=True)
        reading.start()
        self._threads.append(reading)
        return found

    def _environment(self) -> dict[str, str]:
        java = find_java()
        assert java is not None
        return os.environ | {
            "JAVA_HOME": str(java.home),
            "SPARK_HOME": pyspark.__path__[0],
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_WORKER_DIR": str(self._folder / "work"),
            "SPARK_LOCAL_DIRS": str(self._folder / "local"),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_DAEMON_MEMORY": "256m",
        }


def _read_on(log: IO[str]) -> None:
    """Read the rest of a log, so that its writer never blocks."""
    for _ in log:
        pass


@contextlib.contextmanager
def standalone(folder: Path) -> Iterator[StandaloneCluster]:
    """A cluster that runs while the context is entered."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster = StandaloneCluster(folder)
    try:
        yield cluster
    finally:
        cluster.end()
