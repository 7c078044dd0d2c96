"""Goals: strings such as "<= 0" or ">= 0.6", compared with measured figures by a pure function.

Only an existing, comparable figure meets a goal: a missing figure, NaN, or a text instead of a number never does. So a
run that measured nothing can never pass.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from parti.errors import UsageError

Figure = float | int | bool | str
"""One measured value: a number, a bool, or a text where no number fits (a file name, the reason of a failure)."""

_COMPARE: Final[dict[str, Callable[[float, float], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_GOAL: Final = re.compile(r"\s*(<=|>=|==|!=|<|>)\s*(\S.*?)\s*")


@dataclass(frozen=True, slots=True)
class Goal:
    """A comparison with a bound. `str(goal)` is the text it was parsed from, normalised."""

    comparison: str
    bound: float | str

    @classmethod
    def parse(cls, text: str) -> Goal:
        """Read "<= 0", "> 1e6", "== 0.5" or "== some words"; anything else is a `UsageError`."""
        match = _GOAL.fullmatch(text)
        if match is None:
            raise UsageError(f"goal {text!r} is no comparison: write one of <=, >=, ==, !=, <, > and a bound")
        comparison, bound = match.groups()
        try:
            number = float(bound)
        except ValueError:
            if comparison not in ("==", "!="):
                raise UsageError(f"goal {text!r} orders by a text: a text can only be == or !=") from None
            return cls(comparison, bound)
        if math.isnan(number):
            raise UsageError(f"goal {text!r} compares with NaN, which nothing can meet")
        return cls(comparison, number)

    def met_by(self, figure: Figure | None) -> bool:
        """Whether this figure meets the goal; None means that it was not measured."""
        if figure is None:
            return False
        if isinstance(self.bound, str):
            return isinstance(figure, str) and (figure == self.bound) is (self.comparison == "==")
        if isinstance(figure, str) or math.isnan(figure):
            return False
        return _COMPARE[self.comparison](float(figure), self.bound)

    def __str__(self) -> str:
        return f"{self.comparison} {self.bound if isinstance(self.bound, str) else format(self.bound, '.12g')}"


def missed(figures: Mapping[str, Figure], goals: Mapping[str, str]) -> dict[str, str]:
    """The goals that the figures do not meet, by name, each with the reason. Empty means: all met."""
    reasons: dict[str, str] = {}
    for name, text in goals.items():
        figure = figures.get(name)
        if not Goal.parse(text).met_by(figure):
            reasons[name] = f"{name} was not measured" if figure is None else f"{name} is {figure}, goal {text}"
    return reasons
