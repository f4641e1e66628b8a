"""Bronze and a deliberate jump on a real broker: every record once, wherever a run was cut off."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from pyarrow import parquet

from tests.laws.conftest import QUICK, MakeLake, in_folders, in_folders_of_both
from tests.support.cases import (
    BAD_VALUES,
    SOURCES,
    Case,
    expected_late,
    expected_quarantine,
    expected_silver,
    heartbeat,
    keyed,
    random_case,
)
from tests.support.crashes import CrashError, dying_at
from tests.support.lakes import CaseLake, OpenSpark, folder_of
from tests.support.topics import (
    create_topics,
    delete_records,
    delete_topic,
    produce,
    produce_transaction,
)
from watersmeet.bronze import Bronze
from watersmeet.engine import KafkaInput
from watersmeet.errors import DataLossError, QuarantineLimitError, TopicChangedError
from watersmeet.kafka.cluster import Cluster
from watersmeet.lake import tables
from watersmeet.lake.commits import last_decision
from watersmeet.lake.identity import keep_identity
from watersmeet.running.bronze_table import BronzeTable, kafka_input
from watersmeet.running.generations import Jump, begin_first, targets_of
from watersmeet.running.next_offsets import NextOffsets, read_facts
from watersmeet.running.owner import Owner
from watersmeet.settings import Settings

PARTITIONS = 3


def begin(
    new_lake: MakeLake, kafka: str, name: str, cases: Mapping[int, Case], **overrides: object
) -> CaseLake:
    """New topics, which hold everything of the cases, and a lake that has read nothing of them."""
    topics = {source: f"laws-{name}-{source}" for source in SOURCES}
    create_topics(kafka, *topics.values(), partitions=len(cases))
    for source in SOURCES:
        produce(
            kafka,
            topics[source],
            [(p, value) for p, case in cases.items() for value in case.values[source]],
        )
    named = {f"sources__{source}__topic": topic for source, topic in topics.items()}
    return new_lake(cases, bootstrap=kafka, kafka__max_offsets_per_batch=40, **named, **overrides)


def read(owner: Owner, lake: CaseLake, source: str) -> None:
    """A run reads one source up to what is there; raises what ended it."""
    next_offsets = NextOffsets(owner.engine.reader, lake.settings, lake.partitions, owner)
    bronze = Bronze(owner, lake.settings, lake.input_of(source), next_offsets)
    topic = lake.settings.inputs_by_name[source].topic
    ends = Cluster(lake.settings.kafka).ends(topic, lake.partitions)
    while bronze.take(ends):
        pass


def in_batches_of(settings: Settings, offsets: int) -> Settings:
    """The same configuration, with so many offsets in a batch."""
    kafka = settings.kafka.model_copy(update={"max_offsets_per_batch": offsets})
    return settings.model_copy(update={"kafka": kafka})


@pytest.fixture
def spark_jobs(kind: str, open_spark: OpenSpark) -> Iterator[Callable[[], int]]:
    """Tells how many jobs Spark has been given by the test so far."""
    if not kind.startswith("spark"):
        yield lambda: 0
        return
    context, group = open_spark().sparkContext, "jobs of a law"
    context.setJobGroup(group, "")
    yield lambda: len(context.statusTracker().getJobIdsForGroup(group))
    context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]


def is_refused_in_part(case: Case) -> bool:
    """Whether records are refused in each source, and of tracking in each half."""
    tracking, orders = case.values["tracking"], case.values["orders"]
    halves = [tracking[: len(tracking) // 2], tracking[len(tracking) // 2 :], orders]
    return all(any(value in BAD_VALUES for value in mine) for mine in halves)


def records(lake: CaseLake, source: str) -> list[tuple[object, ...]]:
    found = lake.reader.select(tables.bronze(source), ["partition", "offset", "value"])
    return sorted((tuple(row.values()) for row in found.to_pylist()), key=repr)


def expected(cases: Mapping[int, Case], source: str) -> list[tuple[object, ...]]:
    rows = [
        (p, offset, value)
        for p, case in cases.items()
        for offset, value in enumerate(case.values[source])
    ]
    return sorted(rows, key=repr)


def test_every_record_is_read_once_and_a_reset_reads_what_was_passed_over(
    new_lake: MakeLake, kafka: str, kind: str
) -> None:
    cases = dict(
        enumerate(
            islice(filter(is_refused_in_part, map(random_case, range(4100, 10**6))), PARTITIONS)
        )
    )
    begins = {p: len(case.values["tracking"]) // 2 for p, case in cases.items()}
    lake = begin(
        new_lake, kafka, f"bronze-{kind}", cases, kafka__start={"offsets": {"tracking": begins}}
    )
    begin_first(lake.owner(), lake.settings, PARTITIONS)
    with pytest.raises(CrashError):
        read(
            lake.owner(dying_at(lake.engine, "append", tables.bronze("tracking"))), lake, "tracking"
        )
    assert records(lake, "tracking") == []
    for source in SOURCES:
        read(lake.owner(), lake, source)
        read(lake.owner(), lake, source)
    assert records(lake, "orders") == expected(cases, "orders")
    assert records(lake, "tracking") == [
        row
        for row in expected(cases, "tracking")
        if row[1] >= begins[row[0]]  # type: ignore[index, operator]
    ]
    read_of = [
        row
        for row in expected_quarantine(cases)
        if row[1] == "orders" or row[2] >= begins[row[0]]  # type: ignore[index, operator]
    ]
    assert lake.quarantined() == read_of
    assert len(read_of) > 0
    lake.merge(lake.quick)

    def back(owner: Owner) -> Jump:
        targets = targets_of(lake.settings, PARTITIONS, "earliest")
        return Jump(owner, lake.settings, PARTITIONS, "earliest", targets, {})

    assert {
        (jump.tp.input.source, jump.tp.partition, jump.to_offset)
        for jump in back(lake.owner()).jumps
    } == {(source, p, 0) for source in SOURCES for p in cases}
    with pytest.raises(CrashError):
        back(lake.owner(dying_at(lake.engine, "append", tables.JOURNAL))).commit()
    back(lake.owner()).commit()
    for source in SOURCES:
        assert records(lake, source) == expected(cases, source)
    assert lake.quarantined() == expected_quarantine(cases)
    lake.merge(lake.quick)
    assert lake.silver(generation=1) == expected_silver(cases)
    assert lake.late(generation=1) == expected_late(cases)


@in_folders
def test_bronze_says_whose_each_record_is(new_lake: MakeLake, kafka: str, kind: str) -> None:
    values: dict[str, list[bytes | None]] = {
        "tracking": [
            keyed("a", 1, g="x"),
            keyed("a", 2),
            heartbeat(3),
            b'{"type":"heartbeat","ts":4,"g":7}',
            b"{",
        ],
        "orders": [keyed("a", 1, g={"id": "y"}), keyed("b", 2, g={"id": ""}), keyed("b", 3, g="y")],
    }
    tenants = {
        "merge": {"timeout": "100ms", "tenant": "g", "tenant_max_lag": "1s"},
        "sources__orders__tenant": "g.id",
    }
    lake = begin(
        new_lake,
        kafka,
        f"tenants-{kind}",
        {0: Case(values, 100)},
        kafka__quarantine_limit="100%",
        **tenants,
    )
    for source in SOURCES:
        read(lake.owner(), lake, source)
    found = {
        source: [
            (row["tenant"], row["merge_key"], row["heartbeat"], row["reason"])
            for row in lake.reader.select(
                tables.bronze(source), ["offset", "tenant", "merge_key", "heartbeat", "reason"]
            )
            .sort_by("offset")
            .to_pylist()
        ]
        for source in SOURCES
    }
    assert found == {
        "tracking": [
            ("x", "a", False, None),
            (None, None, False, "no_tenant"),
            (None, None, True, None),
            ("7", None, True, None),
            (None, None, False, "undecodable"),
        ],
        "orders": [
            ("y", "a", False, None),
            (None, None, False, "no_tenant"),
            (None, None, False, "no_tenant"),
        ],
    }
    refused = lake.reader.select(
        tables.QUARANTINE,
        ["source", "offset", "reason", "detail"],
        [[("reason", "=", "no_tenant")]],
    )
    assert sorted((row["source"], row["offset"], row["detail"]) for row in refused.to_pylist()) == [
        ("orders", 1, "g.id is an empty string"),
        ("orders", 2, "g.id is missing"),
        ("tracking", 1, "g is missing"),
    ]


@in_folders
def test_where_kafka_has_nothing_new_a_run_over_what_is_there_starts_no_query(
    new_lake: MakeLake, kafka: str, kind: str
) -> None:
    """A query has a checkpoint, so its folder tells."""
    lake = begin(
        new_lake,
        kafka,
        f"no-news-{kind}",
        {0: Case({source: [keyed("a", 5)] for source in SOURCES}, 100)},
    )
    queries = Path(lake.settings.checkpoints)
    for source in SOURCES:
        read(lake.owner(), lake, source)
    shutil.rmtree(queries, ignore_errors=True)
    for source in SOURCES:
        read(lake.owner(), lake, source)
    assert not queries.exists()
    for source in SOURCES:
        produce(kafka, lake.settings.inputs_by_name[source].topic, [(0, keyed("b", 6))])
        read(lake.owner(), lake, source)
        assert [row[1] for row in records(lake, source)] == [0, 1]


@in_folders_of_both
def test_a_batch_is_read_once_and_its_commit_and_its_files_say_what_they_hold(
    new_lake: MakeLake, kafka: str, kind: str, spark_jobs: Callable[[], int]
) -> None:
    """With Spark, its tasks count what they read and write it: one job has done all."""
    good: list[bytes | None] = [keyed("a", time) for time in range(5, 45)]
    values = {"tracking": [*good, b"{", *good[:20], b"{"], "orders": [*good]}
    cases = dict.fromkeys(range(2), Case(values, 100))
    lake = begin(new_lake, kafka, f"counted-{kind}", cases, kafka__quarantine_limit="100%")
    lake.settings = in_batches_of(lake.settings, 5000)
    before = spark_jobs()
    read(lake.owner(), lake, "orders")
    assert spark_jobs() - before == (1 if kind == "spark-folder" else 0)
    read(lake.owner(), lake, "tracking")
    for source, last in (("tracking", 62), ("orders", 40)):
        table = tables.bronze(source)
        found = last_decision(lake.reader, table)
        assert found is not None
        assert found[1].facts == {"ranges": [[0, 0, last], [1, 0, last]]}
        assert records(lake, source) == expected(cases, source)
        folder = Path(folder_of(lake.settings), table)
        files = pa.table(DeltaTable(str(folder)).get_add_actions(flatten=True)).to_pylist()
        assert sum(file["num_records"] for file in files) == 2 * last
        for file in files:
            rows = parquet.read_table(folder / unquote(file["path"]), partitioning=None)
            assert file["num_records"] == rows.num_rows
            assert file["null_count.reason"] == rows["reason"].null_count
            for name in ("partition", "offset", "event_time", "kafka_timestamp"):
                least = pc.min_max(rows[name]).as_py()
                assert (file[f"min.{name}"], file[f"max.{name}"]) == (least["min"], least["max"])
    assert lake.quarantined() == expected_quarantine(cases)


@pytest.mark.promise("C18")
@pytest.mark.fault("hostile")
@in_folders_of_both
def test_too_many_refused_records_stop_the_run_before_any_is_written(
    new_lake: MakeLake, kafka: str, kind: str
) -> None:
    good: list[bytes | None] = [keyed("a", 5)]
    bad: list[bytes | None] = [b"{"]
    values = {"tracking": good * 400 + bad * 700, "orders": good * 600 + bad * 500}
    cases = {0: Case(values, 100)}
    lake = begin(new_lake, kafka, f"limit-{kind}", cases)
    lake.settings = in_batches_of(lake.settings, 5000)
    limited = r"tracking: 700 of 1100 records would go to quarantine, most of them as undecodable"
    with pytest.raises(QuarantineLimitError, match=limited):
        read(lake.owner(), lake, "tracking")
    assert records(lake, "tracking") == []
    read(lake.owner(), lake, "orders")
    assert not [*Path(folder_of(lake.settings), tables.bronze("tracking")).glob("*.parquet")]
    accepting = lake.settings.kafka.model_copy(update={"quarantine_limit": 0.7})
    lake.settings = lake.settings.model_copy(update={"kafka": accepting})
    read(lake.owner(), lake, "tracking")
    assert len(records(lake, "tracking")) == len(records(lake, "orders")) == 1100


@dataclass(frozen=True)
class FailingInput(KafkaInput):
    """One whose partition 1 cannot be decoded, once the other ones are written."""

    kills: bool = False

    def decode(self, batch: pa.RecordBatch) -> pa.Table:
        if batch["partition"][0].as_py() == 1:
            time.sleep(2)
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("fails on purpose")
        return super().decode(batch)


@pytest.mark.promise("N37")
@pytest.mark.fault("outage")
@pytest.mark.long
@pytest.mark.parametrize("kind", ["spark-folder"], indirect=True, scope="module")
@pytest.mark.parametrize("kills", [False, True], ids=["raises", "killed"])
def test_a_batch_that_fails_in_one_range_leaves_no_file_of_the_others(
    new_lake: MakeLake, kafka: str, *, kills: bool
) -> None:
    good: list[bytes | None] = [keyed("a", 5)] * 50
    cases = {p: Case(dict.fromkeys(SOURCES, good), 100) for p in range(PARTITIONS)}
    lake = begin(new_lake, kafka, f"one-range-{kills}", cases)
    read(lake.owner(), lake, "orders")
    orders = lake.input_of("orders")
    whole = kafka_input(lake.settings, orders)
    failing = FailingInput(**vars(whole), kills=kills)
    folder = Path(folder_of(lake.settings), tables.bronze("orders"))
    before = sorted(folder.rglob("*.parquet"))
    summary = BronzeTable(lake.owner(), lake.settings, orders).summary
    with (
        pytest.raises(Exception, match="worker exited" if kills else "fails on purpose"),
        lake.engine.taken(failing, dict.fromkeys(cases, (0, 50)), summary),
    ):
        pass
    assert sorted(folder.rglob("*.parquet")) == before
    assert len(records(lake, "orders")) == 50 * PARTITIONS


@pytest.mark.promise("C70")
@pytest.mark.long
@pytest.mark.parametrize("kind", ["spark-folder"], indirect=True, scope="module")
def test_files_of_tasks_are_made_with_the_umask_of_the_run(
    new_lake: MakeLake, kafka: str, request: pytest.FixtureRequest
) -> None:
    """Executors have one of their own."""
    before = os.umask(0o027)
    request.addfinalizer(lambda: os.umask(before))
    lake = begin(
        new_lake, kafka, "umask", {0: Case({source: [keyed("a", 5)] for source in SOURCES}, 100)}
    )
    read(lake.owner(), lake, "orders")
    folder = Path(folder_of(lake.settings), tables.bronze("orders"))
    assert [oct(file.stat().st_mode & 0o777) for file in folder.glob("*.parquet")] == ["0o640"]


@pytest.mark.promise("C21")
@pytest.mark.fault("retention")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_what_holds_no_record_behind_the_last_row_is_not_lost_when_kafka_deletes_it(
    new_lake: MakeLake, kafka: str, kind: str
) -> None:
    """The marker of a transaction is the last offset that was read, and another partition goes
    on."""
    cases = {p: Case({source: [] for source in SOURCES}, 100) for p in (0, 1)}
    lake = begin(new_lake, kafka, f"marker-{kind}", cases)
    topic = lake.settings.inputs_by_name["tracking"].topic
    produce_transaction(kafka, topic, [b"{", b"{"], 0, commit=True)
    read(lake.owner(), lake, "tracking")
    produce(kafka, topic, [(1, b"{")])
    read(lake.owner(), lake, "tracking")
    delete_records(kafka, topic, 0, 3)
    read(lake.owner(), lake, "tracking")
    produce(kafka, topic, [(0, b"{")])
    read(lake.owner(), lake, "tracking")
    assert [row[:2] for row in records(lake, "tracking")] == [(0, 0), (0, 1), (0, 3), (1, 0)]
    produce(kafka, topic, [(0, b"{")])
    delete_records(kafka, topic, 0, 5)
    with pytest.raises(DataLossError, match="from 4 to 4"):
        read(lake.owner(), lake, "tracking")


@pytest.mark.promise("C4")
@pytest.mark.fault("topics")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_nothing_is_read_of_a_topic_that_was_made_again_under_way(
    new_lake: MakeLake, kafka: str, kind: str
) -> None:
    """It has more records than were read: its offsets go on as if it were the one before."""
    good: list[bytes | None] = [keyed("a", time) for time in range(5)]
    lake = begin(new_lake, kafka, f"again-{kind}", {0: Case(dict.fromkeys(SOURCES, good), 100)})
    facts, _ = read_facts(lake.reader, lake.settings, 1)
    keep_identity(lake.reader, lake.engine.append, facts)
    owner, topic = lake.owner(), lake.settings.inputs_by_name["tracking"].topic
    next_offsets = NextOffsets(owner.engine.reader, lake.settings, 1, owner)
    bronze = Bronze(owner, lake.settings, lake.input_of("tracking"), next_offsets)
    assert bronze.take({0: 5})
    delete_topic(kafka, topic)
    create_topics(kafka, topic, partitions=1)
    produce(kafka, topic, [(0, keyed("b", time)) for time in range(9)])
    with pytest.raises(TopicChangedError, match=f"{topic} was deleted and made again while it was"):
        bronze.take({0: 9})
    assert records(lake, "tracking") == expected(lake.cases, "tracking")
