"""Options as Spark passes them: a table of known names; any other name is refused, with the nearest known one.

Spark compares option names without case and may pass them lower-cased, so `maxOffsetsPerTrigger` is found as
`maxoffsetspertrigger`. A misspelt option that is silently ignored costs hours; here the call fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from parti.config.units import parse_duration, parse_size
from parti.errors import ConfigError, FatalError
from parti.wire.options import ConnectOptions

Parse = Callable[[str], Any]
"""Parses an option's text; reports a problem by a ValueError or a FatalError."""

CONNECTION_PREFIX = "nats."


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its documented name, its default, and what it does."""

    name: str
    default: str | None
    """As a user would write it, so that the docs show it and `parse` reads it; None means: not set."""
    parse: Parse
    doc: str

    def value(self, given: str | None) -> Any:
        """The parsed value of this text; of the default for None."""
        text = self.default if given is None else given.strip()
        if text is None:
            return None
        try:
            return self.parse(text)
        except (ValueError, FatalError) as error:
            raise ConfigError(f"option {self.name}: {error}") from None


class OptionTable:
    """The options of one side of the connector; the connection options belong to every side."""

    def __init__(self, options: Iterable[Option], *, accepted: Iterable[str] = ()) -> None:
        """`accepted`: names that Spark itself adds and reads; they are accepted and not parsed."""
        self._options = {option.name.lower(): option for option in options}
        self._accepted = frozenset(name.lower() for name in accepted)

    def __iter__(self) -> Iterator[Option]:
        return iter(self._options.values())

    def knows(self, name: str) -> bool:
        """Whether an option of this name exists here."""
        folded = name.lower()
        return folded in self._options or folded in self._accepted or folded.startswith(CONNECTION_PREFIX)

    def parse(self, given: Mapping[str, str]) -> dict[str, Any]:
        """The value of every option of the table by its documented name, defaults filled in.

        An unknown name, a name given twice and a malformed value raise ConfigError.
        """
        texts: dict[str, str] = {}
        for name, text in given.items():
            if not self.knows(name):
                raise unknown_option(name, [self])
            option = self._options.get(name.lower())
            if option is not None:
                if option.name in texts:
                    raise ConfigError(f"the option {option.name!r} is given twice")
                texts[option.name] = str(text)
        return {option.name: option.value(texts.get(option.name)) for option in self}

    def names(self) -> list[str]:
        """The documented names."""
        return [option.name for option in self]


def unknown_option(name: str, tables: Iterable[OptionTable]) -> ConfigError:
    """The error for a name that none of the tables knows."""
    known = {known.lower(): known for table in tables for known in table.names()}
    known |= {field.lower(): field for field in _connection_names()}
    near = get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {known[near[0]]!r}?" if near else f"known are {', '.join(known.values())}"
    return ConfigError(f"unknown option {name!r} of format jetstream: {hint}")


CONNECTION_OPTIONS = (
    Option("servers", None, str, "NATS urls, separated by commas; without it NATS_URL, then the `nats` CLI's context"),
    Option("jsDomain", None, str, "JetStream domain, when the stream lives behind a leaf node"),
    Option("apiPrefix", None, str, "prefix of the JetStream API, when another account exports it"),
)
_CONNECTION_FIELDS = {"servers": "servers", "jsDomain": "domain", "apiPrefix": "api_prefix"}


def connect_options(given: Mapping[str, str]) -> ConnectOptions:
    """How to reach NATS: `servers`, `jsDomain`, `apiPrefix` and everything with the prefix `nats.`.

    Credential files are read here, on the driver, so that executors need none of them.
    """
    folded = {name.lower(): text for name, text in given.items()}
    explicit = {name: text for name, text in folded.items() if name.startswith(CONNECTION_PREFIX)}
    for option, field in _CONNECTION_FIELDS.items():
        if folded.get(option.lower()):
            explicit[field] = folded[option.lower()]
    if "domain" in explicit and "api_prefix" in explicit:
        raise ConfigError("jsDomain and apiPrefix exclude each other: give one of them")
    options = ConnectOptions.resolve(explicit).self_contained()
    options.identity()  # report a malformed nkey or creds here, even if this server asks for none
    return options


def _connection_names() -> list[str]:
    """The names after `nats.`, in the spelling of the docs: `nats.credsFile` for `creds_file`."""
    return [CONNECTION_PREFIX + _camel(field.name) for field in fields(ConnectOptions)]


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def text(value: str) -> str:
    """Any text that is not empty."""
    if not value:
        raise ValueError("it is empty")
    return value


def flag(value: str) -> bool:
    """`true` or `false`."""
    if value.lower() not in ("true", "false"):
        raise ValueError(f"{value!r} is neither true nor false")
    return value.lower() == "true"


def positive(value: str) -> int:
    """A whole number of at least 1."""
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{value!r} is no whole number from 1 on")
    return int(value)


def span(value: str) -> float:
    """Seconds as in `duration`, greater than 0."""
    seconds = parse_duration(value)
    if seconds <= 0:
        raise ValueError(f"{value} leaves no time at all: write at least 1s")
    return seconds


def duration(value: str) -> float:
    """Seconds from `30s`, `500ms`, `15m`."""
    return parse_duration(value)


def size(value: str) -> int:
    """Bytes from `64MB`, `1GiB` or a plain number."""
    return int(value) if value.isdecimal() else parse_size(value)


def choice(*words: str) -> Parse:
    """One of these words, in any case."""

    def parse(value: str) -> str:
        if value.lower() not in words:
            raise ValueError(f"{value!r} is none of {', '.join(words)}")
        return value.lower()

    return parse
