"""The checks of `parti doctor`: facts are gathered in one place, judged by pure functions in another.

Promises: nothing on the server is changed.

Flow: `local` and `server` gather -> `judge` -> `parti doctor` prints.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class CheckVerdict(StrEnum):
    """ok: nothing to do. warn: works, but know this. fail: will not work, or loses data."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer: what was looked at, how it is, what was found, and what to do when it is not ok."""

    name: str
    verdict: CheckVerdict
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name=name, verdict=CheckVerdict.OK, found=found)


def warn(name: str, found: str, advice: str) -> Check:
    return Check(name=name, verdict=CheckVerdict.WARN, found=found, advice=advice)


def fail(name: str, found: str, advice: str) -> Check:
    return Check(name=name, verdict=CheckVerdict.FAIL, found=found, advice=advice)
