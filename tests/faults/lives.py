"""`make lives`: what can happen to a lake, one after the other, on a real broker: every ordered
pair, with a kill at every point that the second reaches and with another owner at some, then random
lives of up to twenty events.

A life is a text, such as `merged reset_back@reset.close forget`: events in their order, `@POINT`
where the process is killed that does it, `~POINT` where another owner takes the lake meanwhile
(`POINT:2` where it comes there a second time, as gold does with its second sequence), and `!37`
where the power goes at the 37th call that makes, names or syncs a file of the lake (with `POWER=1`;
with `WIRE=1`, all reach Kafka by a wire that lies). Before them
stands what kind of lake it is (`KINDS`): with `repartitioned` the orders come from another topic,
by `repartition`; with `tenants`, `schemas` or `ids` it has these, with `partitions` several; with
`corrected` late records are corrected from its beginning on. Each life ends with arrivals that
close everything, a run, `verify --full`, `rebuild`, `verify --against`, and with what must hold of
every record (`Fate.outcomes`). What fails is said with the shortest life that still fails.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import random
import re
import shutil
import sys
import threading
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    wait,
)
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from itertools import cycle, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import orjson
from confluent_kafka import OFFSET_END, Message
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient
from deltalake import DeltaTable

import tests.conftest  # noqa: F401  # quick starts
import watersmeet.lake.lease
import watersmeet.operations.evolve
import watersmeet.operations.forget
import watersmeet.running.runner
from tests.faults.command import brokered, is_on, lying, say, session_for
from tests.faults.power import CALLS, LAKES, lose_power
from tests.support.cases import SOURCES, heartbeat
from tests.support.commands import in_process
from tests.support.correction_topic import (
    CorrectionSeen,
    assert_as_the_table_says,
    assert_each_record_once,
    assert_in_sequence,
    corrections_seen,
    messages_of,
    numbers_in,
    versions,
)
from tests.support.fault_points import IN_EVOLVE, IN_FORGET, IN_RESET
from tests.support.fault_points import POINTS as OF_RUNS
from tests.support.lives import KilledError, Life, messages_in
from tests.support.timing import load
from tests.support.topics import Access, CheckedProducer, client_options, create_topics
from watersmeet.core.inputs import InputId
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.errors import WatersmeetError
from watersmeet.lake import tables
from watersmeet.lake.history import read_history
from watersmeet.lake.inputs import of_topic
from watersmeet.lake.lease import Lease
from watersmeet.lake.table_reader import Where, row_count
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import LAYERS, Run

DAY_MS = 86_400_000
KAFKA_MS = 50 * 365 * DAY_MS
"""What Kafka says of the first record."""

EVERY_MS = 10
"""What Kafka says lies so far behind what it said of the record before."""

FAR_MS = KAFKA_MS + 2 * DAY_MS
"""An event time that is refused until `max_future` is wider than a day."""

PAD = "x" * 1500
"""What makes a record too large for one of the limits."""

CUT_SHORT = "`watersmeet evolve` has it for a moment"
"""What `repartition` says where an `evolve` was killed that had taken the layers."""

OTHER_TABLES = [tables.PUBLISHED, tables.JOURNAL, tables.LEASES]

WITHOUT_SILENCE = (
    sys.executable,
    "-c",
    "import watersmeet.lake.lease as lease; lease.SILENCE_S = 0.0; "
    "from watersmeet.cli import main; main()",
)
"""A program that waits for no owner that is dead, as in `quick_lives`: the process of an owner that
was killed here goes on."""

BEGIN_MS = 10_000
STEP_MS = 1000
NUMBERS = itertools.count()


# -- faults


class Points:
    """What happens at the fault points of this process: nothing, a kill, or that another owner
    takes the lake."""

    def __init__(self) -> None:
        self.reached: list[str] = []
        self.at: str | None = None
        self.meanwhile: Callable[[], None] | None = None
        self.is_dead = self.is_done = False
        self._lock = threading.Lock()

    def __call__(self, here: str) -> None:
        """Instead of `watersmeet.faults.fault_point`."""
        if self.is_dead:
            raise KilledError(here)
        with self._lock:
            if here.startswith(OF_SEQUENCES) and here in self.reached:
                here = f"{here}:2"
            self.reached.append(here)
            is_it, self.is_done = (
                here == self.at and not self.is_done,
                self.is_done or here == self.at,
            )
        if is_it and self.meanwhile is None:
            self.is_dead = True
            raise KilledError(here)
        if is_it and self.meanwhile is not None:
            self.meanwhile()

    @contextmanager
    def armed(self, at: str | None, meanwhile: Callable[[], None] | None = None) -> Iterator[None]:
        """Inside, the first who reaches this point is killed there, or, with `meanwhile`, waits
        until that is done."""
        self.reached, self.at, self.meanwhile, self.is_dead, self.is_done = (
            [],
            at,
            meanwhile,
            False,
            False,
        )
        try:
            yield
        finally:
            self.at, self.is_dead, self.is_done = None, False, False


OF_SEQUENCES = ("gold.", "publisher.")
"""How points are named that a run reaches twice, or more often: once for each sequence."""

POINTS = Points()


@contextmanager
def quick_lives() -> Iterator[None]:
    """Inside, faults are those of `POINTS`, nobody waits for an owner that is dead, and polls are
    short."""
    release = Lease.release

    def released(lease: Lease) -> None:
        """A killed owner releases nothing."""
        if POINTS.is_dead:
            lease._ended.set()
        else:
            release(lease)

    with ExitStack() as patched:
        for name, module in list(sys.modules.items()):
            if name.startswith("watersmeet.") and hasattr(module, "fault_point"):
                patched.enter_context(patch.object(module, "fault_point", POINTS))
        patched.enter_context(patch.object(Lease, "release", released))
        patched.enter_context(patch.object(watersmeet.lake.lease, "SILENCE_S", 0.0))
        patched.enter_context(patch.object(watersmeet.running.runner, "LOOK_EVERY_S", 0.01))
        patched.enter_context(patch.object(EmbeddedEngine, "from_kafka_s", 0.05))
        yield


# -- a life


@dataclass
class Fate(Life):
    """A life, and what its records must come to."""

    seed: str = "1"
    now: int = BEGIN_MS
    """No record that was read so far has a later event time."""
    must: set[int] = field(default_factory=set)
    """The numbers of records that must be in a message at the end. Each was sent with the largest
    event time of its topic."""
    deleted: dict[str, list[Message]] = field(default_factory=dict)
    """By topic, messages that it has had and that are deleted."""
    forgotten: set[str] = field(default_factory=set)
    """Keys that the lake must not have any more."""
    ever_forgotten: set[str] = field(default_factory=set)
    """Keys that have been forgotten, perhaps by a lake that was lost then."""
    last_key: str = ""
    """A key that no other arrivals have."""
    with_id: dict[str, set[int]] = field(default_factory=dict)
    """By id the numbers of the records that have it."""
    numbers_of: dict[str, set[int]] = field(default_factory=dict)
    """By such a key."""
    corrections_topic: str | None = None
    """The topic of the corrections of this lake, once it has some."""
    last_parts: dict[str, int] = field(default_factory=dict)
    """By source, the number of a record that the last arrivals had."""
    last_large: dict[str, str] = field(default_factory=dict)
    """By source, the key of the large one among them."""
    late_at: int = BEGIN_MS
    """When the last late records were."""
    far: int = 0
    """How many records lay far ahead."""
    far_at: int = 0
    """The event time of the last of them."""
    rules: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By fingerprint a configuration that a run had."""
    gone: int = 0
    """Kafka no longer has the records with smaller numbers."""
    told: list[str] = field(default_factory=list)
    """What happened, for whoever looks at a failure."""
    origin: str | None = None
    """The topic that `repartition` writes the orders from, where it does."""
    power_until: int = 0
    """The power goes at so many calls of the commands that come next; 0: it does not."""

    @classmethod
    def begin(
        cls,
        kafka: Access,
        folder: Path,
        engine: str,
        seed: str,
        kinds: Collection[str] = (),
        by: str | None = None,
    ) -> Fate:
        """A new lake, of some `KINDS`, with records that are published and some that are open. Its
        commands reach Kafka `by` another address."""
        merge = {"timeout": "300ms", "max_future": "1d"}
        if TENANTS in kinds:
            merge |= {"tenant": "kind", "tenant_max_lag": "200ms"}
        # Where keys must lie, is another matter.
        partitions = 3 if PARTITIONS in kinds and REPARTITIONED not in kinds else 1
        life = cls.make(kafka, folder, partitions, lake=LAKES[engine], merge=merge)
        life.seed, life.river.program = seed, WITHOUT_SILENCE
        if by is not None:
            life.river.config["kafka"]["bootstrap_servers"] = by
        if SCHEMAS in kinds:
            (folder / "record.json").write_text(json.dumps(SCHEMA), encoding="utf-8")
            for source in SOURCES:
                life.river.config["sources"][source]["schema"] = "record.json"
        if IDS in kinds:
            for source in SOURCES:
                life.river.config["sources"][source]["id"] = "i"
        if CORRECTED in kinds:
            life.correct("1d")
        if REPARTITIONED in kinds:
            orders, life.origin = life.river.config["sources"]["orders"], life.river.topic("orders")
            orders |= {
                "topic": f"{life.origin}-again",
                "repartition": {"from": life.origin, "partitions": 1},
            }
        life.arrive()
        life.run()
        return life

    # -- arrivals

    @staticmethod
    def kafka_time(number: int) -> int:
        """What Kafka says of a record with a number."""
        return KAFKA_MS + number * EVERY_MS

    def put(self, source: str, *records: tuple[str | None, int], **more: Any) -> list[int]:
        """Records of keys and event times, heartbeats where there is no key; answers their
        numbers."""
        producer, numbers = _producer(self.river.kafka), []
        for key, time_ms in records:
            value, at = heartbeat(time_ms), self.kafka_time(self.sent)
            if key is not None:
                own = {"n": self.sent, "kind": "a", "i": str(self.sent)}
                value = orjson.dumps({"k": key, "ts": time_ms, **own, **more})
                numbers.append(self.sent)
                self.with_id.setdefault(more.get("i", own["i"]), set()).add(self.sent)
                self.sent += 1
            topic = (
                self.origin
                if self.origin is not None and source == "orders"
                else self.river.topic(source)
            )
            every = range(self.river.partitions)
            for partition in every if key is None else [zlib.crc32(key.encode()) % len(every)]:
                producer.produce(topic, value, partition=partition, timestamp=at)
        assert producer.flush(30) == 0
        return numbers

    def arrive(self) -> None:
        """Records of both sources that meet, some of which stay open; one that rules may exclude;
        time goes on. Where late records are corrected, there are some."""
        if self.corrections_topic is not None and self.last_parts:
            self.put_late()
        at, own = self.now + 10, f"u{self.sent}"
        self.last_key, mine = own, self.numbers_of.setdefault(own, set())
        for source in SOURCES:
            closed = self.put(source, ("a", at), ("b", at + 10), (own, at + 20))
            self.last_parts[source], self.last_large[source] = closed[0], f"large{self.sent}"
            self.put(
                source,
                (self.last_large[source], at + 30),
                kind="b",
                id=f"i{self.sent}",
                pad=PAD,
            )
            self.put(source, (None, at + 600))
            still_open = self.put(source, ("a", at + 900), ("c", at + 910))
            self.must |= {*closed, *still_open}
            mine.add(closed[-1])
        self.now += STEP_MS

    def put_late(self) -> None:
        """Records that no merge record, and that some of the last arrivals' merge records can hold,
        or that begin before these, or that repeat the id of a part or of each other."""
        now = self.now - STEP_MS
        for source in SOURCES:
            self.put(source, ("a", now - 7000), ("late", now - 6000), ("late", self.late_at + 1))
            self.put(source, ("a", now + 15), ("a", now + 5), ("late", now))
            self.put(source, ("a", now + 16), i=str(self.last_parts[source]))
            self.put(source, ("late", now - 5999), ("late", now - 5998), i=f"again{self.sent}")
            self.put(source, ("a", now + 17), pad=PAD)
            self.put(source, (self.last_large[source], now + 45), kind="b")
        self.late_at = now

    # -- commands

    @contextmanager
    def armed(self, step: Step) -> Iterator[None]:
        """Inside, at the step's point, whoever comes there is killed, or waits until another owner
        is done; or the power goes."""
        is_powerless = step.mark == POWERLESS
        self.power_until = int(step.point or 0) if is_powerless else 0
        meanwhile = self.replaced if step.mark == REPLACED else None
        with POINTS.armed(None if is_powerless else step.point, meanwhile):
            yield
        self.power_until = 0

    def do(self, *arguments: str) -> tuple[int, str]:
        """A command: its exit status, and what it says. Raises KilledError where it was killed or
        replaced."""
        self.river.write()
        if self.power_until:
            return self._do_until_power_goes(arguments)
        done = in_process(*arguments, "-c", str(self.river.file), cwd=self.river.folder)
        said = done.stdout + done.stderr
        self._told(arguments, done.returncode, said)
        return done.returncode, said

    def _do_until_power_goes(self, arguments: Sequence[str]) -> tuple[int, str]:
        outage = lose_power(self.river, self.draw("power"), self.power_until, *arguments)
        self.told += outage.described(self.power_until, arguments[0])
        if outage.status is None:
            self.power_until = 0
            raise KilledError
        self.power_until -= outage.calls
        self._told(arguments, outage.status, outage.said)
        return outage.status, outage.said

    def _told(self, what: object, status: int, said: str) -> None:
        is_over = POINTS.is_dead or (POINTS.is_done and POINTS.meanwhile is not None)
        self.told.append(f"{what}: {status} {said.strip()[-400:]}" if status else f"{what}")
        if is_over:
            raise KilledError
        assert "Traceback" not in said, said

    def follow(self, *arguments: str) -> str:
        """A command, and what its sentences advise where it is refused, until it is done."""
        for _ in range(6):
            status, said = self.do(*arguments)
            if status == 0:
                self.rules[self.river.settings.fingerprint] = copy.deepcopy(self.river.config)
                return said
            assert status == 2 or CUT_SHORT in said, f"{arguments}: {status} {said}"
            self.take_advice(said)
        raise AssertionError(f"{arguments}: refused again and again: {said}")

    def take_advice(self, said: str) -> None:
        if former := re.search(r"made by other rules \(([0-9a-f]+)\)", said):
            self._begin_with(self.rules[former[1]])
        elif "accept the loss with kafka.on_data_loss: continue" in said:
            self.configure("kafka.on_data_loss", "continue")
            self.only_from(self.gone)
        elif "publish to topics with other names" in said:
            self.new_sink()
        elif "`watersmeet evolve --apply` records it" in said or CUT_SHORT in said:
            self.follow("evolve", "--apply")
        elif until := re.search(r"until its clock has passed (\S+[ T]\S+Z)", said):
            now = copy.deepcopy(self.river.config)
            self.river.config = self._config_of_lake()
            if "with a `keep` that is long enough" in said:
                self.river.config["keep"] = now["keep"]
            passed = round(datetime.fromisoformat(until[1]).timestamp() * 1000)
            self.now = max(self.now, passed) + 5000
            for source in SOURCES:
                self.put(source, (None, self.now))
            self.run()
            self.river.config = now
        else:
            raise AssertionError(f"no advice is known for: {said}")

    def _begin_with(self, rules: dict[str, Any]) -> None:
        """Former rules first, then those of now."""
        now = self.river.config
        start = {**now["kafka"], "start": "sink"}
        self.river.config = {**copy.deepcopy(rules), "kafka": start, "publish": now["publish"]}
        self.follow("run", "--once")
        self.river.config = now
        self.follow("evolve", "--apply")

    def _config_of_lake(self) -> dict[str, Any]:
        """A configuration with the rules of the lake."""
        status, said = self.do("run", "bronze", "--once")
        if status == 0:
            return self.river.config
        for config in reversed(self.rules.values()):
            self.river.config = {**copy.deepcopy(config), "kafka": self.river.config["kafka"]}
            publish = copy.deepcopy(config["publish"])
            if publish.get("corrections"):
                publish["corrections"]["topic"] = self.corrections_topic
            self.river.config["publish"] = {**publish, "topic": self.river.sink}
            status, said = self.do("run", "bronze", "--once")
            if status == 0:
                return self.river.config
        raise AssertionError(f"the lake takes none of the configurations that it had: {said}")

    def draw(self, what: str) -> random.Random:
        """What chance says here, the same whenever this life is lived again."""
        return random.Random(f"{self.seed}/{what}/{len(self.told)}")

    def run(self, *layers: str) -> None:
        if self.origin is not None:
            self.follow("repartition", "--once")
        self.follow("run", *layers, "--once")

    def new_sink(self) -> None:
        """Everything is published again, elsewhere."""
        topic = f"{self.river.config['name']}-{next(NUMBERS)}"
        create_topics(self.river.kafka, topic, partitions=self.river.partitions)
        self.configure("publish.topic", topic)
        self.deleted.clear()
        if self.corrections_topic is not None:
            self.corrections_topic = None
            within = self.river.config["publish"].get("corrections")
            self.correct(within and within["within"])
        self.read_again()
        self.only_from(self.gone)

    def correct(self, within: str | None) -> None:
        """Have late records corrected that are late by no more than this, or none."""
        if within is None:
            self.configure("publish.corrections", None)
            return
        if self.corrections_topic is None:
            topic = f"{self.river.config['name']}-corrected-{next(NUMBERS)}"
            create_topics(self.river.kafka, topic, partitions=self.river.partitions)
            self.corrections_topic = topic
        corrections = {"topic": self.corrections_topic, "within": within}
        self.configure("publish.corrections", corrections)

    def history(self, topic: str) -> list[Message]:
        """All messages that a topic has and has had."""
        here = messages_in(self.river.kafka, topic, self.river.partitions)
        return [*self.deleted.get(topic, ()), *here]

    def numbers(self) -> Counter[int]:
        """How often each record is, and was, in a message of the sink."""
        counts = Counter[int]()
        for version in versions(self.history(self.river.sink)):
            counts.update(numbers_in(version.value, self.river.inputs))
        return counts

    def read_again(self) -> None:
        """What was refused as far ahead may be read this time, so that everything after it is
        late, or waits until all topics have come there."""
        if self.is_wide and self.far:
            self.must.clear()
            self.now = max(self.now, self.far_at + STEP_MS)

    def only_from(self, number: int) -> None:
        """Records with smaller numbers that are not out will never be."""
        out = self.numbers().keys()
        self.must = {each for each in self.must if each >= number or each in out}

    @property
    def is_wide(self) -> bool:
        return bool(self.river.config["merge"]["max_future"] != "1d")

    def replaced(self) -> None:
        """What another owner does: a whole run."""
        try:
            Run(self.river.settings, LAYERS, Reporter()).once()
        except WatersmeetError as error:
            self.told.append(f"the other owner: {error}")

    # -- judging

    def end(self) -> None:
        """Arrivals that close everything, and all that must hold."""
        for source in SOURCES:
            self.must |= set(
                self.put(
                    source,
                    ("a", self.now + 10),
                    ("last", self.now + 20),
                    (None, self.now + 100_000),
                )
            )
        self.run()
        self.outcomes()
        problems = self.river.broken_promises()
        assert problems == [], f"verify --full: {problems}"
        into = self.river.folder / f"rebuilt-{next(NUMBERS)}"
        for arguments in (("rebuild", "--into", str(into)), ("verify", "--against", str(into))):
            status, said = self.do(*arguments)
            assert status == 0, f"{arguments}: {status} {said}"

    def once(self) -> Counter[int]:
        """No record is in two messages; answers in how many each is."""
        out = self.numbers()
        twice = {number: count for number, count in out.items() if count > 1}
        assert twice == {}, f"records in two messages: {twice}"
        self.corrected()
        return out

    def corrected(self) -> list[CorrectionSeen]:
        """The topic of corrections is gapless, in order and without a repeat, and a consumer of
        both topics has each record once; answers what is in the topic."""
        if self.corrections_topic is None:
            return []
        messages = self.history(self.corrections_topic)
        both = [*versions(self.history(self.river.sink)), *versions(messages)]
        assert_each_record_once(both, self.river.inputs)
        return assert_in_sequence(corrections_seen(messages))

    def outcomes(self) -> None:
        """No record is in two messages; each that must be out is; each that the newest generation
        has read is at one place."""
        out = self.once()
        missing = self.must - out.keys()
        missing -= self._too_large() if missing else set()
        assert missing == set(), f"on time, and in no message: {self._whereabouts(missing)}"
        seen = self.corrected()
        in_messages = set(out).union(
            *(numbers_in(each.version.value, self.river.inputs) for each in seen)
        )
        reader, newest = (
            self.river.reader,
            read_history(self.river.reader, self.river.settings).generations.newest,
        )
        places: Counter[tuple[str, int, int]] = Counter()
        batches = [[("batch", ">=", newest.from_batch)]]
        merged = [[*batches[0], ("status", "in", ["open", "waiting", "timed_out"])]]
        for row in reader.select(tables.SILVER, ["partition", *SOURCES], merged).to_pylist():
            places.update(
                (source, row["partition"], part["offset"])
                for source in SOURCES
                for part in row[source]
            )
        repeated = [[*batches[0], ("is_late", "=", False)]]
        of_tables = (
            (tables.LATE, batches),
            (tables.DUPLICATES, repeated),
            (tables.QUARANTINE, ()),
        )
        for table, of_generation in of_tables:
            places_of = ["source", "partition", "offset"]
            for row in reader.select(table, places_of, of_generation).to_pylist():
                places[row["source"], row["partition"], row["offset"]] += 1
        # Rows `out` keep the key of a message that was read back, and `forget` says so.
        merges: Where = [[("status", "in", [*tables.STATUSES])]]
        for table, where in (
            (tables.SILVER, merges),
            *((tables.bronze(each), ()) for each in SOURCES),
        ):
            keys = set(reader.select(table, ["merge_key"], where)["merge_key"].to_pylist())
            assert not keys & self.forgotten, f"{table} has {keys & self.forgotten} again"
        columns, may_be_gone = (
            ["partition", "offset", "merge_key", "reason", "heartbeat", "value"],
            "keep" in self.river.config,
        )
        for ((source, topic), p), begin in newest.begin.items():
            mine = [[("partition", "=", p), ("offset", ">=", begin)]]
            for row in reader.select(
                tables.bronze(source), columns, of_topic(InputId(source, topic), mine)
            ).to_pylist():
                count, is_keyed = (
                    places[source, p, row["offset"]],
                    row["merge_key"] is not None and not row["heartbeat"],
                )
                assert count <= 1, f"{source} {row} is at {count} places"
                is_out = is_keyed and bool(self._alike(row["value"]) & in_messages)
                assert not is_keyed or count == 1 or is_out or may_be_gone, (
                    f"{source} {row} is nowhere"
                )
        if self.corrections_topic is not None and reader.exists(tables.CORRECTIONS):
            expected = messages_of(reader, newest, self.river.inputs)
            gone = None if may_be_gone else self.ever_forgotten
            assert_as_the_table_says(seen, expected, newest, gone)

    def _alike(self, value: bytes) -> set[int]:
        """The number of a record, and those of all that have its id, of which one counts."""
        record = orjson.loads(value)
        has_ids = "id" in self.river.config["sources"]["tracking"]
        return self.with_id[record["i"]] if has_ids else {record["n"]}

    def _too_large(self) -> set[int]:
        """The records in rows that a late one has made too large: a lake that begins anew may read
        it in time."""
        found = set[int]()
        is_large = [[("invalid_reason", "=", "too_large")]]
        for row in self.river.reader.select(tables.MERGED, list(SOURCES), is_large).to_pylist():
            texts = [part["value"] for source in SOURCES for part in row[source]]
            values = [text if isinstance(text, dict) else orjson.loads(text) for text in texts]
            if any(value.get("pad") for value in values):
                found |= {value["n"] for value in values}
        return found

    def _whereabouts(self, numbers: Iterable[int]) -> dict[int, list[str]]:
        """Where records are that should be elsewhere."""
        reader, found = self.river.reader, {number: list[str]() for number in sorted(numbers)}
        for source in SOURCES:
            number_at: dict[tuple[int, int], int] = {}
            columns = ["partition", "offset", "merge_key", "reason", "value"]
            for row in reader.select(tables.bronze(source), columns).to_pylist():
                number = orjson.loads(row["value"] or b"{}").get("n")
                if number in found:
                    number_at[row["partition"], row["offset"]] = number
                    found[number].append(
                        f"{source}[{row['partition']}]@{row['offset']} {row['merge_key']} "
                        f"{row['reason'] or ''}"
                    )
            columns = ["partition", "status", "valid", "invalid_reason", "batch", source]
            for row in reader.select(tables.MERGED, columns).to_pylist():
                for place in ((row["partition"], part["offset"]) for part in row[source]):
                    if place in number_at:
                        where = (
                            f"silver {row['status']} {row['valid']} {row['invalid_reason']} batch "
                            f"{row['batch']}"
                        )
                        found[number_at[place]].append(where)
            columns = ["partition", "offset", "batch"]
            for row in reader.select(tables.LATE, columns, [[("source", "=", source)]]).to_pylist():
                if (place := (row["partition"], row["offset"])) in number_at:
                    found[number_at[place]].append(f"late in batch {row['batch']}")
        return dict(list(found.items())[:4])


