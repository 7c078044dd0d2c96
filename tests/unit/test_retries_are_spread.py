"""All retries wait by a `Backoff`: many workers that lost the same server must not come back in step."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import parti

SOURCES = sorted(Path(parti.__file__).parent.rglob("*.py"))


def _fixed(call: ast.AST) -> bool:
    """Whether this is a sleep of a number, or of a constant of the module."""
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "sleep"):
        return False
    wait = call.args[0] if call.args else None
    constant = isinstance(wait, ast.Constant) and wait.value != 0  # 0 is a turn of the loop
    return constant or (isinstance(wait, ast.Name) and wait.id.isupper())


def _retries(tree: ast.Module) -> Iterator[ast.AST]:
    """Where something is tried again: behind an error within a loop, and in a loop until a call succeeds."""
    for loop in (node for node in ast.walk(tree) if isinstance(node, ast.While | ast.For | ast.AsyncFor)):
        yield from (node for node in ast.walk(loop) if isinstance(node, ast.ExceptHandler))
        if isinstance(loop, ast.While) and any(isinstance(node, ast.Await) for node in ast.walk(loop.test)):
            yield loop


def lockstep(text: str) -> list[int]:
    """The lines of fixed waits between two tries."""
    return sorted({n.lineno for again in _retries(ast.parse(text)) for n in ast.walk(again) if _fixed(n)})  # type: ignore[attr-defined]


def test_no_retry_waits_for_a_fixed_time() -> None:
    found = {str(source): lines for source in SOURCES if (lines := lockstep(source.read_text()))}
    assert not found, "tried again in step with others: use a Backoff"


@pytest.mark.parametrize(
    "body",
    [
        "while True:\n    try:\n        await go()\n    except PartiError:\n        await clock.sleep(_AGAIN)",
        "while not await go():\n    await self._clock.sleep(0.1)",
    ],
)
def test_a_fixed_wait_is_found(body: str) -> None:
    indented = body.replace("\n", "\n    ")
    assert lockstep(f"async def run():\n    {indented}")
