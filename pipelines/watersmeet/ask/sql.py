"""Queries of the user: read-only SQL over the tables and views of a lake, as of one moment."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from rich.markup import escape
from rich.table import Table

from watersmeet.ask.gate import pass_query, place_of
from watersmeet.ask.moment import moment
from watersmeet.core.texts import CONTROLS, printable
from watersmeet.core.times import epoch_ms, utc
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
    return zip(*map(_values, batch.columns), strict=True)


class _FarTime(NamedTuple):
    """A time (epoch ms), or a length of time, that Python's own types do not reach."""

    ms: int


def _values(column: pa.Array) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
    except (OverflowError, ValueError):  # of a time: it is too far away, or has nanoseconds
        return [_value(scalar) for scalar in column]
    return values


def _value(scalar: pa.Scalar) -> Any:
    kind = scalar.type
    if not scalar.is_valid:
        return None
    if pa.types.is_map(kind):
        return [tuple(entry.values()) for entry in _values(scalar.values)]
    if isinstance(scalar, pa.ListScalar):
        return _values(scalar.values)
    if pa.types.is_struct(kind):
        return {name: _value(scalar[place]) for place, name in enumerate(kind.names)}
    if getattr(kind, "unit", None) == "ns":
        scalar = pa.scalar(scalar.value // 1000, _IN_MICROS[kind.id](kind))
    try:
        return scalar.as_py()
    except (OverflowError, ValueError):
        if pa.types.is_date(kind):
            return str(np.datetime64(scalar.cast(pa.date32()).value, "D"))
        return _FarTime(scalar.value * _PER_SECOND["ms"] // _PER_SECOND[scalar.type.unit])


_PER_SECOND: Final = {"s": 1, "ms": 1_000, "us": 1_000_000}
_IN_MICROS: Final[Mapping[int, Callable[[Any], pa.DataType]]] = {
    pa.timestamp("ns").id: lambda kind: pa.timestamp("us", kind.tz),
    pa.duration("ns").id: lambda _: pa.duration("us"),
    pa.time64("ns").id: lambda _: pa.time64("us"),
}


def _texts(batch: pa.RecordBatch, null: str) -> Iterator[list[str]]:
    for row in _rows(batch):
        yield [null if value is None else _text(value) for value in row]


def _text(value: Any) -> str:
    """Return a value as text: a time as people write it, what is nested as JSON."""
    if isinstance(value, datetime):
        return _in_utc(value).isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, _FarTime):
        return utc(value.ms)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(_json_value(value), ensure_ascii=False)
    return str(value)


def _json_value(value: Any) -> Any:
    """Return a value as JSON has it: times and durations in ms, bytes as text."""
    if isinstance(value, datetime):
        return epoch_ms(_in_utc(value))
    if isinstance(value, _FarTime):
        return value.ms
    if isinstance(value, timedelta):
        return value // timedelta(milliseconds=1)
    if isinstance(value, (date, time, Decimal)):
        return str(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, dict):
        return {name: _json_value(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(each) for each in value]
    if isinstance(value, float) and value - value != 0:  # JSON has no such number
        return None
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _in_utc(value: datetime) -> datetime:
    return value.replace(tzinfo=value.tzinfo or timezone.utc).astimezone(timezone.utc)
