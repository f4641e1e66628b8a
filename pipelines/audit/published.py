"""Where a finished record is in the sink: its number by silver's order, its offset by `published` and the sink itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from confluent_kafka import KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from pipelines import tables
from pipelines.adapters.kafka import Cluster, read_to_end
from pipelines.adapters.lake import Lake
from pipelines.core.sequence import ID, SEQ, message_id
from pipelines.errors import WatersmeetError
from pipelines.extent import finished
from pipelines.settings import Settings

SOON_S = 3.0
"""A broker that is there answers within this; the tables know nearly as much."""


class _Transaction(NamedTuple):
    """A row of `published`: the number and the place of the last message that it wrote."""

    last_seq: int
    last_event_time: int
    last_key: str
    sink_offset: int | None


@dataclass
class Sink:
    """What `published` knew at a time (epoch ms; None: now) of the sink that was written to last."""

    lake: Lake
    settings: Settings
    at: int | None
    _is_away: bool = False

    def place_of(self, partition: int, event_time: int, key: str) -> dict[str, int | None] | None:
        """Partition, offset and seq of the message of a finished, valid record; None where it is not out. The offset is None
        where neither `published` nor the sink can tell it.
        """
        if self._name is None:
            return None
        last = self._transaction(partition, event_time, key)
        if last is None:
            return None
        seq = last.last_seq - self._messages_between(partition, event_time, key, last)
        guess = None if last.sink_offset is None else last.sink_offset - (last.last_seq - seq)
        offset = guess if guess is None else self._looked_up(partition, seq, message_id(partition, event_time, key), guess)
        return {"partition": partition, "offset": offset, "seq": seq}

    @cached_property
    def _name(self) -> str | None:
        if not self.lake.exists(tables.PUBLISHED):
            return None
        rows = self.lake.rows(f"SELECT sink FROM {{published}} WHERE {self._is_known} ORDER BY committed_at DESC LIMIT 1")
        return rows[0][0] if rows else None

    @property
    def _is_known(self) -> str:
        return "TRUE" if self.at is None else f"committed_at <= {self.lake.time_literal(self.at)}"

    def _transaction(self, partition: int, event_time: int, key: str) -> _Transaction | None:
        """The first transaction whose last message sorts at or behind the record: it wrote the record."""
        assert self._name is not None
        time = self.lake.time_literal(event_time)
        rows = self.lake.rows(
            "SELECT last_seq, last_event_time, last_key, sink_offset FROM {published} "
            f"WHERE `partition` = {partition} AND sink = {self.lake.text_literal(self._name)} AND {self._is_known} AND "
            f"(last_event_time > {time} OR last_event_time = {time} AND last_key >= {self.lake.text_literal(key)}) "
            "ORDER BY last_seq LIMIT 1"
        )
        return _Transaction(*rows[0]) if rows else None

    def _messages_between(self, partition: int, event_time: int, key: str, last: _Transaction) -> int:
        """How many finished, valid records sort behind this one and not behind the transaction's last."""
        time, end = (self.lake.time_literal(ms) for ms in (event_time, last.last_event_time))
        [(count,)] = self.lake.rows(
            f"SELECT COUNT(*) FROM {{silver}} WHERE {finished(self.lake, event_time)} AND `partition` = {partition} "
            f"AND event_time <= {end} "
            f"AND (event_time > {time} OR merge_key > {self.lake.text_literal(key)}) "
            f"AND (event_time < {end} OR merge_key <= {self.lake.text_literal(last.last_key)})"
        )
        return int(count)

    def _looked_up(self, partition: int, seq: int, record_id: str, guess: int) -> int | None:
        """The offset by the sink's own word, None where retention has removed it; where Kafka does not answer, the guess.

        The guess is never too small: between a message and the last of its row in `published` there may be the markers of other
        transactions. A message that comes too late is at least as many offsets too far as its number is too large.
        """
        if self._is_away:
            return guess
        try:
            consumer = Cluster(self.settings.kafka).consumer()
            try:
                consumer.get_watermark_offsets(KafkaPartition(self.settings.publish.topic, partition), timeout=SOON_S)
                while True:
                    found = read_to_end(consumer, self.settings.publish.topic, partition, guess, limit=1)
                    headers: dict[str, Any] = dict(found[0].headers() or []) if found else {}
                    if headers.get(ID) == record_id.encode():
                        return found[0].offset()
                    if int(headers.get(SEQ, -1)) <= seq:
                        return None
                    guess = max(0, guess - max(1, int(headers[SEQ]) - seq))
            finally:
                consumer.close()
        except (KafkaException, WatersmeetError):
            self._is_away = True
            return guess
