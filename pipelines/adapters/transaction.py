"""Commits through Delta's own transaction, of data files that are there already.

Each of Spark's writers asks the table's log on its way (has this been written, which files go) in queries of their own, of half
a second each however little there is in it. Who has written the files, and the last ones too, knows the answers. All else is as
ever, being Delta's: conflicts with other writers are found, in-commit timestamps, checksums and checkpoints of the log written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from delta.tables import DeltaTable
from pyspark.sql import SparkSession

from pipelines.adapters.local import DataFile, LocalTables

DELTA = "4.4.0"
"""The release whose classes these are: they are not promised to anybody."""


def knows_delta(spark: SparkSession) -> bool:
    """Whether the session's Delta is the one that is known here."""
    try:
        return str(_static(spark, "io.delta.package").VERSION()) == DELTA
    except TypeError:  # there is no such class
        return False


@dataclass
class Transactions:
    """One writer's commits to a table in a folder of this machine. Each removes a partition's files, or none, and adds files."""

    spark: SparkSession
    local: LocalTables
    table: str
    delta: DeltaTable
    _last: tuple[int, Mapping[str, str], list[Any]] | None = None
    """A version, a partition, and the files that it had then, as Delta describes them."""

    def commit(
        self, application: str, number: int, files: Sequence[DataFile], *, instead_of: Mapping[str, str] | None = None
    ) -> None:
        """One commit, unless the table has seen this transaction version, or a larger one, of the application. The files of
        the partition `instead_of` go with it. Raises what Delta raises where another writer comes first.
        """
        transaction = self._begin(application, number)
        if transaction is None:
            return
        added = [self._action({"add": _described(file)}) for file in files]
        gone = [] if instead_of is None else self._files(transaction, instead_of)
        seen = self._jvm.SetTransaction(application, number, self._scala.Option.empty())
        read_version = transaction.readVersion()
        version = transaction.commit(self._list([seen, *added, *(file.remove() for file in gone)]), self._write)
        if version != read_version + 1:
            return  # somebody else's came between
        if instead_of is not None:
            mine = [action for file, action in zip(files, added, strict=True) if file.partition == instead_of]
            self._last = version, instead_of, mine
        elif not files and self._last is not None and self._last[0] == read_version:
            self._last = version, *self._last[1:]

    def _begin(self, application: str, number: int) -> Any:
        """A transaction on the very version in which the application's last number was looked up; None where it has this one."""
        self.spark._jvm.org.apache.spark.sql.SparkSession.setActiveSession(self.spark._jsparkSession)  # type: ignore[union-attr]
        while True:
            version, seen = self.local.seen(self.table, application)
            if seen is not None and seen >= number:
                return None
            transaction = self._log.startTransaction(self._scala.Option.empty(), self._scala.Option.empty())
            if transaction.readVersion() == version:
                # So that a commit of the application that comes between is found, and is a conflict.
                transaction.readTxn().append(application)
                return transaction

    def _files(self, transaction: Any, partition: Mapping[str, str]) -> list[Any]:
        """The partition's files; where they are this writer's own of the version before, as it has noted them."""
        version = transaction.readVersion()
        if self._last is not None and self._last[:2] == (version, partition):
            return self._last[2]
        parse = self.spark._jsparkSession.sessionState().sqlParser().parseExpression
        filters = [parse(f"`{name}` = '{value}'") for name, value in partition.items()]
        return list(_each(transaction.filterFiles(self._list(filters), False)))

    @property
    def _jvm(self) -> Any:
        return self.spark._jvm.org.apache.spark.sql.delta.actions  # type: ignore[union-attr]

    @property
    def _scala(self) -> Any:
        return self.spark._jvm.scala  # type: ignore[union-attr]

    @cached_property
    def _log(self) -> Any:
        return self.delta._jdt.deltaLog()

    @cached_property
    def _write(self) -> Any:
        """What the table's history calls it."""
        mode = self.spark._jvm.org.apache.spark.sql.SaveMode.Append  # type: ignore[union-attr]
        operation = getattr(self.spark._jvm, "org.apache.spark.sql.delta.DeltaOperations$Write")
        return operation(mode, *[self._scala.Option.empty()] * 8)

    def _action(self, action: Mapping[str, Any]) -> Any:
        return self._jvm.Action.fromJson(json.dumps(action))

    def _list(self, items: Sequence[Any]) -> Any:
        found = _static(self.spark, "scala.collection.immutable.List").empty()
        for item in reversed(items):
            found = found.prepended(item)
        return found


def _described(file: DataFile) -> dict[str, Any]:
    return {
        "path": file.path,
        "partitionValues": file.partition,
        "size": file.size,
        "modificationTime": file.written_at,
        "dataChange": True,
        "stats": file.statistics,
    }


def _static(spark: SparkSession, name: str) -> Any:
    """A Scala object."""
    return getattr(spark._jvm, f"{name}$").__getattr__("MODULE$")


def _each(sequence: Any) -> Iterator[Any]:
    found = sequence.iterator()
    while found.hasNext():
        yield found.next()
