"""Small read-only queries on the tables of a lake: columns and conditions in, Arrow out.

delta-rs answers them in milliseconds, without a JVM, for a lake with a path that it can open, and
Spark for all others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, groupby, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import Int64s, int64s, row_values
from watersmeet.core.reading import RECORD_BYTES
from watersmeet.core.repeated import RECORD_IDS
from watersmeet.core.too_large import RECORD_COUNT
from watersmeet.core.types import TIME, ddl
from watersmeet.errors import WatersmeetError
from watersmeet.lake.views import View, with_reads

if TYPE_CHECKING:
    from watersmeet.lake.location import Lake

_T = TypeVar("_T")

Condition: TypeAlias = tuple[str, str, Any]
"""A column, an operator, and the value that the column is compared with."""

Where: TypeAlias = Sequence[Sequence[Condition]]
"""Conditions (column, operator, value), ANDed within a term; the terms are ORed.

`()` matches every row. Operators: `=`, `!=`, `<`, `<=`, `>`, `>=`, `in` and `not in` (a list),
`begins with` and `ends with` (a text), `is null`, `is not null` (the value is ignored). A time is
epoch ms. As in SQL, a null meets no condition but `is null`. What is compared by `=`, `<`, `<=`,
`>`, `>=` may be a value for each partition: the rows of other partitions do not meet the condition.
"""

Aggregates: TypeAlias = Mapping[str, tuple[str, str]]
"""Aggregates by output name: (`count` | `min` | `max` | `sum`, column).

Nulls are ignored; `("count", "*")` counts rows.
"""

COMPARISONS: Final = frozenset(["=", "!=", "<", "<=", ">", ">="])
AFFIXES: Final = {"begins with": "LEFT", "ends with": "RIGHT"}
"""Operators for the beginning or the end of a text, and the SQL functions that return it."""
OPERATORS: Final = COMPARISONS | AFFIXES.keys() | {"in", "not in", "is null", "is not null"}
AGGREGATES: Final = frozenset(["count", "min", "max", "sum"])

MAX_TERMS: Final = 16
"""Maximum number of terms in a condition on partitions.

With a term for each of hundreds of partitions, a condition takes longer to plan than to answer.
"""

PARTITIONS_PER_QUESTION: Final = 64
"""Maximum number of partitions in one query where each needs a term of its own."""

_FIRST, _END = -(2**63), 2**63
"""Bounds in place of none."""

_SEVERAL: Final = 20
"""Number of commits to read where the last one does not answer."""

NO_VERSIONS: Final[Mapping[str, int]] = MappingProxyType({})

ROW_BYTES: Final = 100
"""Approximate size in memory of a row without keys, values and headers."""
RECORD_ID_BYTES: Final = 100
"""Approximate size in memory of an entry of `record_ids` without its id."""


class NoTableError(WatersmeetError):
    """The table of a query does not exist."""

    def __init__(self, table: str, place: str) -> None:
        super().__init__(
            f"{place} has no table {table}: nothing has been written there yet; name another lake, "
            "or run first"
        )
        self.table = table


class VersionGoneError(WatersmeetError):
    """A table does not have a version, or no longer has its files."""

    def __init__(self, table: str, version: int) -> None:
        super().__init__(
            f"version {version} of {table} cannot be read: it was never made, or lies further back "
            "than `retention`; "
            "name a later one"
        )
        self.table = table
        self.version = version


class QueryError(WatersmeetError):
    """A query that its engine refuses, or that fails for some of its rows.

    `said`: what the engine says of it. `line`, `column`: where in the query (from 1), if it says.
    """

    exit_code = 2

    def __init__(self, said: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(said, where="QUERY")
        self.said = said
        self.line = line
        self.column = column


class Version(NamedTuple):
    """A commit to a table.

    - `committed_at_ms`: when it was made (epoch ms).
    - `metadata`: its `userMetadata`.
    - `operation`: what it did, as Delta calls it (WRITE, MERGE, OPTIMIZE, ...); `parameters`: of
      that.
    """

    number: int
    committed_at_ms: int
    metadata: str | None
    operation: str | None
    parameters: Mapping[str, Any] | None = None

    @property
    def restored_to(self) -> int | None:
        """For a RESTORE, the version that it restored (-1: it does not say which)."""
        if self.operation != "RESTORE":
            return None
        version = str((self.parameters or {}).get("version"))
        return int(version) if version.isdigit() else -1


class Question(NamedTuple):
    """What is asked of a table, which is no view: columns of the rows that meet the conditions, at
    a version (None: the last one). With `values`, what `TableReader.summary` makes of them.
    """

    table: str
    columns: Sequence[str] = ()
    where: Where = ()
    version: int | None = None
    values: Aggregates | None = None

    def check(self, existing: Collection[str]) -> None:
        """Raise ValueError for an unknown operator or aggregate, or an unknown column.

        `existing`: the table's columns.
        """
        conditions = list(chain.from_iterable(self.where))
        aggregates = (self.values or {}).values()
        aggregated = (column for _, column in aggregates if column != "*")
        for column in chain(self.columns, aggregated, (column for column, _, _ in conditions)):
            if column not in existing:
                raise ValueError(f"{self.table} has no column {column}")
        for kind, column in aggregates:
            if kind not in AGGREGATES or (column == "*" and kind != "count"):
                raise ValueError(f"{kind}({column}) is no aggregate")
        for column, operator, value in conditions:
            if operator not in OPERATORS or (operator in COMPARISONS and value is None):
                raise ValueError(f"{column} {operator} {value!r} is no condition")
            if operator in ("in", "not in") and any(element is None for element in value):
                raise ValueError(
                    f"{column} {operator} {value!r} is no condition: a null is in no list"
                )


class Histories(Protocol):
    """The histories of a lake's tables."""

    def history(self, table: str, limit: int | None = None) -> list[Version]:
        """Return the last commits, latest first; without a limit, all that the log still has."""


