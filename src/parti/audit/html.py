"""The report as one self-contained HTML page: no external resource, no script, light and dark."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from typing import Final

from parti.audit.charts import flow_chart, handoff_chart, heat_map, latency_chart
from parti.audit.model import Finding, Percentiles, Report, Side
from parti.audit.svg import seconds

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #5b6470; --rule: #dfe3e8; --bar: #3b73ad;
  --good: #1f7a45; --bad: #b3261e; --done: #c2570c; --heat: #1f5fa8; --inside: #fff;
  --c0: #2f6db3; --c1: #b5540a; --c2: #2d7d46; --c3: #8e4a9e; --c4: #9a6b00; --c5: #0f7c85; --c6: #b03a5b;
  --c7: #5f6670 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #14171b; --soft: #9aa4b0; --rule: #2c323a;
  --bar: #6ea6dd; --good: #58c283; --bad: #f2776d; --done: #f0a35e; --heat: #7db7f0; --inside: #10131a;
  --c0: #7db3ec; --c1: #f0a35e; --c2: #6fcf93; --c3: #cf98de; --c4: #e0bd5a; --c5: #63c7cf; --c6: #f08fab;
  --c7: #b0b8c2 } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 66rem;
  margin: 0 auto; padding: 2rem 1.25rem 4rem }
h1 { font-size: 1.6rem; margin: 0 0 .25rem } h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .35rem .75rem .35rem 0;
  border-bottom: 1px solid var(--rule); vertical-align: top } th { font-weight: 600 } td.n { text-align: right;
  font-variant-numeric: tabular-nums; white-space: nowrap } th.n { text-align: right }
ul { margin: .25rem 0; padding-left: 1.1rem } details summary { cursor: pointer; color: var(--soft) }
.good { color: var(--good) } .bad { color: var(--bad) } .soft { color: var(--soft) }
.badge { font-weight: 700; padding: .1rem .6rem; border: 2px solid; border-radius: .4rem }
.scroll { overflow-x: auto } svg { width: 100%; min-width: 640px; height: auto; display: block }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink) } svg text.soft { fill: var(--soft) }
svg text.small { font-size: 10px } svg text.strong { font-weight: 600;
  paint-order: stroke; stroke: var(--paper); stroke-width: 4px } svg text.inside { fill: var(--inside) }
.grid { stroke: var(--rule) } .axis { stroke: var(--soft) } .mark { stroke: var(--bad); stroke-dasharray: 4 3 }
.bar { fill: var(--bar) } .flow { fill: none; stroke-width: 2 } .flow.published { stroke: var(--bar) }
.flow.done { stroke: var(--done) } .key.published { fill: var(--bar) } .key.done { fill: var(--done) }
.lag { fill: var(--done); fill-opacity: .35; stroke: var(--done) } .hover { fill: transparent }
.hover:hover { fill: var(--soft); fill-opacity: .15 } .heat { fill: var(--heat) }
.wrong { stroke: var(--bad); stroke-width: 2 } .owner { stroke: var(--paper) }
.c0 { fill: var(--c0) } .c1 { fill: var(--c1) } .c2 { fill: var(--c2) } .c3 { fill: var(--c3) } .c4 { fill: var(--c4) }
.c5 { fill: var(--c5) } .c6 { fill: var(--c6) } .c7 { fill: var(--c7) }
"""


def render_html(report: Report) -> str:
    """The page."""
    verdict = _badge("every promise held", good=True) if report.ok else _badge("a promise is broken", good=False)
    when = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
        f"<title>Audit of {escape(report.stream)}</title><style>{_STYLE}</style></head><body><main>",
        f"<h1>Audit of {escape(report.stream)} {verdict}</h1>",
        f'<p class="soft">{report.published:,} messages, sequences {report.first:,} to {report.last:,}. '
        f"Made {when} in {report.seconds:.1f} s.</p>",
    ]
    parts += _parity(report)
    for side in report.sides:
        parts += _side(side)
    return "\n".join([*parts, "</main></body></html>", ""])


