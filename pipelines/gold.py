"""The gold layer: publishes the records that silver has finished to Kafka.

Each partition of the sink is one gapless sequence in the order in which merge records were closed:
(closed at, tenant, due, key). With timeouts alone, that is (event time, key).

The sink itself says how far each sequence has come. There is one publisher, the process that owns
gold. A publication is made in these steps:

1. *plan*: find the finished, valid records that silver has beyond the last published one
   (`pipelines.running.publication_plan`), and the Kafka offsets from which a lost lake would be
   recovered after them;
2. *read* them in the order of publication, in chunks;
3. *messages*: make their keys, values, headers and timestamps (`core.message`);
4. *transaction*: send them in one transaction for all partitions (`kafka.publisher`);
5. *note*: write a row per partition to `published`.

After a crash before or in step 4, all messages are published or none (under `at_least_once`,
perhaps some of them), and the next start reads from the sink which. After a crash between steps 4
and 5, the next start writes the missing rows. Nothing that times out later can sort before what is
published. Under `at_most_once`, step 5 comes before step 4: what is noted counts as published,
whether it is or not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import monotonic
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.columns import times_ms
from pipelines.core.idle import IdleDecision
from pipelines.core.message import (
    SAYS_CLOSING,
    as_read,
    in_message_order,
    message_values,
    messages,
)
from pipelines.core.recovery import (
    CloseTimeRange,
    idle_header,
    min_offset,
    read_again_from,
    recovery_headers,
)
from pipelines.core.sequence import (
    FORGOTTEN,
    NO_RECOVERY,
    MessageTime,
    SequenceTail,
    tombstones,
)
from pipelines.engine import Engine
from pipelines.errors import SinkReplacedError, TransactionTimeoutError, kind_of
from pipelines.faults import fault_point
from pipelines.kafka.cluster import SMALLER_MESSAGES, Cluster, sink_settings
from pipelines.kafka.publisher import Publisher, sequence_tail, sink_publisher
from pipelines.kafka.reading import headers_of
from pipelines.lake import tables
from pipelines.lake.decisions import read_decisions
from pipelines.lake.epochs import Epochs, read_epochs
from pipelines.lake.fingerprints import read_fingerprints
from pipelines.lake.generations import Generation, Generations, read_generations
from pipelines.lake.order import PLACE_COLUMNS
from pipelines.lake.progress import last_batch
from pipelines.lake.published import last_noted_ms, last_published
from pipelines.lake.table_reader import first_offsets
from pipelines.monitoring.events import Failed, Published, RecordsProcessed
from pipelines.running.owner import Owner, now_ms
from pipelines.running.publication_plan import (
    LIMIT_BYTES,
    Limits,
    Pending,
    TimeRange,
    Unpublished,
    pending,
)
from pipelines.running.transaction_size import TransactionSize
from pipelines.settings import Settings

MAX_PER_TRANSACTION = 500_000
"""Approximate maximum number of messages in a transaction: few large transactions are cheap."""

MAX_PER_CHUNK = 50_000
"""Approximate number of rows that are read at a time, since they are held in memory. The first
transaction has no more.
"""

log = logging.getLogger("watersmeet.gold")

Headers = Mapping[MessageTime, list[tuple[str, bytes]]]
"""Additional headers of messages, by their time."""


class Publication(NamedTuple):
    """The messages of a partition in one transaction: from `first_seq` up to `tail`.

    The offset of `tail` is None if it is not known.
    """

    partition: int
    first_seq: int
    tail: SequenceTail


@dataclass
class Gold:
    """Publishes the silver of one lake to `partitions` sink partitions; one owner at a time."""

    owner: Owner
    settings: Settings
    partitions: int
    check_owner: Callable[[], None] = lambda: None
    """Called before an earlier publisher is fenced: a paused process that wakes up must not fence
    its successor.
    """
    now_s: Callable[[], float] = monotonic
    _tails: dict[int, SequenceTail] | None = None
    _sink: str = ""
    """The sink topic as `published` names it; a new topic starts again with the first message."""
    _size: TransactionSize = field(
        default_factory=lambda: TransactionSize(
            MAX_PER_TRANSACTION, min(MAX_PER_CHUNK, MAX_PER_TRANSACTION)
        )
    )
    _generations: Generations = field(default_factory=Generations)
    """Empty until the lake has begun. No other one begins while this process is the owner."""
    _noted_ms: int = 0
    """Time (epoch ms) of the last row of `published`."""

    def drain(self, is_stopping: Callable[[], bool] = lambda: False) -> Iterator[list[Publication]]:
        """Publish everything that silver has finished; yield what each transaction published."""
        while not is_stopping():
            tails = self.recover() if self._tails is None else self._tails
            self._tails = None  # after a failure, only the sink knows what is published
            with self.owner.step("gold", "plan"):
                if not self._generations:
                    self._generations = read_generations(self._engine.reader, self.settings)
                if not self._generations:
                    return  # the lake has not begun
                unpublished = self._unpublished(tails)._replace(clocks=self._clocks())
                found = pending(self._engine.reader, unpublished, self._limits())
            if found.chunks and self._sink != self._identified():
                continue  # and recover: the sink was deleted, or created again
            try:
                publications = self._timed(found, tails) if found.chunks else []
            except TransactionTimeoutError as error:
                if not self._size.timed_out(found.records):
                    raise
                log.warning(
                    "%s: about %d messages instead of %d", error, self._size.limit, found.records
                )
                self.owner.notify(Failed(kind_of(error), is_retried=True))
                continue
            self._tails = tails | {p.partition: p.tail for p in publications}
            self._tell_published(publications, self._tails)
            if publications:
                fault_point("gold.done")
                yield publications
            if not found.has_more:
                return

    def _unpublished(self, tails: Mapping[int, SequenceTail]) -> Unpublished:
        """Return which records count as not published."""
        from_batch = self._generations.newest.from_batch
        closing_from = self._epochs.closing_from
        return Unpublished(tails, self.partitions, from_batch, closing_from)

    def _limits(self) -> Limits:
        """Return the limits of the next publication."""
        limit_bytes = max(1, LIMIT_BYTES * self._size.limit // self._size.largest)
        return Limits(self._size.limit, MAX_PER_CHUNK, limit_bytes)

    def _timed(self, found: Pending, tails: Mapping[int, SequenceTail]) -> list[Publication]:
        """Publish what is pending; the time it takes decides the size of the next transaction."""
        began = self.now_s()
        publications = self._publish(found, tails)
        self._size.succeeded(self.now_s() - began, is_full=found.has_more)
        return publications

    def complete(self) -> None:
        """Complete `published`, as the sink says, and remember the tail of every sequence."""
        if self._tails is None:
            self._tails = self.recover()

    def recover(self) -> dict[int, SequenceTail]:
        """Return the tail of every partition's sequence, as the sink says.

        Afterwards no transaction is open, and `published` covers every published message.
        """
        self.check_owner()
        self._ensure_topic()
        self._sink = self._identified()
        self._noted_ms = max(self._noted_ms, last_noted_ms(self._engine.reader))
        noted = last_published(self._engine.reader, self._sink)
        self._publisher.begin()
        found = {
            p: sequence_tail(message)
            for p, message in self._publisher.tails(self.partitions).items()
        }
        counts_as_out = self.settings.publish.delivery == "at_most_once"
        # A partition that retention has emptied has no message in the sink: its noted tail stays.
        tails = dict(noted)
        missing = []
        for p, tail in found.items():
            last = noted.get(p)
            if last is None or last.seq < tail.seq:
                missing.append(Publication(p, 0 if last is None else last.seq + 1, tail))
            if not (counts_as_out and last is not None and last.seq > tail.seq):
                tails[p] = tail  # otherwise what was noted, and never sent, counts as published
        self._note(missing)
        return tails

    def send_tombstones(self, key: str, partitions: Collection[int]) -> int:
        """Tell consumers that a key was erased, by messages without a value; return how many were
        sent.

        They go to these partitions, or to all if none is named, but only where something was
        published. A partition whose last message is already a tombstone for the key gets none.
        """
        tails = self.recover()
        last = self._publisher.tails(self.partitions)
        is_said = {
            p
            for p, m in last.items()
            if m.key() == key.encode() and FORGOTTEN in dict(headers_of(m))
        }
        wanted = sorted((tails.keys() & partitions if partitions else tails.keys()) - is_said)
        self._publisher.send([tombstones(key, [(p, tails[p]) for p in wanted])])
        return len(wanted)

    def _clocks(self) -> Mapping[int, int] | None:
        """Return the clock (ms) of each partition if there were several epochs; else None.

        An epoch may close records in advance: what it closes at the clock where it began has the
        next millisecond as its `closed_at`. Another epoch may close further records at that same
        time, so none of them is published before the clock has reached it.
        """
        if len(self._epochs) == 1:
            return None
        last = last_batch(self._engine.reader)
        return {} if last is None else last[0].clocks

    def _publish(self, found: Pending, tails: Mapping[int, SequenceTail]) -> list[Publication]:
        """Publish what is pending (steps 1 to 5) and return it by partition."""
        headers = self._headers(found)
        fault_point("gold.publish")
        if self.settings.publish.delivery == "at_most_once":
            # What is noted is never sent again, so the messages are counted first, in a pass of
            # their own.
            promised = self._promised(found, tails)
            self._note(promised)
            with self.owner.step("gold", "publish"):
                self._publisher.send(self._messages(found, tails, headers))
            return promised
        ends: dict[int, SequenceTail] = {}
        with self.owner.step("gold", "publish"):
            offsets = self._publisher.send(
                _followed(self._messages(found, tails, headers), ends), self._check_sink
            )
        publications = _publications(
            {p: end._replace(offset=offsets[p]) for p, end in ends.items()}, tails
        )
        fault_point("gold.note")
        with self.owner.step("gold", "note"):
            self._note(publications)
        return publications

    def _messages(
        self, found: Pending, tails: Mapping[int, SequenceTail], headers: Mapping[int, Headers]
    ) -> Iterator[pa.Table]:
        """Yield the messages of what is pending (steps 2 and 3), each table for one partition."""
        ends = dict(tails)
        for chunk in found.chunks:
            rows = in_message_order(self._rows(chunk))
            for partition, extent in chunk.items():
                is_its = pc.and_(
                    pc.equal(rows["partition"], partition),
                    pc.equal(rows[SAYS_CLOSING], extent.says_closing),
                )
                mine = rows.filter(is_its)
                times = times_ms(mine[extent.columns[0]])
                mine = mine.filter(pa.array((times >= extent.first) & (times <= extent.last)))
                for part, of_part in self._with_headers(mine, headers[partition], extent):
                    made = messages(part, part["value"], ends.get(partition), of_part)
                    if made.num_rows:
                        ends[partition] = _end_of(made)
                        yield made

    def _with_headers(
        self, rows: pa.Table, headers: Headers, extent: TimeRange
    ) -> Iterator[tuple[pa.Table, Headers]]:
        """Yield the rows of a partition in parts, each with the headers of its messages.

        In a transaction only the last message has headers, since all of its messages are published
        or none. Otherwise every message whose time has headers gets them.
        """
        if self.settings.publish.delivery != "exactly_once":
            yield rows, headers
            return
        # More of the last time may follow.
        last = rows.num_rows if extent.end is not None else max(rows.num_rows - 1, 0)
        yield rows.slice(0, last), {}
        yield rows.slice(last), headers

    def _rows(self, chunk: Mapping[int, TimeRange]) -> pa.Table:
        """Return the finished rows of a chunk with the `value` of their message.

        The value, and whether the message says when the record was closed (`SAYS_CLOSING`), follow
        the rules of the epoch that finished the row.
        """
        columns = ["partition", "last_event_time", *PLACE_COLUMNS, *self.settings.sources]
        where = self._unpublished({}).of_chunk(chunk)
        tables_of_epochs = []
        until = None
        for epoch in reversed(self._epochs):
            batches = [
                ("batch", ">=", epoch.from_batch),
                *([] if until is None else [("batch", "<", until)]),
            ]
            of_epoch = where if len(self._epochs) == 1 else [[*term, *batches] for term in where]
            rows = self._engine.reader.rows(tables.SILVER, columns, of_epoch)
            tables_of_epochs.append(with_message_values(self._engine, rows, epoch.settings))
            until = epoch.from_batch
        return pa.concat_tables(tables_of_epochs)

    def _promised(self, found: Pending, tails: Mapping[int, SequenceTail]) -> list[Publication]:
        """Return what `at_most_once` notes before it publishes; no offset can be known yet."""
        ends: dict[int, SequenceTail] = {}
        for _ in _followed(self._messages(found, tails, {p: {} for p in found.ends}), ends):
            pass
        return _publications(ends, tails)

    # -- headers for recovery from a lost lake

    def _headers(self, found: Pending) -> dict[int, Headers]:
        """Return the recovery headers by partition, and by the time (ms) of the messages that carry
        them.

        A partition's last messages carry them. Its first messages do too if a part of the batch may
        be published alone.
        """
        headers: dict[int, dict[MessageTime, list[tuple[str, bytes]]]] = {p: {} for p in found.ends}
        ends = [{p: end.last for p, end in found.ends.items()}]
        if self.settings.publish.delivery != "exactly_once":
            ends.append({p: end.first for p, end in found.ends.items()})
        generation = self._generations.newest
        rules = read_fingerprints(
            self._engine.reader, self.settings, self._epochs, self._generations
        )
        decisions = self._decisions(generation)
        is_lived = self._is_lived(generation) or any(decisions.values())
        for times in ends:
            positions = {p: self._read_again_from(at) for p, at in times.items()}
            for p, offsets in self._min_offsets(generation, positions, decisions).items():
                idle = idle_header(
                    decisions[p], offsets, self._close_times(times[p], found.ends[p].last.time)
                )
                fingerprints = rules.of(p, offsets, positions[p])
                said = recovery_headers(offsets, idle, fingerprints, is_lived=is_lived)
                if said[0][0] == NO_RECOVERY:
                    log.warning(
                        "partition %d: what a lost lake needs of idle decisions does not fit into "
                        "a message",
                        p,
                    )
                headers[p][times[p]] = said
        return dict(headers)

    def _read_again_from(self, at: MessageTime) -> int:
        """Return the position (ms) from which a lost lake reads again after a message."""
        merge = self._epochs.current.settings.merge
        longest_ms = merge.window.longest_ms + (merge.tenant_max_lag_ms or 0)
        return read_again_from(at.time, longest_ms if at.says_closing else None)

    def _close_times(self, at: MessageTime, last_ms: int) -> CloseTimeRange | None:
        """Return the closing times of the messages from one on, with tenants."""
        lag_ms = self._epochs.current.settings.merge.tenant_max_lag_ms
        return None if lag_ms is None else CloseTimeRange(at.time, last_ms, lag_ms)

    def _is_lived(self, generation: Generation) -> bool:
        """Return True if more than records, idle decisions and one set of rules shaped the lake."""
        fingerprints = {epoch.settings.fingerprint for epoch in self._epochs}
        return generation.number > 0 or generation.is_lived or len(fingerprints) > 1

    def _decisions(self, generation: Generation) -> dict[int, dict[str, list[IdleDecision]]]:
        """Return the idle policy's decisions in a generation, by partition and input."""
        decisions: dict[int, dict[str, list[IdleDecision]]] = {
            partition: {} for partition in range(self.partitions)
        }
        for tp, decision in read_decisions(self._engine.reader, generation):
            decisions[tp.partition].setdefault(tp.source, []).append(decision)
        return decisions

    def _min_offsets(
        self,
        generation: Generation,
        times: Mapping[int, int],
        decisions: Mapping[int, Mapping[str, Sequence[IdleDecision]]],
    ) -> dict[int, dict[str, int]]:
        """Return, by partition and input, a generation's first offset at a position (ms) >= a time.

        A position first reaches a time at the first record, or after the first decision, that has
        it. Every source has one, since the clock has passed that time in all of them.
        """
        offsets: dict[int, dict[str, int]] = {partition: {} for partition in times}
        for source in self.settings.inputs:
            since = generation.offsets_of(source)
            first = first_offsets(
                self._engine.reader, tables.bronze(source), "event_time", times, since
            )
            for p, time in times.items():
                records = [(first[p], time)] if p in first else []
                mine = decisions[p].get(source, ())
                offsets[p][source] = min_offset(records, mine, time, next_offset=since.get(p, 0))
        return offsets

    # -- the table `published`, and the sink

    def _note(self, publications: Sequence[Publication]) -> None:
        """Write rows to `published` (step 5).

        Later rows get later times, whatever the wall clock was set to: they tell which sink is the
        last.
        """
        if not publications:
            return
        self._noted_ms = max(now_ms(), self._noted_ms + 1)
        noted = {"committed_at": self._noted_ms, "sink": self._sink}
        rows = [
            {
                "partition": p,
                "first_seq": first,
                "last_seq": t.seq,
                "last_event_time": t.event_time,
                "last_key": t.key,
            }
            | {
                "sink_offset": t.offset,
                "last_due": t.due,
                "last_closed_at": t.closed_at,
                "last_tenant": t.tenant,
                **noted,
            }
            for p, first, t in publications
        ]
        self.owner.append(
            tables.PUBLISHED, self._engine.lake.layout[tables.PUBLISHED].rows_of(rows)
        )

    def _tell_published(
        self, publications: Sequence[Publication], tails: Mapping[int, SequenceTail]
    ) -> None:
        topic = self.settings.publish.topic
        messages = sum(p.tail.seq - p.first_seq + 1 for p in publications)
        if messages:
            self.owner.notify(RecordsProcessed("gold", {topic: {("published", ""): messages}}))
        self.owner.notify(Published(topic, {p: tail.seq for p, tail in tails.items()}))

    def _ensure_topic(self) -> None:
        topic = self.settings.publish.topic
        if topic not in self._cluster.partition_counts([topic]):
            self._cluster.create_topic(
                topic, self.partitions, sink_settings(self.settings), SMALLER_MESSAGES
            )

    @cached_property
    def _epochs(self) -> Epochs:
        return read_epochs(self._engine.reader, self.settings)

    @cached_property
    def _publisher(self) -> Publisher:
        return sink_publisher(self.settings)

    def _identified(self) -> str:
        return self._cluster.identified(self.settings.publish.topic)

    def _check_sink(self) -> None:
        """Raise SinkReplacedError if the topic is not the one whose tails were read.

        A new topic has a sequence of its own.
        """
        if self._identified() != self._sink:
            raise SinkReplacedError(self.settings.publish.topic)

    @cached_property
    def _cluster(self) -> Cluster:
        return Cluster(self.settings.kafka)

    @property
    def _engine(self) -> Engine:
        return self.owner.engine


