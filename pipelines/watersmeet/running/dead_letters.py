"""Dead letters: sends late and refused records to topics of their own, as they came, each once.

A topic itself says how far it is: the last message in each partition that is this lake's has, by
input, the offset up to which the records of `late`, or of `quarantine`, are sent. Both views grow
in order of offset in each topic-partition, so everything from there on is missing. A publication is
made in these steps, by the process that owns gold:

1. *plan*: find the records that the view has from there on;
2. *read* them in chunks from bronze, which has their keys and headers;
3. *transaction*: send the dead letters (`core.dead_letters`) of all partitions in one transaction,
   whatever the delivery mode;
4. *note*: write to `dead_letters` how far the topic is now.

After a crash before or in step 3 nothing is sent, and the next start reads from the topic what is.
After a crash between steps 3 and 4, the next start writes the missing rows. The rows are needed
where retention has emptied a partition of the topic.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from confluent_kafka import Message

from watersmeet.core.columns import int64s
from watersmeet.core.dead_letters import (
    LATE,
    NEXT_OFFSETS,
    Room,
    SentOffsets,
    dead_letter_messages,
    next_offsets,
)
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.recovery import text_of
from watersmeet.core.sequence import LIFE
from watersmeet.engine import Engine
from watersmeet.errors import (
    ForeignMessageError,
    KafkaAccessError,
    LakeBehindError,
    PublishingError,
    SinkReplacedError,
    TransactionTimeoutError,
    kind_of,
)
from watersmeet.faults import fault_point
from watersmeet.kafka.cluster import Cluster, copy_settings
from watersmeet.kafka.publisher import Offsets, Publisher, record_publisher
from watersmeet.kafka.reading import headers_of, read_tails
from watersmeet.lake import tables
from watersmeet.lake.history import Generations
from watersmeet.lake.inputs import of_input
from watersmeet.lake.pieces import (
    CHUNK_ROWS,
    CHUNKS,
    NOT_FORGOTTEN,
    RECORD,
    Chunk,
    chunks_of,
    read_chunk,
)
from watersmeet.lake.published import last_letters, letter_ends, topic_columns
from watersmeet.lake.table_reader import Condition, TableReader, Where, within
from watersmeet.monitoring.events import Failed, RecordsProcessed
from watersmeet.running.owner import Owner, now_ms
from watersmeet.running.transaction_size import TransactionSize
from watersmeet.settings import Settings

DEFAULT_MESSAGE_BYTES = 1_048_588
"""Kafka's own default of `max.message.bytes`."""

log = logging.getLogger("watersmeet.gold")

Sent: TypeAlias = Mapping[int, Mapping[InputId, int]]
"""The offset from which on a topic has no records yet, by partition and input."""


def unsent(
    reader: TableReader, settings: Settings, table: str, partitions: Iterable[int]
) -> Where | None:
    """Return a condition for the rows of `late` or `quarantine` that are still to be sent.

    `published` says which are sent. None if no topic is set.
    """
    topic = settings.publish.dead_letter_topics.get(table)
    if topic is None:
        return None
    sent_until = {tp: offset for _, tp, offset in letter_ends(reader, [("topic", "=", topic)])}
    where: list[Sequence[Condition]] = []
    for input_id in settings.inputs:
        beyond = {p: (sent_until.get(TopicPartition(input_id, p), 0), None) for p in partitions}
        where += of_input(input_id, within(beyond))
    return where


