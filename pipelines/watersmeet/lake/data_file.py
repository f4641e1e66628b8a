"""Files of a table, written a piece at a time for a commit that names them."""

from __future__ import annotations

import json
import tempfile
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.transaction import AddAction

from watersmeet.core.columns import filtered, row_values
from watersmeet.core.times import LAST_EVENT_TIME_MS, time_text
from watersmeet.lake.files import Files
from watersmeet.lake.maintenance import FILE_BYTES
from watersmeet.lake.tables import Table

FILES: Final = "part-"
"""The beginning of the names of all data files."""

MAX_FILES: Final = 256
"""Maximum number of files open at a time: a process may often have no more than 1,024."""


class DataFile:
    """Writer of one file.

    It is made on the local disk, in a file without a name, of which a killed process leaves
    nothing, and copied to the table's address once it is complete.

    `schema`: the columns of the table without those that partition it.
    """

    def __init__(self, table: Table, schema: pa.Schema) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - `put` closes it
        self._counted = [name for name in table.counted if name in schema.names]
        self._writer = pq.ParquetWriter(
            self._file,
            schema,
            write_statistics=self._counted,
            use_dictionary=table.has_structs or table.repeating,
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
    # A bound that is a time outside the calendar is left out: the log has times as text.
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


def by_key(chunks: Iterable[pa.Table], schema: pa.Schema, count: int) -> Iterator[pa.Table]:
    """Yield rows of silver in about `count` pieces, with all rows of a key in one.

    Meanwhile the rows are on the disk, in files without a name.
    """
    count = min(count, MAX_FILES)
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(count)]
        writers = [pa.ipc.new_stream(file, schema, options=options) for file in files]
        for chunk in chunks:
            keys = row_values(chunk, "partition", "tenant", "merge_key")
            numbers = np.array([zlib.crc32(repr(key).encode()) % count for key in keys])
            for number in np.unique(numbers):
                writers[number].write_table(chunk.filter(pa.array(numbers == number)))
        for writer, file in zip(writers, files, strict=True):
            writer.close()
            file.seek(0)
            with file, pa.ipc.open_stream(file) as rows:
                yield rows.read_all()


class PartitionedFiles:
    """Writer of the files of a table that is partitioned by one column.

    Each is made on the local disk, and copied to the table's address once it is complete.
    """

    def __init__(
        self,
        table: Table,
        address: str,
        files: Files,
        prefix: str = FILES,
    ) -> None:
        self._table = table
        [self._by] = table.partitioned_by
        self._address = address
        self._files = files
        self._prefix = prefix
        self._schema = table.schema.remove(table.schema.get_field_index(self._by))

    def write(self, chunks: Iterable[pa.Table]) -> list[AddAction]:
        """Write all rows, a row group for each piece; return the files' entries for a commit.

        After a failure there are no files.
        """
        added: list[AddAction] = []
        written: dict[str, DataFile] = {}
        try:
            for chunk in chunks:
                for value in pc.unique(chunk[self._by]).to_pylist():
                    is_its = pc.equal(chunk[self._by], value).to_numpy()
                    rows = filtered(chunk.select(self._schema.names), is_its).cast(self._schema)
                    if value not in written:
                        written[value] = DataFile(self._table, self._schema)
                    if written[value].write(rows) >= FILE_BYTES:
                        added.append(self._added(value, written.pop(value)))
                    del rows
                del chunk  # not in memory while the next one comes
            for value, file in written.items():
                added.append(self._added(value, file))
        except BaseException:
            self._files.delete_files(self._address, [file.path for file in added])
            raise
        return added

    def _added(self, value: str, file: DataFile) -> AddAction:
        name = f"{self._by}={value}/{self._prefix}{uuid.uuid4()}.snappy.parquet"
        return file.put(self._files, self._address, name, {self._by: value})