_producers: dict[str, CheckedProducer] = {}


def _producer(kafka: Access) -> CheckedProducer:
    key = str(kafka)
    if key not in _producers:
        _producers[key] = CheckedProducer(kafka, **{"linger.ms": 0, "log_level": 0})
    return _producers[key]


# -- what can happen


def on_time(life: Fate) -> None:
    life.arrive()
    life.run()


def unread(life: Fate) -> None:
    """Records that nothing reads yet, so that their key cannot be forgotten."""
    before = life.last_key
    life.arrive()
    life.last_key = before


def read(life: Fate) -> None:
    life.arrive()
    life.run("bronze")


def merged(life: Fate) -> None:
    """Finished, and not out."""
    life.arrive()
    life.run("bronze")
    life.run("silver")


def late(life: Fate) -> None:
    for source in SOURCES if life.last_key not in life.forgotten else ():
        life.put(source, (life.last_key, life.now - STEP_MS + 35))
    life.put_late()
    life.run()


def repeated(life: Fate) -> None:
    """Records with the same id, the first of which counts."""
    for source in SOURCES:
        own = f"again{life.sent}"
        life.must |= set(life.put(source, ("a", life.now + 10), i=own))
        life.put(source, ("a", life.now + 12), ("a", life.now + 11), i=own)
        life.put(source, (None, life.now + STEP_MS))
    life.now += STEP_MS
    life.run()


