"""The report as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from parti.audit.model import Percentiles, Report, Side
from parti.audit.svg import seconds

_SHOWN = 2  # examples of a fault; all are in the JSON and in the HTML report


def tables(report: Report) -> Iterator[Table | str]:
    """The verdict, then the promises of all sides next to each other, times and objectives, and parity."""
    verdict = "[green]every promise held[/green]" if report.ok else "[red]a promise is broken[/red]"
    span = f"sequences {report.first:,} to {report.last:,}"
    yield f"audit of {escape(report.stream)}: {report.published:,} messages, {span}: {verdict}\n"
    yield _promises(report)
    yield ""
    yield _measures(report)
    if report.parity is not None:
        words = "[green]the same messages[/green]" if report.parity.ok else "[red]not the same messages[/red]"
        yield f"\nparity: {words}"
        yield _parity(report)


def _promises(report: Report) -> Table:
    table = _table()
    for name in ("promise", *(side.label for side in report.sides), "examples"):
        table.add_column(escape(name), overflow="fold")
    for row in zip(*(side.findings for side in report.sides), strict=True):
        cells = []
        for finding in row:
            shade = "dim" if finding.allowed is None else "green" if finding.ok else "red"
            extra = f" (up to {finding.allowed:,} allowed)" if finding.allowed else ""
            extra = " (not promised)" if finding.allowed is None else extra
            cells.append(f"[{shade}]{finding.count:,}{extra}[/{shade}]")
        examples = [example for finding in row if not finding.ok for example in finding.examples[:_SHOWN]]
        table.add_row(row[0].title, *cells, escape("; ".join(examples)))
    return table


def _measures(report: Report) -> Table:
    table = _table()
    for name in ("figure", *(side.label for side in report.sides)):
        table.add_column(escape(name), overflow="fold")
    figures = [_figures(side) for side in report.sides]
    for name in figures[0]:
        table.add_row(escape(name), *(found[name] for found in figures))
    return table


def _figures(side: Side) -> dict[str, str]:
    rows = {
        "effects": f"{side.effects:,}",
        "messages done": f"{side.done:,} ({side.dead_lettered:,} dead-lettered, {side.waiting:,} waiting)",
        "partitions, changes of owner": f"{side.partitions:,}, {side.handoffs:,}",
        "latency p50, p95, p99, largest": _percentiles(side.latency),
        "handler p50, p95, p99, largest": _percentiles(side.handler),
        "lag p50, p95, largest": "not measured"
        if side.lag is None
        else f"{side.lag.p50:,.0f}, {side.lag.p95:,.0f}, {side.lag.largest:,.0f} messages",
    }
    for slo in side.slos:
        shade = "dim" if slo.met is None else "green" if slo.met else "yellow"
        rows[f"SLO {slo.name} {slo.target}"] = f"[{shade}]{escape(slo.value)}[/{shade}]"
    return rows


def _percentiles(found: Percentiles | None) -> str:
    if found is None:
        return "not measured"
    return ", ".join(seconds(value) for value in (found.p50, found.p95, found.p99, found.largest))


def _parity(report: Report) -> Table:
    assert report.parity is not None
    parity = report.parity
    table = _table()
    table.add_column("figure")
    table.add_column("value", overflow="fold")
    first, second = report.sides
    table.add_row(f"only in {escape(first.label)}", f"{parity.only_first:,}")
    table.add_row(f"only in {escape(second.label)}", f"{parity.only_second:,}")
    if parity.latency_p99_ratio is not None:
        table.add_row("p99 of latency, second over first", f"{parity.latency_p99_ratio:g}")
    if parity.examples:
        table.add_row("examples", escape("; ".join(parity.examples[:_SHOWN])))
    return table


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="bold")
