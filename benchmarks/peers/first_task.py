"""What Spark itself needs until Python has done something: a session as anybody starts it, and its
first task by `mapInArrow`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import SparkSession


def _as_they_are(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from rows


def main() -> None:
    """Returns once the task is done, without waiting for the session to end."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.master("local[*]").config("spark.ui.enabled", "false")
    rows = spark.getOrCreate().range(1).mapInArrow(_as_they_are, "id LONG")
    assert len(rows.collect()) == 1


if __name__ == "__main__":
    main()
