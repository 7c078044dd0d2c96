"""`parti deliver dlq` and `parti deliver endpoints`: what could not be delivered, and who is not called any more."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from parti.cli.connected import run_connected
from parti.cli.dlq import tell_replayed
from parti.cli.output import json_option, note, plain, print_json, print_table
from parti.cli.settings import with_config
from parti.config import LoadedConfig
from parti.errors import UsageError

if TYPE_CHECKING:
    from parti.delivery import DeliveryDeadLetters, Letter
    from parti.delivery.endpoints import Disabled
    from parti.wire.api import JetStreamApi

T = TypeVar("T")
_MASKED = ("url", "headers", "preIssuedToken")


@click.group("dlq")
def dlq() -> None:
    """The tasks that could not be delivered (stream <STREAM>_DLQ)."""


_filter = click.option(
    "--filter",
    "pattern",
    default=">",
    show_default=True,
    metavar="PATTERN",
    help="Only letters of <database>.<collection>.<reason>; wildcards allowed.",
)


@dlq.command("ls")
@_filter
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, 100_000), help="At most so many.")
@json_option
@with_config
def list_letters(loaded: LoadedConfig, pattern: str, limit: int, as_json: bool) -> None:
    """List letters, oldest first."""

    _check_filter(pattern)

    async def gather(letters: DeliveryDeadLetters) -> tuple[list[Letter], int]:
        return [letter async for letter in _first(letters.letters(pattern), limit)], await letters.count()

    nothing: tuple[list[Letter], int] = ([], 0)
    found, total = _with_letters(loaded, gather, nothing)
    if as_json:
        print_json([_summary(letter) for letter in found])
        return
    columns = ["letter", "buried", "reason", "status", "attempts", "document", "trigger", "host", "id"]
    rows = [[plain(str(_summary(letter)[column])) for column in columns] for letter in found]
    print_table(columns, rows)
    note(f"{len(found)} of {total} letters")


@dlq.command("show")
@click.argument("letter", type=click.IntRange(min=1))
@click.option("--redact", is_flag=True, help="Without the task's url, headers and token: each may hold a credential.")
@json_option
@with_config
def show(loaded: LoadedConfig, letter: int, redact: bool, as_json: bool) -> None:
    """Show one letter: why, the endpoint's answer, the task as it was published, and its letters before."""
    found = _with_letters(loaded, lambda letters: letters.get(letter), None)
    if found is None:
        raise UsageError(f"there is no letter {letter}: nothing here yet")
    task = _redacted(found.data) if redact else found.data
    if as_json:
        parts = {"response": found.response, "task": task}
        encoded = {f"{name}_base64": base64.b64encode(data).decode() for name, data in parts.items()}
        print_json(_summary(found) | {"history": found.history} | encoded)
        return
    print_table(["", ""], [[name, plain(value)] for name, value in _summary(found).items()])
    for before in found.history:
        click.echo(f"before: {before}")
    for title, data in (("response", found.response), ("task", task)):
        click.echo(f"\n{title}:\n{data.decode(errors='replace')}")


@dlq.command("replay")
@_filter
@click.option("--letter", "chosen", type=click.IntRange(min=1), multiple=True, help="This one only; may be repeated.")
@click.option("--rate", default=100.0, show_default=True, type=click.FloatRange(min=0.01), help="Letters a second.")
@json_option
@with_config
def replay(loaded: LoadedConfig, pattern: str, chosen: tuple[int, ...], rate: float, as_json: bool) -> None:
    """Publish letters again, with the id they had, and remove them from the dead letters."""
    from parti.clock import SystemClock

    _check_filter(pattern)
    failed: dict[int, str] = {}

    async def again(letters: DeliveryDeadLetters) -> int:
        replays = letters.replay(
            pattern,
            rate=rate,
            clock=SystemClock(),
            sequences=chosen,
            failed=lambda sequence, error: failed.update({sequence: str(error)}),
        )
        return len([letter async for letter in replays])

    count = _with_letters(loaded, again, 0)
    if not count and chosen and not failed:
        failed.update(dict.fromkeys(chosen, "there is no such letter: nothing here yet"))
    tell_replayed(count, failed, as_json)


@dlq.command("purge")
@_filter
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@with_config
def purge(loaded: LoadedConfig, pattern: str, yes: bool, as_json: bool) -> None:
    """Remove letters for good."""
    _check_filter(pattern)
    if not yes:
        click.confirm(f"Remove every dead letter that matches {pattern!r} for good?", abort=True, err=True)
    _print_count("purged", _with_letters(loaded, lambda letters: letters.purge(pattern), 0), as_json)


@click.group("endpoints")
def endpoints() -> None:
    """Endpoints that answered 410 and are not called any more."""


@endpoints.command("ls")
@json_option
@with_config
def list_endpoints(loaded: LoadedConfig, as_json: bool) -> None:
    """List disabled endpoints."""
    from parti.delivery.endpoints import disabled_endpoints

    nothing: dict[str, Disabled] = {}
    found = _with_bucket(loaded, disabled_endpoints, nothing)
    if as_json:
        print_json(found)
        return
    rows = [
        [n, plain(r.trigger), plain(r.database), plain(r.host), plain(r.why), _time(r.since)] for n, r in found.items()
    ]
    print_table(["endpoint", "trigger", "database", "host", "why", "since"], rows)