def with_message_values(engine: Engine, rows: pa.Table, settings: Settings) -> pa.Table:
    """Return rows of silver with the `value` (large_binary) of their message, and `SAYS_CLOSING`.

    Both follow the rules of the epoch that finished the row. An earlier epoch than the
    current one knew fewer fields of the values, so its messages have only those.
    """
    sources = settings.sources
    value = settings.publish.value
    says_closing = pa.repeat(pa.scalar(settings.merge.says_closing), rows.num_rows)
    rows = rows.append_column(SAYS_CLOSING, says_closing)
    if value is None:
        of_epoch = as_read(rows, {name: source.read_type for name, source in sources.items()})
        return rows.append_column("value", message_values(of_epoch, list(sources)))
    of_epoch = as_read(rows, {name: source.value_type for name, source in sources.items()})
    return rows.append_column(
        "value", engine.evaluate(of_epoch, {"value": value})["value"].cast(pa.large_binary())
    )


def _publications(
    ends: Mapping[int, SequenceTail], tails: Mapping[int, SequenceTail]
) -> list[Publication]:
    """Return what was published by partition, after these tails and up to these ends."""
    return [
        Publication(p, tails[p].seq + 1 if p in tails else 0, end)
        for p, end in sorted(ends.items())
    ]


def _followed(chunks: Iterator[pa.Table], ends: dict[int, SequenceTail]) -> Iterator[pa.Table]:
    """Yield the chunks, each of one partition; put each partition's tail after them into `ends`."""
    for chunk in chunks:
        ends[chunk["partition"][0].as_py()] = _end_of(chunk)
        yield chunk


def _end_of(found: pa.Table) -> SequenceTail:
    """Return a partition's tail after these messages (one or more); its offset is not known yet."""
    [last] = found.slice(found.num_rows - 1).to_pylist()
    closed = last["due"], last["closed_at"], last["tenant"] or ""
    return SequenceTail(last["seq"], last["event_time"], last["key"].decode(), None, *closed)
