"""Headers of messages that hold JSON: anybody who may write to a topic may have made them."""

from __future__ import annotations

import zlib
from typing import Any, Final

import orjson

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
