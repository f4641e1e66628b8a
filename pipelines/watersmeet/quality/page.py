"""The work of `watersmeet check`, and its page for those who own the data: what is expected, and
which rows are against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from watersmeet.ask.page import (
    Cell,
    check_writable,
    document,
    facts_list,
    table,
    write_page,
)
from watersmeet.core.times import utc
from watersmeet.engine.choice import open_engine
from watersmeet.lake import tables
from watersmeet.lake.identity import check_layout
from watersmeet.lake.location import Lake
from watersmeet.lake.quality import last_results
from watersmeet.lake.torn import check_whole
from watersmeet.quality.check import Check, SuiteResult, check
from watersmeet.quality.evaluate import Outcome
from watersmeet.quality.suites import PROMISES, SINK, read_suites
from watersmeet.running.owner import now_ms
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
.wide { max-height: none; margin-top: .4rem }
.wide table { width: 100% }
th, td { text-align: left; white-space: normal; vertical-align: top }
.wide th:last-child, .wide td:last-child { text-align: right; white-space: nowrap }
details { margin-top: .8rem }
summary { cursor: pointer }
a { color: inherit }
.yes { color: #1a7f37; font-weight: 600 }
.no { color: #b42318; font-weight: 600 }
.small { color: #666; font-size: .85rem }
@media (max-width: 600px) { .small { white-space: normal } }"""


def check_lake(settings: Settings, since: int | None, html: Path | None) -> Check:
    """Check every suite on what is new, or since a version of silver, and write a page if asked.

    Raises ConfigurationError for a wrong suite, version or file, else WatersmeetError.
    """
    suites = read_suites(settings)
    if html is not None:
        check_writable("--html", html)  # before the lake is read for it
    engine = open_engine(settings)
    check_whole(engine.lake)
    check_layout(engine.reader, engine.lake)
    done = check(engine, settings, suites, now_ms(), since=since)
    if html is not None:
        write_page("--html", html, page(done, settings, last_results(engine.reader)))
    return done


def page(done: Check, settings: Settings, last: Sequence[Mapping[str, Any]]) -> str:
    """Return the page, which has keys, coordinates and ids of rows, and no content of a record.

    `last`: what the last check of each suite has found (`lake.quality.last_results`).
    """
    expectations = sum(len(result.outcomes) for result in done.results)
    facts = {
        "checked at": utc(done.checked_at),
        "lake": Lake(settings).location,
        "looked at": "nothing",
        "expectations": f"{expectations:,}",
    }
    if done.version is not None:
        facts["looked at"] = f"everything new up to version {done.version} of silver"
    names = list(dict.fromkeys(result.table for result in done.results))
    body = [_verdict(done, expectations), facts_list(facts)]
    if names:
        body += ["<h2>At a glance</h2>", _overview(names, done, settings)]
    body += [part for name in names for part in _table_of(name, done, settings)]
    if done.skipped:
        body.append("<h2>Not looked at</h2>")
        body += [
            f"<p>{escape(_title(name, settings)[0])}: {escape(why)}.</p>"
            for name, why in done.skipped.items()
        ]
    if last:
        body += ["<h2>The last result of each suite</h2>", _last(last)]
    return document(f"Data quality of {settings.name}", "\n".join(body), _STYLE, "")


def _verdict(done: Check, expectations: int) -> str:
    failed = sum(len(result.failed) for result in done.results)
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


def _overview(names: Sequence[str], done: Check, settings: Settings) -> str:
    lines = []
    for name in names:
        results = [result for result in done.results if result.table == name]
        failed = sum(len(result.failed) for result in results)
        expectations = sum(len(result.outcomes) for result in results)
        rows = max(result.rows for result in results)
        title = Cell(f'<a href="#{escape(name)}">{escape(_title(name, settings)[0])}</a>')
        lines.append((title, rows, expectations, Cell(_met(failed))))
    return table(("what", "rows", "expectations", "result"), lines, "wide")


