"""One nats-server process, from start to end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections import deque
from pathlib import Path

from parti.testing.errors import PortTaken, ServerStartFailed

_STOP_WITHIN = 10.0  # after SIGTERM; then SIGKILL


class ServerProcess:
    """One server process, from start to end, and the thread that reads its log."""

    def __init__(self, process: subprocess.Popen[bytes], log_path: Path, tail: deque[str]) -> None:
        self.process = process
        self.tail = tail
        self.monitor_port = 0
        self._freezes = 0
        self._ready = False
        self._fatal = ""
        self._settled = threading.Event()
        self._reader = threading.Thread(target=self._read_log, args=(log_path,), name="parti-nats-log", daemon=True)
        self._reader.start()

    def wait_ready(self, timeout: float) -> None:
        """Return when the server reports that it is ready; an exit or a timeout is an error."""
        settled = self._settled.wait(timeout)
        if self._ready:
            return
        busy = re.search(r"listen tcp (\S*?):(\d+): bind: address already in use", self._fatal)
        if busy:
            raise PortTaken(busy[1], int(busy[2]))
        what = "ended before it was ready" if settled else f"was not ready after {timeout:g} s"
        raise ServerStartFailed(f"nats-server {what}; its log ends:\n" + "\n".join(list(self.tail)[-20:]))

    def freeze(self) -> None:
        """After this returns, all threads are stopped (SIGSTOP) until `thaw` was called as often as `freeze`."""
        self._freezes += 1
        self.process.send_signal(signal.SIGSTOP)
        # The signal alone leaves a busy server time to answer. A second freeze sees the same stop.
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self._freezes -= 1
        if not self._freezes:
            self.process.send_signal(signal.SIGCONT)

    def end(self, how: signal.Signals) -> None:
        """After this returns, the process is dead and reaped; one that ignores the signal gets SIGKILL."""
        self.process.send_signal(how)  # not an error if the process has already ended
        self._reader.join(_STOP_WITHIN)
        if self._reader.is_alive():
            self.process.kill()
        self.wait()

    def wait(self) -> int:
        """Return the exit code once the process is dead and reaped and its log is read to the end."""
        self._reader.join()  # the pipe closes with the process
        return self.process.wait()

    def _read_log(self, log_path: Path) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as source, log_path.open("ab", buffering=0) as log:
            for raw in source:
                # A full disk must not stop the reading: a server whose log pipe is full stalls.
                with contextlib.suppress(OSError):
                    log.write(raw)
                line = raw.decode(errors="replace").rstrip()
                self.tail.append(line)
                if not self._ready:
                    self._notice(line)
        self._settled.set()

    def _notice(self, line: str) -> None:
        monitor = re.search(r"Starting http monitor on \S+:(\d+)", line)
        if monitor:
            self.monitor_port = int(monitor[1])
        elif "[FTL]" in line:
            self._fatal = line
        elif line.endswith("Server is ready"):
            self._ready = True
            self._settled.set()
