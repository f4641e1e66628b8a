"""Counts the outcomes of a batch's records, from the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import pyarrow.compute as pc

from watersmeet.core.columns import one_chunk
from watersmeet.core.input_columns import part_topics
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import BatchPlan, TopicPartition
from watersmeet.core.sequence import TOO_MANY
from watersmeet.expressions.publish import Expressions
from watersmeet.lake import tables
from watersmeet.lake.inputs import of_topic, topic_partition
from watersmeet.lake.table_reader import TableReader, Where, in_portions
from watersmeet.monitoring.events import Counts, Judged, RecordsProcessed
from watersmeet.running.batch_rows import BatchRows
from watersmeet.running.owner import Owner
from watersmeet.running.planning import Planner
from watersmeet.settings import Settings


def notify_merge(owner: Owner, rows: BatchRows, plan: BatchPlan | None, planner: Planner) -> None:
    """Report the outcomes of a batch, if there is one, and the progress of the merge."""
    reader = owner.engine.reader
    expressions = Expressions.of(rows.settings)
    if plan is not None and (owner.is_observed or expressions.valid is not None):
        judged = judged_by(reader, plan.batch)
        if "expression" in judged:
            _warn_of_failures(reader, expressions, plan.batch, judged)
        if owner.is_observed:
            was_recovered = rows.has_messages or bool(plan.generation)
            counts = outcomes(reader, rows.settings, plan, was_recovered=was_recovered)
            owner.notify(RecordsProcessed("silver", counts))
            owner.notify(Judged({reason: count for reason, count in judged.items() if reason}))
    owner.notify(planner.progress())


def judged_by(reader: TableReader, batch: int) -> dict[str | None, int]:
    """Return how many merge records a batch has judged, by the reason why they are not valid."""
    where: Where = [[("batch", "=", batch), ("status", "=", "timed_out")]]
    rows = reader.summary(tables.SILVER, ["invalid_reason"], {"rows": ("count", "*")}, where)
    return dict(zip(*(rows[name].to_pylist() for name in ("invalid_reason", "rows")), strict=True))


def _warn_of_failures(
    reader: TableReader, expressions: Expressions, batch: int, judged: Mapping[str | None, int]
) -> None:
    """Log why `publish.valid` fails, by the records of the first key for which it does.

    The table says so, wherever the batch was judged.
    """
    conditions = [("batch", "=", batch), ("invalid_reason", "=", "expression")]
    [first] = reader.summary(
        tables.SILVER, [], {"key": ("min", "merge_key")}, [conditions]
    ).to_pylist()
    where: Where = [[*conditions, ("merge_key", "=", first["key"])]]
    failing = reader.rows(tables.SILVER, expressions.columns, where)
    expressions.warn(failing, judged["expression"], sum(judged.values()))


def outcomes(
    reader: TableReader, settings: Settings, plan: BatchPlan, *, was_recovered: bool
) -> dict[str, Counts]:
    """Return, by topic, how many records a batch has merged, or found late or repeated, and how
    many late ones have corrected a merge record.

    Its heartbeats are counted, too. The notes of the batch must be written. A record that waits for
    its tenant's clock counts as merged, also if it turns out to be a duplicate later. A late record
    counts as late, and once it is settled as `corrected` too, or as `not_corrected` with the reason
    `too_many`, or as a duplicate with the reason `late`.
    `was_recovered`: there are messages of a lost lake, or of earlier generations, so some records
    may be `recovered`: they are in no merge record of this generation.
    """
    late: Counter[InputId] = Counter()
    late_rows = reader.summary(
        tables.LATE, ["source", "topic"], {"rows": ("count", "*")}, [[("batch", "=", plan.batch)]]
    )
    for source, topic, rows in zip(
        *(late_rows[name].to_pylist() for name in ("source", "topic", "rows")), strict=True
    ):
        late[InputId(source, topic)] += rows
    duplicates, waited_duplicates, late_duplicates = _duplicates(reader, settings, plan)
    corrected = _corrected(reader, settings, plan)
    merged = dict(_parts(reader, settings, plan)) if was_recovered else {}
    counts: dict[str, Counter[tuple[str, str]]] = {
        input_id.topic: Counter() for input_id in settings.inputs
    }
    for input_id in settings.inputs:
        topic = input_id.topic
        records, beats = _consumed(reader, input_id, plan)
        on_time = records - late[input_id] - duplicates[input_id]
        counts[topic]["heartbeat", ""] += beats
        counts[topic]["late", ""] += late[input_id]
        if settings.has_ids:
            repeated = duplicates[input_id] + waited_duplicates[input_id]
            counts[topic]["duplicate", ""] += repeated
        if tables.has_corrections(settings):
            counts[topic]["corrected", ""] += corrected[input_id, False]
            counts[topic]["not_corrected", TOO_MANY] += corrected[input_id, True]
            if settings.has_ids:
                counts[topic]["duplicate", "late"] += late_duplicates[input_id]
        counts[topic]["merged", ""] += merged.get(input_id, 0) if was_recovered else on_time
        if was_recovered:
            counts[topic]["recovered", ""] += on_time - merged.get(input_id, 0)
    return {topic: dict(topic_counts) for topic, topic_counts in counts.items()}


def _duplicates(
    reader: TableReader, settings: Settings, plan: BatchPlan
) -> tuple[Counter[InputId], Counter[InputId], Counter[InputId]]:
    """Return, by input, how many duplicates a batch has found.

    First those of records that it has consumed, then those of records that had waited, then those
    of late records that it has settled.
    """
    counts = Counter[InputId](), Counter[InputId](), Counter[InputId]()
    if not settings.has_ids:
        return counts
    columns = ["source", "topic", "partition", "offset", "is_late"]
    rows = reader.select(tables.DUPLICATES, columns, [[("batch", "=", plan.batch)]])
    for row in rows.to_pylist():
        tp = topic_partition(row)
        has_waited = row["offset"] < plan.ranges[tp].from_offset
        counts[2 if row["is_late"] else int(has_waited)][tp.input] += 1
    return counts


def _corrected(
    reader: TableReader, settings: Settings, plan: BatchPlan
) -> Counter[tuple[InputId, bool]]:
    """Return, by input, how many late records have corrected a merge record in a batch, and how
    many (True) have not, since that has as many versions as it may.
    """
    if not tables.has_corrections(settings):
        return Counter()
    names = ["source", "topic", "invalid_reason"]
    where: Where = [[("batch", "=", plan.batch)]]
    rows = reader.summary(tables.CORRECTIONS, names, {"rows": ("count", "*")}, where)
    counts = Counter[tuple[InputId, bool]]()
    for row in rows.to_pylist():
        is_too_many = row["invalid_reason"] == TOO_MANY
        counts[InputId(row["source"], row["topic"]), is_too_many] += row["rows"]
    return counts


def _consumed(reader: TableReader, input_id: InputId, plan: BatchPlan) -> tuple[int, int]:
    """Return how many records with a time a batch has consumed of an input.

    The two numbers are those of records with a key and of heartbeats.
    """
    ranges = {
        tp.partition: done
        for tp, done in plan.ranges.items()
        if tp.input == input_id and not done.is_empty
    }
    counts: Counter[bool] = Counter()
    for portion in in_portions(sorted(ranges)):
        where: Where = [
            [
                ("partition", "=", p),
                ("offset", ">=", ranges[p].from_offset),
                ("offset", "<", ranges[p].until_offset),
                ("event_time", "is not null", None),
            ]
            for p in portion
        ]
        rows = reader.summary(
            tables.bronze(input_id.source),
            ["heartbeat"],
            {"rows": ("count", "*")},
            of_topic(input_id, where),
        )
        counts.update(
            dict(zip(rows["heartbeat"].to_pylist(), rows["rows"].to_pylist(), strict=True))
        )
    return counts[False], counts[True]


def _parts(
    reader: TableReader, settings: Settings, plan: BatchPlan
) -> Iterator[tuple[InputId, int]]:
    """Yield, by input, how many of a batch's records are parts of merge records that it changed."""
    rows = reader.select(
        tables.SILVER, ["partition", *settings.sources], [[("batch", "=", plan.batch)]]
    )
    counts: Counter[InputId] = Counter()
    consumed = {tp: (done.from_offset, done.until_offset) for tp, done in plan.ranges.items()}
    for source in settings.sources:
        partitions = rows["partition"].take(pc.list_parent_indices(rows[source])).to_pylist()
        parts = one_chunk(pc.list_flatten(rows[source]))
        topics = part_topics(parts, settings.inputs, source).to_pylist()
        offsets = parts.field("offset").to_pylist()
        for partition, topic, offset in zip(partitions, topics, offsets, strict=True):
            tp = TopicPartition(InputId(source, topic), partition)
            since, until = consumed.get(tp, (0, 0))
            counts[tp.input] += since <= offset < until
    yield from counts.items()
