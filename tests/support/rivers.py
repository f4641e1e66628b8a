"""A river under attack: topics that keep filling, a run in a process of its own that is killed, and
what must come of it all."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import yaml
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from tests.support.cases import (
    BAD_VALUES,
    HOLE,
    SOURCES,
    Case,
    expected_duplicates,
    expected_late,
    expected_messages,
    expected_quarantine,
    expected_silver,
    heartbeat,
    keyed,
)
from tests.support.correction_topic import assert_in_sequence, corrections_seen
from tests.support.corrections import (
    CorrectionsOfCases,
    consumed,
    corrections_of,
    late_duplicates_of,
)
from tests.support.inputs import input_of
from tests.support.lakes import (
    decisions_of,
    duplicates_of,
    late_of,
    quarantined_of,
    silver_of,
)
from tests.support.topics import (
    Access,
    client_options,
    consume,
    create_topics,
    dead_letters,
    produce,
    published,
    settings_of,
)
from watersmeet.audit.verify import verify
from watersmeet.faults import ARMED_BY
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.commits import Commit
from watersmeet.lake.location import Lake
from watersmeet.monitoring.metrics import serving
from watersmeet.monitoring.observability import Reporter
from watersmeet.repartition.command import repartition
from watersmeet.run import LAYERS, Run
from watersmeet.running.lineage import sending
from watersmeet.settings import Settings, load_settings

DEADLINE_S = 300.0
TIMEOUT_MS = 300
EMBEDDED, FOLDER, CATALOG = "embedded", "folder", "catalog"
LAKES = (EMBEDDED, FOLDER, CATALOG)
ENGINES = {EMBEDDED: "embedded", FOLDER: "spark"}
SCHEMA = "shop"


def until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Waits for a condition, and says which it was where it never comes."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not come within {deadline_s} s"
        time.sleep(0.05)


WATERSMEET = (sys.executable, "-m", "watersmeet")
EVEN_SMALL_BATCHES_IN_TASKS = (
    sys.executable,
    "-c",
    "from watersmeet.engine.spark import SparkEngine; SparkEngine.here_bytes = -1; "
    "from watersmeet.cli import main; main()",
)
"""A program whose driver leaves every batch to Spark's tasks, however small."""

_IN_CHUNKS = (
    "from watersmeet.cli import main; from watersmeet.kafka import publisher; publisher.CHUNK = "
    "{chunk}; main()"
)


def in_chunks(chunk: int, clock_off_by_s: int = 0) -> tuple[str, ...]:
    """A program that produces so many messages at a time, and whose wall clock is so far ahead."""
    clock = (
        f"import time; true_time = time.time; time.time = lambda: true_time() + {clock_off_by_s}; "
        if clock_off_by_s
        else ""
    )
    return (sys.executable, "-c", clock + _IN_CHUNKS.format(chunk=chunk))


FORKS_TASKS = ["pyspark.daemon", "pyspark.worker"]
"""How the command ends of the process that forks a worker for each task of Spark's in Python.
(Others plan data sources in the driver.)"""

STARTED: list[RunProcess] = []


