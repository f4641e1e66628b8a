"""How far a publication reaches: which finished, valid records silver has beyond each partition's tail, by small questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pipelines import tables
from pipelines.adapters.lake import Lake
from pipelines.core.sequence import Tail
from pipelines.transforms.ranges import case


class Place(NamedTuple):
    """A record's place in its partition's sequence: event time (ms), then key."""

    event_time: int
    merge_key: str


class Extent(NamedTuple):
    """How many records of a partition are pending, and the places of the first and the last."""

    records: int
    first: Place
    last: Place


def pending_extents(lake: Lake, tails: Mapping[int, Tail], partitions: int) -> dict[int, Extent]:
    """By partition, for those that have any: finished, valid records that sort after the tail (all, where there is none).

    Keys are compared here, as UTF-8: a key may be anything, and has no place in a text of SQL.
    """
    beyond, ties = _beyond(lake, tails, partitions), _ties(lake, tails)
    extents = {}
    for partition in beyond.keys() | ties.keys():
        places = [*ties.get(partition, ()), *beyond.get(partition, (0, []))[1]]
        records = len(ties.get(partition, ())) + beyond.get(partition, (0, []))[0]
        extents[partition] = Extent(records, min(places, key=_order), max(places, key=_order))
    return extents


def finished_since(lake: Lake, times: Mapping[int, int], partitions: int) -> str:
    """SQL: finished, valid records of silver that are no older than their partition's time (all, where it has none)."""
    found = finished(lake, min(times.values()) if len(times) == partitions else None)
    return f"{found} AND COALESCE(event_time >= {_by_partition(lake, times)}, TRUE)" if times else found


def _ties(lake: Lake, tails: Mapping[int, Tail]) -> dict[int, list[Place]]:
    """Pending records of the very time of the tail."""
    if not tails:
        return {}
    times = {partition: tail.event_time for partition, tail in tails.items()}
    same = lake.rows(
        f"SELECT `partition`, event_time, merge_key FROM {{{tables.SILVER}}} "
        f"WHERE {finished(lake, min(times.values()))} AND event_time = {_by_partition(lake, times)}"
    )
    found: dict[int, list[Place]] = {}
    for partition, *place in same:
        if _order(Place(*place)) > _order(Place(tails[partition].event_time, tails[partition].key)):
            found.setdefault(partition, []).append(Place(*place))
    return found


def _beyond(lake: Lake, tails: Mapping[int, Tail], partitions: int) -> dict[int, tuple[int, list[Place]]]:
    """How many records are later than the tail, and the first and last of those by time and key."""
    times = {partition: tail.event_time for partition, tail in tails.items()}
    earliest = min(times.values()) if len(times) == partitions else None
    is_finished = finished(lake, earliest)
    later = f"COALESCE(event_time > {_by_partition(lake, times)}, TRUE)" if times else "TRUE"
    counted = lake.rows(
        f"SELECT `partition`, COUNT(*), MIN(event_time), MAX(event_time) FROM {{{tables.SILVER}}} "
        f"WHERE {is_finished} AND {later} GROUP BY `partition`"
    )
    if not counted:
        return {}
    first = _by_partition(lake, {partition: time for partition, _, time, _ in counted})
    last = _by_partition(lake, {partition: time for partition, _, _, time in counted})
    ends = lake.rows(
        f"SELECT `partition`, event_time, MIN(merge_key), MAX(merge_key) FROM {{{tables.SILVER}}} "
        f"WHERE {is_finished} AND (event_time = {first} OR event_time = {last}) GROUP BY `partition`, event_time"
    )
    found: dict[int, tuple[int, list[Place]]] = {partition: (records, []) for partition, records, _, _ in counted}
    for partition, time, *keys in ends:
        found[partition][1].extend(Place(time, key) for key in keys)
    return found


def finished(lake: Lake, earliest: int | None) -> str:
    """SQL: finished, valid records of silver, no older than `earliest` (ms) where that is known: it lets files be skipped."""
    since = "" if earliest is None else f" AND event_time >= {lake.time_literal(earliest)}"
    return f"status = 'timed_out' AND valid{since}"


def _by_partition(lake: Lake, times: Mapping[int, int]) -> str:
    return case({partition: lake.time_literal(time) for partition, time in times.items()})


def _order(place: Place) -> tuple[int, bytes]:
    return place.event_time, place.merge_key.encode()
