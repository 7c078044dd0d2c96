"""`parti dlq`: the dead letters of a stream."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from parti.cli.connected import run_connected
from parti.cli.output import json_option, note, plain, print_json, print_table
from parti.cli.settings import with_config
from parti.config import LoadedConfig
from parti.errors import FatalError, UsageError

if TYPE_CHECKING:
    from parti.wire.connect import Connection

T = TypeVar("T")


@click.group()
def dlq() -> None:
    """List, show, send back and throw away messages that no handler could take (stream <STREAM>_DLQ)."""


def _chosen_letters(command: Callable[..., None]) -> Callable[..., None]:
    """Options by which a command gets letters: their numbers, a subject, or neither for all of them."""

    @click.argument("stream")
    @click.argument("letters", type=int, nargs=-1)
    @click.option("--all", "everything", is_flag=True, help="All letters.")
    @click.option("--subject", help="The letters of this subject; wildcards allowed.")
    @json_option
    @with_config
    @wraps(command)
    def checked(letters: tuple[int, ...], everything: bool, subject: str | None, **rest: Any) -> None:
        if sum((bool(letters), everything, subject is not None)) != 1:
            raise UsageError("name the letters: their numbers, --subject, or --all")
        command(letters=letters, subject=subject, **rest)

    return checked


@dlq.command("ls")
@click.argument("stream")
@click.option("--subject", default=">", show_default=True, help="Only messages of this subject; wildcards allowed.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, 100_000), help="At most so many.")
@json_option
@with_config
def list_letters(loaded: LoadedConfig, stream: str, subject: str, limit: int, as_json: bool) -> None:
    """The letters of STREAM, oldest first."""

    async def gather(letters: Any) -> tuple[list[Any], int]:
        found: list[Any] = []
        async for letter in letters.walk(subject=subject):
            found.append(letter)
            if len(found) >= limit:
                break
        return found, await letters.count()

    found, total = _run(loaded, stream, gather)
    if as_json:
        print_json({"stream": stream, "total": total, "letters": [_summary(letter) for letter in found]})
        return
    rows = [
        [
            str(letter.sequence),
            plain(letter.subject),
            str(letter.original_sequence),
            plain(letter.reason),
            str(letter.attempts),
            _time(letter.time),
            plain(letter.error[:80]),
        ]
        for letter in found
    ]
    print_table(["letter", "subject", "sequence", "reason", "attempts", "buried", "error"], rows)
    note(f"{len(found)} of {total} letters")


@dlq.command("show")
@click.argument("stream")
@click.argument("letter", type=int)
@json_option
@with_config
def show(loaded: LoadedConfig, stream: str, letter: int, as_json: bool) -> None:
    """One letter of STREAM with its headers and data."""
    found = _run(loaded, stream, lambda letters: letters.get(letter))
    if as_json:
        data = base64.b64encode(found.data).decode()
        print_json(_summary(found) | {"headers": dict(found.headers), "data_base64": data})
        return
    for name, value in _summary(found).items():
        click.echo(f"{name}: {value}")
    for name, value in found.headers.items():
        click.echo(f"header {name}: {value}")
    click.echo(found.data.decode("utf-8", "replace"))


@dlq.command("replay")
@_chosen_letters
def replay(loaded: LoadedConfig, stream: str, letters: tuple[int, ...], subject: str | None, as_json: bool) -> None:
    """Publish messages of LETTERS again to their own subject, and remove each letter once it is stored."""

    async def send(office: Any) -> tuple[int, dict[int, str]]:
        found = letters or [letter.sequence async for letter in office.walk(subject=subject or ">")]
        count, failed = 0, {}
        for sequence in found:
            try:
                await _send_back(office, await office.get(sequence))
            except FatalError as error:  # it stays, and so do its reasons; the others go on
                failed[sequence] = str(error)
            else:
                count += 1
        return count, failed

    count, failed = _run(loaded, stream, send)
    tell_replayed(count, failed, as_json)


async def _send_back(office: Any, letter: Any) -> None:
    """A letter of `parti deliver` goes back as that does it: by its own command the task keeps its id and its story."""
    from parti.delivery import DeliveryDeadLetters
    from parti.delivery.dead_letters import is_delivery_letter
    from parti.delivery.names import DeliveryNames

    stored = await office.stored(letter.sequence)
    if is_delivery_letter(stored):
        deliveries = DeliveryDeadLetters(office.js, DeliveryNames(office.stream))
        await deliveries.replay_one(await deliveries.get(letter.sequence))
    else:
        await office.replay(letter)


def tell_replayed(count: int, failed: Mapping[int, str], as_json: bool) -> None:
    """Say how many letters left, and why others did not; then the exit code is 1."""
    if as_json:
        print_json({"replayed": count} | ({"failed": failed} if failed else {}))
    else:
        click.echo(f"{count} replayed")
    for sequence, error in failed.items():
        note(f"letter {sequence} stays: {error}")
    if failed:
        raise SystemExit(1)


@dlq.command("purge")
@_chosen_letters
def purge(loaded: LoadedConfig, stream: str, letters: tuple[int, ...], subject: str | None, as_json: bool) -> None:
    """Remove LETTERS for good."""
    removed = _run(loaded, stream, lambda office: office.purge(subject=subject, sequences=letters))
    _tell("removed", removed, as_json)


def _tell(word: str, count: int, as_json: bool) -> None:
    if as_json:
        print_json({word: count})
    else:
        click.echo(f"{count} {word}")


def _summary(letter: Any) -> dict[str, Any]:
    return {
        "letter": letter.sequence,
        "subject": letter.subject,
        "sequence": letter.original_sequence,
        "reason": letter.reason,
        "error": letter.error,
        "attempts": letter.attempts,
        "worker": letter.worker,
        "consumer": letter.consumer,
        "buried": _time(letter.time),
        "bytes": len(letter.data),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


async def _tell_if_none(letters: Any) -> None:
    """Say so where no letter was ever written, and refuse a stream that is not there: neither is an empty list."""
    from parti.wire.errors import StreamNotFound

    try:
        await letters.js.stream_info(letters.name)
    except StreamNotFound:
        try:
            await letters.js.stream_info(letters.stream)
        except StreamNotFound:
            raise UsageError(f"there is no stream {letters.stream}, and none of its letters") from None
        note(f"nothing here yet: no letter of {letters.stream} was ever written")


def _run(loaded: LoadedConfig, stream: str, act: Callable[[Any], Awaitable[T]]) -> T:
    from parti.wire.api import JetStreamApi
    from parti.worker.dead_letter_reader import DeadLetterReader

    async def work(connection: Connection) -> T:
        letters = DeadLetterReader(JetStreamApi(connection), stream)
        await _tell_if_none(letters)
        return await act(letters)

    return run_connected(loaded, work)