@endpoints.command("enable")
@click.argument("endpoint")
@with_config
def enable_endpoint(loaded: LoadedConfig, endpoint: str) -> None:
    """Call ENDPOINT again; `endpoints ls` shows its name."""
    from parti.delivery.endpoints import disabled_endpoints, enable

    async def again(bucket: Any) -> None:
        if endpoint not in await disabled_endpoints(bucket):
            raise UsageError(f"no disabled endpoint {endpoint!r}: `parti deliver endpoints ls` lists them")
        await enable(bucket, endpoint)

    _with_bucket(loaded, again, None)
    note(f"{endpoint} is called again")


# -- what they share ---------------------------------------------------------------------------------------------------


def _check_filter(pattern: str) -> None:
    """Refuse a filter that no letter can match: an empty answer would pass for good news."""
    from parti.delivery.errors import Reason

    tokens, reasons = pattern.split("."), [reason.value for reason in Reason]
    fits = len(tokens) == 3 or (tokens[-1] == ">" and len(tokens) <= 3)
    if not fits or not all(tokens) or ">" in tokens[:-1]:
        raise UsageError(
            f"--filter {pattern!r}: write <database>.<collection>.<reason>, with * for any, or > at the end"
        )
    if len(tokens) == 3 and tokens[2] not in ("*", ">", *reasons):
        raise UsageError(f"--filter {pattern!r}: {tokens[2]!r} is no reason; there are {', '.join(reasons)}")


def _redacted(data: bytes) -> bytes:
    """The task without what may hold a credential; of something that is no task nothing is shown."""
    from parti.delivery.masking import looks_like_a_value

    try:
        task = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return f"({len(data)} bytes that are no task)".encode()
    hidden = [name for name in _MASKED if name in task]
    if "secretsRef" in task and (type(ref := task["secretsRef"]) is not str or looks_like_a_value(ref)):
        hidden.append("secretsRef")  # the secret itself, pasted where its name belongs
    return msgspec.json.encode(task | dict.fromkeys(hidden, "***"))


def _with_api(loaded: LoadedConfig, work: Callable[[JetStreamApi], Awaitable[T]]) -> T:
    from parti.wire.api import JetStreamApi

    return run_connected(loaded, lambda connection: work(JetStreamApi(connection)))


def _with_letters(loaded: LoadedConfig, work: Callable[[DeliveryDeadLetters], Awaitable[T]], nothing: T) -> T:
    """What `work` says of the letters; `nothing`, and a word, while there is nothing to look at."""
    from parti.delivery import DeliveryDeadLetters
    from parti.delivery.names import DeliveryNames

    names = DeliveryNames(loaded.config.deliver.stream)
    return _with_api(
        loaded, lambda js: _unless_nothing(js, names.stream, work(DeliveryDeadLetters(js, names)), nothing)
    )


def _with_bucket(loaded: LoadedConfig, work: Callable[[Any], Awaitable[T]], nothing: T) -> T:
    from parti.delivery.names import DeliveryNames
    from parti.wire.kv import KeyValue

    names = DeliveryNames(loaded.config.deliver.stream)

    async def opened(js: JetStreamApi) -> T:
        return await work(await KeyValue.open(js, names.bucket))

    return _with_api(loaded, lambda js: _unless_nothing(js, names.stream, opened(js), nothing))


async def _unless_nothing(js: JetStreamApi, stream: str, work: Awaitable[T], nothing: T) -> T:
    from parti.wire.errors import StreamNotFound

    try:
        return await work
    except StreamNotFound:
        try:
            await js.stream_info(stream)
        except StreamNotFound:
            raise UsageError(f"there is no stream {stream}: name yours with --set deliver.stream=NAME") from None
        note(f"nothing here yet: `parti deliver run` has not run on {stream}")
        return nothing


async def _first(letters: AsyncIterator[Letter], limit: int) -> AsyncIterator[Letter]:
    count = 0
    async for letter in letters:
        yield letter
        count += 1
        if count >= limit:
            return


def _summary(letter: Letter) -> dict[str, Any]:
    return {
        "letter": letter.sequence,
        "buried": _time(letter.time),
        "reason": letter.reason,
        "status": letter.status,
        "attempts": letter.attempts,
        "outcome": letter.outcome,
        "error": letter.error,
        "trigger": letter.trigger,
        "document": _document(letter.data),
        "host": letter.host,
        "id": letter.id,
        "subject": letter.subject,
        "origin": letter.source,
        "bytes": len(letter.data),
    }


def _print_count(what: str, count: int, as_json: bool) -> None:
    if as_json:
        print_json({what: count})
    else:
        click.echo(f"{what} {count}")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


class _Document(msgspec.Struct, rename="camel"):
    database: str = ""
    collection: str = ""
    document_id: str = ""


def _document(data: bytes) -> str:
    """Whose task it is, as far as it says so."""
    try:
        found = msgspec.json.decode(data, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return "/".join((found.database, found.collection, found.document_id)).strip("/")
