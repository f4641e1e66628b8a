"""`make hostile`: whoever may write to a topic, answer as a registry, or connect to a port does the
worst, and a run goes on.

A broker, a registry and `watersmeet run` are real. Records of every kind that may hurt and random
changes of good ones arrive beside good ones; the registry trickles, floods and falls silent for
seconds; hundreds of connections are held open; and SIGTERM comes at any moment. The seed decides
what comes; how much of it, the time. At the end an undisturbed run takes what is left.
"""

from __future__ import annotations

import argparse
import random
import signal
import socket
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

import tests.conftest  # noqa: F401  # quick starts
from tests.faults import hostile_expressions
from tests.faults.command import brokered, say
from tests.support.cases import SOURCES, expected_late, expected_messages, keyed
from tests.support.commands import here
from tests.support.hostile_records import (
    HEAVY,
    HOSTILE_SCHEMAS,
    MIB,
    READER,
    WRITERS,
    Hostile,
    Make,
    Producers,
)
from tests.support.hostile_registry import HostileGate
from tests.support.lakes import late_of
from tests.support.memory import JVM, PYTHON, Peaks
from tests.support.raw_producer import produce_raw
from tests.support.registry import TestRegistry
from tests.support.repeating import repeating
from tests.support.rivers import (
    EMBEDDED,
    FOLDER,
    River,
    RunProcess,
    batches_of,
    committed_batches,
)
from tests.support.timing import load
from tests.support.topics import (
    ANY_TIME,
    CheckedProducer,
    create_topics,
    dead_letters,
    published,
)
from watersmeet.core import reading
from watersmeet.dev.processes import free_port
from watersmeet.lake import tables
from watersmeet.operations.redrive import Redrive

LAKES = {"embedded": EMBEDDED, "spark": FOLDER}

MAX_RECORD_BYTES = {"embedded": reading.MAX_RECORD_BYTES, "spark": 4 * 2**20}
"""By engine, what a record may have (`kafka.max_record_bytes`): the default; with Spark, whose JVM
has copies of it, too, less."""

MEMORY_BYTES = {PYTHON: 2048 * 2**20, JVM: 3072 * 2**20}
"""What all processes of a run may have together, and so each of them: Python's on both engines;
with Spark, its JVM, whose heap has 2 GiB."""

STOP_S = 10.0
"""Within that a run must end when it is asked to, on a machine that has a processor for whoever
wants one."""

STARTING_S = 3.0
"""Until then a process may not have come as far as to listen to signals."""

CONNECTIONS = 200

LATE_OF_A_KEY = 300
MAX_VERSIONS = 100
"""Of a merge record."""

OF_EXPRESSIONS = 0.25
"""The share of the time in which expressions are evaluated."""

Attack = Callable[["Siege"], None]

ATTACKS: Final[dict[Attack, float]] = {}
"""What goes on beside a run, and how often of all that does."""


def attack(often: float) -> Callable[[Attack], Attack]:
    """A method of `Siege` that does one thing to a run, and returns."""

    def add(method: Attack) -> Attack:
        ATTACKS[method] = often
        return method

    return add