class TableReader(Histories, Protocol):
    """Read-only queries on a lake's tables. Every answer is of the last commit, or of a `version`.

    - Unknown columns and operators raise ValueError.
    - A table that does not exist raises NoTableError (but for `exists`).
    - A version that does not exist, or whose files were vacuumed, raises VersionGoneError.

    Timestamp columns are answered as int64 epoch ms; nested values as they are, with timestamps as
    timestamp[us, UTC].
    """

    lake: Lake
    dialect: str
    """The SQL that `query` takes: `datafusion` or `spark`."""

    def exists(self, table: str) -> bool:
        """Return True where the table exists. Nothing is created."""

    def select(
        self, table: str, columns: Sequence[str], where: Where = (), *, version: int | None = None
    ) -> pa.Table:
        """Return columns of exactly the rows that meet the conditions, in no particular order."""
        return normalise(self.rows(table, columns, where, version))

    def rows(
        self, table: str, columns: Sequence[str], where: Where = (), version: int | None = None
    ) -> pa.Table:
        """Return what `select` returns, but of the table's own columns and with its own times.

        Their type is timestamp[us, UTC]. Of a view of the journal, it returns all rows.
        """
        view = self.lake.views.get(table)
        if view is None:
            return self.table_rows(Question(table, columns, where, version))
        if view.items is not None:
            if where:
                raise ValueError(f"{table} is unpacked as a whole")
            [part] = view.parts
            names = ["generation", "body", "decided_at"]
            packed = self.table_rows(Question(part.table, names, [part.where], version))
            return view.unpacked(normalise(packed).to_pylist()).select(columns)
        parts = [*self._parts(view, Question(table, columns, where, version))]
        return pa.concat_tables(parts or [view.schema.empty_table().select(columns)])

    def table_rows(self, question: Question) -> pa.Table:
        """Return what is asked of a table, with its own times."""

    def summary(
        self,
        table: str,
        by: Sequence[str],
        values: Aggregates,
        where: Where = (),
        *,
        version: int | None = None,
    ) -> pa.Table:
        """Return a row for each combination of `by`, with aggregates of its rows; not of views of
        the journal.

        Where `by` is empty, there is one row in any case.
        """
        question = Question(table, by, where, version, values)
        view = self.lake.views.get(table)
        if view is None:
            return normalise(self.table_rows(question))
        if view.items is not None:
            raise ValueError(f"{table} is unpacked as a whole")
        parts = [*map(normalise, self._parts(view, question))]
        if view.is_of_one_table:
            return parts[0]
        return _summed(parts or [normalise(_empty_summary(view, by, values))], by, values)

    def _parts(self, view: View, question: Question) -> Iterator[pa.Table]:
        """Yield what `table_rows` returns of each part of a view that may have such rows. Of
        several, one whose table does not exist yet has none.
        """
        for part in view.parts:
            where = part.resolved(question.where)
            if where is not None and (view.is_of_one_table or self.exists(part.table)):
                names = [name for name in question.columns if name not in part.constants]
                of_part = question._replace(table=part.table, columns=names, where=where)
                rows = self.table_rows(of_part)
                for name, text in part.constants.items():
                    constant = pa.repeat(pa.scalar(text, pa.string()), rows.num_rows)
                    rows = rows.append_column(name, constant)
                yield rows.select([*question.columns, *(question.values or ())])

    def query(
        self, sql: str, names: Collection[str], versions: Mapping[str, int] = NO_VERSIONS
    ) -> pa.RecordBatchReader:
        """Return the rows of a query over these tables and views, in the engine's own SQL.

        - `sql`: one query, and no other statement. Whoever has it from a user has checked that.
        - `versions`: those of stored tables; of the others, the last ones.

        Raises QueryError where the engine refuses it; reading the rows does so, too.
        """

    def stored_tables(self, names: Iterable[str]) -> list[str]:
        """Return the tables that a query of tables and views reads.

        Raises NoTableError where one does not exist; a view of several may lack some of them.
        """
        stored: dict[str, None] = {}
        for name in with_reads(self.lake.derived, names):
            if name in self.lake.derived:
                continue
            view = self.lake.views.get(name)
            parts = [name] if view is None else [part.table for part in view.parts]
            existing = parts if len(parts) == 1 else [each for each in parts if self.exists(each)]
            stored |= dict.fromkeys(existing or parts)
        return [*stored]

    def functions(self) -> Collection[str] | None:
        """Return the functions of the engine itself; None where a query cannot call others."""

    def version(self, table: str) -> int:
        """Return the number of the last commit."""
        return self.history(table, 1)[0].number

    def has_moved(self, table: str, version: int) -> bool:
        """Return True where the last version of the table is another one than `version`."""
        return self.version(table) != version

    def version_at(self, table: str, time_ms: int) -> int | None:
        """Return the version of the last commit at or before a time (epoch ms).

        None before the first commit that the log still has.
        """
        return next(
            (version.number for version in walk(self, table) if version.committed_at_ms <= time_ms),
            None,
        )

    def columns(self, table: str, version: int | None = None) -> pa.Schema:
        """Return the columns of the stored table, which may be more than its layout's."""

    def properties(self, table: str) -> dict[str, str]:
        """Return the table's properties."""

    def unknown_features(self, table: str, *, for_writing: bool) -> Sequence[str]:
        """Return the table features, by Delta's names, that keep the engine from reading the table.

        `for_writing`: those that keep it from writing the table.
        """

    def file_count(self, table: str) -> int:
        """Return the number of data files in the last version."""

    def has_data_file(self, table: str, name: str) -> bool:
        """Return True where the last version has a data file of this name."""

    def row_bytes(self, table: str) -> int:
        """Return the approximate number of bytes of a row in the files of the last version.

        Values are packed there. 0 where there is no row.
        """


