"""Signs of mistakes that break no rule.

Sources whose records never meet, and event times in another unit, are likely mistakes of a
configuration or a producer. They may be intended, so they are reported, and stop nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import NULL_TIME, Booleans, Int64s, times_ms
from watersmeet.core.reading import MILLISECONDS_PER_UNIT, ReadingRules, Reason, read_records

ENOUGH: Final = 10
"""Minimum number of merge records, or of a source's keys, for a report that they never meet."""

DECADES_MS: Final = 20 * 365 * 86_400_000
"""Distance of an event time from Kafka's own timestamp (ms) beyond which it is seldom intended."""

_TIMED: Final = [None, Reason.NO_EVENT_TIME.value, Reason.EVENT_TIME_IN_FUTURE.value]
"""Reasons of records whose event time was read: None (not refused), or a fault of that time."""


class OddTimes(NamedTuple):
    """Records whose event time is missing, or decades from Kafka's timestamp.

    `odd`: how many of all `records` these are. `event_time` and `kafka_timestamp`: both times of
    one of them (ms); its event time is None where it was refused. `unit`: the unit in which most
    event times would be near Kafka's timestamp; None where there is none.
    """

    odd: int
    records: int
    event_time: int | None
    kafka_timestamp: int
    unit: str | None


def odd_times(records: pa.Table, rules: ReadingRules) -> OddTimes | None:
    """Return the odd event times among some records, or None unless most are odd.

    `records`: the columns of `KAFKA`. `rules`: those by which the source is read. See `are_odd` for
    the records that do not count.
    """
    taken = times_ms(records["kafka_timestamp"])
    read = read_records(records, rules)
    times = times_ms(read["event_time"])
    is_meant = _is_meant(read)
    if not are_odd(read):
        return None
    count = int(is_meant.sum())
    near = {rules.unit: is_meant & _is_near(times, taken)}
    for unit in MILLISECONDS_PER_UNIT.keys() - near.keys():
        others = times_ms(read_records(records, replace(rules, unit=unit))["event_time"])
        near[unit] = is_meant & _is_near(others, taken)
    best = max(near, key=lambda unit: int(near[unit].sum()))
    example = int(np.flatnonzero(is_meant & ~near[rules.unit])[0])
    event_time = None if times[example] == NULL_TIME else int(times[example])
    nearest_unit = best if 2 * int(near[best].sum()) > count else None
    return OddTimes(
        count - int(near[rules.unit].sum()), count, event_time, int(taken[example]), nearest_unit
    )


def are_odd(read: pa.Table) -> bool:
    """Return True where most of some records have no event time near Kafka's timestamp.

    `read`: `kafka_timestamp`, `event_time` and `reason` of each record. Three kinds of records do
    not count:
    - those without a timestamp of Kafka's;
    - those refused for something else than their time;
    - those skipped.
    """
    is_meant = _is_meant(read)
    near = is_meant & _is_near(times_ms(read["event_time"]), times_ms(read["kafka_timestamp"]))
    return 2 * int(near.sum()) < int(is_meant.sum())


def _is_meant(read: pa.Table) -> Booleans:
    is_timed = pc.is_in(read["reason"], value_set=pa.array(_TIMED, pa.string()))
    is_read = pc.or_(pc.is_valid(read["event_time"]), pc.is_valid(read["reason"]))
    is_meant: Booleans = pc.and_(is_timed, is_read).to_numpy(zero_copy_only=False) & (
        times_ms(read["kafka_timestamp"]) >= 0
    )
    return is_meant


def _is_near(times: Int64s, taken: Int64s) -> Booleans:
    is_near: Booleans = (times != NULL_TIME) & (np.abs(times - taken) <= DECADES_MS)
    return is_near


class Appearance(NamedTuple):
    """Records of one source with one key in a partition, and their extreme event times (ms)."""

    source: str
    partition: int
    tenant: str
    key: str
    first: int
    last: int


class Lonely(NamedTuple):
    """Sources none of whose records was found with one of another source.

    `counts`: how often each was found, by its name. `is_every_one`: True where nothing at all was
    found with records of two sources.
    """

    counts: Mapping[str, int]
    is_every_one: bool


