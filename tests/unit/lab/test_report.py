"""Goals and results: a run passes only if all figures were measured and meet every goal."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.errors import ConnectionFailed, UsageError
from parti_lab.bench.chart import render_html
from parti_lab.bench.goals import Figure, Goal, missed
from parti_lab.bench.report import Benchmark, ExperimentOption, Proof, Result, RunContext, Runner, execute


def bench(run: Runner, goals: dict[str, str] | None = None, options: tuple[ExperimentOption, ...] = ()) -> Benchmark:
    return Benchmark(name="some", help="Some.", run=run, goals=goals or {}, options=options)


@pytest.mark.parametrize(
    ("goal", "figure", "met"),
    [
        ("<= 0", 0, True),
        ("<= 0", 1, False),
        ("<= 0", -1, True),
        (">= 0.6", 0.6, True),
        (">=0.6", 0.59, False),
        ("< 0.5", 0.5, False),
        ("> 1e6", 1_000_001, True),
        ("== 3", 3.0, True),
        ("!= 3", 3, False),
        ("== file", "file", True),
        ("== file", "memory", False),
        ("!= file", "memory", True),
        ("<= 5", "5", False),
        ("== file", 3, False),
        ("!= file", 3, False),
        ("<= 0", math.nan, False),
        ("!= 0", math.nan, False),
        ("<= 0", None, False),
        ("!= 0", None, False),
        (">= 1", math.inf, True),
        ("== 1", True, True),
    ],
)
def test_a_goal_is_met_or_not(goal: str, figure: Figure | None, met: bool) -> None:
    assert Goal.parse(goal).met_by(figure) is met


@pytest.mark.parametrize("goal", ["", "0", "=< 3", "<=", "<= abc", "== nan", "~ 3", ">= "])
def test_a_malformed_goal_is_refused_when_the_benchmark_is_defined(goal: str) -> None:
    with pytest.raises(UsageError, match="goal"):
        bench(lambda ctx: {}, goals={"x": goal})


@given(st.sampled_from(["<=", ">=", "==", "!=", "<", ">"]), st.floats(allow_nan=False), st.floats())
def test_comparisons_agree_with_python_except_that_nan_never_passes(sign: str, bound: float, figure: float) -> None:
    python = {"<=": figure <= bound, ">=": figure >= bound, "==": figure == bound, "!=": figure != bound}
    python |= {"<": figure < bound, ">": figure > bound}
    assert Goal.parse(f"{sign} {bound!r}").met_by(figure) is (python[sign] and not math.isnan(figure))


def test_missed_goals_come_with_the_reason() -> None:
    assert missed({"lost": 2, "fast": 9.0}, {"lost": "<= 0", "fast": ">= 5", "moves": ">= 1000"}) == {
        "lost": "lost is 2, goal <= 0",
        "moves": "moves was not measured",
    }


def test_the_result_line_has_exactly_the_agreed_shape() -> None:
    result = execute(bench(lambda ctx: {"lost": 0, "rate": 1.5}, {"lost": "<= 0"}), RunContext(seed=7, quick=True))
    line = result.to_json()
    assert "\n" not in line
    document = json.loads(line)
    assert list(document) == ["name", "ok", "figures", "goals", "machine", "seconds"]
    assert document["name"] == "some"
    assert document["ok"] is True
    assert document["figures"] == {"lost": 0, "rate": 1.5, "seed": 7, "quick": True}
    assert document["goals"] == {"lost": "<= 0"}
    assert document["machine"]["cpus"] >= 1
    assert document["seconds"] >= 0
    assert Result.from_json(line) == result


def test_goals_that_a_run_does_not_measure_are_not_named_and_those_that_it_should_are_missed() -> None:
    proof = Proof(
        name="two",
        help="",
        run=lambda ctx: {"first": 0} if ctx.options["case"] == "first" else {},
        goals={"first": "<= 0", "second": "<= 0"},
        options=(ExperimentOption("case", "first", ""),),
        goals_of=lambda options: {str(options["case"]): "<= 0"},
    )
    one = execute(proof, RunContext())
    assert (one.ok, one.goals) == (True, {"first": "<= 0"})
    other = execute(proof, RunContext(options={"case": "second"}))
    assert (other.ok, other.missed) == (False, {"second": "second was not measured"})


def test_a_figure_that_is_not_finite_is_null_in_json_and_misses_its_goal() -> None:
    result = execute(bench(lambda ctx: {"ratio": math.nan}, {"ratio": ">= 0"}), RunContext())
    assert result.ok is False
    document = json.loads(result.to_json())
    assert document["figures"]["ratio"] is None
    assert Result.from_json(result.to_json()).missed == {"ratio": "ratio was not measured"}


def test_async_and_plain_functions_both_run() -> None:
    async def measure(ctx: RunContext) -> dict[str, Figure]:
        with ctx.progress("counting", 3) as advance:
            advance(3)
        return {"seed_seen": ctx.seed}

    assert execute(bench(measure), RunContext(seed=5)).figures["seed_seen"] == 5


def test_options_reach_the_run_with_defaults_filled_in() -> None:
    options = (ExperimentOption("messages", 100, "how many"), ExperimentOption("storage", "file", "where"))
    seen = execute(bench(lambda ctx: dict(ctx.options), options=options), RunContext(options={"messages": 7})).figures
    assert (seen["messages"], seen["storage"]) == (7, "file")
    with pytest.raises(UsageError, match="has no option speed"):
        execute(bench(lambda ctx: {}), RunContext(options={"speed": 1}))


def test_the_same_seed_gives_the_same_randomness() -> None:
    assert RunContext(seed=3).random().random() == RunContext(seed=3).random().random()


def test_a_typed_error_becomes_a_result_that_is_not_ok() -> None:
    def broken(ctx: RunContext) -> dict[str, Figure]:
        raise ConnectionFailed("nothing listens there")

    result = execute(bench(broken), RunContext())
    assert result.ok is False
    assert result.figures["error"] == "ConnectionFailed: nothing listens there"


def test_a_bug_in_a_run_is_not_hidden() -> None:
    def buggy(ctx: RunContext) -> dict[str, Figure]:
        raise KeyError("oops")

    with pytest.raises(KeyError):
        execute(bench(buggy), RunContext())


def test_what_returns_no_figures_is_refused() -> None:
    with pytest.raises(TypeError, match="not figures"):
        execute(Proof(name="p", help="", run=lambda ctx: None, goals={}), RunContext())  # type: ignore[arg-type, return-value]


def test_the_machine_names_neither_host_nor_user() -> None:
    import getpass
    import platform

    machine = execute(bench(lambda ctx: {}), RunContext()).machine
    assert platform.node() not in machine.values()
    assert getpass.getuser() not in machine.values()


def test_the_page_draws_each_figure_and_goal_and_loads_nothing() -> None:
    figures: dict[str, Figure | None] = {
        "lost": 0,
        "ratio_raw": 0.4,
        "reader_msgs_s": 900_000.0,
        "fetch_msgs_s": 29_000,
        "storage": "<file>",
        "gone": None,
        "seed": 4,
    }
    goals = {"lost": "<= 0", "ratio_raw": ">= 0.6", "never": ">= 1"}
    result = Result(name="<b>", ok=False, figures=figures, goals=goals, machine={"cpu": "x & y"}, seconds=1.0)
    page = render_html(result)
    assert "http" not in page
    assert "<script" not in page
    assert "&lt;b&gt;" in page
    assert "&lt;file&gt;" in page
    for drawing in page.split("<svg")[1:]:
        ET.fromstring("<svg" + drawing[: drawing.index("</svg>")] + "</svg>")
    assert page.count('class="missed"') == 2  # the heading and the bar of ratio_raw
    assert page.count('class="goal"') == 2
    assert "never was not measured" in page
    widths = [float(part.split('"')[0]) for part in page.split('class="bar"')[1].split('width="')[1:2]]
    assert widths == [420.0]  # the largest figure of its unit fills the bar
