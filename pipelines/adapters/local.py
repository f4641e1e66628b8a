"""Small questions and small appends to Delta tables in folders of this machine, done in milliseconds without Spark.

Where a layer stands is asked for at every start and before every batch, and a few rows are noted with each. Spark takes a
second for such a thing at first and a third of one later, most of it for planning; delta-rs works on the same log and files at
once. Records of the data, and merges, Spark alone writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, QueryBuilder, Schema, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError
from pyspark.sql.types import StructType

_ATTEMPTS = 20


@dataclass(frozen=True)
class LocalTables:
    """The tables in `folder`, each as its last commit has left it; asked anew each time."""

    folder: str

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

    def schema(self, table: str) -> StructType:
        """Its columns."""
        return StructType.fromJson(json.loads(self._table(table).schema().to_json()))

    def transaction_version(self, table: str, application: str) -> int | None:
        """The last transaction version of an application that the table has seen."""
        return self._table(table).transaction_version(application)

    def append(self, rows: pa.Table, table: str, application: str, version: int | None) -> None:
        """Appends in one commit, unless the table has seen this transaction version, or a larger one, of the application.

        The commit takes the version after the one that was looked at, or is tried again from the look on.
        """
        if version is None:
            write_deltalake(self._table(table), rows, mode="append")
            return
        for attempt in range(_ATTEMPTS):
            found = self._table(table)
            seen = found.transaction_version(application)
            if seen is not None and seen >= version:
                return
            once = CommitProperties(max_commit_retries=0, app_transactions=[Transaction(application, version)])
            try:
                write_deltalake(found, rows, mode="append", commit_properties=once)
            except CommitFailedError:
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                return

    def query(self, sql: str, names: Iterable[str]) -> pa.Table:
        """The answer to `sql`, in which tables stand in braces and odd names in backticks."""
        tables = QueryBuilder()
        for name in names:
            tables.register(name, self._table(name))
        text = sql.replace("`", '"').format(**{name: f'"{name}"' for name in names})
        return pa.table(tables.execute(text))

    def time_literal(self, ms: int) -> str:
        """A point in time (epoch ms) in the SQL of `query`: of the columns' own type, so that files are skipped by it."""
        return f"arrow_cast({ms * 1000}, 'Timestamp(Microsecond, Some(\"UTC\"))')"

    def _table(self, name: str) -> DeltaTable:
        return DeltaTable(self._path(name))

    def _path(self, table: str) -> str:
        return f"{self.folder}/{table}"
