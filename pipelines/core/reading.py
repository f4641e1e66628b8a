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
from typing import Any, NamedTuple

import orjson

from pipelines.core.json_schema import ValueSchema

LAST_EVENT_TIME_MS = 253_402_300_799_999
"""9999-12-31T23:59:59.999Z: the last millisecond that every reader of the tables can still show."""

MAX_DEPTH = 500
"""Levels of nesting that are read: half of what Python's and Jackson's parsers bear, so that none of them ever fails first."""


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


class _Refused(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason, self.detail = reason, detail


_MISSING = object()


def reader(rules: ReadingRules) -> Callable[[bytes | None, bytes | None, int], Reading]:
    """A function of (Kafka key, value, Kafka timestamp in ms) that never raises, whatever the bytes."""
    misfit = rules.schema.validator() if rules.schema else None

    def read(key: bytes | None, value: bytes | None, kafka_timestamp: int) -> Reading:
        try:
            document = _parse(value, misfit)
            heartbeat = rules.heartbeat is not None and _is_same(_at(document, rules.heartbeat[0]), rules.heartbeat[1])
            merge_key = None if heartbeat else _merge_key(rules, key, document, value)
            event_time = _event_time(_at(document, rules.event_time), rules.event_time, value)
        except _Refused as refused:
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
        raise _Refused(Reason.UNDECODABLE, "no value (tombstone)")
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        if misfit is not None or "infinity" not in str(error):
            raise _Refused(Reason.UNDECODABLE, f"no strict JSON: {error}") from None
        document = _parse_beyond_double(value)
    if not isinstance(document, dict):
        raise _Refused(Reason.UNDECODABLE, f"not a JSON object but {_kind(document)}")
    if value.count(b"{") + value.count(b"[") > MAX_DEPTH and _depth(document) > MAX_DEPTH:
        raise _Refused(Reason.UNDECODABLE, f"nested deeper than {MAX_DEPTH} levels")
    if misfit is not None and (violation := misfit(document)) is not None:
        raise _Refused(Reason.UNDECODABLE, f"does not fit the schema: {violation}")
    return document


def _parse_beyond_double(value: bytes) -> Any:
    """JSON sets no bound to a number; orjson does. The text is kept as it came, so it may hold any."""
    try:
        document = json.loads(value.decode(), parse_float=Decimal, parse_int=Decimal, parse_constant=_no_constant)
        json.dumps(document, ensure_ascii=False, default=str).encode()  # refuses half a surrogate pair, as orjson does
    except (ValueError, RecursionError, ArithmeticError) as error:
        raise _Refused(Reason.UNDECODABLE, f"no strict JSON: {error}") from None
    return document


def _depth(document: Any) -> int:
    """Levels of objects and arrays, without recursion."""
    depth, level = 0, [document]
    while level:
        depth += 1
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
    return depth


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
            raise _Refused(Reason.NO_KEY, "the Kafka key is missing" if key is None else "the Kafka key is empty")
        try:
            return key.decode()
        except UnicodeDecodeError:
            raise _Refused(Reason.NO_KEY, "the Kafka key is not UTF-8") from None
    found, where = _at(document, rules.key), ".".join(rules.key)
    if isinstance(found, str) and found:
        return found
    if isinstance(found, bool):
        return "true" if found else "false"
    if isinstance(found, (int, float, Decimal)):
        return _number_text(found, rules.key, value)
    raise _Refused(Reason.NO_KEY, f"{where} is {_kind(found)}")


def _event_time(found: Any, path: tuple[str, ...], value: bytes | None) -> int:
    """A number is epoch milliseconds, its fraction cut off; a string is ISO 8601; the year 9999 is the last."""
    where = ".".join(path)
    if isinstance(found, str):
        event_time = parse_iso_8601(found)
        if event_time is None:
            raise _Refused(Reason.NO_EVENT_TIME, f"{where} is not an ISO 8601 time: {found[:100]!r}")
    elif isinstance(found, (float, Decimal)):
        # The text, not the double: a double would round the last of 13 digits and a long fraction up.
        try:
            exact = Decimal(_number_text(found, path, value))
        except ArithmeticError:  # an exponent of twenty digits
            raise _Refused(Reason.NO_EVENT_TIME, f"{where} is not readable: {str(found)[:100]}") from None
        event_time = -1 if exact < 0 else LAST_EVENT_TIME_MS + 1 if exact > LAST_EVENT_TIME_MS + 1 else int(exact)
    elif isinstance(found, int) and not isinstance(found, bool):
        event_time = found
    else:
        raise _Refused(Reason.NO_EVENT_TIME, f"{where} is {_kind(found)}")
    if event_time < 0:
        raise _Refused(Reason.NO_EVENT_TIME, f"{where} is before 1970: {str(found)[:100]}")
    if event_time > LAST_EVENT_TIME_MS:
        raise _Refused(Reason.NO_EVENT_TIME, f"{where} is after the year 9999: {str(found)[:100]}")
    return event_time


class _NumberText(str):
    """A number's own text, told apart from a string that looks like it."""


def _number_text(found: float | Decimal, path: tuple[str, ...], value: bytes | None) -> str:
    """A number as the record spelled it: 1.0 stays 1.0, and an integer of any length keeps its digits."""
    if isinstance(found, int) and found != 0:  # JSON spells an integer in one way only, but for -0
        return str(found)
    spelled = json.loads(value or b"null", parse_float=_NumberText, parse_int=_NumberText)
    return str(_at(spelled, path))


_ISO_8601 = re.compile(
    r"""(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)
        (?: [Tt\ ] (?P<hour>\d\d):(?P<minute>\d\d) (?: :(?P<second>\d\d) (?:[.,](?P<fraction>\d+))? )? (?P<zone>[Zz]|[+-]\d\d(?::?\d\d)?)? )?
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
    return {dict: "an object", list: "an array"}.get(type(found), "a number")
