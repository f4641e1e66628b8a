"""Partitions that lose their ends and are filled again, each by a seed: those of the sources, of
the sink or of the topic of corrections, at a start or beneath a living run, in every delivery mode.

Either a run refuses, says from which offset on Kafka has other records, and its way out leads on;
or everything is exactly once, as the merge model has it.

`python -m tests.faults.elections --seeds 50 --seed 1` has so many, some of them by one death of the
broker; `--engine spark` on Spark. `--seed 7 --seeds 1` repeats one.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import threading
import traceback
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import tests.conftest  # noqa: F401  # quick starts
from tests.faults.command import say
from tests.faults.wired import broken_by
from tests.support.cases import HOLE, SOURCES, keyed
from tests.support.configurations import IDS
from tests.support.rivers import EMBEDDED, FOLDER, River, until
from tests.support.topics import CheckedProducer, consume, produce_transaction, settings_of
from tests.support.truncated import Truncated, truncated
from watersmeet.errors import ForeignMessageError, RecordsReplacedError, WatersmeetError
from watersmeet.kafka import cluster
from watersmeet.lake import tables
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import LAYERS, Run

MODES = ("exactly_once", "at_least_once", "at_most_once")
TORN = ("publisher.produce", "publisher.commit", "publisher.committed", "gold.done")
"""Where a run is killed before the broker is, which then loses a part of its transaction."""
ONE_BY_ONE = {"batch.num.messages": "1"}
"""With this, a log may end between any two messages of a transaction."""
AT_ONCE = 10
"""Seeds whose partitions lose their ends by one death of the broker."""

Place = tuple[str, int]
"""A topic-partition."""


class Seen(NamedTuple):
    """A record as Kafka has it."""

    timestamp: int
    key: bytes | None
    value: bytes | None


Log = dict[Place, dict[int, Seen]]
"""Committed records by offset."""

_held: set[str] = set()
"""Runs, by the beginnings of their topics' names, that do not look for new records just now."""


@contextmanager
def holding() -> Iterator[None]:
    """Inside, runs that are held do not look into Kafka before they are let go."""

    def look(asked: cluster.Cluster, topics: cluster.Topics) -> Any:
        until(lambda: topics.names[0].partition("-")[0] not in _held, "to be let go")
        return ends_of(asked, topics)

    ends_of = cluster.ends_of
    settling = patch("watersmeet.kafka.cluster.SETTLING_S", 3.0)
    with patch("watersmeet.cycle.ends_of", look), settling:
        yield


