"""Values of a source: from bronze's bytes to silver's column, and from there to a message's JSON.

Without a schema they are JSON text, with one a struct. JSON is written as Spark's writer, Jackson,
writes it: no spaces, nulls kept, only needed escapes, doubles in the notation of Java. What JSON
has no type for is written as docs/messages.md says.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from itertools import repeat
from math import isfinite, isnan
from typing import Any, Final, TypeAlias

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import Int64s, cuts, int64s, lengths
from watersmeet.core.items import LARGE_BYTES, in_turn
from watersmeet.core.types import TIME

_LARGEST_NUMBER: Final = len("-2.2250738585072014E-308")
_LARGEST_TIME: Final = len('"9999-12-31T23:59:59.999999Z"')
_LARGEST_ESCAPE: Final = len("\\u0000")  # for one byte
_ROWS = 4_096
_NOWHERE: Final[Iterator[tuple[int, ...]]] = repeat(())


# -- from bytes to columns


def typed_values(
    values: pa.Array | pa.ChunkedArray,
    value_type: pa.DataType,
    decode: Callable[..., Any] | None = None,
    places: Iterator[tuple[int, ...]] = _NOWHERE,
    *,
    all_fit: bool = False,
) -> Any:
    """Return bronze's values (binary) as silver keeps them: JSON text, or the source's struct.

    With `decode`, they are what it makes of their bytes, and of the partition and offset of each
    (`places`) where it needs them. Without it, they are JSON: integers may be spelled 1.0 or 1e3,
    and are exact beyond 2**53; a missing field is null, one that the type lacks is dropped, and one
    that does not fit its type is null, since its record was read before the schema had it. With
    `all_fit`, every record was read by this schema, and nothing is checked.

    A value that cannot be read is a defect of the reader, and raises ValueError.
    """
    if isinstance(values, pa.ChunkedArray):
        return pa.chunked_array(
            [
                typed_values(chunk, value_type, decode, places, all_fit=all_fit)
                for chunk in values.chunks
            ],
            value_type,
        )
    if not pa.types.is_struct(value_type):
        return values.cast(value_type)
    fit = fitter(value_type, _exact_int64)
    structs = []
    # What a piece becomes may take many times its bytes. Only a single value may have more of them
    # than are parsed beside others (`core.items`).
    for first, last in cuts(lengths(values), LARGE_BYTES, _ROWS):
        texts = values[first:last].to_numpy(zero_copy_only=False).tolist()
        with in_turn(sum(len(text or b"") for text in texts)):
            if decode is None:
                structs.append(_structs(texts, value_type, fit, all_fit))
            else:
                placed = zip(texts, places, strict=False)  # `places` goes on
                values_of = [None if t is None else decode(t, *place) for t, place in placed]
                structs.append(pa.array(values_of, value_type))
    return pa.concat_arrays(structs) if structs else pa.array([], value_type)


_Fit: TypeAlias = Callable[[Any], Any]
_FRACTION_OR_EXPONENT = re.compile(rb"[0-9][.eE]")


class _InexactError(Exception):
    """A double stands for an integer, and may hide what it was spelled as."""


def _structs(texts: list[bytes | None], kind: pa.DataType, fit: _Fit, all_fit: bool) -> pa.Array:
    has_integers = "int64" in str(kind)

    def document(text: bytes | None) -> Any:
        if text is None:
            return None
        found = orjson.loads(text)
        if all_fit and not (has_integers and _FRACTION_OR_EXPONENT.search(text)):
            return found
        try:
            return fit(found)
        except _InexactError:
            return fit(json.loads(text, parse_float=Decimal))

    documents = [*map(document, texts)]
    if all_fit:
        with suppress(pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):  # an integer as a double
            return pa.array(documents, kind)
        documents = [document and fit(document) for document in documents]
    return pa.array(documents, kind)


def _int64(value: Any) -> int | None:
    # The schema tests a double, which may hide the fraction of a number beyond 2**52.
    if type(value) is Decimal and float(value).is_integer():
        value = int(value.to_integral_value(ROUND_HALF_UP))
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def _exact_int64(value: Any) -> int | None:
    if type(value) is float:
        raise _InexactError
    return _int64(value)


def fitter(kind: pa.DataType, of_int64: _Fit = _int64) -> _Fit:
    """Return the function that brings a value to a type: with null for what it lacks, and for what
    is of another type, as JSON tells types apart.

    A whole number of 64 bits is an integer; one that is a double is none, and a Decimal, as JSON is
    read where that matters, is exact. `of_int64` is the function that brings a value to int64.
    """
    if pa.types.is_struct(kind):
        fields = [(field.name, fitter(field.type, of_int64)) for field in kind]
        return lambda value: (
            {name: fit(value.get(name)) for name, fit in fields}
            if isinstance(value, dict)
            else None
        )
    if pa.types.is_map(kind):
        fit = fitter(kind.item_type, of_int64)
        return lambda value: (
            {name: fit(item) for name, item in value.items()} if isinstance(value, dict) else None
        )
    if pa.types.is_list(kind):
        fit = fitter(kind.value_type, of_int64)
        return lambda value: [fit(item) for item in value] if isinstance(value, list) else None
    if kind == pa.int64():
        return of_int64
    if kind == pa.float64():
        return lambda value: float(value) if type(value) in (int, float, Decimal) else None
    if (expected := {pa.string(): str, pa.bool_(): bool}.get(kind)) is not None:
        return lambda value: value if isinstance(value, expected) else None
    return partial(_scalar, kind=kind)


def _scalar(value: Any, kind: pa.DataType) -> Any:  # of Avro
    try:
        pa.scalar(value, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return None
    return value


# -- from columns to JSON

_ESCAPES = {code: f"\\u{code:04X}" for code in range(32)} | {
    ord(char): f"\\{char}" for char in '"\\'
}
_ESCAPES |= {ord(char): f"\\{letter}" for char, letter in zip("\b\t\n\f\r", "btnfr", strict=True)}
_TO_ESCAPE = r'["\\\x00-\x1f]'


def json_texts(values: pa.Array) -> pa.Array:
    """Return the JSON of each value (large_string); a null is the text `null`.

    Supported are strings, int64, float64, bool, binary, decimal128, date32, `TIME`, and lists,
    structs and maps of them. Raise TypeError for another type.
    """
    texts = _texts(values)
    if not values.null_count:
        return texts
    return pc.if_else(values.is_valid(), texts, pa.scalar("null", pa.large_string()))


def _texts(values: pa.Array) -> pa.Array:
    kind = values.type
    if pa.types.is_struct(kind):
        return _objects(values)
    if pa.types.is_map(kind):
        entries = _entries(values)
        names, items = map(json_texts, entries.flatten().flatten())
        return concatenated("{", joined(entries, concatenated(names, ":", items)), "}")
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return concatenated("[", joined(values, json_texts(values.flatten())), "]")
    if pa.types.is_floating(kind):
        return _each(_number_json, values)
    if pa.types.is_decimal(kind):
        return _each("{:f}".format, values)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return _each(lambda content: f'"{b64encode(content).decode()}"', values)
    return _scalar_texts(values)


def _scalar_texts(values: pa.Array) -> pa.Array:
    kind = values.type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return values.cast(pa.large_string())
    if kind == TIME:
        texts = values.cast(pa.large_string())
        return concatenated('"', pc.replace_substring(texts, " ", "T", max_replacements=1), '"')
    if pa.types.is_date32(kind):
        return concatenated('"', values.cast(pa.large_string()), '"')
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return concatenated('"', _escaped(values.cast(pa.large_string())), '"')
    raise TypeError(f"no value of a source has the Arrow type {kind}")


def joined(lists: pa.Array, items: pa.Array) -> pa.Array:
    """Return by list its items' texts with commas in between; `items` are of `lists.flatten()`."""
    return pc.binary_join(
        pa.LargeListArray.from_arrays(pa.array(_offsets(lists)), items),
        pa.scalar(",", pa.large_string()),
    )


