"""Warnings of `status` and `validate` about likely mistakes that no rule refuses.

They are about sources whose records never meet, event times in another unit, and event times that
nothing vouches for.

`status` reads the lake: the merge records that finished last, and the last records of bronze.
`validate` reads the last records in Kafka, so that it warns before anything runs. It looks there
for keys that never meet only as long as the lake cannot tell.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import chain, compress, pairwise
from operator import not_
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.ask.answers import quoted, rows
from watersmeet.audit.partitioning import FIX as FIX_PARTITIONS
from watersmeet.audit.partitioning import Place, check_places, read_sample
from watersmeet.configuration.sources import spelled
from watersmeet.core.columns import NULL_TIME, Booleans, row_values, times_ms
from watersmeet.core.dropped_fields import (
    COLUMNS,
    DroppedFields,
    counted,
    dropped_fields,
    fields_in,
)
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.reading import (
    KAFKA,
    MILLISECONDS_PER_UNIT,
    ReadingRules,
    Reason,
    read_records,
)
from watersmeet.core.times import LAST_EVENT_TIME_MS, duration, set_back_ms, time_zone, utc
from watersmeet.core.types import TENANT
from watersmeet.errors import KafkaAccessError, Problem, TopicChangedError
from watersmeet.kafka.cluster import AFTER_MAX, Cluster, after_max
from watersmeet.kafka.registry import rules_of
from watersmeet.lake import tables
from watersmeet.lake.history import read_history
from watersmeet.lake.inputs import by_input, of_topic
from watersmeet.lake.newest import Ends, count_dropped, finders, newest
from watersmeet.lake.schemas import avro_schemas
from watersmeet.lake.table_reader import TableReader, within
from watersmeet.settings import Settings

ENOUGH: Final = 10
"""Minimum number of merge records, or of a source's keys, for a report that they never meet."""

DECADES_MS: Final = 20 * 365 * 86_400_000
"""Distance of an event time from Kafka's own timestamp (ms) beyond which it is seldom intended."""

FINISHED = 1_000
"""Maximum number of the merge records that finished last that are read."""

LAST = 25
"""Number of last offsets of a topic-partition in bronze that are read."""

PARTITIONS = 8
"""Maximum number of partitions of an input that are read."""

SAMPLE_BYTES = 64 * 1024 * 1024
"""About how many bytes of records from Kafka are kept, to be read again in other units."""

IS_FINISHED: Final = "status = 'timed_out' AND coalesce(invalid_reason, '') <> 'reset'"
"""Finished merge records, without those that a jump (`watersmeet reset`) closed: these are not
complete.
"""

_LAST_BATCHES: Final = (
    "SELECT min(batch) AS since, sum(n) AS n FROM (SELECT *, sum(n) OVER (ORDER BY batch DESC) - n "
    f"AS later FROM (SELECT batch, count(*) AS n FROM merged WHERE {IS_FINISHED} "
    f"AND batch > (SELECT max(batch) FROM merged) - {FINISHED} GROUP BY batch)) "
    f"WHERE later < {FINISHED}"
)

_FIX_KEYS = (
    "compare the keys of the sources (`sources.NAME.key`), and what their producers serialize them "
    "with"
)
_FIX_FORM = (
    "give all sources one serializer for the key, or name it in their values (`sources.NAME.key`)"
)
_FIX_TIMES = (
    "look at unit and time zone of each source's event time; or give the merge a longer timeout"
)


# -- sources whose records never meet


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


APART_IN_TIME: Final = "event times"
APART_IN_PARTITION: Final = "partitions"
UNLIKE: Final = "keys"


class Unmet(NamedTuple):
    """The reason why no record of a source meets one of another.

    `what`: what differs, as far as can be seen. `one` and `other`: two appearances that show it.
    """

    what: str
    one: Appearance
    other: Appearance


def reasons_unmet(
    appearances: Iterable[Appearance],
) -> Iterator[tuple[str, list[list[Appearance]]]]:
    """Yield why some appearances did not meet one of another source, and which: in groups of which
    each would have met. Each is in a group of the first reason that applies:

    - the same key in the same partition is there at other times;
    - the same key is in other partitions;
    - keys are the same but for their form (`_FORMS`);
    - keys just differ; these are one group.
    """
    remaining = list(appearances)
    for kind, same in _SAME:
        groups = defaultdict[object, list[Appearance]](list)
        for appearance in remaining:
            groups[same(appearance)].append(appearance)
        alone = [len({each.source for each in group}) == 1 for group in groups.values()]
        if not all(alone):
            yield kind, [*compress(groups.values(), map(not_, alone))]
        remaining = [*chain.from_iterable(compress(groups.values(), alone))]
    if remaining:
        yield UNLIKE, [remaining]


