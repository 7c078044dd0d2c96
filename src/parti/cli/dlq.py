"""`parti dlq`: the dead letters of a stream, from any writer; `parti deliver dlq` does the same for tasks."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from parti.cli.connected import run_connected
from parti.cli.output import json_option, note, plain, print_json, print_table
from parti.cli.settings import with_config
from parti.config import LoadedConfig
from parti.errors import UsageError

if TYPE_CHECKING:
    from parti.dead_letters import ChosenLetters, DeadLetter, DeadLetterReader
    from parti.wire.connect import Connection

T = TypeVar("T")
_COLUMNS = ("letter", "subject", "sequence", "reason", "attempts", "buried", "error")
_MASKED = ("url", "headers", "preIssuedToken")


@click.group()
def dlq() -> None:
    """List, show, send back and throw away messages that no handler could take (stream <STREAM>_DLQ)."""


limit_option = click.option(
    "--limit", default=100, show_default=True, type=click.IntRange(1, 100_000), help="At most so many."
)
redact_option = click.option(
    "--redact", is_flag=True, help="Without the values of headers, and a task's url, headers and token."
)


def _chosen_letters(command: Callable[..., None]) -> Callable[..., None]:
    """Options that select letters for a command: their numbers, a subject, a filter, or none of these for all."""

    @click.argument("stream")
    @click.argument("letters", type=int, nargs=-1)
    @click.option("--all", "everything", is_flag=True, help="All letters.")
    @click.option("--subject", help="The letters of this subject; wildcards allowed.")
    @click.option("--filter", "place", help="The letters below <STREAM>_DLQ.PATTERN; of tasks by their reason.")
    @json_option
    @with_config
    @wraps(command)
    def checked(
        letters: tuple[int, ...], everything: bool, subject: str | None, place: str | None, **rest: Any
    ) -> None:
        if sum((bool(letters), everything, subject is not None, place is not None)) != 1:
            raise UsageError("name the letters: their numbers, --subject, --filter, or --all")
        command(chosen=chosen_letters(letters, subject or ">", place or ">"), **rest)

    return checked


@dlq.command("ls")
@click.argument("stream")
@click.option("--subject", default=">", show_default=True, help="Only messages of this subject; wildcards allowed.")
@click.option("--filter", "place", default=">", show_default=True, help="Only letters below <STREAM>_DLQ.PATTERN.")
@limit_option
@json_option
@with_config
def list_letters(loaded: LoadedConfig, stream: str, subject: str, place: str, limit: int, as_json: bool) -> None:
    """The letters of STREAM, oldest first."""
    found, total = gather_letters(loaded, stream, chosen_letters((), subject, place), limit)
    if as_json:
        print_json({"stream": stream, "total": total, "letters": [summary(letter) for letter in found]})
    else:
        print_letters(_COLUMNS, found, total)


@dlq.command("show")
@click.argument("stream")
@click.argument("letter", type=int)
@redact_option
@json_option
@with_config
def show(loaded: LoadedConfig, stream: str, letter: int, redact: bool, as_json: bool) -> None:
    """One letter of STREAM with its headers and data; of a task also the endpoint's answer, and its letters before."""
    show_letter(loaded, stream, letter, redact, as_json)


@dlq.command("replay")
@click.option("--rate", type=click.FloatRange(min=0.01), help="At most so many letters a second.")
@_chosen_letters
def replay(loaded: LoadedConfig, stream: str, chosen: ChosenLetters, rate: float | None, as_json: bool) -> None:
    """Publish messages of LETTERS again to their own subject, and remove each letter once it is stored."""
    replay_letters(loaded, stream, chosen, rate, as_json)


@dlq.command("purge")
@_chosen_letters
def purge(loaded: LoadedConfig, stream: str, chosen: ChosenLetters, as_json: bool) -> None:
    """Remove LETTERS for good."""
    removed = with_letters(loaded, stream, lambda letters: letters.purge(chosen))
    if as_json:
        print_json({"removed": removed})
    else:
        click.echo(f"{removed} removed")


# -- what both commands do ---------------------------------------------------------------------------------------------


def chosen_letters(
    sequences: tuple[int, ...] = (), subject: str = ">", place: str = ">", *, tasks: bool = False
) -> ChosenLetters:
    """The letters that the options select; `tasks`: only letters of delivery tasks."""
    from parti.dead_letters import ChosenLetters, LetterKind

    return ChosenLetters(sequences, subject, place, LetterKind.DELIVERY if tasks else None)


def gather_letters(
    loaded: LoadedConfig, stream: str, chosen: ChosenLetters, limit: int
) -> tuple[list[DeadLetter], int]:
    """Up to `limit` of the chosen letters, and how many there are in all."""

    async def gather(letters: DeadLetterReader) -> tuple[list[DeadLetter], int]:
        found: list[DeadLetter] = []
        async for letter in letters.walk(chosen):
            found.append(letter)
            if len(found) >= limit:
                break
        return found, await letters.count()

    return with_letters(loaded, stream, gather)


