"""The report as one HTML page that needs nothing else: the charts' library is in it once, and no network is asked."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

import vl_convert

from pipelines.audit.report import Report
from pipelines.audit.report_charts import Row, Spec
from pipelines.errors import ConfigurationError

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1000px; margin: 2rem auto; padding: 0 1rem }}
h1, h3, dd {{ margin: 0; overflow-wrap: anywhere }}
h2 {{ margin: 2.8rem 0 0; border-bottom: 1px solid #bbb }}
figure {{ margin: 1.8rem 0 0; break-inside: avoid }}
figcaption, .about, dt, th {{ color: #555; font-weight: normal }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }}
th, td {{ text-align: right; white-space: nowrap; padding: .15rem .7rem; border-bottom: 1px solid #ddd }}
.chart {{ width: 100% }}
.table {{ overflow: auto; max-height: 24rem }}
@media print {{ body {{ max-width: none }} .table {{ max-height: none }} .vega-embed details {{ display: none }} }}
</style>
</head>
<body>
<h1>{title}</h1>
<noscript><p>The charts are drawn by the script in this page, which this browser does not run.</p></noscript>
{body}
<script>{library}</script>
<script>const CHARTS = {charts};
for (const [id, spec] of Object.entries(CHARTS)) {{
  vegaEmbed("#" + id, spec, {options}).catch(error => {{ document.getElementById(id).textContent = String(error); }});
}}
</script>
</body>
</html>
"""

_POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
"""Whatever the page's scripts try, a browser loads nothing for it; Vega compiles its expressions, hence the `eval`."""

_TEXT: Spec = {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal"}
_CONFIG: Spec = {
    "font": "system-ui, sans-serif",
    "axis": {**_TEXT, "gridColor": "#e4e4e4", "labelOverlap": True},
    "axisX": {"grid": True},
    "axisY": {"minExtent": 64, "maxExtent": 64},  # so that a time has the same place in every chart of a section
    "legend": {**_TEXT, "orient": "top", "symbolOpacity": 1},
    "timeFormat": "%Y-%m-%d %H:%M:%S.%L",  # in tooltips
    "view": {"stroke": None},
}
_ACTIONS = {"export": True, "source": False, "compiled": False, "editor": False}
_OPTIONS = {"mode": "vega-lite", "renderer": "svg", "config": _CONFIG, "actions": _ACTIONS}


def check_writable(out: Path) -> None:
    """Raises ConfigurationError where no page can be written there; to be asked before the lake is read."""
    folder = out.absolute().parent
    if out.is_dir() or not folder.is_dir() or not os.access(out if out.exists() else folder, os.W_OK):
        raise ConfigurationError(f"--out: {out} cannot be written; name a file in an existing folder that you may write to")


def write_page(out: Path, text: str) -> None:
    """Writes the page over what the file held; raises ConfigurationError where it cannot be written."""
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--out: {out} cannot be written ({error.strerror}); name another file") from error


def page(report: Report) -> str:
    """The whole page. What comes out of the lake is text in it and nothing else, whatever it looks like."""
    specs: dict[str, Spec] = {}
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in report.facts.items())
    body = [f"<dl>{facts}</dl>"]
    for section in report.sections:
        body.append(f'<h2>{escape(section.title)}</h2>\n<p class="about">{escape(section.about)}</p>')
        for title, caption, rows, chart in section.figures:
            body.append(f"<figure>\n<h3>{escape(title)}</h3>")
            if chart:
                specs[place := f"chart-{len(specs) + 1}"] = chart
                body.append(f'<div class="chart" id="{place}"></div>')
            elif rows:
                body.append(_table(rows))
            body.append(f"<figcaption>{escape(caption)}</figcaption>\n</figure>")
    return _PAGE.format(
        title=escape(f"Watersmeet: {report.name}"),
        policy=_POLICY,
        body="\n".join(body),
        library=vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"),
        charts=_as_script(specs),
        options=_as_script(_OPTIONS),
    )


def _table(rows: Sequence[Row]) -> str:
    cells = ("".join(f"<td>{escape(f'{cell:,}' if type(cell) is int else cell)}</td>" for cell in row.values()) for row in rows)
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    return '<div class="table"><table>\n' + "\n".join(f"<tr>{line}</tr>" for line in (head, *cells)) + "\n</table></div>"


def _as_script(value: object) -> str:
    """JSON in which nothing can end the script that it stands in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
