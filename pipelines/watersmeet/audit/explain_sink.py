"""Facts about messages for `explain`: the place and number that a merge record or a correction has
in its topic.

They follow from `published`, which says of each transaction how far it came, and from the rows that
it published; the topic itself says the offset, where Kafka answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

from watersmeet.core.correction_sequence import (
    ORDER,
    VERSION,
    CorrectionPlace,
    CorrectionTail,
    places_of,
)
from watersmeet.core.sequence import ID, SequenceTail, message_id
from watersmeet.errors import WatersmeetError
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import Range, read_range
from watersmeet.lake import tables
from watersmeet.lake.order import beyond
from watersmeet.lake.published import TAIL_COLUMNS, correction_tails, last_sink
from watersmeet.lake.table_reader import Condition, TableReader, Where, lexicographic
from watersmeet.settings import Settings

_MARKERS = 1000
PATIENCE_S = 3.0
"""Seconds after which a broker that does not answer counts as away: the tables know nearly as much.
"""

JsonObject = dict[str, Any]


class SentMessages:
    """Reader of the topics that gold publishes to, while Kafka answers."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._cluster = Cluster(settings.kafka, PATIENCE_S)
        self._is_away = False

    def place(
        self,
        topic: str,
        partition: int,
        headers: Mapping[str, bytes],
        last: SequenceTail | CorrectionTail,
        behind: int,
    ) -> JsonObject | None:
        """Return partition, offset and seq of a message, of which the headers are known.

        `last`: the last message of its transaction; `behind`: how many it is behind that. None
        where the message was never sent. The offset is None where neither `published` nor the topic
        can tell it.
        """
        offset = None if last.offset is None else last.offset - behind
        is_out = True
        if offset is not None and not self._is_away:
            offset, is_out = self._looked_up(topic, partition, headers, offset)
        place = {"partition": partition, "offset": offset, "seq": last.seq - behind}
        return place if is_out else None

    def _looked_up(
        self, topic: str, partition: int, headers: Mapping[str, bytes], guess: int
    ) -> tuple[int | None, bool]:
        """Return the offset of a message as the topic has it, and True where the message was sent.

        The offset is None where the topic does not have the message, and the guess where Kafka does
        not answer. A message that is missing may have been removed by retention. Otherwise it was
        never sent: it sorts before what a lost lake or a jump had left.

        The guess is never too small: between a message and the last of its transaction there may be
        markers of other transactions.
        """
        kafka = self._settings.kafka
        expected = [{"key": name, "value": value} for name, value in headers.items()]
        try:
            first, end = self._cluster.bounds_of(topic, [partition])[partition]
            for start in (max(first, guess - _MARKERS), first):
                until = Range(topic, partition, start, min(guess + 1, end))
                for batch in read_range(kafka, until, timeout_s=PATIENCE_S):
                    messages = zip(
                        batch["offset"].to_pylist(), batch["headers"].to_pylist(), strict=True
                    )
                    for offset, own in messages:
                        if all(header in (own or []) for header in expected):
                            return int(offset), True
        except WatersmeetError:
            self._is_away = True
            return guess, True
        return None, first > 0


