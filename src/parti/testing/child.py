"""Child processes that cannot outlive this one, even when this one is killed with SIGKILL."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

_Job = tuple[Sequence[str], "Future[subprocess.Popen[bytes]]"]

# Runs in the child before the real program: ask the kernel for a SIGKILL when the parent dies (PR_SET_PDEATHSIG = 1,
# kept across exec), exit if the parent is already dead, then exec the program. A new interpreter instead of
# `preexec_fn`, because running Python between fork and exec can deadlock in a process with threads, and parti has
# threads (JVM gateway, proxy, log readers). Costs about 20 ms.
_BECOME = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def spawn(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start `command` with its output on one pipe (`stdout`); on Linux it always dies with this process.

    The child runs in its own session: Ctrl-C reaches only this process, which decides how the child ends. Other systems
    have no death signal; there only the callers' own clean-up ends the child.
    """
    if sys.platform == "linux" and sys.executable:
        command = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), *command]
    return _launcher().spawn(command)


def waited_for_cpu(pid: int) -> float:
    """Seconds for which the main thread of a process was ready to run, but had no CPU; 0 where that is unknown."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


class _Launcher:
    """One thread that starts all children and never ends.

    The death signal fires when the *thread* that forked the child ends, not the process (prctl(2)): a server started
    from a short-lived worker thread, as `asyncio.to_thread` may use, would die with it.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="parti-launcher", daemon=True).start()

    def spawn(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        future: Future[subprocess.Popen[bytes]] = Future()
        self._jobs.put((command, future))
        return future.result()

    def _run(self) -> None:
        while True:
            command, future = self._jobs.get()
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                future.set_exception(error)
            else:
                future.set_result(process)


_current: _Launcher | None = None
_lock = threading.Lock()


def _launcher() -> _Launcher:
    global _current
    with _lock:
        if _current is None or _current.pid != os.getpid():  # a fork copies the object, but not its thread
            _current = _Launcher()
        return _current