def _empty_summary(view: View, by: Sequence[str], values: Aggregates) -> pa.Table:
    kinds = [view.schema.field(name).type for name in by]
    kinds += [
        pa.int64() if kind == "count" else view.schema.field(column).type
        for kind, column in values.values()
    ]
    return pa.schema(list(zip([*by, *values], kinds, strict=True))).empty_table()


def _summed(parts: Sequence[pa.Table], by: Sequence[str], values: Aggregates) -> pa.Table:
    again = {"count": "sum"}
    aggregates = [(name, again.get(kind, kind)) for name, (kind, _) in values.items()]
    groups = pa.concat_tables(parts).group_by(list(by), use_threads=False).aggregate(aggregates)
    return groups.rename_columns([*by, *values])


Bounds: TypeAlias = Mapping[int, tuple[int | None, int | None]]
"""By partition, a range `[from, until)` (None: no bound)."""


def within(ranges: Bounds) -> Where:
    """Return the condition for offsets `[from, until)` of each partition (see `between`)."""
    return between("offset", ranges)


def between(column: str, bounds: Bounds) -> Where:
    """Return the condition for rows whose value is in `[from, until)` of their partition.

    Partitions not named are outside; without any, no row matches. Those with like bounds share a
    term.
    """
    if not bounds:
        return [[("partition", "in", [])]]

    def open_ends(partition: int) -> tuple[bool, ...]:
        return tuple(end is None for end in bounds[partition])

    terms = []
    for alike in of_like_bounds(bounds):
        for are_open, of_group in groupby(sorted(alike, key=open_ends), open_ends):
            group = [*of_group]
            term: list[Condition] = [("partition", "in", group)]
            for end, (operator, is_open) in enumerate(zip((">=", "<"), are_open, strict=True)):
                values = {p: bounds[p][end] for p in group}
                one = bounds[group[0]][end]
                is_same = set(values.values()) == {one}
                term += [] if is_open else [(column, operator, one if is_same else values)]
            terms.append(term)
    return terms


