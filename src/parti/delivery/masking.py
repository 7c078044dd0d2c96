"""Masks names in logs and letters that look like secret values: people paste values into the wrong field."""

from __future__ import annotations

import re
from itertools import pairwise

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MARKS = ("whsec_", "sk_", "pk_", "rk_", "ghp_", "gho_", "xox", "eyj", "bearer", "basic", "akia", "-----")
_HEX = re.compile(r"[0-9A-Fa-f-]{24,}")
_WORD = re.compile(r"[A-Za-z]+|[0-9]+")
_LONG_WORD = 24  # letters of one word; names chosen by people have a separator before that
_MOST_SWITCHES = 5  # between letters and digits: "a1b2c3d4" is not a name


def masked(name: str) -> str:
    """The name in quotes; for a name that may be or contain a secret, only its length."""
    return f"(hidden, {len(name)} characters)" if looks_like_a_value(name) else repr(name)


def looks_like_a_value(name: str) -> bool:
    """Whether a name looks like a key, a token or a whole header line."""
    if not _NAME.fullmatch(name) or name.lower().startswith(_MARKS):
        return True
    return bool(_HEX.fullmatch(name)) or any(_is_noise(part) for part in re.split(r"[_.-]", name))


def _is_noise(part: str) -> bool:
    words = _WORD.findall(part)
    cases = sum(a.islower() and b.isupper() for a, b in pairwise(part))
    return len(part) >= _LONG_WORD or len(words) > _MOST_SWITCHES or (len(part) >= 16 and len(words) + cases > 5)