@dataclass
class Siege:
    """A river whose records, registry and connections are hostile."""

    engine: str
    river: River
    gate: HostileGate
    producers: Producers
    rng: random.Random
    port: int
    sent: dict[tuple[int, str, int], Hostile] = field(default_factory=dict)
    """What is at each offset of a partition of an input."""
    problems: list[str] = field(default_factory=list)
    peaks: Peaks = field(default_factory=Peaks)
    longest_stop_s: float = 0.0
    stops: int = 0
    _connections: list[socket.socket] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """Sends, attacks and stops for so long, then lets a run take what is left."""
        for heavy in HEAVY:
            self.flow(heavy)
        end = time.monotonic() + seconds
        while not self.problems and (left := end - time.monotonic()) > 0:
            self._suffer(min(left, self.rng.uniform(1, 25 if self.engine == "embedded" else 60)))
        self.gate.mood = None
        last = self.river.run("--once")
        with self._watched(last):
            if last.wait() != 0:
                self.problems.append(f"the last run failed: {last.said()}")

    def _suffer(self, seconds: float) -> None:
        """A run that is asked to stop after some seconds in which all goes on."""
        self.flow(self.rng.choice(HEAVY) if self.rng.random() < 0.25 else None)
        process, began = self.river.run(), time.monotonic()
        with self._watched(process):
            while (lasted := time.monotonic() - began) < seconds and process.process.poll() is None:
                self._attack()
                time.sleep(min(self.rng.uniform(0, 2), max(0.0, seconds - lasted)))
            if process.process.poll() is not None:
                self.problems.append(f"the run ended by itself: {process.said()}")
                return
            asked, slower = time.monotonic(), load()
            process.process.terminate()
            code, took_s = process.wait(), time.monotonic() - asked
        self.stops, self.longest_stop_s = self.stops + 1, max(self.longest_stop_s, took_s)
        say(
            f"{self.engine}: stop {self.stops} after {lasted:.0f} s, in {took_s:.1f} s at "
            f"{slower:.1f} of load; "
            f"the registry: {self.gate.mood or 'well'}"
        )
        if code != 0 and not (code == -signal.SIGTERM and lasted < STARTING_S * slower):
            self.problems.append(
                f"the run that was asked to stop ended with {code}: {process.said()}"
            )
        if took_s > STOP_S * slower:
            self.problems.append(
                f"a stop took {took_s:.1f} s after {lasted:.0f} s of a run, and the registry "
                f"{self.gate.mood}"
            )

    def _attack(self) -> None:
        [method] = self.rng.choices([*ATTACKS], [*ATTACKS.values()])
        method(self)

    @attack(0.6)
    def _flow(self) -> None:
        self.flow()

    @attack(0.15)
    def _change_mood(self) -> None:
        self.gate.mood = self.rng.choice([None, *self.gate.moods])

    @attack(0.15)
    def _connect(self) -> None:
        """Holds connections to the metrics open, instead of those before."""
        for each in self._connections:
            each.close()
        self._connections = []
        for _ in range(CONNECTIONS):
            with suppress(OSError):  # there is no run, or it has had enough
                self._connections.append(socket.create_connection(("127.0.0.1", self.port), 1))
                self._connections[-1].sendall(b"G")
        if self._connections and self.rng.random() < 0.5:
            self._scrape()

    def _scrape(self) -> None:
        """Asks for the metrics, which clients that send a byte now and then must not keep away."""
        for _ in range(5):
            with suppress(OSError):
                url = f"http://127.0.0.1:{self.port}/metrics"
                with urllib.request.urlopen(url, timeout=10) as answer:
                    if b"watersmeet_build_info" in answer.read():
                        return
            for each in self._connections:
                with suppress(OSError):
                    each.sendall(b"E")
            time.sleep(0.5)
        self.problems.append("nobody answers for the metrics")

    @attack(0.05)
    def _send_late(self) -> None:
        """Sends many late records of one key, which all belong to one merge record."""
        before = self.river.chunks * 1000 - 500
        if before > 0:
            values = (keyed("late", before, n=n) for n in range(LATE_OF_A_KEY))
            partition = self.rng.randrange(self.river.partitions)
            self._send("tracking", partition, [Hostile(value, value) for value in values])

    @attack(0.05)
    def _send_copies(self) -> None:
        """Sends small records, each of which says that it is a large one of its partition, sent
        again."""
        partition, begin = self.rng.randrange(self.river.partitions), self.river.chunks * 1000
        large = [
            (source, offset)
            for (p, source, offset), record in self.sent.items()
            if p == partition and record.reason is None and len(record.value or b"") > MIB
        ]
        for source, offset in large:
            record = self.producers.copy(source, begin, partition, offset)
            self._send(source, partition, [record])

    @attack(0.1)
    def _ask(self) -> None:
        if self.river.reader.exists(tables.PROGRESS):
            answer = orjson.loads(here(self.river, "status", "--json"))
            if len(answer["partitions"]) != self.river.partitions:
                self.problems.append(f"status answers {answer}")

    # -- records

    def flow(self, heavy: tuple[str, Make] | None = None) -> None:
        """Sends the next stretch of event time: good records, late ones, bad ones among them, and a
        heartbeat at its end; of one source and partition a heavy one, where one is given."""
        rng, river = self.rng, self.river
        begin, river.chunks = river.chunks * 1000, river.chunks + 1
        with_heavy = (heavy[0], rng.randrange(river.partitions)) if heavy else None
        for source in SOURCES:
            for partition in range(river.partitions):
                records = [self._record(source, begin) for _ in range(12)]
                if heavy and (source, partition) == with_heavy:
                    record = heavy[1](self.producers, source, begin)
                    records.insert(rng.randrange(len(records)), record)
                self._send(source, partition, [*records, self.producers.beat(source, begin + 1000)])

    def _record(self, source: str, begin: int) -> Hostile:
        at = max(0, begin + self.rng.randrange(1000) - self.rng.choice([0, 0, 0, 0, 50, 900]))
        if self.rng.random() < 0.3:
            return self.producers.bad(source, begin)
        return self.producers.good(source, at)

    def _send(self, source: str, partition: int, records: list[Hostile]) -> None:
        """Sends records to the end of a topic-partition, in this order."""
        topic, case = self.river.topic(source), self.river.cases[partition]
        for record in records:
            offset = len(case.values[source])
            self.sent[partition, source, offset] = record
            case.values[source].append(record.told)
            case.arrivals.append(source)
            if record.is_raw:
                at_ms = (
                    time.time_ns() // 1_000_000 if record.timestamp is None else record.timestamp
                )
                headers = list(record.headers)
                key, value = record.key or b"", record.value or b""
                produce_raw(
                    str(self.river.kafka),
                    topic,
                    value,
                    headers,
                    key=key,
                    timestamp=at_ms,
                    partition=partition,
                )
            else:
                self._produce(topic, partition, record)

    def _produce(self, topic: str, partition: int, record: Hostile) -> None:
        producer = _producer(str(self.river.kafka), record.codec)
        producer.produce(
            topic,
            record.value,
            record.key,
            partition,
            headers=[(name.decode(), value) for name, value in record.headers],
        )
        assert producer.flush(60) == 0

    # -- judging

    @contextmanager
    def _watched(self, process: RunProcess) -> Iterator[None]:
        """Looks at the memory of a run, all of its processes together, until the end."""

        with repeating(lambda: self.peaks.look(process.family()), 0.1):
            yield

    def judge(self) -> list[str]:
        """What is otherwise than it must be, in words."""
        river, problems = self.river, self.problems
        problems += self.peaks.problems(MEMORY_BYTES)
        problems += self._differing(
            {
                "messages": (
                    published(river.kafka, river.sink, river.partitions),
                    expected_messages(river.cases),
                ),
                "late": (late_of(river.reader), self._expected_late()),
                "quarantine": (self._quarantined(), self._expected_refused()),
                "dead letters": (self._letters(), self._expected_refused()),
                "progress": (batches_of(river.reader), committed_batches(river.reader)),
            }
        )
        refused = Redrive(river.reader, river.settings, "undecodable").run(apply=False)["records"]
        problems += [f"{row} counts as redriven" for row in refused if row["before"]]
        verified = here_or_problem(lambda: here(river, "verify", "--full"))
        return [*problems, *([verified] if verified else [])]

    def _differing(self, compared: dict[str, tuple[Any, Any]]) -> list[str]:
        found = []
        for name, rows in compared.items():
            seen, expected = (Counter(map(repr, each)) for each in rows)
            missing, more = expected - seen, seen - expected
            if missing or more:
                some = [text[:300] for text in (*[*missing][:2], *[*more][:2])]
                found.append(
                    f"{name}: {missing.total()} missing, {more.total()} too many, of "
                    f"{expected.total()}: {some}"
                )
        return found

    def _expected_late(self) -> list[tuple[object, ...]]:
        """Each with its value as it was sent."""
        return [
            (*row[:-1], self.sent[row[0], row[1], row[2]].value)  # type: ignore[index]
            for row in expected_late(self.river.cases)
        ]

    def _expected_refused(self) -> list[tuple[object, ...]]:
        return [
            (
                p,
                source,
                offset,
                one.reason,
                None if one.reason == "too_large" else (one.value or None),
            )
            for (p, source, offset), one in self.sent.items()
            if one.reason is not None
        ]

    def _quarantined(self) -> list[tuple[object, ...]]:
        columns = ["partition", "source", "offset", "reason", "value"]
        found = self.river.reader.select(tables.QUARANTINE, columns).to_pylist()
        return [(*[*row.values()][:-1], row["value"] or None) for row in found]

    def _letters(self) -> list[tuple[object, ...]]:
        sources = {self.river.topic(source): source for source in SOURCES}
        found = dead_letters(
            self.river.kafka,
            self.river.settings.publish.dead_letter_topics["quarantine"],
            self.river.partitions,
        )
        return [
            (one.partition, sources[one.source_topic], one.offset, one.reason, one.value or None)
            for one in found
        ]