def refused(life: Fate) -> None:
    """Records without the key that the rules of the beginning want."""
    life.put("tracking", ("", life.now), id=f"r{life.sent}")
    life.run()


def far(life: Fate) -> None:
    """A record two days ahead of Kafka's time."""
    life.far += 1
    at = max(FAR_MS + life.far, life.now + 10)
    life.far_at = at
    life.put("tracking", ("far", at))
    if life.is_wide:
        life.now = at + STEP_MS  # also where the run is cut short
    life.run()


def ahead(life: Fate) -> None:
    """One source is an hour ahead of the other."""
    life.must |= set(
        life.put("tracking", ("a", life.now + 3_600_000), ("ahead", life.now + 3_600_000))
    )
    life.now += 3_600_000 + STEP_MS
    life.run()


def silence(life: Fate) -> None:
    """A source falls silent, and time goes on without it."""
    life.must |= set(life.put("tracking", ("a", life.now + 10), ("alone", life.now + 20)))
    life.put("tracking", (None, life.now + STEP_MS))
    life.now += STEP_MS
    life.run()
    life.configure("merge.idle_after", "50ms")
    settings, stopping = life.river.settings, threading.Event()
    before = row_count(life.river.reader, tables.IDLE_HEARTBEATS, ())
    status, said = 0, ""

    def watch() -> None:
        """Stops the run once it has decided."""
        reader = life.river.reader
        end = time.monotonic() + 20 * load()
        while time.monotonic() < end and not stopping.is_set() and not POINTS.is_done:
            if row_count(reader, tables.IDLE_HEARTBEATS, ()) > before:
                break
            time.sleep(0.02)
        stopping.set()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        Run(settings, LAYERS, Reporter(), stopping).until_stopped()
    except (WatersmeetError, KilledError) as error:
        status, said = 1, str(error)
    finally:
        stopping.set()
        watching.join()
        del life.river.config["merge"]["idle_after"]
        life.river.write()
    life._told("silence", status, said)
    assert status == 0, said
    assert row_count(life.river.reader, tables.IDLE_HEARTBEATS, ()) > before, (
        "nothing was decided for the silent source"
    )
    life.run()


