"""Progress of long work: the work reports steps, its caller displays them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int], None]
"""Report a number of further steps as done."""


class ProgressFactory(Protocol):
    """Opens a progress display; the CLI draws it on stderr, tests and quiet runs use `no_progress`."""

    def __call__(self, description: str, total: int | None) -> AbstractContextManager[Advance]: ...


@contextmanager
def no_progress(description: str, total: int | None) -> Iterator[Advance]:  # noqa: ARG001 - the protocol's names
    """Show nothing."""
    yield lambda steps: None  # noqa: ARG005 - same
