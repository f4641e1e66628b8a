"""Small lakes for the report, written by delta-rs without Spark: the tables' rows as plain values,
times in epoch ms."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import write_deltalake

from watersmeet.core.types import TIME
from watersmeet.lake.location import Lake
from watersmeet.lake.published import topic_columns
from watersmeet.lake.tables import (
    IDLE_HEARTBEATS,
    LATE,
    PROGRESS,
    PUBLISHED,
    QUARANTINE,
    SILVER,
    bronze,
)
from watersmeet.settings import Settings

Row = dict[str, Any]
Tables = Mapping[str, Sequence[Row]]

REASONS = ["undecodable", "undecodable", "no_key", "no_event_time", "event_time_in_future"]
"""Reasons of refusal; one is twice as frequent."""


def settings_for(
    folder: Path, sources: Sequence[str] = ("tracking", "orders"), timeout: str = "100ms"
) -> Settings:
    values = {
        "name": "shop",
        "lake": str(folder / "lake"),
        "durable": False,
        "kafka": {"bootstrap_servers": "127.0.0.1:1"},
        "sources": {name: {"topic": name, "key": "k", "event_time": "ts"} for name in sources},
        "merge": {"timeout": timeout},
        "publish": {"topic": "merged"},
    }
    return Settings.model_validate(values, context={"folder": folder})


def write_tables(settings: Settings, rows: Tables) -> None:
    """Appends to each table, or the table of each view, that is named; what a row does not say is
    null."""
    lake = Lake(settings)
    for name, table_rows in rows.items():
        if name == QUARANTINE:
            for source in settings.sources:
                _append(lake, bronze(source), [r for r in table_rows if r["source"] == source])
        elif name in lake.views:
            [(_, _, status)] = lake.views[name].parts[0].where
            _append(lake, SILVER, [{**row, "status": status} for row in table_rows])
        else:
            _append(lake, name, table_rows)


def _append(lake: Lake, name: str, rows: Sequence[Row]) -> None:
    schema = lake.schema(name)
    columns = [_column([row.get(field.name) for row in rows], field.type) for field in schema]
    write_deltalake(lake.address(name), pa.table(columns, schema=schema), mode="append")


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
    day = _Day(settings, range(partitions), random.Random(seed))
    for batch in range(batches):
        day.now += day.rng.choice([20_000, 60_000, 90_000, 200_000])
        for p in range(partitions):
            day.arrive(batch, p)
            clock = day.clock(p)
            for i, source in enumerate(day.sources):
                day.read(batch, i, source, p, clock)
            day.publish(p, day.time_out(batch, p, clock))
    for p in range(partitions):
        day.leave_open(batches - 1, p)
    return day.rows


class _Day:
    """The tables as they grow, batch by batch; `now` is the time of the batch."""

    def __init__(self, settings: Settings, partitions: Sequence[int], rng: random.Random) -> None:
        self.rng = rng
        self.sources = list(settings.sources)
        self.timeout_ms = settings.merge.window.gap_ms
        self.began = self.now = 1_768_780_800_000 + 7 * 3_600_000
        names = [*map(bronze, self.sources), SILVER, LATE, QUARANTINE, IDLE_HEARTBEATS, PROGRESS]
        self.rows: dict[str, list[Row]] = {name: [] for name in [*names, PUBLISHED]}
        self.offsets = {(source, p): 0 for source in self.sources for p in partitions}
        self.heads = dict.fromkeys(self.offsets, self.began - 600_000)
        self.clocks = dict.fromkeys(partitions, self.began - 600_000)
        self.sequence = dict.fromkeys(partitions, 0)

    def clock(self, p: int) -> int:
        return min(self.heads[source, p] for source in self.sources)

    def arrive(self, batch: int, p: int) -> None:
        """Move the heads of a partition, or decide that a source is idle."""
        hour = (self.now - self.began) // 3_600_000
        for i, source in enumerate(self.sources):
            is_behind = i == 1 and 9 <= hour < 11
            delay = 3_000 + p * 5_000
            delay += 45 * 60_000 if is_behind else self.rng.randint(0, 9_000)
            if not (i == 1 and p == 1 and 4 <= hour < 6):
                self.heads[source, p] = max(self.heads[source, p], self.now - delay)
            elif batch % 10 == 0:
                self._decide_idle(source, p)

    def _decide_idle(self, source: str, p: int) -> None:
        decided = min(self.heads[s, p] for s in self.sources if s != source)
        self.heads[source, p] = max(self.heads[source, p], decided)
        row = {
            "source": source,
            "topic": source,
            "partition": p,
            "after_offset": self.offsets[source, p] - 1,
            "event_time": decided,
            "decided_at": self.now - 500,
        }
        self.rows[IDLE_HEARTBEATS].append(row)

    def read(self, batch: int, i: int, source: str, p: int, clock: int) -> None:
        """The next records of a topic-partition; the sources have fewer, one after the other."""
        since = self.offsets[source, p]
        until = since + self.rng.randint(0, 60) // (1 + 2 * i)
        place = {"source": source, "topic": source, "partition": p}
        times = {
            "head": self.heads[source, p],
            "clock": clock,
            "committed_at": self.now,
        }
        self.rows[PROGRESS].append(
            {"batch": batch, **place, "from_offset": since, "until_offset": until, **times}
        )
        for offset in range(since, until):
            sent = min(self.now - 500, clock + self.rng.randint(0, 4_000))
            row = {**place, "offset": offset, "kafka_timestamp": sent}
            fate = self.rng.random()
            if 0.004 <= fate < 0.007:
                self.rows[QUARANTINE].append({**row, "reason": self.rng.choice(REASONS)})
                continue
            self.rows[bronze(source)].append(row)
            if fate < 0.004:
                self.rows[LATE].append({**place, "offset": offset})
        self.offsets[source, p] = until

    def time_out(self, batch: int, p: int, clock: int) -> list[Row]:
        """What times out begins between what did with the clock before and what does with this
        one."""
        beyond = range(max(self.clocks[p] - self.timeout_ms, 0), clock - self.timeout_ms)
        begins = self.rng.sample(beyond, min(len(beyond), self.rng.randint(0, 25)))
        done = [
            _merge_record(self.rng, self.sources, p, time, batch, self.timeout_ms)
            for time in begins
        ]
        self.clocks[p] = clock
        self.rows[SILVER] += done
        return done

    def publish(self, p: int, done: Sequence[Row]) -> None:
        if not done:
            return
        first, last = self.sequence[p], max(done, key=lambda row: int(row["event_time"]))
        self.sequence[p] += len(done)
        row = {
            "partition": p,
            "first_seq": first,
            "last_seq": self.sequence[p] - 1,
            "last_event_time": last["event_time"],
            "last_key": last["merge_key"],
            "last_closed_at": last["event_time"] + self.timeout_ms,
            "last_due": last["event_time"] + self.timeout_ms - 1,
            "last_tenant": "",
            **topic_columns("merged (1)"),
            "committed_at": self.now + self.rng.randint(700, 9_000),
        }
        self.rows[PUBLISHED].append(row)

    def leave_open(self, batch: int, p: int) -> None:
        clock = self.clock(p)
        for n in range(120):
            begins = clock - self.rng.randint(0, self.timeout_ms)
            row = _merge_record(self.rng, self.sources, p, begins, batch, self.timeout_ms)
            self.rows[SILVER].append(
                row | {"status": "open", "valid": None, "merge_key": f"open-{n}"}
            )


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
