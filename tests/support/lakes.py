"""Lakes for tests: of every kind that there is, filled without Kafka (through the real reading),
and read back as tuples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import yaml
from delta.tables import DeltaTable
from pyspark.sql import SparkSession

from tests.support.cases import SOURCES, Case
from tests.support.inputs import tp_of
from tests.support.topics import Published, published
from watersmeet.core.idle import IdleDecision
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import BatchPlan, TopicPartition
from watersmeet.core.reading import KAFKA, RECORD_BYTES, read_records
from watersmeet.core.sequence import MERGED, Tail
from watersmeet.core.types import columns_ddl
from watersmeet.engine import Engine, Input
from watersmeet.engine.choice import open_engine
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.engine.spark import SparkEngine
from watersmeet.gold import Gold
from watersmeet.kafka.idle_detector import IdleDetector
from watersmeet.lake import tables
from watersmeet.lake.history import Generation, InKafka, generation_body, read_history
from watersmeet.lake.identity import begin_epoch
from watersmeet.lake.journal import BEGIN
from watersmeet.lake.location import Lake
from watersmeet.lake.progress import read_decisions
from watersmeet.lake.published import columns_of, topic_columns, with_message
from watersmeet.lake.table_reader import TableReader, Where
from watersmeet.lake.tables import Table
from watersmeet.run import create_missing, evolve_schema
from watersmeet.running.bronze_table import BatchCounts, BronzeTable
from watersmeet.running.generations import Jump, Target
from watersmeet.running.lake_sequence import Publication
from watersmeet.running.owner import Owner
from watersmeet.settings import Settings, load_settings
from watersmeet.silver import Silver

OpenSpark = Callable[[], SparkSession]
"""Starts the process's one Spark session at the first call, and returns it."""

KINDS = ("embedded-folder", "spark-folder", "spark-catalog")
"""Every engine with every kind of lake that it can write."""

KAFKA_TIME_US = 1_767_225_600_000_000
"""When Kafka says that it took every record: 2026-01-01."""


@contextmanager
def place_of(kind: str, open_spark: OpenSpark, folder: Path) -> Iterator[dict[str, Any]]:
    """Inside, there is a place for a lake of a kind, in a folder; what a configuration says of it
    (`lake`, `checkpoints`)."""
    engine, _, place = kind.partition("-")
    if place == "folder":
        yield {"engine": engine, "lake": str(folder / "the `lake`, é")}
        return
    schema, spark = f"lake_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}", open_spark()
    spark.sql(f"CREATE SCHEMA spark_catalog.`{schema}` LOCATION '{folder / schema}'")
    try:
        location = {"catalog": "spark_catalog", "schema": schema}
        yield {"engine": engine, "lake": location, "checkpoints": str(folder / "checkpoints")}
    finally:
        spark.sql(f"DROP SCHEMA spark_catalog.`{schema}` CASCADE")


def folder_of(settings: Settings) -> str:
    """Where the tables have their files in a place of `place_of`."""
    lake = settings.lake
    return (
        lake if isinstance(lake, str) else str(Path(settings.checkpoints).parent / lake.schema_name)
    )


class TypedEngine(EmbeddedEngine):
    """An embedded engine that takes rows of those types alone that Spark takes, too."""

    def read(self, selection: Input) -> pa.Table:
        """See `Engine.read`."""
        if isinstance(selection, pa.Table):
            columns_ddl(selection.schema)
        return super().read(selection)


def engine_for(open_spark: OpenSpark, settings: Settings) -> Engine:
    """The engine of a configuration, on which Spark's tasks read Kafka, however little."""
    if settings.engine != "spark":
        return TypedEngine(Lake(settings))
    engine = SparkEngine(open_spark(), Lake(settings))
    engine.here_offsets = -1
    return engine


def quickly(settings: Settings) -> Settings:
    """The same lake by the folders of its tables and without Spark: for what a test only needs to
    be there."""
    return settings.model_copy(update={"engine": "embedded", "lake": folder_of(settings)})


def delta_table(spark: SparkSession, lake: Lake, table: str) -> DeltaTable:
    """A table as Delta's own interface knows it, past the engine."""
    find = DeltaTable.forName if lake.is_catalog else DeltaTable.forPath
    return find(spark, lake.address(table))


def write_configuration(settings: Settings, folder: Path) -> Path:
    """What `settings_for` made, as a file (with the topic, the predicate and the sink that it was
    given)."""
    heartbeat = {"field": "type", "equals": "heartbeat"}
    values = {
        "name": settings.name,
        "engine": settings.engine,
        "lake": str(settings.lake),
        "durable": settings.durable,
        "kafka": {"bootstrap_servers": settings.kafka.bootstrap_servers},
        "sources": {
            name: {"topic": source.topic, "key": "k", "event_time": "ts", "heartbeat": heartbeat}
            for name, source in settings.sources.items()
        },
        "merge": {
            "timeout": f"{settings.merge.timeout_ms}ms",
            "max_records_per_batch": settings.merge.max_records_per_batch,
        },
        "publish": {"topic": settings.publish.topic, "valid": settings.publish.valid},
    }
    file = folder / "watersmeet.yml"
    file.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    assert load_settings(file, {}).digest == settings.digest
    return file


