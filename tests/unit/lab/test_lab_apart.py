"""The lab uses parti as any program does; parti does not need the lab."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
IMPORT = re.compile(r"^\s*(?:from|import) parti_lab\b", re.M)


@pytest.mark.parametrize("folder", ["src/parti", "src/pyspark_jetstream", "examples"])
def test_neither_parti_nor_an_example_imports_the_lab(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    assert [str(file) for file in files if IMPORT.search(file.read_text())] == []
