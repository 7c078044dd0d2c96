"""Epoch markers: once a marker is stored, the server refuses every publish that names an older one, at any time.

The marker is a message on a separate subject of the target stream. A publish names the sequence of the marker it knows
(`Nats-Expected-Last-Subject-Sequence`); the server compares and stores in one step, so there is no gap between check
and write (docs/evidence/pipeline.md#p9).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from parti.backoff import Backoff, retry
from parti.clock import SystemClock
from parti.errors import ConfigError, FatalError, PartiError, UnknownOutcome, UsageError
from parti.wire.api import JetStreamApi, expectations
from parti.wire.connect import connect
from parti.wire.errors import MessageNotFound, WrongLastSequence
from parti.wire.options import ConnectOptions

_ROUNDS = 8  # of compare-and-set; each retry means that another owner was faster
_HEADERS = {"Parti-Reason": "fence"}  # marks it as no letter in a dead-letter stream


class StaleEpoch(FatalError):
    """A later epoch has set its marker: an owner of an earlier epoch must not write any more."""


class _Body(msgspec.Struct, frozen=True):
    epoch: int
    owner: str = ""


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(int | _Body)

MARKER_TOKEN = "parti-fence"
"""Subjects with this token hold markers of Spark drivers, not user messages."""


@dataclass(frozen=True, slots=True)
class EpochMarker:
    """A stored marker: publishes with `expected` are accepted while it is the last marker."""

    subject: str
    sequence: int
    epoch: int
    owner: str = ""

    @property
    def expected(self) -> dict[str, str]:
        return expectations(last_subject_seq=self.sequence, last_subject_filter=self.subject)


def marker_subject(stream: str, subjects: Iterable[str], pipeline: str) -> str:
    """The subject for a pipeline's marker: placed after the fixed part of one of the stream's wildcards."""
    for subject in subjects:
        if subject.endswith(">"):
            return f"{subject[:-1]}{MARKER_TOKEN}.{pipeline}"
    raise ConfigError(
        f"stream {stream!r} has no subject that ends in '>', so that no epoch marker can be stored in it: add one such "
        f"as '{stream}.>', or run the pipeline without standby"
    )


async def read_marker(api: JetStreamApi, stream: str, subject: str) -> EpochMarker | None:
    """The last marker, including formats of earlier versions (a bare epoch, or with the pipeline's name)."""
    try:
        found = await api.msg_get(stream, last_by_subj=subject)
    except MessageNotFound:
        return None
    try:
        body = _DECODER.decode(found.data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"message {found.seq} of {stream}, on {subject}, is no epoch marker: {error}") from None
    body = _Body(body) if isinstance(body, int) else body
    return EpochMarker(subject, found.seq, body.epoch, body.owner)


async def put_marker(
    api: JetStreamApi, subject: str, epoch: int, owner: str = "", *, expected: dict[str, str] | None = None
) -> EpochMarker:
    """After this returns, no publish under an earlier marker is stored any more.

    It replaces any marker, for an owner whose epochs may restart; with `expected` only if those headers hold.
    """
    body = _ENCODER.encode(_Body(epoch, owner))
    stored = await api.publish(subject, body, headers=_HEADERS | (expected or {}))
    return EpochMarker(subject, stored.seq, epoch, owner)


async def raise_marker(api: JetStreamApi, stream: str, subject: str, *, epoch: int, owner: str) -> EpochMarker:
    """The marker of this epoch, set if missing; `StaleEpoch` if a later epoch or another owner has set one."""
    for _ in range(_ROUNDS):
        found = await read_marker(api, stream, subject)
        if found is not None:
            if (found.epoch, found.owner) == (epoch, owner):
                return found
            if found.epoch >= epoch:
                raise StaleEpoch(f"{found.owner} has set epoch {found.epoch} on {stream}; ours is {epoch}")
        expected = expectations(stream=stream, last_subject_seq=found.sequence if found is not None else 0)
        try:
            return await put_marker(api, subject, epoch, owner, expected=expected)
        except WrongLastSequence:
            continue
    raise StaleEpoch(f"others set markers on {stream} faster than epoch {epoch} could")


def raise_marker_blocking(
    options: ConnectOptions, stream: str, subject: str, *, epoch: int, owner: str
) -> tuple[str, int]:
    """Like `raise_marker`, over a separate connection; returns the subject and sequence that publishes must name."""

    async def connected() -> EpochMarker:
        async with await connect(options, name="parti-pipeline-fence") as connection:
            api = JetStreamApi(connection)
            return await retry(
                lambda: raise_marker(api, stream, subject, epoch=epoch, owner=owner),
                backoff=Backoff(),
                clock=SystemClock(),
                classify=_may_retry,
            )

    marker = asyncio.run(connected())
    return marker.subject, marker.sequence


def _may_retry(error: PartiError) -> bool:
    return error.retriable or isinstance(error, UnknownOutcome)  # the stored marker shows the outcome
