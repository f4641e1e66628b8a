"""Points 1, 6 to 10 and 13: a backlog from the start of the process to its end, with every table
written and every message out.

Producing the input is not timed. `watersmeet run --once` is, as a process of its own; so are the
floors and the peers, over the same topics of the same broker, one after the other. Points 1 and 6
are measured on each chosen kind of input, the others on the first one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from benchmarks import peers, points
from benchmarks.inputs import Shape, Variant, fill_topics, write_configuration
from benchmarks.points import Result, Sizes
from benchmarks.programs import (
    ProgramError,
    bytes_in,
    embedded_broker,
    notify,
    program,
    slow_disk,
    started,
)
from benchmarks.sinks import published
from watersmeet.core.sequence import MERGED
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.publisher import sequence_tail
from watersmeet.kafka.reading import read_tails
from watersmeet.settings import load_settings

NUMBERS = frozenset({1, 6, 7, 8, 9, 10, 13})
FLOORS = WARM_UP, FLOOR_B = "floor_nothing", "floor_append"
PEERS = {
    WARM_UP: points.OF_FLOOR_A,
    FLOOR_B: points.OF_FLOOR_B,
    peers.KAFKA_STREAMS: points.OF_KAFKA_STREAMS,
    "merge_job": points.OF_MERGE_JOB,
    "state_job": points.OF_STATE_JOB,
}
LARGE_PEERS = {
    FLOOR_B: points.LARGE_OF_FLOOR_B,
    peers.KAFKA_STREAMS: points.LARGE_OF_KAFKA_STREAMS,
}
AGAIN = tuple(LARGE_PEERS)
"""What runs twice, as the engines do: the better run counts."""


@dataclass(frozen=True)
class Run:
    """One program over the whole backlog."""

    folder: Path
    sink: str
    seconds: float
    peak_bytes: int
    steps: dict[str, float]
    """When each layer was last heard of, in seconds from the start of the process."""

    def shares(self) -> dict[str, float]:
        """What part of the run each layer took: from the last news of the one before to its own
        last news."""
        shares, since = {}, 0.0
        for layer, until in sorted(
            {**self.steps, "end": self.seconds}.items(), key=lambda step: step[1]
        ):
            shares[layer] = round((until - since) / self.seconds, 3)
            since = until
        return shares


@dataclass(frozen=True)
class Peer:
    """Another program over the whole backlog; `same_messages` are byte for byte those of a run."""

    seconds: float
    peak_bytes: int
    messages: int = 0
    same_messages: int = 0


@dataclass(frozen=True)
class River:
    """A broker whose topics hold the whole input."""

    folder: Path
    bootstrap_servers: str
    partitions: int
    records: int
    sessions: int
    input_bytes: int

    def run(
        self,
        engine: str,
        name: str,
        spark: Mapping[str, str] | None = None,
        variant: Variant = "plain",
    ) -> Run:
        """`watersmeet run --once` into a lake and a sink of its own; `spark`: settings of its
        session. Raises ProgramError where not every session came out."""
        name = f"{engine}_{name}"
        folder, sink = self.folder / name, f"merged_{name}"
        file = write_configuration(
            folder,
            self.bootstrap_servers,
            sink=sink,
            engine=engine,
            spark=spark,
            variant=variant,
        )
        settings = load_settings(file)
        with program(folder, "-m", "watersmeet", "run", "--once") as running:
            running.wait()
        tails = read_tails(settings.kafka, settings.publish.topic, self.partitions)
        published = sum(sequence_tail(last, MERGED).seq + 1 for last in tails.values())
        if published != self.sessions:
            raise ProgramError(
                f"{published} messages came out of {self.sessions} sessions: "
                f"{running.said()[-2000:]}"
            )
        notify(
            f"run {name}: {self.records / running.seconds:,.0f} records/s over {self.partitions} "
            "partitions"
        )
        return Run(
            folder,
            sink,
            running.seconds,
            running.memory.peak_bytes,
            _steps(running.said(), running.began),
        )

    def peer(self, name: str, own: Run | None = None) -> Peer:
        """A peer over the whole backlog; its messages are compared with those of a run.

        Raises ProgramError where Kafka Streams, which is exact as well, published anything else.
        """
        folder, topic = self.folder / name, f"merged_by_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        kafka = load_settings(self.folder / "watersmeet.yml").kafka
        if name not in FLOORS:
            Cluster(kafka).create_topic(topic, self.partitions, {"retention.ms": "-1"})
        arguments = self.bootstrap_servers, str(folder), str(self.partitions)
        with started(folder, peers.command(name, *arguments)) as running:
            running.wait()
        found = Peer(running.seconds, running.memory.peak_bytes)
        if own is not None and name not in FLOORS:
            messages = published(kafka, topic, self.partitions)
            same = set(messages) & set(published(kafka, own.sink, self.partitions))
            found = replace(found, messages=len(messages), same_messages=len(same))
            if name == peers.KAFKA_STREAMS and not len(messages) == len(same) == self.sessions:
                raise ProgramError(
                    f"of its {len(messages)} messages {len(same)} are those of a run"
                )
        notify(
            f"{name}: {self.records / running.seconds:,.0f} records/s, {found.messages:,} messages"
        )
        return found


@contextmanager
def river(
    folder: Path,
    records: int,
    partitions: int,
    shape: Shape,
) -> Iterator[River]:
    """A broker with so many records, a session's order among eleven of them; nothing of it is left
    afterwards."""
    orders = max(1, records // 11)
    try:
        with embedded_broker(folder / "broker") as bootstrap_servers:
            settings = load_settings(write_configuration(folder, bootstrap_servers))
            cluster = Cluster(settings.kafka)
            count, size = fill_topics(
                cluster, settings, records - orders, orders, partitions, shape
            )
            notify(f"{count:,} records in {partitions} partitions, {size:,} bytes")
            yield River(folder, bootstrap_servers, partitions, count, orders, size)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(numbers: Set[int], sizes: Sizes, folder: Path) -> Iterator[Result]:
    """The chosen ones of these points; the engines in turns."""
    if 10 in numbers:
        yield from _variants(sizes, folder)
    if 13 in numbers:
        yield from _durable(sizes, folder)
    for kind in sizes.kinds:
        chosen = numbers & (NUMBERS - {10, 13} if kind == sizes.kinds[0] else {1, 6})
        if chosen:
            for result in _of_kind(chosen, sizes, folder, Shape(kind)):
                yield replace(result, kind=kind)


def _of_kind(numbers: Set[int], sizes: Sizes, folder: Path, shape: Shape) -> Iterator[Result]:
    with river(folder / "backlog", sizes.records, sizes.partitions, shape) as small:
        small.peer(WARM_UP)  # the first one reads Spark's own files from the disk
        plain = {engine: small.run(engine, "plain") for engine in sizes.engines}
        runs = {engine: [run] for engine, run in plain.items()}
        if 1 in numbers:
            yield from _against_others(small, runs)
        elif 7 in numbers:
            _run_again(small, runs)
        if 7 in numbers and "spark" in runs:
            yield _cores(small, _quicker(runs["spark"]))
        for engine, run in plain.items():
            yield from _of_lake(numbers, small, engine, run)
    if 6 in numbers:
        yield from _large_backlog(sizes, folder, shape, plain)
    if 7 in numbers:
        quickest = {engine: _quicker(both).seconds for engine, both in runs.items()}
        yield from _many_partitions(sizes, folder, shape, quickest)


def _run_again(river: River, runs: Mapping[str, list[Run]]) -> None:
    """Run the engines a second time, in turns.

    The better of both runs counts, since the machine is slower at times.
    """
    for engine, engine_runs in runs.items():
        engine_runs.append(river.run(engine, "again"))


def _quicker(runs: Sequence[Run]) -> Run:
    return min(runs, key=lambda run: run.seconds)


def _against_others(small: River, runs: Mapping[str, list[Run]]) -> Iterator[Result]:
    """Point 1; runs the engines a second time."""
    taken: dict[str, list[Peer]] = {}
    own = next(iter(runs.values()))[0]
    for name in PEERS:
        _try_peer(small, name, own, taken)
    _run_again(small, runs)
    for name in AGAIN:
        _try_peer(small, name, own, taken)
    for engine, both in runs.items():
        best = _quicker(both)
        details = {
            "records": small.records,
            "seconds": [round(run.seconds, 1) for run in both],
            "seconds_until_the_last_news_of": best.steps,
            "share_of": best.shares(),
        }
        yield Result(points.BACKLOG, engine, small.records / best.seconds, details)
        for name, of_peer in taken.items():
            seconds = min(each.seconds for each in of_peer)
            yield Result(PEERS[name], engine, seconds / best.seconds, _of_peer(small, of_peer))


def _of_peer(river: River, runs: Sequence[Peer]) -> dict[str, object]:
    return {
        "records_per_second": round(river.records / min(run.seconds for run in runs)),
        "seconds": [round(run.seconds, 1) for run in runs],
        "peak_bytes": max(run.peak_bytes for run in runs),
        "messages": runs[0].messages,
        "same_messages": runs[0].same_messages,
        "sessions": river.sessions,
    }


def _try_peer(river: River, name: str, own: Run, taken: dict[str, list[Peer]]) -> None:
    """One that fails is left out."""
    try:
        compared = own if name not in taken else None
        taken.setdefault(name, []).append(river.peer(name, compared))
    except ProgramError as error:
        notify(f"{name} is left out: {error}")


def _large_backlog(
    sizes: Sizes, folder: Path, shape: Shape, plain: Mapping[str, Run]
) -> Iterator[Result]:
    """Point 6."""
    records = sizes.records * sizes.large_factor
    with river(folder / "large", records, sizes.partitions, shape) as large:
        runs = {engine: large.run(engine, "plain") for engine in plain}
        taken: dict[str, list[Peer]] = {}
        for name in LARGE_PEERS:
            _try_peer(large, name, next(iter(runs.values())), taken)
        for engine, run in runs.items():
            yield from _large(large, engine, run, plain[engine])
            for name, of_peer in taken.items():
                ratio = of_peer[0].seconds / run.seconds
                yield Result(LARGE_PEERS[name], engine, ratio, _of_peer(large, of_peer))


def _large(large: River, engine: str, run: Run, plain: Run) -> Iterator[Result]:
    """Point 6 on one engine; the broker is not counted."""
    details = {"records": large.records, "seconds": round(run.seconds, 1)}
    yield Result(points.LARGE_BACKLOG, engine, large.records / run.seconds, details)
    yield Result(
        points.MEMORY,
        engine,
        run.peak_bytes / 2**30,
        {"peak_bytes": [run.peak_bytes, plain.peak_bytes]},
    )
    yield Result(points.MEMORY_GROWTH, engine, run.peak_bytes / plain.peak_bytes)


def _cores(small: River, plain: Run) -> Result:
    """Point 7."""
    two = plain if os.cpu_count() == 2 else small.run("spark", "two", {"spark.master": "local[2]"})
    one = small.run("spark", "one", {"spark.master": "local[1]"})
    seconds = {"seconds": {2: round(two.seconds, 1), 1: round(one.seconds, 1)}}
    return Result(points.CORES, "spark", one.seconds / two.seconds, seconds)


def _many_partitions(
    sizes: Sizes, folder: Path, shape: Shape, quickest: Mapping[str, float]
) -> Iterator[Result]:
    """Point 7: the same records in many partitions; `quickest`: seconds in few, by engine."""
    with river(folder / "wide", sizes.records, sizes.many_partitions, shape) as wide:
        runs = {engine: [wide.run(engine, "plain")] for engine in quickest}
        _run_again(wide, runs)
        for engine, both in runs.items():
            many, few = _quicker(both).seconds, quickest[engine]
            details = {wide.partitions: round(many, 1), sizes.partitions: round(few, 1)}
            yield Result(
                points.MANY_PARTITIONS, engine, many / few, {"seconds_by_partitions": details}
            )


def _variants(sizes: Sizes, folder: Path) -> Iterator[Result]:
    """Point 10: tenants, a predicate, and ids, the latter on the embedded engine alone."""
    kind = sizes.kinds[0]
    for tenants, point in points.TENANTS.items():
        shape = Shape(kind, tenants)
        with river(folder / "tenants", sizes.records, sizes.partitions, shape) as of_tenants:
            for engine in sizes.engines:
                yield replace(_to_plain(of_tenants, engine, point, "tenants"), kind=kind)
    shape = Shape(kind, has_ids=True)
    with river(folder / "ids", sizes.records, sizes.partitions, shape) as of_ids:
        for engine in sizes.engines:
            yield replace(_to_plain(of_ids, engine, points.VALID, "valid"), kind=kind)
        if "embedded" in sizes.engines:
            yield replace(_to_plain(of_ids, "embedded", points.IDS, "ids"), kind=kind)


def _durable(sizes: Sizes, folder: Path) -> Iterator[Result]:
    """Point 13: with every commit on a slow disk before anything relies on it, and without."""
    kind = sizes.kinds[0]
    with (
        river(folder / "durable", sizes.records, sizes.partitions, Shape(kind)) as small,
        slow_disk(folder / "disk"),
    ):
        for engine in sizes.engines:
            to_plain = _to_plain(small, engine, points.DURABLE, "volatile", turns=3)
            seconds: Any = to_plain.details["seconds"]
            durable = {"seconds": {"without": seconds["with"], "with": seconds["without"]}}
            yield replace(to_plain, value=1 / to_plain.value, details=durable, kind=kind)


def _to_plain(
    river: River, engine: str, point: points.Point, variant: Variant, turns: int = 2
) -> Result:
    """The same records without what the variant uses and with it, in turns, the best of each."""
    plain, more = [], []
    for turn in range(turns):
        plain.append(river.run(engine, f"plain_{turn}").seconds)
        more.append(river.run(engine, f"{variant}_{turn}", variant=variant).seconds)
    seconds = {
        "without": [round(each, 1) for each in plain],
        "with": [round(each, 1) for each in more],
    }
    return Result(point, engine, min(more) / min(plain), {"seconds": seconds})


def _of_lake(numbers: Set[int], small: River, engine: str, plain: Run) -> Iterator[Result]:
    """Points 8 and 9: about the lake that a run has left."""
    if 8 in numbers:
        yield from _disk(small, engine, plain)
    if 9 in numbers:
        yield from _starts(engine, plain)


def _disk(small: River, engine: str, plain: Run) -> Iterator[Result]:
    """Point 8; whatever maintenance replaces is kept until the retention is over."""
    lake = plain.folder / "lake"
    yield Result(
        points.DISK, engine, bytes_in(lake) / small.input_bytes, {"input_bytes": small.input_bytes}
    )
    _command(plain.folder, "maintain")
    yield Result(points.DISK_MAINTAINED, engine, bytes_in(lake) / small.input_bytes)
    present = sum(
        Path(file).stat().st_size
        for log in lake.glob("*/_delta_log")
        for file in DeltaTable(str(log.parent)).file_uris()
    )
    yield Result(points.DISK_PRESENT, engine, present / small.input_bytes)


def _starts(engine: str, plain: Run) -> Iterator[Result]:
    """Point 9: the better of two each."""
    for point, command in ((points.NOTHING_TO_DO, ("run", "--once")), (points.STATUS, ("status",))):
        seconds = [_command(plain.folder, *command) for _ in range(2)]
        yield Result(point, engine, min(seconds), {"seconds": [round(each, 2) for each in seconds]})


def _command(folder: Path, *arguments: str) -> float:
    """How long a command takes, as a process from its start to its end."""
    with program(folder, "-m", "watersmeet", *arguments) as running:
        running.wait()
    return running.seconds


def _steps(log: str, began: float) -> dict[str, float]:
    steps = {}
    for stamp, layer in re.findall(r"^(\S+ \S+) INFO watersmeet: ([^:]+): ", log, re.MULTILINE):
        seconds = datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp() - began
        steps[layer.partition("_")[0]] = round(seconds, 1)
    return steps