def why_unmet(appearances: Sequence[Appearance]) -> Unmet | None:
    """Return the first reason why appearances of two sources did not meet, with two of those that
    lie nearest to each other in time; None where there are no two sources.
    """
    first = {each.source: each for each in reversed(appearances)}
    if len(first) < 2:
        return None
    kind, groups = next(reasons_unmet(appearances))
    if kind == UNLIKE:
        [(one, _), (other, _)] = Counter(each.source for each in appearances).most_common(2)
        return Unmet(kind, first[one], first[other])
    pairs = [
        pair
        for group in groups
        for pair in pairwise(sorted(group, key=lambda each: each.first))
        if pair[0].source != pair[1].source
    ]
    order = [*dict.fromkeys(each.source for each in appearances)]
    nearest = min(pairs, key=lambda pair: gap_ms(*pair))
    return Unmet(kind, *sorted(nearest, key=lambda each: order.index(each.source)))


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


# -- the lake


def unmet_in_lake(reader: TableReader, settings: Settings) -> list[Problem] | None:
    """Return problems about sources whose records met none of another source.

    Only the merge records that finished last count. None where too few have finished.
    """
    last_finished = _last_finished(reader, settings)
    if last_finished is None:
        return None
    groups = [[appearance.source for appearance in parts] for parts in last_finished]
    lonely_sources = lonely(groups)
    if not lonely_sources.counts:
        return []
    appearances = [*chain.from_iterable(last_finished)]
    if lonely_sources.is_every_one:
        occurrences = Counter(chain.from_iterable(groups))
        counts = ", ".join(f"{name} {occurrences[name]:,}" for name in settings.sources)
        what = (
            f"of the last {len(groups):,} finished merge records none has records of two sources "
            f"({counts})"
        )
        return [_problem(what, "silver", appearances, settings)]
    return [
        _problem(
            f"of the last {n:,} finished merge records with records of {name} none has one of "
            "another source",
            f"silver.{name}",
            _against(name, appearances),
            settings,
        )
        for name, n in lonely_sources.counts.items()
    ]


def why_incomplete(reader: TableReader, settings: Settings) -> list[tuple[str, int, str]]:
    """Return why merge records have records of one source alone, as far as it can be seen, of how
    many, and what helps.

    Only the merge records that finished last are looked at; none where too few have finished.
    """
    alone = [parts[0] for parts in _last_finished(reader, settings) or () if len(parts) == 1]
    waits = duration(settings.merge.window.gap_ms)
    why = {
        APART_IN_TIME: f"another source has the key in the same partition, further away than "
        f"{waits}",
        APART_IN_PARTITION: "another source has the key in another partition",
        UNLIKE: "no other source has the key, of those that were looked at",
    }
    if_needed = "nothing, where a source may have no record of a key; else "
    return [
        (
            why.get(kind, f"another source has the key, but for {kind}"),
            sum(map(len, groups)),
            f"{if_needed if kind == UNLIKE else ''}{_FIXES.get(kind, _FIX_FORM)}",
        )
        for kind, groups in reasons_unmet(alone)
    ]


def _last_finished(reader: TableReader, settings: Settings) -> list[list[Appearance]] | None:
    """Return the merge records that finished last, each by its sources.

    None where too few have finished.
    """
    found = rows(reader, _LAST_BATCHES)
    if not found or (found[0]["n"] or 0) < ENOUGH:
        return None
    has_parts = ", ".join(
        f"cardinality({quoted(source)}) > 0 AS {quoted(source)}" for source in settings.sources
    )
    names = ("partition", "tenant", "merge_key", "event_time", "last_event_time")
    finished = rows(
        reader,
        f"SELECT `partition`, tenant, merge_key, event_time, last_event_time, {has_parts} "
        f"FROM merged WHERE {IS_FINISHED} AND batch >= {found[0]['since']} "
        f"ORDER BY batch DESC, event_time DESC, `partition`, tenant, merge_key LIMIT {FINISHED}",
    )
    return [
        [Appearance(source, *(row[n] for n in names)) for source in settings.sources if row[source]]
        for row in finished
    ]


def _against(name: str, appearances: Sequence[Appearance]) -> list[Appearance]:
    """Return the appearances of a source, and those of all others as if of a single source."""
    others = "another source"
    return [a if a.source == name else a._replace(source=others) for a in appearances]


