"""Redriven records: refused once, and sent to their source topic again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, TypeAlias

REDRIVEN = "watersmeet.redriven"
"""Header of a refused record that was sent again: `topic/partition/offset` of the refused one."""

_TOO_MANY_DIGITS: Final = 20
"""A number of digits that no offset has; Python refuses to parse some thousand."""

Headers: TypeAlias = Sequence[tuple[str, "bytes | None"]]


def redriven_offset(
    topic: str, partition: int, at: int, headers: Headers
) -> tuple[int, int] | None:
    """Return the offset of the refused record that the record at an offset claims to be.

    It comes with the number of headers that the refused record had. None where there is no claim,
    or one of another partition, or of what does not come before. The last header that makes a claim
    counts, since a redrive adds its own behind all others. Anybody who writes to the topic may make
    one: `fingerprint` tells whether it is true.
    """
    claims = [count for count, (name, _) in enumerate(headers) if name == REDRIVEN]
    if not claims:
        return None
    of, _, offset = (headers[claims[-1]][1] or b"").decode(errors="replace").rpartition("/")
    is_number = offset.isdecimal() and len(offset) < _TOO_MANY_DIGITS
    is_before = is_number and of == f"{topic}/{partition}" and int(offset) < at
    return (int(offset), claims[-1]) if is_before else None


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
