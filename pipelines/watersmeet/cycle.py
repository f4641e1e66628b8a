"""Passes what is available through the layers that a process owns: bronze, silver, gold.

A batch of bronze, of all inputs side by side, is merged and published before the next one is read.
While bronze catches up, it reads one batch ahead of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from watersmeet.bronze import Bronze
from watersmeet.core.inputs import InputId
from watersmeet.core.sequence import CORRECTED
from watersmeet.core.texts import number_of
from watersmeet.core.times import time_text
from watersmeet.engine import Running
from watersmeet.gold import Gold
from watersmeet.kafka.cluster import Cluster, Topics, ends_of
from watersmeet.kafka.idle_detector import IdleDetector
from watersmeet.kafka.publisher import sink_publisher
from watersmeet.lake import tables
from watersmeet.lake.lease import EVOLVE, Lease
from watersmeet.lake.maintenance import Maintenance
from watersmeet.operations.retention import expire
from watersmeet.running.beginnings import has_own_corrections
from watersmeet.running.dead_letters import DeadLetters
from watersmeet.running.next_offsets import NextOffsets
from watersmeet.running.owner import Owner, kept_by
from watersmeet.silver import Silver

if TYPE_CHECKING:
    from watersmeet.run import Run

T = TypeVar("T")


class Cycle:
    """The layers of a run that holds their lease."""

    def __init__(self, run: Run, owner: Owner, lease: Lease, *, can_be_idle: bool) -> None:
        self._run = run
        self._settings = run.settings
        self.owner = owner
        self._lease = lease
        idle_after_ms = self._settings.merge.idle_after_ms if can_be_idle else None
        self._idle_detector = (
            IdleDetector(self._settings, idle_after_ms) if idle_after_ms is not None else None
        )
        # The threads stay: each keeps the tables that it has opened, and reads new commits alone.
        self._readers = ThreadPoolExecutor(len(self._settings.inputs))
        self._beside = ThreadPoolExecutor(1)
        self.expire = partial(expire, owner, self._settings)
        self._expire_some = partial(self.expire, only_if_worthwhile=True)
        self._cluster = Cluster(self._settings.kafka)
        self.bronze = {input_id: self._bronze(input_id) for input_id in self._settings.inputs}
        self.silver = Silver(owner, self._settings, run.partitions, self._idle_detector)
        publisher = partial(Gold, owner, self._settings, run.partitions, check_owner=lease.check)
        self.gold = publisher()
        self.corrections = [publisher(kind=CORRECTED)] if self._has_corrections() else []
        self.dead_letters = [
            DeadLetters(owner, self._settings, run.partitions, table, check_owner=lease.check)
            for table in self._settings.publish.dead_letter_topics
        ]
        self._maintenance = {
            layer: self._kept_small(kept_by(layer, self._settings)) for layer in ("silver", "gold")
        }

    def _has_corrections(self) -> bool:
        # `evolve` leaves a topic alone that has none of the lake, and may have others' messages.
        topic = self._settings.publish.corrections_topic
        if topic is None or self._run.change != EVOLVE:
            return topic is not None
        self._lease.check()
        sink_publisher(self._settings, topic).begin()  # an earlier owner sends none from here on
        return has_own_corrections(self.owner.engine.reader, self._settings, topic)

    def _bronze(self, input_id: InputId) -> Bronze:
        run = self._run
        next_offsets = NextOffsets(
            self.owner.engine.reader, self._settings, run.partitions, self.owner
        )
        maintenance = self._kept_small(kept_by("bronze", self._settings, input_id))
        return Bronze(self.owner, self._settings, input_id, next_offsets, run.reporter, maintenance)

    def _kept_small(self, names: Sequence[str]) -> Maintenance:
        return Maintenance(self.owner.engine, names, expire=self._expire_some)

    def complete(self) -> None:
        """Complete what a jump, or a publication, left undone that a crash has cut short.

        This comes before anything is planned, deleted, read elsewhere or changed.
        """
        if "silver" in self._run.layers:
            self.silver.complete()
        if "gold" in self._run.layers:
            for gold in (self.gold, *self.corrections):
                gold.complete()
            for dead_letters in self.dead_letters:
                dead_letters.complete()

    def raise_if_lost(self) -> None:
        """Raise LeaseLostError if another process has taken the layers over."""
        if self._lease.lost is not None:
            raise self._lease.lost

    @property
    def is_due(self) -> bool:
        """True where a source has been silent for so long that the idle policy may decide."""
        return self._idle_detector is not None and self._idle_detector.is_due

    def follow(self, work: Callable[[], None]) -> Running:
        """Begin to call `work` whenever there is more for the first of the layers, and soon once.

        That is in Kafka, or in the tables that an owner of the layers before writes.
        """
        engine = self.owner.engine
        if "bronze" in self._run.layers:
            return engine.follow_kafka(self._topics(self._settings.inputs), work)
        bronze = [tables.bronze(source) for source in self._settings.sources]
        read = {
            "silver": bronze,
            "gold": [tables.SILVER, *bronze] if self.dead_letters else [tables.SILVER],
        }
        written = {tables.SILVER} if "silver" in self._run.layers else set[str]()
        names = {table for layer in self._run.layers for table in read[layer]} - written
        return engine.follow_tables(sorted(names), work, "-".join(self._run.layers))

    def run(self) -> None:
        """Pass on everything that is available now, batch by batch, until a stop is asked for."""
        has_bronze = "bronze" in self._run.layers
        self._run.reporter.begin("works on the next batch")
        try:
            if not (has_bronze and self.read(self._settings.inputs, self._pass_on)):
                self._pass_on()
        finally:
            self._run.reporter.begin()

    def read(self, inputs: Sequence[InputId], pass_on: Callable[[], None] = lambda: None) -> bool:
        """Read inputs up to where Kafka ends now, and pass on each batch while the next is read.

        Return False where there was nothing.
        """
        retry = self._run.runner.retry
        ends = retry(partial(ends_of, self._cluster, self._topics(inputs)))
        if ends is None:
            return False

        def take() -> bool:
            taking = [
                self._readers.submit(retry, partial(self.bronze[i].take, ends[i.topic]))
                for i in inputs
            ]
            wait(taking)
            has_taken = [batch.result() for batch in taking]  # one fails beside another's batch
            return any(has_taken)

        return pass_on_beside(self._beside, take, pass_on, self._run.stopping.is_set)

    def _topics(self, inputs: Sequence[InputId]) -> Topics:
        topics = sorted({input_id.topic for input_id in inputs})
        return Topics(self._settings.kafka, topics, self._run.partitions)

    def _pass_on(self) -> None:
        if "silver" in self._run.layers:
            self._merge()
        if "gold" in self._run.layers:
            self._publish()

    def _merge(self) -> None:
        for plan in self._batches(self.silver.drain):
            offsets = sum(done.size for done in plan.ranges.values())
            clock = min(plan.clocks.values(), default=None)
            slowest = "undefined" if clock is None else time_text(clock)
            self._run.reporter.notify(
                "silver",
                f"batch {plan.batch}: {number_of(offsets, 'offset')}, slowest clock {slowest}",
                batch=plan.batch,
                offsets=offsets,
                clock=clock,
            )
            self._run.runner.retry(self._maintenance["silver"].after_commit)

    def _publish(self) -> None:
        # The sink comes last: its messages say from where on a lost lake is made again, and what
        # lies before that is read no more. Where silver is another process's, it goes no further
        # than that one had come before dead letters and corrections were looked for.
        if "silver" not in self._run.layers:
            sequence = self.gold.sequence
            sequence.until = self._run.runner.retry(sequence.reached)
        for dead_letters in self.dead_letters:
            for sent in self._batches(dead_letters.drain):
                news = f"{number_of(sent, 'dead letter')} sent to {dead_letters.topic}"
                self._run.reporter.notify("gold", news, messages=sent, topic=dead_letters.topic)
                self._run.runner.retry(self._maintenance["gold"].after_commit)
        for gold in (*self.corrections, self.gold):
            topic = gold.sequence.topic
            for publications in self._batches(gold.drain):
                messages = sum(p.tail.seq - p.first_seq + 1 for p in publications)
                news = f"{number_of(messages, 'message')} published to {topic}"
                self._run.reporter.notify("gold", news, messages=messages, topic=topic)
                self._run.runner.retry(self._maintenance["gold"].after_commit)

    def _batches(self, drain: Callable[[Callable[[], bool]], Iterator[T]]) -> Iterator[T]:
        batches = drain(self._run.stopping.is_set)

        def next_batch() -> T | None:
            nonlocal batches
            try:
                return next(batches, None)
            except Exception:
                batches = drain(self._run.stopping.is_set)  # the one that has raised is at its end
                raise

        while (batch := self._run.runner.retry(next_batch)) is not None:
            yield batch


def pass_on_beside(
    beside: Executor,
    take: Callable[[], bool],
    pass_on: Callable[[], None],
    is_stopping: Callable[[], bool],
) -> bool:
    """Take batches until there is none, and pass on each, `beside`, while the next one is taken.

    So there is at most one that is taken and not being passed on. Return False where there was
    none. At the end all of them are passed on. Raises what fails, once what is under way has ended.
    """
    passing = Future[None]()
    passing.set_result(None)
    has_taken = False
    try:
        while not is_stopping() and take():
            has_taken = True
            passing.result()
            passing = beside.submit(pass_on)
    finally:
        wait([passing])
    passing.result()
    return has_taken
