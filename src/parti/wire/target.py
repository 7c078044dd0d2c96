"""The stream that a publisher writes to, found by name or by subject, with its relevant settings."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from parti.backoff import PATIENT
from parti.errors import PartiError
from parti.wire.blocking import BlockingConnection
from parti.wire.errors import StreamNotFound
from parti.wire.options import ConnectOptions


@dataclass(frozen=True, slots=True)
class Target:
    """What a publisher must know about a stream before it sends."""

    stream: str
    subjects: tuple[str, ...]
    allow_atomic: bool
    no_ack: bool
    """The stream sends no acks: no publish to it can be confirmed."""
    duplicate_window: float
    """Seconds for which the stream remembers message ids; a replay after that is stored again."""

    @classmethod
    def from_info(cls, info: dict[str, Any]) -> Target:
        config = info["config"]
        return cls(
            stream=config["name"],
            subjects=tuple(config.get("subjects") or ()),
            allow_atomic=bool(config.get("allow_atomic")),
            no_ack=bool(config.get("no_ack")),
            duplicate_window=int(config.get("duplicate_window") or 0) / 1e9,
        )


def target_named(connection: BlockingConnection, stream: str) -> Target:
    """The stream with this name; StreamNotFound if there is none."""
    return Target.from_info(connection.api(f"STREAM.INFO.{stream}"))


def target_of(connection: BlockingConnection, subject: str) -> Target:
    """The stream that stores this subject; StreamNotFound if there is none."""
    names = connection.api("STREAM.NAMES", {"subject": subject}).get("streams") or ()
    if not names:
        raise StreamNotFound(
            f"no stream takes subject {subject!r}: create one that does, or correct the subject", code=404
        )
    return target_named(connection, names[0])


def find_target(options: ConnectOptions, *, stream: str | None, subject: str, patience: float) -> Target:
    """The stream by its name, or else the one that stores `subject`; retries for `patience` seconds in an outage."""
    deadline = time.monotonic() + patience
    never = threading.Event()
    for wait in PATIENT.delays():
        try:
            with BlockingConnection.open(options, name="parti-target") as connection:
                return target_named(connection, stream) if stream else target_of(connection, subject)
        except PartiError as error:
            if not error.retriable or time.monotonic() + wait > deadline:
                raise
        never.wait(wait)
    raise AssertionError("an endless backoff ended")
