"""Small lakes for the report, written by delta-rs without Spark: the tables' rows as plain values,
times in epoch ms."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import write_deltalake

from pipelines.core.types import TIME
from pipelines.lake.location import Lake
from pipelines.lake.tables import (
    IDLE_HEARTBEATS,
    LATE,
    PROGRESS,
    PUBLISHED,
    QUARANTINE,
    SILVER,
    bronze,
)
from pipelines.settings import Settings

Row = dict[str, Any]
Tables = Mapping[str, Sequence[Row]]


def settings_for(
    folder: Path, sources: Sequence[str] = ("tracking", "orders"), timeout: str = "100ms"
) -> Settings:
    values = {
        "name": "shop",
        "lake": str(folder / "lake"),
        "kafka": {"bootstrap_servers": "127.0.0.1:1"},
        "sources": {name: {"topic": name, "key": "k", "event_time": "ts"} for name in sources},
        "merge": {"timeout": timeout},
        "publish": {"topic": "merged"},
    }
    return Settings.model_validate(values, context={"folder": folder})


def write_tables(settings: Settings, rows: Tables) -> None:
    """Appends to each table that is named; what a row does not say is null."""
    layout = Lake(settings).layout
    for name, table_rows in rows.items():
        schema = layout[name].schema
        columns = [
            _column([row.get(field.name) for row in table_rows], field.type) for field in schema
        ]
        write_deltalake(f"{settings.lake}/{name}", pa.table(columns, schema=schema), mode="append")


def parts(*offsets: int) -> list[Row]:
    return [{"offset": offset, "event_time": 0, "value": "{}"} for offset in offsets]


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if kind == TIME:
        return pa.array([None if ms is None else ms * 1000 for ms in values], pa.int64()).cast(kind)
    return pa.array(values, kind)


# -- a lake to look at


def river_of(
    settings: Settings, *, partitions: int = 3, batches: int = 600, seed: int = 1
) -> Tables:
    """A day of a river: the first source runs ahead for an hour, another falls silent, one
    partition is slow; with late and refused records of every kind.
    """
    rng, sources = random.Random(seed), list(settings.sources)
    began, timeout_ms = 1_768_780_800_000 + 7 * 3_600_000, settings.merge.window.gap_ms
    names = [*map(bronze, sources), SILVER, LATE, QUARANTINE, IDLE_HEARTBEATS, PROGRESS, PUBLISHED]
    rows: dict[str, list[Row]] = {name: [] for name in names}
    offsets = {(source, p): 0 for source in sources for p in range(partitions)}
    heads = dict.fromkeys(offsets, began - 600_000)
    sequence, clocks = (
        dict.fromkeys(range(partitions), 0),
        dict.fromkeys(range(partitions), began - 600_000),
    )
    now = began
    for batch in range(batches):
        now += rng.choice([20_000, 60_000, 90_000, 200_000])
        hour = (now - began) // 3_600_000
        for p in range(partitions):
            for i, source in enumerate(sources):
                is_silent = i == 1 and p == 1 and 4 <= hour < 6
                delay = (
                    3_000
                    + p * 5_000
                    + (45 * 60_000 if i == 1 and 9 <= hour < 11 else rng.randint(0, 9_000))
                )
                if not is_silent:
                    heads[source, p] = max(heads[source, p], now - delay)
                elif batch % 10 == 0:
                    decided = min(heads[s, p] for s in sources if s != source)
                    heads[source, p] = max(heads[source, p], decided)
                    place = {
                        "source": source,
                        "topic": source,
                        "partition": p,
                        "after_offset": offsets[source, p] - 1,
                    }
                    rows[IDLE_HEARTBEATS].append(
                        place | {"event_time": decided, "decided_at": now - 500}
                    )
            clock = min(heads[source, p] for source in sources)
            for i, source in enumerate(sources):
                since = offsets[source, p]
                until = since + rng.randint(0, 60) // (1 + 2 * i)
                place = {"source": source, "topic": source, "partition": p}
                times = {
                    "head": heads[source, p],
                    "clock": clock,
                    "committed_at": now,
                    "silver_version": batch,
                }
                rows[PROGRESS].append(
                    {"batch": batch, **place, "from_offset": since, "until_offset": until, **times}
                )
                for offset in range(since, until):
                    sent = min(now - 500, clock + rng.randint(0, 4_000))
                    rows[bronze(source)].append(
                        {**place, "offset": offset, "kafka_timestamp": sent}
                    )
                    fate = rng.random()
                    if fate < 0.004:
                        rows[LATE].append({**place, "offset": offset})
                    elif fate < 0.007:
                        reason = rng.choice(
                            [
                                "undecodable",
                                "undecodable",
                                "no_key",
                                "no_event_time",
                                "event_time_in_future",
                            ]
                        )
                        rows[QUARANTINE].append({**place, "offset": offset, "reason": reason})
                offsets[source, p] = until
            # What times out begins between what did with the clock before and what does with this
            # one.
            beyond = range(max(clocks[p] - timeout_ms, 0), clock - timeout_ms)
            begins = rng.sample(beyond, min(len(beyond), rng.randint(0, 25)))
            done = [_merge_record(rng, sources, p, time, batch, timeout_ms) for time in begins]
            clocks[p] = clock
            rows[SILVER] += done
            if done:
                first, last = sequence[p], max(done, key=lambda row: int(row["event_time"]))
                sequence[p] += len(done)
                named = {"last_event_time": last["event_time"], "last_key": last["merge_key"]}
                seqs = {"partition": p, "first_seq": first, "last_seq": sequence[p] - 1}
                rows[PUBLISHED].append(
                    {**seqs, **named, "committed_at": now + rng.randint(700, 9_000)}
                )
    for p in range(partitions):
        clock = min(heads[source, p] for source in sources)
        for n in range(120):
            row = _merge_record(
                rng, sources, p, clock - rng.randint(0, timeout_ms), batches - 1, timeout_ms
            )
            rows[SILVER].append(row | {"status": "open", "valid": None, "merge_key": f"open-{n}"})
    return rows


def _merge_record(
    rng: random.Random,
    sources: Sequence[str],
    partition: int,
    begins: int,
    batch: int,
    timeout_ms: int,
) -> Row:
    sizes = [
        min(400, int(rng.paretovariate(1.1))),
        *(int(rng.random() < 0.4) * rng.randint(1, 3) for _ in sources[1:]),
    ]
    lasts = 0 if sum(sizes) == 1 else min(timeout_ms, int(rng.expovariate(6 / timeout_ms)))
    record = {
        "partition": partition,
        "merge_key": f"{batch}-{begins}",
        "status": "timed_out",
        "batch": batch,
        "valid": True,
    }
    of_sources = {source: parts(*range(size)) for source, size in zip(sources, sizes, strict=True)}
    return {**record, "event_time": begins, "last_event_time": begins + lasts, **of_sources}
