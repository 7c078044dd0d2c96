"""A pipeline on Spark that runs in the foreground: until it ends, or somebody ends it."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

from parti.cli.output import progress

if TYPE_CHECKING:
    from parti.spark.pipeline.query import RunningPipeline


def on_signal() -> threading.Event:
    """Set by Ctrl-C and SIGTERM from now on."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    return ended


def watch(running: RunningPipeline, ended: threading.Event) -> None:
    """Return when it has ended or is to end; how many messages are done is shown to a person who watches."""
    shown = 0
    with progress(running.pipeline.name, None) as advance:
        while not ended.wait(0.2) and not running.wait(0):
            done = running.totals.done
            if done > shown:  # a driver that lost its lease and has it again counts anew
                advance(done - shown)
            shown = done