def lonely(groups: Iterable[Collection[str]]) -> Lonely:
    """Return the sources that were found at least `ENOUGH` times, and always alone.

    `groups`: for each thing that was found, the sources whose records it holds.
    """
    counts = Counter[str]()
    met = set[str]()
    is_every_one = True
    for sources in groups:
        counts.update(list(sources))
        if len(sources) > 1:
            met.update(sources)
            is_every_one = False
    return Lonely(
        {name: n for name, n in counts.items() if n >= ENOUGH and name not in met}, is_every_one
    )


class Unmet(NamedTuple):
    """The reason why no record of a source meets one of another.

    `what`: what differs, as far as can be seen. `one` and `other`: two appearances that show it.
    """

    what: str
    one: Appearance
    other: Appearance


APART_IN_TIME: Final = "event times"
APART_IN_PARTITION: Final = "partitions"
UNLIKE: Final = "keys"


def why_unmet(appearances: Iterable[Appearance]) -> Unmet | None:
    """Return why no two appearances of two sources met, or None where there are no two sources.

    The first of these reasons that applies:
    - the same key in the same partition is there at other times;
    - the same key is in other partitions;
    - keys are the same but for their form (`_FORMS`);
    - keys just differ.
    """
    by_source: dict[str, list[Appearance]] = {}
    for appearance in appearances:
        by_source.setdefault(appearance.source, []).append(appearance)
    pairs = list(combinations(by_source.values(), 2))
    if not pairs:
        return None
    for kind, same in _SAME:
        matches = []
        for one, other in pairs:
            by_identity = {same(appearance): appearance for appearance in one}
            matches += [
                (by_identity[same(appearance)], appearance)
                for appearance in other
                if same(appearance) in by_identity
            ]
        if matches:
            nearest = min(matches, key=lambda pair: gap_ms(*pair))
            return Unmet(kind, *nearest)
    one, other = max(pairs, key=lambda pair: min(map(len, pair)))
    return Unmet(UNLIKE, one[0], other[0])


def reasons_unmet(appearances: Iterable[Appearance]) -> Counter[str]:
    """Return how many of some appearances did not meet one of another source, by the reason.

    Each counts for the first reason that applies, as `why_unmet` has them. It counts for `UNLIKE`
    where no other source has its key in any form.
    """
    counts = Counter[str]()
    remaining = list(appearances)
    for kind, same in _SAME:
        sources: dict[object, set[str]] = {}
        for appearance in remaining:
            sources.setdefault(same(appearance), set()).add(appearance.source)
        others = [a for a in remaining if len(sources[same(a)]) < 2]
        counts[kind] = len(remaining) - len(others)
        remaining = others
    counts[UNLIKE] = len(remaining)
    return +counts


def gap_ms(one: Appearance, other: Appearance) -> int:
    """Return the distance of two appearances in event time (ms), 0 where they overlap."""
    return max(one.first - other.last, other.first - one.last, 0)


def _without_schema_id(key: str) -> str:
    # The length of an Avro string after the header is left out, too.
    content = key.encode()
    if len(content) <= 5 or content[0] != 0:
        return key
    rest = content[5:]
    if rest[0] == 2 * (len(rest) - 1):
        rest = rest[1:]
    return rest.decode(errors="replace")


_FORMS: Final[Mapping[str, Callable[[str], str]]] = {
    "a schema id at the beginning of the key (Confluent's wire format)": _without_schema_id,
    "quotes around the key": lambda key: key.strip('"'),
    "white space around the key": str.strip,
    "capital letters": str.casefold,
    "zeros at the beginning of the key": lambda key: key.lstrip("0"),
    "hyphens in the key": lambda key: key.replace("-", ""),
}
"""By the name of a difference between keys that mean the same, the function that removes it."""


def _by_form(take_away: Callable[[str], str]) -> Callable[[Appearance], object]:
    return lambda appearance: (appearance.tenant, take_away(appearance.key))


_SAME: Final[Sequence[tuple[str, Callable[[Appearance], object]]]] = [
    (APART_IN_TIME, lambda appearance: (appearance.partition, appearance.tenant, appearance.key)),
    (APART_IN_PARTITION, lambda appearance: (appearance.tenant, appearance.key)),
    *((name, _by_form(take_away)) for name, take_away in _FORMS.items()),
]
