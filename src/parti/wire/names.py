"""Checks names of streams and consumers; separate from the API calls, whose import costs a Spark task half a second."""

from __future__ import annotations

from parti.errors import UsageError


def token(name: str, *, what: str) -> str:
    """`name` as one token of an API subject; a name that would change the subject's meaning is refused."""
    if not name or any(character in " \t\r\n.*>/\\" for character in name):
        raise UsageError(f"{name!r} is no {what} name: it may not be empty nor hold blanks, '.', '*', '>', '/' or '\\'")
    return name