class Election:
    """What happens to one lake by a seed."""

    def __init__(self, own: Truncated, folder: Path, number: int, lake: str = EMBEDDED) -> None:
        self._rng = random.Random(number)
        choose = self._rng.choice
        self.mode = MODES[number % 3]
        self.of = choose(["sources", "sources", "sink", "corrections"])
        self.is_living = choose([False, False, True])
        self.is_held = self.is_living and choose([True, True, False])
        is_torn = self.of != "sources" and not self.is_living
        self.torn_at = choose([None, *TORN]) if is_torn else None
        self._own = own
        self._kafka = own.bootstrap_servers
        self.name = f"election{number}"
        self._river = River.make(
            self._kafka,
            folder,
            self.name,
            lake=lake,
            partitions=choose([1, 2, 3]),
            seed=number,
            publish__delivery=self.mode,
            publish__corrections={"topic": f"{self.name}-corrected", "within": "1d"},
            kafka__options=choose([{}, ONE_BY_ONE]),
            **choose([{}, IDS]),
        )
        self._failures: list[Exception] = []
        self._run: Run | None = None

    def __str__(self) -> str:
        how = "held" if self.is_held else "living" if self.is_living else "at a start"
        how = f"killed at {self.torn_at}" if self.torn_at else how
        return f"{self.name} ({self.mode}, {self.of}, {how})"

    def begin(self) -> dict[Place, int]:
        """Fill the topics and run; return about where partitions are to lose their ends."""
        self._flow(self._rng.randint(2, 4))
        self._river.finish()
        if self.is_living:
            self._run = Run(self._river.settings, LAYERS, Reporter())
            self._thread = threading.Thread(target=self._live, args=[self._run])
            self._thread.start()
            self._flow(1)
            until(lambda: bool(self._failures) or self._is_read(), "the first records", 120)
        else:
            self._flow(self._rng.choice([0, 0, 1]))
        if self.torn_at:
            self._flow(2)
            self._kill_at(self.torn_at)
        if self.is_held:
            _held.add(self.name)
        topics = self._sources if self.of == "sources" else [self._topic]
        self._before, self._nexts = self._seen(topics), self._next_offsets()
        places = [place for place, log in self._before.items() if log]
        cut = [place for place in places if self._rng.random() < 0.6] or places[:1]
        ends = {place: self._rng.randint(0, max(self._before[place]) + 1) for place in cut}
        if self.torn_at:
            settings = settings_of(self._kafka)
            bounds, open_ = cluster.Cluster(settings).bounds_and_unsettled(
                self._topic, range(self._river.partitions)
            )
            for topic, p in ends:
                end = bounds[p][1] + open_.get(p, 0)
                ends[topic, p] = self._rng.randint(max(0, end - 8), end)
        return ends

    def _kill_at(self, point: str) -> None:
        """Kill a run there, or at its end where it does not come there."""
        run = self._river.run("--once", point=point)
        until(lambda: run.is_held or run.process.poll() is not None, "the fault point")
        run.kill()

    def end(self, ends: dict[Place, int]) -> list[str]:
        """Fill the partitions again, go on, and return what is broken."""
        try:
            if self.of == "sources":
                return self._go_on_behind_sources(ends)
            return self._go_on_behind_sequence(ends)
        finally:
            _held.discard(self.name)
            if self._run is not None:
                self._run.stopping.set()
                self._thread.join(120)

    # -- of the sources

    def _go_on_behind_sources(self, ends: dict[Place, int]) -> list[str]:
        for place, end in ends.items():
            self._fill(place, end, self._rng.randint(0, 12))
        self._flow(self._rng.choice([0, 1]))
        failure = self._go_on()
        nexts = self._nexts
        if failure is not None:
            short = [place for place, end in ends.items() if end < nexts[place]]
            told = [f"{topic}[{p}] ends at offset" in str(failure) for topic, p in short]
            for place in short:
                self._fill(place, nexts[place], 13)
            if any(told):
                failure = self._finish()
        replaced = self._replaced(nexts)
        if replaced and not isinstance(failure, RecordsReplacedError):
            return [f"{failure!r}, and Kafka has other records in {replaced}"]
        if replaced:
            return self._accept(replaced, nexts, failure) + self._judged(nexts)
        return [f"{failure!r}, and Kafka has what was read"] if failure else self._judged(nexts)

    def _accept(
        self, replaced: set[Place], nexts: dict[Place, int], failure: Exception | None
    ) -> list[str]:
        """Follow the way out; return what is wrong with the refusal."""
        now = self._seen(self._sources)
        problems = []
        for topic, p, since, to in re.findall(r"(\S+)\[(\d+)\] from (\d+) to (\d+)", str(failure)):
            place, offset = (topic, int(p)), int(since)
            before = self._before[place]
            last_same = max((o for o in before if o < offset), default=None)
            if (
                place not in replaced
                or int(to) + 1 != nexts[place]
                or before.get(offset) == now[place].get(offset)
                or (last_same is not None and before[last_same] != now[place].get(last_same))
            ):
                problems.append(f"{failure}: that is not so of {place}")
        self._accept_losses("continue")
        self._river.finish()
        for place in replaced:
            log = sorted(now[place].items())
            others = [r for o, r in log if o < nexts[place] and r != self._before[place].get(o)]
            self._produce(place, others)
        self._river.finish()
        self._accept_losses("stop")
        return problems

    def _accept_losses(self, policy: str) -> None:
        self._river.config["kafka"]["on_data_loss"] = policy
        self._river.write()

    def _replaced(self, nexts: dict[Place, int]) -> set[Place]:
        """Where Kafka has another record than the last one that was read, or none."""
        now = self._seen(self._sources)
        replaced = set[Place]()
        for place, log in self._before.items():
            last = max((offset for offset in log if offset < nexts[place]), default=None)
            if last is not None and now[place].get(last) != log[last]:
                replaced.add(place)
        return replaced

    def _judged(self, nexts: dict[Place, int]) -> list[str]:
        """What is broken, if what was read is what counts before these offsets."""
        river, now = self._river, self._seen(self._sources)
        for p, case in river.cases.items():
            for source in SOURCES:
                place = river.topic(source), p
                before = self._before[place]
                log = {o: seen for o, seen in before.items() if o < nexts[place]}
                log |= {o: seen for o, seen in now[place].items() if o >= nexts[place]}
                offsets = range(max(log, default=-1) + 1)
                case.values[source] = [log[o].value if o in log else HOLE for o in offsets]
            case.arrivals = [s for s in SOURCES for _ in case.values[s]]
        self._river.finish()
        return broken_by(self._river, self.mode)

    def _fill(self, place: Place, end: int, count: int) -> None:
        """Have so many other records in a partition: made up, like those that were there, the same,
        or of a transaction that ends well or not."""
        topic, p = place
        before = self._before[place]
        made_up = [Seen(1, None, keyed("f", self._rng.randrange(4000), n=n)) for n in range(count)]
        kind = self._rng.choice(["made up", "alike", "same", "committed", "aborted"])
        if kind in ("committed", "aborted"):
            values = [seen.value or b"" for seen in made_up]
            produce_transaction(self._kafka, topic, values, p, commit=kind == "committed")
            return
        if kind != "made up":
            there = [before.get(end + n, made_up[n]) for n in range(count)]
            made_up = [
                seen._replace(value=(seen.value or b"").replace(b'"n"', b'"m"'))
                if kind == "alike"
                else seen
                for seen in there
            ]
        self._produce(place, made_up)

    # -- of the sink, and of corrections

    def _go_on_behind_sequence(self, ends: dict[Place, int]) -> list[str]:
        foreign = [place for place in ends if self._rng.random() < 0.2]
        for place in foreign:
            self._produce(place, [Seen(1, b"k", b"not of this lake")])
        self._flow(1)
        failure = self._go_on()
        if foreign:
            is_told = isinstance(failure, ForeignMessageError) and any(
                f"{topic}[{p}] ends" in str(failure) for topic, p in foreign
            )
            # A living run has read the end before, and may not look at it again.
            is_right = is_told or (self.is_living and failure is None)
            return [] if is_right else [f"{failure!r}, and {foreign} have messages of others"]
        return [repr(failure)] if failure else broken_by(self._river, self.mode)

    # -- what all have in common

    @property
    def _sources(self) -> list[str]:
        return [self._river.topic(source) for source in SOURCES]

    @property
    def _topic(self) -> str:
        return self._river.sink if self.of == "sink" else f"{self.name}-corrected"

    def _flow(self, times: int) -> None:
        for _ in range(times):
            self._river.flow(records=self._rng.randint(1, 4))

    def _produce(self, place: Place, records: Iterable[Seen]) -> None:
        producer = CheckedProducer(self._kafka)
        for seen in records:
            producer.produce(place[0], seen.value, seen.key, place[1], timestamp=seen.timestamp)
        assert producer.flush() == 0

    def _seen(self, topics: Collection[str]) -> Log:
        log: Log = {(t, p): {} for t in topics for p in range(self._river.partitions)}
        for topic in topics:
            for m in consume(self._kafka, topic, self._river.partitions):
                seen = Seen(m.timestamp()[1], m.key(), m.value())
                log[topic, m.partition()][m.offset()] = seen
        return log

    def _next_offsets(self) -> dict[Place, int]:
        nexts: dict[Place, int] = defaultdict(int)
        for source in SOURCES:
            last = {"last": ("max", "offset")}
            rows = self._river.reader.summary(tables.bronze(source), ["partition"], last)
            for row in rows.to_pylist():
                nexts[self._river.topic(source), row["partition"]] = row["last"] + 1
        return nexts

    def _is_read(self) -> bool:
        """Whether bronze has what Kafka has, and gold what bronze has finished."""
        nexts = self._next_offsets()
        seen = self._seen(self._sources)
        return all(max(log, default=-1) < nexts[place] for place, log in seen.items())

    def _live(self, run: Run) -> None:
        try:
            run.until_stopped()
        except Exception as failure:
            self._failures.append(failure)

    def _go_on(self) -> Exception | None:
        """Let the living run go on until it has read everything, or fails; then another one."""
        if self._run is not None:
            _held.discard(self.name)
            until(lambda: not self._thread.is_alive() or self._is_read(), "the records", 120)
            self._run.stopping.set()
            self._thread.join(120)
            if self._failures:
                return self._failures[0]
        return self._finish()

    def _finish(self) -> Exception | None:
        try:
            self._river.finish()
        except WatersmeetError as failure:
            return failure
        return None


