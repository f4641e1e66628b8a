"""The live view: merge records, and beside them what waits in bronze for the clock. Nothing is written.

A row whose status is `waiting` is a key of a partition whose records the clock has not reached: its parts are what will be
merged, into one merge record or several, when it is their time. `waits_for` names the sources that it takes: those whose head
is the clock, or that have none. So a source that is stuck is seen here first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pipelines import tables
from pipelines.core.plan import TopicPartition
from pipelines.settings import Settings, SourceSettings
from pipelines.transforms.decode import value_sql
from pipelines.transforms.ranges import within


class Passed(NamedTuple):
    """How far the merge has passed a topic-partition: the next offset, and the position (ms) there, None while there is none."""

    until: int
    position: int | None


def live_sql(settings: Settings, identifier: Callable[[str], str], passed: Mapping[TopicPartition, Passed] | None = None) -> str:
    """The view as a query; with `passed`, only files of bronze beyond that are opened.

    Columns: those of silver (status also `waiting`), and `waits_for ARRAY<STRING>`, null for what has been merged.
    """
    sources = list(settings.sources)
    ctes = [("passed", _passed(identifier) if passed is None else _given(passed))]
    for name, source in settings.sources.items():
        ctes.append((f"beyond_{name}", _beyond(name, source, identifier(tables.bronze(name)), passed)))
    heads = [f"SELECT '{name}' AS source, `partition`, event_time AS head FROM beyond_{name}" for name in sources]
    idle = (
        f"SELECT i.source, i.`partition`, i.event_time AS head FROM {identifier(tables.IDLE_HEARTBEATS)} AS i "
        "LEFT JOIN passed AS p USING (source, `partition`) WHERE i.after_offset + 1 >= COALESCE(p.until_offset, 0)"
    )
    by_source = ", ".join(f"MAX(CASE WHEN source = '{name}' THEN head END) AS `{name}`" for name in sources)
    every = " UNION ALL ".join(["SELECT source, `partition`, position AS head FROM passed", *heads, idle])
    ctes.append(("heads", f"SELECT `partition`, {by_source} FROM ({every}) GROUP BY `partition`"))
    ctes.append(("stuck", f"SELECT `partition`, {_waits_for(sources)} AS waits_for FROM heads"))
    ctes.append(("waiting", " UNION ALL ".join(_waiting(name, settings.sources) for name in sources)))
    arrays = ", ".join(_sorted_parts(name) for name in sources)
    of_sources = ", ".join(f"`{name}`" for name in sources)
    common = "`partition`, merge_key, status, event_time, last_event_time"
    return (
        f"WITH {', '.join(f'{name} AS ({query})' for name, query in ctes)} "
        f"SELECT {common}, {of_sources}, valid, invalid_reason, batch, CAST(NULL AS ARRAY<STRING>) AS waits_for "
        f"FROM {identifier(tables.SILVER)} UNION ALL "
        f"SELECT `partition`, merge_key, 'waiting', MIN(event_time), MAX(event_time), {arrays}, CAST(NULL AS BOOLEAN), "
        "CAST(NULL AS STRING), CAST(NULL AS BIGINT), FIRST(waits_for) "
        "FROM waiting LEFT JOIN stuck USING (`partition`) GROUP BY `partition`, merge_key"
    )


def _passed(identifier: Callable[[str], str]) -> str:
    return (
        "SELECT source, `partition`, MAX_BY(until_offset, batch) AS until_offset, MAX_BY(position, batch) AS position "
        f"FROM {identifier(tables.PROGRESS)} GROUP BY source, `partition`"
    )


def _given(passed: Mapping[TopicPartition, Passed]) -> str:
    rows = ", ".join(
        f"('{tp.source}', {tp.partition}, {at.until}L, {'NULL' if at.position is None else f'{at.position}L'})"
        for tp, at in passed.items()
    )
    columns = "source, CAST(`partition` AS INT) AS `partition`, until_offset, timestamp_millis(CAST(ms AS BIGINT)) AS position"
    values = f"VALUES {rows}" if rows else "SELECT '', 0, 0L, 0L WHERE FALSE"
    return f"SELECT {columns} FROM ({values}) AS t(source, `partition`, until_offset, ms)"


def _beyond(name: str, source: SourceSettings, bronze: str, passed: Mapping[TopicPartition, Passed] | None) -> str:
    """Records of bronze that the merge has not passed."""
    read = bronze
    if passed:
        known = {tp.partition: at.until for tp, at in passed.items() if tp.source == name}
        others = f"`partition` NOT IN ({', '.join(map(str, known))})"
        read = f"(SELECT * FROM {bronze} WHERE {within({p: (until, None) for p, until in known.items()})} OR {others})"
    return (
        f"SELECT b.`partition`, b.`offset`, b.event_time, b.merge_key, b.heartbeat, {value_sql('b.value', source.value_type)} "
        f"AS value FROM {read} AS b LEFT JOIN passed AS p ON p.source = '{name}' AND p.`partition` = b.`partition` "
        f"WHERE b.`offset` >= COALESCE(p.until_offset, 0) AND b.reason IS NULL"
    )


def _waits_for(sources: list[str]) -> str:
    """The sources without a head; where all have one, those whose head is the smallest."""
    names = ", ".join(f"`{name}`" for name in sources)
    missing = ", ".join(f"CASE WHEN `{name}` IS NULL THEN '{name}' END" for name in sources)
    slowest = ", ".join(f"CASE WHEN `{name}` = LEAST({names}) THEN '{name}' END" for name in sources)
    all_known = " AND ".join(f"`{name}` IS NOT NULL" for name in sources)
    return f"ARRAY_COMPACT(CASE WHEN {all_known} THEN ARRAY({slowest}) ELSE ARRAY({missing}) END)"


def _waiting(name: str, sources: Mapping[str, SourceSettings]) -> str:
    """A source's records that wait, each as a part in the column of its source."""
    parts = [
        f"{'STRUCT(event_time, `offset`, value)' if other == name else _null(source)} AS `{other}`"
        for other, source in sources.items()
    ]
    return f"SELECT `partition`, merge_key, event_time, {', '.join(parts)} FROM beyond_{name} WHERE NOT heartbeat"


def _null(source: SourceSettings) -> str:
    return f"CAST(NULL AS STRUCT<event_time: TIMESTAMP, `offset`: BIGINT, value: {source.value_type}>)"


def _sorted_parts(name: str) -> str:
    """As silver stores them: by (event time, offset)."""
    part = "p -> NAMED_STRUCT('offset', p.`offset`, 'event_time', p.event_time, 'value', p.value)"
    return f"TRANSFORM(ARRAY_SORT(COLLECT_LIST(`{name}`)), {part}) AS `{name}`"
