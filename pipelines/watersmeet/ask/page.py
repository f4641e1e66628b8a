"""Self-contained HTML pages of `report` and `check`: they need no network, and a lake's content is
only text in them.
"""

from __future__ import annotations

import json
import os
import re
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
  max-width: 1100px; margin: 2rem auto; padding: 0 1rem }}
h1, h3, dd {{ margin: 0; overflow-wrap: anywhere }}
h2 {{ margin: 2.8rem 0 0; border-bottom: 1px solid #bbb }}
figcaption, .about, dt, th {{ color: #555; font-weight: normal }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem }}
th.prose, td.prose {{ white-space: normal; text-align: left; overflow-wrap: anywhere;
  min-width: 8rem }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }}
th, td {{ text-align: right; white-space: nowrap; padding: .15rem .5rem;
  border-bottom: 1px solid #ddd }}
th {{ white-space: normal; vertical-align: bottom }}
.table {{ overflow: auto; max-height: 24rem }}
@media print {{ body {{ max-width: none; padding: 0 }}
  .table {{ max-height: none; overflow: visible }} table {{ font-size: .7rem }}
  th, td {{ white-space: normal; padding: .1rem .15rem }} }}
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


class Sentence(str):
    """A sentence of the program's own: what is in backquotes is code."""

    __slots__ = ()

    @property
    def html(self) -> str:
        """The sentence as HTML."""
        return re.sub("`([^`]*)`", r"<code>\1</code>", escape(self))


def table(names: Sequence[str], rows: Iterable[Iterable[Any]], kind: str = "") -> str:
    """Return rows as an HTML table; numbers are grouped, and long texts broken into lines.

    `kind`: a class of the table's box, `wide` for one of texts as wide as the page.
    """
    cells = [list(row) for row in rows]
    # A column is set in one way, whatever each of its values is.
    are_long = [any(map(_is_long, column)) for column in zip(names, *cells, strict=True)]
    lines = [
        "".join(_cell(tag, *pair) for pair in zip(row, are_long, strict=True))
        for tag, row in (("th", names), *(("td", row) for row in cells))
    ]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="table {kind}"><table>\n{body}\n</table></div>'


LONGEST_LABEL: Final = 40
"""Maximum characters of a cell that is not broken into lines."""


def _is_long(value: Any) -> bool:
    return isinstance(value, str) and len(value) > LONGEST_LABEL


def _cell(tag: str, value: Any, is_prose: bool) -> str:
    kind = ' class="prose"' if is_prose else ""
    if isinstance(value, Cell | Sentence):
        return f"<{tag}{kind}>{value.html}</{tag}>"
    return f"<{tag}{kind}>{f'{value:,}' if isinstance(value, int) else escape(value)}</{tag}>"


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
