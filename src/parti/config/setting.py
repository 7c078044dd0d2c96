"""One configuration key: its type, unit, default, bounds and the one-line reason for the default.

A section is a frozen msgspec Struct whose fields are annotated with `Setting`. The loader, `parti config show` and the
table in docs/operations.md all read the same declarations, so they cannot disagree.
"""

from __future__ import annotations

import math
import types
import typing
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import cache
from typing import Any, Literal, get_args, get_origin

import msgspec

from parti.config.redact import MASK, redact_address
from parti.config.units import LARGEST, format_duration, format_size, parse_duration, parse_size
from parti.errors import ConfigError


class Unit(StrEnum):
    """How a number is written: with a unit of time, with a unit of size, or without a unit."""

    NONE = ""
    DURATION = "duration"
    SIZE = "size"


@dataclass(frozen=True, slots=True)
class Setting:
    """Annotation of one section field."""

    reason: str
    """One line: what the key is, and why it has this default."""
    unit: Unit = Unit.NONE
    secret: bool = False
    address: bool = False
    """A server address: its user part is a secret, the rest is not."""
    at_least: float | None = None
    at_most: float | None = None


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section. Its repr masks secrets, also for rich, which reads `__rich_repr__`."""

    def __post_init__(self) -> None:
        """Check a section made in Python like one from a file: types, bounds, and allowed words."""
        for key in keys_of(type(self)):
            try:
                key.check(getattr(self, key.name))
            except ConfigError as error:
                raise ConfigError(f"{self.section_name()}.{key.name}: {error}") from None

    @classmethod
    def section_name(cls) -> str:
        """The section's name in a file: `[worker]` for WorkerConfig."""
        return cls.__name__.removesuffix("Config").removesuffix("Section").lower()

    def __repr__(self) -> str:
        shown = ", ".join(f"{key.name}={key.show(getattr(self, key.name))}" for key in keys_of(type(self)))
        return f"{type(self).__name__}({shown})"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [(key.name, key.show(getattr(self, key.name))) for key in keys_of(type(self))]


@dataclass(frozen=True, slots=True)
class SettingKey:
    """One field of a section, ready to parse and to show."""

    name: str
    type: Any
    default: Any
    setting: Setting

    def parse(self, raw: object) -> Any:
        """The value in the field's type, from TOML (typed) or from the environment and flags (text)."""
        return self._bounded(self._convert(raw))

    def check(self, value: object) -> None:
        """ConfigError unless this is a value of the field's type, within its bounds."""
        if self.setting.unit:
            what = "seconds" if self.setting.unit is Unit.DURATION else "bytes"
            whole = self.setting.unit is Unit.SIZE
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise ConfigError(f"{value!r} is no {'whole ' if whole else ''}number of {what}")
        elif not (isinstance(self.type, type) and type(value) is self.type):
            try:
                msgspec.convert(value, self.type, strict=True)
            except msgspec.ValidationError:
                shown = MASK if self.setting.secret or self.setting.address else repr(value)
                raise ConfigError(f"{shown} is not {self.type_name}") from None
        self._bounded(value)

    def _bounded(self, value: Any) -> Any:
        low, high = self.setting.at_least, self.setting.at_most
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise ConfigError(f"{value} is not a number to calculate with")
            if self.setting.unit and not 0 <= value < LARGEST:
                raise ConfigError(f"{value} is {'below 0' if value < 0 else 'too large'}")
            if low is not None and value < low:
                raise ConfigError(f"{self.show(value)} is too small; the least is {self.show(low)}")
            if high is not None and value > high:
                raise ConfigError(f"{self.show(value)} is too large; the most is {self.show(high)}")
        return value

    def _convert(self, raw: object) -> Any:
        match self.setting.unit:
            case Unit.DURATION:
                return parse_duration(raw if isinstance(raw, str) else str(raw))
            case Unit.SIZE:
                return parse_size(raw if isinstance(raw, str) else str(raw))
        if get_origin(self.type) is tuple and isinstance(raw, str):
            raw = [item.strip() for item in raw.split(",") if item.strip()]
        try:
            # strict=False reads "6" as 6 and "true" as True: environment and flags only have text.
            return msgspec.convert(raw, self.type, strict=False)
        except msgspec.ValidationError:
            shown = MASK if self.setting.secret or self.setting.address else repr(raw)
            raise ConfigError(f"{shown} is not {self.type_name}") from None

    @property
    def type_name(self) -> str:
        """The type's name for users."""
        if self.setting.unit:
            return f"a {self.setting.unit}"
        return _words(self.type)

    def show(self, value: object) -> str:
        """The value as the user would write it; a secret is masked."""
        if value is None or value in ("", ()):
            return "unset"
        if self.setting.secret:
            return MASK
        if self.setting.unit is Unit.DURATION:
            return format_duration(typing.cast(float, value))
        if self.setting.unit is Unit.SIZE:
            return format_size(int(typing.cast(float, value)))
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, Enum):
            return str(value.value)
        texts = [str(item) for item in value] if isinstance(value, tuple) else [str(value)]
        return ",".join(map(redact_address, texts) if self.setting.address else texts)


@cache
def keys_of(section: type[Section]) -> tuple[SettingKey, ...]:
    """The keys of a section, in the order they were declared; a field without a `Setting` is a programming error."""
    hints = typing.get_type_hints(section, include_extras=True)
    keys = []
    for info in msgspec.structs.fields(section):
        annotated = hints[info.name]
        settings = [item for item in getattr(annotated, "__metadata__", ()) if isinstance(item, Setting)]
        if len(settings) != 1:
            raise TypeError(f"{section.__name__}.{info.name} needs exactly one Setting annotation")
        keys.append(SettingKey(info.name, get_args(annotated)[0], info.default, settings[0]))
    return tuple(keys)


def _words(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(str(member.value) for member in kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_words(part) for part in get_args(kind) if part is not type(None))
    if origin is tuple:
        return "a list of texts"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}.get(kind, str(kind))
