"""Reading a record: from the bytes that Kafka held to a key and an event time, or to the reason why it is refused.

One function decides for every record, in a fixed order of reasons (`Reason`), and knows nothing but the record itself: so
the same bytes are read alike in every batch, restart and rebuild.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import orjson

from pipelines.core.json_schema import ValueSchema

LAST_EVENT_TIME_MS = 253_402_300_799_999
"""9999-12-31T23:59:59.999Z: the last millisecond that every reader of the tables can still show."""

MAX_DEPTH = 500
"""Levels of nesting that are read: half of what Python's and Jackson's parsers bear, so that none of them ever fails first."""

MAX_DEPTH_WITH_SCHEMA = 250
"""The same for values with a schema: jsonschema-rs and orjson's writer give up at 255."""

# What Spark's parser (Jackson) bears in a value with a schema, with a margin where its own bound is not plain: it refuses
# numbers of more than 1,000 digits and names of more than 50,000 UTF-16 units (a character may be two), and an integer
# column would spell out an exponent of millions.
MAX_NUMBER_LENGTH = 900
MAX_EXPONENT = 9_999
MAX_NAME_LENGTH = 25_000


class Reason(str, Enum):
    """Why a record is quarantined; the first that applies, in this order."""

    UNDECODABLE = "undecodable"
    NO_KEY = "no_key"
    NO_EVENT_TIME = "no_event_time"
    EVENT_TIME_IN_FUTURE = "event_time_in_future"


class Reading(NamedTuple):
    """What the merge needs of a record. A refused record (`reason` set) has neither key nor event time; a heartbeat no key."""

    merge_key: str | None = None
    event_time: int | None = None
    heartbeat: bool = False
    reason: str | None = None
    detail: str | None = None


@dataclass(frozen=True)
class ReadingRules:
    """How a source's records are read. Paths are field names from the outermost in; `key` None means the Kafka key."""

    event_time: tuple[str, ...]
    max_future_ms: int
    key: tuple[str, ...] | None = None
    heartbeat: tuple[tuple[str, ...], str | int | float | bool] | None = None
    schema: ValueSchema | None = None


class _RefusedError(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason, self.detail = reason, detail


_MISSING = object()


Reader: TypeAlias = Callable[[bytes | None, bytes | None, int], Reading]
"""A function of (Kafka key, value, Kafka timestamp in ms) that never raises, whatever the bytes."""


def reader(rules: ReadingRules) -> Reader:
    """How records are read under these rules."""
    misfit = rules.schema.validator() if rules.schema else None

    def read(key: bytes | None, value: bytes | None, kafka_timestamp: int) -> Reading:
        try:
            document = _parse(value, misfit)
            heartbeat = rules.heartbeat is not None and _is_same(_at(document, rules.heartbeat[0]), rules.heartbeat[1])
            merge_key = None if heartbeat else _merge_key(rules, key, document, value)
            event_time = _event_time(_at(document, rules.event_time), rules.event_time, value)
        except _RefusedError as refused:
            return Reading(reason=refused.reason.value, detail=refused.detail)
        # A record without a Kafka timestamp (-1) has nothing that its event time could be compared with.
        if 0 <= kafka_timestamp < event_time - rules.max_future_ms:
            ahead = event_time - kafka_timestamp
            detail = f"{ahead} ms after Kafka's own timestamp of the record; merge.max_future is {rules.max_future_ms} ms"
            return Reading(reason=Reason.EVENT_TIME_IN_FUTURE.value, detail=detail)
        return Reading(merge_key, event_time, heartbeat)

    return read


def _parse(value: bytes | None, misfit: Callable[[object], str | None] | None) -> dict[str, Any]:
    if value is None:
        raise _RefusedError(Reason.UNDECODABLE, "no value (tombstone)")
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        if "infinity" not in str(error):
            raise _RefusedError(Reason.UNDECODABLE, f"no strict JSON: {error}") from None
        if misfit is not None:
            raise _RefusedError(Reason.UNDECODABLE, "a number is too large for any column") from None
        document = _parse_beyond_double(value)
    if not isinstance(document, dict):
        raise _RefusedError(Reason.UNDECODABLE, f"not a JSON object but {_kind(document)}")
    max_depth = MAX_DEPTH if misfit is None else MAX_DEPTH_WITH_SCHEMA
    if value.count(b"{") + value.count(b"[") > max_depth and _depth(value) > max_depth:
        raise _RefusedError(Reason.UNDECODABLE, f"nested deeper than {max_depth} levels")
    if misfit is not None:
        _refuse_what_spark_reads_otherwise(value, document)
        if (violation := misfit(document)) is not None:
            raise _RefusedError(Reason.UNDECODABLE, f"does not fit the schema: {violation}")
    return document


def _parse_beyond_double(value: bytes) -> Any:
    """JSON sets no bound to a number; orjson does. The text is kept as it came, so it may hold any (here: an infinity)."""
    try:
        document = json.loads(value.decode(), parse_int=_integer, parse_constant=_no_constant)
        json.dumps(document, ensure_ascii=False).encode()  # refuses half a surrogate pair, as orjson does
    except (ValueError, RecursionError) as error:
        raise _RefusedError(Reason.UNDECODABLE, f"no strict JSON: {error}") from None
    return document


def _integer(text: str) -> int | float:
    """As orjson has it: beyond 64 bits an integer is a double. (And some Pythons refuse to read thousands of digits.)"""
    return int(text) if len(text) <= 20 else float(text)


_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))


