"""A file of a table, written a piece at a time for a commit that names it."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.transaction import AddAction

from watersmeet.core.times import LAST_EVENT_TIME_MS, time_text
from watersmeet.lake.files import Files

FILES: Final = "part-"
"""The beginning of the names of all data files."""


class DataFile:
    """Writer of one file.

    It is made on the local disk, in a file without a name, of which a killed process leaves
    nothing, and copied to the table's address once it is complete.

    - `counted`: the columns that it has statistics of.
    - `repeating`: the columns whose values are looked for repetitions; None for all.
    """

    def __init__(
        self,
        schema: pa.Schema,
        counted: Sequence[str],
        repeating: Sequence[str] | None = None,
    ) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - `put` closes it
        self._counted = counted
        self._writer = pq.ParquetWriter(
            self._file,
            schema,
            write_statistics=list(counted),
            use_dictionary=True if repeating is None else list(repeating),
        )

    def write(self, rows: pa.Table) -> int:
        """Write rows as a row group, and return how many bytes the file has."""
        self._writer.write_table(rows)
        return self._file.tell()

    def put(
        self, files: Files, address: str, name: str, values: Mapping[str, str | None]
    ) -> AddAction:
        """Complete the file, copy it below the table's address, and return its entry for a commit.

        `values`: those of the columns that partition the table.
        """
        self._writer.close()
        size = self._file.tell()
        with self._file as file:
            statistics = _statistics(pq.read_metadata(file), self._counted)
            file.seek(0)
            files.put(file, f"{address}/{name}")
        now_ms = time.time_ns() // 1_000_000
        return AddAction(name, size, values, now_ms, True, json.dumps(statistics))


def _statistics(written: pq.FileMetaData, counted: Sequence[str]) -> dict[str, Any]:
    """Return the statistics of these columns of a file, as Delta's log has them.

    A bound that is a time outside the calendar is left out: the log has times as text.
    """
    least = dict[str, Any]()
    most = dict[str, Any]()
    nulls = dict[str, int]()
    groups = [written.row_group(i) for i in range(written.num_row_groups)]
    columns = {written.schema.column(i).path: i for i in range(written.num_columns)}
    for name in counted:
        chunks = [group.column(columns[name]).statistics for group in groups]
        statistics = [chunk for chunk in chunks if chunk is not None]  # a group without rows
        nulls[name] = sum(column.null_count for column in statistics)
        if with_values := [column for column in statistics if column.has_min_max]:
            # Not `min` and `max` of a time, which are times of Python.
            is_time = with_values[0].logical_type.type == "TIMESTAMP"
            first, last = ("min_raw", "max_raw") if is_time else ("min", "max")
            bounds = (
                (least, min(getattr(column, first) for column in with_values)),
                (most, max(getattr(column, last) for column in with_values)),
            )
            for limits, bound in bounds:
                if not is_time:
                    limits[name] = bound
                elif 0 <= bound // 1000 <= LAST_EVENT_TIME_MS:
                    limits[name] = time_text(bound // 1000)
    return {
        "numRecords": written.num_rows,
        "minValues": least,
        "maxValues": most,
        "nullCount": nulls,
    }
