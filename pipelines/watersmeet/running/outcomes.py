"""Counts the outcomes of a batch's records, from the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from watersmeet.core.columns import row_values
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import BatchPlan
from watersmeet.core.sequence import EXCESS, TOO_MANY
from watersmeet.expressions.publish import Expressions
from watersmeet.lake import tables
from watersmeet.lake.inputs import by_input, of_input, of_topic
from watersmeet.lake.table_reader import (
    Aggregates,
    Condition,
    TableReader,
    Where,
    row_count,
    within,
)
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
    # The table says so, wherever the batch was judged.
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
    outcomes = [("merged", ""), ("heartbeat", ""), ("late", ""), ("excess", "")]
    outcomes += [("duplicate", "")] if settings.has_ids else []
    if tables.has_corrections(settings):
        outcomes += [("corrected", ""), ("not_corrected", TOO_MANY), ("not_corrected", EXCESS)]
        outcomes += [("duplicate", "late")] if settings.has_ids else []
    counts = {topic: Counter(dict.fromkeys(outcomes, 0)) for topic in settings.topics}
    by = ["topic", "status", "is_late", "version", "invalid_reason"]
    where: Where = [[("batch", "=", plan.batch), ("status", "in", list(_OF_RECORDS))]]
    for row in reader.summary(tables.SILVER, by, {"rows": ("count", "*")}, where).to_pylist():
        outcome = _OF_RECORDS[row["status"]], ""
        if row["is_late"]:
            outcome = "duplicate", "late"
        elif row["version"] == 0:
            outcome = "not_corrected", row["invalid_reason"]
        counts[row["topic"]][outcome] += row["rows"]
    for input_id, ranges in by_input(plan.offsets()).items():
        here = counts[input_id.topic]
        here.update(_consumed(reader, input_id, within(ranges)))
        here["merged", ""] -= _not_merged(reader, input_id, within(ranges), plan.batch)
    return {topic: dict(topic_counts) for topic, topic_counts in counts.items()}


_OF_RECORDS: Final = {
    "late": "late",
    "duplicate": "duplicate",
    "excess": "excess",
    "passed": "recovered",
    "correction": "corrected",
}
"""The outcome that a row of silver is counted as, by its status."""


def _consumed(reader: TableReader, input_id: InputId, where: Where) -> Counts:
    """Return how many records with a time are at some offsets: those with a key, and heartbeats."""
    timed = [[*term, ("event_time", "is not null", None)] for term in of_topic(input_id, where)]
    count: Aggregates = {"rows": ("count", "*")}
    rows = reader.summary(tables.bronze(input_id.source), ["heartbeat"], count, timed)
    return {
        ("heartbeat" if is_beat else "merged", ""): records
        for is_beat, records in row_values(rows, "heartbeat", "rows")
    }


def _not_merged(reader: TableReader, input_id: InputId, where: Where, batch: int) -> int:
    """Return how many of the records at some offsets are no parts, as a batch has found.

    Late duplicates are late, and were counted before.
    """
    kinds: list[list[Condition]] = [
        [("status", "in", ["late", "excess", "passed"])],
        [("status", "=", "duplicate"), ("is_late", "=", False)],
    ]
    rows = [
        [("batch", "=", batch), *kind, *term]
        for term in of_input(input_id, where)
        for kind in kinds
    ]
    return row_count(reader, tables.SILVER, rows)
