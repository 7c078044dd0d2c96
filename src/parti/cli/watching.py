"""Runs a Spark pipeline in the foreground until it ends or a signal stops it."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

from parti.cli.output import progress

if TYPE_CHECKING:
    from parti.spark.pipeline.query import RunningPipeline


def on_signal() -> threading.Event:
    """An event that Ctrl-C and SIGTERM set from now on."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    return ended


def watch(running: RunningPipeline, ended: threading.Event) -> None:
    """Return when the pipeline has ended or must end; a terminal shows the number of messages done."""
    shown = 0
    with progress(running.pipeline.name, None) as advance:
        while not ended.wait(0.2) and not running.wait(0):
            done = running.totals.done
            if done > shown:  # a driver that lost its lease and got it again counts from zero
                advance(done - shown)
            shown = done
