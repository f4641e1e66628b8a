"""Facts about messages for `explain`: the place and number that a merge record or a correction has
in its topic.

They follow from `published`, which says of each transaction how far it came, and from the rows that
it published; the topic itself says the offset, where Kafka answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from watersmeet.core.sequence import Sequence
from watersmeet.errors import WatersmeetError
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import Range, read_range
from watersmeet.lake import tables
from watersmeet.lake.generations import Generations
from watersmeet.lake.order import after, up_to, with_message
from watersmeet.lake.published import last_sink, tail_after
from watersmeet.lake.table_reader import Condition, TableReader, row_count
from watersmeet.settings import Settings

_MARKERS = 1000
PATIENCE_S = 3.0
"""Seconds after which a broker that does not answer counts as away: the tables know nearly as much.
"""

JsonObject = dict[str, Any]


class Topics:
    """Reader of the topics that gold publishes to, while Kafka answers."""

    def __init__(self, settings: Settings) -> None:
        self._kafka = settings.kafka
        self._cluster = Cluster(settings.kafka, PATIENCE_S)
        self._is_away = False

    def offset_of(
        self, topic: str, partition: int, headers: Mapping[str, str], guess: int
    ) -> tuple[int | None, bool]:
        """Return the offset of the message with these headers, and True where it was sent.

        The offset is None where the topic does not have the message, and the guess where Kafka does
        not answer. A message that is missing may have been removed by retention. Otherwise it was
        never sent: it sorts before what a lost lake or a jump had left.

        The guess is never too small: between a message and the last of its transaction there may be
        markers of other transactions.
        """
        if self._is_away:
            return guess, True
        expected = [{"key": name, "value": value.encode()} for name, value in headers.items()]
        try:
            first, end = self._cluster.bounds_of(topic, [partition])[partition]
            for start in (max(first, guess - _MARKERS), first):
                until = Range(topic, partition, start, min(guess + 1, end))
                for batch in read_range(self._kafka, until, timeout_s=PATIENCE_S):
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


class SentMessages:
    """Messages of a sequence in the topic that it was written to last.

    `topic`: its name. A row is one of the sequence's table, with at
    least `partition`, `batch`, and the columns of `order` and `published`.
    """

    def __init__(
        self,
        reader: TableReader,
        sequence: Sequence,
        generations: Generations,
        topic: str,
        topics: Topics,
    ) -> None:
        self._reader = reader
        self._sequence = sequence
        self._generations = generations
        self._topic = topic
        self._topics = topics

    def is_behind(self, row: JsonObject) -> bool:
        """Return True where a finished row sorts at or before the tail behind which its generation
        publishes.
        """
        generation = self._generations.of(row["batch"])
        tail = generation.tails_of(self._sequence).get(row["partition"])
        return tail is not None and self._sequence.place(row) <= tail.place

    def has_message(self, row: JsonObject) -> bool:
        """Return True where a row has a message, or will have one."""
        is_valid = all(row[name] == value for name, value in self._sequence.with_message.items())
        return is_valid and not self.is_behind(row)

    def sent_as(self, row: JsonObject, headers: Mapping[str, str]) -> JsonObject | None:
        """Return partition, offset and seq of the message of a row, which has these headers.

        None where it is not published. The offset is None where neither `published` nor the topic
        can tell it.
        """
        if self._sink is None or not self.has_message(row):
            return None
        sequence, partition = self._sequence, row["partition"]
        place = sequence.place(row)
        last = tail_after(self._reader, sequence, self._sink, partition, place)
        if last is None:
            return None
        # A transaction has messages of one generation alone.
        batches = self._generations.batches(self._generations.of(row["batch"]))
        here: list[Condition] = [*with_message(sequence), ("partition", "=", partition), *batches]
        between = [
            [*here, *begin, *end]
            for begin in after(sequence, place)
            for end in up_to(sequence, last.place)
        ]
        behind = row_count(self._reader, sequence.table, between)
        offset, is_out = None, True
        if last.offset is not None:
            guess = last.offset - behind
            offset, is_out = self._topics.offset_of(self._topic, partition, headers, guess)
        sent = {"partition": partition, "offset": offset, "seq": last.seq - behind}
        return sent if is_out else None

    @cached_property
    def _sink(self) -> str | None:
        is_there = self._reader.exists(tables.PUBLISHED)
        return last_sink(self._reader, self._sequence) if is_there else None