def first_columns(table: Table, rows: Iterable[Sequence[Any]]) -> pa.Table:
    """Rows of the first columns of a table; the others are null. Times are epoch ms."""
    return table.rows_of(dict(zip(table.schema.names, row, strict=False)) for row in rows)


def as_published(reader: TableReader, layout: Mapping[str, Table], sink: str, at: int) -> pa.Table:
    """Rows of `published`, as if gold had published at a time all that silver has finished: the
    last message of each partition, with its number as its offset."""
    columns = ["partition", "event_time", *MERGED.order]
    found = reader.select(tables.SILVER, columns, [with_message(MERGED)]).to_pylist()
    rows: dict[int, dict[str, Any]] = {}
    for row in sorted(found, key=MERGED.place):
        p = row["partition"]
        seq = rows[p]["last_seq"] + 1 if p in rows else 0
        said = columns_of(MERGED, Tail(seq, MERGED.place(row), None, row["event_time"]))
        rows[p] = {"partition": p, "first_seq": 0, "last_seq": seq, "sink_offset": seq, **said}
    noted = ({**row, **topic_columns(sink), "committed_at": at} for row in rows.values())
    return layout[tables.PUBLISHED].rows_of(noted)


def rows_of_silver(layout: Mapping[str, Table], rows: Iterable[Sequence[Any]]) -> pa.Table:
    """Rows of silver without tenants, up to their generation, with their size."""
    table = layout[tables.SILVER]
    names = [*table.schema.names[: table.schema.names.index("due")], RECORD_BYTES.name]
    return table.rows_of(dict(zip(names, row, strict=True)) | {"tenant": ""} for row in rows)


def records_of(
    settings: Settings, input_id: InputId, values: Mapping[tuple[int, int], bytes | None]
) -> pa.Table:
    """Records, given by (partition, offset), as bronze's rows: as if Kafka had just delivered
    them."""
    source, topic = settings.input_names[input_id], input_id.topic
    places = sorted(values)
    rows: list[tuple[Any, ...]] = [
        (
            topic,
            p,
            offset,
            KAFKA_TIME_US,
            0,
            key_of(source, offset),
            values[p, offset],
            headers_of(source, offset),
        )
        for p, offset in places
    ]
    columns = [
        pa.array(column, kind)
        for column, kind in zip(zip(*rows, strict=True), KAFKA.types, strict=True)
    ]
    return read_records(pa.table(columns, schema=KAFKA), settings.reading_rules(input_id.source))


def key_of(source: str, offset: int) -> bytes | None:
    """The Kafka key of a record, if it has one; the merge reads another."""
    return f"{source} {offset}".encode() if offset % 3 else None


def headers_of(source: str, offset: int) -> list[dict[str, Any]]:
    """The headers of a record, if it has any; one like those of Watersmeet's own."""
    own = [("of", source.encode()), ("of", None), ("watersmeet.offset", b"another's")]
    return [{"key": name, "value": value} for name, value in own] if offset % 2 else []


def counted(rows: pa.Table) -> BatchCounts:
    """Bronze's rows by partition and reason, as `BronzeTable.append` takes them."""
    found = rows.group_by(["partition", "reason"]).aggregate(
        [("offset", "count"), ("offset", "min"), ("offset", "max")]
    )
    names = ["partition", "reason", "records", "first", "last"]
    return BatchCounts(found.rename_columns(names))


def fill_bronze(bronze: BronzeTable, values: Mapping[tuple[int, int], bytes | None]) -> None:
    """Appends records, given by (partition, offset), to a source's bronze."""
    if values:
        rows = records_of(bronze.settings, bronze.input, values)
        bronze.append(rows, counted(rows))


def begin_at(owner: Owner, settings: Settings, begin: Mapping[TopicPartition, int]) -> None:
    """A lake begins to read at these offsets, with a new sink."""
    owner.decide(BEGIN, generation_body(Generation(0, 0, begin, {})), 0)


