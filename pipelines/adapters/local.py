"""Small questions and small appends to Delta tables in folders of this machine, done in milliseconds without Spark.

Where a layer stands is asked for at every start and before every batch, and a few rows are noted with each. Spark takes a
second for such a thing at first and a third of one later, most of it for planning; delta-rs works on the same log and files at
once. Large batches Spark alone writes; files of silver's small ones are written here, and committed by Delta's own classes
(`pipelines.adapters.transaction`).
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
_TEXT_OF_BOUND = 32
_LAST_CHARACTER = "\U0010ffff"


At: TypeAlias = Mapping[str, int | datetime]
"""Of some tables, a version or the time it is to be the last of."""

NOW: At = {}
"""All tables as they are."""


class DataFile(NamedTuple):
    """A data file that no commit names yet: its path below the table, the values of its partition, its size and time of writing
    (epoch ms), and what Delta is told of its contents.
    """

    path: str
    partition: Mapping[str, str]
    size: int
    written_at: int
    statistics: str


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

    def has_version(self, table: str, number: int) -> bool:
        """Whether it has the commit of this number, where it has the one before."""
        return (self.path(table) / "_delta_log" / f"{number:020d}.json").exists()

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
        return self.seen(table, application)[1]

    def seen(self, table: str, application: str) -> tuple[int, int | None]:
        """The same, after the number of the last commit that was looked at."""
        found = self._table(table)
        return found.version(), found.transaction_version(application)

    def append(self, rows: pa.Table, table: str, application: str, version: int | None) -> None:
        """Appends in one commit, unless the table has seen this transaction version, or a larger one, of the application."""
        self._commit(table, application, version, lambda found, how: write_deltalake(found, rows, mode="append", **how))

    def append_apart(self, rows: pa.Table, table: str, application: str, version: int | None, *, column: str) -> None:
        """The same with a file for each value of an integer column, as Spark would lay out what it reads from Kafka: so a
        file's statistics say exactly what is in it.
        """
        files: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.size, {}, file.written_at, data_change=True, stats=file.statistics)
            for file in self.write(rows, table, apart=column)
        ]
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

    def write(self, rows: pa.Table, table: str, *, apart: str) -> list[DataFile]:
        """The rows in data files, one for each value of the column `apart`, which is told by the path where the table is
        partitioned by it. No commit names them yet.
        """
        metadata = self._table(table).metadata()
        described = metadata.configuration.get("delta.dataSkippingStatsColumns", "").split(",")
        return [
            self._write(
                rows.filter(pc.equal(rows[apart], value)),
                table,
                described,
                {apart: value.as_py()} if apart in metadata.partition_columns else {},
            )
            for value in pc.unique(rows[apart])
        ]

    def _write(self, rows: pa.Table, table: str, described: Sequence[str], partition: Mapping[str, str]) -> DataFile:
        folder = "".join(f"{name}={value}/" for name, value in partition.items())
        path = f"{folder}part-00000-{uuid.uuid4()}-c000.snappy.parquet"
        file = self.path(table) / path
        file.parent.mkdir(exist_ok=True)
        parquet.write_table(rows.drop_columns(list(partition)), file, store_schema=False)
        nulls = {column: rows[column].null_count for column in described}
        bounds = {column: pc.min_max(rows[column]).as_py() for column in described if nulls[column] < rows.num_rows}
        statistics = {
            "numRecords": rows.num_rows,
            "minValues": {column: _lower(found["min"]) for column, found in bounds.items()},
            "maxValues": {c: bound for c, found in bounds.items() if (bound := _upper(found["max"])) is not None},
            "nullCount": nulls,
        }
        stat = file.stat()
        return DataFile(path, partition, stat.st_size, int(stat.st_mtime * 1000), json.dumps(statistics))

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

    def path(self, table: str) -> Path:
        """Its folder."""
        return Path(self._path(table))

    def file_count(self, table: str, column: str, value: str) -> int:
        """How many files one of its partitions has."""
        return len(self._table(table).file_uris(file_pruning_predicate=f"{column} = '{value}'"))

    def _path(self, table: str) -> str:
        return f"{self.elsewhere.get(table, self.folder)}/{table}"


def _lower(value: Any) -> Any:
    """No value is smaller; as Delta writes it: a time in whole milliseconds (ours all are), the beginning of a text."""
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%dT%H:%M:%S}.{value.microsecond // 1000:03d}Z"
    return value[:_TEXT_OF_BOUND] if isinstance(value, str) else value


def _upper(value: Any) -> Any:
    """No value is larger; None where that cannot be said briefly."""
    if not isinstance(value, str) or len(value) <= _TEXT_OF_BOUND:
        return _lower(value)
    return None if value[_TEXT_OF_BOUND] == _LAST_CHARACTER else value[:_TEXT_OF_BOUND] + _LAST_CHARACTER