def of_like_bounds(bounds: Bounds) -> list[list[int]]:
    """Return partitions in groups that share a term: at most `MAX_TERMS`, cut where bounds differ
    most. So one that lies far behind is alone.
    """

    def ends(partition: int) -> tuple[int, int]:
        first, until = bounds[partition]
        return _FIRST if first is None else first, _END if until is None else until

    partitions = sorted(bounds, key=lambda p: (ends(p), p))
    gaps = [
        abs(ends(one)[0] - ends(other)[0]) + abs(ends(one)[1] - ends(other)[1])
        for one, other in pairwise(partitions)
    ]
    widest = sorted(range(len(gaps)), key=lambda n: -gaps[n])[: MAX_TERMS - 1]
    cuts = [0, *sorted(n + 1 for n in widest), len(partitions)]
    return [partitions[begin:end] for begin, end in pairwise(cuts)]


def of_like_values(values: Mapping[int, Any]) -> list[list[int]]:
    """Return partitions in groups with like values; in one where these are no numbers."""
    if not all(isinstance(value, int) for value in values.values()):
        return [[*values]]
    return of_like_bounds({p: (value, None) for p, value in values.items()})


def in_portions(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Return items that need a term of their own each, in portions for one query.

    A portion has at most `PARTITIONS_PER_QUESTION` of them.
    """
    return (
        items[i : i + PARTITIONS_PER_QUESTION]
        for i in range(0, len(items), PARTITIONS_PER_QUESTION)
    )


def extreme(
    reader: TableReader, table: str, column: str, where: Where = (), kind: str = "max"
) -> Any:
    """Return the largest value of a column in some rows (or the smallest: `min`); None where there
    is none.
    """
    return reader.summary(table, [], {"value": (kind, column)}, where)["value"][0].as_py()


def extremes(
    reader: TableReader, table: str, column: str, where: Where = (), kind: str = "max"
) -> dict[int, Any]:
    """Return what `extreme` does by partition, of those that have such rows."""
    return by_partition(
        reader.summary(table, ["partition"], {"value": (kind, column)}, where), "value"
    )


def by_partition(rows: pa.Table, column: str) -> dict[int, Any]:
    """Return the values of a column by partition; there is a row for each partition."""
    return dict(row_values(rows, "partition", column))


def row_count(reader: TableReader, table: str, where: Where = ()) -> int:
    """Return the number of rows of a table that meet the conditions."""
    return int(reader.summary(table, [], {"rows": ("count", "*")}, where)["rows"][0].as_py())


def sizes_of(rows: pa.Table) -> Int64s:
    """Return the size of each row in memory (bytes): its `record_bytes` and `ROW_BYTES`, and
    `RECORD_ID_BYTES` for each of its records, where it has the ids of these.
    """
    sizes = int64s(pc.fill_null(rows[RECORD_BYTES.name], 0))
    if RECORD_IDS.name in rows.column_names:
        counts = pc.if_else(rows[RECORD_IDS.name].is_valid(), rows[RECORD_COUNT.name], 0)
        sizes = sizes + int64s(pc.fill_null(counts, 0)) * RECORD_ID_BYTES
    return sizes + ROW_BYTES


def walk(reader: Histories, table: str) -> Iterator[Version]:
    """Yield the table's commits, latest first.

    They are read from the log in growing steps: mostly one of the last is needed.
    """
    oldest: int | None = None
    for limit in (1, _SEVERAL, None):
        commits = reader.history(table, limit)
        yield from (version for version in commits if oldest is None or version.number < oldest)
        oldest = commits[-1].number
        if oldest == 0 or (limit is not None and len(commits) < limit):
            return


class ReadOnce:
    """Histories of tables as they were when they were first asked for.

    For several questions to the same histories: in a catalog each reading takes a query of Spark.
    """

    def __init__(self, reader: Histories) -> None:
        self._history = cache(reader.history)

    def history(self, table: str, limit: int | None = None) -> list[Version]:
        """See `TableReader`."""
        return self._history(table, limit and max(limit, _SEVERAL))[:limit]


_PLAIN: Final = {
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
}


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the common type of an Arrow type's variants, which engines choose differently.

    For instance string for string views and large strings.
    """
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return TIME
    if pa.types.is_struct(kind):
        return pa.struct(list(plain_schema(kind)))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(plain_type(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    return _PLAIN.get(kind, kind)


def plain_schema(schema: Iterable[pa.Field]) -> pa.Schema:
    """Return a schema of plain types, in which everything may be null and nothing has metadata."""
    return pa.schema([pa.field(field.name, plain_type(field.type)) for field in schema])


def normalise(rows: pa.Table) -> pa.Table:
    """Return an engine's rows as `TableReader` promises them.

    Types are plain, and timestamp columns are int64 epoch ms.
    """
    uniform = rows.cast(plain_schema(rows.schema))
    in_ms = [
        pc.divide(column.cast(pa.int64()), 1000) if column.type == TIME else column
        for column in uniform.columns
    ]
    return pa.table(in_ms, uniform.column_names)


SPELLED: Final[Mapping[str, Mapping[str, str]]] = {
    "datafusion": {
        "ms": r"(CAST(\1 AS BIGINT) / 1000)",
        "at": r"""arrow_cast(\1 * 1000, 'Timestamp(Microsecond, Some("UTC"))')""",
        "each": r"unnest(\1)",
    },
    "spark": {"ms": r"unix_millis(\1)", "at": r"timestamp_millis(\1)", "each": r"explode(\1)"},
}
"""What the dialects of SQL call a time in epoch ms, the time of such a number, and a row for each
element of a list.
"""

_UNCHANGED: Final = re.compile(r"[\w.:/@+-]*", re.ASCII)
"""Texts that are the same in quotes in both dialects, and cannot be taken for SQL."""


def quoted(name: str) -> str:
    """Return a column's name in backquotes."""
    return "`{}`".format(name.replace("`", "``"))


def literal(value: Any) -> str:
    """Return a value as SQL of both dialects, whatever is in a text.

    Raises ValueError for a value that no column can hold.
    """
    if value is None:
        return "NULL"
    if isinstance(value, (bool, int)):
        return str(value).upper()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"X'{bytes(value).hex()}'"
    if isinstance(value, str):
        is_plain = _UNCHANGED.fullmatch(value)
        return f"'{value}'" if is_plain else f"CAST(X'{value.encode().hex()}' AS STRING)"
    raise ValueError(f"{value!r} is no value that a column can be compared with")


def _time(ms: int, dialect: str) -> str:
    return SPELLED[dialect]["at"].replace(r"\1", str(ms))


def sql_of(where: Where, schema: Iterable[pa.Field], dialect: str) -> str:
    """Return conditions on a table with these columns in a dialect of SQL.

    What all terms have in common is written once: it may be a long list. Raises ValueError for a
    value that no column can hold.
    """

    times = {field.name for field in schema if field.type == TIME}

    def conjunction(term: Sequence[Condition]) -> str:
        return " AND ".join(_condition(times, dialect, *condition) for condition in term) or "TRUE"

    first = where[0] if where else ()
    common = [condition for condition in first if all(condition in term for term in where)]
    rest = [[condition for condition in term if condition not in common] for term in where]
    if common and not all(rest):  # of one term, nothing is left
        return conjunction(common)
    either = " OR ".join(f"({conjunction(term)})" for term in rest) or "TRUE"
    return f"{conjunction(common)} AND ({either})" if common else either


def sql_of_view(
    view: View, tables: Mapping[str, str], columns: Mapping[str, Collection[str]]
) -> str:
    """Return a view as a query of its tables.

    `tables`: what the query calls those that exist. `columns`: the columns that each has by now; a
    view lacks what one of its tables lacks.
    """
    parts = [part for part in view.parts if part.table in tables]
    names = [
        name
        for name in view.schema.names
        if all(name in part.constants or name in columns[part.table] for part in parts)
    ]
    queries = []
    for part in parts:
        constants = {
            name: f"{literal(text)} AS {quoted(name)}" for name, text in part.constants.items()
        }
        selected = ", ".join(constants.get(name, quoted(name)) for name in names)
        where = sql_of([part.where], (), "")
        queries.append(f"SELECT {selected} FROM {tables[part.table]} WHERE {where}")
    return " UNION ALL ".join(queries)


def sql_of_rows(rows: pa.Table, schema: pa.Schema, dialect: str) -> str:
    """Return a few rows as a query; times are epoch ms."""
    names = [*map(quoted, schema.names)]

    def literal_of(kind: pa.DataType, value: Any) -> str:
        return _time(value or 0, dialect) if kind == TIME else literal(value)

    records = [row.values() for row in rows.select(schema.names).to_pylist()]
    values = (
        f"({', '.join(map(literal_of, schema.types, record))})"
        for record in records or [[None] * len(names)]
    )
    typed = (
        name if kind == TIME else f"CAST({name} AS {ddl(kind)}) AS {name}"
        for name, kind in zip(names, schema.types, strict=True)
    )
    return (
        f"SELECT {', '.join(typed)} FROM (VALUES {', '.join(values)}) "
        f"AS decided({', '.join(names)}) WHERE {'TRUE' if records else 'FALSE'}"
    )


def _condition(times: Collection[str], dialect: str, column: str, operator: str, value: Any) -> str:
    name = quoted(column)
    if operator in ("is null", "is not null"):
        return f"{name} {operator.upper()}"
    if operator in AFFIXES:
        return f"{AFFIXES[operator]}({name}, {len(value)}) = {literal(value)}"

    def literal_of(element: Any) -> str:
        """Return a value in the dialect: epoch ms as a time, where the column has times."""
        return _time(int(element), dialect) if column in times else literal(element)

    if isinstance(value, Mapping):
        if not value:
            return "FALSE"
        near = []  # by which files are skipped
        for alike in of_like_values(value):
            least, most = (literal_of(end(value[p] for p in alike)) for end in (min, max))
            bounds = [f"{quoted('partition')} IN ({', '.join(map(str, alike))})"]
            bounds += [f"{name} >= {least}"] if operator in ("=", ">", ">=") else []
            bounds += [f"{name} <= {most}"] if operator in ("=", "<", "<=") else []
            near.append(" AND ".join(bounds))
        cases = " ".join(f"WHEN {p} THEN {literal_of(each)}" for p, each in value.items())
        exact = f"{name} {operator} CASE {quoted('partition')} {cases} END"
        return f"({' OR '.join(near)}) AND {exact}"
    if operator in ("in", "not in"):
        return (
            f"{name} {operator.upper()} ({', '.join(map(literal_of, value))})"
            if len(value)
            else str(operator == "not in").upper()
        )
    return f"{name} {operator} {literal_of(value)}"
