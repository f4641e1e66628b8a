"""Deletion vectors: which rows of a data file are gone, as Delta keeps them beside it, written by Delta's own classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import parquet
from pyspark.sql import SparkSession

from pipelines.adapters.scala import NONE, scala_object, some

_DELTA = "org.apache.spark.sql.delta"


@dataclass
class DeletionVectors:
    """The vectors of one commit to a table in a folder of this machine (`log`: Delta's of it), all in one file."""

    spark: SparkSession
    log: Any
    folder: Path
    gone: pa.Table
    """The keys of the rows that go: columns of texts and numbers, the most telling one last."""
    marked: int = 0
    """How many rows they mark that no earlier one did."""

    def mark(self, file: Any) -> list[Any]:
        """The actions after which the rows that go are not in the file any more; none where it has no such row."""
        rows = self._rows(file)
        if not len(rows):
            return []
        bitmap, before = self._bitmap(rows), file.deletionVector()
        if before is not None:
            bitmap.merge(self._store.read(before, self.log.dataPath()))
        new = bitmap.cardinality() - (before.cardinality() if before is not None else 0)
        if not new:
            return []
        self.marked += new
        records = file.numPhysicalRecords()
        if records.isDefined() and bitmap.cardinality() == records.get():
            return [file.remove()]
        action = file.removeRows(self._write(bitmap), True, True)  # so that its statistics count as bounds from now on
        return [action._1(), action._2()]

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()

    def _rows(self, file: Any) -> NDArray[np.int64]:
        """Where in the file those keys are, also where they are marked already."""
        telling = self.gone.column_names[-1]
        keys = parquet.read_table(self.folder / unquote(file.path()), columns=self.gone.column_names, partitioning=None)
        found = np.flatnonzero(pc.is_in(keys[telling], value_set=self.gone[telling]).to_numpy())
        hits = _tuples(keys.select(self.gone.column_names).take(found))
        rows: NDArray[np.int64] = found[np.fromiter((hit in self._wanted for hit in hits), bool, len(found))]
        return rows

    @cached_property
    def _wanted(self) -> set[tuple[Any, ...]]:
        return set(_tuples(self.gone))

    def _bitmap(self, rows: NDArray[np.int64]) -> Any:
        jvm: Any = self.spark._jvm
        numbers = self.spark.sparkContext._gateway.new_array(jvm.long, len(rows))  # type: ignore[union-attr]
        jvm.java.nio.ByteBuffer.wrap(np.asarray(rows, dtype=">i8").tobytes()).asLongBuffer().get(numbers)
        sequence = scala_object(self.spark, "scala.collection.immutable.ArraySeq").unsafeWrapArray(numbers)
        return scala_object(self.spark, f"{_DELTA}.deletionvectors.RoaringBitmapArray").apply(sequence)

    def _write(self, bitmap: Any) -> Any:
        portable = scala_object(self.spark, f"{_DELTA}.deletionvectors.RoaringBitmapArrayFormat").Portable()
        bitmap.runOptimize()
        content = bitmap.serializeAsByteArray(portable)
        place = some(self.spark, self._writer.write(content).offset())
        descriptor = scala_object(self.spark, f"{_DELTA}.actions.DeletionVectorDescriptor")
        return descriptor.onDiskWithRelativePath(
            self._id, "", len(content), bitmap.cardinality(), place, scala_object(self.spark, NONE)
        )

    @cached_property
    def _id(self) -> Any:
        jvm: Any = self.spark._jvm
        return jvm.java.util.UUID.randomUUID()

    @cached_property
    def _store(self) -> Any:
        return scala_object(self.spark, f"{_DELTA}.storage.dv.DeletionVectorStore").createInstance(self.log.newDeltaHadoopConf())

    @cached_property
    def _writer(self) -> Any:
        """Makes the file with the first vector."""
        table = self._store.pathWithFileSystem(self.log.dataPath())
        return self._store.createWriter(self._store.generateFileNameInTable(table, self._id, ""))


def _tuples(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.to_pylist() for column in rows.columns), strict=True)
