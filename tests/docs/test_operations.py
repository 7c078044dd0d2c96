"""docs/operations.md says what the code does: its tables are compared with the declarations they describe."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from parti.cli import main
from parti.config import env_name, known_keys, load_config
from parti.observe.catalog import CATALOG, MAX_SERIES

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


def table(title: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its two header lines."""
    section = PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_the_configuration_table_is_what_the_code_declares() -> None:
    declared = [[f"`{name}`", f"`{key.show(key.default)}`", key.setting.reason] for name, key in known_keys().items()]
    assert table("Configuration") == declared


def test_the_metrics_table_is_the_catalog() -> None:
    declared = []
    for metric in CATALOG:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "none"
        declared.append([f"`{metric.name}`", metric.kind.value, labels, metric.help])
    assert table("Metrics and health") == declared
    assert f"at most {MAX_SERIES} series" in PAGE


def test_the_example_file_and_variables_are_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    file = tmp_path / "parti.toml"
    file.write_text(example)
    assert load_config(file, environ={}).config.retry.retry_max == 8.0
    variables = set(re.findall(r"PARTI_[A-Z]+__[A-Z_]+", PAGE))
    assert variables
    assert variables <= {env_name(name) for name in known_keys()}


def test_every_command_that_the_page_shows_exists() -> None:
    commands = set(re.findall(r"^parti ([a-z]+)", PAGE, flags=re.MULTILINE))
    assert commands
    listed = CliRunner().invoke(main, ["--help"]).stdout
    for command in commands:
        assert f"  {command} " in listed


def test_every_flag_that_the_page_shows_for_the_doctor_exists() -> None:
    shown = set(re.findall(r"`(--[a-z-]+)", PAGE.split("\n## parti doctor\n", 1)[1].split("\n## ", 1)[0]))
    assert shown
    help_text = CliRunner().invoke(main, ["doctor", "--help"]).stdout
    assert {flag for flag in shown if flag not in help_text} == set()


def test_the_python_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("http://127.0.0.1:")
