"""Where reading begins is decided once and kept in the tables; what Kafka has lost stops a run, or
is kept as a gap."""

from __future__ import annotations

import itertools
import tracemalloc
import zlib
from dataclasses import dataclass
from typing import Any

import pytest

from tests.laws.conftest import MakeLake, MakeSettings, in_folders
from tests.laws.test_gold import extended
from tests.support.cases import (
    SOURCES,
    Case,
    cases_with_ids,
    expected_messages,
    keyed,
    rich_cases,
)
from tests.support.configurations import IDS
from tests.support.inputs import tp_of
from tests.support.lakes import (
    CaseLake,
    OpenSpark,
    engine_for,
    fill_bronze,
    quickly,
)
from tests.support.topics import (
    CheckedProducer,
    add_partitions,
    create_topics,
    delete_records,
    delete_topic,
    produce,
)
from watersmeet.core.idle import IdleDecision
from watersmeet.core.silver import in_silver
from watersmeet.engine import Engine
from watersmeet.engine.choice import open_engine
from watersmeet.errors import ConfigurationError, DataLossError, ForeignMessageError
from watersmeet.lake import tables
from watersmeet.lake.progress import decision_rows
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import Run, create_missing
from watersmeet.running.bronze_table import BronzeTable
from watersmeet.running.generations import begin_first, preview
from watersmeet.running.next_offsets import NextOffsets
from watersmeet.running.owner import Owner
from watersmeet.settings import KafkaSettings, Settings

PARTITIONS = 2
NUMBERS = itertools.count()
IN_2001_MS = 978_307_200_000


@dataclass
class Begun:
    """A lake without its bronze, and topics with ten records in each partition, whose Kafka
    timestamps are 1 s, 2 s, ... of 2001."""

    engine: Engine
    settings: Settings

    def told(self, start: Any = None, **kafka: Any) -> Settings:
        """The configuration with another `start`."""
        told = {
            **self.settings.kafka.model_dump(),
            **({} if start is None else {"start": start}),
            **kafka,
        }
        return self.settings.model_copy(update={"kafka": KafkaSettings.model_validate(told)})

    def begin(self, start: Any = None) -> None:
        """What the first start does, or another one."""
        begin_first(Owner(self.engine, token=1), self.told(start), PARTITIONS)

    def reading(self, **kafka: Any) -> NextOffsets:
        return NextOffsets(
            self.engine.reader, self.told(**kafka), PARTITIONS, Owner(self.engine, token=1)
        )

    def generations(self) -> list[tuple[Any, ...]]:
        columns = ["generation", "source", "partition", "start_offset", "kind", "reason"]
        return sorted(
            tuple(row.values())
            for row in self.engine.reader.select(tables.GENERATIONS, columns).to_pylist()
        )

    def resets(self) -> list[tuple[Any, ...]]:
        columns = ["source", "partition", "from_offset", "to_offset", "reason"]
        return sorted(
            tuple(row.values())
            for row in self.engine.reader.select(tables.RESETS, columns).to_pylist()
        )


@pytest.fixture
def begun(new_settings: MakeSettings, open_spark: OpenSpark, kafka: str, kind: str) -> Begun:
    name = f"begin-{kind}-{next(NUMBERS)}"
    topics = {source: f"{name}-{source}" for source in SOURCES}
    create_topics(kafka, *topics.values(), partitions=PARTITIONS)
    producer = CheckedProducer(kafka)
    for topic in topics.values():
        for n in range(10):
            for p in range(PARTITIONS):
                producer.produce(
                    topic, keyed("a", n), partition=p, timestamp=IN_2001_MS + 1000 * (n + 1)
                )
    producer.flush()
    settings = new_settings(
        bootstrap=kafka, **{f"sources__{source}__topic": topic for source, topic in topics.items()}
    )
    engine = engine_for(open_spark, settings)
    wanted = [
        *map(tables.bronze, SOURCES),
        tables.JOURNAL,
        tables.SILVER,
    ]
    for name in wanted:
        engine.create(engine.lake.layout[name])
    return Begun(engine, settings)


