"""Dead letters: sends late and refused records to topics of their own, as they came, each once.

A topic itself says how far it is: the last message in each partition that is this lake's has, by
input, the offset up to which the records of `late`, or of `quarantine`, are sent. Both views grow
in order of offset in each topic-partition, so everything from there on is missing. A publication is
made in these steps, by the process that owns gold:

1. *plan*: find the records that the view has from there on;
2. *read* them in chunks from bronze, which has their keys and headers;
3. *transaction*: send the dead letters (`core.dead_letters`) of all partitions in one transaction,
   whatever the delivery mode;
4. *note*: write to `published` how far the topic is now.

After a crash before or in step 3 nothing is sent, and the next start reads from the topic what is.
After a crash between steps 3 and 4, the next start writes the missing rows. The rows are needed
where retention has emptied a partition of the topic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

import pyarrow as pa
from confluent_kafka import Message

from watersmeet.core.columns import int64s
from watersmeet.core.dead_letters import (
    LATE,
    NEXT_OFFSETS,
    Room,
    dead_letter_messages,
    next_offsets,
)
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.recovery import text_of
from watersmeet.core.sequence import LIFE
from watersmeet.errors import (
    ForeignMessageError,
    KafkaAccessError,
    LakeBehindError,
    PublishingError,
    TransactionTimeoutError,
)
from watersmeet.faults import fault_point
from watersmeet.kafka.cluster import copy_settings
from watersmeet.kafka.publisher import record_publisher
from watersmeet.kafka.reading import headers_of, read_tails
from watersmeet.lake import tables
from watersmeet.lake.history import Generations
from watersmeet.lake.inputs import of_input, topic_partition
from watersmeet.lake.pieces import (
    CHUNK_ROWS,
    CHUNKS,
    NOT_FORGOTTEN,
    RECORD,
    Chunk,
    chunks_of,
    read_chunk,
)
from watersmeet.lake.published import is_about, is_about_last, letter_ends
from watersmeet.lake.table_reader import TableReader, Where, within
from watersmeet.monitoring.events import RecordsProcessed
from watersmeet.running.topic_writer import TopicWriter
from watersmeet.running.transaction_size import TransactionSize
from watersmeet.settings import Settings

DEFAULT_MESSAGE_BYTES = 1_048_588
"""Kafka's own default of `max.message.bytes`."""

Sent: TypeAlias = dict[TopicPartition, int]
"""The offset from which on a topic has no records of a topic-partition yet."""

Backlog: TypeAlias = tuple[list[Chunk], list[int]]
"""The next records, and the versions of the tables that have none beyond them, if that is so."""


def unsent(
    reader: TableReader, settings: Settings, table: str, partitions: Iterable[int]
) -> Where | None:
    """Return a condition for the rows of `late` or `quarantine` that are still to be sent.

    `published` says which are sent. None if no topic is set.
    """
    topic = settings.publish.dead_letter_topics.get(table)
    if topic is None:
        return None
    sent = letter_ends(reader, is_about_last(reader, topic))
    return [
        term
        for input_id in settings.inputs
        for term in _beyond(input_id, _since(sent, input_id, partitions))
    ]


def _since(sent: Sent, input_id: InputId, partitions: Iterable[int]) -> dict[int, int]:
    return {p: sent.get(TopicPartition(input_id, p), 0) for p in partitions}


def _beyond(input_id: InputId, since: Mapping[int, int]) -> Where:
    return of_input(input_id, within({p: (offset, None) for p, offset in since.items()}))


