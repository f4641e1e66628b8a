"""Headers of messages: how those of many are made, those that hold JSON, and the one by which a
redriven record says what it was.

Anybody who may write to a topic may have made what is read.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import in_lists, int64s, one_chunk
from watersmeet.core.types import HEADERS

Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number that fits into a column, and is not below 0."""

MAX_HEADER_BYTES: Final = 2**20
"""Maximum size of a header that is read, unpacked: a few kB of zlib may be as many MB."""


def packed(text: bytes) -> bytes:
    """Return a header's text compressed, for `header_json`."""
    return zlib.compress(text)


def header_json(content: bytes | None, *, is_packed: bool = False) -> Any:
    """Return the JSON value of a header, which is compressed with zlib where it `is_packed`.

    Raise ValueError where the header is no such thing, or has more than `MAX_HEADER_BYTES`.
    """
    text = content or b""
    if is_packed:
        unpacking = zlib.decompressobj()
        try:
            text = unpacking.decompress(text, MAX_HEADER_BYTES + 1)
        except zlib.error:
            raise ValueError("not compressed with zlib") from None
        if not unpacking.eof and len(text) <= MAX_HEADER_BYTES:
            raise ValueError("cut off")
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"more than {MAX_HEADER_BYTES} bytes")
    return orjson.loads(text)


Headers: TypeAlias = Sequence[tuple[str, "bytes | None"]]
"""Headers of a message."""

HeaderColumns: TypeAlias = Sequence[tuple[str, "pa.Array | pa.ChunkedArray"]]
"""Headers of several messages: their names, and by message their content (text or bytes); null
where one lacks it."""


def header_lists(
    columns: HeaderColumns,
    further: Mapping[int, Headers] = MappingProxyType({}),
    own: pa.ChunkedArray | None = None,
) -> pa.Array:
    """Return the headers of each message (`HEADERS`): those that it had of its `own`, then those
    of the columns, then the `further` ones of its row.
    """
    items, rows = [], []
    if own is not None:
        had = one_chunk(own).cast(HEADERS)
        items.append(had.flatten())
        counts = int64s(pc.fill_null(pc.list_value_length(had), 0))
        rows.append(np.repeat(np.arange(len(had)), counts))
    for name, contents in columns:
        said = one_chunk(contents.drop_null()).cast(pa.binary())
        pair = [pa.repeat(pa.scalar(name), len(said)), said]
        items.append(pa.StructArray.from_arrays(pair, fields=list(HEADERS.value_type)))
        rows.append(np.flatnonzero(contents.is_valid().to_numpy(zero_copy_only=False)))
    for row, pairs in further.items():
        dicts = [{"key": name, "value": content} for name, content in pairs]
        items.append(pa.array(dicts, HEADERS.value_type))
        rows.append(np.full(len(dicts), row))
    numbers = np.concatenate(rows)
    order = np.argsort(numbers, kind="stable")
    in_order = pa.concat_arrays(items).take(pa.array(order))
    return in_lists(numbers[order], in_order, len(columns[0][1])).cast(HEADERS)


def place_texts(rows: pa.Table) -> pa.ChunkedArray:
    """Return where each record is, or was: `topic/partition/offset`."""
    place = (rows[name].cast(pa.string()) for name in ("topic", "partition", "offset"))
    return pc.binary_join_element_wise(*place, "/")


REDRIVEN = "watersmeet.redriven"
"""Header of a refused record that was sent again: `topic/partition/offset` of the refused one."""

_TOO_MANY_DIGITS: Final = 20
"""A number of digits that no offset has; Python refuses to parse some thousand."""


def redriven_offset(
    topic: str, partition: int, at: int, headers: Headers
) -> tuple[int, int] | None:
    """Return the offset of the refused record that a record claims to be, and its headers' number.

    None without a claim, or for one of another partition, or of what does not come before. The last
    header counts; anybody may write one: `fingerprint` tells whether it is true.
    """
    claims = [count for count, (name, _) in enumerate(headers) if name == REDRIVEN]
    if not claims:
        return None
    of, _, offset = (headers[claims[-1]][1] or b"").decode(errors="replace").rpartition("/")
    is_number = offset.isdecimal() and len(offset) < _TOO_MANY_DIGITS
    is_before = is_number and of == f"{topic}/{partition}" and int(offset) < at
    return (int(offset), claims[-1]) if is_before else None


def fingerprint(key: bytes | None, value: bytes | None, headers: Headers) -> bytes:
    """Return a digest of a record's content, equal for a refused record and its copy."""
    digest = hashlib.sha256()
    for part in (
        key,
        value,
        *(text for name, content in headers for text in (name.encode(), content)),
    ):
        digest.update(b"null" if part is None else b"%d:" % len(part))
        digest.update(part or b"")
    return digest.digest()
