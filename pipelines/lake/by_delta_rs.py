"""Questions answered by delta-rs, without a JVM, for lakes with a path that it can open.

Conditions become SQL of DataFusion, in which names and texts are quoted and literals have the column's own type: only then are
files skipped by their statistics.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError, TableNotFoundError

from pipelines.core.types import TIME
from pipelines.lake.files import Files
from pipelines.lake.location import Lake, local_path
from pipelines.lake.questions import (
    Aggregates,
    NoTableError,
    Questions,
    Version,
    VersionGoneError,
    Where,
    answer,
    check_question,
    plain_schema,
)


class DeltaRsQuestions(Questions):
    """See `Questions`. Each thread keeps what it has read of the logs, so that only later commits are read again."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._known = threading.local()

    def exists(self, table: str) -> bool:
        """See `Questions`."""
        return DeltaTable.is_deltatable(self._path(table), self._storage(table))

    def select(self, table: str, columns: Sequence[str], where: Where = (), *, version: int | None = None) -> pa.Table:
        """See `Questions`."""
        return self._ask(table, columns, {}, where, version, "")

    def summary(
        self, table: str, by: Sequence[str], values: Aggregates, where: Where = (), *, version: int | None = None
    ) -> pa.Table:
        """See `Questions`."""
        return self._ask(table, by, values, where, version, f" GROUP BY {', '.join(map(_name, by))}" if by else "")

    def _ask(
        self, table: str, columns: Sequence[str], values: Aggregates, where: Where, version: int | None, grouped: str
    ) -> pa.Table:
        found = self._at(table, version)
        schema = _schema(found)
        check_question(table, schema.names, columns, where, values)
        wanted = [_name(column) for column in columns]
        for name, (kind, column) in values.items():
            wanted.append(f"{kind}({column if column == '*' else _name(column)}) AS {_name(name)}")
        sql = f"SELECT {', '.join(wanted)} FROM t{_where(where, schema)}{grouped}"
        try:
            return answer(pa.table(QueryBuilder().register("t", found).execute(sql)))
        except (DeltaError, pa.ArrowException, OSError):
            if version is not None and self._lacks_files(table, found):
                raise VersionGoneError(table, version) from None
            raise

    def history(self, table: str, limit: int | None = None) -> list[Version]:
        """See `Questions`."""
        commits = self._table(table).history(limit)
        return [Version(c["version"], c.get("inCommitTimestamp", c["timestamp"]), c.get("userMetadata")) for c in commits]

    def version(self, table: str) -> int:
        """See `Questions`."""
        return self._table(table).version()

    def columns(self, table: str) -> pa.Schema:
        """See `Questions`."""
        return _schema(self._table(table))

    def properties(self, table: str) -> dict[str, str]:
        """See `Questions`."""
        return dict(self._table(table).metadata().configuration)

    def file_count(self, table: str) -> int:
        """See `Questions`."""
        return len(self._table(table).file_uris())

    def _path(self, table: str) -> str:
        return local_path(self._lake.address(table))

    def _storage(self, table: str) -> dict[str, str]:
        return dict(self._lake.home(table).storage)

    def _table(self, table: str) -> DeltaTable:
        known: dict[str, DeltaTable] = vars(self._known)
        try:
            known[table].update_incremental()
        except (KeyError, DeltaError):  # not read yet; or the log was cleaned up beyond what was read, or the table made again
            known[table] = self._open(table)
        return known[table]

    def _open(self, table: str, version: int | None = None) -> DeltaTable:
        try:
            return DeltaTable(self._path(table), version, self._storage(table))
        except TableNotFoundError:
            raise NoTableError(table, self._lake.home(table).location) from None

    def _at(self, table: str, version: int | None) -> DeltaTable:
        if version is None:
            return self._table(table)
        if not 0 <= version <= self.version(table):
            raise VersionGoneError(table, version)
        try:
            return self._open(table, version)
        except (DeltaError, NoTableError):  # the store has just answered, so the log no longer reaches back so far
            raise VersionGoneError(table, version) from None

    def _lacks_files(self, table: str, found: DeltaTable) -> bool:
        files, path = Files(self._storage(table)), self._path(table)
        named = pa.table(found.get_add_actions(flatten=True))["path"].to_pylist()
        return not all(files.exists(f"{path}/{name}") for name in named)


def _schema(found: DeltaTable) -> pa.Schema:
    return plain_schema(pa.schema(found.schema().to_arrow()))


def _where(where: Where, schema: pa.Schema) -> str:
    terms = [" AND ".join(_condition(schema, *condition) for condition in term) or "TRUE" for term in where]
    return f" WHERE {' OR '.join(f'({term})' for term in terms)}" if terms else ""


def _condition(schema: pa.Schema, column: str, operator: str, value: Any) -> str:
    if operator in ("is null", "is not null"):
        return f"{_name(column)} {operator.upper()}"
    kind = schema.field(column).type
    if operator == "in":
        return f"{_name(column)} IN ({', '.join(_literal(one, kind) for one in value)})" if len(value) else "FALSE"
    return f"{_name(column)} {operator} {_literal(value, kind)}"


def _literal(value: Any, kind: pa.DataType) -> str:
    if kind == TIME:
        return f"arrow_cast({int(value) * 1000}, 'Timestamp(Microsecond, Some(\"UTC\"))')"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"X'{bytes(value).hex()}'"
    if isinstance(value, str):
        return "'{}'".format(value.replace("'", "''"))
    raise ValueError(f"{value!r} is no value that a column can be compared with")


def _name(column: str) -> str:
    return '"{}"'.format(column.replace('"', '""'))
