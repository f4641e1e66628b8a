"""Warnings of `status` and `validate` about likely mistakes that no rule refuses.

They are about sources whose records never meet, event times in another unit, and event times that
nothing vouches for.

`status` reads the lake: the merge records that finished last, and the last records of bronze.
`validate` reads the last records in Kafka, so that it warns before anything runs. It looks there
for keys that never meet only as long as the lake cannot tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import chain
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.ask.answers import quoted, rows
from watersmeet.audit.partitioning import FIX as FIX_PARTITIONS
from watersmeet.audit.partitioning import Place, check_places, read_sample
from watersmeet.configuration.sources import spelled
from watersmeet.core.columns import row_values, times_ms
from watersmeet.core.doubts import (
    APART_IN_PARTITION,
    APART_IN_TIME,
    ENOUGH,
    UNLIKE,
    Appearance,
    are_odd,
    gap_ms,
    lonely,
    odd_times,
    reasons_unmet,
    why_unmet,
)
from watersmeet.core.dropped_fields import (
    COLUMNS,
    DroppedFields,
    counted,
    dropped_fields,
    fields_in,
)
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.reading import KAFKA, ReadingRules, read_records
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

FINISHED = 1_000
"""About how many of the merge records that finished last are read."""

SPANS = 20
"""Number of short spans of event time from which merge records are read where a single batch
finished many more.
"""

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
    "SELECT min(batch) AS since, sum(n) AS n, min(first) AS first, max(last) AS last FROM ("
    "SELECT *, sum(n) OVER (ORDER BY batch DESC) - n AS later FROM (SELECT batch, count(*) AS n, "
    "min(event_time) AS first, max(event_time) AS last FROM merged "
    f"WHERE {IS_FINISHED} AND batch > (SELECT max(batch) FROM merged) - {FINISHED} "
    f"GROUP BY batch)) WHERE later < {FINISHED}"
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


class Incomplete(NamedTuple):
    """Records that lack those of another source: `why`, how many merge records, and `fix`, what
    helps.
    """

    why: str
    records: int
    fix: str


def why_incomplete(reader: TableReader, settings: Settings) -> list[Incomplete]:
    """Return why merge records have records of one source alone, as far as it can be seen.

    Only the merge records that finished last are looked at; none where too few have finished.
    """
    alone = [parts[0] for parts in _last_finished(reader, settings) or () if len(parts) == 1]
    return [
        Incomplete(*_of_kind(kind, settings, count)) for kind, count in reasons_unmet(alone).items()
    ]


def _of_kind(kind: str, settings: Settings, count: int) -> tuple[str, int, str]:
    if kind == APART_IN_TIME:
        waits = duration(settings.merge.window.gap_ms)
        why = f"another source has the key in the same partition, further away than {waits}"
        return why, count, _FIX_TIMES
    if kind == APART_IN_PARTITION:
        return "another source has the key in another partition", count, FIX_PARTITIONS
    if kind == UNLIKE:
        fix = f"nothing, where a source may have no record of a key; else {_FIX_KEYS}"
        return "no other source has the key, of those that were looked at", count, fix
    return f"another source has the key, but for {kind}", count, _FIX_FORM


def _last_finished(reader: TableReader, settings: Settings) -> list[list[Appearance]] | None:
    """Return the merge records that finished last, each by its sources.

    None where too few have finished.
    """
    found = rows(reader, _LAST_BATCHES)
    if not found or (count := found[0]["n"] or 0) < ENOUGH:
        return None
    sample, first, last = "TRUE", found[0]["first"], found[0]["last"]
    if count > 10 * FINISHED:  # of a batch that finished many, those of short spans
        step = (last - first) // SPANS + 1
        sample = f"(ms(event_time) - {first}) % {step} < {max(1, step * FINISHED // count)}"
    has_parts = ", ".join(
        f"cardinality({quoted(source)}) > 0 AS {quoted(source)}" for source in settings.sources
    )
    finished = rows(
        reader,
        f"SELECT `partition`, tenant, merge_key, event_time, last_event_time, {has_parts} "
        f"FROM merged WHERE {IS_FINISHED} AND batch >= {found[0]['since']} AND {sample}",
    )
    names = ("partition", "tenant", "merge_key", "event_time", "last_event_time")
    return [
        [Appearance(source, *(row[n] for n in names)) for source in settings.sources if row[source]]
        for row in finished
    ]


def _against(name: str, appearances: Sequence[Appearance]) -> list[Appearance]:
    """Return the appearances of a source, and those of all others as if of a single source."""
    others = "another source"
    return [a if a.source == name else a._replace(source=others) for a in appearances]


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
            problems += _odd(
                settings,
                input_id.source,
                reader.rows(table, KAFKA.names, where),
                _lake_rules(reader, settings, input_id.source),
            )
    return problems


_TIMES = ["kafka_timestamp", "event_time", "reason"]


def _lake_rules(reader: TableReader, settings: Settings, source: str) -> ReadingRules:
    """Return the rules by which the lake reads the records of a source now.

    The schemas of writers are those that the lake knows: no registry is asked.
    """
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
    names = settings.input_names
    places = (
        Place(key, names[input_id], input_id.topic, p, offset, tenant or "")
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
    for input_id, name in settings.input_names.items():
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
                places.append(Place(key, name, input_id.topic, p, offset, tenant))
                at = appearances.setdefault((p, tenant, key), {})
                before = at.get(source, Appearance(source, p, tenant, key, time, time))
                at[source] = before._replace(
                    first=min(before.first, time), last=max(before.last, time)
                )
        if sample:
            doubts += _odd(settings, source, pa.Table.from_batches(sample), rules)
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
    """Yield a problem for each source whose records have fields that its schema lacks."""
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


def _odd(
    settings: Settings, source: str, records: pa.Table, rules: ReadingRules
) -> Iterator[Problem]:
    if (odd := odd_times(records, rules)) is None:
        return
    time_text = (
        "no event time" if odd.event_time is None else f"the event time {utc(odd.event_time)}"
    )
    what = (
        f"{odd.odd:,} of the last {odd.records:,} records have event times decades from Kafka's "
        f"own timestamps, or none: {time_text} where Kafka has {utc(odd.kafka_timestamp)}"
    )
    kept = settings.sources[source].time
    fix = "look at the field and its unit; leave it, where the records are meant to be so old"
    if odd.unit is not None and kept is not None:
        written = f"event_time: {spelled(kept.changed(unit=odd.unit).model_dump())}"
        fix = (
            f"`unit: {odd.unit}` would fit: `{written}`, which a lake that has begun gets by "
            "`evolve`"
        )
    yield Problem(what, f"sources.{source}.event_time", fix)


def _problem(
    what: str, where: str, appearances: Sequence[Appearance], settings: Settings
) -> Problem:
    difference = why_unmet(appearances)
    if difference is None:
        return Problem(what, where, _FIX_KEYS)
    kind, one, other = difference
    one_key = f"{one.key!r} of {one.source}"
    other_key = f"{other.key!r} of {other.source}"
    if kind == APART_IN_TIME:
        allowed = f"the merge waits for {duration(settings.merge.window.gap_ms)}"
        why = (
            f"the nearest records of one key, {one.key!r}, lie {duration(gap_ms(one, other))} apart"
        )
        return Problem(f"{what}: {why}, and {allowed}", where, _FIX_TIMES)
    if kind == APART_IN_PARTITION:
        places = f"{one.partition} of {one.source} and {other.partition} of {other.source}"
        return Problem(
            f"{what}: the key {one.key!r} is in the partitions {places}",
            where,
            FIX_PARTITIONS,
        )
    if kind == UNLIKE:
        return Problem(f"{what}, such as {one_key} and {other_key}", where, _FIX_KEYS)
    return Problem(
        f"{what}: what differs is {kind}, as in {one_key} and {other_key}", where, _FIX_FORM
    )
