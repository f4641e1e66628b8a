"""The answers as people see them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from watersmeet.configuration.sources import spelled
from watersmeet.core.texts import printable
from watersmeet.core.times import LAST_EVENT_TIME_MS
from watersmeet.errors import Problem

_EPOCH: Final = datetime(1970, 1, 1)

_ALWAYS: Final = ("open", "waiting", "timed_out", "published", "late", "quarantined")
"""Counts of a partition that are shown also where they are 0."""

_COUNTS: Final = (
    *("open", "waiting", "timed_out", "published", "not_valid", "to_publish", "behind_sink"),
    *("not_in_silver", "in_former_sink", "late", "corrections", "corrections_published"),
    *("too_many", "duplicates", "excess", "quarantined"),
)
"""Counts of a partition in the order in which they are shown."""

_STATE_STYLES = {"active": "green", "held": "yellow", "idle": "cyan", "waiting": "red"}


def status_view(answer: dict[str, Any]) -> Group:
    """Return a paragraph for every partition, then the last checks of suites, then warnings.

    A paragraph has the partition's clock and counts, then a line for each source.
    """
    partitions = [part for partition in answer["partitions"] for part in _partition(partition)]
    return Group(
        *partitions, *_quality(answer["quality"]), *warnings_view(answer.get("warnings", []))
    )


def warnings_view(warnings: list[dict[str, str]]) -> list[Text]:
    """Return a paragraph for each warning: where, what looks wrong, and what to do about it."""
    return [_finding("warning", "yellow", warning) for warning in warnings]


def problems_view(answer: dict[str, Any]) -> Group:
    """Return a paragraph for each problem, then warnings: where, what is wrong, how to fix it."""
    problems = [_finding("problem", "red", problem) for problem in answer["problems"]]
    return Group(*problems, *warnings_view(answer.get("warnings", [])))


def _finding(name: str, style: str, finding: Mapping[str, str]) -> Text:
    return Text.assemble((name, style), f" {Problem(**finding)}")


def _quality(results: list[dict[str, Any]]) -> list[RenderableType]:
    if not results:
        return []
    table = Table(
        "suite", "table", "checked at", "expectations", "not met", box=None, header_style="dim"
    )
    for row in results:
        failed = f"[{'red' if row['failed'] else 'green'}]{row['failed']:,}[/]"
        table.add_row(
            escape(row["suite"]),
            row["table"],
            utc(row["checked_at"]),
            f"{row['expectations']:,}",
            failed,
        )
    return ["[bold]quality[/]  (watersmeet check)", table]


def _partition(partition: dict[str, Any]) -> tuple[RenderableType, ...]:
    shown = [name for name in _COUNTS if partition.get(name) or name in {*_ALWAYS} & {*partition}]
    facts = " · ".join(
        f"{name.replace('_', ' ')} [bold]{partition[name]:,}[/]"
        f"{_reasons(partition) if name == 'not_valid' else ''}"
        for name in shown
    )
    sources = Table("", "state", "head", "lead", "lag", "", box=None, header_style="dim")
    for name, at in partition["sources"].items():
        state = f"[{_STATE_STYLES[at['state']]}]{at['state']}[/]"
        sources.add_row(
            name,
            state,
            utc(at["head"]),
            duration(at["lead"]),
            f"{at['lag']:,}",
            transaction_text(at),
        )
    stuck = "".join(
        f"  [red]waits for {name}\\[{partition['partition']}][/]" for name in waited_for(partition)
    )
    due = partition["next_due"]
    if not stuck and due is not None and "tenants" not in partition:
        stuck = f"  next due {utc(due)}"
    title = f"[bold]partition {partition['partition']}[/]  clock {utc(partition['clock'])}{stuck}"
    return title, f"  {facts}", *_tenants(partition), sources, ""


def _reasons(partition: dict[str, Any]) -> str:
    reasons = partition["not_valid_reasons"]
    texts = [name.replace("_", " ") for name in reasons]
    if len(texts) > 1:
        texts = [f"{text} {reasons[name]:,}" for text, name in zip(texts, reasons, strict=True)]
    return f" ({', '.join(texts)})"


def _tenants(partition: dict[str, Any]) -> list[RenderableType]:
    """Return a line that says how many tenants have something open or waiting.

    It also says which of them is behind, and whose record is far ahead.
    """
    if "tenants" not in partition:
        return []
    facts = [f"tenants [bold]{partition['tenants']:,}[/]"]
    slowest = partition["slowest"]
    leading = partition["leading"]
    if slowest is not None and slowest["clock"] is not None:
        facts.append(
            f"slowest {escape(repr(slowest['tenant']))} "
            f"{duration(partition['clock'] - slowest['clock'])} behind the clock"
        )
    if (
        leading is not None
        and partition["clock"] is not None
        and leading["head"] > partition["clock"]
    ):
        tenant = "nobody" if leading["tenant"] is None else repr(leading["tenant"])
        facts.append(
            f"leading {escape(tenant)} {duration(leading['head'] - partition['clock'])} ahead on "
            f"{leading['source']}"
        )
    return [f"  {' · '.join(facts)}"]


def transaction_text(row: Mapping[str, Any]) -> str:
    """Return a sentence about another producer's open transaction; empty where the row has none."""
    if "transaction" not in row:
        return ""
    transaction = row["transaction"]
    return (
        f"[red]a transaction is open since {utc(transaction['since'])}: "
        f"{transaction['behind']:,} offsets wait behind it[/]"
    )


