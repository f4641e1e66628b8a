"""Strict JSON: parses a record's bytes as an object, or says in one sentence why they are not one.

Strict means RFC 8259 in UTF-8, but a number may be of any size. The limits are what every parser
and writer that handles the value later can take.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import isfinite
from typing import Any, Final, TypeAlias

import orjson

from watersmeet.core.items import TOO_MANY, has_many_items

MAX_DEPTH: Final = 500
"""Maximum levels of nesting: half of what Python's and Jackson's parsers take."""

MAX_DEPTH_WITH_SCHEMA: Final = 250
"""Maximum levels of nesting with a schema: jsonschema-rs and orjson's writer give up at 255."""

# Limits that a JVM's parser (Jackson) sets to values with a schema, with a margin. It refuses
# numbers of more than 1,000 digits, and names of more than 50,000 UTF-16 units (a character may be
# two). The limit on exponents is needed because an integer column would spell one of millions out.
MAX_NUMBER_LENGTH: Final = 900
MAX_EXPONENT: Final = 9_999
MAX_NAME_LENGTH: Final = 25_000

MISSING: Final = object()
"""The value that a finder returns where a path leads nowhere."""

Violation: TypeAlias = Callable[[object], "str | None"]
"""A function of a parsed value: returns the violation in one sentence, or None if it fits."""


class UndecodableError(ValueError):
    """Error for bytes that are not one acceptable value of the source. The message says why."""


def parse_object(value: bytes | None, violation: Violation | None) -> dict[str, Any]:
    """Return the JSON object that a record's value spells. Of a repeated name the last one counts.

    With `violation` (a schema's test), the value must fit the schema, repeat no name, and keep the
    limits. Raises UndecodableError otherwise.
    """
    if value is None:
        raise UndecodableError("no value (tombstone)")
    if has_many_items(value):
        raise UndecodableError(TOO_MANY)
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        document = _with_any_number(value, error, is_allowed=violation is None)
    if not isinstance(document, dict):
        raise UndecodableError(f"not a JSON object but {kind(document)}")
    max_depth = MAX_DEPTH if violation is None else MAX_DEPTH_WITH_SCHEMA
    if len(value) > 2 * max_depth and is_deeper(value, max_depth):
        raise UndecodableError(f"nested deeper than {max_depth} levels")
    if violation is not None:
        _refuse_ambiguous(value, document)
        if (sentence := violation(document)) is not None:
            raise UndecodableError(f"does not fit the schema: {sentence}")
    return document


def finder(path: tuple[str, ...]) -> Callable[[dict[str, Any]], Any]:
    """Return the function that finds the value at a path in an object, or `MISSING`."""
    if len(path) == 1:
        [name] = path
        return lambda document: document.get(name, MISSING)

    def find(document: Any) -> Any:
        for name in path:
            if not isinstance(document, dict) or name not in document:
                return MISSING
            document = document[name]
        return document

    return find


def first_finder(paths: Sequence[tuple[str, ...]]) -> Callable[[dict[str, Any]], Any]:
    """Return the function that finds an object's value at the first path with one that is not null.

    Where no path has one, the last path's counts (null or `MISSING`).
    """
    if len(paths) == 1:
        return finder(paths[0])
    finders = [finder(path) for path in paths]

    def find(document: dict[str, Any]) -> Any:
        value = MISSING
        for look in finders:
            value = look(document)
            if value is not MISSING and value is not None:
                break
        return value

    return find


def is_same(value: Any, expected: str | int | float | bool) -> bool:
    """Return True where two JSON scalars are equal by JSON's rules: `true` is not 1, but 1.0 is."""
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)


def kind(value: Any) -> str:
    """Return a parsed value's kind with its article: `a number`, `an empty string`, `missing`."""
    if value is MISSING:
        return "missing"
    if isinstance(value, str):
        return "a string" if value else "an empty string"
    kinds = {
        type(None): "null",
        bool: "a boolean",
        dict: "an object",
        list: "an array",
        bytes: "bytes",
    }
    return kinds.get(type(value), "a number")


