"""The reference implementation of consumer groups, built as a test dependency through the Go module proxy.

It is not part of parti: it is built into a temporary directory, and only where Go and its module are reachable.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from parti.errors import FatalError

MODULE = "github.com/synadia-io/orbit.go/pcgroups"
VERSION = "v0.2.1"
NATS_GO = ("github.com/nats-io/nats.go", "v1.50.0")
_BUILD_WITHIN = 300.0


class ReferenceUnavailable(FatalError):
    """Go is missing, or the module proxy does not serve the module: the message says which."""


def build_reference(directory: Path) -> Path:
    """The reference's `cg`, built in `directory`; raises `ReferenceUnavailable` with the reason."""
    source = directory / "cg"
    source.mkdir()
    (source / "go.mod").write_text(f"module interop\n\ngo 1.24\n\nrequire {MODULE} {VERSION}\n")
    return _build(source, f"{MODULE}/cg", {MODULE: VERSION})


def reference_environment(directory: Path, url: str) -> dict[str, str]:
    """The environment in which `cg` finds this server: it reads the selected context of the `nats` CLI, not a flag."""
    contexts = directory / "nats" / "context"
    contexts.mkdir(parents=True, exist_ok=True)
    (contexts / "parti.json").write_text(json.dumps({"url": url}))
    (directory / "nats" / "context.txt").write_text("parti")
    return os.environ | {"XDG_CONFIG_HOME": str(directory)}


def build_peer(directory: Path, files: Sequence[Path]) -> Path:
    """A Go program of parti's own on nats.go, built from `files`; raises `ReferenceUnavailable`."""
    source = directory / "peer"
    source.mkdir()
    for file in files:
        shutil.copy(file, source / file.name)
    module, version = NATS_GO
    (source / "go.mod").write_text(f"module peer\n\ngo 1.24\n\nrequire {module} {version}\n")
    return _build(source, ".", {module: version})


def _build(source: Path, package: str, modules: Mapping[str, str]) -> Path:
    if shutil.which("go") is None:
        raise ReferenceUnavailable("no Go toolchain on PATH: install Go to compare with the reference")
    for module, version in modules.items():
        _go(source, "mod", "download", f"{module}@{version}")
    binary = source / "program"
    _go(source, "build", "-mod=mod", "-o", str(binary), package)
    return binary


def _go(source: Path, *arguments: str) -> None:
    environ = os.environ | {"GOFLAGS": "-buildvcs=false", "GOWORK": "off"}
    try:
        done = subprocess.run(
            ["go", *arguments],
            cwd=source,
            env=environ,
            capture_output=True,
            text=True,
            timeout=_BUILD_WITHIN,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ReferenceUnavailable(f"`go {' '.join(arguments)}` took longer than {_BUILD_WITHIN:g} s") from None
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())[-300:]
        raise ReferenceUnavailable(f"`go {' '.join(arguments)}` failed: {reason}")
