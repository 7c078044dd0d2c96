"""A worker process of a proof, as its parent sees it: its partitions, and how to kill, freeze and stop it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parti.clock import SystemClock
from parti.testing import NeverHappened, eventually
from parti.testing.child import spawn, waited_for_cpu

_LONGEST_LINE = 1 << 24  # bytes; a line with a long traceback must not end the reading


@dataclass
class WorkerProcess:
    """One child process. It cannot outlive its parent."""

    process: Any
    worker: str = ""
    owned: set[str] = field(default_factory=set)
    state: str = ""
    log: deque[str] = field(default_factory=lambda: deque(maxlen=200))
    ended_at: float | None = None
    frozen: bool = False
    heard: Callable[[Mapping[str, Any]], None] | None = None
    """Called with each line that the process sends."""
    _reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        settings: Mapping[str, Any],
        program: str = "parti_lab.prove.worker_main",
        heard: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> WorkerProcess:
        """Start the process; returns at once, see `live`."""
        command = [sys.executable, "-m", program, json.dumps(settings)]
        child = cls(await asyncio.to_thread(spawn, command), heard=heard)
        child._reader = asyncio.get_running_loop().create_task(child._read(), name="parti-worker-process")
        return child

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    @property
    def owner(self) -> str:
        """The owner name in its effects."""
        return f"pid-{self.pid}"

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    async def live(self, timeout: float = 120.0) -> None:
        """Wait until it has joined; longer than `timeout` while the machine gives it no CPU for most of the time."""
        queued = 0.0
        while True:
            try:
                await eventually(lambda: self.worker or not self.running, timeout, f"worker {self.pid} live")
                break
            except NeverHappened as error:
                before, queued = queued, waited_for_cpu(self.pid)
                if queued - before < timeout / 2:
                    error.add_note(f"it waited {queued:.0f} s for a CPU")
                    raise
        if not self.worker:
            raise RuntimeError(f"worker {self.pid} ended: {' | '.join(list(self.log)[-20:])}")

    def kill(self) -> None:
        """SIGKILL: a crash."""
        os.kill(self.pid, signal.SIGKILL)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.frozen = False

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    async def ended(self, timeout: float = 60.0) -> int:
        """Wait for the end of the process; returns its exit code."""
        await eventually(lambda: not self.running, timeout, f"worker {self.pid} ended")
        if self._reader is not None:
            await self._reader
        return int(self.process.returncode)

    async def close(self) -> None:
        if self.running:
            self.kill()
        await self.ended()

    async def _read(self) -> None:
        # Not in threads: each process would keep one of the loop's few, and with enough of them nobody else gets one.
        reader = asyncio.StreamReader(limit=_LONGEST_LINE)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self.process.stdout)
        while line := await reader.readline():
            text = line.decode(errors="replace").rstrip()
            try:
                said = json.loads(text)
            except ValueError:
                said = {}
            match said.get("say") if isinstance(said, dict) else None:
                case "live":
                    self.worker = said["worker"]
                case "granted":
                    self.owned.add(said["partition"])
                case "revoked":
                    self.owned.discard(said["partition"])
                case "state":
                    self.state = said["state"]
                case None:
                    self.log.append(text)
                    if not isinstance(said, dict) or said.get("event") != "worker.fenced":
                        continue
                    said = {"say": "fenced", "reason": said.get("reason", "")}
            if self.heard is not None:
                self.heard(said)
        self.ended_at = SystemClock().now()
