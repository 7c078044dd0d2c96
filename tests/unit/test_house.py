"""The house: every module in its layer, every class name with one meaning, every package with what it promises."""

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
