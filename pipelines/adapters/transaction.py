"""Commits through Delta's own transaction, of data files that are there already.

Each of Spark's writers asks the table's log on its way (has this been written, which files go) in queries of their own, of half
a second each however little there is in it. Who has written the files, and the last ones too, knows the answers. All else is as
ever, being Delta's: conflicts with other writers are found, in-commit timestamps, checksums and checkpoints of the log written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from delta.tables import DeltaTable
from pyspark.sql import SparkSession

from pipelines.adapters.deletion_vectors import DeletionVectors
from pipelines.adapters.local import DataFile, LocalTables
from pipelines.adapters.scala import NONE, scala_list, scala_object
from pipelines.errors import WatersmeetError

DELTA = "4.4.0"
"""The release whose classes these are: they are not promised to anybody."""


def knows_delta(spark: SparkSession) -> bool:
    """Whether the session's Delta is the one that is known here."""
    try:
        return str(scala_object(spark, "io.delta.package").VERSION()) == DELTA
    except TypeError:  # there is no such class
        return False


@dataclass
class Transactions:
    """One writer's commits to a table in a folder of this machine, of whose rows only those of one partition ever go."""

    spark: SparkSession
    local: LocalTables
    table: str
    delta: DeltaTable
    changing: tuple[str, str]
    """That partition: a column and its value."""
    _last: tuple[int, list[Any]] | None = None
    """A version, and the files that the partition had then, as Delta describes them."""

    def commit(self, application: str, number: int, files: Sequence[DataFile]) -> None:
        """One commit in which these files come, unless the table has seen this transaction version, or a larger one, of the
        application. Raises what Delta raises where another writer comes first.
        """
        transaction = self._begin(application, number)
        if transaction is not None:
            known = self._known(transaction)
            self._commit(transaction, application, number, files, known, [])

    def replace(self, application: str, number: int, files: Sequence[DataFile]) -> None:
        """The same, and all rows of the partition go."""
        transaction = self._begin(application, number)
        if transaction is not None:
            going = [file.remove() for file in self._files(transaction)]
            self._commit(transaction, application, number, files, [], going)

    def update(self, application: str, number: int, files: Sequence[DataFile], gone: pa.Table) -> None:
        """The same, and of the partition those rows go that have these keys: columns of texts and numbers, the most telling one
        last. Raises WatersmeetError, and writes nothing, where there is not one of each.
        """
        transaction = self._begin(application, number)
        if transaction is None:
            return
        vectors, stay, changes = DeletionVectors(self.spark, self._log, self._folder, gone), [], []
        for file in self._files(transaction):
            marked = vectors.mark(file) if gone.num_rows else []
            changes += marked
            stay += marked[:-1] if marked else [file]  # the last one removes what was there before
        vectors.close()
        if vectors.marked != gone.num_rows:
            raise WatersmeetError(f"{self.table}: of {gone.num_rows} rows that a batch updates, {vectors.marked} were found")
        self._commit(transaction, application, number, files, stay, changes)

    def _begin(self, application: str, number: int) -> Any:
        """A transaction on the very version in which the application's last number was looked up; None where it has this one."""
        self._jvm.org.apache.spark.sql.SparkSession.setActiveSession(self.spark._jsparkSession)
        none = scala_object(self.spark, NONE)
        while True:
            version, seen = self.local.seen(self.table, application)
            if seen is not None and seen >= number:
                return None
            transaction = self._log.startTransaction(none, none)
            if transaction.readVersion() == version:
                # So that a commit of the application that comes between is found, and is a conflict.
                transaction.readTxn().append(application)
                return transaction

    def _commit(
        self,
        transaction: Any,
        application: str,
        number: int,
        files: Sequence[DataFile],
        stay: list[Any] | None,
        changes: Sequence[Any],
    ) -> None:
        actions = self._jvm.org.apache.spark.sql.delta.actions
        coming = [actions.Action.fromJson(json.dumps({"add": _described(file)})) for file in files]
        seen = actions.SetTransaction(application, number, scala_object(self.spark, NONE))
        before = transaction.readVersion()
        version = transaction.commit(scala_list(self.spark, [seen, *coming, *changes]), self._write)
        column, value = self.changing
        mine = [action for file, action in zip(files, coming, strict=True) if file.partition.get(column) == value]
        # Where somebody else's commit came between, it may have changed the files.
        self._last = (version, stay + mine) if stay is not None and version == before + 1 else None

    def _files(self, transaction: Any) -> list[Any]:
        """The partition's files: as they are known, or by asking the log."""
        known = self._known(transaction)
        if known is not None:
            return known
        column, value = self.changing
        return list(transaction.snapshot().allFiles().where(f"partitionValues['{column}'] = '{value}'").collectAsList())

    def _known(self, transaction: Any) -> list[Any] | None:
        """What this writer's own last commit left, where nobody else's came after it."""
        return self._last[1] if self._last is not None and self._last[0] == transaction.readVersion() else None

    @property
    def _jvm(self) -> Any:
        return self.spark._jvm

    @property
    def _folder(self) -> Path:
        return self.local.path(self.table)

    @cached_property
    def _log(self) -> Any:
        return self.delta._jdt.deltaLog()

    @cached_property
    def _write(self) -> Any:
        """What the table's history calls it."""
        operation = getattr(self._jvm, "org.apache.spark.sql.delta.DeltaOperations$Write")
        return operation(self._jvm.org.apache.spark.sql.SaveMode.Append, *[scala_object(self.spark, NONE)] * 8)


def _described(file: DataFile) -> dict[str, Any]:
    return {
        "path": file.path,
        "partitionValues": file.partition,
        "size": file.size,
        "modificationTime": file.written_at,
        "dataChange": True,
        "stats": file.statistics,
    }
