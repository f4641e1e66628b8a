"""Small questions and small appends to Delta tables in folders of this machine, done in milliseconds without Spark.

Where a layer stands is asked for at every start and before every batch, and a few rows are noted with each. Spark takes a
second for such a thing at first and a third of one later, most of it for planning; delta-rs works on the same log and files at
once. Large batches, and silver, Spark alone writes.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import (
    CommitProperties,
    DeltaTable,
    QueryBuilder,
    Schema,
    Transaction,
    WriterProperties,
    write_deltalake,
)
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction
from pyarrow import parquet
from pyspark.sql.types import StructType

_ATTEMPTS = 20
_BACKTICK = re.compile(r"'(?:[^']|'')*'|`")
"""A text in quotes, in which it means itself, or a backtick."""
_COMMITS_PER_CHECKPOINT = 20


At: TypeAlias = Mapping[str, int | datetime]
"""Of some tables, a version or the time it is to be the last of."""

NOW: At = {}
"""All tables as they are."""


class Version(NamedTuple):
    """A commit to a table: its number, when it was made (epoch ms), and what whoever made it has said about it."""

    number: int
    committed_at: int
    said: str | None


@dataclass(frozen=True)
class LocalTables:
    """The tables in `folder`, each as its last commit has left it; asked anew each time. Some may be `elsewhere`."""

    folder: str
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    _known: threading.local = field(default_factory=threading.local, repr=False)
    """What each thread has read of the logs, by table: only later commits are read then."""

    def create(self, table: str, schema: StructType, properties: Mapping[str, str]) -> None:
        """Afterwards the table is there; one that was is left as it is."""
        with suppress(CommitFailedError):  # another process makes it too
            columns = Schema.from_json(schema.json())
            DeltaTable.create(self._path(table), columns, mode="ignore", configuration=dict(properties))

    def exists(self, table: str) -> bool:
        """Whether the table is there."""
        return DeltaTable.is_deltatable(self._path(table))

    def version(self, table: str) -> int:
        """The number of its last commit."""
        return self._table(table).version()

    def properties(self, table: str) -> Mapping[str, str]:
        """Its table properties."""
        return self._table(table).metadata().configuration

    def history(self, table: str, limit: int) -> list[Version]:
        """The last commits, latest first."""
        commits = self._table(table).history(limit)
        return [Version(c["version"], c.get("inCommitTimestamp", c["timestamp"]), c.get("userMetadata")) for c in commits]

    def schema(self, table: str) -> StructType:
        """Its columns."""
        return StructType.fromJson(json.loads(self._table(table).schema().to_json()))

    def transaction_version(self, table: str, application: str) -> int | None:
        """The last transaction version of an application that the table has seen."""
        return self._table(table).transaction_version(application)

    def append(self, rows: pa.Table, table: str, application: str, version: int | None) -> None:
        """Appends in one commit, unless the table has seen this transaction version, or a larger one, of the application."""
        self._commit(table, application, version, lambda found, how: write_deltalake(found, rows, mode="append", **how))

    def append_apart(self, rows: pa.Table, table: str, application: str, version: int | None, *, column: str) -> None:
        """The same with a file for each value of an integer column, as Spark would lay out what it reads from Kafka: so a
        file's statistics say exactly what is in it.
        """
        found = self._table(table)
        described = found.metadata().configuration.get("delta.dataSkippingStatsColumns", "").split(",")
        parts = [rows.filter(pc.equal(rows[column], value)) for value in pc.unique(rows[column])]
        files: list[AddAction | RemoveAction] = [self._write(part, table, described) for part in parts]
        self._commit(
            table,
            application,
            version,
            lambda found, how: found.create_write_transaction(files, "append", found.schema(), [], **how),
        )

    def _commit(
        self, table: str, application: str, version: int | None, write: Callable[[DeltaTable, dict[str, Any]], None]
    ) -> None:
        """The commit takes the version after the one that was looked at, or is tried again from the look on."""
        if version is None:
            write(self._table(table), {})
            return
        for attempt in range(_ATTEMPTS):
            found = self._table(table)
            number = found.version() + 1
            seen = found.transaction_version(application)
            if seen is not None and seen >= version:
                return
            once = CommitProperties(max_commit_retries=0, app_transactions=[Transaction(application, version)])
            try:
                write(found, {"commit_properties": once})
            except CommitFailedError:
                vars(self._known).pop(table, None)
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                if number % _COMMITS_PER_CHECKPOINT == 0:
                    self._table(table).create_checkpoint()  # or each look would read all of the log
                return

    def compact(self, table: str, target_bytes: int) -> None:
        """Rewrites files smaller than this into few of about this size, unless another writer comes first."""
        like_spark = WriterProperties(compression="SNAPPY")
        with suppress(CommitFailedError):
            self._table(table).optimize.compact(target_size=target_bytes, max_concurrent_tasks=2, writer_properties=like_spark)

    def _write(self, rows: pa.Table, table: str, described: Sequence[str]) -> AddAction:
        """A data file that no commit names yet, and the action that would."""
        name = f"part-00000-{uuid.uuid4()}-c000.snappy.parquet"
        file = Path(self._path(table), name)
        parquet.write_table(rows, file, store_schema=False)
        nulls = {column: rows[column].null_count for column in described}
        bounds = {column: pc.min_max(rows[column]).as_py() for column in described if nulls[column] < rows.num_rows}
        statistics = {
            "numRecords": rows.num_rows,
            "minValues": {column: _bound(found["min"]) for column, found in bounds.items()},
            "maxValues": {column: _bound(found["max"]) for column, found in bounds.items()},
            "nullCount": nulls,
        }
        stat = file.stat()
        return AddAction(name, stat.st_size, {}, int(stat.st_mtime * 1000), data_change=True, stats=json.dumps(statistics))

    def query(self, sql: str, names: Iterable[str], at: At = NOW) -> pa.Table:
        """The answer to `sql`, in which tables stand in braces and odd names in backticks; `at`: not all as they are."""
        tables = QueryBuilder()
        for name in names:
            tables.register(name, self._table_at(name, at[name]) if name in at else self._table(name))
        text = _BACKTICK.sub(lambda found: '"' if found[0] == "`" else found[0], sql).format(
            **{name: f'"{name}"' for name in names}
        )
        return pa.table(tables.execute(text))

    def time_literal(self, ms: int) -> str:
        """A point in time (epoch ms) in the SQL of `query`: of the columns' own type, so that files are skipped by it."""
        return f"arrow_cast({ms * 1000}, 'Timestamp(Microsecond, Some(\"UTC\"))')"

    def in_ms(self, column: str) -> str:
        """A time column as epoch ms in the SQL of `query`."""
        return f"(CAST({column} AS BIGINT) / 1000)"

    def _table(self, name: str) -> DeltaTable:
        found: DeltaTable | None = vars(self._known).get(name)
        if found is None:
            found = vars(self._known)[name] = DeltaTable(self._path(name))
        else:
            found.update_incremental()
        return found

    def _table_at(self, name: str, version: int | datetime) -> DeltaTable:
        table = DeltaTable(self._path(name))
        table.load_as_version(version)
        return table

    def _path(self, table: str) -> str:
        return f"{self.elsewhere.get(table, self.folder)}/{table}"


def _bound(value: Any) -> Any:
    """As Delta writes it: a time in whole milliseconds, which all of ours are."""
    return f"{value:%Y-%m-%dT%H:%M:%S}.{value.microsecond // 1000:03d}Z" if isinstance(value, datetime) else value
