"""Workers of the version before durables had a namespace: names without it, no seal, no sweeping."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from parti.manager import manager
from parti.manager.sweep import sweep
from parti.worker import WorkerConsumer
from parti.worker.seal import Seal

_metadata, _sweep = Seal.metadata, sweep


@contextmanager
def old_version(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Managers created inside this context have the earlier version, and keep it; later ones have the current one."""

    def metadata(seal: Seal) -> dict[str, str]:
        return _metadata(seal) if seal.namespace else {}

    async def sweep(js: Any, config: Any, consumer: Any, *rest: Any) -> None:
        if consumer._namespace:
            await _sweep(js, config, consumer, *rest)
        else:
            await asyncio.Event().wait()

    monkeypatch.setattr(Seal, "metadata", metadata)
    monkeypatch.setattr(manager, "sweep", sweep)
    with monkeypatch.context() as inside:
        inside.setattr(WorkerConsumer, "use_namespace", lambda consumer, namespace: None)
        yield