def evolve_timeout(life: Fate) -> None:
    merge = life.river.config["merge"]
    merge.pop("window", None)
    merge["timeout"] = {"300ms": "500ms", "500ms": "200ms"}.get(merge.get("timeout", ""), "300ms")
    life.follow("evolve", "--apply")


def evolve_window(life: Fate) -> None:
    merge = life.river.config["merge"]
    merge.pop("timeout", None)
    merge["window"] = {
        "gap": "200ms",
        "max": "2s" if merge.get("window", {}).get("max") == "1s" else "1s",
    }
    life.follow("evolve", "--apply")


def evolve_key(life: Fate) -> None:
    source = life.river.config["sources"]["tracking"]
    source["key"] = {"first_of": ["id", "k"]} if source["key"] == "k" else "k"
    life.follow("evolve", "--apply")


def evolve_where(life: Fate) -> None:
    source = life.river.config["sources"]["tracking"]
    if not source.pop("where", None):
        source["where"] = {"field": "kind", "equals": "a"}
    life.follow("evolve", "--apply")


def evolve_max_future(life: Fate) -> None:
    """Wider and wider: what is in the lake stays possible."""
    merge = life.river.config["merge"]
    merge["max_future"] = (
        "60d" if merge["max_future"] == "1d" else f"{int(merge['max_future'][:-1]) + 1}d"
    )
    life.follow("evolve", "--apply")


