"""The report as one self-contained HTML page: it has the chart library in it once, and asks no
network.
"""

from __future__ import annotations

from functools import cache
from html import escape
from typing import Any, Final

import vl_convert

from watersmeet.ask.page import Sentence, as_script, document, facts_list, table
from watersmeet.ask.report import Report

_STYLE: Final = """figure { margin: 1.8rem 0 0; break-inside: avoid }
.chart { width: 100% }
@media print { .vega-embed details { display: none } }"""

_SCRIPTS = """<script>{library}</script>
<script>const CHARTS = {charts};
for (const [id, spec] of Object.entries(CHARTS)) {{
  vegaEmbed("#" + id, spec, {options}).catch(error => {{
    document.getElementById(id).textContent = String(error);
  }});
}}
</script>"""
_NO_SCRIPTS = (
    "<noscript><p>The charts are drawn by the script in this page, which this browser does not "
    "run.</p></noscript>"
)

_POLICY = "; script-src 'unsafe-inline' 'unsafe-eval'; img-src data: blob:"
"""Policy with which a browser loads nothing, whatever the page's scripts try.

Vega compiles its expressions, hence the `eval`.
"""

_TEXT: Any = {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal"}
# A row of names would be wider than the chart is on a phone.
_COLUMNS: Any = {"expr": "width < 400 ? 1 : 0"}
# So that a time has the same place in every chart of a section.
_CONFIG: Any = {
    "font": "system-ui, sans-serif",
    "axis": {
        **_TEXT,
        "gridColor": "#e4e4e4",
        "labelOverlap": True,
        "labelSeparation": 6,
        "labelFlush": False,
    },
    "axisX": {"grid": True},
    "axisY": {
        "minExtent": 84,
        "maxExtent": 84,
    },
    "legend": {**_TEXT, "orient": "top", "symbolOpacity": 1, "columns": _COLUMNS},
    "timeFormat": "%Y-%m-%d %H:%M:%S.%L",  # in tooltips
    "view": {"stroke": None},
}
_ACTIONS = {"export": True, "source": False, "compiled": False, "editor": False}
_OPTIONS = {"mode": "vega-lite", "renderer": "svg", "config": _CONFIG, "actions": _ACTIONS}


@cache
def _library() -> str:
    """Return the chart library. Bundling it takes a second, and it is the same for every page."""
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def page(report: Report) -> str:
    """Return the whole page.

    What comes from the lake is only text in it, whatever it looks like.
    """
    specs: dict[str, Any] = {}
    body = [_NO_SCRIPTS, facts_list(report.facts)]
    for section in report.sections:
        body.append(
            f'<h2>{escape(section.title)}</h2>\n<p class="about">{escape(section.about)}</p>'
        )
        for title, caption, rows, chart in section.figures:
            body.append(f"<figure>\n<h3>{escape(title)}</h3>")
            if chart:
                specs[place := f"chart-{len(specs) + 1}"] = chart
                body.append(f'<div class="chart" id="{place}"></div>')
            elif rows:
                body.append(table([*rows[0]], map(dict.values, rows)))
            body.append(f"<figcaption>{Sentence(caption).html}</figcaption>\n</figure>")
    body.append(
        _SCRIPTS.format(library=_library(), charts=as_script(specs), options=as_script(_OPTIONS))
    )
    return document(f"Watersmeet: {report.name}", "\n".join(body), _STYLE, _POLICY)
