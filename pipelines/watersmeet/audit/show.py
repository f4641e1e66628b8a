"""The answers as people see them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from watersmeet.configuration.sources import spelled
from watersmeet.core.texts import number_of, printable
from watersmeet.core.times import duration, utc
from watersmeet.errors import Problem

Row: TypeAlias = Mapping[str, Any]

_ALWAYS: Final = ("open", "waiting", "timed_out", "published", "late", "quarantined")
"""Counts of a partition that are shown also where they are 0."""

_COUNTS: Final = (
    *("open", "waiting", "timed_out", "published", "failed_values", "not_valid"),
    *("to_publish", "behind_sink", "not_in_silver", "in_former_sink", "late", "corrections"),
    *("corrections_published", "corrections_closed", "corrections_behind"),
    *("too_many", "duplicates", "excess", "quarantined"),
)
"""Counts of a partition in the order in which they are shown."""

_STATE_STYLES = {"active": "green", "held": "yellow", "idle": "cyan", "waiting": "red"}

SHOWN_RECORDS = 20
"""Maximum number of merge records of a key that are shown, the newest ones, and of each kind of
records that were not merged.
"""
SHOWN_PARTS = 50
"""Maximum number of parts of a merge record that are shown, the newest ones."""


# -- parts of answers


def columns(names: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    """Return rows as a table; whole numbers are grouped, a null is empty, and texts stay texts."""
    table = Table(*names, box=None, header_style="dim", padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(value: Any) -> RenderableType:
    if isinstance(value, Text):
        return value
    return f"{value:,}" if isinstance(value, int) else "" if value is None else escape(str(value))


def _fields(rows: Iterable[Row], *fields: str, **titled: str) -> Table:
    """Return fields of rows as a table: those of `titled` have a title of their own, in which `_`
    stands for a space.
    """
    titles = {**{name: name for name in fields}, **{name: title for title, name in titled.items()}}
    found = ([row[name] for name in titles] for row in rows)
    return columns((title.replace("_", " ") for title in titles.values()), found)


def _finding(name: str, style: str, finding: Mapping[str, str]) -> Text:
    return Text.assemble((name, style), f" {Problem(**finding)}")


def warnings_view(warnings: Iterable[dict[str, str]]) -> list[Text]:
    """Return a paragraph for each warning: where, what looks wrong, and what to do about it."""
    return [_finding("warning", "yellow", warning) for warning in warnings]


def problems_view(answer: Row) -> Group:
    """Return a paragraph for each problem, then warnings: where, what is wrong, how to fix it."""
    problems = [_finding("problem", "red", problem) for problem in answer["problems"]]
    return Group(*problems, *warnings_view(answer.get("warnings", [])))


def _place(row: Row) -> str:
    source = "" if row["source"] == row["topic"] else f"{row['source']}: "
    return f"{source}{row['topic']}[{row['partition']}]@{row['offset']}"


def _records(rows: Iterable[Row], *more: str) -> Table:
    """Return a table with a line for each record, narrow enough for a terminal.

    A position is shown as its distance from the event time.
    """
    lines = []
    for row in rows:
        cells = {name: "-" if row[name] is None else printable(str(row[name])) for name in more}
        if "event_time" in more:
            cells["event_time"] = utc(row["event_time"])
        if "position" in more and row["position"] is not None:
            cells["position"] = f"+{duration(row['position'] - row['event_time'])}"
        lines.append((_place(row), *cells.values()))
    return columns(("record", *(name.replace("_", " ") for name in more)), lines)


# -- status


def status_view(answer: Row) -> Group:
    """Return a paragraph for every partition, then the last checks of suites, then warnings.

    A paragraph has the partition's clock and counts, then a line for each source.
    """
    partitions = [part for partition in answer["partitions"] for part in _partition(partition)]
    if not partitions:
        partitions = ["The lake has no record yet, and only Kafka knows its partitions."]
    warnings = warnings_view(answer.get("warnings", []))
    return Group(*partitions, *_quality(answer["quality"]), *warnings)


def _quality(results: Sequence[Row]) -> list[RenderableType]:
    rows = (
        (
            *(row["suite"], row["table"], utc(row["checked_at"]), row["expectations"]),
            Text(f"{row['failed']:,}", "red" if row["failed"] else "green"),
        )
        for row in results
    )
    names = ("suite", "table", "checked at", "expectations", "not met")
    return ["[bold]quality[/]  (watersmeet check)", columns(names, rows)] if results else []


def _partition(partition: Row) -> tuple[RenderableType, ...]:
    shown = [name for name in _COUNTS if partition.get(name) or name in {*_ALWAYS} & {*partition}]
    facts = " · ".join(
        f"{name.replace('_', ' ')} [bold]{partition[name]:,}[/]"
        f"{_reasons(partition) if name == 'not_valid' else ''}"
        for name in shown
    )
    rows = (
        (
            *(name, Text(at["state"], _STATE_STYLES[at["state"]]), utc(at["head"])),
            *(duration(at["lead"]), at["lag"], Text.from_markup(transaction_text(at))),
        )
        for name, at in partition["sources"].items()
    )
    sources = columns(("", "state", "head", "lead", "lag", ""), rows)
    number, due = partition["partition"], partition["next_due"]
    stuck = "".join(f"  [red]waits for {name}\\[{number}][/]" for name in waited_for(partition))
    if not stuck and due is not None and "tenants" not in partition:
        stuck = f"  next due {utc(due)}"
    title = f"[bold]partition {number}[/]  clock {utc(partition['clock'])}{stuck}"
    return title, f"  {facts}", *_tenants(partition), sources, ""


def _reasons(partition: Row) -> str:
    reasons = {name.replace("_", " "): n for name, n in partition["not_valid_reasons"].items()}
    texts = [f"{name} {n:,}" if len(reasons) > 1 else name for name, n in reasons.items()]
    return f" ({', '.join(texts)})"


def _tenants(partition: Row) -> list[RenderableType]:
    if "tenants" not in partition:
        return []
    facts = [f"tenants [bold]{partition['tenants']:,}[/]"]
    slowest, leading, clock = (partition[name] for name in ("slowest", "leading", "clock"))
    # Where none is behind, none is slow.
    if slowest is not None and slowest["clock"] is not None and slowest["clock"] < clock:
        behind = duration(clock - slowest["clock"])
        facts.append(f"slowest {escape(repr(slowest['tenant']))} {behind} behind the clock")
    if leading is not None and clock is not None and leading["head"] > clock:
        tenant = "nobody" if leading["tenant"] is None else repr(leading["tenant"])
        ahead = f"{duration(leading['head'] - clock)} ahead on {leading['source']}"
        facts.append(f"leading {escape(tenant)} {ahead}")
    return [f"  {' · '.join(facts)}"]


def transaction_text(row: Row) -> str:
    """Return a sentence about another producer's open transaction; empty where the row has none."""
    if (transaction := row.get("transaction")) is None:
        return ""
    return (
        f"[red]a transaction is open since {utc(transaction['since'])}: "
        f"{transaction['behind']:,} offsets wait behind it[/]"
    )


