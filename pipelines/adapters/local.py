"""Small questions to Delta tables in folders of this machine, answered in milliseconds by a reader that needs no Spark.

Where a layer stands is asked for at every start and before every batch. Spark takes a second for such an answer at first and a
tenth of one later, most of it for planning; delta-rs reads the same log and files at once. It only reads: whatever is written,
Spark's Delta writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql.types import StructType


@dataclass(frozen=True)
class LocalTables:
    """The tables in `folder`, each as its last commit has left it; asked anew each time."""

    folder: str

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
