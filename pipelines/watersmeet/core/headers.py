"""Headers of messages that hold JSON, and the one by which a redriven record says what it was.

Anybody who may write to a topic may have made them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import orjson

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


REDRIVEN = "watersmeet.redriven"
"""Header of a refused record that was sent again: `topic/partition/offset` of the refused one."""

_TOO_MANY_DIGITS: Final = 20
"""A number of digits that no offset has; Python refuses to parse some thousand."""

Headers: TypeAlias = Sequence[tuple[str, "bytes | None"]]


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
