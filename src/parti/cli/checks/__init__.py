"""The checks of `parti doctor`: some modules gather facts, pure functions judge them.

Promises: nothing on the server is changed.

Flow: `local` and `server` gather -> `judge` -> `parti doctor` prints.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class CheckVerdict(StrEnum):
    """ok: nothing to do. warn: works, but with a limitation. fail: will not work, or loses data."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One result: what was checked, the verdict, what was found, and what to do if it is not ok."""

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
