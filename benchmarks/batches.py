"""Points 3, 4 and 5: what one batch of silver costs once the JVM is warm, beside long history and
many open rows.

In this process, without Kafka: rows go straight into bronze as the bronze stream would have written
them, and only then is the clock started. Lakes that are compared take turns, so that both meet the
same JVM. A figure is the median of the second half of the rounds.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pyarrow as pa
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from benchmarks import points
from benchmarks.inputs import (
    DAY_MS,
    START_MS,
    TIMEOUT_MS,
    heartbeat_value,
    record_value,
    write_configuration,
)
from benchmarks.points import Result, Sizes
from benchmarks.programs import bytes_in, notify
from watersmeet.core.plan import TopicPartition
from watersmeet.core.reading import RECORD_BYTES
from watersmeet.core.too_large import RECORD_COUNT
from watersmeet.core.types import ddl
from watersmeet.engine import Engine
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.engine.session import spark_session
from watersmeet.engine.spark import SparkEngine
from watersmeet.lake import tables
from watersmeet.lake.history import Generation, generation_body
from watersmeet.lake.journal import BEGIN
from watersmeet.lake.location import Lake
from watersmeet.run import create_missing
from watersmeet.running.owner import Owner
from watersmeet.settings import Settings, SilverSettings, load_settings
from watersmeet.silver import Silver

NUMBERS = frozenset({3, 4, 5})
PARTITIONS = 4
OPEN_ROWS = 30_000
CHUNK = 1_000_000


@dataclass
class SmallBatches:
    """A lake whose bronze gets one small batch after the other, and the silver that merges each of
    them at once."""

    engine: Engine
    settings: Settings
    open_rows: int
    silver: Silver
    now_ms: int = START_MS
    new_keys: int = 0
    _offsets: Counter[tuple[str, int]] = field(default_factory=Counter)
    _random: random.Random = field(default_factory=lambda: random.Random(1))

    def seconds(
        self,
        *,
        touched: int = 0,
        new: int = 0,
        step_ms: int = 1,
        late: Sequence[tuple[str, int, int]] = (),
    ) -> float:
        """How long silver takes for a batch that moves every clock by `step_ms` and holds a record
        for each of so many open rows and new keys.

        `late`: records that come late, by key, partition and event time; the batch settles them.
        """
        since, self.now_ms = self.now_ms, self.now_ms + step_ms
        keys = [
            (_open_key(n), n % PARTITIONS)
            for n in self._random.sample(range(self.open_rows), touched)
        ]
        keys += [(f"new{n:08d}", n % PARTITIONS) for n in range(self.new_keys, self.new_keys + new)]
        self.new_keys += new
        rows: dict[str, list[tuple[object, ...]]] = {source: [] for source in self.settings.sources}
        for i, (key, partition) in enumerate(keys):
            source, event_time = (
                ("orders" if i % 11 == 0 else "tracking"),
                since + i * step_ms // len(keys),
            )
            rows[source].append(self._row(source, partition, event_time, key))
        for key, partition, event_time in late:
            rows["tracking"].append(self._row("tracking", partition, event_time, key))
        for source, own in rows.items():
            own += [
                self._row(source, partition, self.now_ms, None) for partition in range(PARTITIONS)
            ]
            table = tables.bronze(source)
            layout = self.engine.lake.layout[table]
            # As from Kafka: with Spark a file for each topic-partition.
            found = self.engine.from_tables(
                _as_they_are, [layout.rows(own)], range(PARTITIONS), layout.schema
            )
            self.engine.append(table, found)
        began = time.perf_counter()
        plan = next(self.silver.drain())
        seconds = time.perf_counter() - began
        passed = sum(done.size for done in plan.ranges.values())
        if passed != len(keys) + len(late) + 2 * PARTITIONS:
            raise RuntimeError(f"batch {plan.batch} passed {passed} records")
        return seconds

    def restart_seconds(self) -> float:
        """How long a new silver takes to find out where it stands, and that there is nothing to
        do."""
        began = time.perf_counter()
        batches = list(Silver(Owner(self.engine), self.settings, PARTITIONS).drain())
        seconds = time.perf_counter() - began
        if batches:
            raise RuntimeError(f"{len(batches)} batches were left")
        return seconds

    def _row(
        self, source: str, partition: int, event_time: int, key: str | None
    ) -> tuple[object, ...]:
        offset = self._offsets[source, partition]
        self._offsets[source, partition] += 1
        value = (
            heartbeat_value(event_time) if key is None else record_value(key, event_time, source)
        )
        of_kafka: tuple[object, ...] = (
            source,
            partition,
            offset,
            event_time,
            0,
            None,
            value.encode(),
            [],
        )
        read: tuple[object, ...] = (key, event_time, key is None, None, None)
        return *of_kafka, *read, "", None, len(value)


def measure(numbers: Set[int], sizes: Sizes, folder: Path) -> Iterator[Result]:
    """The chosen ones of these points."""
    if not numbers & NUMBERS:
        return
    spark = spark_session({})
    try:
        for engine in sizes.engines:
            if numbers & {3, 4}:
                yield from _beside_history(numbers, sizes, spark, engine, folder / "history")
            if 5 in numbers:
                yield from _beside_open_rows(sizes, spark, engine, folder / "open")
    finally:
        spark.stop()


def _beside_history(
    numbers: Set[int], sizes: Sizes, spark: SparkSession, engine: str, folder: Path
) -> Iterator[Result]:
    """Points 3 and 4. Where only the clock moves, nothing times out; beside the records, about
    fifty rows do."""
    lengths = [sizes.short_history, sizes.history] if 4 in numbers else [sizes.short_history]
    lakes = [
        _lake(folder / str(i), spark, engine, timed_out=rows, open_rows=OPEN_ROWS)
        for i, rows in enumerate(lengths)
    ]
    clock = [[lake.seconds() for lake in lakes] for _ in range(sizes.rounds)]
    small = [
        [lake.seconds(touched=500, new=500, step_ms=1000) for lake in lakes]
        for _ in range(sizes.rounds)
    ]
    if 3 in numbers:
        yield Result(points.CLOCK_BATCH, engine, _warm(clock)[0], {"rounds": _rounded(clock)})
        yield Result(points.SMALL_BATCH, engine, _warm(small)[0], {"rounds": _rounded(small)})
        yield from _with_change_data_feed(sizes, spark, engine, folder, lakes[0])
    if 4 in numbers:
        restarts = [[lake.restart_seconds() for lake in lakes] for _ in range(sizes.rounds)]
        yield _ratio(points.HISTORY, engine, lengths, small)
        yield _ratio(points.HISTORY_RESTART, engine, lengths, restarts)
    shutil.rmtree(folder)


def _with_change_data_feed(
    sizes: Sizes, spark: SparkSession, engine: str, folder: Path, without: SmallBatches
) -> Iterator[Result]:
    """What the option costs: the same batches in a lake that has it, in turns with one that has
    not."""
    fed = _lake(
        folder / "fed",
        spark,
        engine,
        timed_out=sizes.short_history,
        open_rows=OPEN_ROWS,
        change_data_feed=True,
    )
    silvers = [Path(f"{lake.settings.lake}/{tables.SILVER}") for lake in (fed, without)]
    before = [bytes_in(silver) for silver in silvers]
    rounds = [
        [lake.seconds(touched=500, new=500, step_ms=1000) for lake in (fed, without)]
        for _ in range(max(2, sizes.rounds // 2))
    ]
    with_it, without_it = _warm(rounds)
    grown = [bytes_in(silver) - size for silver, size in zip(silvers, before, strict=True)]
    yield Result(points.CHANGE_FEED, engine, with_it / without_it, {"rounds": _rounded(rounds)})
    yield Result(
        points.CHANGE_FEED_DISK,
        engine,
        grown[0] / grown[1],
        {"bytes": grown, "batches": len(rounds)},
    )


def _beside_open_rows(
    sizes: Sizes, spark: SparkSession, engine: str, folder: Path
) -> Iterator[Result]:
    """Point 5. Hardly a row times out meanwhile."""
    many = _lake(folder / "many", spark, engine, timed_out=0, open_rows=sizes.open_rows)
    few = _lake(folder / "few", spark, engine, timed_out=0, open_rows=sizes.few_open_rows)
    full = _lake(
        folder / "full", spark, engine, timed_out=0, open_rows=sizes.few_open_rows, parts=10
    )
    rounds = [
        [lake.seconds(touched=1000) for lake in (many, few, full)]
        for _ in range(max(2, sizes.rounds // 2))
    ]
    of_many, of_few, of_full = _warm(rounds)
    yield Result(
        points.OPEN_STATE,
        engine,
        of_many,
        {"open_rows": sizes.open_rows, "rounds": _rounded(rounds)},
    )
    yield Result(
        points.OPEN_GROWTH,
        engine,
        of_many / of_few,
        {"open_rows": [sizes.open_rows, sizes.few_open_rows]},
    )
    yield Result(points.OPEN_CONTENT, engine, of_full / of_few, {"open_rows": sizes.few_open_rows})
    shutil.rmtree(folder)


def _warm(rounds: Sequence[Sequence[float]]) -> list[float]:
    """The median of the second half, by lake."""
    return [median(seconds) for seconds in zip(*rounds[len(rounds) // 2 :], strict=True)]


def _rounded(rounds: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[round(seconds, 3) for seconds in times] for times in rounds]


def _ratio(
    point: points.Point, engine: str, lengths: Sequence[int], rounds: Sequence[Sequence[float]]
) -> Result:
    short, long = _warm(rounds)
    seconds = {lengths[0]: round(short, 3), lengths[1]: round(long, 3)}
    return Result(point, engine, long / short, {"seconds_by_timed_out_rows": seconds})


def _lake(
    folder: Path,
    spark: SparkSession,
    chosen: str,
    *,
    timed_out: int,
    open_rows: int,
    parts: int = 1,
    change_data_feed: bool = False,
) -> SmallBatches:
    """A lake with so many rows in silver, each of `parts` clicks and an order."""
    settings = load_settings(write_configuration(folder, "127.0.0.1:1", engine=chosen))
    settings = settings.model_copy(
        update={"silver": SilverSettings(change_data_feed=change_data_feed)}
    )
    by_spark = SparkEngine(spark, Lake(settings))
    engine: Engine = by_spark if chosen == "spark" else EmbeddedEngine(Lake(settings))
    create_missing(engine)
    owner = Owner(engine)
    begin = {TopicPartition(s, p): 0 for s in settings.inputs for p in range(PARTITIONS)}
    owner.decide(BEGIN, generation_body(Generation(0, 0, begin, {})), 0)
    notify(
        f"a lake of {timed_out:,} timed-out and {open_rows:,} open rows of {parts} + 1 parts ..."
    )
    _add_rows(
        by_spark,
        "timed_out",
        timed_out,
        parts,
        first_ms=START_MS - 400 * DAY_MS,
        span_ms=365 * DAY_MS,
    )
    # A second is left on either side: nothing times out before the clock has moved that far.
    _add_rows(
        by_spark,
        "open",
        open_rows,
        parts,
        first_ms=START_MS - TIMEOUT_MS + 1000,
        span_ms=TIMEOUT_MS - 2000,
    )
    return SmallBatches(engine, settings, open_rows, Silver(owner, settings, PARTITIONS))


def _add_rows(
    engine: SparkEngine, status: str, rows: int, parts: int, *, first_ms: int, span_ms: int
) -> None:
    """Rows with event times spread evenly over a span, in chunks; their parts' offsets are below
    those of bronze."""
    event_time = F.timestamp_millis(F.expr(f"{first_ms} + id * {span_ms} div {max(1, rows)}"))

    def part(n: Column) -> Column:
        value = F.format_string(
            '{"n":%d,"ts":%d,"type":"tracking","page":"/article/view"}',
            n,
            F.unix_millis(event_time),
        )
        return F.struct(
            (-F.col("id") * parts - n).alias("offset"),
            event_time.alias("event_time"),
            value.alias("value"),
        )

    def size(source: str) -> Column:
        return F.aggregate(
            F.transform(source, lambda part: F.octet_length(part["value"])),
            F.lit(0),
            lambda one, other: one + other,
        )

    is_over = status == "timed_out"
    due = F.timestamp_millis(F.unix_millis(event_time) + TIMEOUT_MS)
    columns = {
        "partition": F.col("id") % PARTITIONS,
        "merge_key": F.format_string("open%08d" if not is_over else "done%08d", "id"),
        "status": F.lit(status),
        "event_time": event_time,
        "last_event_time": event_time,
        "tracking": F.transform(F.sequence(F.lit(1), F.lit(parts)), part),
        "orders": F.array(part(F.lit(0))),
        "valid": F.lit(True if is_over else None),
        "invalid_reason": F.lit(None),
        "batch": F.lit(-1),
        "generation": F.lit(0),
        "due": due,
        "closed_at": due if is_over else F.lit(None),
        "tenant": F.lit(""),
        RECORD_COUNT.name: F.lit(parts + 1),
        RECORD_BYTES.name: size("tracking") + size("orders"),
    }
    for begin in range(0, rows, CHUNK):
        chunk = engine.spark.range(begin, min(begin + CHUNK, rows), 1, 4)
        schema = engine.lake.layout[tables.SILVER].schema
        engine.append(
            tables.SILVER,
            chunk.select(
                *[columns.get(f.name, F.lit(None)).cast(ddl(f.type)).alias(f.name) for f in schema]
            ),
        )


def _as_they_are(rows: pa.Table) -> pa.Table:
    return rows


def _open_key(n: int) -> str:
    return f"open{n:08d}"
