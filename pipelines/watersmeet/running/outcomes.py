"""Counts the outcomes of a batch's records, from the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from watersmeet.core.columns import row_values
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import BatchPlan
from watersmeet.core.sequence import EXCESS, TOO_MANY
from watersmeet.expressions.publish import Expressions
from watersmeet.lake import tables
from watersmeet.lake.inputs import of_input, of_topic
from watersmeet.lake.table_reader import Condition, TableReader, Where, in_portions
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
    return dict(row_values(rows, "invalid_reason", "rows"))


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
    also if it turns out to be late later, and so does one that joins a merge record, also if that
    finds it to be a duplicate when it closes, or excess. A late record counts as late, and once it
    is settled as `corrected` too, or as `not_corrected` with the reason `too_many` or `excess`, or
    as a duplicate with the reason `late`. `recovered`: records that a message has already.
    """
    counts: dict[str, Counter[tuple[str, str]]] = {
        input_id.topic: Counter() for input_id in settings.inputs
    }
    for input_id in settings.inputs:
        records, beats = _consumed(reader, input_id, plan)
        counts[input_id.topic]["merged", ""] += records
        counts[input_id.topic]["heartbeat", ""] += beats
        counts[input_id.topic]["late", ""] += 0
        counts[input_id.topic]["excess", ""] += 0
        if settings.has_ids:
            counts[input_id.topic]["duplicate", ""] += 0
        if tables.has_corrections(settings):
            counts[input_id.topic]["corrected", ""] += 0
            counts[input_id.topic]["not_corrected", TOO_MANY] += 0
            counts[input_id.topic]["not_corrected", EXCESS] += 0
            if settings.has_ids:
                counts[input_id.topic]["duplicate", "late"] += 0
    by = ["topic", "status", "is_late", "version", "invalid_reason"]
    where: Where = [[("batch", "=", plan.batch), ("status", "in", list(_OF_RECORDS))]]
    for row in reader.summary(tables.SILVER, by, {"rows": ("count", "*")}, where).to_pylist():
        outcome = _OF_RECORDS[row["status"]], ""
        if row["is_late"]:
            outcome = "duplicate", "late"
        elif row["version"] == 0:
            outcome = "not_corrected", row["invalid_reason"]
        counts[row["topic"]][outcome] += row["rows"]
    for topic, rows in _not_merged(reader, plan):
        counts[topic]["merged", ""] -= rows
    return {topic: dict(topic_counts) for topic, topic_counts in counts.items()}


_OF_RECORDS: Final = {
    "late": "late",
    "duplicate": "duplicate",
    "excess": "excess",
    "passed": "recovered",
    "correction": "corrected",
}
"""The outcome that a row of silver is counted as, by its status."""


def _not_merged(reader: TableReader, plan: BatchPlan) -> Iterator[tuple[str, int]]:
    """Yield the topics of a batch, and how many of the records that it has consumed are no parts.

    Late duplicates are late, and were counted before.
    """
    kinds: list[list[Condition]] = [
        [("status", "in", ["late", "excess", "passed"])],
        [("status", "=", "duplicate"), ("is_late", "=", False)],
    ]
    consumed = [(tp, done.from_offset) for tp, done in plan.ranges.items() if not done.is_empty]
    for portion in in_portions(consumed):
        where: Where = [
            [("batch", "=", plan.batch), *kind, *term]
            for tp, since in portion
            for term in of_input(
                tp.input, [[("partition", "=", tp.partition), ("offset", ">=", since)]]
            )
            for kind in kinds
        ]
        rows = reader.summary(tables.SILVER, ["topic"], {"rows": ("count", "*")}, where)
        yield from row_values(rows, "topic", "rows")


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
        counts.update(dict(row_values(rows, "heartbeat", "rows")))
    return counts[False], counts[True]
