"""Which lines of the shipped modules a simulation ran: it proves nothing about lines that it never runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

MODULES: Final = (
    *(
        f"control.{name}"
        for name in ("claims", "election", "handoff", "per_worker_partition", "identity", "leader", "lease")
    ),
    *(f"control.{name}" for name in ("held_partition", "membership", "reconcile", "per_partition")),
    *(f"manager.{name}" for name in ("claim_writer", "positions", "layouts.conflicts", "layouts.per_worker")),
    *(f"manager.layouts.per_partition.{name}" for name in ("acks", "durable", "flow", "inbox", "plane", "progress")),
    *(
        f"worker.{name}"
        for name in ("assigner", "attempts", "backlog", "catchup", "channel", "inbox", "durable", "engine")
    ),
    *(f"worker.{name}" for name in ("lanes", "ledger", "mending", "resumed", "room", "session", "takeovers")),
    *(f"wire.{name}" for name in ("live", "pull")),
)
"""The modules that decide about partitions and messages."""

_INTERNAL: Final = ("<lambda>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


def coverage(work: Callable[[], object]) -> dict[str, tuple[int, int]]:
    """Module -> (lines that `work` ran, all lines), inside functions."""
    files = {_file(name): name for name in MODULES}
    seen: dict[str, set[int]] = {file: set() for file in files}

    def look(frame: FrameType, event: str, _: Any) -> Any:
        del event
        lines = seen.get(frame.f_code.co_filename)
        if lines is None:
            return None

        def line(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            return line

        return line

    before = sys.gettrace()
    sys.settrace(look)
    try:
        work()
    finally:
        sys.settrace(before)
    result = {}
    for file, name in files.items():
        lines = set(_lines(compile(Path(file).read_text(encoding="utf-8"), file, "exec")))
        result[name] = (len(lines & seen[file]), len(lines))
    return result


def _file(name: str) -> str:
    found = importlib.import_module(f"parti.{name}").__file__
    assert found is not None
    return found


def _lines(code: CodeType, function: bool = False) -> Iterator[int]:
    """Lines inside functions; lines outside ran at import, and a repr is for people."""
    if function:
        yield from (line for _, _, line in code.co_lines() if line is not None and line != code.co_firstlineno)
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and inner.co_name != "__repr__":
            # CO_NEWLOCALS without CO_OPTIMIZED is the body of a class.
            yield from _lines(inner, function or bool(inner.co_flags & 0x01) or inner.co_name in _INTERNAL)
