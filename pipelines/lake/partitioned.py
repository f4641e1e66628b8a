"""Files of a table that is partitioned by one column.

They are written a piece at a time, for a commit that names them.
"""

from __future__ import annotations

import json
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.transaction import AddAction

from pipelines.core.types import TIME
from pipelines.lake.files import Files
from pipelines.lake.maintenance import FILE_BYTES

_COUNTED: Final = (pa.int32(), pa.int64(), TIME)
"""Types of the columns that a file has statistics of.

Statistics of other types could tell a key (`forget`).
"""

MAX_FILES: Final = 256
"""Maximum number of files open at a time: a process may often have no more than 1,024."""


def by_key(
    chunks: Iterable[pa.Table], schema: pa.Schema, count: int, folder: Path
) -> Iterator[pa.Table]:
    """Yield rows of silver in about `count` pieces, with all rows of a key in one.

    Meanwhile the rows are on the disk.
    """
    count = min(count, MAX_FILES)
    paths = [folder / f"{number}.arrow" for number in range(count)]
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    writers = [pa.ipc.new_stream(path, schema, options=options) for path in paths]
    for chunk in chunks:
        keys = zip(
            *(chunk[name].to_pylist() for name in ("partition", "tenant", "merge_key")), strict=True
        )
        numbers = np.array([zlib.crc32(repr(key).encode()) % count for key in keys])
        for number in np.unique(numbers):
            writers[number].write_table(chunk.filter(pa.array(numbers == number)))
    for writer, path in zip(writers, paths, strict=True):
        writer.close()
        with pa.ipc.open_stream(path) as rows:
            yield rows.read_all()
        path.unlink()


class PartitionedFiles:
    """Writer of a table's files.

    Each is made in a folder of the local disk, and moved to the table's address once it is
    complete.
    """

    def __init__(
        self, schema: pa.Schema, by: str, address: str, files: Files, folder: Path
    ) -> None:
        self._by = by
        self._address = address
        self._files = files
        self._folder = folder
        self._schema = schema.remove(schema.get_field_index(by))
        self._counted = [field.name for field in self._schema if field.type in _COUNTED]

    def write(self, chunks: Iterable[pa.Table]) -> list[AddAction]:
        """Write all rows, a row group for each piece; return the files' entries for a commit."""
        added: list[AddAction] = []
        writers: dict[str, pq.ParquetWriter] = {}
        for chunk in chunks:
            for value in pc.unique(chunk[self._by]).to_pylist():
                rows = (
                    chunk.filter(pc.equal(chunk[self._by], value))
                    .select(self._schema.names)
                    .cast(self._schema)
                )
                path = self._folder / value
                if value not in writers:
                    writers[value] = pq.ParquetWriter(
                        path, self._schema, write_statistics=self._counted
                    )
                writers[value].write_table(rows)
                if path.stat().st_size >= FILE_BYTES:
                    added.append(self._added(value, writers.pop(value)))
        return added + [self._added(value, writer) for value, writer in writers.items()]

    def _added(self, value: str, writer: pq.ParquetWriter) -> AddAction:
        writer.close()
        path = self._folder / value
        name = f"{self._by}={value}/part-{uuid.uuid4()}.snappy.parquet"
        size = path.stat().st_size
        statistics = _statistics(pq.read_metadata(path), self._counted)
        self._files.put(path, f"{self._address}/{name}")
        return AddAction(
            name, size, {self._by: value}, time.time_ns() // 1_000_000, True, json.dumps(statistics)
        )


def _statistics(written: pq.FileMetaData, counted: list[str]) -> dict[str, Any]:
    """Return the statistics of these columns of a file, as Delta's log has them."""
    least = dict[str, Any]()
    most = dict[str, Any]()
    nulls = dict[str, int]()
    groups = [written.row_group(i) for i in range(written.num_row_groups)]
    columns = {written.schema.column(i).path: i for i in range(written.num_columns)}
    for name in counted:
        statistics = [group.column(columns[name]).statistics for group in groups]
        nulls[name] = sum(column.null_count for column in statistics)
        if with_values := [column for column in statistics if column.has_min_max]:
            least[name] = _json_value(min(column.min for column in with_values))
            most[name] = _json_value(max(column.max for column in with_values))
    return {
        "numRecords": written.num_rows,
        "minValues": least,
        "maxValues": most,
        "nullCount": nulls,
    }


def _json_value(value: Any) -> Any:
    """Return a number as it is, and a time as text with whole milliseconds."""
    return (
        value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if isinstance(value, datetime)
        else value
    )
