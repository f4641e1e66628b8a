"""Random rules, one epoch after the other, between random batches: the tables are what a reader and
the merge model that know the epochs make of the input, and `verify`, `rebuild` and `verify
--against` agree.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
from confluent_kafka import Producer

from tests.support.cases import SOURCES, rules_of
from tests.support.inputs import record_of
from tests.support.rivers import EMBEDDED, River
from tests.support.topics import client_options, published
from watersmeet.audit.rebuild import rebuild, verify_against
from watersmeet.audit.verify import verify
from watersmeet.core.message import message_bytes
from watersmeet.core.model import MergeRecord, PartitionMerge, Record
from watersmeet.core.window import Window
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.location import Lake
from watersmeet.monitoring.observability import Reporter
from watersmeet.operations.evolve import evolve
from watersmeet.run import LAYERS, Run

pytestmark = pytest.mark.nightly

TEXT, INTEGER = {"type": "string"}, {"type": "integer"}
PATHS = {"ts": INTEGER, "ts2": INTEGER, "k": TEXT, "k2": TEXT, "type": TEXT}
STEP_MS = 1000
KAFKA_MS = 10_000
"""What Kafka says of every record: so `max_future` counts from there."""


VALID: dict[str, Callable[[MergeRecord], bool]] = {
    "true": lambda _: True,
    "size(orders) > 0": lambda row: bool(row.parts["orders"]),
    "size(tracking) > 1": lambda row: len(row.parts["tracking"]) > 1,
    "merge_key <> 'a'": lambda row: row.key != "a",
}
"""Predicates, and what they mean."""

VALUES: dict[str | None, Callable[[MergeRecord], bytes]] = {
    "concat(merge_key, ':', size(orders))": lambda row: (
        f"{row.key}:{len(row.parts['orders'])}".encode()
    ),
    "concat(size(tracking), ' of ', merge_key)": lambda row: (
        f"{len(row.parts['tracking'])} of {row.key}".encode()
    ),
}
"""Expressions for a message's value, and what they mean."""


TIMEOUTS = [Window(300), Window(300), Window(30), Window(700), Window(1500)]
BY_GAP = [Window(300, 900), Window(30, 300), Window(700, 700), Window(100, 5000)]


@dataclass
class Rules:
    """What a configuration says, and a reader of plain Python that follows it."""

    window: Window = TIMEOUTS[0]
    max_future_ms: int = 86_400_000
    max_bytes: int = 8_388_608
    key: str = "k"
    event_time: str = "ts"
    fields: dict[str, dict[str, str]] = field(default_factory=lambda: {"n": INTEGER, "m": INTEGER})
    required: frozenset[str] = frozenset({"m"})
    valid: str = "true"
    value: str | None = None

    def written(self, river: River) -> None:
        """Into the configuration and the schema of the orders."""
        schema = {
            "type": "object",
            "properties": {**PATHS, **self.fields},
            "required": sorted(self.required),
        }
        (river.folder / "orders.json").write_text(json.dumps(schema))
        config = river.config
        gap, longest = f"{self.window.gap_ms}ms", f"{self.window.max_ms}ms"
        window = (
            {"timeout": gap} if self.window.is_timeout else {"window": {"gap": gap, "max": longest}}
        )
        config["merge"] = {**window, "max_future": f"{self.max_future_ms}ms"}
        config["publish"] |= {"max_bytes": self.max_bytes, "valid": self.valid, "value": self.value}
        for source in config["sources"].values():
            source |= {"key": self.key, "event_time": self.event_time}
        config["sources"]["orders"]["schema"] = "orders.json"
        river.write()

    def changed(
        self, rng: random.Random, windows: Sequence[Window], *, has_expressions: bool
    ) -> Rules:
        """Some of it, as a living lake may change."""
        fields, required = dict(self.fields), self.required
        change = rng.choice(["gain", "optional", "drop", "none"])
        if change == "gain":
            fields[f"extra{len(fields)}"] = TEXT
        elif change == "optional":
            required = frozenset()
        elif change == "drop" and not required:
            fields.pop("m", None)
        return Rules(
            rng.choice(windows),
            rng.choice([86_400_000, 86_400_000, 500]),
            rng.choice([8_388_608, 400, 200]),
            rng.choice(["k", "k2"]),
            rng.choice(["ts", "ts2"]),
            fields,
            required,
            rng.choice([*VALID]) if has_expressions else "true",
            rng.choice([None, *VALUES]) if has_expressions else None,
        )

    def read(self, source: str, offset: int, value: bytes) -> Record | str:
        """The record, or why it is refused."""
        try:
            found = orjson.loads(value)
        except orjson.JSONDecodeError:
            return "undecodable"
        if source == "orders":
            known = {**PATHS, **self.fields}
            if not self.required <= found.keys() or not all(
                _fits(found[name], known[name]) for name in found if name in known
            ):
                return "undecodable"
        is_heartbeat = found.get("type") == "heartbeat"
        if not is_heartbeat and not found.get(self.key):
            return "no_key"
        if self.event_time not in found:
            return "no_event_time"
        if found[self.event_time] > KAFKA_MS + self.max_future_ms:
            return "event_time_in_future"
        return record_of(
            source, offset, found[self.event_time], None if is_heartbeat else found[self.key]
        )