def _depth(value: bytes) -> int:
    """Levels of objects and arrays in a JSON text: also of what a repeated name hides from the parsed document."""
    without_escapes = value.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = re.sub(rb'"[^"]*"', b"", without_escapes).translate(None, _NO_BRACKETS)
    return max(accumulate(1 if bracket in b"{[" else -1 for bracket in brackets))


_LONG_NUMBER = re.compile(rb"(?<![0-9.eE+-])[0-9.eE+-]{%d}" % (MAX_NUMBER_LENGTH + 1))
_LONG_EXPONENT = re.compile(rb"[0-9][eE][+-]?[0-9]{5,}[\s,}\]]")


def _refuse_what_spark_reads_otherwise(value: bytes, document: dict[str, Any]) -> None:
    """Silver parses the text again, with Jackson: a repeated name, or what is out of its bounds, would fail there.

    The exact look costs more than all the rest; so it is only taken where a cheap one finds something that it could be.
    """
    if (
        len(value) > MAX_NAME_LENGTH
        or _may_repeat_a_name(value, document)
        or _LONG_NUMBER.search(value)
        or _LONG_EXPONENT.search(value)
    ):
        json.loads(value, object_pairs_hook=_refuse_names, parse_int=_refuse_number, parse_float=_refuse_number)


def _may_repeat_a_name(value: bytes, document: dict[str, Any]) -> bool:
    """The parser keeps one of several equal names; the others' colons are then missing, unless an escape made up for them."""
    if b"\\u003a" in value or b"\\u003A" in value:
        return True
    return value.count(b":") != orjson.dumps(document).count(b":")


def _refuse_names(pairs: list[tuple[str, Any]]) -> None:
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            raise _RefusedError(Reason.UNDECODABLE, f"an object has the name {name[:100]!r} twice")
        if len(name) > MAX_NAME_LENGTH:
            raise _RefusedError(Reason.UNDECODABLE, f"a name is longer than {MAX_NAME_LENGTH} characters")
        names.add(name)