def evolve_max_bytes(life: Fate) -> None:
    publish = life.river.config["publish"]
    publish["max_bytes"] = "8MiB" if publish.get("max_bytes") == "1KiB" else "1KiB"
    life.follow("evolve", "--apply")


def evolve_within(life: Fate) -> None:
    """Corrections of all that is late, of what is not very late, of none, and of all again."""
    corrections = life.river.config["publish"].get("corrections")
    within = None if corrections is None else corrections["within"]
    life.correct({None: "1d", "1d": "2s", "2s": None}[within])
    if "keep" in life.river.config:
        _set_keep(life)
    life.follow("evolve", "--apply")


def reset_forth(life: Fate) -> None:
    life.must &= life.numbers().keys()
    life.follow("reset", "--to", "latest", "--yes")


def reset_back(life: Fate) -> None:
    """To all that Kafka still has."""
    _jump_back(life, "earliest", life.gone)


def reset_time(life: Fate) -> None:
    """To what Kafka has had since the time of one of its records."""
    number = life.draw("time").randint(life.gone, life.sent)
    since = datetime.fromtimestamp(life.kafka_time(number) / 1000, timezone.utc)
    _jump_back(life, since.isoformat(), number)


def _jump_back(life: Fate, to: str, number: int) -> None:
    """A lake that was taken up from its sink stays: it does not know what lies before."""
    status, said = life.do("reset", "--to", to)
    if status and "does not know what lies before offset" in said:
        return
    life.read_again()
    life.only_from(number)
    life.follow("reset", "--to", to, "--yes")