def odd_times(
    settings: Settings, source: str, records: pa.Table, rules: ReadingRules
) -> Iterator[Problem]:
    """Yield a problem if most of some records of a source have no event time near Kafka's
    timestamp, with the unit in which most would; see `are_odd` for the records that do not count.

    `records`: the columns of `KAFKA`. `rules`: those by which the source is read.
    """
    # A time that is refused since it lies in the future is near all the same, or it is not.
    rules = replace(rules, max_future_ms=LAST_EVENT_TIME_MS)
    read = read_records(records, rules)
    if not are_odd(read):
        return
    is_meant, is_near = _near(read)
    near = {rules.unit: int(is_near.sum())}
    for unit in MILLISECONDS_PER_UNIT.keys() - near.keys():
        near[unit] = int(_near(read_records(records, replace(rules, unit=unit)))[1].sum())
    count, best = int(is_meant.sum()), max(near, key=near.__getitem__)
    example = int(np.flatnonzero(is_meant & ~is_near)[0])
    time, taken = (int(times_ms(read[n])[example]) for n in ("event_time", "kafka_timestamp"))
    time_text = "no event time" if time == NULL_TIME else f"the event time {utc(time)}"
    what = (
        f"{count - near[rules.unit]:,} of the last {count:,} records have event times decades from "
        f"Kafka's own timestamps, or none: {time_text} where Kafka has {utc(taken)}"
    )
    kept = settings.sources[source].time
    fix = "look at the field and its unit; leave it, where the records are meant to be so old"
    if 2 * near[best] > count and kept is not None:
        written = f"event_time: {spelled(kept.changed(unit=best).model_dump())}"
        fix = f"`unit: {best}` would fit: `{written}`, which a lake that has begun gets by `evolve`"
    yield Problem(what, f"sources.{source}.event_time", fix)


def are_odd(read: pa.Table) -> bool:
    """Return True where most of some records have no event time near Kafka's timestamp.

    `read`: `kafka_timestamp`, `event_time` and `reason` of each record. Three kinds of records do
    not count:
    - those without a timestamp of Kafka's;
    - those refused for something else than their time;
    - those skipped.
    """
    is_meant, is_near = _near(read)
    return 2 * int(is_near.sum()) < int(is_meant.sum())


def _near(read: pa.Table) -> tuple[Booleans, Booleans]:
    """Return which records count, and which of them have an event time near Kafka's timestamp."""
    times, taken = times_ms(read["event_time"]), times_ms(read["kafka_timestamp"])
    is_read = pc.or_(pc.is_valid(read["event_time"]), pc.is_valid(read["reason"]))
    is_timed = pc.is_in(read["reason"], value_set=pa.array(_TIMED, pa.string()))
    is_meant: Booleans = np.asarray(pc.and_(is_timed, is_read)) & (taken >= 0)
    return is_meant, is_meant & (times != NULL_TIME) & (np.abs(times - taken) <= DECADES_MS)


_TIMED: Final = [None, Reason.NO_EVENT_TIME.value, Reason.EVENT_TIME_IN_FUTURE.value]
"""Reasons of records whose event time was read: None (not refused), or a fault of that time."""


def odd_times_in_lake(
    reader: TableReader, settings: Settings, ends: Mapping[TopicPartition, int]
) -> list[Problem]:
    """Return problems about sources whose last event times in bronze are decades from Kafka's
    timestamps.

    `ends`: by topic-partition, the exclusive end offset of bronze.
    """
    problems: list[Problem] = []
    for input_id, own in by_input({tp: end for tp, end in ends.items() if end > 0}).items():
        last = {p: (max(0, own[p] - LAST), own[p]) for p in sorted(own)[:PARTITIONS]}
        table = tables.bronze(input_id.source)
        where = of_topic(input_id, within(last))
        if reader.exists(table) and are_odd(reader.rows(table, _TIMES, where)):
            problems += odd_times(
                settings,
                input_id.source,
                reader.rows(table, KAFKA.names, where),
                _lake_rules(reader, settings, input_id.source),
            )
    return problems


_TIMES = ["kafka_timestamp", "event_time", "reason"]


def _lake_rules(reader: TableReader, settings: Settings, source: str) -> ReadingRules:
    # The schemas of writers are those that the lake knows: no registry is asked.
    current = read_history(reader, settings).epochs.current.settings
    rules = current.reading_rules(source)
    schemas = avro_schemas(reader, current)
    return replace(rules, schema=schemas[source]) if source in schemas else rules


