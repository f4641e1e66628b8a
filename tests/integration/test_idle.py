"""The idle policy in the real silver: its decisions are data, and the merge model with the same data gives the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from rich.console import Console

from pipelines import tables
from pipelines.audit.show import status_view, waited_for
from pipelines.audit.status import status
from pipelines.batch_input import BatchInput
from pipelines.core.idle import Decision
from pipelines.core.plan import TopicPartition
from pipelines.silence import Silence
from pipelines.silver import Silver
from tests.support.cases import Case, expected_late, expected_silver, heartbeat, keyed, random_case
from tests.support.lakes import CaseLake, late_of, settings_for
from tests.support.rivers import River


class Clock:
    """Wall time in the hands of the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Quiet(Silence):
    """Kafka, as far as this lake's bronze was filled: nothing beyond."""

    is_behind = False

    def has_nothing_beyond(self, after: Mapping[TopicPartition, int]) -> bool:
        return not self.is_behind and bool(after)


def decisions_of(lake: CaseLake) -> dict[tuple[str, int], list[Decision]]:
    time = F.unix_millis("event_time").alias("time")
    found: dict[tuple[str, int], list[Decision]] = {}
    for row in lake.lake.read(tables.IDLE_HEARTBEATS).select("source", "partition", "after_offset", time).collect():
        found.setdefault((row.source, row.partition), []).append(Decision(row.after_offset, row.time))
    return found


def with_decisions(lake: CaseLake) -> dict[int, Case]:
    for (source, partition), decisions in decisions_of(lake).items():
        lake.cases[partition].decisions[source] = decisions
    return dict(lake.cases)


def test_random_silences_give_what_the_model_gives(spark: SparkSession, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, merge__idle_after="10s")
    lake = CaseLake(spark, settings, {p: random_case(5000 + p) for p in range(16)})
    clock = Clock()
    silver = Silver(lake.lake, settings, lake.partitions, Quiet(settings, 10_000, now=clock))
    for share in (0.5, 1.0):
        lake.arrive(share)
        list(silver.drain())
        clock.now += 11
        list(silver.drain())
    cases = with_decisions(lake)
    assert sum(len(case.decisions) for case in cases.values()) > 8
    assert lake.silver() == expected_silver(cases)
    assert late_of(lake.lake) == expected_late(cases)
    again = Silver(lake.lake, settings, lake.partitions)
    assert list(again.drain()) == [], "a restart finds nothing to do"
    rebuilt = CaseLake(spark, settings_for(tmp_path / "rebuilt"), lake.cases)
    rebuilt.arrive()
    lake.lake.read(tables.IDLE_HEARTBEATS).write.format("delta").mode("append").save(f"{rebuilt.settings.lake}/idle_heartbeats")
    rebuilt.merge()
    assert rebuilt.silver() == lake.silver(), "the same decisions from the same data"


def one_partition(spark: SparkSession, folder: Path, **values: list[bytes | None]) -> tuple[CaseLake, Silver, Quiet, Clock]:
    settings = settings_for(folder, merge__idle_after="10s")
    case = Case({s: values.get(s, []) for s in settings.sources}, 100, [s for s, mine in values.items() for _ in mine])
    lake, clock = CaseLake(spark, settings, {0: case}), Clock()
    quiet = Quiet(settings, 10_000, now=clock)
    return lake, Silver(lake.lake, settings, 1, quiet), quiet, clock


def test_a_silent_source_is_spoken_for_shown_as_idle_and_wakes_up(spark: SparkSession, tmp_path: Path) -> None:
    lake, silver, quiet, clock = one_partition(
        spark, tmp_path, orders=[keyed("a", 10)], tracking=[keyed("a", 20), heartbeat(500)]
    )
    lake.arrive()
    list(silver.drain())
    [before] = status(lake.lake, lake.settings)["partitions"]
    assert (before["clock"], waited_for(before)) == (10, ["orders"]), "a stuck clock names who is to blame"
    assert before["sources"]["tracking"]["state"] == "held"
    console = Console(width=120, file=StringIO(), record=True)
    console.print(status_view({"partitions": [before]}))
    assert "waits for orders[0]" in console.export_text()
    clock.now = 9.9
    list(silver.drain())
    assert decisions_of(lake) == {}, "not silent for long enough"
    clock.now, quiet.is_behind = 10.0, True
    list(silver.drain())
    assert decisions_of(lake) == {}, "bronze is behind Kafka: the source is not silent"
    quiet.is_behind = False
    list(silver.drain())
    assert decisions_of(lake) == {("orders", 0): [Decision(0, 500)]}, "never the one that is ahead"
    [after] = status(lake.lake, lake.settings)["partitions"]
    assert (after["clock"], waited_for(after), after["timed_out"]) == (500, [], 1)
    assert after["sources"]["orders"]["state"] == "idle"

    lake.cases[0].values["orders"] += [keyed("b", 420), keyed("c", 390)]
    lake.cases[0].arrivals += ["orders"] * 2
    lake.arrive()
    list(silver.drain())
    assert [row[1] for row in lake.silver()] == ["a", "b"]
    assert [row[3] for row in late_of(lake.lake)] == ["c"], "its position is that of the decision"
    [awake] = status(lake.lake, lake.settings)["partitions"]
    assert awake["sources"]["orders"]["state"] == "active"
    assert lake.silver() == expected_silver(with_decisions(lake))


def test_a_batch_cut_short_is_completed_with_the_decisions_it_was_planned_with(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, silver, _, clock = one_partition(spark, tmp_path, orders=[keyed("a", 10)], tracking=[keyed("a", 20), heartbeat(500)])
    lake.arrive()
    list(silver.drain())
    clock.now = 10
    assert silver._speak_for_the_silent()
    lake.cases[0].values["orders"] += [keyed("b", 420), keyed("c", 390)]
    lake.cases[0].arrivals += ["orders"] * 2
    lake.arrive()

    def crash(batch: BatchInput) -> None:
        raise RuntimeError(f"crash in batch {batch.plan.batch}")

    for step in ("_write_late", "_merge"):
        cut_short = Silver(lake.lake, lake.settings, 1)
        monkeypatch.setattr(cut_short, step, crash)
        with pytest.raises(RuntimeError, match="crash"):
            list(cut_short.drain())
    lake.merge()
    cases = with_decisions(lake)
    assert [row[3] for row in late_of(lake.lake)] == ["c"]
    assert late_of(lake.lake) == expected_late(cases)
    assert lake.silver() == expected_silver(cases)


@pytest.mark.parametrize("silent", ["both", "neither"])
def test_nobody_is_idle_where_nobody_is_waited_for(spark: SparkSession, tmp_path: Path, silent: str) -> None:
    lake, silver, _, clock = one_partition(spark, tmp_path, orders=[heartbeat(50)], tracking=[heartbeat(50)])
    lake.arrive()
    list(silver.drain())
    clock.now = 11 if silent == "both" else 1
    list(silver.drain())
    assert decisions_of(lake) == {}


def test_a_run_over_what_is_there_never_decides(
    root_session: SparkSession, spark: SparkSession, kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "never-idle", partitions=1, merge__idle_after="1ms")
    river.flow("tracking")
    river.finish()
    river.finish()
    rows = spark.read.format("delta").load(f"{river.settings.lake}/idle_heartbeats")
    assert rows.isEmpty()