@dataclass
class DeadLetters:
    """Sends the records of one `table`, `late` or `quarantine`, to one `topic`; one owner at a
    time.
    """

    owner: Owner
    settings: Settings
    partitions: int
    table: str
    topic: str
    check_owner: Callable[[], None] = lambda: None
    """Called before an earlier publisher is fenced."""
    now_s: Callable[[], float] = time.monotonic
    _sent_offsets: dict[int, dict[InputId, int]] | None = None
    _sink: str = ""
    """The topic, as `published` names it."""
    _size: TransactionSize = field(default_factory=lambda: TransactionSize(CHUNKS, CHUNKS))
    _room: Room | None = None
    """Maximum size of a message in the topic, once the topic has refused one."""
    _versions: list[int] = field(default_factory=list, repr=False)
    """Versions of the tables all of whose records are sent."""

    def drain(self, is_stopping: Callable[[], bool] = lambda: False) -> Iterator[int]:
        """Send every record that the table has beyond what is sent; yield the count per
        transaction.
        """
        while not is_stopping() and self._has_begun():
            versions = [self._engine.reader.version(table) for table in self._tables]
            if self._sent_offsets is not None and versions == self._versions:
                return
            known = self._sent_offsets if self._publisher.has_begun else None
            sent_offsets = self.recover() if known is None else known
            self._sent_offsets = None  # after a failure, only the topic knows what is sent
            with self.owner.step("gold", "plan"):
                chunks = self._pending(sent_offsets)
            if chunks and self._sink != self._identified():
                continue  # and recover: the topic was deleted, or created again
            after = {p: dict(sent_offsets.get(p, {})) for p in range(self.partitions)}
            count = self._size.limit
            began = self.now_s()
            try:
                sent = self._send(chunks[:count], after)
            except TransactionTimeoutError as error:
                if not self._size.timed_out(len(chunks)):
                    raise
                log.warning("%s: at most %d records", error, self._size.limit * CHUNK_ROWS)
                self.owner.notify(Failed(kind_of(error), is_retried=True))
                continue
            except PublishingError as error:
                if not error.is_too_large or (self._room is not None and not self._room.is_packed):
                    raise
                self._room = Room(self._taken_bytes(), is_packed=self._room is None)
                log.warning(
                    "%s; what is larger than %d bytes goes there without its value",
                    error,
                    self._room.most_bytes,
                )
                self.owner.notify(Failed(kind_of(error), is_retried=True))
                continue
            self._size.succeeded(self.now_s() - began, is_full=len(chunks) > count)
            self._sent_offsets = after
            if len(chunks) <= count:
                self._versions = versions
            if sent:
                self.owner.notify(RecordsProcessed("gold", {self.topic: {("published", ""): sent}}))
                yield sent

    def complete(self) -> None:
        """Complete `published`, as the topic says, and remember how far each partition is."""
        if self._sent_offsets is None and self._has_begun():
            self._sent_offsets = self.recover()

    def recover(self) -> dict[int, dict[InputId, int]]:
        """Return how far every partition of the topic is, by its last message that is this lake's.

        For a partition without one, `published` says it. Afterwards no
        transaction is open, and `published` has noted what is sent.
        """
        self.check_owner()
        if self.topic not in self._cluster.partition_counts([self.topic]):
            topic_settings = {
                **copy_settings(self._cluster, self.settings.topics),
                "retention.ms": "-1",
            }
            self._cluster.create_topic(self.topic, self.partitions, topic_settings)
        self._sink = self._identified()
        noted = last_letters(self._engine.reader, self._sink)
        self._publisher.begin()
        bounds = self._publisher.settled_bounds(self.partitions)
        last = read_tails(self.settings.kafka, self.topic, self.partitions, bounds, self._is_own)
        progress = {p: self._parse_progress(message, noted) for p, message in last.items()}
        emptied = {p for p, (first, _) in bounds.items() if first} - last.keys() - noted.keys()
        progress |= self._noted_before_a_move(emptied)
        self._note(progress, noted)
        return noted | progress

    def _noted_before_a_move(self, emptied: Collection[int]) -> dict[int, dict[InputId, int]]:
        """Return how far former topics of this name were, in partitions whose messages retention
        has deleted: a cluster that was copied has another topic there.
        """
        former = dict[int, dict[InputId, int]]()
        if emptied:
            for _, tp, offset in letter_ends(self._engine.reader, [("topic", "=", self.topic)]):
                if tp.partition in emptied:
                    its = former.setdefault(tp.partition, {})
                    its[tp.input] = max(offset, its.get(tp.input, 0))
        return former

    def _is_own(self, message: Message) -> bool:
        return text_of(dict(headers_of(message)), LIFE) in ("", self._life)

    def _has_begun(self) -> bool:
        return bool(self._generations)

    @property
    def _generations(self) -> Generations:
        return self.owner.history(self.settings).generations

    @property
    def _life(self) -> str:
        return self._generations.newest.life

    def _pending(self, sent_offsets: Sent) -> list[Chunk]:
        """Return what the table has beyond what is sent, input by input (step 1)."""
        chunks: list[Chunk] = []
        for input_id in self.settings.inputs:
            since = {p: sent_offsets.get(p, {}).get(input_id, 0) for p in range(self.partitions)}
            ranges = {p: (first, None) for p, first in since.items()}
            beyond = of_input(input_id, within(ranges))
            rows = self._engine.reader.select(self.table, ["partition", "offset"], beyond)
            partitions = int64s(rows["partition"])
            offsets = int64s(rows["offset"])
            firsts = [since.get(p, 0) for p in range(int(partitions.max(initial=0)) + 1)]
            is_new = offsets >= np.array(firsts)[partitions]
            table = tables.bronze(input_id.source)
            chunks += chunks_of(
                self._engine.reader, input_id, table, partitions[is_new], offsets[is_new]
            )
        return chunks

    def _send(self, chunks: Sequence[Chunk], after: dict[int, dict[InputId, int]]) -> int:
        """Read, send and note chunks (steps 2 to 4); return the number of records sent.

        `after`, how far the topic is, moves on.
        """
        if not chunks:
            return 0
        before = {p: dict(by_input) for p, by_input in after.items()}
        sent = 0

        def made() -> Iterator[pa.Table]:
            """Yield the dead letters of each chunk; count them, and move on `after`."""
            nonlocal sent
            for chunk in chunks:
                rows = self._records(chunk)
                for p, offsets in chunk.offsets.items():
                    after[p][chunk.input] = int(offsets[-1]) + 1
                sent += rows.num_rows
                yield dead_letter_messages(rows, self._named(after), self._room, self._life)

        self.owner.rely_on_what_was_read()
        fault_point("letters.publish")
        with self.owner.step("gold", "publish"):
            self._publisher.send(made(), self._check_topic)
        fault_point("letters.note")
        with self.owner.step("gold", "note"):
            self._note(after, before)
        return sent

    @property
    def _tables(self) -> list[str]:
        return [part.table for part in self._engine.lake.views[self.table].parts]

    def _records(self, chunk: Chunk) -> pa.Table:
        """Return the records of a chunk (step 2); those that bronze no longer has are left out."""
        reader = self._engine.reader
        if self.table == tables.QUARANTINE:
            records = read_chunk(reader, chunk, [*RECORD, "reason"], [NOT_FORGOTTEN])
        else:
            # A late record is no heartbeat, unless `forget` has begun to erase it.
            records = read_chunk(reader, chunk, RECORD, [("heartbeat", "=", False)])
            records = records.append_column("reason", pa.repeat(pa.scalar(LATE), records.num_rows))
        return records.append_column(
            "source", pa.repeat(pa.scalar(chunk.input.source), records.num_rows)
        )

    # -- the progress of the topic

    def _parse_progress(self, message: Message, noted: Sent) -> dict[InputId, int]:
        """Return, by input, how far a partition is, as its last message says.

        An offset is never before the one that this lake has noted of the topic. Raises
        ForeignMessageError

        - if the message does not name offsets of inputs of this lake;
        - if the lake has noted anything, and an offset is beyond the records of the table: as
          LakeBehindError where the message says that it is this lake's.
        """
        place = message.topic() or "", message.partition() or 0, message.offset() or 0
        noted_offsets = noted.get(place[1], {})
        try:
            by_name = next_offsets(dict(headers_of(message)))
        except ValueError:
            by_name = {}
        inputs = self.settings.inputs_by_name
        if not by_name or not by_name.keys() <= inputs.keys():
            raise ForeignMessageError(*place, NEXT_OFFSETS)
        sent_offsets = {inputs[name]: offset for name, offset in by_name.items()}
        beyond = {
            input_id: offset
            for input_id, offset in sent_offsets.items()
            if offset > noted_offsets.get(input_id, 0)
        }
        if beyond and noted:
            ends = self._engine.reader.summary(
                self.table, ["source", "topic", "partition"], {"last": ("max", "offset")}
            ).to_pylist()
            lasts = {
                InputId(row["source"], row["topic"]): row["last"]
                for row in ends
                if row["partition"] == place[1]
            }
            is_own = text_of(dict(headers_of(message)), LIFE) == self._life != ""
            for input_id, offset in beyond.items():
                if offset <= lasts.get(input_id, -1) + 1:
                    continue
                if not is_own:
                    raise ForeignMessageError(*place, NEXT_OFFSETS)
                said = f"offset {offset - 1} of {input_id.topic}"
                end = f"offset {lasts[input_id]}" if input_id in lasts else "nothing"
                raise LakeBehindError(f"{self.topic}[{place[1]}]", said, end)
        largest = {
            input_id: max(offset, noted_offsets.get(input_id, 0))
            for input_id, offset in sent_offsets.items()
        }
        return {**noted_offsets, **largest}

    def _note(self, now: Sent, before: Sent) -> None:
        """Write to `published` what has changed (step 4)."""
        at = now_ms()
        rows = [
            {
                **topic_columns(self._sink),
                "partition": p,
                "last_source": input_id.source,
                "last_topic": input_id.topic,
                "last_offset": offset - 1,
                "committed_at": at,
            }
            for p, by_input in sorted(now.items())
            for input_id, offset in by_input.items()
            if offset > before.get(p, {}).get(input_id, 0)
        ]
        if rows:
            layout = self._engine.lake.layout[tables.PUBLISHED]
            self.owner.append(tables.PUBLISHED, layout.rows_of(rows))

    def _named(self, offsets: Sent) -> SentOffsets:
        names = self.settings.input_names
        named = dict[int, dict[str, int]]()
        for p, by_input in offsets.items():
            named[p] = {names[input_id]: offset for input_id, offset in by_input.items()}
        return named

    @cached_property
    def _publisher(self) -> Publisher:
        return record_publisher(self.settings, self.topic)

    def _identified(self) -> str:
        """Return the topic's name with its identity: a topic that is created again begins anew."""
        return self._cluster.identified(self.topic)

    def _taken_bytes(self) -> int:
        """Return the maximum size (bytes) of a message in the topic.

        That is Kafka's default if the topic's settings may not be read.
        """
        try:
            return int(self._cluster.topic_settings(self.topic)["max.message.bytes"])
        except KafkaAccessError:
            return DEFAULT_MESSAGE_BYTES

    def _check_topic(self, _: Offsets) -> None:
        """Raise SinkReplacedError if the topic is not the one whose progress was read."""
        if self._identified() != self._sink:
            raise SinkReplacedError(self.topic)

    @cached_property
    def _cluster(self) -> Cluster:
        return Cluster(self.settings.kafka)

    @property
    def _engine(self) -> Engine:
        return self.owner.engine
