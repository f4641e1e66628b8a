"""Self-contained HTML pages: they need no network, and a lake's content is only text in them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from pathlib import Path

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
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }}
th, td {{ text-align: right; white-space: nowrap; padding: .15rem .7rem;
  border-bottom: 1px solid #ddd }}
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
