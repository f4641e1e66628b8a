"""The gold layer: publishes the records that silver has finished to Kafka, and corrections.

Each partition of a topic is one gapless sequence. Merge records go to the sink, and corrections of
late records to a topic of their own: two kinds of one thing (`core.sequence`), each with a
publisher and a state of its own.

The topic itself says how far each sequence has come. There is one publisher, the process that owns
gold. A publication is made in these steps:

1. *plan*: find what the lake has beyond the last published message, and for the sink the Kafka
   offsets from which a lost lake would be recovered after them;
2. *read* it in the order of publication, in chunks;
3. *messages*: make their keys, values, headers and timestamps;
4. *transaction*: send them in one transaction for all partitions (`kafka.publisher`);
5. *note*: write a row per partition to `published`.

After a crash before or in step 4, all messages are published or none (under `at_least_once`,
perhaps some of them), and the next start reads from the topic which. After a crash between steps 4
and 5, the next start writes the missing rows. Under `at_most_once`, step 5 comes before step 4:
what is noted counts as published, whether it is or not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from watersmeet.core.sequence import FORGOTTEN, MERGED, Sequence, Tail
from watersmeet.errors import ForeignMessageError, SinkReplacedError, TransactionTimeoutError
from watersmeet.faults import fault_point
from watersmeet.kafka.cluster import SMALLER_MESSAGES, sink_settings
from watersmeet.kafka.publisher import Offsets, sink_publisher
from watersmeet.kafka.reading import headers_of, read_backwards
from watersmeet.lake.published import columns_of, last_sink, last_tails
from watersmeet.lake.table_reader import Condition
from watersmeet.monitoring.events import Published, RecordsProcessed
from watersmeet.running.lake_sequence import MAX_PER_CHUNK, LakeSequence, Publication
from watersmeet.running.publication_plan import Pending
from watersmeet.running.topic_writer import TopicWriter
from watersmeet.running.transaction_size import TransactionSize

MAX_PER_TRANSACTION = 500_000
"""Approximate maximum number of messages in a transaction: few large transactions are cheap."""


@dataclass
class Gold(TopicWriter[dict[int, Tail], Pending, list[Publication]]):
    """Publishes a sequence of one lake to `partitions` partitions of a topic; one owner at a time.

    `kind`: which of the lake's sequences it is.
    """

    kind: Sequence = MERGED
    sequence: LakeSequence = field(init=False, repr=False)
    """The sequence that is published."""

    def __post_init__(self) -> None:
        """Make what belongs to the sequence."""
        self.sequence = LakeSequence(self.owner, self.settings, self.partitions, self.kind)
        self.topic = self.sequence.topic
        self._publisher = sink_publisher(self.settings, self.topic)
        first = min(MAX_PER_CHUNK, MAX_PER_TRANSACTION)
        self._size = TransactionSize(MAX_PER_TRANSACTION, first)

    def _pending(self, reached: dict[int, Tail]) -> tuple[Pending, int, bool] | None:
        backlog = self.sequence.pending(reached, self._size)
        return None if backlog is None else (backlog, backlog.records, backlog.has_more)

    def _remedy(self, error: Exception, size: int) -> str | None:
        if not isinstance(error, TransactionTimeoutError) or not self._size.timed_out(size):
            return None
        return f": about {self._size.limit} messages instead of {size}"

    def _send(
        self, backlog: Pending, reached: dict[int, Tail]
    ) -> tuple[dict[int, Tail], list[Publication]]:
        publications = self._publish(backlog, reached) if backlog.chunks else []
        tails = reached | {p.partition: p.tail for p in publications}
        self._notify_published(publications, tails)
        if publications:
            fault_point("gold.done")
        return tails, publications

    def _recovered(self) -> dict[int, Tail]:
        noted = last_tails(self._engine.reader, self.kind, self._sink)
        last_messages = self._publisher.tails(self.partitions)
        sink_tails = {p: self.sequence.tail(message) for p, message in last_messages.items()}
        noted = self._still_there(noted, noted.keys() - sink_tails.keys())
        moved = self._noted_before_a_move(set(range(self.partitions)) - noted.keys(), sink_tails)
        known = noted | moved
        sink_tails |= self._repeated(sink_tails, known)
        for p, tail in sink_tails.items():
            if not self.sequence.bears_out(p, tail, known.get(p)):
                raise self.sequence.refusal(p, tail, last_messages[p])
        counts_as_out = self.settings.publish.delivery == "at_most_once"
        if not counts_as_out:
            sink_tails = self._without_gaps(
                sink_tails, {**self.sequence.first_tails(self._sink), **known}
            )
        # A partition that retention has emptied has no message in the sink: its noted tail stays.
        tails = dict(noted)
        missing = []
        for p, tail in (moved | sink_tails).items():
            if counts_as_out and p in known and known[p].seq > tail.seq:
                tail = known[p]  # what was noted, and never sent, counts as published
            last = noted.get(p)
            if last is None or last.seq < tail.seq:
                missing.append(Publication(p, 0 if last is None else last.seq + 1, tail))
            tails[p] = tail
        self._note(missing)
        return tails

    def _noted_before_a_move(
        self, partitions: Collection[int], last: Mapping[int, Tail]
    ) -> dict[int, Tail]:
        """Return the last message that was noted of a former topic of this name, by partition,
        where this one has it at its offset, or is empty since retention has deleted it: a cluster
        that was copied has other topics with the same messages.

        `last`: the last message of each partition that is not empty. A message that was noted
        before it was sent has no offset, and may be missing: the last one up to there that was
        noted tells then, wherever it is.
        """
        of_topic: list[Condition] = [("topic", "=", self.topic)]
        sink = last_sink(self._engine.reader, self.kind, of_topic) if partitions else None
        if sink is None:
            return {}
        former = last_tails(self._engine.reader, self.kind, sink)
        bounds = self._cluster.bounds(self.topic, self.partitions)
        there = dict[int, Tail]()
        for p in former.keys() & partitions:
            offset = former[p].offset
            if p not in last:
                is_there = bounds[p][0] > (offset or 0)
            elif offset is None:
                until: list[Condition] = [("partition", "=", p), ("last_seq", "<=", last[p].seq)]
                noted = last_tails(self._engine.reader, self.kind, sink, until).get(p)
                is_there = noted is not None and self._has(p, noted)
            else:
                is_there = self._has_at_its_offset(p, former[p], bounds[p])
            if is_there:
                there[p] = former[p]
        return there

    def _repeated(self, last: Mapping[int, Tail], known: Mapping[int, Tail]) -> dict[int, Tail]:
        """Return the last message that is known of each partition whose very last one repeats an
        earlier one, which somebody has sent again.

        A topic that has lost its end has an earlier one, too, but not the one that is known at its
        offset.
        """
        earlier = {
            p: known[p]
            for p, tail in last.items()
            if p in known and tail.seq < known[p].seq
            if self.sequence.bears_out(p, tail, known[p])
        }
        bounds = self._cluster.bounds_of(self.topic, earlier) if earlier else {}
        return {p: t for p, t in earlier.items() if self._has_at_its_offset(p, t, bounds[p])}

    def _has_at_its_offset(self, partition: int, noted: Tail, bounds: tuple[int, int]) -> bool:
        offset, (first, end) = noted.offset, bounds
        if offset is not None and first <= offset < end:
            with suppress(ForeignMessageError):
                return self._has(partition, noted, (offset, offset + 1))
        return False

    def _has(self, partition: int, noted: Tail, bounds: tuple[int, int] | None = None) -> bool:
        for message in read_backwards(self.settings.kafka, self.topic, partition, bounds):
            tail = self.sequence.tail(message)
            if tail.seq <= noted.seq:
                return tail[:2] == noted[:2]
        return False

    def _still_there(self, noted: dict[int, Tail], empty: Collection[int]) -> dict[int, Tail]:
        """Return the last noted message of each partition, but of an `empty` one that has lost its
        end, and not only what retention deletes, the last before its first offset.

        Behind that there may be what is left of transactions, which are aborted.
        """
        bounds = self._cluster.bounds(self.topic, self.partitions) if empty else {}
        for p in empty:
            first, last = bounds[p][0], noted[p].offset
            if last is None or last < first:
                continue
            noted = {q: tail for q, tail in noted.items() if q != p}
            before: list[Condition] = [("partition", "=", p), ("sink_offset", "<", first)]
            noted |= last_tails(self._engine.reader, self.kind, self._sink, before)
        return noted

    def _without_gaps(
        self, tails: Mapping[int, Tail], noted: Mapping[int, Tail]
    ) -> dict[int, Tail]:
        """Return, by partition, the last message before which none is missing.

        Without a transaction a message may be out, and one before it not, since the producer has
        given that one up; `delivery` may have changed since. `noted`: the messages behind which
        that may be so.
        """
        may_repeat = self.settings.publish.delivery == "at_least_once"
        gapless: dict[int, Tail] = {}
        for p, tail in tails.items():
            last = noted.get(p)
            seq = -1 if last is None else last.seq
            sent = {seq: tail} if tail.seq <= seq else self._sent_since(p, seq)
            first = min(sent)
            if last is not None and (sent[first].offset or 0) < (last.offset or 0):
                seq = min(seq, first)  # the topic has lost its end
            while seq + 1 in sent:
                seq += 1
            is_whole = first <= seq or sent[first].offset == 0
            if not (is_whole or may_repeat):  # retention has deleted what is missing
                seq = tail.seq
            if (gapless_tail := sent.get(seq, last)) is not None:
                gapless[p] = gapless_tail
        return gapless

    def _sent_since(self, partition: int, seq: int) -> dict[int, Tail]:
        sent: dict[int, Tail] = {}
        for message in read_backwards(self.settings.kafka, self.topic, partition):
            tail = self.sequence.tail(message)
            sent.setdefault(tail.seq, tail)
            if tail.seq <= seq:
                break
        return sent

    def send_tombstones(self, key: str, partitions: Collection[int]) -> int:
        """Send messages without a value, since a key was erased; return how many were sent.

        They go to these partitions, or to all if none is named, but only where something was
        published. A partition whose last message is already a tombstone for the key gets none.
        """
        tails = self.recover()
        last = self._publisher.tails(self.partitions)
        has_tombstone = {
            p
            for p, m in last.items()
            if m.key() == key.encode() and FORGOTTEN in dict(headers_of(m))
        }
        targets = sorted(
            (tails.keys() & partitions if partitions else tails.keys()) - has_tombstone
        )
        self._publisher.send([self.kind.tombstones(key, [(p, tails[p]) for p in targets])])
        return len(targets)

    def _publish(self, backlog: Pending, tails: Mapping[int, Tail]) -> list[Publication]:
        headers = self.sequence.headers(backlog)
        self.owner.rely_on_what_was_read()
        fault_point("gold.publish")
        if self.settings.publish.delivery == "at_most_once":
            # What is noted is never sent again, so the messages are counted first, in a pass of
            # their own.
            promised = self._promised(backlog, tails)
            self._note(promised)
            with self.owner.step("gold", "publish"):
                self._publisher.send(self.sequence.messages(backlog, tails, headers, {}))
            return promised
        made: dict[int, Publication] = {}
        messages = self.sequence.messages(backlog, tails, headers, made)
        with self.owner.step("gold", "publish"):
            check = partial(self._check_sink, tails, made)
            offsets = self._publisher.send(messages, check)
        publications = [
            each._replace(tail=each.tail._replace(offset=offsets[p]))
            for p, each in sorted(made.items())
        ]
        fault_point("gold.note")
        with self.owner.step("gold", "note"):
            self._note(publications)
        return publications

    def _promised(self, backlog: Pending, tails: Mapping[int, Tail]) -> list[Publication]:
        """Return what `at_most_once` notes before it publishes; no offset can be known yet."""
        made: dict[int, Publication] = {}
        for _ in self.sequence.messages(backlog, tails, {}, made):
            pass
        return [publication for _, publication in sorted(made.items())]

    # -- the table `published`, and the sink

    def _note(self, publications: Collection[Publication]) -> None:
        self._append(
            [
                {
                    "partition": p.partition,
                    "first_seq": p.first_seq,
                    "last_seq": p.tail.seq,
                    "failed_values": p.failed_values,
                    "sink_offset": p.tail.offset,
                    **columns_of(self.kind, p.tail),
                }
                for p in publications
            ]
        )

    def _notify_published(
        self, publications: Collection[Publication], tails: Mapping[int, Tail]
    ) -> None:
        messages = sum(p.tail.seq - p.first_seq + 1 for p in publications)
        if messages:
            self.owner.notify(RecordsProcessed("gold", {self.topic: {("published", ""): messages}}))
        self.owner.notify(Published(self.topic, {p: tail.seq for p, tail in tails.items()}))

    def _create_topic(self) -> None:
        topic_settings = sink_settings(self.settings)
        self._cluster.create_topic(self.topic, self.partitions, topic_settings, SMALLER_MESSAGES)

    def _check_sink(
        self, tails: Mapping[int, Tail], made: Mapping[int, Publication], offsets: Offsets
    ) -> None:
        """Raise SinkReplacedError if the topic is not the one whose tails were read, or has lost
        its end since: then these messages cannot lie behind these tails.

        A new topic has a sequence of its own.
        """
        has_lost_its_end = any(
            offset is not None
            and (tail := tails.get(p)) is not None
            and offset < (tail.offset or 0) + made[p].tail.seq - tail.seq
            for p, offset in offsets.items()
        )
        if has_lost_its_end:
            raise SinkReplacedError(self.topic)
        self._check_topic(offsets)
