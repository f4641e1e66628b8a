"""Point 11: what the corrections of late records cost a batch of silver of the embedded engine,
beside many closed rows.

In this process, without Kafka and without Spark, as `batches` does it. The closed rows are written
as files of silver, each with the rows of some time, as the batches and compactions of a month leave
them; the lake with corrections and the one without share these files. Their batches take turns, and
a figure is the median of the second half of the rounds. A batch settles the late records that it
holds: they belong to closed rows of the last week, no two to the same one.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Set
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks import points
from benchmarks.batches import PARTITIONS, SmallBatches
from benchmarks.inputs import (
    DAY_MS,
    SESSION_MS,
    START_MS,
    TIMEOUT_MS,
    WITHIN_MS,
    Variant,
    session_key,
    write_configuration,
)
from benchmarks.points import Result, Sizes
from benchmarks.programs import notify
from watersmeet.core.columns import Int64s, time_column
from watersmeet.core.plan import TopicPartition
from watersmeet.core.reading import RECORD_BYTES
from watersmeet.core.too_large import RECORD_COUNT
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.lake import tables
from watersmeet.lake.history import Generation, generation_body
from watersmeet.lake.journal import BEGIN
from watersmeet.lake.location import Lake
from watersmeet.run import create_missing
from watersmeet.running.owner import Owner
from watersmeet.settings import load_settings
from watersmeet.silver import Silver

NUMBERS = frozenset({11})
LATE = 1_000
HISTORY_MS = 30 * DAY_MS
END_MS = START_MS - 2 * TIMEOUT_MS
"""The last closed row begins before this, and is over before the first batch."""
FILE_ROWS = 250_000
CLICKS = 10


def measure(numbers: Set[int], sizes: Sizes, folder: Path) -> Iterator[Result]:
    """The point, where it and the embedded engine are chosen."""
    if not numbers & NUMBERS or "embedded" not in sizes.engines:
        return
    folder = folder / "corrections"
    notify(f"a lake of {sizes.closed_rows:,} closed rows ...")
    without = _lake(folder / "without", "plain", sizes.closed_rows)
    silver = Path("lake", tables.SILVER)
    shutil.copytree(folder / "without" / silver, folder / "with" / silver, copy_function=os.link)
    corrected = _lake(folder / "with", "corrections")
    lakes = (without, corrected)
    rounds: list[list[float]] = []
    rng = random.Random(1)
    for _ in range(sizes.rounds):
        late = _late(rng, sizes.closed_rows)
        plain = [lake.seconds(new=1000, step_ms=1000) for lake in lakes]
        more = [lake.seconds(new=1000, step_ms=1000, late=late) for lake in lakes]
        rounds.append([*plain, *more])
    made = corrected.engine.reader.summary(tables.CORRECTIONS, [], {"rows": ("count", "*")})
    if made["rows"][0].as_py() != LATE * sizes.rounds:
        raise RuntimeError(f"{made['rows'][0]} corrections were made")
    plain_without, plain_with, late_without, late_with = (
        median(seconds) for seconds in zip(*rounds[len(rounds) // 2 :], strict=True)
    )
    details = {
        "closed_rows": sizes.closed_rows,
        "seconds": {
            "without late records": [round(plain_without, 3), round(plain_with, 3)],
            "with them": [round(late_without, 3), round(late_with, 3)],
        },
        "rounds": [[round(seconds, 3) for seconds in times] for times in rounds],
    }
    yield Result(points.CORRECTED_BATCH, "embedded", late_with - plain_with, details)
    yield Result(points.NOTHING_LATE, "embedded", plain_with / plain_without)
    shutil.rmtree(folder)


def _lake(folder: Path, variant: Variant, closed_rows: int = 0) -> SmallBatches:
    """A lake; to what silver has, so many closed rows are added."""
    settings = load_settings(
        write_configuration(folder, "127.0.0.1:1", engine="embedded", variant=variant)
    )
    engine = EmbeddedEngine(Lake(settings))
    create_missing(engine)
    for begin in range(0, closed_rows, FILE_ROWS):
        numbers = np.arange(begin, min(begin + FILE_ROWS, closed_rows))
        engine.append(tables.SILVER, _closed_rows(engine, numbers, closed_rows))
    owner = Owner(engine)
    first = {TopicPartition(s, p): 0 for s in settings.inputs for p in range(PARTITIONS)}
    owner.decide(BEGIN, generation_body(Generation(0, 0, first, {})), 0)
    return SmallBatches(engine, settings, 0, Silver(owner, settings, PARTITIONS))


def _late(rng: random.Random, closed_rows: int) -> list[tuple[str, int, int]]:
    """Late records of closed rows: key, partition and event time."""
    first = closed_rows - closed_rows * WITHIN_MS // HISTORY_MS
    chosen = rng.sample(range(first + closed_rows // 1000, closed_rows), LATE)
    times = _begin_of(np.array(chosen), closed_rows) + 1
    return [
        (session_key(n), n % PARTITIONS, time)
        for n, time in zip(chosen, times.tolist(), strict=True)
    ]


def _begin_of(numbers: Int64s, count: int) -> Int64s:
    return END_MS - HISTORY_MS + numbers * HISTORY_MS // count


def _closed_rows(engine: EmbeddedEngine, numbers: Int64s, count: int) -> pa.Table:
    """These closed rows; the offsets of their parts are below those of bronze."""
    schema = engine.lake.schema(tables.SILVER)
    rows = len(numbers)
    times = _begin_of(numbers, count)
    keys = pa.array(map(session_key, numbers.tolist()))
    tracking, click_bytes = _parts("tracking", keys, numbers, times, CLICKS)
    orders, order_bytes = _parts("orders", keys, numbers, times + SESSION_MS, 1)
    columns = {
        "partition": pa.array(numbers % PARTITIONS),
        "merge_key": keys,
        "status": pa.repeat("timed_out", rows),
        "event_time": time_column(times),
        "last_event_time": time_column(times + SESSION_MS),
        "tracking": tracking,
        "orders": orders,
        "valid": pa.repeat(pa.scalar(True), rows),
        "batch": pa.repeat(-1, rows),
        "generation": pa.repeat(0, rows),
        "due": time_column(times + TIMEOUT_MS),
        "closed_at": time_column(times + TIMEOUT_MS + 1),
        "tenant": pa.repeat("", rows),
        RECORD_COUNT.name: pa.repeat(CLICKS + 1, rows),
        RECORD_BYTES.name: pa.array(click_bytes + order_bytes),
    }
    arrays = [
        columns[field.name].cast(field.type)
        if field.name in columns
        else pa.nulls(rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _parts(
    topic: str, keys: pa.Array, numbers: Int64s, begins: Int64s, count: int
) -> tuple[pa.Array, Int64s]:
    """So many parts for each key, half a minute apart, and the bytes of their values by key."""
    places = np.tile(np.arange(count), len(keys))
    times = np.repeat(begins, count) + places * SESSION_MS // CLICKS
    texts = [keys.take(pa.array(np.repeat(np.arange(len(keys)), count)))]
    texts += [pa.array(each).cast(pa.string()) for each in (times, times * 7_919 % 1_800_000)]
    before = ('{"ssid":"', '","ts":', f',"type":"{topic}","aid":')
    pieces = [piece for pair in zip(before, texts, strict=True) for piece in pair]
    values = pc.binary_join_element_wise(*pieces, ',"page":"/article/view"}', "")
    offsets = -1 - np.repeat(numbers, count) * count - places
    fields = [pa.array(offsets), time_column(times), values]
    part = pa.StructArray.from_arrays(fields, names=["offset", "event_time", "value"])
    starts = pa.array(np.arange(len(keys) + 1, dtype=np.int32) * count)
    sizes = pc.binary_length(values).to_numpy().reshape(-1, count).sum(axis=1)
    return pa.ListArray.from_arrays(starts, part), sizes
