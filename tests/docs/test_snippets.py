"""Every Python snippet of README and docs that is marked `<!-- run -->` runs, against a real stream `events`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from parti.testing import NatsServer
from parti.wire.options import ConnectOptions
from parti_lab.bench.load import create_stream, fill

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPET = re.compile(r"<!-- run -->\n```python\n(.*?)```", re.DOTALL)


def snippets() -> Iterator[object]:
    for page in PAGES:
        for number, code in enumerate(SNIPPET.findall(page.read_text()), start=1):
            marks = [pytest.mark.spark] if "spark" in code else []
            yield pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}", marks=marks)


@pytest.fixture(scope="module")
def events() -> Iterator[NatsServer]:
    with NatsServer() as server:
        options = ConnectOptions(servers=(server.url,))
        create_stream(options, "events", "memory")
        fill(options, "events", 1_000, 32, subjects=10)
        yield server


@pytest.mark.parametrize("code", list(snippets()))
def test_the_snippet_runs_as_printed(code: str, events: NatsServer, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code.replace("nats://127.0.0.1:4222", events.url), "snippet", "exec"), {"__name__": "snippet"})
    assert capsys.readouterr().out or "show()" in code


def test_there_are_snippets_to_run() -> None:
    assert len(list(snippets())) >= 3
