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

from pipelines.core.times import LAST_EVENT_TIME_MS

_EPOCH: Final = datetime(1970, 1, 1)

_STATE_STYLES = {"active": "green", "held": "yellow", "idle": "cyan", "waiting": "red"}


def status_view(found: dict[str, Any]) -> Group:
    """Return a paragraph for every partition, then the last checks of suites, then warnings.

    A paragraph has the partition's clock and counts, then a line for each source.
    """
    partitions = [part for partition in found["partitions"] for part in _partition(partition)]
    return Group(
        *partitions, *_quality(found["quality"]), *warnings_view(found.get("warnings", []))
    )


def warnings_view(found: list[dict[str, str]]) -> list[Text]:
    """Return a paragraph for each warning: where, what looks wrong, and what to do about it."""
    return [
        Text.assemble(("warning", "yellow"), f" {each['where']}: {each['what']}; {each['fix']}")
        for each in found
    ]


def _quality(found: list[dict[str, Any]]) -> list[RenderableType]:
    if not found:
        return []
    table = Table(
        "suite", "table", "checked at", "expectations", "not met", box=None, header_style="dim"
    )
    for row in found:
        failed = f"[{'red' if row['failed'] else 'green'}]{row['failed']:,}[/]"
        table.add_row(
            escape(row["suite"]),
            row["table"],
            utc(row["checked_at"]),
            f"{row['expectations']:,}",
            failed,
        )
    return ["[bold]quality[/]  (watersmeet check)", table]


def _partition(found: dict[str, Any]) -> tuple[RenderableType, ...]:
    counts = ("open", "waiting", "timed_out", "late", "quarantined", "published", "behind_sink")
    shown = [name for name in counts if name in found and (found[name] or name != "behind_sink")]
    facts = " · ".join(f"{name.replace('_', ' ')} [bold]{found[name]:,}[/]" for name in shown)
    sources = Table("", "state", "head", "lead", "lag", "", box=None, header_style="dim")
    for name, at in found["sources"].items():
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
        f"  [red]waits for {name}\\[{found['partition']}][/]" for name in waited_for(found)
    )
    title = f"[bold]partition {found['partition']}[/]  clock {utc(found['clock'])}{stuck}"
    return title, f"  {facts}", *_tenants(found), sources, ""


def _tenants(found: dict[str, Any]) -> list[RenderableType]:
    """Return a line that says how many tenants have something open or waiting.

    It also says which of them is behind, and whose record is far ahead.
    """
    if "tenants" not in found:
        return []
    told = [f"tenants [bold]{found['tenants']:,}[/]"]
    slowest = found["slowest"]
    leading = found["leading"]
    if slowest is not None and slowest["clock"] is not None:
        told.append(
            f"slowest {escape(repr(slowest['tenant']))} "
            f"{duration(found['clock'] - slowest['clock'])} behind the clock"
        )
    if leading is not None and found["clock"] is not None and leading["head"] > found["clock"]:
        whose = "nobody" if leading["tenant"] is None else repr(leading["tenant"])
        told.append(
            f"leading {escape(whose)} {duration(leading['head'] - found['clock'])} ahead on "
            f"{leading['source']}"
        )
    return [f"  {' · '.join(told)}"]


def transaction_text(row: Mapping[str, Any]) -> str:
    """Return what is said of an open transaction of another producer; nothing where the row has
    none."""
    if "transaction" not in row:
        return ""
    found = row["transaction"]
    return (
        f"[red]a transaction is open since {utc(found['since'])}: {found['behind']:,} offsets wait "
        "behind it[/]"
    )


def waited_for(found: dict[str, Any]) -> list[str]:
    """Return the sources whose next record a partition's clock waits for.

    None are returned unless another source has records that wait for it.
    """
    sources = found["sources"]
    if not any(at["state"] == "held" for at in sources.values()):
        return []
    return [name for name, at in sources.items() if at["head"] == found["clock"]]


def problems_view(found: dict[str, Any]) -> Table:
    """Return a table of what is wrong, where, and how to fix it."""
    table = Table("what", "where", "fix", title="problems", title_justify="left")
    for problem in found["problems"]:
        table.add_row(*(Text(problem[column]) for column in ("what", "where", "fix")))
    return table


def maintain_view(found: dict[str, Any]) -> Table:
    """Return a table of how many files each table had and has now, and how many old ones were
    removed.
    """
    table = Table("table", "files before", "files now", "old files removed")
    for row in found["tables"]:
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


def redrive_view(found: dict[str, Any]) -> Group:
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
    for row in found["records"]:
        numbers = (row["found"], row["before"], row["after"])
        table.add_row(
            row["table"], row["source"], row["topic"], *[f"{number:,}" for number in numbers]
        )
    left = sum(row["found"] - row["after"] for row in found["records"])
    did = f"{found['sent']:,} records refused as {found['reason']} were sent again"
    would = f"{left:,} records refused as {found['reason']} would be sent again"
    hint = "" if found["applied"] else "\nNothing was sent. Do it with --apply."
    return Group(did if found["applied"] else would, table, hint)


