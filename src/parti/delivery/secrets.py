"""Where signing keys come from: one variable or file per secret. Values never reach a log, an error or a repr."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from parti.clock import Clock
from parti.delivery.errors import SecretMissing, SecretStoreDown
from parti.delivery.masking import looks_like_a_value, masked
from parti.delivery.signing import SigningKey
from parti.errors import ConfigError

VARIABLE = "PARTI_WEBHOOK_SECRET_"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
_CACHED_FOR = 60.0  # seconds: a rotated key is used after this, and a network folder is not read per request
_CACHED = 1_000
_LARGEST_FILE = 64 << 10


class SecretStore:
    """The active keys of a secret, newest first: several keys make several signatures, so that keys can be rotated.

    The secret `billing` of database `shop` is read from `<folder>/shop/billing`, then `<folder>/billing` (one key per
    line), then the variable PARTI_WEBHOOK_SECRET_BILLING (keys separated by blanks).
    """

    def __init__(self, clock: Clock, folder: str = "", environ: Mapping[str, str] | None = None) -> None:
        self._clock = clock
        self._folder = Path(folder) if folder else None
        self._environ = os.environ if environ is None else environ
        self._cache: dict[tuple[str, str], tuple[float, tuple[SigningKey, ...]]] = {}

    def __repr__(self) -> str:
        return f"<SecretStore folder={'set' if self._folder else 'unset'} cached={len(self._cache)}>"

    def keys(self, database: str, name: str) -> tuple[SigningKey, ...]:
        """At least one key; raises `SecretMissing` when there is none, `SecretStoreDown` when it cannot be read now."""
        now = self._clock.now()
        found = self._cache.get((database, name))
        if found is not None and found[0] > now:
            return found[1]
        keys = self._read(database, name)
        if len(self._cache) >= _CACHED:
            self._cache.clear()
        self._cache[database, name] = (now + _CACHED_FOR, keys)
        return keys

    def _read(self, database: str, name: str) -> tuple[SigningKey, ...]:
        if not _NAME.fullmatch(name):
            raise SecretMissing("the task's secretsRef is no name of a secret: letters, digits and _.- are")
        text = self._from_files(database, name) or self._environ.get(VARIABLE + _variable(name), "")
        try:
            keys = tuple(SigningKey.parse(word) for word in text.split())
        except ConfigError as error:
            raise SecretMissing(f"the secret {masked(name)} cannot be used: {error}") from None
        if not keys:
            variable = f"{VARIABLE}<NAME>" if looks_like_a_value(name) else VARIABLE + _variable(name)
            raise SecretMissing(f"the secret {masked(name)} is not known: add its file, or {variable}")
        return keys

    def _from_files(self, database: str, name: str) -> str:
        if self._folder is None:
            return ""
        paths = [self._folder / name]
        if _NAME.fullmatch(database):
            paths.insert(0, self._folder / database / name)
        for path in paths:
            try:
                with path.open(encoding="utf-8") as file:
                    return file.read(_LARGEST_FILE)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                continue
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
                raise SecretStoreDown(f"the secret {masked(name)} cannot be read: {reason}") from None
        return ""


def _variable(name: str) -> str:
    return re.sub(r"[^A-Z0-9]+", "_", name.upper())
