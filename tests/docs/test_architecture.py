"""docs/architecture.md: every file of a walk exists, and no walk has more steps than a reader can remember."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_, *SECTIONS = re.split(r"^## ", (ROOT / "docs" / "architecture.md").read_text(), flags=re.M)
WALKS = {title: re.findall(r"^\d+\. (.*)$", text, re.M) for title, _, text in (s.partition("\n") for s in SECTIONS)}


@pytest.mark.parametrize("title", [title for title, steps in WALKS.items() if steps])
def test_a_walk_names_files_that_exist_and_takes_fifteen_at_most(title: str) -> None:
    files = [name for step in WALKS[title] for name in re.findall(r"`([a-z_/]+\.py)`", step)]
    assert [name for name in files if not (ROOT / "src" / "parti" / name).is_file()] == []
    assert len(WALKS[title]) == len([step for step in WALKS[title] if step.startswith("`")]) <= 15


def test_there_is_a_walk_for_each_part_and_for_a_handoff() -> None:
    assert len([steps for steps in WALKS.values() if steps]) == 5