def print_letters(columns: tuple[str, ...], found: list[DeadLetter], total: int) -> None:
    cells = [row | {"error": str(row["error"])[:80]} for row in map(summary, found)]
    print_table(columns, [[plain(row.get(column, "")) for column in columns] for row in cells])
    note(f"{len(found)} of {total} letters")


def show_letter(loaded: LoadedConfig, stream: str, letter: int, redact: bool, as_json: bool) -> None:
    found = with_letters(loaded, stream, lambda letters: letters.get(letter))
    task = found.kind == "delivery"
    data = _redacted(found.data) if redact and task else found.data
    headers = {name: "***" if redact else value for name, value in found.headers.items()}
    parts = {"data": data} | ({"task": data, "response": found.extension.response} if task else {})
    if as_json:
        encoded = {f"{name}_base64": base64.b64encode(part).decode() for name, part in parts.items()}
        history = {"history": found.extension.history} if task else {}
        print_json(summary(found) | {"headers": headers} | history | encoded)
        return
    for name, value in summary(found).items():
        click.echo(f"{name}: {value}")
    for name, value in headers.items():
        click.echo(f"header {name}: {value}")
    for before in found.extension.history:
        click.echo(f"before: {before}")
    if found.extension.response:
        click.echo(f"\nresponse:\n{found.extension.response.decode(errors='replace')}\n")
    click.echo(data.decode(errors="replace"))


def replay_letters(loaded: LoadedConfig, stream: str, chosen: ChosenLetters, rate: float | None, as_json: bool) -> None:
    """Replay the letters; print how many were replayed and why others were not, in which case the exit code is 1."""
    from parti.clock import SystemClock

    failed: dict[int, str] = {}

    async def again(letters: DeadLetterReader) -> int:
        replays = letters.replay_all(
            chosen,
            clock=SystemClock(),
            rate=rate,
            failed=lambda sequence, error: failed.update({sequence: str(error)}),
        )
        return len([None async for _ in replays])

    count = with_letters(loaded, stream, again)
    if as_json:
        print_json({"replayed": count} | ({"failed": failed} if failed else {}))
    else:
        click.echo(f"{count} replayed")
    for sequence, error in failed.items():
        note(f"letter {sequence} stays: {error}")
    if failed:
        raise SystemExit(1)


def summary(letter: DeadLetter) -> dict[str, Any]:
    """The short form of a letter; for a task or a group's message it includes their own fields."""
    told = {
        "letter": letter.sequence,
        "buried": shown_time(letter.time),
        "reason": letter.reason,
        "attempts": letter.attempts,
        "error": letter.error,
        "subject": letter.subject,
        "sequence": letter.original_sequence,
        "worker": letter.worker,
        "consumer": letter.consumer,
        "bytes": len(letter.data),
    }
    more = letter.extension
    if more.cut:
        told["missing"] = more.cut
    if more.kind == "group":
        return told | {"group": more.group}
    if more.kind == "delivery":
        return told | {
            "id": more.id,
            "status": more.status,
            "outcome": more.outcome,
            "trigger": more.trigger,
            "host": more.host,
            "document": _document(letter.data),
            "origin": letter.origin,
        }
    return told


def shown_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _document(data: bytes) -> str:
    """The document of the task, if its data names one."""
    task = _task(data) or {}
    names = (task.get(name) for name in ("database", "collection", "documentId"))
    return "/".join(name if isinstance(name, str) else "" for name in names).strip("/")


def _redacted(data: bytes) -> bytes:
    """The task without fields that may contain a credential; data that is not a task is not shown at all."""
    import msgspec

    from parti.delivery.masking import looks_like_a_value

    task = _task(data)
    if task is None:
        return f"({len(data)} bytes that are no task)".encode()
    hidden = [name for name in _MASKED if name in task]
    if "secretsRef" in task and (type(ref := task["secretsRef"]) is not str or looks_like_a_value(ref)):
        hidden.append("secretsRef")  # somebody may have put the secret itself in place of its name
    return msgspec.json.encode(task | dict.fromkeys(hidden, "***"))


def _task(data: bytes) -> dict[str, Any] | None:
    import msgspec

    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def with_letters(loaded: LoadedConfig, stream: str, act: Callable[[DeadLetterReader], Awaitable[T]]) -> T:
    """Return what `act` returns for the letters. Says so if no letter was ever written; refuses an unknown stream."""
    from parti.dead_letters import DeadLetterReader
    from parti.wire.api import JetStreamApi
    from parti.wire.errors import StreamNotFound

    async def work(connection: Connection) -> T:
        letters = DeadLetterReader(js := JetStreamApi(connection), stream)
        try:
            await js.stream_info(letters.name)
        except StreamNotFound:
            await require_stream(js, stream)
            note(f"nothing here yet: no letter of {stream} was ever written")
        return await act(letters)

    return run_connected(loaded, work)


async def require_stream(js: Any, stream: str) -> None:
    """Raise if the stream does not exist: an empty list would look like good news."""
    from parti.wire.errors import StreamNotFound

    try:
        await js.stream_info(stream)
    except StreamNotFound:
        raise UsageError(
            f"there is no stream {stream}, and none of its letters; `parti deliver` takes it from deliver.stream"
        ) from None
