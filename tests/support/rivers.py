"""A river under attack: topics that keep filling, a run in a process of its own that is killed, and what must come of it all."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import yaml
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pipelines import tables
from pipelines.adapters.lake import Lake
from pipelines.core.idle import Decision
from pipelines.faults import ARMED_BY
from pipelines.observability import Reporter
from pipelines.run import LAYERS, Run
from pipelines.settings import Settings, load_settings
from tests.support.cases import (
    BAD_VALUES,
    SOURCES,
    Case,
    expected_late,
    expected_messages,
    expected_quarantine,
    expected_silver,
    heartbeat,
    keyed,
)
from tests.support.lakes import late_of, quarantined_of, silver_of
from tests.support.topics import create_topics, produce, published

DEADLINE_S = 200.0
TIMEOUT_MS = 300


def until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Waits for a condition, and says which it was where it never comes."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not come within {deadline_s} s"
        time.sleep(0.05)


class RunProcess:
    """`watersmeet run` in a process of its own, held at a fault point where one is armed."""

    def __init__(self, config: Path, *arguments: str, point: str | None = None, count: int = 1) -> None:
        self.log = config.parent / "run.log"
        self.folder = config.parent / f"fault-{time.monotonic_ns()}"
        self.folder.mkdir()
        environment = dict(os.environ)
        if point is not None:
            environment[ARMED_BY] = f"{point}:{count}:{self.folder}"
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "pipelines", "run", *arguments, "-c", str(config)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=config.parent)
        self._family = psutil.Process(self.process.pid)

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

    def pause(self) -> None:
        for process in self.family():
            process.suspend()

    def resume(self) -> None:
        for process in self.family():
            process.resume()

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the run did not end within {deadline_s} s: {self.said()}") from None

    def stop(self) -> int:
        self.process.terminate()
        return self.wait()

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


@dataclass
class Losses:
    """What went wrong, counted; `other` are differences of tables."""

    lost: int = 0
    repeated: int = 0
    out_of_order: int = 0
    other: list[str] = field(default_factory=list)


@dataclass
class River:
    """One configuration on a broker, its input so far, and how to run, break and judge it."""

    kafka: str
    folder: Path
    partitions: int
    seed: int
    config: dict[str, Any]
    cases: dict[int, Case] = field(default_factory=dict)
    chunks: int = 0

    @classmethod
    def make(cls, kafka: str, folder: Path, name: str, *, partitions: int = 2, seed: int = 1, **overrides: Any) -> River:
        """New topics, empty; overrides by dotted name with `__`."""
        config: dict[str, Any] = {
            "name": name,
            "lake": "lake",
            "kafka": {"bootstrap_servers": kafka},
            "sources": {
                source: {
                    "topic": f"{name}-{source}",
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
        create_topics(kafka, *[f"{name}-{source}" for source in SOURCES], partitions=partitions)
        cases = {p: Case({source: [] for source in SOURCES}, TIMEOUT_MS) for p in range(partitions)}
        river = cls(kafka, folder, partitions, seed, config, cases)
        river.write()
        return river

    def write(self) -> None:
        self.file.write_text(yaml.safe_dump(self.config, sort_keys=False))

    @property
    def file(self) -> Path:
        return self.folder / "watersmeet.yml"

    @property
    def settings(self) -> Settings:
        return load_settings(self.file)

    @property
    def sink(self) -> str:
        return str(self.config["publish"]["topic"])

    def flow(self, *sources: str, records: int = 12) -> None:
        """Sends the next stretch of event time to every topic-partition: keys that come again, disorder, late and bad records,
        and a heartbeat at its end, so that a part of it is finished in the stretch after. With `sources`, only of those.
        """
        rng = random.Random(f"{self.seed}/{self.chunks}")
        begin, self.chunks = self.chunks * 1000, self.chunks + 1
        for source in sources or SOURCES:
            sent: list[tuple[int, bytes | None]] = []
            for partition, case in self.cases.items():
                for _ in range(records):
                    time_ms = begin + rng.randrange(1000)
                    late_by = rng.choice([0, 0, 0, 0, 50, 3 * TIMEOUT_MS])
                    value = keyed(
                        rng.choice(["a", "b", "é", "\U0001f600", "z"]), max(0, time_ms - late_by), n=rng.randrange(10**6)
                    )
                    sent.append((partition, rng.choice(BAD_VALUES) if rng.random() < 0.08 else value))
                sent.append((partition, heartbeat(begin + 1000)))
                case.values[source] += [value for p, value in sent if p == partition]
                case.arrivals += [source] * (records + 1)
            produce(self.kafka, self.config["sources"][source]["topic"], sent)

    def run(self, *arguments: str, point: str | None = None, count: int = 1) -> RunProcess:
        return RunProcess(self.file, *arguments, point=point, count=count)

    def finish(self, *layers: str) -> None:
        """An undisturbed run over what is there, in this process."""
        Run(self.settings, layers or LAYERS, Reporter()).once()

    def forget_checkpoints(self) -> None:
        shutil.rmtree(self.folder / "lake" / "_checkpoints", ignore_errors=True)

    def _take_decisions(self, lake: Lake) -> None:
        """The idle policy's decisions are input, like the records."""
        time = F.unix_millis("event_time").alias("time")
        for case in self.cases.values():
            case.decisions = {}
        for row in lake.read(tables.IDLE_HEARTBEATS).select("source", "partition", "after_offset", time).collect():
            mine = self.cases[row.partition].decisions.setdefault(row.source, [])
            mine.append(Decision(row.after_offset, row.time))

    def losses(self, spark: SparkSession, *, gaps_allowed: bool = False) -> Losses:
        """How tables and sink differ from the merge model and from a topic that was written to in peace."""
        found, lake = Losses(), Lake(spark, self.settings)
        self._take_decisions(lake)
        expected, seen = expected_messages(self.cases), published(self.kafka, self.sink, self.partitions)
        counts = Counter(seen)
        found.lost = sum((Counter(expected) - counts).values())
        found.repeated = sum(n - 1 for n in counts.values())
        for _, messages in by_partition(seen):
            places = [(m.timestamp, m.key) for m in dict.fromkeys(messages)]
            found.out_of_order += sum(one >= other for one, other in pairwise(places))
        foreign = counts - Counter(expected)
        if foreign and not gaps_allowed:
            found.other.append(f"{sum(foreign.values()) - found.repeated} messages that the model does not have")
        for name, here, there in (
            ("silver", silver_of(lake), expected_silver(self.cases)),
            ("late", late_of(lake), expected_late(self.cases)),
            ("quarantine", quarantined_of(lake), expected_quarantine(self.cases)),
            ("versions", *_versions(lake)),
        ):
            if here != there:
                missing, more = (
                    Counter(map(repr, there)) - Counter(map(repr, here)),
                    Counter(map(repr, here)) - Counter(map(repr, there)),
                )
                found.other.append(f"{name}: {sum(missing.values())} rows missing, {sum(more.values())} too many")
        return found


def _versions(lake: Lake) -> tuple[list[Any], list[Any]]:
    """The batches that `versions` knows, each with its version; and as silver's own history has it."""
    told = [(json.loads(version.said)["batch"], version.number) for version in lake.history(tables.SILVER, 10**6) if version.said]
    return sorted(lake.rows("SELECT batch, version FROM {versions}")), sorted(told)


def by_partition(messages: list[Any]) -> Iterator[tuple[int, list[Any]]]:
    for partition in sorted({m.partition for m in messages}):
        yield partition, [m for m in messages if m.partition == partition]