def waited_for(partition: Row) -> list[str]:
    """Return the sources whose next record a partition's clock waits for.

    None are returned unless another source has records that wait for it.
    """
    sources = partition["sources"]
    is_held = any(at["state"] == "held" for at in sources.values())
    return [n for n, at in sources.items() if is_held and at["head"] == partition["clock"]]


# -- changes


def _change_view(said: str, table: Table, is_done: bool, option: str, verb: str) -> Group:
    hint = "" if is_done else f"\nNothing was {verb}. Do it with {option}."
    return Group(said, table, hint)


def maintain_view(answer: Row) -> Table:
    """Return a table of how many files each table had and has now, and how many old ones were
    removed.
    """
    names = ("table", "files before", "files now", "old files removed")
    return columns(names, (row.values() for row in answer["tables"]))


def preview_view(rows: Sequence[Row], warnings: Iterable[dict[str, str]]) -> Group:
    """Return what a run would read, a line for each topic-partition, and then what looks wrong."""
    lines = (
        (
            *(row["source"], *(str(row[n]) for n in ("partition", "from_offset", "until_offset"))),
            *(row["until_offset"] - row["from_offset"], row["because"]),
            Text.from_markup(transaction_text(row)),
        )
        for row in rows
    )
    names = ("source", "partition", "from", "until", "offsets", "because of", "")
    return Group(columns(names, lines), *warnings_view(warnings))