def _side(side: Side) -> Iterable[str]:
    yield f"<h2>Effects: {escape(side.label)} {_badge('ok' if side.ok else 'broken', good=side.ok)}</h2>"
    yield (
        f"<p>{side.effects:,} effects of {side.done:,} messages, {side.dead_lettered:,} dead-lettered, "
        f"{side.waiting:,} still waiting. {side.partitions:,} partitions, {side.handoffs:,} changes of owner.</p>"
    )
    yield '<h3>Promises</h3><table><thead><tr><th>fault</th><th class="n">found</th><th class="n">allowed</th>'
    yield "<th>verdict</th><th>examples</th></tr></thead><tbody>"
    for finding in side.findings:
        yield _finding(finding)
    yield "</tbody></table><h3>Objectives</h3><table><thead><tr><th>objective</th><th>target</th><th>measured</th>"
    yield "<th>verdict</th></tr></thead><tbody>"
    for slo in side.slos:
        cells = "".join(f"<td>{escape(words)}</td>" for words in (slo.name, slo.target, slo.value))
        yield f"<tr>{cells}<td>{_verdict(slo.met, 'met', 'missed', 'not judged')}</td></tr>"
    yield "</tbody></table><h3>Times</h3>" + _times(side)
    details = side.details
    for title, note, chart in (
        ("Latency", "From stored in the stream until the effect; the scale is logarithmic.", latency_chart(details)),
        ("Throughput and lag", "Lag is what was published and had no effect yet.", flow_chart(details)),
        ("Partitions", "One cell a partition; a red frame marks a fault.", heat_map(details)),
        (
            "Owners",
            "Partitions with the same owners one after the other are one band; gaps are handoffs.",
            handoff_chart(details),
        ),
    ):
        yield f'<h3>{title}</h3><p class="soft">{note}</p><div class="scroll">{chart}</div>'


def _finding(finding: Finding) -> str:
    examples = ""
    if finding.examples:
        listed = "".join(f"<li>{escape(example)}</li>" for example in finding.examples)
        shown = "" if finding.ok else " open"
        examples = f"<details{shown}><summary>{len(finding.examples)}</summary><ul>{listed}</ul></details>"
    allowed = "any" if finding.allowed is None else f"{finding.allowed:,}"
    verdict = _verdict(None if finding.allowed is None else finding.ok, "held", "broken", "not promised")
    return (
        f'<tr><td>{escape(finding.title)}</td><td class="n">{finding.count:,}</td><td class="n">{allowed}</td>'
        f"<td>{verdict}</td><td>{examples}</td></tr>"
    )


def _times(side: Side) -> str:
    rows = [_percentiles("latency, stored to done", side.latency), _percentiles("time in the handler", side.handler)]
    if side.lag is not None:
        rows.append(
            f'<tr><td>lag, messages</td><td class="n">{side.lag.p50:,.0f}</td><td class="n">{side.lag.p95:,.0f}</td>'
            f'<td class="n"></td><td class="n">{side.lag.largest:,.0f}</td></tr>'
        )
    head = "".join(f'<th class="n">{name}</th>' for name in ("p50", "p95", "p99", "largest"))
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _percentiles(name: str, found: Percentiles | None) -> str:
    if found is None:
        return f'<tr><td>{name}</td><td class="n soft" colspan="4">not measured</td></tr>'
    cells = "".join(f'<td class="n">{seconds(v)}</td>' for v in (found.p50, found.p95, found.p99, found.largest))
    return f"<tr><td>{name}</td>{cells}</tr>"


def _parity(report: Report) -> Iterable[str]:
    parity = report.parity
    if parity is None:
        return
    first, second = (escape(side.label) for side in report.sides)
    yield f"<h2>Parity {_badge('the same messages' if parity.ok else 'not the same', good=parity.ok)}</h2><ul>"
    yield f"<li>{parity.only_first:,} messages only in {first}, {parity.only_second:,} only in {second}</li>"
    if parity.latency_p99_ratio is not None:
        yield f"<li>p99 of latency of {second}: {parity.latency_p99_ratio:g} times that of {first}</li>"
    yield from (f"<li>{escape(example)}</li>" for example in parity.examples)
    yield "</ul>"


def _badge(words: str, *, good: bool) -> str:
    return f'<span class="badge {"good" if good else "bad"}">{escape(words)}</span>'


def _verdict(held: bool | None, yes: str, no: str, neither: str) -> str:
    if held is None:
        return f'<span class="soft">{neither}</span>'
    return f'<strong class="{"good" if held else "bad"}">{yes if held else no}</strong>'