class RunProcess:
    """`watersmeet run`, or another command, in a process of its own, held at a fault point where
    one is armed."""

    def __init__(
        self,
        config: Path,
        *arguments: str,
        point: str | None = None,
        count: int = 1,
        program: Sequence[str] = WATERSMEET,
        environment: Mapping[str, str] | None = None,
        command: str = "run",
    ) -> None:
        """`environment`: instead of this process's; `command`: another one of Watersmeet."""
        self.log = config.parent / "run.log"
        self.folder = config.parent / f"fault-{time.monotonic_ns()}"
        self.folder.mkdir()
        variables = dict(os.environ if environment is None else environment)
        if point is not None:
            variables[ARMED_BY] = f"{point}:{count}:{self.folder}"
        with self.log.open("ab") as log:
            self._begin = log.tell()
            words = [*program, command, *arguments, "-c", str(config)]
            self.process = subprocess.Popen(
                words, stdout=log, stderr=log, env=variables, cwd=config.parent
            )
        self._family = psutil.Process(self.process.pid)
        STARTED.append(self)

    @staticmethod
    def end_all(since: int) -> None:
        """Ends what a test that failed has left running: of the runs that were started, all but the
        first so many."""
        while len(STARTED) > since:
            if (run := STARTED.pop()).process.poll() is None:
                run.kill()

    @property
    def is_held(self) -> bool:
        return (self.folder / "held").exists()

    def await_held(self) -> None:
        try:
            until(lambda: self.is_held or self.process.poll() is not None, "the fault point")
        except AssertionError:
            self.kill()
        assert self.is_held, f"the run did not reach the point: {self.said()}"

    def let_go(self) -> None:
        """Whoever is held at the fault point goes on."""
        (self.folder / "held").unlink()

    def family(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return [self._family, *self._family.children(recursive=True)]
        return []

    def kill(self) -> None:
        """SIGKILL for every process of the run: nobody gets to say a word."""
        family = self.family()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        psutil.wait_procs(family, timeout=30)

    def kill_a_task(self, rng: random.Random) -> bool:
        """SIGKILL for one of the processes in which Spark has its tasks in Python; returns whether
        there was one."""
        tasks = []
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                parent = process.parent()
                if parent is not None and parent.cmdline()[-2:] == FORKS_TASKS:
                    tasks.append(process)
        if not tasks:
            return False
        rng.choice(tasks).kill()
        return True

    def pause(self) -> None:
        """Every process of the run stands still, also one that was started meanwhile."""
        paused: set[psutil.Process] = set()
        while running := set(self.family()) - paused:
            for process in running:
                with suppress(psutil.NoSuchProcess):  # Spark ends idle workers, as soon as it can
                    process.suspend()
            paused |= running

    def resume(self) -> None:
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"the run did not end within {deadline_s} s: {self.said()}"
            ) from None

    def stop(self) -> int:
        self.process.terminate()
        return self.wait()

    def said(self) -> str:
        """The last that it, and whoever was started after it, has said."""
        return self.log.read_bytes()[self._begin :].decode(errors="replace")[-3000:]


@dataclass
class Losses:
    """What went wrong, counted; `other` are differences of tables."""

    lost: int = 0
    repeated: int = 0
    out_of_order: int = 0
    other: list[str] = field(default_factory=list)


