"""Gold: what silver has finished goes to Kafka, per partition one gapless sequence in order of (event time, key).

The sink itself says where the sequence stands. A publication is made in this order:

1. *extent*: which finished, valid records silver has beyond the last published one (`pipelines.extent`);
2. *min_offsets*: from which Kafka offsets a lost lake would be taken up again after them (`_headers`);
3. *publish*: one transaction per partition, on the executors or, where they are few, from here (`pipelines.adapters.publisher`);
4. *note*: a row per transaction in `published`.

After a crash before or in 3 a partition's messages are all out or not at all (under `at_least_once`: perhaps a part of them),
and the next start reads from the sink which; between 3 and 4, the next start writes the row that is missing. Nothing that
times out later can sort before what is out. Under `at_most_once`, 4 comes before 3: what is noted counts as out, whether it is
or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from pipelines import tables
from pipelines.adapters.decisions import read_decisions
from pipelines.adapters.kafka import Cluster, sink_settings
from pipelines.adapters.lake import Lake
from pipelines.adapters.publisher import PUBLICATION, Headers, HomePublisher, Publication, Publisher
from pipelines.core.idle import Decision
from pipelines.core.recovery import encode_idle, encode_min_offsets, idle_header, min_offset
from pipelines.core.sequence import IDLE, MIN_OFFSETS, Tail
from pipelines.extent import Extent, Place, finished_since, pending_extents
from pipelines.faults import reach
from pipelines.settings import Settings
from pipelines.transforms.message import message_value
from pipelines.transforms.ranges import by_partition, case

MAX_PER_TRANSACTION = 250_000
"""About so many messages of a partition go into one transaction: few large ones are cheap, and none outlives its timeout."""

FEW_RECORDS = 5_000
"""So many are published from this process, sooner than Spark would have begun to."""


@dataclass
class Gold:
    """The publication of one lake's silver over `partitions` sink partitions; one owner at a time."""

    lake: Lake
    settings: Settings
    partitions: int
    check_owner: Callable[[], None] = lambda: None
    """Asked before an earlier publisher is fenced: a paused process that wakes up must not fence its successor."""
    _tails: dict[int, Tail] | None = None
    _has_more: bool = False

    def drain(self, is_stopping: Callable[[], bool] = lambda: False) -> Iterator[list[Publication]]:
        """Publishes everything that silver has finished; yields what each round of transactions wrote."""
        if self._tails is None:
            self._tails = self._recover()
        while not is_stopping():
            tails, self._tails = self._tails, None  # after a failure only the sink knows what is out
            publications = self._publish_next(tails)
            self._tails = tails | {publication.partition: publication.tail for publication in publications}
            if publications:
                reach("gold.done")
                yield publications
            if not self._has_more:
                return

    def recover(self) -> None:
        """What a crash left is settled: no transaction is open, and `published` has a row for every message that is out."""
        self._tails = self._recover()

    def _recover(self) -> dict[int, Tail]:
        """Where every partition's sequence stands, by the sink's own word; `published` then knows it too."""
        self.check_owner()
        self._home.forget()
        self._ensure_topic()
        noted = self._noted_tails()
        counts_as_out = self.settings.publish.delivery == "at_most_once"
        tails, missing = {}, []
        for partition in range(self.partitions):
            tail, last = Publisher(self.settings).settle(partition), noted.get(partition)
            if tail is not None and (last is None or last.seq < tail.seq):
                missing.append(Publication.up_to(tail, partition, first_seq=0 if last is None else last.seq + 1))
            if tail is not None and not (counts_as_out and last is not None and last.seq > tail.seq):
                tails[partition] = tail
            elif last is not None:
                tails[partition] = last  # retention has emptied the partition, or what was noted never came out
        self._note(missing)
        return tails

    def _ensure_topic(self) -> None:
        cluster = Cluster(self.settings.kafka)
        if self._topic not in cluster.partition_counts():
            cluster.create_topic(self._topic, self.partitions, sink_settings(self.settings))

    @property
    def _topic(self) -> str:
        return self.settings.publish.topic

    def _publish_next(self, tails: Mapping[int, Tail]) -> list[Publication]:
        """Steps 1 to 4, for as much as one transaction per partition should hold."""
        extents = pending_extents(self.lake, tails, self.partitions)
        self._has_more = False
        if not extents:
            return []
        is_small = self.lake.is_local and sum(extent.records for extent in extents.values()) <= FEW_RECORDS
        finished = self._fetch_finished(tails) if is_small else self._read_finished(tails)
        # Silver moves on meanwhile: what is published ends where the headers say.
        pending = self._pending(finished, tails).where(
            _is_up_to({partition: extent.last for partition, extent in extents.items()})
        )
        largest = max(extent.records for extent in extents.values())
        if largest > MAX_PER_TRANSACTION:
            self._has_more = True
            pending, extents = self._first_part(pending, MAX_PER_TRANSACTION / largest)
        publish = self._publish_from_here if is_small else self._publish
        headers = self._headers(extents)
        reach("gold.publish")
        if self.settings.publish.delivery == "at_most_once":
            publications = [_promise(partition, extent, tails.get(partition)) for partition, extent in extents.items()]
            self._note(publications)
            publish(pending, headers, tails)
            return publications
        publications = publish(pending, headers, tails)
        reach("gold.note")
        self._note(publications)
        return publications

    def _first_part(self, pending: DataFrame, share: float) -> tuple[DataFrame, dict[int, Extent]]:
        """Of each partition's pending records about such a share, up to a point in time, and how far that reaches."""
        until = pending.groupBy("partition").agg(F.percentile_approx("event_time", share).alias("until"))
        part = pending.where(F.col("event_time") <= by_partition(dict(until.collect())))
        place = F.struct("event_time", "merge_key")
        ends = part.groupBy("partition").agg(F.count(F.lit(1)), F.min(place), F.max(place))
        return part, {p: Extent(records, Place(*first), Place(*last)) for p, records, first, last in ends.collect()}

    def _publish(self, pending: DataFrame, headers: Mapping[int, Headers], tails: Mapping[int, Tail]) -> list[Publication]:
        """Step 3."""
        self._home.forget()
        published = (
            _outgoing(pending)
            .repartitionById(self.partitions, "partition")
            .sortWithinPartitions("partition", "event_time", "key")
            .mapInArrow(Publisher(self.settings).publish_batches(headers, tails), PUBLICATION)
        )
        return [Publication(*row) for row in published.collect()]

    def _publish_from_here(
        self, pending: DataFrame, headers: Mapping[int, Headers], tails: Mapping[int, Tail]
    ) -> list[Publication]:
        """The same for few messages."""
        ascending: list[tuple[str, Literal["ascending"]]] = [(c, "ascending") for c in ("partition", "event_time", "key")]
        rows = self.lake.collect(_outgoing(pending))
        return self._home.publish(rows.sort_by(ascending), headers, tails)

    @cached_property
    def _home(self) -> HomePublisher:
        return HomePublisher(Publisher(self.settings))

    def _fetch_finished(self, tails: Mapping[int, Tail]) -> DataFrame:
        """Finished, valid records that are no older than their partition's tail."""
        schema = self.lake.schema(tables.SILVER)
        columns = ", ".join(f"`{name}`" for name in schema.names)
        is_new = finished_since(self.lake, {p: tail.event_time for p, tail in tails.items()}, self.partitions)
        found = self.lake.fetch(f"SELECT {columns} FROM {{silver}} WHERE {is_new}", schema)
        return self.lake.frame(found, schema)

    def _read_finished(self, tails: Mapping[int, Tail]) -> DataFrame:
        """The same, and older ones, for Spark to read."""
        silver = self.lake.read(tables.SILVER).where("status = 'timed_out' AND valid")
        if len(tails) < self.partitions:
            return silver
        # What is true of every row wanted, said so that Delta's statistics can skip files by it.
        earliest = min(tail.event_time for tail in tails.values())
        return silver.where(F.col("event_time") >= F.timestamp_millis(F.lit(earliest)))

    def _pending(self, finished: DataFrame, tails: Mapping[int, Tail]) -> DataFrame:
        """Those after each partition's tail: partition, event_time (ms), merge_key, value (bytes)."""
        value = message_value(finished.schema, self.settings.publish, list(self.settings.sources))
        messages = finished.select(
            "partition", F.unix_millis("event_time").alias("event_time"), "merge_key", value.cast("binary").alias("value")
        )
        return messages.where(~F.coalesce(_is_up_to(tails), F.lit(False))) if tails else messages

    def _headers(self, extents: Mapping[int, Extent]) -> dict[int, Headers]:
        """Step 2: what a partition's last message says of where a lost lake is taken up again; without a transaction a part may
        come out, so the first must say it too, each for itself.
        """
        places = {partition: [extent.last] for partition, extent in extents.items()}
        if self.settings.publish.delivery != "exactly_once":
            for partition, extent in extents.items():
                places[partition].append(extent.first)
        headers: dict[int, Headers] = {partition: {} for partition in extents}
        for nth in range(max(map(len, places.values()))):
            said = self._beginnings({partition: places[partition][nth].event_time for partition in extents})
            for partition, header in said.items():
                place = places[partition][nth]
                headers[partition][place.event_time, place.merge_key] = header
        return headers

    def _beginnings(self, times: Mapping[int, int]) -> dict[int, list[tuple[str, bytes]]]:
        """Per partition, by source, the first offset at a position >= an event time, and what the idle policy has decided from
        there on.

        A position first reaches a time at the first record, or after the first decision, that has it; and every source has
        one, since the clock has passed that time in all of them.
        """
        offsets: dict[int, dict[str, int]] = {partition: {} for partition in times}
        decisions = self._decisions()
        earliest = self.lake.time_literal(min(times.values()))  # true of every row wanted: files are skipped by it
        reached = case({partition: self.lake.time_literal(time) for partition, time in times.items()})
        for source in self.settings.sources:
            first = self.lake.rows(
                f"SELECT `partition`, MIN(`offset`) FROM {{{tables.bronze(source)}}} "
                f"WHERE event_time >= {earliest} AND event_time >= {reached} GROUP BY `partition`"
            )
            found: dict[int, int] = dict(first)
            for partition, time in times.items():
                records = [(found[partition], time)] if partition in found else []
                offsets[partition][source] = min_offset(records, decisions[partition].get(source, ()), time, next_offset=0)
        said = {}
        for partition, by_source in offsets.items():
            idle = idle_header(decisions[partition], by_source)
            said[partition] = [(MIN_OFFSETS, encode_min_offsets(by_source)), *([(IDLE, encode_idle(idle))] if idle else [])]
        return said

    def _decisions(self) -> dict[int, dict[str, list[Decision]]]:
        """The idle policy's decisions, by partition and source."""
        decisions: dict[int, dict[str, list[Decision]]] = {partition: {} for partition in range(self.partitions)}
        for tp, decision in read_decisions(self.lake):
            decisions[tp.partition].setdefault(tp.source, []).append(decision)
        return decisions

    def _note(self, publications: Sequence[Publication]) -> None:
        """Step 4."""
        if not publications:
            return
        self.lake.append_rows([(*publication, self._sink) for publication in publications], tables.PUBLISHED)

    def _noted_tails(self) -> dict[int, Tail]:
        """What `published` knows of each partition's last message in this very topic."""
        rows = self.lake.rows(
            "SELECT p.`partition`, last_seq, last_event_time, last_key, sink_offset FROM {published} AS p JOIN "
            f"(SELECT `partition`, MAX(last_seq) AS latest FROM {{published}} WHERE sink = '{self._sink}' GROUP BY `partition`) "
            f"AS of_all ON p.`partition` = of_all.`partition` AND last_seq = latest WHERE sink = '{self._sink}'"
        )
        return {partition: Tail(*tail) for partition, *tail in rows}

    @cached_property
    def _sink(self) -> str:
        """The sink topic and Kafka's own identity of it: a new one begins with the first message again."""
        return f"{self._topic} ({Cluster(self.settings.kafka).topic_ids([self._topic])[self._topic]})"


def _is_up_to(places: Mapping[int, Any]) -> Column:
    """Whether a record sorts at or before its partition's place (event time in ms, then key); null where it has none."""
    time = by_partition({p: place.event_time for p, place in places.items()})
    key = by_partition({p: place.key if isinstance(place, Tail) else place.merge_key for p, place in places.items()})
    return (F.col("event_time") < time) | ((F.col("event_time") == time) & (F.col("merge_key") <= key))


def _outgoing(pending: DataFrame) -> DataFrame:
    """The columns of a publisher's `Outgoing`."""
    return pending.select("partition", "event_time", F.col("merge_key").alias("key"), "value")


def _promise(partition: int, extent: Extent, before: Tail | None) -> Publication:
    """What `at_most_once` notes before it publishes: no offset can be known yet."""
    first_seq = 0 if before is None else before.seq + 1
    tail = Tail(first_seq + extent.records - 1, extent.last.event_time, extent.last.merge_key, None)
    return Publication.up_to(tail, partition, first_seq)