def here_or_problem(ask: Callable[[], str]) -> str | None:
    """What a command says where it fails."""
    try:
        ask()
    except AssertionError as error:
        return str(error)[:2000]
    return None


_producers: dict[tuple[str, str], CheckedProducer] = {}


def _producer(kafka: str, codec: str) -> CheckedProducer:
    options: dict[str, Any] = {
        "compression.type": codec,
        "message.max.bytes": 10**9,
        "queue.buffering.max.kbytes": 2**21 - 1,
    }
    if (kafka, codec) not in _producers:
        _producers[kafka, codec] = CheckedProducer(kafka, **{"linger.ms": 0}, **options)
    return _producers[kafka, codec]


@contextmanager
def siege(kafka: str, folder: Path, name: str, engine: str, seed: int) -> Iterator[Siege]:
    """A river, its registry and the gate before that."""
    registry = TestRegistry(_made(folder / "registry"))
    registry.start()
    try:
        ids = {registry.register(f"{name}-{n}", schema): schema for n, schema in enumerate(WRITERS)}
        gate = HostileGate(registry, HOSTILE_SCHEMAS)
        with gate.serving() as url:
            (_made(folder / "river") / "orders.avsc").write_bytes(orjson.dumps(READER))
            port = free_port()
            changes: dict[str, Any] = {
                f"publish__{table}_topic": f"{name}-{table}" for table in ("late", "quarantine")
            }
            changes |= {"sources__orders__format": "avro", "sources__orders__schema": "orders.avsc"}
            changes |= {"sources__orders__registry": {"url": url, "unknown_after": "1s"}}
            corrections = {"topic": f"{name}-corrections", "within": "1d"}
            changes["publish__corrections"] = corrections | {"max_versions": MAX_VERSIONS}
            changes |= {
                "kafka__max_record_bytes": MAX_RECORD_BYTES[engine],
                "metrics": {"port": port},
            }
            topics = {source: f"{name}-{source}-of-any-time" for source in SOURCES}
            create_topics(kafka, *topics.values(), partitions=2, **ANY_TIME)
            changes |= {f"sources__{source}__topic": topic for source, topic in topics.items()}
            river = River.make(
                kafka, folder / "river", name, lake=LAKES[engine], seed=seed, **changes
            )
            rng = random.Random(f"{seed}/{engine}")
            rules = {source: river.settings.reading_rules(source) for source in SOURCES}
            producers = Producers(rng, ids, rules, topics)
            yield Siege(engine, river, gate, producers, rng, port)
    finally:
        registry.kill()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--engine", choices=[*LAKES], default="spark")
    options = parser.parse_args()
    with (
        brokered() as (kafka, folder),
        siege(kafka, folder / "siege", "hostile", options.engine, options.seed) as one,
    ):
        seconds = options.minutes * 60
        one.run(seconds * (1 - OF_EXPRESSIONS))
        problems = one.judge()
        evaluated, more = hostile_expressions.attack(
            options.engine, options.seed, seconds * OF_EXPRESSIONS
        )
        problems += more
        reasons = Counter(record.reason or "good" for record in one.sent.values())
        sys.stdout.write(
            f"seed {options.seed}, {options.engine}: {len(one.sent)} records ({dict(reasons)}), "
            f"{one.stops} stops, "
            f"the longest {one.longest_stop_s:.1f} s; {one.peaks}; {evaluated}; "
            f"{len(problems)} problems\n"
        )
        for problem in problems:
            sys.stdout.write(f"  {problem}\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