def concatenated(*texts: pa.Array | str) -> pa.Array:
    """Return row by row the pieces one after the other; a string is the same in each row."""
    columns = [
        pa.scalar(chunk, pa.large_string()) if isinstance(chunk, str) else chunk for chunk in texts
    ]
    return pc.binary_join_element_wise(*columns, pa.scalar("", pa.large_string()))


def number_text(number: float) -> str:
    """Return a double in JSON's words: `double_text`, or `NaN`, `Infinity` and `-Infinity`."""
    if isfinite(number):
        return double_text(number)
    if isnan(number):
        return "NaN"
    return "Infinity" if number > 0 else "-Infinity"


def double_text(number: float) -> str:
    """Return a finite double as Java writes it since version 19: the shortest digits that mean it.

    From 1e-3 to below 1e7 it is decimal, otherwise in scientific notation with `E`. Where one digit
    would do, these are the two closest to it: 4.9E-324.
    """
    size = abs(number)
    if 1e-3 <= size < 1e7 or size == 0:
        return repr(number)
    digits = Decimal(repr(size)).normalize()
    if len(digits.as_tuple().digits) == 1:
        digits = Decimal(f"{size:.1e}").normalize()
    mantissa = "".join(map(str, digits.as_tuple().digits))
    return f"{'-' if number < 0 else ''}{mantissa[0]}.{mantissa[1:] or '0'}E{digits.adjusted()}"