def redrive(life: Fate) -> None:
    """Refused records, which the rules of now may read.

    One that was far ahead is sent only where rules take what comes after it, too: sent again, it
    has Kafka's time of now, so that it is read whatever `max_future` says, and all that comes after
    it is late.
    """
    if life.is_wide and life.far:
        life.now = max(life.now, FAR_MS + life.far + STEP_MS)
    for reason in ("no_key", *(["event_time_in_future"] if life.is_wide else [])):
        if reason == "no_key" and life.origin is not None:
            status, said = life.do("redrive", "--reason", reason, "--apply")
            assert status == 2, said
            assert "no key says where its records belong" in said
        else:
            life.follow("redrive", "--reason", reason, "--apply")
    life.run()


def forget(life: Fate) -> None:
    life.must -= life.numbers_of.get(life.last_key, set())
    life.forgotten.add(life.last_key)
    life.ever_forgotten.add(life.last_key)
    life.follow("forget", life.last_key, "--apply")


def keep(life: Fate) -> None:
    _set_keep(life)
    life.follow("maintain")


def _set_keep(life: Fate) -> None:
    """As little as can be: what may still be corrected must be there."""
    config = life.river.config
    spans = dict.fromkeys(("bronze", "silver", "late", "quarantine"), "1s")
    if config["publish"].get("corrections"):
        span = {"1d": "2d", "2s": "10s"}[config["publish"]["corrections"]["within"]]
        spans |= dict.fromkeys(spans.keys() & {"silver", "late"}, span)
    life.configure("keep", spans)


def lost_sink(life: Fate) -> None:
    """Where retention has deleted what the sink would have to say, the lake begins elsewhere."""
    _lose(life, "sink")


def lost_elsewhere(life: Fate) -> None:
    """The lake is lost, and begun anew over another sink."""
    life.new_sink()
    _lose(life, "earliest")


def _lose(life: Fate, start: str) -> None:
    life.forgotten.clear()
    life.lose(start)
    life.run()


def emptied(life: Fate) -> None:
    """Retention has deleted all that the sink and the topic of corrections had."""
    for topic in (life.river.sink, life.corrections_topic):
        _empty(life, topic)


def _empty(life: Fate, topic: str | None) -> None:
    if topic is None:
        return
    life.deleted[topic] = life.history(topic)
    _delete_all(life, topic)


def _delete_all(life: Fate, topic: str) -> None:
    admin = AdminClient(client_options(life.river.kafka))
    ends = [KafkaPartition(topic, p, OFFSET_END) for p in range(life.river.partitions)]
    for done in admin.delete_records(ends).values():
        done.result(30)


def expired(life: Fate) -> None:
    """Retention has deleted all that the sources had; the lake has read it."""
    life.run()
    for source in SOURCES:
        # What `repartition` writes must keep its last messages.
        origin = life.origin if source == "orders" else None
        _delete_all(life, origin or life.river.topic(source))
    life.gone = life.sent


def restored(life: Fate) -> None:
    """Somebody takes a table back, and forward again, as the sentence says that refuses a run."""
    names = [tables.SILVER, *map(tables.bronze, SOURCES), *OTHER_TABLES]
    name = life.draw("table").choice(names)
    table = DeltaTable(life.river.folder / "lake" / name)
    if not (last := table.version()):
        return
    table.restore(life.draw("version").randrange(last))
    status, said = life.do("run", "--once")
    if status:
        [version] = re.findall(r"RESTORE TABLE \S+ TO VERSION AS OF (\d+)", said)
        DeltaTable(life.river.folder / "lake" / name).restore(int(version))
        life.run()


def other_engine(life: Fate) -> None:
    """The lake's next batches are the other engine's."""
    life.arrive()
    mine = life.river.config["engine"]
    life.configure("engine", "embedded" if mine == "spark" else "spark")
    try:
        life.run()
    finally:
        life.configure("engine", mine)


def replaced(life: Fate) -> None:
    """Another owner takes the lake in the midst of a run (with a step that says where)."""
    life.arrive()
    life.run()


EVENTS: dict[str, Callable[[Fate], None]] = {
    event.__name__: event
    for event in (
        *(on_time, unread, read, merged, late, repeated, refused, far, ahead, silence),
        *(
            evolve_timeout,
            evolve_window,
            evolve_key,
            evolve_where,
            evolve_max_future,
            evolve_max_bytes,
            evolve_within,
        ),
        *(reset_forth, reset_back, reset_time, redrive, forget, keep),
        *(lost_sink, lost_elsewhere, emptied, expired, restored, replaced, other_engine),
    )
}

OWNED_AT = (
    "bronze.append",
    "silver.merge",
    "silver.done",
    "gold.publish",
    "publisher.commit",
    "gold.note",
)
"""Where another owner comes in between."""