def _refuse_number(text: str) -> None:
    if len(text) > MAX_NUMBER_LENGTH:
        raise _RefusedError(Reason.UNDECODABLE, f"a number is longer than {MAX_NUMBER_LENGTH} characters")
    if abs(int(text.lower().partition("e")[2] or 0)) > MAX_EXPONENT:
        raise _RefusedError(Reason.UNDECODABLE, f"a number has an exponent beyond {MAX_EXPONENT}")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _at(document: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        if not isinstance(document, dict) or name not in document:
            return _MISSING
        document = document[name]
    return document


def _is_same(found: Any, wanted: str | int | float | bool) -> bool:
    """JSON's own equality: `true` is not 1 and `"1"` is not 1, but 1.0 is 1."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    return bool(found == wanted)


def _merge_key(rules: ReadingRules, key: bytes | None, document: dict[str, Any], value: bytes | None) -> str:
    if rules.key is None:
        if not key:
            raise _RefusedError(Reason.NO_KEY, "the Kafka key is missing" if key is None else "the Kafka key is empty")
        try:
            return key.decode()
        except UnicodeDecodeError:
            raise _RefusedError(Reason.NO_KEY, "the Kafka key is not UTF-8") from None
    found, where = _at(document, rules.key), ".".join(rules.key)
    if isinstance(found, str) and found:
        return found
    if isinstance(found, bool):
        return "true" if found else "false"
    if isinstance(found, (int, float)):
        return _number_text(found, rules.key, value)
    raise _RefusedError(Reason.NO_KEY, f"{where} is {_kind(found)}")


def _event_time(found: Any, path: tuple[str, ...], value: bytes | None) -> int:
    """A number is epoch milliseconds, its fraction cut off; a string is ISO 8601; the year 9999 is the last."""
    where = ".".join(path)
    if isinstance(found, str):
        event_time = parse_iso_8601(found)
        if event_time is None:
            raise _RefusedError(Reason.NO_EVENT_TIME, f"{where} is not an ISO 8601 time: {found[:100]!r}")
    elif isinstance(found, float):
        event_time = _whole(found, _number_text(found, path, value))
    elif isinstance(found, int) and not isinstance(found, bool):
        event_time = found
    else:
        raise _RefusedError(Reason.NO_EVENT_TIME, f"{where} is {_kind(found)}")
    if event_time < 0:
        raise _RefusedError(Reason.NO_EVENT_TIME, f"{where} is before 1970: {str(found)[:100]}")
    if event_time > LAST_EVENT_TIME_MS:
        raise _RefusedError(Reason.NO_EVENT_TIME, f"{where} is after the year 9999: {str(found)[:100]}")
    return event_time


def _whole(number: float, text: str) -> int:
    """Cut from the text: a double would round a long fraction up. What is below 0 or too late comes out as just that."""
    try:
        exact = Decimal(text)
    except ArithmeticError:  # an exponent of twenty digits: nothing, or infinite, as the double is too
        exact = Decimal(number)
    return -1 if exact < 0 else int(min(exact, Decimal(LAST_EVENT_TIME_MS + 1)))


class _NumberText(str):
    """A number's own text, told apart from a string that looks like it."""


def _number_text(found: float, path: tuple[str, ...], value: bytes | None) -> str:
    """A number as the record spelled it: 1.0 stays 1.0, and an integer of any length keeps its digits."""
    if isinstance(found, int) and found != 0:  # JSON spells an integer in one way only, but for -0
        return str(found)
    spelled = json.loads(value or b"null", parse_float=_NumberText, parse_int=_NumberText)
    return str(_at(spelled, path))


_ISO_8601 = re.compile(
    r"""(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)
        (?: [Tt\ ] (?P<hour>\d\d):(?P<minute>\d\d) (?: :(?P<second>\d\d)
              (?:[.,](?P<fraction>\d+))? )? (?P<zone>[Zz]|[+-]\d\d(?::?\d\d)?)? )?
    """,
    re.ASCII | re.VERBOSE,
)
_ISO_8601_BASIC = re.compile(
    r"""(?P<year>\d{4})(?P<month>\d\d)(?P<day>\d\d)
        [Tt] (?P<hour>\d\d)(?P<minute>\d\d) (?: (?P<second>\d\d) (?:[.,](?P<fraction>\d+))? )? (?P<zone>[Zz]|[+-]\d\d(?::?\d\d)?)?
    """,
    re.ASCII | re.VERBOSE,
)
_EPOCH_DAY = date(1970, 1, 1).toordinal()


def parse_iso_8601(text: str) -> int | None:
    """Epoch ms of an ISO 8601 calendar date or date and time; UTC without a zone; finer than a millisecond is cut off.

    None where the text is something else: digits alone, a week or ordinal date, a 25th hour, a 61st second.
    """
    match = _ISO_8601.fullmatch(text) or _ISO_8601_BASIC.fullmatch(text)
    if match is None:
        return None
    year, month, day, hour, minute, second = (
        int(match[name] or 0) for name in ("year", "month", "day", "hour", "minute", "second")
    )
    if hour > 23 or minute > 59 or second > 59:
        return None
    try:
        days = date(year, month, day).toordinal() - _EPOCH_DAY
    except ValueError:
        return None
    zone = (match["zone"] or "Z").upper()
    offset_minutes = 0
    if zone != "Z":
        hours, minutes = int(zone[1:3]), int(zone[3:].lstrip(":") or 0)
        if hours > 23 or minutes > 59:
            return None
        offset_minutes = (hours * 60 + minutes) * (-1 if zone[0] == "-" else 1)
    milliseconds = int((match["fraction"] or "")[:3].ljust(3, "0"))
    return (((days * 24 + hour) * 60 + minute - offset_minutes) * 60 + second) * 1000 + milliseconds


def _kind(found: Any) -> str:
    if found is _MISSING:
        return "missing"
    if found is None:
        return "null"
    if isinstance(found, bool):
        return "a boolean"
    if isinstance(found, str):
        return "a string" if found else "an empty string"
    if isinstance(found, (dict, list)):
        return "an object" if isinstance(found, dict) else "an array"
    return "a number"