STARTS: dict[str, tuple[Any, dict[int, int], dict[int, int]]] = {
    "earliest": ("earliest", {0: 0, 1: 0}, {0: 0, 1: 0}),
    "latest": ("latest", {0: 10, 1: 10}, {0: 10, 1: 10}),
    "timestamp": ({"timestamp": "2001-01-01T00:00:03.500Z"}, {0: 3, 1: 3}, {0: 3, 1: 3}),
    "offsets": ({"offsets": {"tracking": {0: 7, 1: 10}}}, {0: 7, 1: 10}, {0: 0, 1: 0}),
}
"""What `kafka.start` says, and where that is in each source."""


def test_a_beginning_is_decided_once_and_shown_before(begun: Begun) -> None:
    for start, *_ in STARTS.values():
        preview(begun.engine.reader, begun.told(start), PARTITIONS)
    assert begun.generations() == [], "who looks decides nothing"
    start, *offsets = STARTS["offsets"]
    shown = preview(begun.engine.reader, begun.told(start), PARTITIONS)
    assert {
        (row["source"], row["partition"]): (row["from_offset"], row["until_offset"])
        for row in shown
    } == {
        (source, p): (mine[p], 10)
        for source, mine in zip(SOURCES, offsets, strict=True)
        for p in mine
    }
    begun.begin(start)
    decided = begun.generations()
    for other, *_rest in STARTS.values():  # a restart decides nothing anew, whatever it is told
        begun.begin(other)
    assert begun.generations() == decided
    assert [row[:5] for row in decided] == sorted(
        (0, source, p, at, "start")
        for source, mine in zip(SOURCES, offsets, strict=True)
        for p, at in mine.items()
    )
    assert begun.resets() == []
    assert {
        source: begun.reading().of(begun.settings.inputs_by_name[source]) for source in SOURCES
    } == dict(zip(SOURCES, offsets, strict=True))


@pytest.mark.promise("B1")
@in_folders
@pytest.mark.parametrize("start", ["latest", "timestamp"])
def test_reading_begins_where_it_is_told_and_goes_on_after_what_was_read(
    begun: Begun, start: str
) -> None:
    told, *offsets = STARTS[start]
    begun.begin(told)
    found = {
        source: begun.reading().of(begun.settings.inputs_by_name[source]) for source in SOURCES
    }
    assert found == dict(zip(SOURCES, offsets, strict=True))
    first = offsets[0][0]
    bronze = BronzeTable(
        Owner(open_engine(quickly(begun.settings)), token=1),
        begun.settings,
        begun.settings.inputs_by_name["tracking"],
    )
    fill_bronze(bronze, {(0, first): keyed("a", 1), (0, first + 1): keyed("a", 2)})
    assert begun.reading().of(begun.settings.inputs_by_name["tracking"]) == {0: first + 2, 1: first}


@in_folders
def test_an_offset_that_does_not_exist_is_no_beginning(begun: Begun) -> None:
    with pytest.raises(
        ConfigurationError, match=r"-tracking\[0\] ends at offset 10, and 11 is beyond"
    ):
        begun.begin({"offsets": {"tracking": {0: 11}}})
    with pytest.raises(
        ConfigurationError, match=r"-tracking has no partition 2; name partitions from 0 to 1"
    ):
        begun.begin({"offsets": {"tracking": {2: 1}}})
    assert begun.resets() == []


@pytest.mark.promise("B2")
@pytest.mark.fault("retention")
def test_offsets_that_kafka_has_deleted_stop_a_run_or_are_kept_as_a_gap(
    begun: Begun, kafka: str
) -> None:
    begun.begin()
    topic = begun.settings.inputs_by_name["tracking"].topic
    bronze = BronzeTable(
        Owner(open_engine(quickly(begun.settings)), token=1),
        begun.settings,
        begun.settings.inputs_by_name["tracking"],
    )
    fill_bronze(bronze, {(0, offset): keyed("a", offset) for offset in range(4)})
    delete_records(kafka, topic, 0, 6)
    delete_records(kafka, topic, 1, 2)
    with pytest.raises(
        DataLossError,
        match=rf"offsets of tracking that were not read yet: {topic}\[0\] from 4 to 5, "
        rf"{topic}\[1\] from 0 to 1;",
    ) as raised:
        begun.reading().checked(begun.settings.inputs_by_name["tracking"])
    assert raised.value.missing == {0: (4, 6), 1: (0, 2)}
    assert begun.resets() == []
    begun.settings = begun.settings.model_copy(
        update={"kafka": begun.settings.kafka.model_copy(update={"on_data_loss": "continue"})}
    )
    for _ in range(2):
        assert begun.reading().checked(begun.settings.inputs_by_name["tracking"]) == {0: 6, 1: 2}
    gaps = [(0, 4, 6), (1, 0, 2)]
    assert begun.resets() == [("tracking", *gap, "on_data_loss: continue") for gap in gaps]