def repartition_view(found: dict[str, Any]) -> str:
    """Return what was repartitioned, and where the topics that were written end."""
    lines = []
    for row in found["sources"]:
        ends = ", ".join(f"[{partition}]@{end}" for partition, end in row["ends"].items())
        lines.append(
            f"{row['source']}: {row['records']:,} records of {row['from']} written to "
            f"{row['topic']}, which ends at {ends}"
        )
    return "\n".join(lines)


def forget_view(found: dict[str, Any]) -> Group:
    """Return where a key is, or was, and what holds it for longer."""
    table = Table("table", "records before", "records after", box=None, header_style="dim")
    for row in found["tables"]:
        table.add_row(row["table"], f"{row['before']:,}", f"{row['after']:,}")
    held = Table("held elsewhere", "records", "until", box=None, header_style="dim")
    for row in found["held"]:
        held.add_row(
            row["where"], "" if row["records"] is None else f"{row['records']:,}", utc(row["until"])
        )
    hint = "" if found["applied"] else "\nNothing was changed. Do it with --apply."
    sent = f"\nTombstones sent: {found['tombstones']}" if found["tombstones"] else ""
    return Group(table, "", held, hint or sent)


def reset_view(found: dict[str, Any]) -> Group:
    """Return what a jump does, or has done."""
    does = "jumped" if found["done"] else "would jump"
    table = Table(
        "source", "partition", "from", "to", "skipped", "read again", box=None, header_style="dim"
    )
    for jump in found["jumps"]:
        numbers = [
            jump[name]
            for name in ("partition", "from_offset", "to_offset", "skipped", "read_again")
        ]
        table.add_row(jump["source"], *[f"{number:,}" for number in numbers])
    closed = (
        f"{found['open_records_closed']:,} open records and "
        f"{found['unpublished_records_closed']:,} finished ones"
    )
    closes = f"{closed} {'were' if found['done'] else 'would be'} closed unpublished"
    hint = "" if found["done"] else "\nNothing was changed. Do it with --yes."
    return Group(f"{does} to {found['to']}; {closes}", table, hint)


def evolve_view(found: dict[str, Any]) -> Group | str:
    """Return what changes in the rules of a lake, or has changed."""
    if not found["changes"]:
        return (
            f"the lake has these rules, in epoch {found['epoch']} from batch "
            f"{found['from_batch']:,} on"
        )
    table = Table("", "before", "after", box=None, header_style="dim")
    for change in found["changes"]:
        for field, before, after in _parted(change["field"], change["before"], change["after"]):
            table.add_row(Text(field), Text(_rule(field, before)), Text(_rule(field, after)))
    if found["problems"]:
        problems = [f"{each['where']}: {each['what']}; {each['fix']}" for each in found["problems"]]
        return Group(table, Text("\n".join(["The change cannot be made:", *problems])))
    does = "begins" if found["applied"] else "would begin"
    hint = "" if found["applied"] else "\nNothing was changed. Do it with --apply."
    if found.get("read_first"):
        verb = (
            "was read first, by the rules of before"
            if found["applied"]
            else "is read first, by the rules of now"
        )
        hint = (
            f"\nWhat `repartition` has written of {' and '.join(found['read_first'])} {verb}; it "
            f"ends: start it again{hint}"
        )
    return Group(
        table, f"epoch {found['epoch']} {does} with batch {found['from_batch']:,} of silver{hint}"
    )