def doubts_of_newest(reader: TableReader, settings: Settings, ends: Ends) -> list[Problem]:
    """Return what looks wrong with the newest records: dropped fields, and keys that never meet."""
    find = finders(reader, settings)
    rows_by_input: dict[InputId, pa.Table] = {}
    for input_id in settings.inputs:
        columns = {*_KEYED, *(COLUMNS if input_id.source in find else ())}
        rows_by_input[input_id] = newest(reader, input_id, ends, sorted(columns))
    partitions = 1 + max((tp.partition for tp in ends), default=0)
    places = (
        Place(TopicPartition(input_id, p), offset, key, tenant or "")
        for input_id, rows in rows_by_input.items()
        for key, p, offset, tenant in row_values(rows, *_KEYED)
    )
    return [
        *_dropped_problems(count_dropped(rows_by_input, find)),
        *check_places(settings, partitions, places),
    ]


_KEYED: Final = ("merge_key", "partition", "offset", *TENANT.names)


# -- Kafka


def check_sample(
    settings: Settings,
    partitions: int,
    since: Callable[[InputId], Mapping[int, int]] = lambda _: {},
    unmet: Callable[[], list[Problem] | None] = list,
) -> tuple[list[Problem], list[Problem]]:
    """Return problems with how the sources are partitioned, and what else looks wrong but may be
    meant, judged by the last records of some partitions in Kafka.

    - `since`: returns for an input, by partition, the first offset that the settings' rules apply
      to. Where a partition is absent, they apply to every offset.
    - `unmet`: returns what the lake says of keys that never meet; where that is None, the records
      in Kafka say it.

    Raises what Kafka raises.
    """
    places: list[Place] = []
    doubts: list[Problem] = []
    appearances: dict[tuple[int, str, str], dict[str, Appearance]] = {}
    fields: dict[str, list[frozenset[str]]] = {}
    for input_id in settings.inputs:
        source = input_id.source
        rules = rules_of(settings, source)
        find = None if rules.schema is None else dropped_fields(rules.schema)
        sample: list[pa.RecordBatch] = []
        for batch in read_sample(settings, partitions, input_id.topic, since(input_id)):
            if sum(kept.nbytes for kept in sample) < SAMPLE_BYTES:
                sample.append(batch)
            read = read_records(batch, rules)
            read = read.filter(pc.is_valid(read["merge_key"]))
            fields.setdefault(source, []).extend(fields_in(read, find) if find else ())
            values = row_values(read, "partition", "offset", "tenant", "merge_key")
            times = times_ms(read["event_time"]).tolist()
            for (p, offset, tenant, key), time in zip(values, times, strict=True):
                places.append(Place(TopicPartition(input_id, p), offset, key, tenant))
                at = appearances.setdefault((p, tenant, key), {})
                before = at.get(source, Appearance(source, p, tenant, key, time, time))
                at[source] = before._replace(
                    first=min(before.first, time), last=max(before.last, time)
                )
        if sample:
            doubts += odd_times(settings, source, pa.Table.from_batches(sample), rules)
    doubts += _dropped_problems({source: counted(found) for source, found in fields.items()})
    problems = check_places(settings, partitions, places)
    # Keys in different partitions say enough of why they do not meet.
    of_lake = [] if problems else unmet()
    if of_lake is None:
        doubts += _unmet_in_kafka(settings, [*appearances.values()])
    return problems, [*(of_lake or []), *doubts]


def _unmet_in_kafka(
    settings: Settings, appearances: Sequence[Mapping[str, Appearance]]
) -> Iterator[Problem]:
    every = [appearance for at in appearances for appearance in at.values()]
    counts = Counter(appearance.source for appearance in every)
    lonely_sources = lonely(appearances)
    if lonely_sources.counts and sum(n >= ENOUGH for n in counts.values()) > 1:
        name = min(lonely_sources.counts, key=lonely_sources.counts.__getitem__)
        what = (
            f"none of the {lonely_sources.counts[name]:,} keys in the last records of {name} is "
            "one in those of another source"
        )
        is_pair = lonely_sources.is_every_one and len(settings.sources) == 2
        compared = every if is_pair else _against(name, every)
        yield _problem(what, f"sources.{name}.key", compared, settings)


