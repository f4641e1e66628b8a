"""Where bronze begins to read a source, and whether Kafka still has what it wants to read next.

A beginning is decided once, at the first start of a lake, and kept in its tables (`resets`, or `recovered` for a lake that was
lost): a restart before the first record must neither skip a record nor decide anew. From then on the tables say where reading
goes on: after the last row of bronze, or at the beginning that was kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from confluent_kafka import Message

from pipelines import tables
from pipelines.adapters.decisions import write_decisions
from pipelines.adapters.kafka import Cluster, read_backwards
from pipelines.adapters.lake import Lake, bronze_application, wall_clock_ms
from pipelines.adapters.progress import read_last_batch
from pipelines.core.plan import TopicPartition
from pipelines.core.recovery import SinkState, sink_state
from pipelines.core.sequence import ID, parse_message_id
from pipelines.errors import ConfigurationError, DataLossError, ForeignMessageError
from pipelines.settings import Settings, StartOffsets, StartTimestamp
from pipelines.transforms.ranges import within

EARLIEST = -2
"""Spark's name for the first offset that Kafka still has."""


@dataclass
class Beginning:
    """The offsets at which bronze reads the sources of one configuration, each with `partitions` Kafka partitions."""

    lake: Lake
    settings: Settings
    partitions: int

    def decide(self) -> None:
        """Afterwards the tables say where every source begins; `earliest` needs no saying.

        Raises ConfigurationError where an offset that `start` names does not exist yet.
        """
        if self.settings.kafka.start == "earliest":
            return
        unread = [source for source in self.settings.sources if not self._is_begun(source)]
        if self.settings.kafka.start != "sink":
            self._begin(unread)
        elif len(unread) == len(self.settings.sources):
            self._begin_at_sink()

    def next_offsets(self, source: str) -> dict[int, int]:
        """Per partition the offset at which reading goes on: after the last row of bronze, or where a beginning was decided;
        `EARLIEST` where nothing is said.
        """
        last = read_last_batch(self.lake)
        passed = {tp.partition: done.until_offset for tp, done in (last.ranges.items() if last else ()) if tp.source == source}
        # What silver has long passed is not read.
        is_new = within({p: (passed.get(p, 0), None) for p in range(self.partitions)})
        rows = self.lake.rows(
            f"SELECT `partition`, MAX(`offset`) + 1 FROM {{{tables.bronze(source)}}} WHERE {is_new} GROUP BY `partition`"
        )
        said: dict[int, int] = {}
        for p, offset in [*rows, *begun(self.lake, source)]:
            said[p] = max(offset, said.get(p, 0))
        known = {p: max(said.get(p, EARLIEST), passed.get(p, EARLIEST)) for p in range(self.partitions)}
        return {p: EARLIEST if p not in said and offset == 0 else offset for p, offset in known.items()}

    def checked_offsets(self, source: str) -> dict[int, int]:
        """The same, certain to be in Kafka, where a gap is not an error accepted and kept in `resets`.

        Raises DataLossError where Kafka has deleted offsets that were not read and `on_data_loss` is `stop`.
        """
        topic = self.settings.sources[source].topic
        bounds = Cluster(self.settings.kafka).bounds(topic, self.partitions)
        offsets = self.next_offsets(source)
        lost = self._lost(source, offsets, bounds)
        if not lost:
            return offsets
        if self.settings.kafka.on_data_loss == "stop":
            raise DataLossError(source, topic, lost)
        self._keep({(source, p): gap for p, gap in lost.items()}, "on_data_loss: continue")
        return offsets | {p: first for p, (_, first) in lost.items()}

    def _lost(self, source: str, offsets: Mapping[int, int], bounds: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """By partition, the offsets that are to be read and that Kafka has deleted."""
        topic = self.settings.sources[source].topic
        wanted = {p: offset for p, offset in offsets.items() if offset != EARLIEST}
        for p, offset in wanted.items():
            if offset > bounds[p][1]:
                raise ConfigurationError(
                    f"sources.{source}.topic: {topic}[{p}] ends at offset {bounds[p][1]}, and {offset} is to be read next: "
                    "it is not the topic that this lake has read, or has lost its end; use another lake for another topic"
                )
        return {p: (offset, bounds[p][0]) for p, offset in wanted.items() if offset < bounds[p][0]}

    def preview(self) -> list[dict[str, Any]]:
        """What a run would read now: source, partition, `[from_offset, until_offset)` and what says so. Changes nothing.

        Raises what a run would raise.
        """
        rows = []
        for source, kept in self.settings.sources.items():
            bounds = Cluster(self.settings.kafka).bounds(kept.topic, self.partitions)
            is_begun = self._is_begun(source)
            offsets = self.next_offsets(source) if is_begun else self._chosen(source, bounds)
            lost = self._lost(source, offsets, bounds)
            if lost and self.settings.kafka.on_data_loss == "stop":
                raise DataLossError(source, kept.topic, lost)
            because = "the lake" if is_begun else f"start: {self.settings.kafka.start}"
            rows += [
                {
                    "source": source,
                    "partition": p,
                    "from_offset": max(first, offsets[p]),
                    "until_offset": end,
                    "because": because + (", on_data_loss: continue" if p in lost else ""),
                }
                for p, (first, end) in bounds.items()
            ]
        return rows

    # -- the first start

    def _is_begun(self, source: str) -> bool:
        """Whether the lake has read of the source, or has decided where to."""
        if not self.lake.exists(tables.RESETS):
            return False
        return bool(begun(self.lake, source) or self.lake.rows(f"SELECT 1 FROM {{{tables.bronze(source)}}} LIMIT 1"))

    def _begin(self, sources: list[str]) -> None:
        begun = {}
        for source in sources:
            bounds = Cluster(self.settings.kafka).bounds(self.settings.sources[source].topic, self.partitions)
            for p, offset in self._chosen(source, bounds).items():
                if offset != EARLIEST:
                    begun[source, p] = min(bounds[p][0], offset), offset
        self._keep(begun, f"start: {self.settings.kafka.start}")

    def _chosen(self, source: str, bounds: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        """Where `start` wants a source that was never read to begin."""
        start, topic = self.settings.kafka.start, self.settings.sources[source].topic
        if start == "latest":
            return {p: end for p, (_, end) in bounds.items()}
        if isinstance(start, StartTimestamp):
            return Cluster(self.settings.kafka).offsets_at(topic, self.partitions, start.timestamp_ms)
        if isinstance(start, StartOffsets):
            named = start.offsets.get(source, {})
            if beyond := sorted(named.keys() - bounds.keys()):
                raise ConfigurationError(
                    f"kafka.start: {topic} has no partition {beyond[0]}; name partitions from 0 to {self.partitions - 1}"
                )
            for p, offset in named.items():
                if offset > bounds[p][1]:
                    raise ConfigurationError(
                        f"kafka.start: {topic}[{p}] ends at offset {bounds[p][1]}, and {offset} is beyond; name one up to there"
                    )
            return {p: named.get(p, EARLIEST) for p in bounds}
        if start == "sink":
            states = self._sink_states
            return {p: max(first, states[p].begin.get(source, first)) for p, (first, _) in bounds.items()}
        return dict.fromkeys(bounds, EARLIEST)

    def _keep(self, gaps: Mapping[tuple[str, int], tuple[int, int]], reason: str) -> None:
        """One commit for all of them, so that a start is decided whole or not at all."""
        if not gaps:
            return
        now, topics = wall_clock_ms(), {s: kept.topic for s, kept in self.settings.sources.items()}
        rows = [(source, topics[source], p, *gap, now, reason) for (source, p), gap in gaps.items()]
        self.lake.append_rows(rows, tables.RESETS, application=bronze_application())

    # -- a lake that was lost

    def _begin_at_sink(self) -> None:
        """What the sink says is kept: the idle policy's decisions first, then all else in one commit, which decides.

        Offsets that Kafka has deleted since are passed over: what they held is out, or lost for good.
        """
        states, now = self._sink_states, wall_clock_ms()
        sources = self.settings.sources
        idle = [
            (TopicPartition(source, p), decision)
            for p, state in states.items()
            for source, decisions in state.decisions.items()
            for decision in decisions
            if source in sources
        ]
        messages = [(p, m.key, m.event_time, None, None, now) for p, state in states.items() for m in state.read_back]
        begun: list[tuple[Any, ...]] = []
        for source, kept in sources.items():
            bounds = Cluster(self.settings.kafka).bounds(kept.topic, self.partitions)
            begun += [(p, None, None, source, offset, now) for p, offset in self._chosen(source, bounds).items()]
        if idle and not self.lake.rows("SELECT 1 FROM {idle_heartbeats} LIMIT 1"):
            write_decisions(self.lake, self.settings, idle, bronze_application())
        self.lake.append_rows(messages + begun, tables.RECOVERED, application=bronze_application())

    @cached_property
    def _sink_states(self) -> dict[int, SinkState]:
        """Per partition what the sink says; where there is no sink, or nothing in it, nothing."""
        topic, cluster = self.settings.publish.topic, Cluster(self.settings.kafka)
        nothing = {p: SinkState({}, {}, ()) for p in range(self.partitions)}
        if topic not in cluster.partition_counts():
            return nothing
        consumer = cluster.consumer()
        try:
            return {
                p: sink_state(map(_as_read_back, read_backwards(consumer, topic, p)), self.settings.merge.timeout_ms)
                for p in nothing
            }
        finally:
            consumer.close()


def begun(lake: Lake, source: str) -> list[tuple[int, int]]:
    """The beginnings that the tables keep for a source: (partition, offset)."""
    return lake.rows(
        f"SELECT `partition`, to_offset FROM {{resets}} WHERE source = '{source}' "
        f"UNION ALL SELECT `partition`, `offset` FROM {{recovered}} WHERE source = '{source}'"
    )


def _as_read_back(message: Message) -> tuple[int, str, Mapping[str, bytes | None]]:
    headers: dict[str, Any] = dict(message.headers() or [])
    try:
        _, event_time, key = parse_message_id(headers[ID].decode())
    except (KeyError, ValueError):
        raise ForeignMessageError(message.topic() or "", message.partition() or 0, message.offset() or 0) from None
    return event_time, key, headers