@dataclass
class DeadLetters(TopicWriter[Sent, Backlog, int]):
    """Sends the records of one `table`, `late` or `quarantine`, to their topic; one owner at a
    time.
    """

    table: str
    _room: Room | None = field(default=None, init=False)
    """Maximum size of a message in the topic, once the topic has refused one."""
    _versions: list[int] = field(default_factory=list, init=False, repr=False)
    """Versions of the tables all of whose records are sent."""

    def __post_init__(self) -> None:
        """Make what belongs to the table's topic."""
        self.topic = self.settings.publish.dead_letter_topics[self.table]
        self._publisher = record_publisher(self.settings, self.topic)
        self._size = TransactionSize(CHUNKS, CHUNKS)

    def _may_have_more(self) -> bool:
        has_begun = bool(self._generations)
        return has_begun and (self._reached is None or self._versions_now() != self._versions)

    def _versions_now(self) -> list[int]:
        parts = self._engine.lake.views[self.table].parts
        return [self._engine.reader.version(part.table) for part in parts]

    def _create_topic(self) -> None:
        topic_settings = copy_settings(self._cluster, self.settings.topics)
        topic_settings["retention.ms"] = "-1"
        self._cluster.create_topic(self.topic, self.partitions, topic_settings)

    def _recovered(self) -> Sent:
        noted = letter_ends(self._engine.reader, is_about(self._sink))
        # The last message that is this lake's counts; for a partition without one, what was noted.
        bounds = self._publisher.settled_bounds(self.partitions)
        last = read_tails(self.settings.kafka, self.topic, self.partitions, bounds, self._is_own)
        sent = Sent()
        for message in last.values():
            sent |= self._parse_progress(message, noted)
        emptied = {p for p, (first, _) in bounds.items() if first}
        emptied -= last.keys() | {tp.partition for tp in noted}
        # A cluster that was copied has another topic there.
        former = letter_ends(self._engine.reader, [("topic", "=", self.topic)]) if emptied else {}
        for tp, offset in former.items():
            if tp.partition in emptied:
                sent[tp] = max(offset, sent.get(tp, 0))
        self._note(sent, noted)
        return noted | sent

    def _is_own(self, message: Message) -> bool:
        return text_of(dict(headers_of(message)), LIFE) in ("", self._life)

    @property
    def _generations(self) -> Generations:
        return self.owner.history(self.settings).generations

    @property
    def _life(self) -> str:
        return self._generations.newest.life

    def _pending(self, reached: Sent) -> tuple[Backlog, int, bool]:
        versions = self._versions_now()
        limit = self._size.limit
        chunks = list(islice(self._chunks(reached), limit + 1))
        has_more = len(chunks) > limit
        return (chunks[:limit], [] if has_more else versions), len(chunks), has_more

    def _chunks(self, sent: Sent) -> Iterator[Chunk]:
        reader = self._engine.reader
        for input_id in self.settings.inputs:
            since = _since(sent, input_id, range(self.partitions))
            rows = reader.select(self.table, ["partition", "offset"], _beyond(input_id, since))
            places = int64s(rows["partition"]), int64s(rows["offset"])
            yield from chunks_of(reader, input_id, tables.bronze(input_id.source), *places)

    def _send(self, backlog: Backlog, reached: Sent) -> tuple[Sent, int]:
        chunks, versions = backlog
        names = self.settings.input_names
        after = dict(reached)
        sent = 0

        def made() -> Iterator[pa.Table]:
            nonlocal sent
            for chunk in chunks:
                rows = self._records(chunk)
                for p, offsets in chunk.offsets.items():
                    after[TopicPartition(chunk.input, p)] = int(offsets[-1]) + 1
                sent += rows.num_rows
                yield dead_letter_messages(rows, after, names, self._room, self._life)

        if chunks:
            self.owner.rely_on_what_was_read()
            fault_point("letters.publish")
            with self.owner.step("gold", "publish"):
                self._publisher.send(made(), self._check_topic)
            fault_point("letters.note")
            with self.owner.step("gold", "note"):
                self._note(after, reached)
        if sent:
            self.owner.notify(RecordsProcessed("gold", {self.topic: {("published", ""): sent}}))
        self._versions = versions
        return after, sent

    def _remedy(self, error: Exception, size: int) -> str | None:
        if isinstance(error, TransactionTimeoutError) and self._size.timed_out(size):
            return f": at most {self._size.limit * CHUNK_ROWS} records"
        is_too_large = isinstance(error, PublishingError) and error.is_too_large
        if not is_too_large or (self._room is not None and not self._room.is_packed):
            return None
        self._room = Room(self._taken_bytes(), is_packed=self._room is None)
        return f"; what is larger than {self._room.most_bytes} bytes goes there without its value"

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

    def _parse_progress(self, message: Message, noted: Sent) -> Sent:
        """Return how far a partition is, as its last message says.

        An offset is never before the one that this lake has noted of the topic. Raises
        ForeignMessageError

        - if the message does not name offsets of inputs of this lake;
        - if the lake has noted anything, and an offset is beyond the records of the table: as
          LakeBehindError where the message says that it is this lake's.
        """
        place = message.topic() or "", message.partition() or 0, message.offset() or 0
        headers = dict(headers_of(message))
        try:
            by_name = next_offsets(headers)
        except ValueError:
            by_name = {}
        inputs = self.settings.inputs_by_name
        if not by_name or not by_name.keys() <= inputs.keys():
            raise ForeignMessageError(*place, NEXT_OFFSETS)
        said = {TopicPartition(inputs[name], place[1]): offset for name, offset in by_name.items()}
        if noted and any(offset > noted.get(tp, 0) for tp, offset in said.items()):
            ends = self._engine.reader.summary(
                self.table, ["source", "topic", "partition"], {"last": ("max", "offset")}
            ).to_pylist()
            lasts = {topic_partition(row): row["last"] for row in ends}
            for tp, offset in said.items():
                if offset <= max(noted.get(tp, 0), lasts.get(tp, -1) + 1):
                    continue
                if not text_of(headers, LIFE) == self._life != "":
                    raise ForeignMessageError(*place, NEXT_OFFSETS)
                last = f"offset {offset - 1} of {tp.input.topic}"
                end = f"offset {lasts[tp]}" if tp in lasts else "nothing"
                raise LakeBehindError(f"{self.topic}[{tp.partition}]", last, end)
        return {tp: max(offset, noted.get(tp, 0)) for tp, offset in said.items()}

    def _note(self, now: Sent, before: Sent) -> None:
        self._append(
            [
                {
                    "partition": tp.partition,
                    "last_source": tp.input.source,
                    "last_topic": tp.input.topic,
                    "last_offset": offset - 1,
                }
                for tp, offset in now.items()
                if offset > before.get(tp, 0)
            ]
        )

    def _taken_bytes(self) -> int:
        # Kafka's default, where the topic's settings may not be read.
        try:
            return int(self._cluster.topic_settings(self.topic)["max.message.bytes"])
        except KafkaAccessError:
            return DEFAULT_MESSAGE_BYTES