@dataclass
class CaseLake:
    """Many cases in one lake, a partition each; `arrive` hands records over in the cases' order of
    arrival."""

    engine: Engine
    settings: Settings
    cases: dict[int, Case]
    token: int = 1
    """Of the lease of whoever writes the lake; a later owner has a larger one."""
    plans: list[BatchPlan] = field(default_factory=list)
    """The batches that `merge` has made."""

    def __post_init__(self) -> None:
        self.quick = open_engine(quickly(self.settings))
        create_missing(self.engine)
        has_begun = bool(read_history(self.reader, self.settings).generations)
        if self.settings.kafka.start == "earliest" and not has_begun:
            self.begin(dict.fromkeys(self.every, 0))
        self._arrived = dict.fromkeys(self.cases, 0)

    @property
    def reader(self) -> TableReader:
        return self.engine.reader

    @property
    def partitions(self) -> int:
        return max(self.cases) + 1

    @property
    def every(self) -> list[TopicPartition]:
        """Every topic-partition."""
        return [tp_of(source, p) for source in self.settings.inputs for p in range(self.partitions)]

    def input_of(self, name: str) -> InputId:
        """The input with this name."""
        return self.settings.inputs_by_name[name]

    def begin(self, begin: Mapping[TopicPartition, int]) -> None:
        """The lake begins to read at these offsets, with a new sink."""
        begin_at(self.owner(self.quick), self.settings, begin)

    def jump(
        self,
        begin: Mapping[TopicPartition, int],
        tails: Mapping[int, Tail] = MappingProxyType({}),
        owner: Owner | None = None,
        correction_tails: Mapping[int, Tail] = MappingProxyType({}),
    ) -> None:
        """Another generation begins at these offsets, behind these messages of the sink."""
        targets = {tp: Target(at, InKafka("", 0, at)) for tp, at in begin.items()}
        Jump(
            owner or self.owner(self.quick),
            self.settings,
            self.partitions,
            "a test",
            targets,
            tails,
            correction_tails,
        ).commit()

    def new(self, share: float = 1.0) -> dict[str, dict[tuple[int, int], bytes | None]]:
        """The next records of every case, up to this share of all of them: by source, and by
        (partition, offset)."""
        new: dict[str, dict[tuple[int, int], bytes | None]] = {
            name: {} for name in self.settings.inputs_by_name
        }
        for partition, case in self.cases.items():
            until = max(self._arrived[partition], round(share * len(case.arrivals)))
            for i in range(self._arrived[partition], until):
                source = case.arrivals[i]
                offset = case.arrivals[:i].count(source)
                new[source][partition, offset] = case.values[source][offset]
            self._arrived[partition] = until
        return new

    def arrive(self, share: float = 1.0, engine: Engine | None = None) -> None:
        """Bronze gets the next records of every case, up to this share of all; by the quick engine,
        unless one is named."""
        by, new = engine or self.quick, self.new(share)
        with ThreadPoolExecutor(len(new)) as pool:
            list(
                pool.map(
                    lambda source: fill_bronze(
                        BronzeTable(self.owner(by), self.settings, self.input_of(source)),
                        new[source],
                    ),
                    new,
                )
            )

    def change_rules(self, rules: Mapping[str, Any]) -> None:
        """Another epoch begins, with these instead of what it had."""
        after = self.settings.under({**self.settings.rules(), **rules})
        for engine in (self.engine, self.quick):
            engine.lake = Lake(after)
        evolve_schema(self.engine, self.engine.lake.layout)
        first = self.plans[-1].batch + 1 if self.plans else 0
        begin_epoch(self.reader, self.engine.append, after, first)
        self.settings = read_history(self.reader, self.settings).epochs.current.settings

    def owner(self, engine: Engine | None = None) -> Owner:
        """A process that has just taken the layers over, with the token of the one before."""
        return Owner(engine or self.engine, self.token)

    def start(self, silence: IdleDetector | None = None, engine: Engine | None = None) -> Silver:
        """A start of silver."""
        return Silver(self.owner(engine), self.settings, self.partitions, silence)

    def merge(self, engine: Engine | None = None) -> int:
        """One start of silver that drains what there is; returns the number of batches."""
        plans = list(self.start(engine=engine).drain())
        self.plans += plans
        return len(plans)

    def gold(self, engine: Engine | None = None) -> Gold:
        """A start of gold."""
        return Gold(self.owner(engine), self.settings, self.partitions)

    def publish(self, engine: Engine | None = None) -> list[Sequence[Publication]]:
        """One start of gold that publishes what there is; returns its transactions."""
        return list(self.gold(engine).drain())

    def messages(self) -> list[Published]:
        """What is in the sink."""
        return published(
            self.settings.kafka.bootstrap_servers, self.settings.publish.topic, self.partitions
        )

    def take_decisions(self) -> None:
        """The idle policy's decisions in the lake are input of the cases, like the records."""
        for (source, partition), decisions in decisions_of(
            self.reader, self.settings.inputs_by_name
        ).items():
            self.cases[partition].decisions[source] = decisions

    def silver(self, generation: int = 0) -> list[tuple[object, ...]]:
        """Silver's content of a generation, in the form of `expected_silver`."""
        return silver_of(self.reader, list(self.settings.sources), generation)

    def late(self, generation: int = 0) -> list[tuple[object, ...]]:
        """Late records of a generation, in the form of `expected_late`."""
        return late_of(self.reader, generation, self.settings.inputs_by_name)

    def duplicates(self, generation: int = 0) -> list[tuple[object, ...]]:
        """Duplicates of a generation, in the form of `expected_duplicates`."""
        return duplicates_of(self.reader, generation, self.settings.inputs_by_name)

    def excess(self, generation: int = 0) -> list[tuple[object, ...]]:
        """Excess of a generation, in the form of `expected_excess`."""
        columns = ["partition", *_INPUT, "offset", "merge_key", "event_time"]
        rows = self.reader.select(tables.EXCESS, columns, of_generation(generation)).to_pylist()
        return sorted(_named(row, self.settings.inputs_by_name) for row in rows)

    def quarantined(self) -> list[tuple[object, ...]]:
        """Refused records, in the form of `expected_quarantine`."""
        return quarantined_of(self.reader, self.settings.inputs_by_name)