def play(
    own: Truncated, folder: Path, numbers: Sequence[int], lake: str = EMBEDDED
) -> dict[str, list[str]]:
    """What is broken by each of these seeds, of which all lose their ends at once."""
    with holding():
        elections = [Election(own, folder / str(n), n, lake) for n in numbers]
        cuts = [election.begin() for election in elections]
        ends = own.lose({place: at for its in cuts for place, at in its.items()})
        broken = {}
        for election, its in zip(elections, cuts, strict=True):
            try:
                problems = election.end({place: ends[place] for place in its})
            except Exception:
                problems = [traceback.format_exc()]
            broken[str(election)] = problems
        return broken


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--engine", choices=["embedded", "spark"], default="embedded")
    options = parser.parse_args(arguments)
    lake = FOLDER if options.engine == "spark" else EMBEDDED
    failed = 0
    last = options.seed + options.seeds
    with tempfile.TemporaryDirectory() as name, truncated(Path(name) / "broker") as own:
        for begin in range(options.seed, last, AT_ONCE):
            numbers = range(begin, min(begin + AT_ONCE, last))
            for election, problems in play(own, Path(name), numbers, lake).items():
                failed += bool(problems)
                say(f"{election}: {'fails' if problems else 'holds'}")
                sys.stdout.write("".join(f"  {problem}\n" for problem in problems))
                sys.stdout.flush()
    sys.stdout.write(f"{failed} failed\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
