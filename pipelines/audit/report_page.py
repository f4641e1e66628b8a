"""The report as one HTML page that needs nothing else: the charts' library is in it once, and no network is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape

import vl_convert

from pipelines.audit.report import Report
from pipelines.audit.report_drawing import CONFIG, Spec
from pipelines.audit.report_sections import Section, sections
from pipelines.audit.show import duration, utc

_STYLE = """
:root { color-scheme: light }
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; max-width: 1000px; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 }
h2 { font-size: 1.2rem; margin: 2.5rem 0 0; border-bottom: 1px solid #bbb; padding-bottom: .2rem }
h3 { font-size: 1rem; margin: 0 0 .3rem }
p.about { color: #444; margin: .4rem 0 0 }
figure { margin: 1.6rem 0 0; break-inside: avoid }
figcaption { color: #444; font-size: .87rem; max-width: 54rem }
.nothing { color: #444; border-left: 3px solid #bbb; padding-left: .7rem; margin: .3rem 0 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 1rem 0 }
dt { color: #555 }
dd { margin: 0; overflow-wrap: anywhere }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { text-align: right; white-space: nowrap; padding: .15rem .7rem; border-bottom: 1px solid #ddd }
th { font-weight: normal; color: #555 }
.chart svg { max-width: 100%; height: auto }
@media print {
  body { margin: 0; max-width: none; font-size: 12px }
  h2, p.about { break-after: avoid }
  .vega-embed details { display: none }
}
"""

_POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
"""Whatever the page's scripts try, a browser loads nothing for it; Vega compiles its expressions, hence the `eval`."""

_EXPORTED = "window.vegaEmbed = vegaEmbed;"

_DRAW = """
for (const [id, spec] of Object.entries(CHARTS)) {
  vegaEmbed("#" + id, spec, OPTIONS).catch(error => { document.getElementById(id).textContent = String(error); });
}
"""

_OPTIONS = {
    "mode": "vega-lite",
    "renderer": "svg",
    "config": CONFIG,
    "actions": {"export": True, "source": False, "compiled": False, "editor": False},
}


def page(report: Report) -> str:
    """The whole page. What comes out of the lake is text in it and nothing else, whatever it looks like."""
    body, specs = _body(sections(report))
    title = f"Watersmeet: {escape(report.name)}"
    parts = [
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>",
        *_header(report),
        "<noscript><p>The charts are drawn by the script in this page, which this browser does not run.</p></noscript>",
        *body,
        f"<script>{vl_convert.javascript_bundle(_EXPORTED)}</script>",
        f"<script>const CHARTS = {_as_script(specs)};\nconst OPTIONS = {_as_script(_OPTIONS)};{_DRAW}</script>",
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _body(made: Sequence[Section]) -> tuple[list[str], dict[str, Spec]]:
    """The sections' HTML, and the charts by the id of the element that each is drawn into."""
    html: list[str] = []
    specs: dict[str, Spec] = {}
    for section in made:
        html.append(f'<h2>{escape(section.title)}</h2>\n<p class="about">{escape(section.about)}</p>')
        for title, caption, draw in section.figures:
            if draw is None:
                inner = f'<p class="nothing">{escape(caption)}</p>'
            else:
                place = f"chart-{len(specs) + 1}"
                specs[place] = draw()
                inner = f'<div class="chart" id="{place}"></div>\n<figcaption>{escape(caption)}</figcaption>'
            html.append(f"<figure>\n<h3>{escape(title)}</h3>\n{inner}\n</figure>")
    return html, specs


def _as_script(value: object) -> str:
    """JSON in which nothing can end the script that it stands in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _header(report: Report) -> Iterator[str]:
    last = "none yet" if report.last is None else f"{report.last.batch:,}, decided at {utc(report.last.committed_at)}"
    facts = {
        "made at": utc(report.made_at),
        "lake": report.place,
        "sources": ", ".join(report.sources),
        "timeout": duration(report.timeout_ms),
        "last batch of silver": last,
    }
    yield "<dl>" + "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts.items()) + "</dl>"
    if not report.partitions:
        yield '<p class="nothing">The lake has no record yet.</p>'
        return
    names = ("partition", "clock (UTC)", "in bronze", "open", "timed out", "late", "quarantined", "published")
    yield "<table>\n<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"
    for partition, clock, *counts in report.partitions:
        cells = (str(partition), utc(clock), *(f"{count:,}" for count in counts))
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</table>"
