"""Redriven records: refused once, and sent to their source topic again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

REDRIVEN = "watersmeet.redriven"
"""Header of a refused record that was sent again: `topic/partition/offset` of the refused one."""

_TOO_MANY_DIGITS: Final = 20
"""A number of digits that no offset has; Python refuses to parse some thousand."""

Headers: TypeAlias = Sequence[tuple[str, "bytes | None"]]


def redriven_offsets(topic: str, partition: int, headers: Headers) -> Iterator[tuple[int, int]]:
    """Yield the offsets of the refused records that a record with these headers claims to be.

    Only records that were in this partition of the topic count. Each offset comes with the number
    of headers that the record had then. Anybody who writes to the topic may make the claim:
    `fingerprint` tells whether it is true.
    """
    for count, (name, value) in enumerate(headers):
        of, _, offset = (value or b"").decode(errors="replace").rpartition("/")
        if (
            name == REDRIVEN
            and of == f"{topic}/{partition}"
            and offset.isdecimal()
            and len(offset) < _TOO_MANY_DIGITS
        ):
            yield int(offset), count


def fingerprint(key: bytes | None, value: bytes | None, headers: Headers) -> bytes:
    """Return a digest of a record's content, whatever its place and time.

    It is equal for a refused record and the same one sent again.
    """
    digest = hashlib.sha256()
    for part in (
        key,
        value,
        *(text for name, content in headers for text in (name.encode(), content)),
    ):
        digest.update(b"null" if part is None else b"%d:" % len(part))
        digest.update(part or b"")
    return digest.digest()
