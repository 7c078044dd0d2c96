"""A member of the Go reference: its `cg` tool, run as a process and observed through its output.

The binary is looked for at `PARTI_CG`, then beside the checkout; nothing is built or downloaded.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from parti.testing.child import spawn
from parti.testing.reference import reference_environment

_LINE = re.compile(rb"subject=(\S+), seq=(\d+),")
_BESIDE = Path("../shared/bin/cg")


def find_cg() -> Path | None:
    """The reference's binary, if there is one on this machine."""
    for found in (Path(os.environ["PARTI_CG"]) if "PARTI_CG" in os.environ else None, _BESIDE):
        if found is not None and found.is_file() and os.access(found, os.X_OK):
            return found.resolve()
    return None


class GoInstance:
    """An instance of a member in Go, and the sequences of the messages its handler has begun, in order."""

    def __init__(self, cg: Path, url: str, kind: str, place: tuple[str, str, str], *, sleep: float = 0.002) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="parti-cg-")
        home = reference_environment(Path(self._directory.name), url)["XDG_CONFIG_HOME"]
        words = [kind, "--sleep", f"{sleep * 1000:.0f}ms", "consume", *place]
        self.process: subprocess.Popen[bytes] = spawn(["/usr/bin/env", f"XDG_CONFIG_HOME={home}", str(cg), *words])
        self.begun: list[tuple[int, str, float]] = []
        """Sequence in the stream that it reads, subject, and when we saw its output."""
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"<GoInstance {len(self.begun)} begun, {'ended' if self.process.poll() is not None else 'running'}>"

    @property
    def sequences(self) -> list[int]:
        return [sequence for sequence, _, _ in self.begun]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = _LINE.findall(line)  # several, if an ack failed and its error went to another output
            self.begun += [(int(sequence), subject.decode(), time.monotonic()) for subject, sequence in found]
            if not found or b"acked" not in line:
                self.said.append(line.decode(errors="replace").strip())

    def end(self) -> None:
        """Kill the process; it handles no signal."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        self._directory.cleanup()
