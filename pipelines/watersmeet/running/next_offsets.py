"""Finds the offsets that bronze reads next of a source, and those that Kafka no longer has."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from watersmeet.core.inputs import InputId
from watersmeet.errors import ConfigurationError, DataLossError, RecordsReplacedError
from watersmeet.kafka.cluster import Cluster
from watersmeet.lake import tables
from watersmeet.lake.commits import last_decision
from watersmeet.lake.history import Generation, History, read_history
from watersmeet.lake.journal import SKIP
from watersmeet.lake.newest import row_ends
from watersmeet.lake.progress import last_batch
from watersmeet.lake.table_reader import TableReader
from watersmeet.lake.tables import application_of
from watersmeet.running.owner import Owner
from watersmeet.running.same_records import replaced_from
from watersmeet.settings import Settings

log = logging.getLogger("watersmeet.bronze")

Bounds = Mapping[int, tuple[int, int]]
"""The first offset that Kafka has and the end, by partition."""


@dataclass
class NextOffsets:
    """The offsets that bronze reads next, of the inputs of a lake that has begun.

    Each input has `partitions` Kafka partitions. Without an `owner`, nothing is written.
    """

    reader: TableReader
    settings: Settings
    partitions: int
    owner: Owner | None = None

    def of(
        self,
        input_id: InputId,
        generation: Generation | None = None,
        beyond: Mapping[int, int] | None = None,
    ) -> dict[int, int]:
        """Return, by partition, the offset that is read next.

        It is the largest of: the offset after bronze's last row, or where reading has ended behind
        it; the first of the newest generation; and the end of an accepted gap. `generation`: the
        newest one, if it is known; `beyond`: what `beyond_rows` returns, if it is known.
        """
        history = self._history()
        newest = generation or history.generations.newest
        offsets = newest.offsets_of(input_id)
        last = last_batch(self.reader)
        ranges = {} if last is None else last.ranges
        consumed = {
            tp.partition: done.until_offset
            for tp, done in ranges.items()
            if tp.input == input_id and done.until_offset
        }
        for p, offset in [
            *consumed.items(),
            *row_ends(self.reader, input_id, consumed).items(),
            *(self.beyond_rows(input_id) if beyond is None else beyond).items(),
            *((s.tp.partition, s.to_offset) for s in history.skips if s.tp.input == input_id),
        ]:
            offsets[p] = max(offset, offsets.get(p, 0))
        return {p: offsets.get(p, 0) for p in range(self.partitions)}

    def beyond_rows(self, input_id: InputId) -> dict[int, int]:
        """Return, by partition, where reading has ended beyond bronze's last row, as bronze's last
        commit says.

        Once Kafka has deleted what it has there, nobody could tell that it was no record.
        """
        table = tables.bronze(input_id.source)
        if not self.reader.exists(table):
            return {}
        last = last_decision(self.reader, table, application_of(self.settings, input_id))
        return {} if last is None else dict(last[1].facts.get("reached", ()))

    def checked(self, input_id: InputId, beyond: Mapping[int, int] | None = None) -> dict[int, int]:
        """Return, by partition, the offset that is read next and that Kafka has.

        A gap that is accepted is decided. Raises DataLossError if Kafka has deleted
        offsets that were not read, or RecordsReplacedError if it has other records at offsets that
        were, and `on_data_loss` is `stop`.
        """
        bounds = self.bounds(input_id)
        offsets = self.of(input_id, beyond=beyond)
        lost = self.lost(input_id, offsets, bounds)
        replaced = self.replaced(input_id, offsets, bounds)
        if gaps := [
            {**input_id._asdict(), "partition": p, "from_offset": since, "to_offset": until}
            for p, (since, until) in [*lost.items(), *replaced.items()]
        ]:
            if self.owner is None:
                raise ValueError("a gap can only be accepted by the owner of bronze")
            self.owner.decide(SKIP, {"jumps": gaps, "reason": "on_data_loss: continue"})
        return {p: max(offset, bounds[p][0]) for p, offset in offsets.items()}

    def bounds(self, input_id: InputId) -> Bounds:
        """Return the first offset that Kafka has of an input and the end, by partition."""
        return self._cluster.bounds(input_id.topic, self.partitions)

    def leader_epochs(self, input_id: InputId) -> dict[int, int]:
        """Return `Cluster.leader_epochs` of an input."""
        return self._cluster.leader_epochs(input_id.topic, self.partitions)

    def lost(
        self, input_id: InputId, offsets: Mapping[int, int], bounds: Bounds
    ) -> dict[int, tuple[int, int]]:
        """Return, by partition, the offsets to be read that Kafka has deleted, if that is accepted.

        Raises DataLossError if it is not, and ConfigurationError if an offset is beyond Kafka's
        end.
        """
        topic = input_id.topic
        lost = dict[int, tuple[int, int]]()
        for p, offset in offsets.items():
            first, end = bounds[p]
            if offset > end:
                raise ConfigurationError(
                    f"{topic}[{p}] ends at offset {end}, and {offset} is to be read next: it "
                    "is not the topic that this lake has read, or has lost its end",
                    where=f"sources.{input_id.source}.topic",
                    fix="use another lake for another topic",
                )
            if offset < first:
                lost[p] = offset, first
        if lost and self.settings.kafka.on_data_loss == "stop":
            raise DataLossError(self.settings.input_names[input_id], topic, lost)
        return lost

    def replaced(
        self, input_id: InputId, offsets: Mapping[int, int], bounds: Bounds
    ) -> dict[int, tuple[int, int]]:
        """Return, by partition, the offsets before those that are read next at which Kafka has
        other records than bronze, if that is accepted.

        Raises RecordsReplacedError if it is not. What lies before an accepted gap is not compared.
        """
        ranges = {p: (bounds[p][0], offset) for p, offset in offsets.items()}
        for skip in self._history().skips:
            p = skip.tp.partition
            if skip.tp.input == input_id and p in ranges:
                ranges[p] = max(ranges[p][0], skip.to_offset), offsets[p]
        firsts = replaced_from(self.reader, self.settings.kafka, input_id, ranges)
        replaced = {p: (first, offsets[p]) for p, first in firsts.items()}
        if not replaced:
            return {}
        error = RecordsReplacedError(self.settings.input_names[input_id], input_id.topic, replaced)
        if self.settings.kafka.on_data_loss == "stop":
            raise error
        log.warning("%s", error.problem.what)
        return replaced

    @cached_property
    def _cluster(self) -> Cluster:
        return Cluster(self.settings.kafka)

    def _history(self) -> History:
        if self.owner is None:
            return read_history(self.reader, self.settings)
        return self.owner.history(self.settings)