KILLED, REPLACED, POWERLESS = "@~!"

NOT_POWERLESS = ("replaced", "restored")
"""What is not begun again by a start."""


class Step(NamedTuple):
    """An event, and what happens at a point of it."""

    event: str
    point: str | None = None
    mark: str = KILLED

    @classmethod
    def parse(cls, text: str) -> Step:
        event, mark, point = re.fullmatch(r"(\w+)(?:([@~!])([\w.:]+))?", text).groups()  # type: ignore[union-attr]
        return cls(event, point, mark or KILLED)

    def __str__(self) -> str:
        return self.event if self.point is None else f"{self.event}{self.mark}{self.point}"

    def perhaps_powerless(self, rng: random.Random) -> Step:
        """With `POWER=1`, the power goes in a third of the events to which nothing else happens."""
        if not is_on("POWER") or self.point or self.event in NOT_POWERLESS or rng.random() > 0.3:
            return self
        return Step(self.event, str(rng.randint(1, CALLS)), POWERLESS)


def text_of(steps: Iterable[Step]) -> str:
    return " ".join(map(str, steps))


KINDS = REPARTITIONED, TENANTS, SCHEMAS, PARTITIONS, CORRECTED, IDS = (
    "repartitioned",
    "tenants",
    "schemas",
    "partitions",
    "corrected",
    "ids",
)

KINDS_OF_CHAINS = (
    "",
    *KINDS,
    f"{CORRECTED} {IDS}",
    f"{CORRECTED} {TENANTS}",
    f"{CORRECTED} {IDS} {PARTITIONS}",
)

SCHEMA = {
    "type": "object",
    "properties": {
        **{name: {"type": "string"} for name in ("k", "kind", "id", "i", "pad")},
        **{name: {"type": "integer"} for name in ("ts", "n")},
    },
}


def kinds_of(text: str) -> list[str]:
    return [word for word in text.split() if word in KINDS]


def parse(text: str) -> list[Step]:
    return [Step.parse(word) for word in text.split() if word not in KINDS]


def take(life: Fate, step: Step) -> list[str]:
    """Has it happen, and what follows where it is cut short; answers the points that it reached."""
    life.told.append(f"-- {step}")
    if step.event == "replaced":
        step = Step(step.event, step.point or "silver.merge", REPLACED)
    event, is_cut = EVENTS[step.event], False
    with life.armed(step):
        try:
            event(life)
        except KilledError:
            is_cut = True
        reached = list(dict.fromkeys(POINTS.reached))
    if is_cut:
        life.told.append("-- cut short")
        # Nothing else completes a `forget`.
        if step.event == "forget" or life.draw("again").random() < 0.5:
            event(life)
        else:
            life.run()
    life.once()
    return reached


class Told(NamedTuple):
    """How a life went."""

    text: str
    seed: str
    problem: str | None
    reached: list[list[str]]
    """The points that each of its events has reached."""
    seconds: float


def live(
    kafka: str, folder: Path, engine: str, text: str, seed: str, kind: type[Fate] = Fate
) -> Told:
    """A life from its beginning to its end."""
    with lying(kafka, f"{seed}/{text}") as between:
        by = None if between is None else between.bootstrap_servers
        begin = partial(kind.begin, kafka, engine=engine, seed=seed, kinds=kinds_of(text), by=by)
        told = _lived(begin, folder, text, seed)
    if between is None or told.problem is None:
        return told
    return told._replace(problem="\n".join([told.problem, *between.done]))


def _lived(begin: Callable[[Path], Fate], folder: Path, text: str, seed: str) -> Told:
    began, mine, reached = (
        time.monotonic(),
        folder / f"life-{os.getpid()}-{next(NUMBERS)}",
        list[list[str]](),
    )
    life: Fate | None = None
    try:
        life = begin(mine)
        reached += [take(life, step) for step in parse(text)]
        life.end()
        problem = None
    except Exception as error:
        last = traceback.format_exception(error)[-6:]
        problem = "\n".join([*(life.told if life else []), "".join(last)[-3000:]])
    finally:
        shutil.rmtree(mine, ignore_errors=True)
    return Told(text, seed, problem, reached, time.monotonic() - began)


def shrunk(kafka: str, folder: Path, engine: str, told: Told) -> Told:
    """A shorter life that fails, too: without any of its events, or of its kills."""
    best = told
    is_shorter = True
    while is_shorter:
        is_shorter, steps = False, parse(best.text)
        shorter = [steps[n:] for n in range(len(steps) - 1, 0, -1)]
        shorter += [[*steps[:n], *steps[n + 1 :]] for n in range(len(steps))]
        shorter += [
            [*steps[:n], Step(step.event), *steps[n + 1 :]]
            for n, step in enumerate(steps)
            if step.point
        ]
        for candidate in shorter:
            found = live(
                kafka,
                folder,
                engine,
                " ".join([*kinds_of(told.text), text_of(candidate)]),
                told.seed,
            )
            if found.problem is not None:
                best, is_shorter = found, True
                break
    return best


# -- which lives there are

Pair = tuple[str, Step]
"""An event, and what happens after it."""

EVENTS_OF_A_CHAIN = 7


def every_pair() -> list[Pair]:
    return [(first, Step(second)) for first in EVENTS for second in EVENTS]


def pairs_of(text: str) -> list[Pair]:
    """The pairs of events that follow each other in a life."""
    steps = parse(text)
    return [(first.event, second) for first, second in pairwise(steps)]


def with_faults(first: str, second: str, reached: Iterable[str]) -> list[Pair]:
    """The pair, with a kill at each point that the second event has reached, or with another owner
    there."""
    if second == "replaced":
        return [(first, Step(second, point, REPLACED)) for point in OWNED_AT if point in reached]
    return [(first, Step(second, point)) for point in reached]


