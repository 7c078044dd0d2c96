"""Every reference in the repository exists: pages, anchors, tests, commands, modules and names."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import click
import pytest

from parti.cli import main
from parti.config import known_keys
from parti.observe.catalog import CATALOG

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "docs", "examples", "scripts", "deploy")
TEXT = {".py", ".pyi", ".md", ".sh", ".toml", ".conf", ".go"}
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FACTS = [ROOT / "docs" / "requirements.md", *sorted((ROOT / "docs" / "evidence").glob("*.md"))]
OUTSIDE = re.compile(
    r"GO_PART[I]|CONSUMER_GROUP[S]\b|\bFINDING[S] [A-G]\d|\b[Ss]eed[s]? 00\d|\bSC-[P]\d|\.\./share[d]"
)  # names of documents that were never part of the repository, written so that this line does not match itself
ALLOWED = {
    "_BESIDE = Path(": "a place to look for an optional binary, not a citation; the proof says so when it is not there"
}


_CITED = re.compile(
    r"(?<![\w/{}*<>$])((?:\.\./|[\w-]+/)*[\w-]+\.md)((?:(?:, | to )?#[\w-]+)*)"
)  # also several anchors: #c3, #c8
_DEFINED = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)


@cache
def files() -> dict[Path, str]:
    found = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in TEXT]
    found += [file for file in ROOT.glob("*") if file.suffix in TEXT or file.name == "Makefile"]
    return {file: file.read_text(encoding="utf-8") for file in found}


def lines() -> list[tuple[str, Path, str]]:
    return [
        (f"{file.relative_to(ROOT)}:{number}", file, line)
        for file, text in files().items()
        for number, line in enumerate(text.splitlines(), start=1)
    ]


@cache
def anchors(page: Path) -> frozenset[str]:
    """What a link into the page may name: ids written out, and headings as GitHub names them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = set(re.findall(r'<a id="([^"]+)">', text))
    for title in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        plain = re.sub(r"<[^>]+>", "", title).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return frozenset(found)


def test_nothing_names_a_document_that_was_never_here() -> None:
    cited = [f"{place}: {line.strip()}" for place, _, line in lines() if OUTSIDE.search(line)]
    assert [each for each in cited if not any(allowed in each for allowed in ALLOWED)] == []


def test_every_page_that_is_named_exists_and_has_the_anchor() -> None:
    wrong = []
    for place, file, line in lines():
        for name, cited in _CITED.findall(line):
            homes = [at / name for at in (file.parent, ROOT, ROOT / "docs") if (at / name).is_file()]
            if not homes or not set(re.findall(r"#([\w-]+)", cited)) <= anchors(homes[0].resolve()):
                wrong.append(f"{place}: {name}{cited}")
    assert wrong == []


def test_every_link_inside_a_page_leads_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]+))?\)", files()[page]):
            to = (page.parent / target).resolve() if target else page
            if not to.exists() or (anchor and anchor not in anchors(to)):
                wrong.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert wrong == []


def test_every_path_that_a_page_names_exists() -> None:
    wrong = []
    for page in PAGES:
        for path in re.findall(r"(?<![\w/.:-])((?:src|tests|docs|scripts|examples|deploy)/[\w./-]*\w)", files()[page]):
            if not (ROOT / path).exists() and not list((ROOT / path).parent.glob(f"{Path(path).name}*")):
                wrong.append(f"{page.relative_to(ROOT)}: {path}")
    assert wrong == []


def test_every_requirement_that_is_named_is_in_the_table() -> None:
    known = set(re.findall(r"</a>(R-\d{3}) \|", files()[FACTS[0]]))
    assert len(known) > 40
    assert [place for place, _, line in lines() if not set(re.findall(r"\bR-\d{3}\b", line)) <= known] == []


@pytest.mark.parametrize("page", FACTS, ids=lambda page: page.name)
def test_a_page_of_facts_names_tests_modules_and_names_that_exist(page: Path) -> None:
    written = {name for file, text in files().items() if file.suffix == ".py" for name in _DEFINED.findall(text)}
    names = set(re.findall(r"`(\w[\w.]*\w)`", files()[page]))
    metrics, settings = {metric.name for metric in CATALOG}, set(known_keys())
    assert {name for name in names if name.startswith("test_")} - written == set()
    assert {name for name in names if re.match(r"parti\.\w", name) and not _module(name)} == set()
    assert {name for name in names if re.match(r"(parti|trigger)_\w+_\w+", name)} - metrics - written == set()
    assert {name for name in names if re.match(r"(worker|retry|control|deliver)\.\w", name)} - settings == set()


def _module(name: str) -> bool:
    at = ROOT / "src" / Path(*name.split("."))
    return at.is_dir() or at.with_suffix(".py").is_file()


@pytest.mark.parametrize("page", FACTS, ids=lambda page: page.name)
def test_a_page_of_facts_names_commands_and_options_that_exist(page: Path) -> None:
    for kind, name, rest in re.findall(r"`parti (bench|prove) ([a-z][a-z-]*)([^`]*)`", files()[page]):
        group = main.get_command(click.Context(main), kind)
        assert isinstance(group, click.Group)
        command = group.get_command(click.Context(group), name)
        assert command is not None, f"parti {kind} {name}"
        known = {option for param in command.params for option in param.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= known, f"parti {kind} {name}{rest}"


def test_every_requirement_says_where_it_is_met_and_what_shows_it() -> None:
    rows = re.findall(r"^\| <a id=\"(r-\d+)\"></a>R-\d+ \| (.+) \|$", files()[FACTS[0]], flags=re.MULTILINE)
    assert len(rows) > 40
    assert [name for name, row in rows if len(row.split(" | ")) != 3 and "not in the repository yet" not in row] == []
