"""Lakes for the report, written without Spark: the tables' rows as plain values, times in epoch ms."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from deltalake import write_deltalake
from pyspark.sql import SparkSession

from pipelines import tables
from pipelines.adapters.lake import Lake
from pipelines.adapters.local import LocalTables
from pipelines.settings import Settings

Row = dict[str, Any]
Tables = Mapping[str, Sequence[Row]]

_TIME, _TEXT, _INT, _LONG, _FLAG = pa.timestamp("us", "UTC"), pa.string(), pa.int32(), pa.int64(), pa.bool_()
_PLACE = {"source": _TEXT, "topic": _TEXT, "partition": _INT}
_PARTS = pa.list_(pa.struct({"offset": _LONG, "event_time": _TIME, "value": _TEXT}.items()))


def columns_of(settings: Settings) -> dict[str, dict[str, pa.DataType]]:
    """The columns that the report reads, with the types of `tables.layout` (whose own text only Spark can parse)."""
    record = {"topic": _TEXT, "partition": _INT, "offset": _LONG, "kafka_timestamp": _TIME}
    silver = {"partition": _INT, "merge_key": _TEXT, "status": _TEXT, "event_time": _TIME, "last_event_time": _TIME}
    outcome = {"valid": _FLAG, "invalid_reason": _TEXT, "batch": _LONG}
    times = {"head": _TIME, "clock": _TIME, "committed_at": _TIME}
    return {
        **{tables.bronze(source): record for source in settings.sources},
        tables.SILVER: silver | dict.fromkeys(settings.sources, _PARTS) | outcome,
        tables.LATE: _PLACE | {"offset": _LONG},
        tables.QUARANTINE: _PLACE | {"offset": _LONG, "reason": _TEXT},
        tables.IDLE_HEARTBEATS: _PLACE | {"after_offset": _LONG, "event_time": _TIME, "decided_at": _TIME},
        tables.PROGRESS: {"batch": _LONG} | _PLACE | {"from_offset": _LONG, "until_offset": _LONG} | times | {"reason": _TEXT},
        tables.VERSIONS: {"batch": _LONG, "version": _LONG, "committed_at": _TIME},
        tables.PUBLISHED: {
            "partition": _INT,
            **dict.fromkeys(("first_seq", "last_seq"), _LONG),
            "last_event_time": _TIME,
            "last_key": _TEXT,
            "committed_at": _TIME,
        },
    }


def write_tables(settings: Settings, rows: Tables) -> None:
    """Each table that is named is there afterwards with these rows; what a row does not say is null."""
    for name, types in columns_of(settings).items():
        if name in rows:
            columns = {c: _column([row.get(c) for row in rows[name]], type_) for c, type_ in types.items()}
            write_deltalake(f"{settings.lake}/{name}", pa.table(columns))


class LakeWithoutSpark(Lake):
    """A lake that never gets a session: whatever needs Spark fails."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(None, settings)

    def _local_tables(self, location: object) -> LocalTables:
        return LocalTables(str(location))

    @property
    def spark(self) -> SparkSession:
        raise AssertionError("this needs Spark")


def parts(*offsets: int) -> list[Row]:
    return [{"offset": offset, "event_time": 0, "value": "{}"} for offset in offsets]