def _fits(value: object, kind: dict[str, str]) -> bool:
    return type(value) is {"string": str, "integer": int}[kind["type"]]


def some_values(rng: random.Random, begin: int, count: int) -> list[bytes]:
    """Records whose two keys and two event times differ, some of which only some rules take; a
    heartbeat at the end."""
    values = []
    for _ in range(count):
        time = begin + rng.randrange(STEP_MS) - rng.choice([0, 0, 0, 50, 900])
        found: dict[str, Any] = {
            "ts": max(0, time),
            "ts2": max(0, time - rng.choice([0, 20])),
            "k": rng.choice("abé"),
        }
        found |= {"k2": rng.choice("abz"), "n": rng.randrange(1000), "m": rng.randrange(9)}
        roll = rng.random()
        if roll < 0.1:
            found["n"] = rng.choice([0.5, "text"])
        elif roll < 0.2:
            del found[rng.choice(["m", "k2", "k", "ts2"])]
        elif roll < 0.25:
            found["ts"] = found["ts2"] = KAFKA_MS + 600 + rng.randrange(100)
        elif roll < 0.4:
            found["extra2"] = rng.choice(["seen by some", 7])
        values.append(orjson.dumps(found))
    return [
        *values,
        orjson.dumps({"ts": begin + STEP_MS, "ts2": begin + STEP_MS, "type": "heartbeat", "m": 0}),
    ]


Place = tuple[int, str, int]
"""Partition, key and event time of a merge record."""