class SentRecords:
    """Messages of merge records in the sink that was written to last, as it was at a time.

    `sink`: the name of its topic. `at`: epoch ms; None for now. `closing_from`: the first batch
    whose messages say when their merge records were closed.
    """

    def __init__(
        self,
        reader: TableReader,
        sink: str,
        sent: SentMessages,
        at: int | None,
        closing_from: int | None,
    ) -> None:
        self._reader = reader
        self._sink = sink
        self._sent = sent
        self._closing_from = closing_from
        self._time_conditions = _until(at)
        self._name: str | None = None
        if reader.exists(tables.PUBLISHED):
            self._name = last_sink(reader, self._time_conditions)

    def sent_as(
        self, partition: int, row: JsonObject, batches: Sequence[Condition]
    ) -> JsonObject | None:
        """Return partition, offset and seq of the message of a finished, valid record of these
        batches.

        None where it is not published. The offset is None where neither `published` nor the sink
        can tell it.
        """
        if self._name is None:
            return None
        message = message_of(row, self._closing_from)
        last = self._last_of_transaction(partition, message)
        if last is None:
            return None
        behind = self._count_between(batches, partition, message, last)
        id = message_id(partition, row["event_time"], row["merge_key"], row["tenant"])
        return self._sent.place(self._sink, partition, {ID: id.encode()}, last, behind)

    def _last_of_transaction(self, partition: int, message: SequenceTail) -> SequenceTail | None:
        """Return the last message of the transaction that has a message; None where none has.

        That is the first transaction whose last message sorts at or after it.
        """
        conditions: list[Condition] = [
            ("partition", "=", partition),
            ("sink", "=", self._name),
            *self._time_conditions,
        ]
        where = [[*conditions, *term] for term in _at_or_beyond(message)]
        rows = self._reader.select(tables.PUBLISHED, TAIL_COLUMNS, where)
        values = zip(*(rows[name].to_pylist() for name in TAIL_COLUMNS), strict=True)
        return min(map(SequenceTail._make, values), key=attrgetter("seq"), default=None)

    def _count_between(
        self,
        batches: Sequence[Condition],
        partition: int,
        message: SequenceTail,
        last: SequenceTail,
    ) -> int:
        """Return how many finished, valid records sort after a message, up to the last one of its
        transaction.

        `batches`: those of the message's generation. A transaction has messages of one alone.
        """
        conditions: list[Condition] = [
            ("partition", "=", partition),
            ("status", "=", "timed_out"),
            ("valid", "=", True),
            *batches,
        ]
        where = [
            [*conditions, *after, *until]
            for after in beyond(message, self._closing_from, is_after=True)
            for until in beyond(last, self._closing_from, is_after=False)
        ]
        counts = self._reader.summary(tables.SILVER, [], {"rows": ("count", "*")}, where)
        return int(counts["rows"][0].as_py())


class SentCorrections:
    """Messages of corrections in the topic of corrections that was written to last, as it was at a
    time (epoch ms; None for now).
    """

    def __init__(self, reader: TableReader, topic: str, sent: SentMessages, at: int | None) -> None:
        self._reader = reader
        self._topic = topic
        self._sent = sent
        self._time_conditions = _until(at)

    @cached_property
    def _tails(self) -> Mapping[int, Sequence[CorrectionTail]]:
        return correction_tails(self._reader, conditions=self._time_conditions)

    def sent_as(self, row: JsonObject, place: CorrectionPlace) -> JsonObject | None:
        """Return partition, offset and seq of the message of a correction: a row of `corrections`,
        with its place.

        None and the offset are as for merge records.
        """
        partition = row["partition"]
        later = [tail for tail in self._tails.get(partition, ()) if tail.place >= place]
        if not row["has_message"] or not later:
            return None
        last = min(later, key=attrgetter("seq"))
        behind = self._count_between(row, place, last.place)
        headers = {ID: row["id"].encode(), VERSION: str(row["version"]).encode()}
        return self._sent.place(self._topic, partition, headers, last, behind)

    def _count_between(self, row: JsonObject, first: CorrectionPlace, last: CorrectionPlace) -> int:
        """Return how many messages of the row's generation sort after one place, up to another."""
        where: list[Condition] = [
            ("generation", "=", row["generation"]),
            ("partition", "=", row["partition"]),
            ("has_message", "=", True),
            ("settled_at", ">=", first.settled_at),
            ("settled_at", "<=", last.settled_at),
        ]
        rows = self._reader.rows(tables.CORRECTIONS, ORDER, [where])
        return sum(first < place <= last for place in places_of(rows))


def _until(at: int | None) -> list[Condition]:
    """Return the condition for transactions up to a time (epoch ms); None: of all times."""
    return [] if at is None else [("committed_at", "<=", at)]


def _at_or_beyond(message: SequenceTail) -> Where:
    """Return the condition for rows of `published` whose last message sorts at or after this one.

    What says when it was closed sorts after all that does not.
    """
    if message.closed_at is not None:
        columns = ["last_closed_at", "last_tenant", "last_due", "last_key"]
        values = [message.closed_at, message.tenant, message.due, message.key]
        return lexicographic(columns, values, ">=")
    terms = lexicographic(["last_event_time", "last_key"], [message.event_time, message.key], ">=")
    does_not_say: Condition = ("last_closed_at", "is null", None)
    return [*([does_not_say, *term] for term in terms), [("last_closed_at", "is not null", None)]]


def message_of(row: JsonObject, closing_from: int | None) -> SequenceTail:
    """Return the message of a finished row of silver, without its number (-1) and offset.

    `closing_from`: the first batch whose messages say when their merge records were closed.
    """
    says_closing = closing_from is not None and row["batch"] >= closing_from
    due, closed_at = (row["due"], row["closed_at"]) if says_closing else (None, None)
    return SequenceTail(
        -1, row["event_time"], row["merge_key"], None, due, closed_at, row["tenant"]
    )
