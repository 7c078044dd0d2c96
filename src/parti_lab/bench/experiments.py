"""Runs a benchmark or a proof from the command line: both take the same flags and print the same format."""

from __future__ import annotations

import importlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from parti.cli.output import json_option, note, plain, print_table, progress
from parti.config import LogLevel, ObserveSection
from parti.errors import ConfigError
from parti.observe.logs import configure_logging
from parti_lab.bench.report import Experiment, ExperimentOption, Result, RunContext, execute


class ExperimentGroup(click.Group):
    """One subcommand per registered name; a module is imported when its command is used."""

    def __init__(self, *args: Any, registry: Mapping[str, str], attribute: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._registry = registry
        self._attribute = attribute

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self._registry)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        module = self._registry.get(cmd_name)
        if module is None:
            return None
        try:
            experiment = getattr(importlib.import_module(module), self._attribute)
        except ImportError as error:
            return _unavailable(cmd_name, error)
        assert isinstance(experiment, Experiment)
        return experiment_command(experiment)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self._registry:
            formatter.write_paragraph()
            formatter.write_text("None is registered in this version.")
        super().format_epilog(ctx, formatter)


def experiment_command(experiment: Experiment) -> click.Command:
    """The click command of one experiment: the common flags and its own options."""

    @json_option
    def run(quick: bool, seed: int | None, html: str | None, as_json: bool, **options: Any) -> None:
        chosen = seed if seed is not None else random.SystemRandom().randrange(2**31)
        if not as_json:
            note(f"{experiment.kind} {experiment.name}: seed {chosen}{', quick' if quick else ''}")
        configure_logging(ObserveSection(log_level=LogLevel.WARNING))  # changes of state are noise beside a result
        context = RunContext(quick=quick, seed=chosen, options=options, show=progress)
        result = execute(experiment, context)
        if html is not None:
            _write_html(html, result)
        if as_json:
            click.echo(result.to_json())
        else:
            _print(result)
        for reason in [str(result.figures["error"])] if "error" in result.figures else result.missed.values():
            note(f"not ok: {reason}")
        if not result.ok:
            raise click.exceptions.Exit(1)

    goals = ", ".join(f"{name} {goal}" for name, goal in experiment.goals.items())
    command = click.command(experiment.name, help=f"{experiment.help}\n\nGoals: {goals or 'none'}.")(run)
    command.params[:0] = [
        click.Option(["--quick"], is_flag=True, help="A smaller run that fits in 60 s."),
        click.Option(["--seed"], type=int, help="Repeat the run of this seed."),
        click.Option(["--html"], type=click.Path(dir_okay=False), metavar="FILE", help="Draw the result into FILE."),
        *(_click_option(option) for option in experiment.options),
    ]
    return command


def _click_option(option: ExperimentOption) -> click.Option:
    flag = f"--{option.name.replace('_', '-')}"
    if isinstance(option.default, bool):
        return click.Option([flag, option.name], is_flag=True, default=option.default, help=option.help)
    return click.Option(
        [flag, option.name], type=type(option.default), default=option.default, show_default=True, help=option.help
    )


def _unavailable(name: str, error: ImportError) -> click.Command:
    message = f"{name} cannot be loaded: {error}; install parti with the extras [server,spark]"

    def refuse() -> None:
        raise click.ClickException(message)

    return click.command(name, help=message)(refuse)


def _write_html(path: str, result: Result) -> None:
    from parti_lab.bench.chart import render_html

    try:
        Path(path).write_text(render_html(result), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _print(result: Result) -> None:
    missed = result.missed
    rows = []
    for name in [*result.figures, *(goal for goal in result.goals if goal not in result.figures)]:
        verdict = ""
        if name in result.goals:
            verdict = "[red]missed[/red]" if name in missed else "[green]met[/green]"
        value = result.figures.get(name)
        shown = str(value) if name == "seed" else _number(value)  # the seed must be usable with --seed
        rows.append([plain(name), plain(shown), plain(result.goals.get(name, "")), verdict])
    verdict = "[green]ok[/green]" if result.ok else "[red]not ok[/red]"
    print_table(
        ["figure", "value", "goal", ""], rows, title=f"{plain(result.name)}: {verdict} in {result.seconds:.1f} s"
    )


def _number(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "not measured" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