class Expected:
    """The merge models of all partitions, told the same records and rules as a lake."""

    def __init__(self, river: River, rng: random.Random, window: Window) -> None:
        self.river = river
        self.rng = rng
        self.models = {
            p: PartitionMerge(rules_of(SOURCES, *window)) for p in range(river.partitions)
        }
        self.offsets = {(source, p): 0 for source in SOURCES for p in self.models}
        self.read = dict(self.offsets)
        self.values: dict[tuple[str, int, int], bytes] = {}
        self.refused: set[tuple[object, ...]] = set()
        self.validated: dict[Place, Rules] = {}
        """The rules of the epoch that timed a merge record out."""

    def send(self, step: int) -> None:
        """Random records to every topic-partition."""
        producer = Producer(client_options(self.river.kafka))
        for (source, p), since in self.offsets.items():
            mine = some_values(self.rng, step * STEP_MS, self.rng.choice([0, 5, 15]))
            topic = self.river.config["sources"][source]["topic"]
            for offset, value in enumerate(mine, since):
                producer.produce(topic, value, partition=p, timestamp=KAFKA_MS)
                self.values[source, p, offset] = value
            self.offsets[source, p] = since + len(mine)
        assert producer.flush(30) == 0

    def merge(self, rules: Rules) -> None:
        """What was sent since the last time, by these rules."""
        for p, model in self.models.items():
            model.begin_epoch(*rules.window)
            for (source, q, offset), value in self.values.items():
                if q == p and offset >= self.read[source, q]:
                    self._arrive(p, rules.read(source, offset, value), source, offset)
            model.advance()
            for row in model.timed_out:
                self.validated.setdefault((p, row.key, row.event_time), rules)
        self.read = dict(self.offsets)

    def _arrive(self, p: int, record: Record | str, source: str, offset: int) -> None:
        if isinstance(record, str):
            self.refused.add((source, p, offset, record))
        else:
            self.models[p].arrive(record)

    def clock(self, partition: int) -> int:
        """What is closed later waits, though its epoch has closed it already."""
        return self.models[partition].clock or 0

    def check_refused_and_late(self) -> None:
        reader = self.river.reader
        rows = reader.select(tables.QUARANTINE, ["source", "partition", "offset", "reason"])
        assert Counter(tuple(row.values()) for row in rows.to_pylist()) == Counter(self.refused)
        columns = ["source", "partition", "offset", "merge_key", "event_time", "position"]
        rows = reader.select(tables.LATE, columns)
        assert Counter(tuple(row.values()) for row in rows.to_pylist()) == Counter(
            (
                late.record.input.source,
                p,
                late.record.offset,
                late.record.key,
                late.record.event_time,
                late.position,
            )
            for p, model in self.models.items()
            for late in model.late
        )

    def check_silver(self) -> None:
        told = {
            (
                p,
                row.key,
                row.event_time,
                status,
                row.due if status == "timed_out" else None,
                row.closed_at if status == "timed_out" else None,
                *(tuple(part.offset for part in sorted(mine)) for mine in row.parts.values()),
            )
            for p, model in self.models.items()
            for status, mine_of in (("open", model.open.values()), ("timed_out", model.timed_out))
            for row in mine_of
        }
        columns = ["partition", "merge_key", "event_time", "status", "due", "closed_at", *SOURCES]
        rows = self.river.reader.select(tables.MERGED, columns).to_pylist()
        assert len(rows) == len(told)
        assert {
            (
                row["partition"],
                row["merge_key"],
                row["event_time"],
                row["status"],
                row["due"] if row["status"] == "timed_out" else None,
                row["closed_at"],
                *(tuple(part["offset"] for part in row[source]) for source in SOURCES),
            )
            for row in rows
        } == told

    def check_published(self) -> None:
        """The messages are of valid rows alone, in order; nothing else is missing than what is too
        large."""
        finished: dict[Place, MergeRecord] = {
            (p, row.key, row.event_time): row
            for p, model in self.models.items()
            for row in model.timed_out
        }
        out = published(self.river.kafka, self.river.sink, self.river.partitions)
        places = [(m.partition, m.key.decode(), int(m.id.split("/")[1])) for m in out]
        for message, place in zip(out, places, strict=True):
            rules = self.validated[place]
            size = message_bytes(len(message.value or b""), len(message.key), 0)
            assert size <= rules.max_bytes, "judged by the epoch that timed it out"
            if rules.value is not None:
                assert message.value == VALUES[rules.value](finished[place])
        columns = ["partition", "valid", "closed_at"]
        rows = self.river.reader.select(tables.MERGED, columns).to_pylist()
        closed = [
            row for row in rows if row["valid"] and row["closed_at"] <= self.clock(row["partition"])
        ]
        assert len(set(places)) == len(out) == len(closed)
        assert places == sorted(places, key=lambda place: (place[0], finished[place].place()))
        valid = {
            place
            for place, row in finished.items()
            if VALID[self.validated[place].valid](row) and row.closed_at <= self.clock(place[0])
        }
        assert valid.issuperset(places)
        assert all(
            self.validated[place].max_bytes < 8_388_608 for place in valid.difference(places)
        ), "nothing else is too large"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "windows", "has_expressions"),
    [
        (0, TIMEOUTS, False),
        (3, TIMEOUTS, True),
        (4, BY_GAP, False),
        (5, [*TIMEOUTS, *BY_GAP], False),
    ],
    ids=["timeouts", "expressions", "windows", "both"],
)
def test_every_batch_follows_the_rules_of_its_own_epoch(
    kafka: str, tmp_path: Path, seed: int, windows: Sequence[Window], has_expressions: bool
) -> None:
    rng = random.Random(seed)
    river = River.make(kafka, tmp_path, f"random-{seed}", lake=EMBEDDED)
    rules = Rules(windows[0])
    expected = Expected(river, rng, rules.window)
    for step in range(6):
        rules.written(river)
        if step:
            evolve(river.reader, river.settings, Reporter())
        expected.send(step)
        Run(river.settings, LAYERS, Reporter()).once()
        expected.merge(rules)
        rules = rules.changed(rng, windows, has_expressions=has_expressions)
    expected.check_refused_and_late()
    expected.check_silver()
    expected.check_published()
    settings, reader = river.settings, river.reader
    assert verify(reader, settings, full=True)["problems"] == []
    into = tmp_path / "again"
    rebuild(reader, settings, into)
    there = DeltaRsReader(Lake(settings.model_copy(update={"lake": str(into)})))
    assert verify_against(reader, there, settings, into)["problems"] == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "windows", [BY_GAP[:1], [*TIMEOUTS, *BY_GAP]], ids=["one window", "changing"]
)
def test_a_lake_that_is_lost_again_and_again_publishes_through_all_windows(
    kafka: str, tmp_path: Path, windows: Sequence[Window]
) -> None:
    """The sink has what one merge makes that was told every change, and never lost anything.

    A loss soon after a change would be refused, and a change soon after a loss: so there are steps
    without either between them, which take longer than any window here.
    """
    windows = [window for window in windows if window.longest_ms < 2 * STEP_MS]
    rng = random.Random(7)
    river = River.make(kafka, tmp_path, f"lost-windows-{len(windows)}", lake=EMBEDDED)
    window, models = (
        windows[0],
        {p: PartitionMerge(rules_of(SOURCES, *windows[0])) for p in range(river.partitions)},
    )
    offsets = {(source, p): 0 for source in SOURCES for p in models}
    for step in range(16):
        if step in (1, 2, 8, 9, 15):
            window = rng.choice(windows)
            Rules(window).written(river)
            evolve(river.reader, river.settings, Reporter())
        elif not step:
            Rules(window).written(river)
        producer = Producer(client_options(kafka))
        for (source, p), since in offsets.items():
            count = rng.choice([5, 15, 30])
            mine = [
                ({"ts": step * STEP_MS + rng.randrange(STEP_MS), "k": rng.choice("abcdefghé")})
                for _ in range(count)
            ]
            mine.append({"ts": (step + 1) * STEP_MS, "type": "heartbeat"})
            for offset, found in enumerate(mine, since):
                content = orjson.dumps({**found, "n": 1, "m": 1})
                producer.produce(
                    river.config["sources"][source]["topic"],
                    content,
                    partition=p,
                    timestamp=KAFKA_MS,
                )
                models[p].arrive(record_of(source, offset, found["ts"], found.get("k")))  # type: ignore[arg-type]
            offsets[source, p] = since + len(mine)
        assert producer.flush(30) == 0
        Run(river.settings, LAYERS, Reporter()).once()
        for model in models.values():
            model.begin_epoch(*window)
            model.advance()
        if step in (5, 12):
            shutil.rmtree(river.folder / "lake")
            river.config["kafka"]["start"] = "sink"
            river.write()
    out = [
        (m.partition, int(m.id.split("/")[1]), m.key.decode())
        for m in published(river.kafka, river.sink, river.partitions)
    ]
    expected = [
        (p, row.event_time, row.key)
        for p, model in models.items()
        for row in model.published_order()
        if row.closed_at <= (model.clock or 0)
    ]
    assert out == expected
    assert len(out) > 100
    assert verify(river.reader, river.settings, full=True)["problems"] == []