@dataclass
class River:
    """One configuration on a broker, its input so far, and how to run, break and judge it.

    A run that is to be killed, paused or signalled is a process of its own. The judge reads the
    tables by delta-rs, a catalog's by their folder, so that neither Spark nor the lake's own
    catalog is needed for it.
    """

    kafka: Access
    folder: Path
    partitions: int
    seed: int
    config: dict[str, Any]
    cases: dict[int, Case] = field(default_factory=dict)
    chunks: int = 0
    program: Sequence[str] = WATERSMEET
    environment: Mapping[str, str] | None = None
    """The environment variables of its runs, instead of this process's."""
    encode: Callable[[bytes | None], bytes | None] = lambda value: value
    """What is sent for a value of its cases."""
    spark: SparkSession | None = None
    """Where it is given, undisturbed runs with Spark are in this process, on this session. (Each
    kind of lake has a process of its own at least once.)"""

    @classmethod
    def make(
        cls,
        kafka: Access,
        folder: Path,
        name: str,
        *,
        lake: str = EMBEDDED,
        partitions: int = 2,
        seed: int = 1,
        inputs: Sequence[str] = SOURCES,
        **overrides: Any,
    ) -> River:
        """New topics, empty; overrides by dotted name with `__`. `inputs`: names those of sources
        that have several topics. Unless it is said to be durable, it does not wait for the disk:
        with one that is slow, that would be most of the time of all tests."""
        config: dict[str, Any] = {
            "name": name,
            "durable": False,
            **(
                catalog_lake(folder)
                if lake == CATALOG
                else {"lake": "lake", "engine": ENGINES[lake]}
            ),
            "kafka": {"bootstrap_servers": settings_of(kafka).bootstrap_servers},
            "sources": {
                source: {
                    "topic": _topics(name, source, inputs),
                    "key": "k",
                    "event_time": "ts",
                    "heartbeat": {"field": "type", "equals": "heartbeat"},
                }
                for source in SOURCES
            },
            "merge": {"timeout": f"{TIMEOUT_MS}ms"},
            "publish": {"topic": f"{name}-merged"},
        }
        for path, value in overrides.items():
            *outer, last = path.split("__")
            target = config
            for step in outer:
                target = target[step]
            target[last] = value
        folder.mkdir(parents=True, exist_ok=True)
        create_topics(
            kafka,
            *[each.partition("/")[2] or f"{name}-{each}" for each in inputs],
            partitions=partitions,
        )
        cases = {p: Case({each: [] for each in inputs}, TIMEOUT_MS) for p in range(partitions)}
        river = cls(kafka, folder, partitions, seed, config, cases)
        river.write()
        return river

    def by_embedded(self) -> None:
        """Whoever starts next works on the same files without Spark."""
        self.config |= {"engine": "embedded", "lake": str(self.as_folder.lake)}
        self.write()

    @property
    def run_log(self) -> str:
        """What all runs have said."""
        return (self.folder / "run.log").read_text(errors="replace")

    def write(self) -> None:
        self.file.write_text(yaml.safe_dump(self.config, sort_keys=False))

    @property
    def file(self) -> Path:
        return self.folder / "watersmeet.yml"

    @property
    def settings(self) -> Settings:
        return load_settings(self.file)

    @property
    def as_folder(self) -> Settings:
        """The configuration with the tables under their folder, wherever their names are."""
        settings = self.settings
        return (
            settings
            if isinstance(settings.lake, str)
            else settings.model_copy(update={"lake": warehouse(self.folder)})
        )

    @property
    def reader(self) -> DeltaRsReader:
        return DeltaRsReader(Lake(self.as_folder))

    @property
    def inputs(self) -> Sequence[str]:
        """What is merged."""
        return tuple(self.cases[0].values)

    def topic(self, name: str) -> str:
        """The topic of an input."""
        return name.partition("/")[2] or str(self.config["sources"][name]["topic"])

    @property
    def sink(self) -> str:
        return str(self.config["publish"]["topic"])

    def send(
        self, source: str, partition: int, value: bytes | None, *, codec: str = "none"
    ) -> None:
        """Sends one record, compressed by this codec."""
        self.cases[partition].values[source].append(value)
        self.cases[partition].arrivals.append(source)
        produce(self.kafka, self.topic(source), [(partition, self.encode(value))], codec=codec)

    def begin_transaction(
        self, source: str, partition: int, values: Sequence[bytes], *, commit: bool
    ) -> Callable[[], None]:
        """Have another producer's transaction with these records open; returns what commits it, or
        aborts it."""
        options = {
            "transactional.id": f"{self.sink}-{time.monotonic_ns()}",
            "transaction.timeout.ms": 600_000,
        }
        producer = Producer(client_options(self.kafka) | options)
        producer.init_transactions(30)
        producer.begin_transaction()
        for value in values:
            producer.produce(self.topic(source), self.encode(value), partition=partition)
        assert producer.flush(30) == 0
        case = self.cases[partition]
        case.values[source] += values if commit else [HOLE] * len(values)

        def end() -> None:
            if commit:
                producer.commit_transaction(30)
            else:
                producer.abort_transaction(30)
            case.values[source].append(HOLE)
            case.arrivals.append(source)

        case.arrivals += [source] * len(values)
        return end

    def flow(
        self, *sources: str, records: int = 12, codec: str = "none", is_idempotent: bool = False
    ) -> None:
        """Sends the next stretch of event time to every topic-partition: keys that come again,
        disorder, late and bad records, and a heartbeat at its end, so that a part of it is finished
        in the stretch after. With `sources`, only of those; compressed by this codec.
        `is_idempotent`: as for `produce`. Where a source has ids, many records repeat one.
        """
        rng = random.Random(f"{self.seed}/{self.chunks}")
        begin, self.chunks = self.chunks * 1000, self.chunks + 1
        for source in sources or self.inputs:
            sent: list[tuple[int, bytes | None]] = []
            has_id = "id" in self.config["sources"][input_of(source).source]
            for partition, case in self.cases.items():
                for _ in range(records):
                    time_ms = begin + rng.randrange(1000)
                    late_by = rng.choice([0, 0, 0, 0, 50, 3 * TIMEOUT_MS])
                    value = keyed(
                        rng.choice(["a", "b", "é", "\U0001f600", "z"]),
                        max(0, time_ms - late_by),
                        n=rng.randrange(10**6),
                        **({"i": rng.randint(1, 3)} if has_id else {}),
                    )
                    sent.append(
                        (partition, rng.choice(BAD_VALUES) if rng.random() < 0.08 else value)
                    )
                sent.append((partition, heartbeat(begin + 1000)))
                case.values[source] += [value for p, value in sent if p == partition]
                case.arrivals += [source] * (records + 1)
            encoded = [(partition, self.encode(value)) for partition, value in sent]
            produce(
                self.kafka, self.topic(source), encoded, codec=codec, is_idempotent=is_idempotent
            )

    def run(
        self, *arguments: str, point: str | None = None, count: int = 1, command: str = "run"
    ) -> RunProcess:
        program, environment = self.program, self.environment
        return RunProcess(
            self.file,
            *arguments,
            point=point,
            count=count,
            program=program,
            environment=environment,
            command=command,
        )

    @property
    def is_here(self) -> bool:
        """Whether undisturbed runs are in this process, which has all that they need: one of their
        own takes seconds to start."""
        has_engine = self.config.get("engine") == ENGINES[EMBEDDED] or self.spark is not None
        return has_engine and self.program is WATERSMEET and self.environment is None

    def finish(self, *layers: str) -> None:
        """An undisturbed run over what is there, as `run --once`; by some layers only, where they
        are named."""
        if self.is_here:
            settings = self.settings
            with serving(settings) as metrics, sending(settings) as lineage:
                Run(settings, layers or LAYERS, Reporter(), observers=[*metrics, *lineage]).once()
            return
        run = self.run(*layers, "--once")
        assert run.wait() == 0, run.said()

    def finish_repartition(self) -> None:
        """An undisturbed repartition of what is there."""
        if self.is_here:
            repartition(self.settings, Reporter(), threading.Event(), once=True)
            return
        process = self.run("--once", command="repartition")
        assert process.wait() == 0, process.said()

    def kill_at(self, point: str, *arguments: str, count: int = 1) -> None:
        """A run that is killed where it reaches the point."""
        process = self.run(*arguments, point=point, count=count)
        process.await_held()
        process.kill()

    def forget_checkpoints(self) -> None:
        shutil.rmtree(self.settings.checkpoints, ignore_errors=True)

    def _take_decisions(self) -> None:
        """The idle policy's decisions are input, like the records."""
        decided = decisions_of(self.reader, self.inputs)
        for partition, case in self.cases.items():
            case.decisions = {
                source: decided[source, partition]
                for source in self.inputs
                if (source, partition) in decided
            }

    def losses(self, *, gaps_allowed: bool = False) -> Losses:
        """How tables and sink differ from the merge model and from a topic that was written to in
        peace."""
        found, reader = Losses(), self.reader
        self._take_decisions()
        expected, seen = (
            expected_messages(self.cases, self.inputs),
            published(self.kafka, self.sink, self.partitions),
        )
        counts = Counter(seen)
        found.lost = sum((Counter(expected) - counts).values())
        found.repeated = sum(n - 1 for n in counts.values())
        for _, messages in by_partition(seen):
            # An event time of 0 is sent as 1: the first ms does not say the order.
            places = [(m.timestamp, m.key) for m in dict.fromkeys(messages) if m.timestamp > 1]
            found.out_of_order += sum(one >= other for one, other in pairwise(places))
        foreign = counts - Counter(expected)
        if foreign and not gaps_allowed:
            found.other.append(
                f"{sum(foreign.values()) - found.repeated} messages that the model does not have"
            )
        for name, here, there in (
            ("silver", silver_of(reader), expected_silver(self.cases, self.inputs)),
            ("late", late_of(reader, inputs=self.inputs), expected_late(self.cases, self.inputs)),
            (
                "duplicates",
                duplicates_of(reader, inputs=self.inputs),
                expected_duplicates(self.cases, self.inputs),
            ),
            ("quarantine", quarantined_of(reader, self.inputs), expected_quarantine(self.cases)),
            ("progress", batches_of(reader), committed_batches(reader)),
        ):
            missing, more = (
                Counter(map(repr, one)) - Counter(map(repr, other))
                for one, other in ((there, here), (here, there))
            )
            if missing or more:
                found.other.append(
                    f"{name}: {sum(missing.values())} rows missing, {sum(more.values())} too many"
                )
        found.other += self._losses_of_letters()
        if self.settings.publish.corrections is not None:
            found.other += self._losses_of_corrections(gaps_allowed=gaps_allowed)
        return found

    def _losses_of_corrections(self, *, gaps_allowed: bool) -> Iterator[str]:
        """How corrections, their topic, and what a consumer of both topics ends with, differ from
        what the model has."""
        publish = self.settings.publish
        topics = {source: self.topic(source) for source in SOURCES}
        model = CorrectionsOfCases.of(self.cases, publish, topics)
        seen = assert_in_sequence(
            corrections_seen(consume(self.kafka, publish.sequence_topics[1], self.partitions)),
            publish.delivery,
        )
        in_topic = sorted(
            [
                (each.partition, each.key, each.seq, each.version, late, each.value)
                for _, late, each in seen
            ],
            key=lambda row: row[:3],
        )
        pairs: dict[str, tuple[Any, Any]] = {
            "corrections": (corrections_of(self.reader), model.rows()),
            "late duplicates": (late_duplicates_of(self.reader), model.late_duplicates()),
        }
        messages = model.messages()
        if gaps_allowed:
            pairs["their topic"] = in_topic, [row for row in messages if row in in_topic]
        else:
            pairs["their topic"] = in_topic, messages
            pairs["what a consumer has"] = (
                consumed(self.kafka, publish.sequence_topics, self.partitions),
                model.consumed(),
            )
        for name, (here, there) in pairs.items():
            if here != there:
                yield f"{name}: {len(here)} and {len(there)} expected, or with other content"

    def _losses_of_letters(self) -> Iterator[str]:
        """How the topics of dead letters differ from one that has each record once, in order of
        offset."""
        sources = {self.topic(name): name for name in self.inputs}
        tables_of = {
            "late": expected_late(self.cases, self.inputs),
            "quarantine": expected_quarantine(self.cases),
        }
        for table, topic in self.settings.publish.dead_letter_topics.items():
            expected = [(row[0], row[1], row[2], row[-1]) for row in tables_of[table]]
            sent = dead_letters(self.kafka, topic, self.partitions)
            seen = [
                (one.partition, sources[one.source_topic], one.offset, one.value) for one in sent
            ]
            # Leaves each topic-partition's in the order in which they are.
            by_place = sorted(seen, key=lambda one: one[:2])
            if by_place != sorted(expected, key=lambda one: one[:3]):
                yield (
                    f"dead letters of {table}: {len(seen)} and {len(expected)} expected, or in "
                    "another order"
                )

    def broken_promises(self) -> list[str]:
        """What `verify --full` finds."""
        return [
            str(problem) for problem in verify(self.reader, self.as_folder, full=True)["problems"]
        ]