def chains(wanted: Iterable[Pair], rng: random.Random) -> list[str]:
    """Lives in which all of these pairs follow each other: a lake is dear to begin and to judge.
    Kinds of lakes take turns."""
    after: dict[str, list[Step]] = {}
    for first, second in wanted:
        after.setdefault(first, []).append(second)
    for some in after.values():
        rng.shuffle(some)
    found = []
    while any(after.values()):
        steps: list[Step] = []
        while len(steps) < EVENTS_OF_A_CHAIN and any(after.values()):
            is_followed = steps and after.get(steps[-1].event)
            steps.append(
                after[steps[-1].event].pop()
                if is_followed
                else Step(max(after, key=lambda each: len(after[each])))
            )
        found.append(text_of(step.perhaps_powerless(rng) for step in steps))
    rng.shuffle(found)
    return [f"{kind} {text}".lstrip() for kind, text in zip(cycle(KINDS_OF_CHAINS), found)]


POINTS_OF_RUNS = [
    *OF_RUNS,
    *(f"{point}:2" for point in OF_RUNS if point.startswith(OF_SEQUENCES)),
]


def random_life(rng: random.Random, most: int = 20) -> str:
    """Up to so many events, a third of which are killed at a point, should they reach it. A quarter
    of the lives is of each of `KINDS`, a half of those with corrections.
    """
    steps = []
    for _ in range(rng.randint(3, most)):
        event, roll = rng.choice([*EVENTS]), rng.random()
        own = {"evolve": IN_EVOLVE, "reset": IN_RESET, "forget": (IN_FORGET,)}.get(
            event.partition("_")[0], POINTS_OF_RUNS
        )
        is_cut = roll < 0.35 and event != "replaced"
        steps.append(Step(event, rng.choice(own)) if is_cut else Step(event))
    return " ".join(
        [
            *(kind for kind in KINDS if rng.random() < (0.5 if kind == CORRECTED else 0.25)),
            text_of(step.perhaps_powerless(rng) for step in steps),
        ]
    )


# -- running them

_begun: list[ExitStack] = []


def _prepare(engine: str) -> None:
    """A process that is to live lives."""
    stack = ExitStack()
    stack.enter_context(quick_lives())
    session_for(engine)
    _begun.append(stack)


@dataclass
class Lives:
    """Many lives, in some processes, until the time is over."""

    kafka: str
    folder: Path
    engine: str
    seed: int
    processes: int = 4
    told: list[Told] = field(default_factory=list)
    done: set[Pair] = field(default_factory=set)
    """The pairs of all lives that went well."""
    _faults: set[Pair] = field(default_factory=set)
    """Pairs with the faults that their second event can have."""
    _waiting: list[tuple[str, str]] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """All pairs, then all with each fault that the second can have, in an order that the seed
        says; then random lives."""
        rng, end = random.Random(self.seed), time.monotonic() + seconds
        self._wait_for(chains(every_pair(), rng))
        with ProcessPoolExecutor(
            self.processes, get_context("spawn"), _prepare, (self.engine,)
        ) as pool:
            running: set[Future[Told]] = set()
            while running or time.monotonic() < end:
                while len(running) < self.processes and time.monotonic() < end:
                    if not self._waiting and self._faults:
                        self._wait_for(chains(sorted(self._faults, key=str), rng))
                        self._faults = set()
                    text, seed = self._waiting.pop() if self._waiting else self._drawn(rng)
                    running.add(pool.submit(live, self.kafka, self.folder, self.engine, text, seed))
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                for each in ended:
                    self._note(each.result())

    def _wait_for(self, texts: Iterable[str]) -> None:
        self._waiting += [(text, str(self.seed)) for text in texts]

    def _drawn(self, rng: random.Random) -> tuple[str, str]:
        seed = f"{self.seed}/{rng.randrange(10**9)}"
        return random_life(random.Random(seed)), seed

    def _note(self, told: Told) -> None:
        """What is known of a life's pairs; where it failed and has more than one, each is tried
        alone."""
        self.told.append(told)
        say(
            f"{len(self.told)}, {told.seconds:.1f} s: "
            f"{told.text}{'' if told.problem is None else ' FAILED'}"
        )
        mine = pairs_of(told.text)
        for (first, second), reached in zip(mine, told.reached[1:], strict=False):
            if second.point is None:
                self._faults |= set(with_faults(first, second.event, reached)) - self.done
        if told.problem is None:
            self.done |= set(mine)
        elif len(mine) > 1 and told.seed == str(self.seed):
            kinds = kinds_of(told.text)
            self._wait_for(
                " ".join([*kinds, first, str(second)])
                for first, second in mine
                if (first, second) not in self.done
            )

    @property
    def events(self) -> int:
        """How many events there were."""
        return sum(len(parse(told.text)) for told in self.told)

    @property
    def failed(self) -> list[Told]:
        return [told for told in self.told if told.problem is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", default="1")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--engine", choices=[*LAKES], default="embedded")
    # More than cores, since lives wait for the broker.
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument(
        "--life",
        action="append",
        help="only this one, such as `merged reset_back@reset.close`; or several",
    )
    options = parser.parse_args()
    memory = Path("/dev/shm")
    with brokered(memory if memory.is_dir() else None) as (kafka, folder):
        if options.life is not None:
            with quick_lives():
                some = [
                    live(kafka, folder, options.engine, text, options.seed) for text in options.life
                ]
            for told in some:
                sys.stdout.write(f"{told.text}: {told.problem or 'well'} ({told.seconds:.1f} s)\n")
            return int(any(told.problem for told in some))
        began, lives = (
            time.monotonic(),
            Lives(kafka, folder, options.engine, int(options.seed), options.processes),
        )
        lives.run(options.minutes * 60)
        minutes = (time.monotonic() - began) / 60
        sys.stdout.write(
            f"seed {options.seed}, {options.engine}: {len(lives.told)} lives with {lives.events} "
            "events, "
            f"{lives.events / minutes:.0f} of these a minute; {len(lives.done)} pairs; "
            f"{len(lives.failed)} lives failed\n"
        )
        with quick_lives():
            for failed in lives.failed[:5]:
                best = shrunk(kafka, folder, options.engine, failed)
                sys.stdout.write(
                    f"\n--life '{failed.text}' --seed {failed.seed}, which is "
                    f"'{best.text}':\n{best.problem}\n"
                )
        for failed in lives.failed[5:]:
            sys.stdout.write(f"\n--life '{failed.text}' --seed {failed.seed}:\n{failed.problem}\n")
    return int(bool(lives.failed))


if __name__ == "__main__":
    sys.exit(main())
