"""The bound on what one value becomes in memory: how many items it has, whatever its bytes.

An item is an object, an array, or one value in them. A few bytes can spell many: `{},` is three.
The count depends on the value and its schemas alone, and is taken before anything is built.

Within the bound a value may still be large, and workers are as many as cores. So large values are
parsed in turns: one at a time over all workers of a machine, on both engines.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from watersmeet.core.avro_types import AvroType


MAX_ITEMS: Final = 1_000_000
"""Maximum items of a value: a rule of reading, which is the same in every lake and release."""

TOO_MANY: Final = f"has more than {MAX_ITEMS:,} items"

_PIECE: Final = 2**20
_QUOTE: Final = ord('"')
_BEGINS_ITEM: Final = np.isin(np.arange(256), [*b"{[,:"])


# -- JSON


def has_many_items(text: bytes) -> bool:
    """Return True where more than `MAX_ITEMS` of `{`, `[`, `,` and `:` are outside of strings."""
    if len(text) <= MAX_ITEMS or sum(map(text.count, (b"{", b"[", b",", b":"))) <= MAX_ITEMS:
        return False
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    count = 0
    is_inside = False
    for begin in range(0, len(text), _PIECE):  # as a whole, it would take several times its size
        piece = np.frombuffer(text, np.uint8, min(_PIECE, len(text) - begin), begin)
        inside = np.logical_xor.accumulate(piece == _QUOTE) ^ is_inside
        count += np.count_nonzero(_BEGINS_ITEM[piece] & ~inside)
        is_inside = bool(inside[-1])
    return count > MAX_ITEMS


# -- columns

_CountIn: TypeAlias = Callable[[Any], int]


def slots_of(kind: pa.DataType) -> int:
    """Return how many items a value of a type has in a column, but for those of lists and maps."""
    if pa.types.is_struct(kind):
        return 1 + sum(slots_of(part.type) for part in kind)
    return 1


def counter_of_lists(kind: pa.DataType) -> _CountIn | None:
    """Return the function that counts the items of lists and maps in a value; None without any."""
    if pa.types.is_struct(kind):
        counts = {part.name: count for part in kind if (count := counter_of_lists(part.type))}
        if not counts:
            return None
        return lambda value: (
            sum(count(value.get(name)) for name, count in counts.items()) if value else 0
        )
    if not pa.types.is_list(kind) and not pa.types.is_map(kind):
        return None
    is_map = pa.types.is_map(kind)
    item = kind.item_type if is_map else kind.value_type
    slots: int = slots_of(item) + is_map
    of_item = counter_of_lists(item)

    def count_items(value: Any) -> int:
        if not value:
            return 0
        inside = 0 if of_item is None else sum(map(of_item, value.values() if is_map else value))
        return slots * len(value) + inside

    return count_items


# -- Avro


class _TooManyError(Exception):
    """A value has too many items."""


@dataclass
class _Room:
    left: int


_Skip: TypeAlias = Callable[[bytes, int, _Room], int]
"""Skips a part of a value from a place, with room left; IndexError: the bytes are no such part."""


class _Part(NamedTuple):
    skip: _Skip
    items: int
    """How many items it has at most, but for those of arrays and maps in it."""
    bytes: int
    """How many bytes it has at least."""
    density: float
    """How many items arrays and maps in it have at most for each of their bytes."""


def many_items(writer: AvroType, reader: AvroType) -> Callable[[bytes], bool]:
    """Return the function that says whether a bare Avro value has more than `MAX_ITEMS`."""
    part = _Parts().of(writer, reader)

    def has_many(value: bytes) -> bool:
        if part.items + part.density * len(value) <= MAX_ITEMS:
            return False
        try:
            part.skip(value, 0, _Room(MAX_ITEMS - part.items))
        except _TooManyError:
            return True
        except IndexError:
            pass  # the decoder says what is wrong, and comes no further
        return False

    return has_many


class _Parts:
    def __init__(self) -> None:
        self._records: dict[tuple[AvroType, str | None], _Part] = {}

    def of(self, writer: AvroType, reader: AvroType | None) -> _Part:
        reader = reader and _choice(reader)
        match writer.kind:
            case "union":
                return self._union(writer, reader)
            case "record":
                key = writer, reader.name if reader else None
                if key not in self._records:
                    self._records[key] = self._record(writer, reader)
                return self._records[key]
            case ("array" | "map") as kind:
                inside = reader.items[0] if reader and reader.kind == kind else None
                item = self.of(writer.items[0], inside)
                return _repeated(item if kind == "array" else _joined([_TEXT, item]))
            case "fixed":
                return _of_size(int(writer.schema["size"]))
        return _PLAIN.get(writer.kind, _LONG)

    def _union(self, union: AvroType, reader: AvroType | None) -> _Part:
        parts = [self.of(choice, reader) for choice in union.items]
        skips = [part.skip for part in parts]

        def skip(value: bytes, at: int, room: _Room) -> int:
            number, at = _long(value, at)
            return skips[_natural(number)](value, at, room)

        return _Part(
            skip,
            max(_read_items(reader), *(part.items for part in parts)),
            1 + min(part.bytes for part in parts),
            max(part.density for part in parts),
        )

    def _record(self, writer: AvroType, reader: AvroType | None) -> _Part:
        fields = reader.fields if reader else []
        rest = {field.name: field.type for field in fields}
        names = {alias: field.name for field in fields for alias in field.schema.get("aliases", ())}
        parts = []
        for own in writer.fields:
            name = own.name if own.name in rest else names.get(own.name, "")
            parts.append(self.of(own.type, rest.pop(name, None)))
        record = _joined(parts)
        return record._replace(items=1 + record.items + sum(map(_read_items, rest.values())))


def _read_items(reader: AvroType | None) -> int:
    fields = _choice(reader).fields if reader else []
    return 1 + sum(_read_items(field.type) for field in fields)


def _choice(reader: AvroType) -> AvroType:
    return reader.choices[0] if reader.kind == "union" else reader


def _joined(parts: list[_Part]) -> _Part:
    skips = [part.skip for part in parts]

    def skip(value: bytes, at: int, room: _Room) -> int:
        for each in skips:
            at = each(value, at, room)
        return at

    return _Part(
        skip,
        sum(part.items for part in parts),
        sum(part.bytes for part in parts),
        max((part.density for part in parts), default=0),
    )


def _repeated(item: _Part) -> _Part:
    def skip(value: bytes, at: int, room: _Room) -> int:
        while True:
            count, at = _long(value, at)
            if count == 0:
                return at
            if count < 0:
                count = -count
                _, at = _long(value, at)  # the size of the block
            room.left -= count * item.items
            if room.left < 0:
                raise _TooManyError
            for _ in range(count):
                at = item.skip(value, at, room)

    return _Part(skip, 1, 1, max(item.density, item.items / max(1, item.bytes)))


def _of_size(size: int) -> _Part:
    return _Part(lambda value, at, _: _within(value, at + size), 1, size, 0)


def _skip_long(value: bytes, at: int, _: _Room) -> int:
    while value[at] & 0x80:
        at += 1
    return at + 1


def _skip_text(value: bytes, at: int, _: _Room) -> int:
    size, at = _long(value, at)
    return _within(value, at + _natural(size))


def _long(value: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = value[at]
        at += 1
        if shift < 64:
            number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), at


def _within(value: bytes, at: int) -> int:
    if at > len(value):
        raise IndexError
    return at


def _natural(number: int) -> int:
    if number < 0:
        raise IndexError
    return number


_LONG: Final = _Part(_skip_long, 1, 1, 0)
_TEXT: Final = _Part(_skip_text, 1, 1, 0)
_PLAIN: Final = {
    "null": _of_size(0),
    "boolean": _of_size(1),
    "float": _of_size(4),
    "double": _of_size(8),
    "string": _TEXT,
    "bytes": _TEXT,
}


LARGE_BYTES: Final = 2**20
"""Size of values that are parsed in turns. All that are smaller fit into memory beside them."""

_PATH: Final = Path(tempfile.gettempdir(), f"watersmeet-{os.getuid()}.turn")
_AT_ONCE: Final[AbstractContextManager[None]] = nullcontext()


def in_turn(size: int) -> AbstractContextManager[None]:
    """Hold, while a large value is parsed, what nobody else holds; the process's end frees it."""
    return _turn() if size > LARGE_BYTES else _AT_ONCE


@contextmanager
def _turn() -> Iterator[None]:
    file = None
    with suppress(OSError):  # without a file that can be locked, as many as there are workers
        # Each opens it for itself: threads of one process take turns, too.
        file = os.open(_PATH, os.O_CREAT | os.O_NOFOLLOW | os.O_RDONLY, 0o600)
        if os.fstat(file).st_uid == os.getuid():  # else somebody else could hold it for ever
            fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if file is not None:
            os.close(file)
