"""Requests and answers of the process that evaluates expressions, and its limits."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, Final

import pyarrow as pa

MEMORY_BYTES: Final = 2 * 1024**3
"""The address space of the process, with its programs."""

RESULT_BYTES: Final = 64 * 1024**2
"""Largest size of the results of a request; that of one row is null where it is larger."""

ROW_S: Final = 1.0
"""Processor time for one row."""

ROWS_S: Final = 0.25
"""Processor time for several rows: where they take more, fewer of them are evaluated at a time."""

COUNTED: Final = "len "
"""Beginning of the name of a column of which an expression reads only the length."""

_LENGTHS: Final = struct.Struct("<QQ")


def write(stream: BinaryIO, head: Mapping[str, Any], rows: pa.Table) -> None:
    """Write a request or an answer: facts, and rows."""
    packed = pa.BufferOutputStream()
    with pa.ipc.new_stream(packed, rows.schema) as writer:
        writer.write_table(rows)
    text = json.dumps(head).encode()
    body = packed.getvalue()
    stream.write(_LENGTHS.pack(len(text), len(body)) + text)
    stream.write(memoryview(body))
    stream.flush()


def read(stream: BinaryIO) -> tuple[dict[str, Any], pa.Table] | None:
    """Read what `write` has written; None where the stream has ended."""
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    text_bytes, body_bytes = _LENGTHS.unpack(lengths)
    text = stream.read(text_bytes)
    body = stream.read(body_bytes)
    if len(body) < body_bytes:
        return None
    return json.loads(text), pa.ipc.open_stream(body).read_all()