def silver_of(
    reader: TableReader, sources: Sequence[str] = SOURCES, generation: int | None = None
) -> list[tuple[object, ...]]:
    """Silver's content, or that of a generation, in the form of `expected_silver`."""
    columns = ["partition", "merge_key", "status", "event_time", "last_event_time", *sources]
    where = [
        [*term, ("status", "in", ["open", "waiting", "timed_out"])]
        for term in of_generation(generation) or [[]]
    ]
    return sorted(as_tuples(reader.select(tables.SILVER, columns, where)), key=repr)


def of_generation(generation: int | None) -> Where:
    """The rows of a generation, or all."""
    return () if generation is None else [[("generation", "=", generation)]]


def as_tuples(rows: pa.Table) -> list[tuple[object, ...]]:
    """Rows of silver as they stand, with each list of parts as (topic if there are several, offset,
    event time in ms, value)."""
    return [
        tuple(_parts(v) if isinstance(v, list) else v for v in row.values())
        for row in rows.to_pylist()
    ]


def _parts(parts: Sequence[Mapping[str, Any]]) -> tuple[object, ...]:
    topics = [(p["topic"],) if "topic" in p else () for p in parts]
    return tuple(
        (*topic, p["offset"], _ms(p["event_time"]), p["value"])
        for topic, p in zip(topics, parts, strict=True)
    )


def late_of(
    reader: TableReader, generation: int | None = None, inputs: Collection[str] = SOURCES
) -> list[tuple[object, ...]]:
    """Late records, or those of a generation, in the form of `expected_late`."""
    columns = ["partition", *_INPUT, "offset", "merge_key", "event_time", "position", "value"]
    rows = reader.select(tables.LATE, columns, of_generation(generation)).to_pylist()
    return sorted(_named(row, inputs) for row in rows)


def duplicates_of(
    reader: TableReader, generation: int | None = None, inputs: Collection[str] = SOURCES
) -> list[tuple[object, ...]]:
    """Duplicates on time, or those of a generation, in the form of `expected_duplicates`."""
    columns = ["partition", *_INPUT, "offset", "merge_key", "event_time", "id", "of_offset"]
    where = [[*term, ("is_late", "=", False)] for term in of_generation(generation) or [[]]]
    rows = reader.select(tables.DUPLICATES, columns, where).to_pylist()
    return sorted(_named(row, inputs) for row in rows)


def quarantined_of(
    reader: TableReader, inputs: Collection[str] = SOURCES
) -> list[tuple[object, ...]]:
    """Refused records, in the form of `expected_quarantine`."""
    rows = reader.select(tables.QUARANTINE, ["partition", *_INPUT, "offset", "value"]).to_pylist()
    return sorted((_named(row, inputs) for row in rows), key=repr)


_INPUT = ("source", "topic")


def _named(row: Mapping[str, Any], inputs: Collection[str]) -> tuple[Any, ...]:
    """The values of a row, with the name of its input for source and topic."""
    partition, source, topic, *values = row.values()
    return (partition, _name(source, topic, inputs), *values)


def _name(source: str, topic: str, inputs: Collection[str]) -> str:
    """The name of an input: with its topic where the source has several."""
    name = f"{source}/{topic}"
    return name if name in inputs else source


def decisions_of(
    reader: TableReader, inputs: Collection[str] = SOURCES
) -> dict[tuple[str, int], list[IdleDecision]]:
    """What the idle policy has decided, by the name of the input and the partition."""
    found: dict[tuple[str, int], list[IdleDecision]] = {}
    for tp, decision in read_decisions(reader, Generation(0, 0, {}, {})):
        source, topic = tp.input
        name = _name(source, topic, inputs)
        found.setdefault((name, tp.partition), []).append(decision)
    return found


def _ms(time: datetime) -> int:
    return round(time.timestamp() * 1000)