def redrive_view(answer: Row) -> Group:
    """Return what a redrive sends, or has sent."""
    records, is_done = answer["records"], answer["applied"]
    titled = {"refused": "found", "redriven_before": "before", "redriven_now": "after"}
    table = _fields(records, "table", "source", "topic", **titled)
    count = answer["sent"] if is_done else sum(row["found"] - row["after"] for row in records)
    does = ("was" if count == 1 else "were") if is_done else "would be"
    said = f"{number_of(count, 'record')} refused as {answer['reason']} {does} sent again"
    return _change_view(said, table, is_done, "--apply", "sent")


def repartition_view(answer: Row) -> str:
    """Return what was repartitioned, and where the topics that were written end."""
    lines = []
    for row in answer["sources"]:
        ends = ", ".join(f"[{partition}]@{end}" for partition, end in row["ends"].items())
        written = (
            f"{number_of(row['records'], 'record')} of {row['from']} written to {row['topic']}"
        )
        lines.append(f"{row['source']}: {written}, which ends at {ends}")
    return "\n".join(lines)


def forget_view(answer: Row) -> Group:
    """Return where a key is, or was, and what holds it for longer."""
    table = _fields(answer["tables"], "table", records_before="before", records_after="after")
    held = [{**row, "until": utc(row["until"])} for row in answer["held"]]
    elsewhere = _fields(held, held_elsewhere="where", records="records", until="until")
    hint = "" if answer["applied"] else "\nNothing was changed. Do it with --apply."
    sent = f"\nTombstones sent: {answer['tombstones']}" if answer["tombstones"] else ""
    if all(row["records"] is None for row in held):
        hint = "\nNo table has the key. If it was forgotten before, these may have it still."
    return Group(table, "", elsewhere, hint or sent)


def reset_view(answer: Row) -> Group:
    """Return what a jump does, or has done."""
    is_done = answer["done"]
    verb = "were" if is_done else "would be"
    titled = {"from": "from_offset", "to": "to_offset"}
    titled |= {"offsets_skipped": "skipped", "offsets_read_again": "read_again"}
    table = _fields(answer["jumps"], "source", "partition", **titled)
    to = utc(int(answer["to"])) if answer["to"].isdecimal() else answer["to"]
    said = (
        f"{'jumped' if is_done else 'would jump'} to {to}; "
        f"{number_of(answer['open_records_closed'], 'open record')}, "
        f"{number_of(answer['unpublished_records_closed'], 'finished one')} and "
        f"{number_of(answer['corrections_closed'], 'correction')} {verb} closed unpublished"
    )
    if pending := answer["late_records_closed"]:
        of_late = "was" if is_done and pending == 1 else verb
        said += f", and {number_of(pending, 'late record')} {of_late} corrected no more"
    if answer["forget_again"]:
        said += (
            "\nIt reads records for the first time, which may have keys that were forgotten: "
            "forget these keys once more afterwards."
        )
    return _change_view(said, table, is_done, "--yes", "changed")


def evolve_view(answer: Row) -> Group | str:
    """Return what changes in the rules of a lake, or has changed."""
    since = f"batch {answer['from_batch']:,}"
    if not answer["changes"] and not answer["problems"]:
        return f"the lake has these rules, in epoch {answer['epoch']} from {since} on"
    changes = (
        (field, _rule(field, before), _rule(field, after))
        for change in answer["changes"]
        for field, before, after in _parted(change["field"], change["before"], change["after"])
    )
    table = columns(("", "before", "after"), changes)
    if answer["problems"]:
        problems = [f"{p['where']}: {p['what']}; {p['fix']}" for p in answer["problems"]]
        return Group(table, Text("\n".join(["The change cannot be made:", *problems])))
    is_done = answer["applied"]
    hint = "" if is_done else "\nNothing was changed. Do it with --apply."
    if answer.get("read_first"):
        verb, then = ("was", "before") if is_done else ("is", "now")
        written = f"What `repartition` has written of {' and '.join(answer['read_first'])}"
        rules = f"{verb} read first, by the rules of {then}"
        hint = f"\n{written} {rules}; it ends: start it again{hint}"
    does = "begins" if is_done else "would begin"
    fields = [Text(_field_taken_up(row)) for row in answer["fields"]]
    return Group(table, *fields, f"epoch {answer['epoch']} {does} with {since} of silver{hint}")


