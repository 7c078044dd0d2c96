"""House rules: every module is in its layer, every class name has one meaning, every package states its promises."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
PACKAGES = sorted(path.parent for path in SRC.rglob("__init__.py"))

TWO_MEANINGS = {
    "Tick": "each state machine of parti.control has the event; it is written with its module",
    "Written": "each state machine of parti.control has the event; it is written with its module",
    "NotWritten": "each state machine of parti.control has the event; it is written with its module",
    "Phase": "each state machine of parti.control has its phases",
    "WriteClaim": "the leader and an owner ask for the same effect, with other fields",
    "Fence": "parti.worker.info has the protocol, parti.control.lease what satisfies it",
}
"""Names that mean two things on purpose, each with its reason."""

NOT_RENAMED_YET: set[str] = set()
"""Left over; none may join them."""

MOST_PARAMETERS = 7
MANY_PARAMETERS = {
    "make_message": "public: users of their own handlers' tests name the fields of a message",
    "NatsServer.__init__": "public: the settings of a server, each a keyword with a default",
    "RangeReader.read": "public: what to read, each option a keyword with a default",
    "KeyValue.ensure": "public: the settings of a bucket, as JetStream names them",
    "Manager.__init__": "public: what a user may replace, each a keyword with a default",
    "TaskConsumer.__init__": "public: what a user may replace, each a keyword with a default",
    "elastic_consume": "public: the signature that the Go reference has",
    "ElasticGroups.create": "public: the settings of a group, as the Go reference names them",
}
"""Functions with more parameters on purpose, each with its reason."""


def names() -> dict[str, list[str]]:
    """Public classes, and where they are defined."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(SRC)))
    return found


def test_no_public_class_name_has_two_meanings() -> None:
    double = {name: homes for name, homes in names().items() if len(homes) > 1}
    assert {n: homes for n, homes in double.items() if n not in TWO_MEANINGS and n not in NOT_RENAMED_YET} == {}
    assert sorted((TWO_MEANINGS.keys() | NOT_RENAMED_YET) - double.keys()) == [], (
        "these mean one thing now: take them out"
    )


def parameters() -> dict[str, int]:
    """Functions and methods, and how many parameters each has; what click calls is left out."""
    found: dict[str, int] = {}

    def look(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                look(child, f"{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                if not any("click" in (text := ast.unparse(d)) or ".command(" in text for d in child.decorator_list):
                    given = [*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs]
                    count = len(given) - (given[:1] != [] and given[0].arg in ("self", "cls"))
                    found[prefix + child.name] = max(count, found.get(prefix + child.name, 0))
                look(child, prefix)
            else:
                look(child, prefix)

    for path in sorted(SRC.rglob("*.py")):
        look(ast.parse(path.read_text()), "")
    return found


def test_no_function_has_more_parameters_than_one_can_keep_in_mind() -> None:
    many = {name: count for name, count in parameters().items() if count > MOST_PARAMETERS}
    allowed = MANY_PARAMETERS.keys()
    assert {name: count for name, count in many.items() if name not in allowed} == {}, "make them a value object"
    assert sorted(allowed - many.keys()) == [], "these are short now: take them out"


def test_every_module_of_parti_has_its_layer() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in settings if contract["type"] == "layers"]
    placed = {name for layer in layers for name in re.findall(r"[\w.]+", layer)}
    children = [path for top in ("parti", "parti_lab") for path in (SRC / top).iterdir()]
    modules = {
        ".".join(path.relative_to(SRC).with_suffix("").parts)
        for path in children
        if (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").exists()
    }
    assert modules - placed == set(), "not in the layers of pyproject.toml"
    assert placed - modules == set(), "no such module"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: ".".join(path.relative_to(SRC).parts))
def test_a_package_says_what_it_promises_and_how_data_flows_through_it(package: Path) -> None:
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    promises, flow = (re.search(rf"^{word}: (.+?)(?:\n\n|\Z)", text, re.S | re.M) for word in ("Promises", "Flow"))
    assert promises is not None
    assert flow is not None
    named = re.findall(r"`([a-z_]+)`", flow[1])
    parts = {path.stem if path.is_file() else path.name for path in package.iterdir()}
    assert [name for name in named if name not in parts and name != "step" and name != package.name] == []
