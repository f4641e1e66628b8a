"""Counts the outcomes of a batch's records, from the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from watersmeet.core.inputs import InputId
from watersmeet.core.plan import BatchPlan
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
            counts = outcomes(reader, rows.settings, plan)
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


def outcomes(reader: TableReader, settings: Settings, plan: BatchPlan) -> dict[str, Counts]:
    """Return, by topic, how many records a batch has merged, or found late or repeated, and how
    many late ones have corrected a merge record.

    Its heartbeats are counted, too. A record that waits for its tenant's clock counts as merged,
    also if it turns out to be late or a duplicate later. A late record counts as late, and once it
    is settled as `corrected` too, or as `not_corrected` with the reason `too_many`, or as a
    duplicate with the reason `late`. `recovered`: records that a message has already.
    """
    counts: dict[str, Counter[tuple[str, str]]] = {
        input_id.topic: Counter() for input_id in settings.inputs
    }
    for input_id in settings.inputs:
        records, beats = _consumed(reader, input_id, plan)
        counts[input_id.topic]["merged", ""] += records
        counts[input_id.topic]["heartbeat", ""] += beats
        counts[input_id.topic]["late", ""] += 0
        if settings.has_ids:
            counts[input_id.topic]["duplicate", ""] += 0
        if tables.has_corrections(settings):
            counts[input_id.topic]["corrected", ""] += 0
            counts[input_id.topic]["not_corrected", TOO_MANY] += 0
            if settings.has_ids:
                counts[input_id.topic]["duplicate", "late"] += 0
    columns = ["source", "topic", "partition", "offset", "status", "is_late", "invalid_reason"]
    where: Where = [[("batch", "=", plan.batch), ("status", "in", list(_OF_RECORDS))]]
    for row in reader.select(tables.SILVER, columns, where).to_pylist():
        topic_counts = counts[row["topic"]]
        outcome = _OF_RECORDS[row["status"]], ""
        if row["is_late"]:
            outcome = "duplicate", "late"
        elif row["invalid_reason"] == TOO_MANY:
            outcome = "not_corrected", TOO_MANY
        topic_counts[outcome] += 1
        is_settled = row["is_late"] or row["status"] == "correction"
        if not is_settled and row["offset"] >= plan.ranges[topic_partition(row)].from_offset:
            topic_counts["merged", ""] -= 1
    return {topic: dict(topic_counts) for topic, topic_counts in counts.items()}


_OF_RECORDS: Final = {
    "late": "late",
    "duplicate": "duplicate",
    "passed": "recovered",
    "correction": "corrected",
}
"""The outcome that a row of silver is counted as, by its status."""


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