def _field_taken_up(row: Row) -> str:
    has = f"{row['records']:,} of the last {row['of']:,} records in bronze have it"
    becomes = "kept from then on" if row["taken_up"] else "still dropped"
    return f"sources.{row['source']}.schema, field {row['field']}: {becomes}; {has}"


def _parted(field: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield a change, of a schema as the changes of its parts: fields, and what else it says."""
    if not field.endswith(".schema") or before is None or after is None:
        yield field, before, after
        return
    old, new = (
        {name: json.dumps(part, ensure_ascii=False) for name, part in _parts(schema).items()}
        for schema in (before, after)
    )
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            yield f"{field}, {name}", old.get(name), new.get(name)


def _parts(schema: str) -> dict[str, Any]:
    """Return what a JSON Schema or an Avro schema says, each field by itself."""
    document = json.loads(schema)
    fields = document.pop("properties", None)
    fields = fields or {field["name"]: field for field in document.pop("fields", ())}
    return {**document, **{f"field {name}": definition for name, definition in fields.items()}}


def _rule(field: str, value: Any) -> str:
    if value is None:
        return "none"
    if field in ("merge.timeout", "merge.tenant_max_lag", "merge.max_future"):
        return duration(value)
    if field == "merge.window":
        return _window(value)
    return spelled(value) if isinstance(value, (dict, list)) else str(value)


def _window(window: Mapping[str, int]) -> str:
    return f"gap {duration(window['gap_ms'])}, max {duration(window['max_ms'])}"


# -- checks


def check_view(answer: Row) -> Group:
    """Return what a check has found: a line for each suite and table, and for each expectation not
    met.
    """
    results, lines = answer["results"], list[RenderableType]()
    failed = [row for row in results if not row["success"]]
    if results:
        suites: dict[tuple[str, str], list[Row]] = {}
        for row in results:
            suites.setdefault((row["table"], row["suite"]), []).append(row)
        met = {at: sum(row["success"] for row in rows) for at, rows in suites.items()}
        lines.append(
            columns(
                ("table", "suite", "new rows", "expectations", "met"),
                (
                    (*at, rows[0]["total"], len(rows), Text(str(met[at]), style))
                    for at, rows in suites.items()
                    for style in ["green" if met[at] == len(rows) else "red"]
                ),
            )
        )
    lines += [
        f"[red]not met[/] {escape(row['table'])}: {escape(row['expectation'])} "
        f"({escape(_observation(row))})"
        for row in failed
    ]
    lines += [
        f"[yellow]not looked at[/] {escape(name)}: {escape(why)}"
        for name, why in answer["skipped"].items()
    ]
    if answer["nothing_new"]:
        names = escape(", ".join(answer["nothing_new"]))
        is_empty = answer["version"] is None
        said = "nothing to check yet" if is_empty else "nothing new since the last check"
        lines.append(f"{said}: {names}")
    if results:
        some = f"{len(failed)} of {len(results)} expectations are not met"
        lines.append(f"[bold]{some if failed else 'every expectation is met'}[/]")
    return Group(*lines)


def _observation(row: Row) -> str:
    if row["unexpected"] is not None:
        return f"{row['unexpected']:,} of {row['total']:,} rows are against it"
    if row["trouble"] is not None:
        return f"it could not be checked: {row['trouble']}"
    return "it is not so" if row["observed"] is None else f"found instead: {row['observed']}"


def rebuild_view(answer: Row) -> Group:
    """Return what silver holds beside what the rebuild holds."""
    timeouts, windows = answer["timeout_ms"], answer["window"]
    lags = answer.get("tenant_max_lag_ms")
    rules = []
    for name in ("lake", "rebuilt"):
        window = windows[name]
        rule = f"T = {duration(timeouts[name])}" if window is None else _window(window)
        rules.append(rule if lags is None else f"{rule}, lag {duration(lags[name])}")
    titles_of = {"records": "merge records", "waiting": "waiting for their tenant's clock"}
    one, other = answer["lake"], answer["rebuilt"]
    counts = [
        (titles_of.get(name, f"  {name.replace('_', ' ')}"), one[name], other[name])
        for name in ("records", "open", "timed_out", "valid", "complete", "waiting")
        if name in one
    ]
    counts += [
        (f"{source}: {name.replace('_', ' ')}", n, other["sources"][source][name])
        for source, of_source in one["sources"].items()
        for name, n in of_source.items()
    ]
    titles = ("", f"lake, {rules[0]}", f"rebuilt, {rules[1]}", "difference")
    rows = ((title, a, b, f"{b - a:+,}" if a != b else "-") for title, a, b in counts)
    hint = "complete: with parts of every source"
    if None in windows.values():
        hint = f"T: the timeout; {hint}"
    if rules[0] == rules[1]:
        hint += f"\nRow by row: watersmeet verify --against {escape(answer['into'])}"
    if (since := answer["after_batch"]) is not None:
        hint += f"\nWhat was final by batch {since:,} does not count: `keep` has deleted rows of it"
    generation = f" of generation {answer['generation']}" if answer.get("generation") else ""
    heading = f"silver up to batch {answer['batch']}{generation}, derived again into "
    return Group(heading + escape(answer["into"]), columns(titles, rows), hint)


# -- explain and try

_REPEATED: Final = "duplicates: merged, and no parts"
_SECTIONS: Final = (
    ("late", "late: never merged", ("event_time", "position", "batch", "version")),
    ("duplicates", _REPEATED, ("event_time", "id", "of_offset", "batch", "version")),
    ("waiting", "in bronze, waiting for the clock", ("event_time",)),
    ("quarantined", "refused, with this Kafka key", ("reason", "detail")),
)
_TRIED: Final = (
    ("late", "late: never merged", ("key", "event_time", "position")),
    (
        "too_many",
        "late: their merge records have as many versions as they may (too_many)",
        ("key", "event_time"),
    ),
    ("duplicates", _REPEATED, ("key", "event_time", "id", "of_offset")),
    ("excess", "excess: their merge records are too large", ("key", "event_time")),
    ("quarantined", "refused", ("reason", "detail")),
    ("waiting", "waiting for the clock", ("key", "event_time")),
)


def explain_view(answer: Row) -> Group:
    """Return the history of a key: its newest merge records, and then what was not merged.

    Each merge record is a paragraph, the newest first.
    """
    key, moment, when = escape(repr(answer["key"])), answer["as_of"], ""
    if moment is not None:
        at = utc(moment["at"])
        when = f" as of version {moment['version']} of silver ({at})"
        if moment["version"] is None:
            when = f" as of {at}, before silver's first version"
    newest = sorted(
        answer["records"], key=lambda r: (r["event_time"], r["partition"]), reverse=True
    )
    lines = [part for record in newest[:SHOWN_RECORDS] for part in _merge_record(record)]
    for name, title, names in _SECTIONS:
        lines += _unmerged(title, answer[name], names)
    warnings = warnings_view(answer.get("warnings", []))
    if not lines:
        near = ", ".join(escape(repr(similar)) for similar in answer["near"])
        similar = f"; similar keys: {near}" if near else ""
        return Group(f"nothing is known of the key {key}{when}{similar}", *warnings)
    some = ", the newest first" if len(newest) > 1 else ""
    if len(newest) > SHOWN_RECORDS:
        some = f"; the newest {SHOWN_RECORDS} are shown, and all by --json"
    count = number_of(len(newest), "merge record")
    return Group(f"[bold]{key}[/]: {count}{when}{some}", "", *lines, *warnings)


def _unmerged(title: str, rows: Sequence[Row], names: Sequence[str]) -> Iterator[RenderableType]:
    if not rows:
        return
    many, tenant = "", ("tenant",) if "tenant" in rows[0] else ()
    if len(rows) > SHOWN_RECORDS:
        many = f": {len(rows):,}, the last {SHOWN_RECORDS} are shown"
        rows = sorted(rows, key=lambda row: row.get("event_time", 0))[-SHOWN_RECORDS:]
    yield f"[bold]{title.removeprefix('in bronze, ' if tenant else '')}[/]{many}"
    yield _records(rows, *names, *tenant)
    for row in rows:
        if whys := [row[name] for name in ("reason", "outcome") if name in {*row} - {*names}]:
            yield f"  {escape(_place(row))}: {escape('; '.join(whys))}"


def _merge_record(record: Row) -> Iterator[RenderableType]:
    valid = {None: "", True: " · valid", False: " · not valid"}[record["valid"]]
    tenant = f" · tenant {escape(repr(record['tenant']))}" if "tenant" in record else ""
    yield (
        f"[bold]partition {record['partition']}{tenant} · {_span(record)}[/] · "
        f"{record['status'].replace('_', ' ')}{valid}{_published_as(record['published'])}"
    )
    yield f"  {escape(record['reason'])}"
    if heads := (record["closed"] or {}).get("heads"):
        texts = (f"{name} {utc(head)}" for name, head in heads.items())
        yield f"  heads then: {escape(', '.join(texts))}"
    parts = record["parts"]
    if len(parts) > SHOWN_PARTS:
        yield f"  {len(parts) - SHOWN_PARTS:,} earlier parts, then"
    names = ("event_time", "position", "rule", "batch", "version")
    yield _records(parts[-SHOWN_PARTS:], *names)
    for version in record["versions"]:
        judged = "valid" if version["valid"] else f"not valid ({version['invalid_reason']})"
        yield escape(
            f"  version {version['version']}: with {_place(version)}, settled at "
            f"{utc(version['settled_at'])} · {judged}{_published_as(version['published'])}"
        )
    yield ""


def _span(record: Row) -> str:
    return f"{utc(record['event_time'])} to {utc(record['last_event_time'])}"


def _published_as(out: Row | None) -> str:
    if out is None:
        return ""
    numbers = {"as number": out["seq"], "at offset": out["offset"]}
    known = (f" {name} {number}" for name, number in numbers.items() if number is not None)
    return f" · published{''.join(known)}"


def try_view(answer: Row) -> Group:
    """Return what became of the records of a file: merge records, messages, and then what was not
    merged.
    """

    def tenant_of(row: Row) -> str:
        return f" · tenant {row['tenant']!r}" if "tenant" in row else ""

    counts = [f"{source} [bold]{file['records']:,}[/]" for source, file in answer["read"].items()]
    lines: list[RenderableType] = [f"records: {' · '.join(counts)}", ""]
    for row in answer["records"]:
        status = row["status"].replace("_", " ") + (" at the end" if row["at_end"] else "")
        status += f" · not valid ({row['invalid_reason']})" if row["valid"] is False else ""
        parts = (f"{p['source']}@{p['offset']} (line {p['line']})" for p in row["parts"])
        place = escape(f"partition {row['partition']}{tenant_of(row)}")
        key = escape(repr(row["key"]))
        lines += [f"[bold]{key}[/] · {place} · {_span(row)} · {status}", f"  {', '.join(parts)}"]
    lines += [""] if answer["records"] else ["no merge record", ""]
    for row in answer["messages"]:
        place = f"partition {row['partition']} · seq {row['seq']}{tenant_of(row)}"
        key = escape(f"{place} · key {row['key']!r}")
        value = escape(str(row["value"]))
        lines += [f"[bold]message[/] · {key} · timestamp {row['timestamp']}", value, ""]
    for row in answer["corrections"]:
        late = f"with {_place(row['late'])} (line {row['late']['line']})"
        place = escape(f"version {row['version']} of {row['id']} · seq {row['seq']} · {late}")
        lines += [f"[bold]correction[/] · {place}", escape(str(row["value"])), ""]
    for name, title, names in _TRIED:
        if rows := answer[name]:
            more = {
                n: (n,) if n in rows[0] and n not in names else () for n in ("tenant", "position")
            }
            table = _records(rows, "line", *more["tenant"], *names, *more["position"])
            lines += [f"[bold]{title}[/]", table, ""]
    return Group(*lines)