def _number_json(number: float) -> str:
    return double_text(number) if isfinite(number) else f'"{number_text(number)}"'


def _each(text_of: Callable[[Any], str], values: pa.Array) -> pa.Array:
    texts = [None if value is None else text_of(value) for value in values.to_pylist()]
    return pa.array(texts, pa.large_string())


def _entries(maps: pa.MapArray) -> pa.Array:
    pair = pa.struct([("key", maps.type.key_type), ("value", maps.type.item_type)])
    return maps.cast(pa.list_(pair))


def _objects(structs: pa.StructArray) -> pa.Array:
    texts: list[pa.Array | str] = []
    for field, values in zip(structs.type, structs.flatten(), strict=True):
        texts += [("," if texts else "{") + _name(field), json_texts(values)]
    return concatenated(*texts, "}")


def _name(field: pa.Field) -> str:
    return f'"{field.name.translate(_ESCAPES)}":'


def _escaped(texts: pa.Array) -> pa.Array:
    # Few texts need an escape, so only those pass through Python.
    needed = pc.fill_null(pc.match_substring_regex(texts, _TO_ESCAPE), False)
    awkward = texts.filter(needed)
    if not len(awkward):
        return texts
    escaped = [text.translate(_ESCAPES) for text in awkward.to_pylist()]
    return pc.replace_with_mask(texts, needed, pa.array(escaped, pa.large_string()))


# -- sizes


def largest_sizes(values: pa.Array) -> Int64s:
    """Return an upper bound of the bytes that the JSON of each value takes, without writing it."""
    kind = values.type
    if pa.types.is_struct(kind):
        names = sum(len(_name(field).encode()) + 1 for field in kind)
        beside = np.full(len(values), names + len("{}"), np.int64)
        return sum(map(largest_sizes, values.flatten()), beside)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        items = largest_sizes(values.flatten()) + len(",")
        return np.maximum(sums(values, items) + len("[]"), len("null"))
    if pa.types.is_map(kind):
        entries = _entries(values)
        name_sizes, item_sizes = map(largest_sizes, entries.flatten().flatten())
        pair_sizes = name_sizes + item_sizes + len(":,")
        return np.maximum(sums(entries, pair_sizes) + len("{}"), len("null"))
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.full(len(values), _LARGEST_NUMBER, np.int64)
    if pa.types.is_decimal(kind):
        return np.full(len(values), len("-0.") + kind.precision, np.int64)
    if kind == TIME or pa.types.is_date32(kind):
        return np.full(len(values), _LARGEST_TIME, np.int64)
    return np.maximum(lengths(values) * _LARGEST_ESCAPE + len('""'), len("null"))


def sums(lists: pa.Array, item_sizes: Int64s) -> Int64s:
    """Return by list the sum of a number for each item; `item_sizes` are of `lists.flatten()`."""
    return np.diff(np.concatenate([[0], np.cumsum(item_sizes)])[_offsets(lists)])


def _offsets(lists: pa.Array) -> Int64s:
    return np.concatenate([[0], np.cumsum(int64s(pc.fill_null(pc.list_value_length(lists), 0)))])