# By table or view what it is to people: a heading, and a sentence.
_TITLES = {
    tables.SILVER: ("Silver", "Merge records, and what became of all other records."),
    tables.MERGED: (
        "Merge records",
        "What belongs together: the records of one key, from all sources.",
    ),
    tables.LATE: ("Late records", "Records that came too late to be merged."),
    tables.PROGRESS: ("Progress", "How far each partition of each topic is, as it stands."),
}


def _title(name: str, settings: Settings) -> tuple[str, str]:
    if name == SINK:
        topic = settings.publish.topic
        return "Published messages", f"What consumers read from the topic {topic}."
    for source, of_source in settings.sources.items():
        if name == tables.bronze(source):
            topics = of_source.topics
            where = f"the topic{'s' if len(topics) > 1 else ''} {', '.join(topics)}"
            about = f"What was read from {where}, as it came. The table {name}."
            return f"Records of {source}", about
    if name not in _TITLES:
        return name.replace("_", " ").capitalize(), f"The view {name}."
    title, about = _TITLES[name]
    return title, f"{about} The {'table' if name == tables.SILVER else 'view'} {name}."


def _table_of(name: str, done: Check, settings: Settings) -> Iterator[str]:
    # First what is not met; Watersmeet's own suites come last, and are closed.
    title, about = _title(name, settings)
    results = [result for result in done.results if result.table == name]
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
        lines = [(outcome.expectation, Cell(_line(result, outcome))) for outcome in result.outcomes]
        verb = "is" if len(lines) == 1 else "are"
        met = f"{len(lines) - len(result.failed):,} of {len(lines):,} {verb} met"
        tag, note = ("details open", "")
        if result.suite in own:
            tag, note = ("details", " (what holds for every lake)")
        summary = f"<summary>Expectations of {escape(result.suite)}{note}: {met}</summary>"
        expectations = table(("expectation", "result"), lines, "wide")
        yield f"<{tag}>{summary}{expectations}</details>"


def _card(result: SuiteResult, outcome: Outcome) -> str:
    against = escape(_against(result, outcome))
    suite = f'<span class="small">Suite {escape(result.suite)}.</span>'
    parts = [f"<h3>{escape(outcome.expectation)}</h3><p>{against} {suite}</p>"]
    if rows := outcome.examples:
        names = list(dict.fromkeys(name for row in rows for name in row))
        parts.append(table(names, ([row.get(name, "") for name in names] for row in rows)))
        if (outcome.unexpected or 0) > len(rows):
            parts.append(f'<p class="small">The first {len(rows)} of them.</p>')
    return f'<div class="card">{"".join(parts)}</div>'


def _against(result: SuiteResult, outcome: Outcome) -> str:
    if outcome.unexpected is not None:
        verb = "is" if outcome.unexpected == 1 else "are"
        return f"{outcome.unexpected:,} of {result.rows:,} rows {verb} against it."
    if outcome.trouble is not None:
        return f"It could not be checked: {outcome.trouble}."
    return "It is not met." if outcome.observed is None else f"Found instead: {outcome.observed}."


def _line(result: SuiteResult, outcome: Outcome) -> str:
    # Within its limits an expectation is met although some rows are against it.
    if outcome.success and outcome.unexpected:
        rows = f"{outcome.unexpected:,} of {result.rows:,} rows"
        return f'{_MET} <span class="small">but for {rows}</span>'
    return _MET if outcome.success else '<span class="no">✗ not met</span>'


_MET = '<span class="yes">✓ met</span>'


def _met(failed: int) -> str:
    return f'<span class="no">✗ {failed:,} not met</span>' if failed else _MET


def _last(last: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in last:
        result = (utc(row["checked_at"]), row["expectations"], Cell(_met(row["failed"])))
        lines.append((row["suite"], row["table"], *result))
    return table(("suite", "table", "checked at", "expectations", "result"), lines, "wide")
