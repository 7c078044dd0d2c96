"""Finds configuration errors before the first message is read."""

from __future__ import annotations

from parti.errors import ConfigError
from parti.subjects import overlaps
from parti.wire.ranges import RangeReader


def check_subjects(reader: RangeReader, stream: str, subjects: tuple[str, ...]) -> None:
    """Raise ConfigError for a filter that no message of the stream can ever match.

    The server accepts such a filter silently and delivers nothing (docs/evidence/spark.md#s21). A stream that mirrors,
    sources or transforms holds other subjects than those it listens on: there every filter is accepted.
    """
    if not subjects:
        return
    config = reader.connection.api(f"STREAM.INFO.{stream}")["config"]
    if any(config.get(kind) for kind in ("mirror", "sources", "subject_transform")):
        return
    for subject in subjects:
        if not any(overlaps(subject, own) for own in config.get("subjects") or ()):
            held = ", ".join(config.get("subjects") or ())
            raise ConfigError(f"option subjects: {subject!r} matches nothing in stream {stream!r}, which holds {held}")
