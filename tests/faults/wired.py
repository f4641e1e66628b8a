"""Runs by a wire that lies (`tests.support.wire`), each by a seed: of a publisher alone, and of a
whole pipeline, in every delivery mode; and of a publisher whose broker stands still.

`python -m tests.faults.wired --seeds 100 --seed 1` has so many of each, one after the other. What
the clients are told to wait is short here, so that faults of a few seconds count; but where a
broker stands still for up to 90 s, it is in part what they are told otherwise. `--kind stalled
--mode exactly_once --seed 7 --seeds 1` repeats one.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pyarrow as pa
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from pyspark.sql import SparkSession

import tests.conftest  # noqa: F401  # quick starts
from tests.faults.command import brokered, say, session_for
from tests.kafka.messages import headers
from tests.support.configurations import IDS
from tests.support.repeating import repeating
from tests.support.rivers import DEADLINE_S, EMBEDDED, FOLDER, River
from tests.support.topics import client_options, consume, create_topics
from tests.support.wire import random_faults, wire
from watersmeet.core.sequence import MERGED, MESSAGES, SEQ
from watersmeet.dev import broker
from watersmeet.errors import WatersmeetError, is_retriable
from watersmeet.kafka.publisher import Publisher, sequence_tail
from watersmeet.settings import KafkaSettings

MODES = ("exactly_once", "at_least_once", "at_most_once")
OPTIONS = {"socket.timeout.ms": "1500"}
PARTITIONS = 2
LONGEST_S = 4.0
"""The longest fault: some are longer than a request's timeout, and some than that of a send."""

_QUICK = {
    "watersmeet.kafka.cluster.TIMEOUT_S": 5.0,
    "watersmeet.kafka.publisher.TIMEOUT_S": 5.0,
    "watersmeet.kafka.publisher.PRODUCE_TIMEOUT_S": 3,
    "watersmeet.kafka.publisher.CHUNK": 3,
    "watersmeet.gold.MAX_PER_TRANSACTION": 10,
    "watersmeet.gold.MAX_PER_CHUNK": 5,
    "watersmeet.running.runner.RETRY_S": 0.1,
}
"""What is shorter or smaller than it is otherwise."""

_CHUNKS = {"watersmeet.kafka.publisher.CHUNK": 3}

PATIENCE: Mapping[str, tuple[Mapping[str, Any], Mapping[str, str]]] = {
    "little": (_QUICK, OPTIONS),
    "some": (
        {
            **_CHUNKS,
            "watersmeet.kafka.publisher.TRANSACTION_TIMEOUT_S": 40,
            "watersmeet.kafka.publisher.LONGEST_S": 20,
            "watersmeet.kafka.publisher.PRODUCE_TIMEOUT_S": 16,
        },
        {},
    ),
    "as it is": (_CHUNKS, {}),
}
"""What a publisher may wait, and the options of its clients: less than the shortest of long stalls;
so that a stall outlives a transaction; and librdkafka's own, and the project's."""

STALLS_S, LONG_STALLS_S = 6.0, 90.0


@contextmanager
def impatient(changes: Mapping[str, Any] = _QUICK) -> Iterator[None]:
    """Inside, timeouts are short, and transactions are many."""
    with ExitStack() as patched:
        # Each wire has a port of its own: consumers of former ones would ask for it for ever.
        patched.enter_context(patch("watersmeet.kafka.reading._idle", {}))
        for name, value in changes.items():
            patched.enter_context(patch(name, value))
        yield


def lie(seed: str) -> str:
    """The faults of a run."""
    return random_faults(random.Random(seed), 12, LONGEST_S)


# -- a publisher alone