def waited_for(partition: dict[str, Any]) -> list[str]:
    """Return the sources whose next record a partition's clock waits for.

    None are returned unless another source has records that wait for it.
    """
    sources = partition["sources"]
    if not any(at["state"] == "held" for at in sources.values()):
        return []
    return [name for name, at in sources.items() if at["head"] == partition["clock"]]


def maintain_view(answer: dict[str, Any]) -> Table:
    """Return a table of how many files each table had and has now, and how many old ones were
    removed.
    """
    table = Table(
        "table", "files before", "files now", "old files removed", box=None, header_style="dim"
    )
    for row in answer["tables"]:
        table.add_row(*[str(value) for value in row.values()])
    return table


def preview_view(rows: list[dict[str, Any]], warnings: list[dict[str, str]]) -> Group:
    """Return what a run would read, a line for each topic-partition, and then what looks wrong."""
    table = Table(
        "source",
        "partition",
        "from",
        "until",
        "offsets",
        "because of",
        "",
        box=None,
        header_style="dim",
    )
    for row in rows:
        offsets = row["until_offset"] - row["from_offset"]
        numbers = (row["partition"], row["from_offset"], row["until_offset"], f"{offsets:,}")
        table.add_row(row["source"], *map(str, numbers), row["because"], transaction_text(row))
    return Group(table, *warnings_view(warnings))


def redrive_view(answer: dict[str, Any]) -> Group:
    """Return what a redrive sends, or has sent."""
    table = Table(
        "table",
        "source",
        "topic",
        "refused",
        "redriven before",
        "redriven now",
        box=None,
        header_style="dim",
    )
    for row in answer["records"]:
        numbers = (row["found"], row["before"], row["after"])
        table.add_row(
            row["table"], row["source"], row["topic"], *[f"{number:,}" for number in numbers]
        )
    remaining = sum(row["found"] - row["after"] for row in answer["records"])
    did = f"{answer['sent']:,} records refused as {answer['reason']} were sent again"
    would = f"{remaining:,} records refused as {answer['reason']} would be sent again"
    hint = "" if answer["applied"] else "\nNothing was sent. Do it with --apply."
    return Group(did if answer["applied"] else would, table, hint)


def repartition_view(answer: dict[str, Any]) -> str:
    """Return what was repartitioned, and where the topics that were written end."""
    lines = []
    for row in answer["sources"]:
        ends = ", ".join(f"[{partition}]@{end}" for partition, end in row["ends"].items())
        lines.append(
            f"{row['source']}: {row['records']:,} records of {row['from']} written to "
            f"{row['topic']}, which ends at {ends}"
        )
    return "\n".join(lines)


def forget_view(answer: dict[str, Any]) -> Group:
    """Return where a key is, or was, and what holds it for longer."""
    table = Table("table", "records before", "records after", box=None, header_style="dim")
    for row in answer["tables"]:
        table.add_row(row["table"], f"{row['before']:,}", f"{row['after']:,}")
    elsewhere = Table("held elsewhere", "records", "until", box=None, header_style="dim")
    for row in answer["held"]:
        elsewhere.add_row(
            row["where"], "" if row["records"] is None else f"{row['records']:,}", utc(row["until"])
        )
    hint = "" if answer["applied"] else "\nNothing was changed. Do it with --apply."
    sent = f"\nTombstones sent: {answer['tombstones']}" if answer["tombstones"] else ""
    return Group(table, "", elsewhere, hint or sent)


