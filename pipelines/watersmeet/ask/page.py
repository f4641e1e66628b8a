"""Self-contained HTML pages of `report` and `check`: they need no network, and a lake's content is
only text in them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple

from watersmeet.errors import ConfigurationError

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; color: #222;
  max-width: 1000px; margin: 2rem auto; padding: 0 1rem }}
h1, h3, dd {{ margin: 0; overflow-wrap: anywhere }}
h2 {{ margin: 2.8rem 0 0; border-bottom: 1px solid #bbb }}
figcaption, .about, dt, th {{ color: #555; font-weight: normal }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem }}
th.prose, td.prose {{ white-space: normal; text-align: left }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }}
th, td {{ text-align: right; white-space: nowrap; padding: .15rem .5rem;
  border-bottom: 1px solid #ddd }}
th {{ white-space: normal; vertical-align: bottom }}
.table {{ overflow: auto; max-height: 24rem }}
@media print {{ body {{ max-width: none }} .table {{ max-height: none }} }}
{style}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def document(title: str, body: str, style: str, policy: str) -> str:
    """Return a whole page.

    `body`: HTML. `policy`: what a browser may do for the page beside loading nothing
    (Content-Security-Policy).
    """
    return _PAGE.format(
        title=escape(title),
        body=body,
        style=style,
        policy=f"default-src 'none'; style-src 'unsafe-inline'{policy}",
    )


def facts_list(facts: Mapping[str, str]) -> str:
    """Return facts, by name, as an HTML list."""
    return (
        "<dl>"
        + "".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts.items())
        + "</dl>"
    )


class Cell(NamedTuple):
    """HTML in a cell, in place of text."""

    html: str


def table(names: Sequence[str], rows: Iterable[Iterable[Any]], kind: str = "") -> str:
    """Return rows as an HTML table; numbers are grouped, and long texts broken into lines.

    `kind`: a class of the table's box, `wide` for one of texts as wide as the page.
    """
    cells = [list(row) for row in rows]
    # The head of a column is set as its first value is.
    first = cells[0] if cells else names
    lines = [[_cell("th", *pair) for pair in zip(names, first, strict=True)]]
    lines += [[_cell("td", value, value) for value in row] for row in cells]
    body = "\n".join(f"<tr>{''.join(line)}</tr>" for line in lines)
    return f'<div class="table {kind}"><table>\n{body}\n</table></div>'


LONGEST_LABEL: Final = 40
"""Maximum characters of a cell that is not broken into lines."""


def _cell(tag: str, shown: Any, value: Any) -> str:
    kind = ' class="prose"' if isinstance(value, str) and len(value) > LONGEST_LABEL else ""
    if isinstance(shown, Cell):
        return f"<{tag}{kind}>{shown.html}</{tag}>"
    return f"<{tag}{kind}>{f'{shown:,}' if isinstance(shown, int) else escape(shown)}</{tag}>"


def as_script(value: object) -> str:
    """Return JSON in which nothing can end the script around it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def check_writable(option: str, out: Path) -> None:
    """Raise ConfigurationError where no page can be written to `out`.

    Call it before the lake is read.
    """
    folder = out.absolute().parent
    if (
        out.is_dir()
        or not folder.is_dir()
        or not os.access(out if out.exists() else folder, os.W_OK)
    ):
        raise ConfigurationError(
            f"{out} cannot be written",
            where=option,
            fix="name a file in an existing folder that you may write to",
        )


def write_page(option: str, out: Path, text: str) -> None:
    """Write the page over what the file held.

    Raises ConfigurationError where it cannot be written.
    """
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"{out} cannot be written ({error.strerror})", where=option, fix="name another file"
        ) from error