def _column(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    if pa.types.is_timestamp(type_):
        return pa.array([None if ms is None else ms * 1000 for ms in values], pa.int64()).cast(type_)
    return pa.array(values, type_)


# -- a lake to look at


def river_of(settings: Settings, *, partitions: int = 3, batches: int = 600, seed: int = 1) -> Tables:
    """A day of a river: the first source runs ahead for an hour, another falls silent, one partition is slow; with late and
    refused records of every kind.
    """
    rng, sources = random.Random(seed), list(settings.sources)
    began, timeout_ms = 1_768_780_800_000 + 7 * 3_600_000, settings.merge.timeout_ms
    rows: dict[str, list[Row]] = {name: [] for name in columns_of(settings)}
    offsets = {(source, p): 0 for source in sources for p in range(partitions)}
    heads = dict.fromkeys(offsets, began - 600_000)
    sequence = dict.fromkeys(range(partitions), 0)
    now = began
    for batch in range(batches):
        now += rng.choice([20_000, 60_000, 90_000, 200_000])
        hour = (now - began) // 3_600_000
        for p in range(partitions):
            for i, source in enumerate(sources):
                is_silent = i == 1 and p == 1 and 4 <= hour < 6
                delay = 3_000 + p * 5_000 + (45 * 60_000 if i == 1 and 9 <= hour < 11 else rng.randint(0, 9_000))
                if not is_silent:
                    heads[source, p] = max(heads[source, p], now - delay)
                elif batch % 10 == 0:
                    decided = min(heads[s, p] for s in sources if s != source)
                    heads[source, p] = max(heads[source, p], decided)
                    place = {"source": source, "topic": source, "partition": p, "after_offset": offsets[source, p] - 1}
                    rows[tables.IDLE_HEARTBEATS].append(place | {"event_time": decided, "decided_at": now - 500})
            clock = min(heads[source, p] for source in sources)
            if p == 0:
                merged = now + rng.choice([400, 500, 700, 1200, 3000])
                rows[tables.VERSIONS].append({"batch": batch, "version": batch + 1, "committed_at": merged})
            for i, source in enumerate(sources):
                since = offsets[source, p]
                until = since + rng.randint(0, 60) // (1 + 2 * i)
                place = {"source": source, "topic": source, "partition": p}
                times = {"head": heads[source, p], "clock": clock, "committed_at": now}
                rows[tables.PROGRESS].append({"batch": batch, **place, "from_offset": since, "until_offset": until, **times})
                for offset in range(since, until):
                    sent = min(now - 500, clock + rng.randint(0, 4_000))
                    rows[tables.bronze(source)].append({**place, "offset": offset, "kafka_timestamp": sent})
                    fate = rng.random()
                    if fate < 0.004:
                        rows[tables.LATE].append({**place, "offset": offset})
                    elif fate < 0.007:
                        reason = rng.choice(["undecodable", "undecodable", "no_key", "no_event_time", "event_time_in_future"])
                        rows[tables.QUARANTINE].append({**place, "offset": offset, "reason": reason})
                offsets[source, p] = until
            done = [_merge_record(rng, sources, p, clock - timeout_ms - n, batch, timeout_ms) for n in range(rng.randint(0, 25))]
            rows[tables.SILVER] += done
            if done:
                first, last = sequence[p], min(done, key=lambda row: int(row["event_time"]))
                sequence[p] += len(done)
                named = {"last_event_time": last["event_time"], "last_key": last["merge_key"]}
                seqs = {"partition": p, "first_seq": first, "last_seq": sequence[p] - 1}
                rows[tables.PUBLISHED].append({**seqs, **named, "committed_at": now + rng.randint(700, 9_000)})
    for p in range(partitions):
        clock = min(heads[source, p] for source in sources)
        for n in range(120):
            row = _merge_record(rng, sources, p, clock - rng.randint(0, timeout_ms), batches - 1, timeout_ms)
            rows[tables.SILVER].append(row | {"status": "open", "valid": None, "merge_key": f"open-{n}"})
    return rows


def _merge_record(rng: random.Random, sources: Sequence[str], partition: int, begins: int, batch: int, timeout_ms: int) -> Row:
    sizes = [min(400, int(rng.paretovariate(1.1))), *(int(rng.random() < 0.4) * rng.randint(1, 3) for _ in sources[1:])]
    lasts = 0 if sum(sizes) == 1 else min(timeout_ms, int(rng.expovariate(6 / timeout_ms)))
    record = {"partition": partition, "merge_key": f"{batch}-{begins}", "status": "timed_out", "batch": batch, "valid": True}
    of_sources = {source: parts(*range(size)) for source, size in zip(sources, sizes, strict=True)}
    return {**record, "event_time": begins, "last_event_time": begins + lasts, **of_sources}
