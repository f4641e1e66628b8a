"""The bound on what one value becomes in memory: how many items it has, whatever its bytes.

An item is an object, an array, or one value in them: what a parser makes an object of, and a column
a slot. A few bytes can spell many: `{},` is three, and an Avro record may be one. The count depends
on the value and its schemas alone, and is taken before anything is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

MAX_ITEMS: Final = 1_000_000
"""Maximum number of items of a value. It is a rule of reading, and never changes: a record is read
alike in every lake and release.
"""

TOO_MANY: Final = f"has more than {MAX_ITEMS:,} items"

_PIECE: Final = 2**20
_QUOTE: Final = ord('"')
_BEGINS_ITEM: Final = np.isin(np.arange(256), [*b"{[,:"])


# -- JSON


def has_many_items(text: bytes) -> bool:
    """Return True where a JSON text has more than `MAX_ITEMS` of the characters that begin an item.

    They are `{`, `[`, `,` and `:`, outside of strings.
    """
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
    """Return the function that counts the items of the lists and maps in a parsed value of a type.

    None where the type has none.
    """
    if pa.types.is_struct(kind):
        counts = {part.name: count for part in kind if (count := counter_of_lists(part.type))}
        if not counts:
            return None
        return lambda value: (
            sum(count(value.get(name)) for name, count in counts.items()) if value else 0
        )
    if pa.types.is_list(kind):
        return _of_list(slots_of(kind.value_type), counter_of_lists(kind.value_type), iter)
    if pa.types.is_map(kind):
        return _of_list(1 + slots_of(kind.item_type), counter_of_lists(kind.item_type), _values)
    return None


def _of_list(
    slots: int, of_item: _CountIn | None, items: Callable[[Any], Iterator[Any]]
) -> _CountIn:
    if of_item is None:
        return lambda value: slots * len(value) if value else 0
    return lambda value: slots * len(value) + sum(map(of_item, items(value))) if value else 0


def _values(entries: Mapping[str, Any]) -> Iterator[Any]:
    return iter(entries.values())


# -- Avro


class _TooManyError(Exception):
    """A value has too many items."""


@dataclass
class _Room:
    left: int


_Skip: TypeAlias = Callable[[bytes, int, _Room], int]
"""A function of a value's bytes, a place in them, and the room left: returns the place after the
part that begins there. Raises IndexError where the bytes are none of the schema.
"""


class _Part(NamedTuple):
    skip: _Skip
    items: int
    """How many items it has at most, but for those of arrays and maps in it."""
    bytes: int
    """How many bytes it has at least."""
    density: float
    """How many items arrays and maps in it have at most for each of their bytes."""


@dataclass(frozen=True)
class AvroItems:
    """Counter of the items of bare Avro values, written with one schema and read as another.

    `written`, `read`: the named types of each schema, as fastavro parses it.
    """

    written: Mapping[str, Any]
    read: Mapping[str, Any]
    _parts: dict[tuple[Any, Any], _Part] = field(default_factory=dict)

    def of(self, writer: Any, reader: Any) -> Callable[[bytes], bool]:
        """Return the function that says whether a value has more than `MAX_ITEMS`."""
        part = self._part(writer, reader)

        def has_many(value: bytes) -> bool:
            """Return True where a value has too many items; False also where it is malformed."""
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

    def _part(self, writer: Any, reader: Any) -> _Part:
        writer, reader = _node(writer, self.written), _choice(reader, self.read)
        if isinstance(writer, list):
            return self._union(writer, reader)
        kind = writer["type"]
        if kind in ("record", "error"):
            key = writer["name"], reader and reader.get("name")
            if key not in self._parts:
                self._parts[key] = self._record(writer, reader)
            return self._parts[key]
        if kind == "array":
            return _repeated(self._part(writer["items"], reader and reader.get("items")))
        if kind == "map":
            value = self._part(writer["values"], reader and reader.get("values"))
            return _repeated(_joined([_TEXT, value]))
        if kind == "fixed":
            return _of_size(int(writer["size"]))
        return _PLAIN.get(kind, _LONG)

    def _union(self, choices: list[Any], reader: Any) -> _Part:
        parts = [self._part(choice, reader) for choice in choices]
        skips = [part.skip for part in parts]

        def skip(value: bytes, at: int, room: _Room) -> int:
            """Skip the number of a choice, and the choice."""
            number, at = _long(value, at)
            return skips[_natural(number)](value, at, room)

        return _Part(
            skip,
            max(self._read_items(reader), *(part.items for part in parts)),
            1 + min(part.bytes for part in parts),
            max(part.density for part in parts),
        )

    def _record(self, writer: Mapping[str, Any], reader: Any) -> _Part:
        fields = reader.get("fields", ()) if reader else ()
        rest = {part["name"]: part["type"] for part in fields}
        names = {alias: part["name"] for part in fields for alias in part.get("aliases", ())}
        parts = []
        for own in writer["fields"]:
            name = own["name"] if own["name"] in rest else names.get(own["name"])
            parts.append(self._part(own["type"], rest.pop(name, None)))
        record = _joined(parts)
        return record._replace(items=1 + record.items + sum(map(self._read_items, rest.values())))

    def _read_items(self, reader: Any) -> int:
        """Return how many items a default has in the column of a part that is read."""
        if reader is None:
            return 1
        reader = _choice(reader, self.read)
        if reader["type"] not in ("record", "error"):
            return 1
        return 1 + sum(self._read_items(part["type"]) for part in reader["fields"])


def _node(schema: Any, named: Mapping[str, Any]) -> Any:
    """Return a part of a schema that is no name."""
    if isinstance(schema, list):
        return schema
    node = {"type": schema} if isinstance(schema, str) else schema
    kind = node["type"]
    return node if kind in _OWN else named.get(kind, node)


def _choice(reader: Any, named: Mapping[str, Any]) -> Any:
    """Return what a part that is read is, if it is not null; None where nobody reads it."""
    if reader is None:
        return None
    node = _node(reader, named)
    if isinstance(node, list):
        nodes = [_node(choice, named) for choice in node]
        return next((choice for choice in nodes if choice["type"] != "null"), nodes[0])
    return node


def _joined(parts: list[_Part]) -> _Part:
    skips = [part.skip for part in parts]

    def skip(value: bytes, at: int, room: _Room) -> int:
        """Skip one part after the other."""
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
        """Skip the blocks of an array or a map. Raises _TooManyError."""
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
    """Return the number at a place, of 64 bits as fastavro has it, and the place after it."""
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
_OWN: Final = frozenset(
    [*_PLAIN, "int", "long", "enum", "fixed", "record", "error", "array", "map"]
)
"""Names that mean Avro's own types."""
