"""Files of a table that is partitioned by one column.

They are written a piece at a time, for a commit that names them.
"""

from __future__ import annotations

import tempfile
import uuid
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake.transaction import AddAction

from watersmeet.core.columns import filtered, row_values
from watersmeet.lake.data_file import FILES, DataFile
from watersmeet.lake.files import Files
from watersmeet.lake.maintenance import FILE_BYTES
from watersmeet.lake.tables import COUNTED_TYPES

MAX_FILES: Final = 256
"""Maximum number of files open at a time: a process may often have no more than 1,024."""


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
    """Writer of a table's files.

    Each is made on the local disk, and copied to the table's address once it is complete.
    """

    def __init__(
        self,
        schema: pa.Schema,
        by: str,
        address: str,
        files: Files,
        prefix: str = FILES,
    ) -> None:
        self._by = by
        self._address = address
        self._files = files
        self._prefix = prefix
        self._schema = schema.remove(schema.get_field_index(by))
        self._counted = [field.name for field in self._schema if field.type in COUNTED_TYPES]

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
                        written[value] = DataFile(self._schema, self._counted)
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
