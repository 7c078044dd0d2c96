"""Reading the configuration: a flag overrides the environment, the environment the file, the file the default.

Every key in any source must exist. An unknown key is refused; the error names the nearest known key and the place where
the unknown key was written. So a typing error never silently leaves a default in force.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from parti.config.origin import DEFAULT, Origin, Source, toml_lines
from parti.config.sections import Config
from parti.config.setting import Section, SettingKey, keys_of
from parti.errors import ConfigError

ENV_PREFIX: Final = "PARTI_"
ENV_SEPARATOR: Final = "__"
CONFIG_ENV: Final = "PARTI_CONFIG"
DEFAULT_FILE: Final = "parti.toml"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The configuration, and for each dotted key the place its value came from."""

    config: Config
    origins: Mapping[str, Origin]

    def section(self, name: str) -> Section:
        return getattr(self.config, name)  # type: ignore[no-any-return]

    def explicit(self, section: str) -> dict[str, Any]:
        """The values of one section that were set, by key; values left at their default are absent."""
        return {
            key.name: getattr(self.section(section), key.name)
            for key in keys_of(sections()[section])
            if self.origins[f"{section}.{key.name}"] != DEFAULT
        }

    def rows(self) -> Iterator[tuple[str, SettingKey, Any, Origin]]:
        """Each dotted name with its key, value and origin, in the order of declaration."""
        for section, kind in sections().items():
            for key in keys_of(kind):
                name = f"{section}.{key.name}"
                yield name, key, getattr(self.section(section), key.name), self.origins[name]


@dataclass(frozen=True, slots=True)
class _Assignment:
    name: str
    raw: object
    origin: Origin


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> LoadedConfig:
    """The configuration from one file, the environment and flags, all keys checked.

    The file is `path`, else the one that PARTI_CONFIG names, else `parti.toml` in the working directory if it exists.
    `flags` are dotted names ("retry.retry_base") and override all other sources.
    """
    environ = os.environ if environ is None else environ
    assignments = [
        *_from_file(path, environ),
        *_from_environment(environ),
        *(_Assignment(name, raw, Origin(Source.FLAG)) for name, raw in (flags or {}).items()),
    ]
    values: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    origins: dict[str, Origin] = dict.fromkeys(known_keys(), DEFAULT)
    for assignment in assignments:
        key = known_keys().get(assignment.name)
        if key is None:
            raise ConfigError(_unknown(assignment.name, assignment.origin))
        section, _, field = assignment.name.partition(".")
        try:
            values[section][field] = key.parse(assignment.raw)
        except ConfigError as error:
            raise ConfigError(f"{assignment.name} ({assignment.origin}): {error}") from None
        origins[assignment.name] = assignment.origin
    built: dict[str, Any] = {section: kind(**values[section]) for section, kind in sections().items()}
    return LoadedConfig(Config(**built), origins)


def sections() -> dict[str, type[Section]]:
    """The section types by name, in the order `Config` declares them."""
    return {field.name: field.type for field in msgspec.structs.fields(Config)}


def known_keys() -> dict[str, SettingKey]:
    """Every key by its dotted name."""
    return {f"{name}.{key.name}": key for name, kind in sections().items() for key in keys_of(kind)}


def env_name(dotted: str) -> str:
    """The environment variable of a key: retry.retry_base is PARTI_RETRY__RETRY_BASE."""
    return ENV_PREFIX + dotted.replace(".", ENV_SEPARATOR).upper()


def _from_file(path: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> Iterator[_Assignment]:
    named = path if path is not None else environ.get(CONFIG_ENV)
    file = Path(named) if named else Path(DEFAULT_FILE)
    if not named and not file.is_file():
        return
    try:
        text = file.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the configuration file {file} is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the configuration file {file} is no valid TOML: {error}") from None
    lines = toml_lines(text)

    def origin(name: str) -> Origin:
        return Origin(Source.FILE, f"{file}:{lines[name]}" if name in lines else str(file))

    for section, table in document.items():
        if section not in sections():
            raise ConfigError(_unknown(section, origin(section)))
        if not isinstance(table, dict):
            raise ConfigError(f"{section} ({origin(section)}) must be a table: write [{section}]")
        for key, raw in table.items():
            yield _Assignment(f"{section}.{key}", raw, origin(f"{section}.{key}"))


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Assignment]:
    by_variable = {env_name(dotted): dotted for dotted in known_keys()}
    # PARTI_RETRY_RETRY_BASE, with one underscore, would otherwise be silently ignored.
    by_slip = {variable.replace(ENV_SEPARATOR, "_"): variable for variable in by_variable}
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX):
            continue
        if variable in by_slip:
            raise ConfigError(f"unknown variable {variable}: did you mean {by_slip[variable]}?")
        section, separator, key = variable[len(ENV_PREFIX) :].partition(ENV_SEPARATOR)
        if separator:
            dotted = by_variable.get(variable, f"{section}.{key}".lower())
            yield _Assignment(dotted, environ[variable], Origin(Source.ENV, variable))


def _unknown(name: str, origin: Origin) -> str:
    section, dot, _ = name.partition(".")
    if not dot or section not in sections():
        candidates = list(sections())
        near = difflib.get_close_matches(section, candidates, n=1)
        hint = f"did you mean [{near[0]}]?" if near else f"the sections are {', '.join(candidates)}"
        return f"unknown section {section!r} ({origin}): {hint}"
    near = difflib.get_close_matches(name, known_keys(), n=1, cutoff=0.7)
    own = [key.name for key in keys_of(sections()[section])]
    hint = f"did you mean {near[0]!r}?" if near else f"[{section}] has {', '.join(own)}"
    return f"unknown key {name!r} ({origin}): {hint}"