def reset_view(answer: dict[str, Any]) -> Group:
    """Return what a jump does, or has done."""
    does = "jumped" if answer["done"] else "would jump"
    table = Table(
        "source", "partition", "from", "to", "skipped", "read again", box=None, header_style="dim"
    )
    for jump in answer["jumps"]:
        numbers = [
            jump[name]
            for name in ("partition", "from_offset", "to_offset", "skipped", "read_again")
        ]
        table.add_row(jump["source"], *[f"{number:,}" for number in numbers])
    closed = (
        f"{answer['open_records_closed']:,} open records and "
        f"{answer['unpublished_records_closed']:,} finished ones"
    )
    closes = f"{closed} {'were' if answer['done'] else 'would be'} closed unpublished"
    hint = "" if answer["done"] else "\nNothing was changed. Do it with --yes."
    return Group(f"{does} to {answer['to']}; {closes}", table, hint)


def evolve_view(answer: dict[str, Any]) -> Group | str:
    """Return what changes in the rules of a lake, or has changed."""
    if not answer["changes"] and not answer["problems"]:
        return (
            f"the lake has these rules, in epoch {answer['epoch']} from batch "
            f"{answer['from_batch']:,} on"
        )
    table = Table("", "before", "after", box=None, header_style="dim")
    for change in answer["changes"]:
        for field, before, after in _parted(change["field"], change["before"], change["after"]):
            table.add_row(Text(field), Text(_rule(field, before)), Text(_rule(field, after)))
    if answer["problems"]:
        problems = [f"{p['where']}: {p['what']}; {p['fix']}" for p in answer["problems"]]
        return Group(table, Text("\n".join(["The change cannot be made:", *problems])))
    does = "begins" if answer["applied"] else "would begin"
    hint = "" if answer["applied"] else "\nNothing was changed. Do it with --apply."
    if answer.get("read_first"):
        verb = (
            "was read first, by the rules of before"
            if answer["applied"]
            else "is read first, by the rules of now"
        )
        hint = (
            f"\nWhat `repartition` has written of {' and '.join(answer['read_first'])} {verb}; it "
            f"ends: start it again{hint}"
        )
    fields = [Text(_field_taken_up(row)) for row in answer["fields"]]
    return Group(
        table,
        *fields,
        f"epoch {answer['epoch']} {does} with batch {answer['from_batch']:,} of silver{hint}",
    )


def _field_taken_up(row: dict[str, Any]) -> str:
    """Return what becomes of a field that the schema of the lake lacks."""
    has = f"{row['records']:,} of the last {row['of']:,} records in bronze have it"
    becomes = "kept from then on" if row["taken_up"] else "still dropped"
    return f"sources.{row['source']}.schema, field {row['field']}: {becomes}; {has}"