class Attempts:
    """Whoever publishes numbered messages to a topic, and knows of them what the topic says (or, in
    `at_most_once`, what it has noted before)."""

    def __init__(
        self,
        by: str,
        topic: str,
        mode: str,
        rng: random.Random,
        options: Mapping[str, str] = OPTIONS,
    ) -> None:
        kafka = KafkaSettings(bootstrap_servers=by, options=dict(options))
        is_transactional = mode == "exactly_once"
        self.publisher = Publisher(
            kafka, "wired", topic, 100_000, is_transactional=is_transactional
        )
        self._mode, self._rng = mode, rng
        self._last = dict.fromkeys(range(PARTITIONS), -1)
        self.sent: dict[int, dict[int, int]] = {}
        """By attempt, how many messages it had for each partition."""
        self.committing: set[int] = set()
        """The attempts that were to be committed: nobody may see anything of the others."""
        self.errors: list[str] = []

    def publish(self, until: int) -> None:
        """Publish until every partition has so many messages."""
        end = time.monotonic() + DEADLINE_S
        while not self.publisher.has_begun or min(self._last.values()) < until - 1:
            assert time.monotonic() < end, f"not done: {self.errors}"
            try:
                self._attempt(until)
            except Exception as error:
                if not is_retriable(error):
                    raise
                self.errors.append(repr(error))

    def _attempt(self, until: int) -> None:
        if not self.publisher.has_begun:
            self.publisher.begin()
            tails = self.publisher.tails(PARTITIONS)
            found = {p: sequence_tail(message, MERGED).seq for p, message in tails.items()}
            is_noted = self._mode == "at_most_once"
            for p, last in self._last.items():
                self._last[p] = max(last if is_noted else -1, found.get(p, -1))
        counts = {p: min(self._rng.randint(1, 5), until - 1 - at) for p, at in self._last.items()}
        after = {p: at + counts[p] for p, at in self._last.items()}
        number = len(self.sent)
        self.sent[number] = counts
        parts = [
            numbered(p, range(self._last[p] + 1, after[p] + 1), number) for p in range(PARTITIONS)
        ]
        if self._mode == "at_most_once":
            self._last = after
        self.publisher.send(self._slowly(parts), lambda _: self.committing.add(number))
        self._last = after

    def _slowly(self, parts: Sequence[pa.Table]) -> Iterator[pa.Table]:
        """So that what comes late may come in the midst of a transaction."""
        for part in parts:
            yield part
            time.sleep(self._rng.uniform(0, 0.2))


@contextmanager
def watched(kafka: str, topic: str, committing: set[int]) -> Iterator[set[int]]:
    """Inside, a reader reads all the time; the attempts of which it saw something too early."""
    options = {"group.id": "wired", "isolation.level": "read_committed", "fetch.wait.max.ms": 10}
    consumer = Consumer({**client_options(kafka), **options})
    consumer.assign([TopicPartition(topic, p, OFFSET_BEGINNING) for p in range(PARTITIONS)])
    early: set[int] = set()

    def look() -> None:
        for message in consumer.consume(100, 0.01):
            if (
                message.error() is None
                and (attempt := int(message.value() or b"")) not in committing
            ):
                early.add(attempt)

    with repeating(look, 0.01):
        yield early
    consumer.close()


def numbered(partition: int, numbers: range, attempt: int) -> pa.Table:
    """A message for each number; the value says in which attempt it was sent."""
    rows = [
        {
            "partition": partition,
            "key": b"k",
            "value": str(attempt).encode(),
            "timestamp": seq + 1,
            "headers": headers(partition, seq, "k"),
        }
        for seq in numbers
    ]
    return pa.Table.from_pylist(rows, MESSAGES)


def publish_by(kafka: str, topic: str, mode: str, seed: str) -> list[str]:
    """What a publisher alone breaks by the wire of a seed."""
    with impatient(), wire(kafka, lie(seed)) as between:
        problems = _published(kafka, between.bootstrap_servers, topic, mode, seed)
    return [*problems, *between.done] if problems else []


def publish_stalled(
    kafka: str,
    process: psutil.Process,
    topic: str,
    mode: str,
    seed: str,
    longest_s: float = LONG_STALLS_S,
) -> list[str]:
    """What a publisher alone breaks whose broker, this process, stands still at the moments of a
    seed, between two of its requests or in their midst; once for up to so many seconds."""
    rng = random.Random(seed)
    patience = rng.choice([*PATIENCE]) if longest_s > STALLS_S else "little"
    changes, options = PATIENCE[patience]
    moments = {rng.randint(1, 80): STALLS_S * rng.random() ** 2 for _ in range(2)}
    moments[rng.randint(1, 40)] = rng.uniform(1, longest_s)
    reached = itertools.count(1)
    begin_of = Publisher.begin
    timers = list[threading.Timer]()

    def stall(_: str) -> None:
        """Instead of `watersmeet.faults.fault_point`."""
        seconds = moments.get(next(reached))
        if seconds is not None:
            after_s = rng.choice([0, 0.03 * rng.random()])
            its = [threading.Timer(after_s, process.suspend)]
            its.append(threading.Timer(after_s + seconds, process.resume))
            for timer in its:
                timer.start()
            timers.extend(its)

    def begin(publisher: Publisher) -> None:
        stall("begin")
        begin_of(publisher)

    try:
        with (
            impatient(changes),
            patch("watersmeet.kafka.publisher.fault_point", stall),
            patch.object(Publisher, "begin", begin),
        ):
            problems = _published(kafka, kafka, topic, mode, seed, options)
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()
        process.resume()
    return [*problems, f"{patience} patience", str(moments)] if problems else []