def key_text(texts: Sequence[str]) -> str:
    """Return the key that texts make: the compact JSON array of them; a single one is it."""
    return texts[0] if len(texts) == 1 else orjson.dumps(texts).decode()


class _NumberText(str):
    """A number's own text, distinct from a string that looks like it."""


def number_text(number: float, paths: Sequence[tuple[str, ...]], value: bytes | None) -> str:
    """Return the number at one of `paths` as the record spelled it: 1.0 stays 1.0."""
    # JSON spells an integer in one way only, except for -0.
    if isinstance(number, int) and number != 0:
        return str(number)
    spelled = json.loads(value or b"null", parse_float=_NumberText, parse_int=_NumberText)
    return str(first_finder(paths)(spelled))


_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


def _with_any_number(value: bytes, error: orjson.JSONDecodeError, *, is_allowed: bool) -> Any:
    # orjson's error is a number beyond a double, which becomes an infinity where it `is_allowed`.
    fault = UndecodableError(f"no strict JSON: {error}")
    number = _NUMBER.match(error.doc, error.pos)
    if number is None or isfinite(float(number[0])):
        raise fault from None
    try:
        document = json.loads(value.decode(), parse_int=_integer, parse_constant=_no_constant)
        # Refuses half a surrogate pair, as orjson does.
        json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as other:
        if isinstance(other, json.JSONDecodeError) and other.pos <= error.pos:
            raise fault from None  # JSON allows no number at this place
        fault = UndecodableError(f"no strict JSON: {other}")
    else:
        if is_allowed:
            return document
    raise fault if is_allowed else UndecodableError("a number is too large for any column")


def _integer(text: str) -> int | float:
    # As orjson: beyond 64 bits it is a double. (Some Pythons refuse thousands of digits as int.)
    return int(text) if len(text) <= 20 else float(text)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))


def is_deeper(value: bytes, levels: int) -> bool:
    """Return True where a JSON text, with repeated names, nests deeper than `levels`."""
    if value.count(b"{") + value.count(b"[") <= levels:
        return False
    without_escapes = value.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = re.sub(rb'"[^"]*"', b"", without_escapes).translate(None, _NO_BRACKETS)
    return max(accumulate(1 if bracket in b"{[" else -1 for bracket in brackets)) > levels


_LONG_NUMBER = re.compile(rb"(?<![0-9.eE+-])[0-9.eE+-]{%d}" % (MAX_NUMBER_LENGTH + 1))
_LONG_EXPONENT = re.compile(rb"[0-9][eE][+-]?[0-9]{5,}[\s,}\]]")


def _refuse_ambiguous(value: bytes, document: dict[str, Any]) -> None:
    # Parsers read or refuse these differently. The exact check costs more than all the rest, so it
    # is only made where a cheap one finds a possible case.
    # The parser keeps one of several equal names. The colons of the others are then missing from
    # what it read, unless an escaped colon (`\u003a`), which it spells out, makes up for them.
    if (
        len(value) > MAX_NAME_LENGTH
        or b"\\u003a" in value.lower()
        or value.count(b":") != orjson.dumps(document).count(b":")
        or (len(value) > MAX_NUMBER_LENGTH and _LONG_NUMBER.search(value))
        or _LONG_EXPONENT.search(value)
    ):
        json.loads(
            value,
            object_pairs_hook=_refuse_names,
            parse_int=_refuse_number,
            parse_float=_refuse_number,
        )


def _refuse_names(pairs: list[tuple[str, Any]]) -> None:
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            raise UndecodableError(f"an object has the name {name[:100]!r} twice")
        if len(name) > MAX_NAME_LENGTH:
            raise UndecodableError(f"a name is longer than {MAX_NAME_LENGTH} characters")
        names.add(name)


def _refuse_number(text: str) -> None:
    if len(text) > MAX_NUMBER_LENGTH:
        raise UndecodableError(f"a number is longer than {MAX_NUMBER_LENGTH} characters")
    if abs(int(text.lower().partition("e")[2] or 0)) > MAX_EXPONENT:
        raise UndecodableError(f"a number has an exponent beyond {MAX_EXPONENT}")
