"""The machine a result was measured on: enough to compare two results, without naming the host or its user."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import parti


def machine() -> dict[str, str | int | float]:
    """Facts of this machine that affect figures: processors, memory, system, interpreter, parti's version."""
    facts: dict[str, str | int | float] = {
        "cpus": _usable_cpus(),
        "cpu": _cpu_model(),
        "system": f"{platform.system()} {platform.release()}",
        "arch": platform.machine(),
        "python": platform.python_version(),
        "parti": parti.__version__,
    }
    memory = _memory_bytes()
    if memory:
        facts["memory_gib"] = round(memory / 2**30, 1)
    return facts


def _usable_cpus() -> int:
    # Processors this process may run on: a container is often pinned to fewer than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown"


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