def _published(
    kafka: str, by: str, topic: str, mode: str, seed: str, options: Mapping[str, str] = OPTIONS
) -> list[str]:
    create_topics(kafka, topic, partitions=PARTITIONS)
    attempts = Attempts(by, topic, mode, random.Random(seed), options)
    with watched(kafka, topic, attempts.committing) as early:
        attempts.publish(40)
    problems = []
    if mode == "exactly_once":
        problems += [f"some of attempt {attempt} was out before its commit" for attempt in early]
    seen: dict[int, list[int]] = {p: [] for p in range(PARTITIONS)}
    parts = Counter[tuple[int, int]]()
    for message in consume(kafka, topic, PARTITIONS):
        p = message.partition()
        seen[p].append(int(dict(message.headers())[SEQ]))
        parts[int(message.value()), p] += 1
    for p, numbers in seen.items():
        first = list(dict.fromkeys(numbers))
        if mode != "at_least_once" and len(first) != len(numbers):
            problems.append(f"{p} has some twice: {numbers}")
        if first != sorted(first) or (mode != "at_most_once" and first != list(range(40))):
            problems.append(f"{p} has gaps, or another order: {numbers}")
    if mode == "exactly_once":
        for attempt in {attempt for attempt, _ in parts}:
            out, sent = {p: parts[attempt, p] for p in seen}, attempts.sent[attempt]
            if out != sent:
                problems.append(f"of attempt {attempt}, {out} is out, and {sent} was sent")
    return [*problems, *attempts.errors] if problems else []


# -- a whole pipeline


def run_by(
    kafka: str,
    folder: Path,
    name: str,
    mode: str,
    seed: str,
    spark: SparkSession | None = None,
) -> list[str]:
    """What the runs of a pipeline break by the wire of a seed; on Spark, where it is given."""
    changes: dict[str, Any] = {
        "publish__delivery": mode,
        "publish__corrections": {"topic": f"{name}-corrected", "within": "1d"},
        "publish__late_topic": f"{name}-late",
        "publish__quarantine_topic": f"{name}-quarantine",
        **IDS,
    }
    lake = EMBEDDED if spark is None else FOLDER
    river = River.make(kafka, folder, name, lake=lake, partitions=PARTITIONS, **changes)
    river.spark = spark
    with impatient(), wire(kafka, lie(seed)) as between:
        at = {"bootstrap_servers": between.bootstrap_servers, "options": OPTIONS}
        river.config["kafka"] = at
        river.write()
        for _ in range(3):
            river.flow()
            _finish(river)
    river.config["kafka"] = {"bootstrap_servers": kafka}
    river.write()
    river.finish()
    problems = broken_by(river, mode)
    return [*problems, *between.done] if problems else []


def broken_by(river: River, mode: str) -> list[str]:
    """What a river that is through has broken of its promises, in a delivery mode."""
    found = river.losses(gaps_allowed=mode == "at_most_once")
    problems = [*found.other, *river.broken_promises()]
    if found.lost and mode != "at_most_once":
        problems.append(f"{found.lost} are lost")
    if found.repeated and mode != "at_least_once":
        problems.append(f"{found.repeated} are there twice")
    if found.out_of_order:
        problems.append(f"{found.out_of_order} are out of order")
    return problems


def _finish(river: River) -> None:
    """A run that ends with trouble that may pass is started again, as whoever watches it would."""
    for _ in range(10):
        try:
            return river.finish()
        except WatersmeetError as error:
            if not is_retriable(error):
                raise
    raise AssertionError("it failed again and again")


# -- many of them


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=100, help="of each kind and mode")
    parser.add_argument("--kind", choices=["publisher", "pipeline", "stalled"], action="append")
    parser.add_argument("--mode", choices=MODES, action="append")
    parser.add_argument("--engine", choices=["embedded", "spark"], default="embedded")
    options = parser.parse_args(arguments)
    spark = session_for(options.engine)
    failed = 0
    with brokered() as (kafka, folder):
        for number in range(options.seed, options.seed + options.seeds):
            for kind in options.kind or ("publisher", "pipeline", "stalled"):
                for mode in options.mode or MODES:
                    failed += not _try(kafka, folder, kind, mode, number, spark)
    sys.stdout.write(f"{failed} failed\n")
    return int(failed > 0)


def _try(
    kafka: str, folder: Path, kind: str, mode: str, number: int, spark: SparkSession | None
) -> bool:
    seed, name = f"{number}/{kind}/{mode}", f"{kind}-{mode.replace('_', '-')}-{number}"
    try:
        if kind == "publisher":
            problems = publish_by(kafka, name, mode, seed)
        elif kind == "stalled":
            process = psutil.Process(broker.status(folder / "broker").pid)
            problems = publish_stalled(kafka, process, name, mode, seed)
        else:
            problems = run_by(kafka, folder / name, name, mode, seed, spark)
    except Exception:
        problems = [traceback.format_exc()]
    say(f"{seed}: {'fails' if problems else 'holds'}")
    for problem in problems and [*problems, lie(seed)]:
        sys.stdout.write(f"  {problem}\n")
    sys.stdout.flush()
    return not problems


if __name__ == "__main__":
    sys.exit(main())