def _parted(field: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield a change.

    A change of a schema is yielded as the changes of its parts: fields, and what else it says.
    """
    if not field.endswith(".schema") or before is None or after is None:
        yield field, before, after
        return
    old_parts = _parts(before)
    new_parts = _parts(after)
    for name in dict.fromkeys([*old_parts, *new_parts]):
        old, new = (
            json.dumps(parts[name], ensure_ascii=False) if name in parts else None
            for parts in (old_parts, new_parts)
        )
        if old != new:
            yield f"{field}, {name}", old, new


def _parts(schema: str) -> dict[str, Any]:
    """Return what a JSON Schema or an Avro schema says, each field by itself."""
    document = json.loads(schema)
    fields = document.pop("properties", None)
    fields = fields or {field["name"]: field for field in document.pop("fields", ())}
    return {**document, **{f"field {name}": definition for name, definition in fields.items()}}


def _rule(field: str, value: Any) -> str:
    """Return a rule as text that fits a line."""
    if field in ("merge.timeout", "merge.tenant_max_lag", "merge.max_future") and value is not None:
        return duration(value)
    if field == "merge.window" and value is not None:
        return _window(value)
    if isinstance(value, (dict, list)):
        return spelled(value)
    return "none" if value is None else str(value)


def check_view(answer: dict[str, Any]) -> Group:
    """Return what a check has found: a line for each suite and table, and for each expectation not
    met.
    """
    suites: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in answer["results"]:
        suites.setdefault((row["table"], row["suite"]), []).append(row)
    table = Table("table", "suite", "new rows", "expectations", "met", box=None, header_style="dim")
    failed = [row for row in answer["results"] if not row["success"]]
    for (name, suite), rows in suites.items():
        met = sum(row["success"] for row in rows)
        style = "green" if met == len(rows) else "red"
        table.add_row(
            escape(name),
            escape(suite),
            f"{rows[0]['total']:,}",
            str(len(rows)),
            f"[{style}]{met}[/]",
        )
    lines: list[RenderableType] = [table] if suites else []
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
        lines.append(
            f"nothing new since the last check: {escape(', '.join(answer['nothing_new']))}"
        )
    if suites:
        verdict = (
            f"{len(failed)} of {len(answer['results'])} expectations are not met"
            if failed
            else "every expectation is met"
        )
        lines.append(f"[bold]{verdict}[/]")
    return Group(*lines)


def _observation(row: dict[str, Any]) -> str:
    """Return, as text, what a check observed where an expectation is not met."""
    if row["unexpected"] is not None:
        return f"{row['unexpected']:,} of {row['total']:,} rows are against it"
    if row["trouble"] is not None:
        return f"it could not be checked: {row['trouble']}"
    return "it is not so" if row["observed"] is None else f"found instead: {row['observed']}"


def rebuild_view(answer: dict[str, Any]) -> Group:
    """Return what silver holds beside what the rebuild holds."""
    lake = answer["lake"]
    rebuilt = answer["rebuilt"]
    timeouts = answer["timeout_ms"]
    windows = answer["window"]
    rules = [
        f"T = {duration(timeouts[n])}" if windows[n] is None else _window(windows[n])
        for n in ("lake", "rebuilt")
    ]
    if (lags := answer.get("tenant_max_lag_ms")) is not None:
        rules = [
            f"{rule}, lag {duration(lags[n])}"
            for rule, n in zip(rules, ("lake", "rebuilt"), strict=True)
        ]
    titles = [f"{name}, {rule}" for name, rule in zip(("lake", "rebuilt"), rules, strict=True)]
    first = Column("", no_wrap=True)
    table = Table(first, *titles, "difference", box=None, header_style="dim", padding=(0, 2, 0, 0))
    titles_of = {"records": "merge records", "waiting": "waiting for their tenant's clock"}
    for name in ("records", "open", "timed_out", "valid", "complete", "waiting"):
        if name not in lake:
            continue
        title = titles_of.get(name, f"  {name.replace('_', ' ')}")
        table.add_row(title, *_compared(lake[name], rebuilt[name]))
    for source, lake_counts in lake["sources"].items():
        for name, count in lake_counts.items():
            table.add_row(
                f"{source}: {name.replace('_', ' ')}",
                *_compared(count, rebuilt["sources"][source][name]),
            )
    hint = "complete: with parts of every source"
    if None in windows.values():
        hint = f"T: the timeout; {hint}"
    if rules[0] == rules[1]:
        hint += f"\nRow by row: watersmeet verify --against {escape(answer['into'])}"
    generation = f" of generation {answer['generation']}" if answer.get("generation") else ""
    heading = f"silver up to batch {answer['batch']}{generation}, derived again into "
    return Group(heading + escape(answer["into"]), table, hint)


def _window(window: Mapping[str, int]) -> str:
    """Return a window by gap as text; its lengths are in ms."""
    return f"gap {duration(window['gap_ms'])}, max {duration(window['max_ms'])}"


def _compared(one: int, other: int) -> tuple[str, str, str]:
    return f"{one:,}", f"{other:,}", f"{other - one:+,}" if other != one else "-"


_TOO_MANY = "late: their merge records have as many versions as they may (too_many)"
_REPEATED = "duplicates: merged, and no parts"
_SECTIONS = (
    ("late", "late: never merged", ("event_time", "position", "batch", "version")),
    ("duplicates", _REPEATED, ("event_time", "id", "of_offset", "batch", "version")),
    ("waiting", "in bronze, waiting for the clock", ("event_time",)),
    ("quarantined", "refused, with this Kafka key", ("reason", "detail")),
)


SHOWN_RECORDS = 20
"""Maximum number of merge records of a key that are shown, the newest ones, and of each kind of
records that were not merged.
"""
SHOWN_PARTS = 50
"""Maximum number of parts of a merge record that are shown, the newest ones."""


def explain_view(answer: dict[str, Any]) -> Group:
    """Return the history of a key: its newest merge records, and then what was not merged.

    Each merge record is a paragraph, the newest first.
    """
    key = escape(repr(answer["key"]))
    moment = answer["as_of"]
    when = (
        ""
        if moment is None
        else f" as of {utc(moment['at'])}, before silver's first version"
        if moment["version"] is None
        else f" as of version {moment['version']} of silver ({utc(moment['at'])})"
    )
    newest = sorted(
        answer["records"],
        key=lambda record: (record["event_time"], record["partition"]),
        reverse=True,
    )
    lines: list[RenderableType] = [
        part for record in newest[:SHOWN_RECORDS] for part in _merge_record(record)
    ]
    for name, title, columns in _SECTIONS:
        if rows := answer[name]:
            tenant_columns = ["tenant"] if "tenant" in rows[0] else []
            many = ""
            if len(rows) > SHOWN_RECORDS:
                many = f": {len(rows):,}, the last {SHOWN_RECORDS} are shown"
                rows = sorted(rows, key=lambda row: row.get("event_time", 0))[-SHOWN_RECORDS:]
            lines += [
                f"[bold]{title.removeprefix('in bronze, ' if tenant_columns else '')}[/]{many}",
                _records(rows, *columns, *tenant_columns),
            ]
            for row in rows:
                reasons = [row[at] for at in ("reason", "outcome") if at in {*row} - {*columns}]
                if reasons:
                    lines.append(f"  {escape(_place(row))}: {escape('; '.join(reasons))}")
    if not lines:
        near = ", ".join(escape(repr(similar)) for similar in answer["near"])
        nothing = f"nothing is known of the key {key}{when}" + (
            f"; similar keys: {near}" if near else ""
        )
        return Group(nothing, *warnings_view(answer.get("warnings", [])))
    count = len(answer["records"])
    some = (
        f"; the newest {SHOWN_RECORDS} are shown, and all by --json"
        if count > SHOWN_RECORDS
        else ""
    )
    some = some or (", the newest first" if count > 1 else "")
    return Group(
        f"[bold]{key}[/]: {count:,} merge record{'s' * (count != 1)}{when}{some}",
        "",
        *lines,
        *warnings_view(answer.get("warnings", [])),
    )


def _merge_record(record: dict[str, Any]) -> tuple[RenderableType, ...]:
    closed = record["closed"]
    published = _published_as(record["published"])
    valid = {None: "", True: " · valid", False: " · not valid"}[record["valid"]]
    span = f"{utc(record['event_time'])} to {utc(record['last_event_time'])}"
    heads = (
        ""
        if closed is None
        else ", ".join(f"{name} {utc(head)}" for name, head in closed["heads"].items())
    )
    tenant = f" · tenant {escape(repr(record['tenant']))}" if "tenant" in record else ""
    first = (
        f"[bold]partition {record['partition']}{tenant} · {span}[/] · "
        f"{record['status'].replace('_', ' ')}{valid}{published}"
    )
    lines = [
        first,
        f"  {escape(record['reason'])}",
        *([f"  heads then: {escape(heads)}"] if heads else []),
    ]
    earlier = len(record["parts"]) - SHOWN_PARTS
    lines += [f"  {earlier:,} earlier parts, then"] if earlier > 0 else []
    return (
        *lines,
        _records(
            record["parts"][-SHOWN_PARTS:], "event_time", "position", "rule", "batch", "version"
        ),
        *(f"  {escape(_version(version))}" for version in record["versions"]),
        "",
    )


def _version(version: dict[str, Any]) -> str:
    """Return a correction of a merge record in one line."""
    valid = "valid" if version["valid"] else f"not valid ({version['invalid_reason']})"
    return (
        f"version {version['version']}: with {_place(version)}, settled at "
        f"{utc(version['settled_at'])} · {valid}{_published_as(version['published'])}"
    )


def _published_as(out: dict[str, Any] | None) -> str:
    return "" if out is None else f" · published as number {out['seq']} at offset {out['offset']}"


def _records(rows: list[dict[str, Any]], *more: str) -> Table:
    """Return a table with a line for each record, narrow enough for a terminal.

    A position is shown as its distance from the event time.
    """
    table = Table(
        "record",
        *[n.replace("_", " ") for n in more],
        box=None,
        header_style="dim",
        padding=(0, 2, 0, 0),
    )
    for row in rows:
        cells = {name: "-" if row[name] is None else printable(str(row[name])) for name in more}
        cells |= {"event_time": utc(row["event_time"])} if "event_time" in more else {}
        if row.get("position") is not None:
            cells |= (
                {"position": f"+{duration(row['position'] - row['event_time'])}"}
                if "position" in more
                else {}
            )
        table.add_row(*map(escape, (_place(row), *cells.values())))
    return table


def _place(row: dict[str, Any]) -> str:
    """Return a record's coordinates in Kafka."""
    source = "" if row["source"] == row["topic"] else f"{row['source']}: "
    return f"{source}{row['topic']}[{row['partition']}]@{row['offset']}"


def try_view(answer: dict[str, Any]) -> Group:
    """Return what became of the records of a file: merge records, messages, and then what was not
    merged.
    """
    counts = [f"{source} [bold]{file['records']:,}[/]" for source, file in answer["read"].items()]
    lines: list[RenderableType] = [f"records: {' · '.join(counts)}", ""]
    for row in answer["records"]:
        status = row["status"].replace("_", " ") + (" at the end" if row["at_end"] else "")
        status += f" · not valid ({row['invalid_reason']})" if row["valid"] is False else ""
        span = f"{utc(row['event_time'])} to {utc(row['last_event_time'])}"
        parts = ", ".join(
            f"{part['source']}@{part['offset']} (line {part['line']})" for part in row["parts"]
        )
        place = f"partition {row['partition']}" + (
            f" · tenant {row['tenant']!r}" if "tenant" in row else ""
        )
        lines += [
            f"[bold]{escape(repr(row['key']))}[/] · {escape(place)} · {span} · {status}",
            f"  {parts}",
        ]
    lines += [""] if answer["records"] else ["no merge record", ""]
    for message in answer["messages"]:
        tenant = f" · tenant {message['tenant']!r}" if "tenant" in message else ""
        place = (
            f"partition {message['partition']} · seq {message['seq']}{tenant} · key "
            f"{message['key']!r}"
        )
        lines += [
            f"[bold]message[/] · {escape(place)} · timestamp {message['timestamp']}",
            escape(str(message["value"])),
            "",
        ]
    for message in answer["corrections"]:
        place = (
            f"version {message['version']} of {message['id']} · seq {message['seq']} · with "
            f"{_place(message['late'])} (line {message['late']['line']})"
        )
        lines += [f"[bold]correction[/] · {escape(place)}", escape(str(message["value"])), ""]
    for name, title, columns in (
        ("late", "late: never merged", ("key", "event_time", "position")),
        ("too_many", _TOO_MANY, ("key", "event_time")),
        ("duplicates", _REPEATED, ("key", "event_time", "id", "of_offset")),
        ("excess", "excess: their merge records are too large", ("key", "event_time")),
        ("quarantined", "refused", ("reason", "detail")),
        ("waiting", "waiting for the clock", ("key", "event_time")),
    ):
        if rows := answer[name]:
            tenant_columns = [
                column
                for column in ("tenant", "position")
                if column in rows[0] and column not in columns
            ]
            lines += [
                f"[bold]{title}[/]",
                _records(rows, "line", *tenant_columns[:1], *columns, *tenant_columns[1:]),
                "",
            ]
    return Group(*lines)


def utc(ms: int | None) -> str:
    """Return epoch ms as a time in UTC, to the millisecond.

    A dash for None, and the number where no calendar has such a time.
    """
    if ms is None:
        return "-"
    if not 0 <= ms <= LAST_EVENT_TIME_MS:
        return f"{ms} ms (out of range)"
    time = _EPOCH + timedelta(milliseconds=ms)
    return f"{time.isoformat(sep=' ', timespec='milliseconds')}Z"


def duration(ms: int | None) -> str:
    """Return milliseconds in the two largest units that they fill; a dash for None."""
    if ms is None:
        return "-"
    units = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)]
    parts = []
    for name, size in units:
        count, ms = divmod(ms, size)
        if count:
            parts.append(f"{count}{name}")
    return " ".join(parts[:2]) or "0"
