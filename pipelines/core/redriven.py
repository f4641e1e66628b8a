"""What a record says that was redriven: refused once, and sent to its source topic again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

REDRIVEN = "watersmeet.redriven"
"""Of a refused record that was sent to its source again: `topic/partition/offset` of the refused one."""

_TOO_MANY_DIGITS: Final = 20
"""No offset has so many; Python refuses to make a number of some thousand."""

Headers: TypeAlias = Sequence[tuple[str, "bytes | None"]]


def redriven_offsets(topic: str, partition: int, headers: Headers) -> Iterator[tuple[int, int]]:
    """The offsets, in this partition of a topic, of the refused records that a record with these headers says that it was, each
    with how many headers it had then. Whoever writes to the topic may say so: `fingerprint` tells whether it is true.
    """
    for count, (name, value) in enumerate(headers):
        of, _, offset = (value or b"").decode(errors="replace").rpartition("/")
        if name == REDRIVEN and of == f"{topic}/{partition}" and offset.isdecimal() and len(offset) < _TOO_MANY_DIGITS:
            yield int(offset), count


def fingerprint(key: bytes | None, value: bytes | None, headers: Headers) -> bytes:
    """A digest of what a record is, whatever its place and time: equal for a refused record and the same one sent again."""
    found = hashlib.sha256()
    for part in (key, value, *(each for name, content in headers for each in (name.encode(), content))):
        found.update(b"null" if part is None else b"%d:" % len(part))
        found.update(part or b"")
    return found.digest()
