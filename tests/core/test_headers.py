"""Headers that hold JSON: none of them takes more memory than its bound, whoever made it."""

from __future__ import annotations

import tracemalloc
import zlib

import pytest

from watersmeet.core.headers import MAX_HEADER_BYTES, header_json, packed
from watersmeet.core.recovery import parse_idle
from watersmeet.core.sequence import IDLE, IDLE_PACKED

pytestmark = [pytest.mark.promise("N33"), pytest.mark.fault("hostile")]

BOMB = zlib.compress(bytes(200 * 2**20), 9)


def test_what_was_packed_is_read() -> None:
    assert header_json(packed(b'{"a":[1]}'), is_packed=True) == {"a": [1]}
    largest = b'"%s"' % (b"x" * (MAX_HEADER_BYTES - 2))
    assert len(header_json(largest)) == MAX_HEADER_BYTES - 2
    assert header_json(packed(largest), is_packed=True) == header_json(largest)


@pytest.mark.parametrize(
    ("content", "is_packed"),
    [
        (BOMB, True),
        (packed(b" " * MAX_HEADER_BYTES + b"1"), True),
        (packed(b"[1]")[:-1], True),
        (b"[1]", True),
        (b" " * MAX_HEADER_BYTES + b"1", False),
        (b"[" * 100_000, False),
        (None, False),
        (None, True),
    ],
)
def test_no_other_header_is_and_none_is_unpacked_beyond_the_bound(
    content: bytes | None, is_packed: bool
) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"."):
            header_json(content, is_packed=is_packed)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4 * MAX_HEADER_BYTES


def test_idle_decisions_that_unpack_to_more_are_refused_by_their_header() -> None:
    for headers in ({IDLE_PACKED: BOMB}, {IDLE: b" " * MAX_HEADER_BYTES + b"{}"}):
        [name] = headers
        with pytest.raises(ValueError, match=name):
            parse_idle(headers)