def _topics(name: str, source: str, inputs: Sequence[str]) -> str | list[str]:
    found = [each.partition("/")[2] for each in inputs if each.partition("/")[0] == source]
    return found if any(found) else f"{name}-{source}"


def catalog_lake(folder: Path) -> dict[str, Any]:
    """A configuration's lake in Spark's own catalog, whose metastore, an embedded Derby, outlives
    the process.

    Derby lets one process in at a time.
    """
    metastore = f"jdbc:derby:;databaseName={folder}/metastore;create=true"
    return {
        "lake": {"catalog": "spark_catalog", "schema": SCHEMA},
        "checkpoints": str(folder / "checkpoints"),
        "spark": {
            "spark.sql.catalogImplementation": "hive",
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.hadoop.javax.jdo.option.ConnectionURL": metastore,
            "spark.driver.extraJavaOptions": f"-Dderby.system.home={folder}",
        },
    }


def warehouse(folder: Path) -> str:
    """Where the tables of `catalog_lake` have their files."""
    return str(folder / "warehouse" / f"{SCHEMA}.db")


def batches_of(reader: DeltaRsReader) -> list[int]:
    """The batches that `progress` has."""
    return sorted(reader.summary(tables.PROGRESS, ["batch"], {})["batch"].to_pylist())


def committed_batches(reader: DeltaRsReader) -> list[int]:
    """The same, as silver's own history has it."""
    commits = [Commit.parse(version.metadata) for version in reader.history(tables.SILVER)]
    return sorted(
        commit.facts["batch"]
        for commit in commits
        if commit is not None and not commit.is_fence and "batch" in commit.facts
    )


def by_partition(messages: list[Any]) -> Iterator[tuple[int, list[Any]]]:
    for partition in sorted({m.partition for m in messages}):
        yield partition, [m for m in messages if m.partition == partition]
