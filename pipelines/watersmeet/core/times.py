"""Event times: their range, and how they are read from text."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from typing import Final

LAST_EVENT_TIME_MS: Final = 253_402_300_799_999
"""9999-12-31T23:59:59.999Z: the last millisecond that every reader of the tables can show."""

EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)

_FRACTION = r"(?P<fraction>[.,]\d+)?"
_ZONE = r"(?P<zone>[Zz]|(?P<sign>[+-])(?P<hours>\d\d)(?::?(?P<minutes>[0-5]\d))?)?"
_EXTENDED = re.compile(
    rf"(\d{{4}})-(\d\d)-(\d\d)(?:[Tt ](\d\d):(\d\d)(?::(\d\d){_FRACTION})?{_ZONE})?", re.ASCII
)
_BASIC = re.compile(
    rf"(\d{{4}})(\d\d)(\d\d)[Tt](\d\d)(\d\d)(?:(\d\d){_FRACTION})?{_ZONE}", re.ASCII
)


def parse_iso_8601(text: str) -> int | None:
    """Return the epoch ms of an ISO 8601 calendar date, or date and time.

    Without a zone it is in UTC. What is finer than a millisecond is cut off. Return None where the
    text is something else: digits alone, a week or ordinal date, a 25th hour, a 61st second.
    """
    parsed = _parsed(text)
    return None if parsed is None else parsed[0] * 1000 + int(parsed[1][:3].ljust(3, "0"))


def parse_microseconds(text: str) -> int:
    """Return the epoch microseconds of a time that `parse_iso_8601` takes.

    Raise ValueError where the text is no such time, or is finer.
    """
    parsed = _parsed(text)
    if parsed is None or parsed[1][6:].strip("0"):
        raise ValueError("not an ISO 8601 time in whole microseconds")
    return parsed[0] * 1_000_000 + int(parsed[1][:6].ljust(6, "0"))


def _parsed(text: str) -> tuple[int, str] | None:
    """Return epoch seconds and the digits of the fraction; None where the text is no time."""
    match = _EXTENDED.fullmatch(text) or _BASIC.fullmatch(text)
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
    offset = timedelta(hours=int(match["hours"] or 0), minutes=int(match["minutes"] or 0))
    try:
        zone = timezone(-offset if match["sign"] == "-" else offset)
        time = datetime(year, month, day, hour, minute, second, tzinfo=zone)
    except ValueError:
        return None
    return (time - EPOCH) // timedelta(seconds=1), (match["fraction"] or "")[1:]
