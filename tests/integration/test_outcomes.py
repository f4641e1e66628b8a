"""Each outcome's counter equals the rows or records that it names, in every mode."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import SOURCES
from tests.support.effort import first_then_nightly
from tests.support.rivers import River
from tests.support.tenant_rivers import TenantRiver
from tests.support.topics import consume
from watersmeet.lake import tables
from watersmeet.monitoring.events import Event, RecordsProcessed
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import LAYERS, Run

pytestmark = pytest.mark.long

Counted = Counter[tuple[str, str, str, str]]
LETTERS = {
    "publish__late_topic": "outcomes-late",
    "publish__quarantine_topic": "outcomes-quarantine",
}
HEARTBEATS_ALONE = {"field": "type", "equals": "heartbeat"}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"merge": {"window": {"gap": "100ms", "max": "250ms"}}},
    "letters": LETTERS,
    "skipping": {f"sources__{source}__tombstone": "skip" for source in SOURCES},
    "batches": {
        "merge__max_records_per_batch": 60,
        "kafka__max_offsets_per_batch": 40,
        "publish__delivery": "at_least_once",
    },
    "topics": {"inputs": ("tracking/outcomes-a", "tracking/outcomes-b", "orders")},
}


def run(river: River, counted: Counted) -> None:
    """An undisturbed run, whose outcomes are counted."""

    def count(event: Event) -> None:
        if isinstance(event, RecordsProcessed):
            for topic, counts in event.topics.items():
                counted.update(
                    {(event.layer, topic, *outcome): records for outcome, records in counts.items()}
                )

    Run(river.settings, LAYERS, Reporter(), observers=[count]).once()


def of_tables(river: River) -> Counted:
    """What the tables and the topics have."""
    settings, reader, counts = river.settings, river.reader, Counted()
    for source in settings.sources:
        columns = ["topic", "partition", "offset", "heartbeat", "event_time", "reason"]
        passed = passed_offsets(river, source)
        for row in reader.select(tables.bronze(source), columns).to_pylist():
            topic = row["topic"]
            if row["reason"] is not None:
                counts["bronze", topic, "quarantined", row["reason"]] += 1
            elif row["event_time"] is None:
                counts["bronze", topic, "skipped", ""] += 1
            else:
                counts["bronze", topic, "heartbeat" if row["heartbeat"] else "accepted", ""] += 1
                is_passed = row["offset"] < passed.get((topic, row["partition"]), 0)
                counts["silver", topic, "heartbeat", ""] += row["heartbeat"] and is_passed
        in_merge = [[("status", "in", ["open", "waiting", "timed_out"])]]
        for parts in reader.select(tables.SILVER, [source], in_merge)[source].to_pylist():
            for part in parts:
                counts[
                    "silver", part.get("topic", settings.sources[source].topics[0]), "merged", ""
                ] += 1
    for topic in reader.select(tables.LATE, ["topic"])["topic"].to_pylist():
        counts["silver", topic, "late", ""] += 1
    for topic in (river.sink, *settings.publish.dead_letter_topics.values()):
        counts["gold", topic, "published", ""] += len(consume(river.kafka, topic, river.partitions))
    quarantine = reader.select(tables.QUARANTINE, ["topic", "reason"]).to_pylist()
    assert Counter((row["topic"], row["reason"]) for row in quarantine) == Counter(
        {
            (topic, reason): n
            for (_, topic, outcome, reason), n in counts.items()
            if outcome == "quarantined"
        }
    )
    return +counts


def passed_offsets(river: River, source: str) -> dict[tuple[str, int], int]:
    """By topic and partition, up to which offset silver has passed it."""
    rows = river.reader.select(
        tables.PROGRESS, ["topic", "partition", "until_offset"], [[("source", "=", source)]]
    )
    passed: dict[tuple[str, int], int] = {}
    for row in rows.to_pylist():
        place = row["topic"], row["partition"]
        passed[place] = max(row["until_offset"], passed.get(place, 0))
    return passed


@pytest.mark.parametrize("mode", first_then_nightly(MODES))
def test_every_outcome_is_counted_as_the_tables_have_it(
    kafka: str, tmp_path: Path, mode: str
) -> None:
    river, counted = River.make(kafka, tmp_path, f"outcomes-{mode}", **MODES[mode]), Counted()
    for _ in range(3):
        river.flow(records=30)
        run(river, counted)
        assert +counted == of_tables(river)
    outcomes = {outcome for _, _, outcome, _ in counted}
    assert outcomes >= {"accepted", "heartbeat", "quarantined", "merged", "late", "published"}


@pytest.mark.nightly
def test_where_tenants_have_clocks_every_outcome_is_counted_as_the_tables_have_it(
    kafka: str, tmp_path: Path
) -> None:
    tenants, counted = TenantRiver(kafka, tmp_path, "outcomes-tenants", partitions=3), Counted()
    for share in (0.3, 0.7, 1):
        tenants.arrive(share)
        run(tenants.river, counted)
        assert +counted == of_tables(tenants.river)


def test_after_a_lake_was_lost_records_that_are_out_are_counted_as_such(
    kafka: str, tmp_path: Path
) -> None:
    river, before = River.make(kafka, tmp_path, "outcomes-lost"), Counted()
    for _ in range(3):
        river.flow(records=30)
        run(river, before)
    shutil.rmtree(tmp_path / "lake")
    river.config["kafka"]["start"] = "sink"
    river.write()
    river.flow(records=30)
    counted = Counted()
    run(river, counted)
    passed = [
        n
        for (layer, _, outcome, _), n in counted.items()
        if layer == "silver" and outcome == "recovered"
    ]
    assert sum(passed) > 0
    expected = of_tables(river)
    published = before["gold", river.sink, "published", ""]
    expected["gold", river.sink, "published", ""] -= published
    assert +Counter({key: n for key, n in counted.items() if key[2] != "recovered"}) == +expected


def test_an_old_heartbeat_is_no_late_record(kafka: str, tmp_path: Path) -> None:
    river, counted = River.make(kafka, tmp_path, "outcomes-beats"), Counted()
    river.flow(records=10)
    for source in SOURCES:
        for p in range(river.partitions):
            river.send(source, p, b'{"type": "heartbeat", "ts": 1}')
    river.flow(records=10)
    run(river, counted)
    assert +counted == of_tables(river)
