"""Queries of the user: read-only SQL over the tables and views of a lake, as of one moment."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import pyarrow as pa
from rich.markup import escape
from rich.table import Table

from watersmeet.ask.gate import pass_query, place_of
from watersmeet.ask.moment import moment
from watersmeet.core.texts import CONTROLS, printable
from watersmeet.core.times import EPOCH, utc
from watersmeet.errors import ConfigurationError
from watersmeet.lake.snapshot import Snapshot
from watersmeet.lake.table_reader import QueryError, TableReader
from watersmeet.lake.tables import SILVER, layout
from watersmeet.settings import Settings


def ask(
    reader: TableReader, settings: Settings, query: str, at: int | datetime | None = None
) -> pa.RecordBatchReader:
    """Return the rows of a query over the lake as it is now, or was at a version of silver or a
    time.

    Raises ConfigurationError for anything but one query that reads, and for one that its engine
    refuses; reading the rows may raise QueryError.
    """
    names = {*layout(settings), *reader.lake.views, *reader.lake.derived}
    passed = pass_query(query, names, reader.dialect, reader.functions())
    # Looking at a table's log takes Spark a while, so at no other table's.
    snapshot = Snapshot(reader, settings, [*reader.stored_tables(passed.names), SILVER])
    if at is not None:
        snapshot, _ = moment(snapshot, at, "--at")
    try:
        return snapshot.query(passed.text, passed.names)
    except QueryError as error:
        raise _pointing(error, query, reader.dialect) from None


def _pointing(error: QueryError, query: str, dialect: str) -> ConfigurationError:
    what, _, advice = error.said.partition("Did you mean ")
    what = what.partition("\n")[0].strip().rstrip(".")
    near = re.match(r"(?:one of the following\? \[)?['`\"]([^'`\"]+)", advice)
    place = "" if error.line is None else f"line {error.line}, column {error.column}"
    if not place and (name := _NAME.search(what)):
        place = place_of(query, name[1], dialect)
    fix = f"did you mean `{near[1].replace('`', '')}`?" if near else ""
    unknown = _FIELD.search(what)
    if unknown and not near and f'"{unknown[1]}"' in query:
        fix = "a text stands between single quotes: double ones enclose a name"
    # The query is asked in brackets, the last of which has a line of its own.
    if error.line is not None and error.line > query.count("\n") + 1:
        what = "the query has no end: something is missing behind its last word"
        place = ""
        fix = "complete it"
    return ConfigurationError(
        f"{what[:1].lower()}{what[1:]}",
        where=f"QUERY, {place}" if place else "QUERY",
        fix=fix,
    )


_FIELD: Final = re.compile(r'No field named "?([^"]+)')
_NAME: Final = re.compile(r"(?:No field named |Invalid function '|name `)([\w.]+)")


def write_csv(answer: pa.RecordBatchReader) -> None:
    """Write rows to standard output as CSV, as they come; a null is empty.

    What steers a terminal is written as an escape: without it, two keys might look the same.
    """
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(map(_escaped, answer.schema.names))
    for batch in answer:
        writer.writerows(map(_escaped, row) for row in _texts(batch, null=""))
    sys.stdout.flush()


def _escaped(text: str) -> str:
    return CONTROLS.sub(lambda found: printable(found[0]), text)


def as_document(answer: pa.RecordBatchReader) -> dict[str, Any]:
    """Return rows as the answer of `sql --json`. Times are epoch ms.

    Raises ConfigurationError where two columns have one name, which an object cannot have.
    """
    names = answer.schema.names
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigurationError(
                f"{count} columns have the name `{name}`, which an object can have once",
                where="QUERY",
                fix="give them different names with AS, or leave out --json",
            )
    rows = [
        dict(zip(names, map(_json_value, row), strict=True))
        for batch in answer
        for row in _rows(batch)
    ]
    return {"columns": names, "rows": rows}


def as_table(answer: pa.RecordBatchReader) -> Table | str:
    """Return rows as people read them."""
    schema = answer.schema
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for field in schema:
        is_number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        table.add_column(escape(printable(field.name)), justify="right" if is_number else "left")
    for batch in answer:
        for row in _texts(batch, null="-"):
            table.add_row(*(escape(printable(text)) for text in row))
    return table if table.row_count else "no row"


def _rows(batch: pa.RecordBatch) -> Iterator[Sequence[Any]]:
    # Kafka's timestamps may be any, and `now()` has nanoseconds: Python has neither.
    columns = (
        column.cast(_plain(column.type, pa.timestamp("ms"), pa.duration("ms")), safe=False)
        .cast(_plain(column.type, pa.int64(), pa.int64()))
        .to_pylist()
        for column in batch.columns
    )
    return zip(*columns, strict=True)


def _plain(kind: pa.DataType, time: pa.DataType, duration: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return time
    if pa.types.is_duration(kind):
        return duration
    if pa.types.is_date(kind):
        return pa.string()
    if pa.types.is_time64(kind):
        return pa.time64("us")
    if pa.types.is_map(kind):
        key, item = (_plain(each, time, duration) for each in (kind.key_type, kind.item_type))
        return pa.map_(key, item)
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type, time, duration)))
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_plain(f.type, time, duration)) for f in kind])
    return kind


def _texts(batch: pa.RecordBatch, null: str) -> Iterator[list[str]]:
    texts = [
        _time
        if pa.types.is_timestamp(kind)
        else _length
        if pa.types.is_duration(kind) or pa.types.is_interval(kind)
        else _text
        for kind in batch.schema.types
    ]
    for row in _rows(batch):
        yield [
            null if value is None else text(value) for text, value in zip(texts, row, strict=True)
        ]


def _time(ms: int) -> str:
    try:
        before = (EPOCH + timedelta(milliseconds=min(ms, 0))).isoformat(" ", "milliseconds")
    except OverflowError:
        return utc(ms)
    return utc(ms) if ms >= 0 else before.replace("+00:00", "Z")


def _length(duration: int | pa.MonthDayNano) -> str:
    return f"{_json_value(duration)} ms"


def _interval_ms(interval: pa.MonthDayNano) -> int:
    if interval.months:  # Spark refuses it, too
        raise QueryError("an interval of months is not supported: months differ in length")
    total_ns = int(interval.days * 86_400_000_000_000 + interval.nanoseconds)
    return abs(total_ns) // 1_000_000 * (-1 if total_ns < 0 else 1)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(_json_value(value), ensure_ascii=False)
    return str(value)


def _json_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, pa.MonthDayNano):
        return _interval_ms(value)
    if isinstance(value, dict):
        return {name: _json_value(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(each) for each in value]
    if isinstance(value, float) and value - value != 0:  # JSON has no such number
        return None
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