@in_folders
def test_a_topic_that_ends_before_what_was_read_is_another_one(begun: Begun) -> None:
    begun.begin()
    bronze = BronzeTable(
        Owner(open_engine(quickly(begun.settings)), token=1),
        begun.settings,
        begun.settings.inputs_by_name["tracking"],
    )
    fill_bronze(bronze, {(0, 17): keyed("a", 1)})
    with pytest.raises(
        ConfigurationError, match=r"-tracking\[0\] ends at offset 10, and 18 is to be read next"
    ):
        begun.reading().checked(begun.settings.inputs_by_name["tracking"])


@pytest.mark.promise("C4", "C5")
@pytest.mark.fault("topics", "rules")
def test_a_run_refuses_what_the_lake_was_not_begun_with(begun: Begun, kafka: str) -> None:
    """Through a whole run, which also never lets the idle policy speak where it ends by itself."""
    silent = begun.settings.merge.model_copy(update={"idle_after_ms": 1})
    settings = begun.settings.model_copy(update={"merge": silent})
    topic = settings.inputs_by_name["tracking"].topic
    create_missing(begun.engine)
    Run(quickly(settings), ["bronze", "silver"], Reporter()).once()
    assert begun.engine.reader.select(tables.IDLE_HEARTBEATS, ["source"]).num_rows == 0
    longer = settings.model_copy(
        update={"merge": settings.merge.model_copy(update={"timeout_ms": 400})}
    )
    with pytest.raises(
        ConfigurationError,
        match=r"merge\.timeout: the lake has other rules than this configuration",
    ):
        Run(longer, ["bronze"], Reporter()).once()
    delete_topic(kafka, topic)
    create_topics(kafka, topic, partitions=PARTITIONS)
    with pytest.raises(
        ConfigurationError, match=rf"{topic} was deleted and made again since the lake was begun"
    ):
        Run(settings, ["bronze"], Reporter()).once()
    for each in settings.topics:
        add_partitions(kafka, each, PARTITIONS + 1)
    with pytest.raises(
        ConfigurationError, match="the topics have 3 partitions, and had 2 when the lake was begun"
    ):
        Run(settings, ["bronze"], Reporter()).once()


# -- a lost lake


def taken_up(new_lake: MakeLake, lake: CaseLake) -> CaseLake:
    """A new lake that begins at the sink of another, with the same topics; it reads what Kafka has
    from there on."""
    settings = lake.settings
    begun = new_lake(
        lake.cases,
        bootstrap=settings.kafka.bootstrap_servers,
        name=settings.name,
        publish__topic=settings.publish.topic,
        kafka__start="sink",
        **(IDS if settings.has_ids else {}),
        **{f"sources__{name}__topic": source.topic for name, source in settings.sources.items()},
    )
    begin_first(begun.owner(), begun.settings, begun.partitions)
    return begun