def _parted(field: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield a change.

    A change of a schema is yielded as the changes of its parts: fields, and what else it says.
    """
    if not field.endswith(".schema") or before is None or after is None:
        yield field, before, after
        return
    parts = _parts(before), _parts(after)
    for name in dict.fromkeys([*parts[0], *parts[1]]):
        old, new = (
            json.dumps(each[name], ensure_ascii=False) if name in each else None for each in parts
        )
        if old != new:
            yield f"{field}, {name}", old, new


def _parts(schema: str) -> dict[str, Any]:
    """Return what a JSON Schema or an Avro schema says, each field by itself."""
    said = json.loads(schema)
    fields = said.pop("properties", None) or {each["name"]: each for each in said.pop("fields", ())}
    return {**said, **{f"field {name}": found for name, found in fields.items()}}


def _rule(field: str, value: Any) -> str:
    """Return a rule as text that fits a line."""
    if field in ("merge.timeout", "merge.tenant_max_lag", "merge.max_future") and value is not None:
        return duration(value)
    if field == "merge.window" and value is not None:
        return _window(value)
    return "none" if value is None else str(value)


def check_view(found: dict[str, Any]) -> Group:
    """Return what a check has found: a line for each suite and table, and for each expectation not
    met.
    """
    suites: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in found["results"]:
        suites.setdefault((row["table"], row["suite"]), []).append(row)
    table = Table("table", "suite", "new rows", "expectations", "met", box=None, header_style="dim")
    failed = [row for row in found["results"] if not row["success"]]
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
    told: list[RenderableType] = [table] if suites else []
    told += [
        f"[red]not met[/] {escape(row['table'])}: {escape(row['expectation'])} "
        f"({escape(_found(row))})"
        for row in failed
    ]
    told += [
        f"[yellow]not looked at[/] {escape(name)}: {escape(why)}"
        for name, why in found["skipped"].items()
    ]
    if found["nothing_new"]:
        told.append(f"nothing new since the last check: {escape(', '.join(found['nothing_new']))}")
    if suites:
        verdict = (
            f"{len(failed)} of {len(found['results'])} expectations are not met"
            if failed
            else "every expectation is met"
        )
        told.append(f"[bold]{verdict}[/]")
    return Group(*told)


def _found(row: dict[str, Any]) -> str:
    """Return what was found instead of what is expected."""
    if row["unexpected"] is not None:
        return f"{row['unexpected']:,} of {row['total']:,} rows are against it"
    if row["trouble"] is not None:
        return f"it could not be checked: {row['trouble']}"
    return "it is not so" if row["observed"] is None else f"found instead: {row['observed']}"


def rebuild_view(found: dict[str, Any]) -> Group:
    """Return what silver holds beside what the rebuild holds."""
    lake = found["lake"]
    rebuilt = found["rebuilt"]
    timeouts = found["timeout_ms"]
    windows = found["window"]
    own = [
        f"T = {duration(timeouts[n])}" if windows[n] is None else _window(windows[n])
        for n in ("lake", "rebuilt")
    ]
    if (lags := found.get("tenant_max_lag_ms")) is not None:
        own = [
            f"{told}, lag {duration(lags[n])}"
            for told, n in zip(own, ("lake", "rebuilt"), strict=True)
        ]
    titles = [f"{name}, {window}" for name, window in zip(("lake", "rebuilt"), own, strict=True)]
    first = Column("", no_wrap=True)
    table = Table(first, *titles, "difference", box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in [
        name
        for name in ("records", "open", "timed_out", "valid", "complete", "waiting")
        if name in lake
    ]:
        titles_of = {"records": "merge records", "waiting": "waiting for their tenant's clock"}
        title = titles_of.get(name, f"  {name.replace('_', ' ')}")
        table.add_row(title, *_compared(lake[name], rebuilt[name]))
    for source, of_lake in lake["sources"].items():
        for name, count in of_lake.items():
            table.add_row(
                f"{source}: {name.replace('_', ' ')}",
                *_compared(count, rebuilt["sources"][source][name]),
            )
    hint = "complete: with parts of every source"
    if None in windows.values():
        hint = f"T: the timeout; {hint}"
    if own[0] == own[1]:
        hint += f"\nRow by row: watersmeet verify --against {escape(found['into'])}"
    of = f" of generation {found['generation']}" if found.get("generation") else ""
    return Group(
        f"silver up to batch {found['batch']}{of}, derived again into {escape(found['into'])}",
        table,
        hint,
    )


def _window(found: Mapping[str, int]) -> str:
    """Return a window by gap as text; its lengths are in ms."""
    return f"gap {duration(found['gap_ms'])}, max {duration(found['max_ms'])}"


def _compared(one: int, other: int) -> tuple[str, str, str]:
    return f"{one:,}", f"{other:,}", f"{other - one:+,}" if other != one else "-"


_SECTIONS = (
    ("late", "late: never merged", ("event_time", "position", "batch", "version")),
    ("waiting", "in bronze, waiting for the clock", ("event_time",)),
    ("quarantined", "refused, with this Kafka key", ("reason", "detail")),
)


SHOWN_RECORDS = 20
"""Maximum number of merge records of a key that are shown, the newest ones, and of each kind of
records that were not merged.
"""
SHOWN_PARTS = 50
"""Maximum number of parts of a merge record that are shown, the newest ones."""


def explain_view(found: dict[str, Any]) -> Group:
    """Return the life of a key: its newest merge records, and then what was not merged.

    Each merge record is a paragraph, the newest first.
    """
    key = escape(repr(found["key"]))
    moment = found["as_of"]
    when = (
        ""
        if moment is None
        else f" as of version {moment['version']} of silver ({utc(moment['at'])})"
    )
    newest = sorted(
        found["records"],
        key=lambda record: (record["event_time"], record["partition"]),
        reverse=True,
    )
    told: list[RenderableType] = [
        part for record in newest[:SHOWN_RECORDS] for part in _merge_record(record)
    ]
    for name, title, columns in _SECTIONS:
        if rows := found[name]:
            whose = ["tenant"] if "tenant" in rows[0] else []
            many = ""
            if len(rows) > SHOWN_RECORDS:
                many = f": {len(rows):,}, the last {SHOWN_RECORDS} are shown"
                rows = sorted(rows, key=lambda row: row.get("event_time", 0))[-SHOWN_RECORDS:]
            told += [
                f"[bold]{title.removeprefix('in bronze, ' if whose else '')}[/]{many}",
                _records(rows, *columns, *whose),
            ]
            told += [f"  {escape(_place(row))}: {escape(row['reason'])}" for row in rows if whose]
    if not told:
        near = ", ".join(escape(repr(each)) for each in found["near"])
        nothing = f"nothing is known of the key {key}{when}" + (
            f"; similar keys: {near}" if near else ""
        )
        return Group(nothing, *warnings_view(found.get("warnings", [])))
    count = len(found["records"])
    some = (
        f"; the newest {SHOWN_RECORDS} are shown, and all by --json"
        if count > SHOWN_RECORDS
        else ""
    )
    some = some or (", the newest first" if count > 1 else "")
    return Group(
        f"[bold]{key}[/]: {count:,} merge record{'s' * (count != 1)}{when}{some}",
        "",
        *told,
        *warnings_view(found.get("warnings", [])),
    )


def _merge_record(record: dict[str, Any]) -> tuple[RenderableType, ...]:
    out = record["published"]
    closed = record["closed"]
    published = (
        "" if out is None else f" · published as number {out['seq']} at offset {out['offset']}"
    )
    valid = "" if record["valid"] is None else " · valid" if record["valid"] else " · not valid"
    span = f"{utc(record['event_time'])} to {utc(record['last_event_time'])}"
    heads = (
        ""
        if closed is None
        else ", ".join(f"{name} {utc(head)}" for name, head in closed["heads"].items())
    )
    whose = f" · tenant {escape(repr(record['tenant']))}" if "tenant" in record else ""
    first = (
        f"[bold]partition {record['partition']}{whose} · {span}[/] · "
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
        "",
    )


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
        told = {name: "-" if row[name] is None else str(row[name]) for name in more}
        told |= {"event_time": utc(row["event_time"])} if "event_time" in more else {}
        if row.get("position") is not None:
            told |= (
                {"position": f"+{duration(row['position'] - row['event_time'])}"}
                if "position" in more
                else {}
            )
        table.add_row(*map(escape, (_place(row), *told.values())))
    return table


def _place(row: dict[str, Any]) -> str:
    """Return a record's coordinates in Kafka."""
    source = "" if row["source"] == row["topic"] else f"{row['source']}: "
    return f"{source}{row['topic']}[{row['partition']}]@{row['offset']}"


def try_view(found: dict[str, Any]) -> Group:
    """Return what became of the records of a file: merge records, messages, and then what was not
    merged.
    """
    counts = [f"{source} [bold]{of['records']:,}[/]" for source, of in found["read"].items()]
    told: list[RenderableType] = [f"records: {' · '.join(counts)}", ""]
    for row in found["records"]:
        status = row["status"].replace("_", " ") + (" at the end" if row["at_end"] else "")
        status += f" · not valid ({row['invalid_reason']})" if row["valid"] is False else ""
        span = f"{utc(row['event_time'])} to {utc(row['last_event_time'])}"
        parts = ", ".join(
            f"{part['source']}@{part['offset']} (line {part['line']})" for part in row["parts"]
        )
        place = f"partition {row['partition']}" + (
            f" · tenant {row['tenant']!r}" if "tenant" in row else ""
        )
        told += [
            f"[bold]{escape(repr(row['key']))}[/] · {escape(place)} · {span} · {status}",
            f"  {parts}",
        ]
    told += [""] if found["records"] else ["no merge record", ""]
    for message in found["messages"]:
        whose = f" · tenant {message['tenant']!r}" if "tenant" in message else ""
        place = (
            f"partition {message['partition']} · seq {message['seq']}{whose} · key "
            f"{message['key']!r}"
        )
        told += [
            f"[bold]message[/] · {escape(place)} · timestamp {message['timestamp']}",
            escape(str(message["value"])),
            "",
        ]
    for name, title, columns in (
        ("late", "late: never merged", ("key", "event_time", "position")),
        ("quarantined", "refused", ("reason", "detail")),
        ("waiting", "waiting for the clock", ("key", "event_time")),
    ):
        if rows := found[name]:
            of_tenants = [
                column
                for column in ("tenant", "position")
                if column in rows[0] and column not in columns
            ]
            told += [
                f"[bold]{title}[/]",
                _records(rows, "line", *of_tenants[:1], *columns, *of_tenants[1:]),
                "",
            ]
    return Group(*told)


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