def doubtful_topics(settings: Settings) -> Iterator[Problem]:
    """Yield a problem for each topic that is compacted, or whose producers choose event time and
    Kafka's timestamp without a bound.

    Nothing vouches for an event time there. Of a repartitioned source, the topics that its records
    come from are checked. Topics that do not exist, or that the user may not see, are left out.
    Raises what Kafka raises.
    """
    cluster = Cluster(settings.kafka)
    topics: dict[str, str] = {}
    for name, source in settings.sources.items():
        repartition = settings.repartitioned.get(name)
        at = f"sources.{name}.topic" if repartition is None else f"sources.{name}.repartition.from"
        topics |= dict.fromkeys(
            source.topics if repartition is None else repartition.from_topics, at
        )
    for topic, where in topics.items():
        try:
            topic_settings = cluster.topic_settings(topic)
        except (KafkaAccessError, TopicChangedError):
            continue
        if "compact" in topic_settings.get("cleanup.policy", ""):
            yield Problem(
                f"{topic} is compacted (cleanup.policy={topic_settings['cleanup.policy']}): Kafka "
                "deletes all records of a Kafka key but the last, and what bronze has not read by "
                "then is missing from its merge records",
                where,
                "set cleanup.policy to delete on it, or min.compaction.lag.ms to longer than a run "
                "is ever behind",
            )
        latest = topic_settings.get(AFTER_MAX)
        if topic_settings.get("message.timestamp.type") == "CreateTime" and (
            latest is None or int(latest) > LAST_EVENT_TIME_MS
        ):
            what = (
                f"producers choose event time and timestamp of {topic} without a bound: one record "
                "of the year 9999 silences it"
            )
            fix = (
                f"set {AFTER_MAX} to {after_max(settings)} on it (kafka-configs.sh), or "
                "message.timestamp.type to LogAppendTime"
            )
            yield Problem(what, where, fix)


# -- sentences


def _dropped_problems(dropped: Mapping[str, DroppedFields]) -> Iterator[Problem]:
    for name, fields in dropped.items():
        if fields.having:
            what = (
                f"of the last {fields.records:,} records {fields.having:,} have fields that the "
                f"schema lacks, so that only bronze keeps them: {fields}"
            )
            fix = "add those that you need to the schema, and see `watersmeet evolve`"
            yield Problem(what, f"sources.{name}.schema", fix)


def heads_in_future(
    settings: Settings, heads: Mapping[TopicPartition, int], now_ms: int
) -> Iterator[Problem]:
    """Yield a problem for each head (ms) that is more than `max_future` ahead of the wall clock.

    Until that time, all records of the source wait.
    """
    for tp, head in heads.items():
        if head - now_ms > settings.merge.max_future_ms:
            what = (
                f"the head, {utc(head)}, lies {duration(head - now_ms)} ahead of the wall clock: "
                "all records after it wait"
            )
            fix = (
                f"bound {AFTER_MAX} on the topic, then jump over that record with `watersmeet "
                "reset --to latest`"
            )
            yield Problem(what, f"{tp.input.topic}[{tp.partition}]", fix)


def local_times_twice(settings: Settings) -> Iterator[Problem]:
    """Yield a problem for each source whose local times go back further than the merge waits."""
    gap_ms = settings.merge.window.gap_ms
    for name, source in settings.sources.items():
        if source.time is None or source.time.zone is None:
            continue
        zone = source.time.zone
        back_ms = set_back_ms(time_zone(zone), datetime.now().year)
        if back_ms > gap_ms:
            what = (
                f"when clocks go back in {zone}, {duration(back_ms)} of local time is there twice "
                "and read as the earlier one: records of the second time are late, since the "
                f"merge waits for {duration(gap_ms)}"
            )
            fix = (
                f"give the merge {duration(back_ms)} or more, or let producers write UTC or the "
                "offset"
            )
            yield Problem(what, f"sources.{name}.event_time.zone", fix)


def _problem(
    what: str, where: str, appearances: Sequence[Appearance], settings: Settings
) -> Problem:
    difference = why_unmet(appearances)
    if difference is None:
        return Problem(what, where, _FIX_KEYS)
    kind, one, other = difference
    one_key = f"{one.key!r} of {one.source}"
    other_key = f"{other.key!r} of {other.source}"
    apart = duration(gap_ms(one, other))
    why = {
        APART_IN_TIME: f": the nearest records of one key, {one.key!r}, lie {apart} apart, and the "
        f"merge waits for {duration(settings.merge.window.gap_ms)}",
        APART_IN_PARTITION: f": the key {one.key!r} is in the partitions {one.partition} of "
        f"{one.source} and {other.partition} of {other.source}",
        UNLIKE: f", such as {one_key} and {other_key}",
    }
    form = f": what differs is {kind}, as in {one_key} and {other_key}"
    return Problem(f"{what}{why.get(kind, form)}", where, _FIXES.get(kind, _FIX_FORM))


_FIXES: Final[Mapping[str, str]] = {
    APART_IN_TIME: _FIX_TIMES,
    APART_IN_PARTITION: FIX_PARTITIONS,
    UNLIKE: _FIX_KEYS,
}
"""By reason why sources do not meet, what helps; where keys differ in form, `_FIX_FORM` does."""