@pytest.mark.promise("B3")
@pytest.mark.fault("lost")
def test_a_lost_lake_is_taken_up_from_the_sink(new_lake: MakeLake, kafka: str, kind: str) -> None:
    name, cases = f"lost-{kind}", cases_with_ids(rich_cases(4, 5200))
    cases[0] = Case(
        {"tracking": [keyed(f"t{n}", 50 * n) for n in range(60)], "orders": [keyed("o", 700)]}, 100
    )
    cases[0].arrivals = ["tracking"] * 60 + ["orders"]
    cases[0].decisions["orders"] = [IdleDecision(0, 2900)]
    topics = {f"sources__{source}__topic": f"{name}-{source}" for source in SOURCES}
    create_topics(kafka, *topics.values(), partitions=4)
    sink = f"{name}-merged"
    lake = new_lake(cases, bootstrap=kafka, name=name, publish__topic=sink, **topics, **IDS)
    for source in SOURCES:
        produce(
            kafka,
            topics[f"sources__{source}__topic"],
            [(p, v) for p, case in cases.items() for v in case.values[source]],
        )
    decided = [(tp_of(f"orders/{name}-orders", 0), IdleDecision(0, 2900))]
    silver = lake.engine.lake.schema(tables.SILVER)
    lake.owner().append(
        tables.SILVER,
        in_silver(decision_rows(decided, 0, 0, 0), "idle", silver),
        tables.BESIDE,
    )
    lake.arrive()
    lake.merge(lake.quick)
    lake.publish(lake.quick)
    assert lake.messages() == expected_messages(cases)
    assert lake.duplicates()

    for p, case in cases.items():
        extended(case, 10**6 + p)
    for source in SOURCES:
        values = [(p, value) for p, case in cases.items() for value in case.values[source][-2:]]
        produce(kafka, topics[f"sources__{source}__topic"], values)
    again = taken_up(new_lake, lake)
    begins = {
        s: NextOffsets(again.reader, again.settings, 4).of(again.input_of(s)) for s in SOURCES
    }
    assert begins["tracking"][0] > 40, "nothing is read that is not needed"
    assert again.reader.select(
        tables.IDLE_HEARTBEATS, ["source", "partition", "after_offset", "event_time"]
    ).to_pylist() == [{"source": "orders", "partition": 0, "after_offset": 0, "event_time": 2900}]
    version = again.reader.version(tables.SILVER)
    begin_first(again.owner(), again.settings, 4)
    assert again.reader.version(tables.SILVER) == version, "decided once"
    for source in SOURCES:
        unread = {
            (p, offset): value
            for p, case in cases.items()
            for offset, value in enumerate(case.values[source])
            if offset >= begins[source][p]
        }
        fill_bronze(BronzeTable(again.owner(), again.settings, again.input_of(source)), unread)
    again.merge()
    again.publish()
    assert again.messages() == expected_messages(cases)


@in_folders
def test_a_sink_with_messages_of_others_is_refused(begun: Begun, kafka: str) -> None:
    sink = f"{begun.settings.inputs_by_name['tracking'].topic}-foreign"
    create_topics(kafka, sink, partitions=PARTITIONS)
    produce(kafka, sink, [(1, b"not ours")])
    begun.settings = begun.settings.model_copy(
        update={"publish": begun.settings.publish.model_copy(update={"topic": sink})}
    )
    with pytest.raises(ForeignMessageError, match=r"-foreign\[1\] ends with a message at offset 0"):
        begun.begin("sink")


@in_folders
def test_idle_decisions_that_unpack_to_gigabytes_are_refused_before_they_do(
    begun: Begun, kafka: str
) -> None:
    sink = f"{begun.settings.inputs_by_name['tracking'].topic}-bomb"
    create_topics(kafka, sink, partitions=PARTITIONS)
    headers = {
        "watersmeet.seq": b"0",
        "watersmeet.id": b"1/1000/a",
        "watersmeet.due": b"1100",
        "watersmeet.closed_at": b"1101",
        "watersmeet.min_offsets": b'{"orders":0,"tracking":0}',
        "watersmeet.idle.zlib": zlib.compress(bytes(200 * 2**20), 9),
    }
    producer = CheckedProducer(kafka)
    producer.produce(sink, b"{}", b"a", 1, timestamp=1000, headers=[*headers.items()])
    assert producer.flush(30) == 0
    publish = begun.settings.publish.model_copy(update={"topic": sink})
    begun.settings = begun.settings.model_copy(update={"publish": publish})
    tracemalloc.start()
    try:
        with pytest.raises(
            ForeignMessageError, match=r"-bomb\[1\] ends with a message at offset 0"
        ):
            begun.begin("sink")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 64 * 2**20
