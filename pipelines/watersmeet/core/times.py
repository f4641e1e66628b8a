"""Event times: their range, how they are read from text, and how people see them."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone, tzinfo
from functools import lru_cache
from importlib.resources import files
from typing import Final
from zoneinfo import ZoneInfo

import numpy as np

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


def time_text(ms: int) -> str:
    """Return epoch ms as an ISO 8601 time in UTC."""
    return str(np.datetime_as_string(np.datetime64(ms, "ms"), timezone="UTC"))


def epoch_ms(time: datetime) -> int:
    """Return a time in epoch ms."""
    return (time - EPOCH) // timedelta(milliseconds=1)


def utc(ms: int | None) -> str:
    """Return epoch ms as a time in UTC for people, to the millisecond.

    A dash for None, and the number where no calendar has such a time.
    """
    if ms is None:
        return "-"
    if not 0 <= ms <= LAST_EVENT_TIME_MS:
        return f"{ms} ms (out of range)"
    return time_text(ms).replace("T", " ")


def duration(ms: int | None) -> str:
    """Return milliseconds in the two largest units that they fill; a dash for None."""
    if ms is None:
        return "-"
    parts = []
    for name, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, ms = divmod(ms, size)
        if count:
            parts.append(f"{count}{name}")
    return " ".join(parts[:2]) or "0"


@lru_cache
def zone_names() -> frozenset[str]:
    """Return the names of all time zones, such as `Europe/Berlin`."""
    return frozenset(files("tzdata").joinpath("zones").read_text("utf-8").split())


@lru_cache
def time_zone(name: str) -> ZoneInfo:
    """Return a time zone by its name, one of `zone_names`.

    Its rules are those of the package tzdata, so that all machines read a record alike.
    """
    with files("tzdata").joinpath(f"zoneinfo/{name}").open("rb") as rules:
        return ZoneInfo.from_file(rules, name)


def set_back_ms(zone: tzinfo, year: int) -> int:
    """Return by how many ms clocks go back within a year: so much local time is there twice."""
    offsets = [zone.utcoffset(datetime(year, month, 1)) for month in range(1, 13)]
    valid = [offset for offset in offsets if offset is not None]
    return (max(valid) - min(valid)) // timedelta(milliseconds=1)


def parse_iso_8601(text: str, zone: tzinfo = timezone.utc) -> int | None:
    """Return the epoch ms of an ISO 8601 calendar date, or date and time; None for any other text.

    Without a zone, it is a local time of `zone`. Of a local time that is there twice, the earlier
    one counts; one that clocks skip has the offset from before (02:30 is 03:30). What is finer than
    a millisecond is cut off.
    """
    parsed = _parsed(text, zone)
    return None if parsed is None else parsed[0] * 1000 + int(parsed[1][:3].ljust(3, "0"))


def parse_microseconds(text: str) -> int:
    """Return the epoch microseconds of such a time. Raise ValueError where it is none, or finer."""
    parsed = _parsed(text)
    if parsed is None or parsed[1][6:].strip("0"):
        raise ValueError("not an ISO 8601 time in whole microseconds")
    return parsed[0] * 1_000_000 + int(parsed[1][:6].ljust(6, "0"))


def _parsed(text: str, zone: tzinfo = timezone.utc) -> tuple[int, str] | None:
    match = _EXTENDED.fullmatch(text) or _BASIC.fullmatch(text)
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
    offset = timedelta(hours=int(match["hours"] or 0), minutes=int(match["minutes"] or 0))
    try:
        if match["zone"]:
            zone = timezone(-offset if match["sign"] == "-" else offset)
        time = datetime(year, month, day, hour, minute, second, tzinfo=zone)
    except ValueError:
        return None
    return (time - EPOCH) // timedelta(seconds=1), (match["fraction"] or "")[1:]
