"""A check as a page for those who own the data: what was looked at, what is expected, and which
rows are against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from watersmeet.audit.page import document, facts_list
from watersmeet.audit.show import utc
from watersmeet.lake import tables
from watersmeet.lake.location import Lake
from watersmeet.quality.check import Check, SuiteResult
from watersmeet.quality.evaluate import Outcome
from watersmeet.quality.suites import PROMISES, SINK
from watersmeet.settings import Settings

_STYLE = """.verdict { font-size: 1.15rem; padding: .8rem 1rem; border-radius: .5rem;
  margin: 1.2rem 0 0 }
.holds { background: #e7f4ea; border-left: .4rem solid #1a7f37 }
.fails { background: #fdecea; border-left: .4rem solid #b42318 }
.quiet { background: #f1f1f1; border-left: .4rem solid #8a8a8a }
h2 { font-size: 1.25rem; padding-bottom: .25rem }
h3 { font-size: 1rem }
.card { margin: 1rem 0 0; padding: .7rem 1rem; border: 1px solid #e6b8b3;
  border-left: .4rem solid #b42318; border-radius: .5rem;
  break-inside: avoid }
.card p { margin: .3rem 0 .5rem }
.wide { width: 100%; margin-top: .4rem }
.wide th, .wide td, .table th, .table td { text-align: left; white-space: normal;
  vertical-align: top }
.wide th:last-child, .wide td:last-child { text-align: right; white-space: nowrap }
details { margin-top: .8rem }
summary { cursor: pointer }
a { color: inherit }
.yes { color: #1a7f37; font-weight: 600 }
.no { color: #b42318; font-weight: 600 }
.small { color: #666; font-size: .85rem }"""


def page(check: Check, settings: Settings, last: Sequence[Mapping[str, Any]]) -> str:
    """Return the whole page.

    `last`: what the last check of each suite has found, as `lake.quality.last_results` returns it.
    The page holds merge keys, coordinates and ids of rows, and no content of a record.
    """
    expectations = sum(len(result.outcomes) for result in check.results)
    facts = {
        "checked at": utc(check.checked_at),
        "lake": Lake(settings).location,
        "looked at": "nothing"
        if check.version is None
        else f"everything new up to version {check.version} of silver",
        "expectations": f"{expectations:,}",
    }
    names = list(dict.fromkeys(result.table for result in check.results))
    body = [_verdict(check, expectations), facts_list(facts)]
    if names:
        body += ["<h2>At a glance</h2>", _overview(names, check, settings)]
    body += [part for name in names for part in _table_of(name, check, settings)]
    if check.skipped:
        body.append("<h2>Not looked at</h2>")
        body += [
            f"<p>{escape(_title(name, settings)[0])}: {escape(why)}.</p>"
            for name, why in check.skipped.items()
        ]
    if last:
        body += ["<h2>The last result of each suite</h2>", _last(last)]
    return document(f"Data quality of {settings.name}", "\n".join(body), _STYLE, "")


def _verdict(check: Check, expectations: int) -> str:
    failed = sum(len(result.failed) for result in check.results)
    if failed:
        verb = "is" if failed == 1 else "are"
        kind = "fails"
        text = f"{failed:,} of {expectations:,} expectations {verb} not met."
    elif not expectations:
        kind = "quiet"
        text = "Nothing is new since the last check."
    else:
        kind = "holds"
        text = "The data is as expected: every expectation is met."
    return f'<p class="verdict {kind}">{text}</p>'


def _overview(names: Sequence[str], check: Check, settings: Settings) -> str:
    """Return a line for each table."""
    lines = []
    for name in names:
        results = [result for result in check.results if result.table == name]
        failed = sum(len(result.failed) for result in results)
        expectations = sum(len(result.outcomes) for result in results)
        title = f'<a href="#{escape(name)}">{escape(_title(name, settings)[0])}</a>'
        lines.append(
            (
                title,
                f"{max(result.rows for result in results):,}",
                f"{expectations:,}",
                _met(failed),
            )
        )
    return _wide(("what", "rows", "expectations", "result"), lines)


def _title(name: str, settings: Settings) -> tuple[str, str]:
    """Return what a table is to people: a heading, and a sentence."""
    titles = {
        tables.SILVER: (
            "Silver",
            "Merge records, and what became of all other records. The table silver.",
        ),
        tables.MERGED: (
            "Merge records",
            "What belongs together: the records of one key, from all sources. The view merged.",
        ),
        tables.LATE: ("Late records", "Records that came too late to be merged. The view late."),
        tables.PROGRESS: (
            "Progress",
            "How far each partition of each topic is, as it stands. The view progress.",
        ),
        SINK: (
            "Published messages",
            f"What consumers read from the topic {settings.publish.topic}.",
        ),
    }
    if name in titles:
        return titles[name]
    if not name.startswith(tables.bronze("")):
        return name.replace("_", " ").capitalize(), f"The view {name}."
    [source] = [source for source in settings.sources if tables.bronze(source) == name]
    topics = settings.sources[source].topics
    where = f"the topic {topics[0]}" if len(topics) == 1 else f"the topics {', '.join(topics)}"
    return f"Records of {source}", f"What was read from {where}, as it came. The table {name}."


def _table_of(name: str, check: Check, settings: Settings) -> Iterator[str]:
    """Yield the section of a table: first what is not met, then each suite with what it expects.

    Watersmeet's own suites come last, and are closed.
    """
    title, about = _title(name, settings)
    results = [result for result in check.results if result.table == name]
    rows = max(result.rows for result in results)
    looked_at = "looked at" if name == tables.PROGRESS else "new, and looked at"
    subject = "row was" if rows == 1 else "rows were"
    count = f"{rows:,} {subject} {looked_at}" if rows else "No row was new"
    yield f'<h2 id="{escape(name)}">{escape(title)}</h2>'
    yield f'<p class="about">{escape(about)} {count}.</p>'
    for result in results:
        yield from (_card(result, outcome) for outcome in result.failed)
    own = set(PROMISES)
    for result in sorted(results, key=lambda result: result.suite in own):
        lines = [
            (escape(outcome.expectation), _line(result, outcome)) for outcome in result.outcomes
        ]
        met = (
            f"{len(lines) - len(result.failed):,} of {len(lines):,} "
            f"{'is' if len(lines) == 1 else 'are'} met"
        )
        tag = "details" if result.suite in own else "details open"
        note = " (what holds for every lake)" if result.suite in own else ""
        table = _wide(("expectation", "result"), lines)
        yield (
            f"<{tag}><summary>Expectations of {escape(result.suite)}{note}: "
            f"{met}</summary>{table}</details>"
        )


def _card(result: SuiteResult, outcome: Outcome) -> str:
    """Return an expectation that is not met, as a card."""
    parts = [f'<div class="card"><h3>{escape(outcome.expectation)}</h3>']
    parts.append(
        f'<p>{escape(_against(result, outcome))} <span class="small">Suite '
        f"{escape(result.suite)}.</span></p>"
    )
    if outcome.examples:
        parts.append(_examples(outcome.examples))
        if (outcome.unexpected or 0) > len(outcome.examples):
            parts.append(f'<p class="small">The first {len(outcome.examples)} of them.</p>')
    return "".join([*parts, "</div>"])


def _against(result: SuiteResult, outcome: Outcome) -> str:
    if outcome.unexpected is not None:
        return (
            f"{outcome.unexpected:,} of {result.rows:,} rows "
            f"{'is' if outcome.unexpected == 1 else 'are'} against it."
        )
    if outcome.trouble is not None:
        return f"It could not be checked: {outcome.trouble}."
    return "It is not met." if outcome.observed is None else f"Found instead: {outcome.observed}."


def _line(result: SuiteResult, outcome: Outcome) -> str:
    """Return the result of an expectation: within its limits, it may be met although some rows are
    against it.
    """
    if outcome.success and outcome.unexpected:
        return (
            f'{_met(0)} <span class="small">but for {outcome.unexpected:,} of {result.rows:,} '
            "rows</span>"
        )
    return _met(not outcome.success, "not met")


def _met(failed: int, text: str = "") -> str:
    return (
        f'<span class="no">✗ {text or f"{failed:,} not met"}</span>'
        if failed
        else '<span class="yes">✓ met</span>'
    )


def _examples(rows: Sequence[Mapping[str, str]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = [head, *(_cells(row, names) for row in rows)]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="table"><table>{body}</table></div>'


def _cells(row: Mapping[str, str], names: Sequence[str]) -> str:
    return "".join(f"<td>{escape(row.get(name, ''))}</td>" for name in names)


def _last(last: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each suite and table."""
    lines = [
        (
            escape(row["suite"]),
            escape(row["table"]),
            utc(row["checked_at"]),
            f"{row['expectations']:,}",
            _met(row["failed"]),
        )
        for row in last
    ]
    return _wide(("suite", "table", "checked at", "expectations", "result"), lines)


def _wide(names: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table of HTML cells."""
    rows = [
        f"<th>{'</th><th>'.join(names)}</th>",
        *(f"<td>{'</td><td>'.join(line)}</td>" for line in lines),
    ]
    return '<table class="wide">' + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"
