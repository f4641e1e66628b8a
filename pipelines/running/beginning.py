"""Where bronze begins to read a source, and whether Kafka still has what it wants to read next.

A beginning is decided once, at the first start of a lake, and kept in its tables (`resets`, or `recovered` for a lake that was
lost): a restart before the first record must neither skip a record nor decide anew. From then on the tables say where reading
goes on: after the last row of bronze, or at the beginning that was kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import orjson
import pyarrow as pa
from confluent_kafka import Message

from pipelines.core.inputs import source_of
from pipelines.core.plan import TopicPartition
from pipelines.core.recovery import NotToldError, ReadBack, SinkState, Told, encode_told, sink_state
from pipelines.core.sequence import FORGOTTEN, MIN_OFFSETS, PLAIN, standing
from pipelines.core.window import Window
from pipelines.errors import ConfigurationError, DataLossError, ForeignMessageError
from pipelines.kafka.cluster import Cluster
from pipelines.kafka.reading import headers_of, read_backwards
from pipelines.kafka.transactions import open_transactions
from pipelines.lake import tables
from pipelines.lake.commits import Append, bronze_application
from pipelines.lake.decisions import Decided, decision_rows
from pipelines.lake.identity import first_offsets_fact, keep_facts, known_first_offsets
from pipelines.lake.progress import last_batch
from pipelines.lake.questions import Questions, within
from pipelines.running.owner import Owner, now_ms
from pipelines.settings import Settings, StartOffsets, StartTimestamp

EARLIEST = -2
"""Stands for the first offset that Kafka still has, where no table says where to begin."""


@dataclass
class Beginning:
    """The offsets at which bronze reads the inputs (`core.inputs`) of one configuration, each with `partitions` Kafka partitions.

    Without an `owner`, it only looks.
    """

    questions: Questions
    settings: Settings
    partitions: int
    owner: Owner | None = None
    fence_sink: Callable[[], None] = lambda: None
    """Called before a sink is read from which a lake is taken up: nobody else may publish to it from there on."""

    def decide(self) -> None:
        """Afterwards the tables say where every input begins; `earliest` needs no saying.

        Raises ConfigurationError where an offset that `start` names does not exist yet.
        """
        if self.settings.kafka.start == "earliest":
            return
        unread = [source for source in self.settings.inputs if not self._is_begun(source)]
        if self.settings.kafka.start != "sink":
            self._begin(unread)
        elif len(unread) == len(self.settings.inputs):
            self.fence_sink()
            self._begin_at_sink()

    def remember(self, append: Append) -> None:
        """Afterwards the lake knows for every input where Kafka began when it was first seen: what is deleted from there on
        before it was read is a loss, also in a partition that was empty.
        """
        unknown = self.settings.inputs.keys() - known_first_offsets(self.questions, self.settings).keys()
        firsts = {source: {str(p): first for p, (first, _) in self._bounds(source).items()} for source in unknown}
        if not firsts:
            return
        facts = {first_offsets_fact(source): orjson.dumps(offsets).decode() for source, offsets in firsts.items()}
        keep_facts(self.questions, append, self.settings, facts)

    def next_offsets(self, source: str) -> dict[int, int]:
        """Per partition the offset at which reading goes on: after the last row of bronze, or where a beginning was decided;
        `EARLIEST` where nothing is said.
        """
        last = last_batch(self.questions)
        ranges = {} if last is None else last[0].ranges
        passed = {tp.partition: done.until_offset for tp, done in ranges.items() if tp.source == source and done.until_offset}
        # What silver has long passed is not read.
        beyond = within({p: (passed.get(p, 0), None) for p in range(self.partitions)})
        found = self.questions.summary(tables.bronze(source), ["partition"], {"last": ("max", "offset")}, beyond)
        read = [(row["partition"], row["last"] + 1) for row in found.to_pylist()]
        offsets = dict.fromkeys(range(self.partitions), EARLIEST)
        for p, offset in [*passed.items(), *read, *begun(self.questions, source)]:
            offsets[p] = max(offset, offsets[p])
        return offsets

    def checked_offsets(self, source: str) -> dict[int, int]:
        """The offsets at which reading goes on, all of them in Kafka. A gap that is accepted is kept in `resets`.

        Raises DataLossError where Kafka has deleted offsets that were not read and `on_data_loss` is `stop`.
        """
        bounds, known = self._bounds(source), self.next_offsets(source)
        self._keep({(source, p): gap for p, gap in self._lost(source, known, bounds).items()}, "on_data_loss: continue")
        return {p: max(offset, bounds[p][0]) for p, offset in known.items()}

    def _bounds(self, source: str) -> dict[int, tuple[int, int]]:
        """By partition, the first offset that Kafka has of a source, and the end."""
        return Cluster(self.settings.kafka).bounds(self.settings.inputs[source], self.partitions)

    def _lost(self, source: str, offsets: Mapping[int, int], bounds: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """By partition, the offsets that are to be read and that Kafka has deleted, where that is accepted."""
        topic, lost = self.settings.inputs[source], dict[int, tuple[int, int]]()
        is_unread = EARLIEST in offsets.values()
        seen = known_first_offsets(self.questions, self.settings).get(source, {}) if is_unread else {}
        for p, known in offsets.items():
            first, end = bounds[p]
            offset = seen.get(p, EARLIEST) if known == EARLIEST else known
            if offset > end:
                raise ConfigurationError(
                    f"sources.{source_of(source)}.topic: {topic}[{p}] ends at offset {end}, and {offset} is to be read next: "
                    "it is not the topic that this lake has read, or has lost its end; use another lake for another topic"
                )
            if offset != EARLIEST and offset < first:
                lost[p] = offset, first
        if lost and self.settings.kafka.on_data_loss == "stop":
            raise DataLossError(source, topic, lost)
        return lost

    def preview(self) -> list[dict[str, Any]]:
        """What a run would read now: source, partition, `[from_offset, until_offset)`, what says so, and the `transaction` of
        another producer that is open behind it, where one is. Changes nothing.

        Raises what a run would raise.
        """
        rows = []
        for source in self.settings.inputs:
            cluster, topic = Cluster(self.settings.kafka), self.settings.inputs[source]
            bounds, transactions = open_transactions(cluster, topic, range(self.partitions))
            is_begun = self._is_begun(source)
            offsets = self.next_offsets(source) if is_begun else self._chosen(source, bounds)
            lost = self._lost(source, offsets, bounds)
            because = "the lake" if is_begun else f"start: {self.settings.kafka.start}"
            for p, (first, end) in bounds.items():
                place = {"source": source, "partition": p, "from_offset": max(first, offsets[p]), "until_offset": end}
                of_others = {"transaction": transactions[p].as_row()} if p in transactions else {}
                rows.append({**place, **of_others, "because": because + (", on_data_loss: continue" if p in lost else "")})
        return rows

    # -- the first start

    def _is_begun(self, source: str) -> bool:
        """Whether the lake has read of the source, or has decided where to."""
        if not self.questions.exists(tables.RESETS):
            return False
        if begun(self.questions, source):
            return True
        found = self.questions.summary(tables.bronze(source), [], {"records": ("count", "*")})
        passed = self.questions.summary(tables.PROGRESS, [], {"until": ("max", "until_offset")}, [[("source", "=", source)]])
        return bool(found["records"][0].as_py() or passed["until"][0].as_py())  # what bronze had may have been deleted

    def _begin(self, sources: list[str]) -> None:
        begun = {}
        for source in sources:
            bounds = self._bounds(source)
            for p, offset in self._chosen(source, bounds).items():
                if offset != EARLIEST:
                    begun[source, p] = min(bounds[p][0], offset), offset
        self._keep(begun, f"start: {self.settings.kafka.start}")

    def _chosen(self, source: str, bounds: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        """Where `start` wants a source that was never read to begin."""
        start, topic = self.settings.kafka.start, self.settings.inputs[source]
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
        now = now_ms()
        rows = [(*self.settings.place(source), p, *gap, now, reason) for (source, p), gap in gaps.items()]
        self._write(tables.RESETS, tables.layout(self.settings)[tables.RESETS].rows(rows))

    def _write(self, table: str, rows: pa.Table) -> None:
        if self.owner is None:
            raise ValueError("a beginning can only be decided by the owner of bronze")
        self.owner.append(table, rows, bronze_application())

    # -- a lake that was lost

    def _begin_at_sink(self) -> None:
        """What the sink says is kept: the idle policy's decisions first, then all else in one commit, which decides.

        Offsets that Kafka has deleted since are passed over: what they held is out, or lost for good.
        """
        states, now = self._sink_states, now_ms()
        idle = [
            (TopicPartition(source, p), decision)
            for p, state in states.items()
            for source in self.settings.inputs
            for decision in state.decisions.get(source, ())
        ]
        rows: list[dict[str, Any]] = [
            {"partition": p, "merge_key": m.key, "event_time": m.event_time}
            | {"due": m.due, "closed_at": m.closed_at, "tenant": m.tenant}
            for p, state in states.items()
            for m in state.read_back
        ]
        if self.settings.merge.has_tenants:
            rows += [{"partition": p, "since": state.since} for p, state in states.items() if state.since is not None]
        else:
            lived = {p: state.lived(self.settings.merge.window) for p, state in states.items()}
            rows += [{"partition": p, "epochs": encode_told(told).decode()} for p, told in lived.items() if told is not None]
        for name in self.settings.inputs:
            begun, place = self._chosen(name, self._bounds(name)), self.settings.place(name)._asdict()
            rows += [{"partition": p, **place, "offset": offset} for p, offset in begun.items()]
        known = self.questions.summary(tables.IDLE_HEARTBEATS, [], {"decisions": ("count", "*")})
        if idle and not known["decisions"][0].as_py():
            self._write(tables.IDLE_HEARTBEATS, self._decision_rows(idle, now))
        table = tables.layout(self.settings)[tables.RECOVERED]
        self._write(tables.RECOVERED, table.rows_of({**row, "recovered_at": now} for row in rows))

    def _decision_rows(self, decided: Sequence[Decided], now: int) -> pa.Table:
        """Decisions as rows: those after one offset a millisecond apart, since rows of one time are one decision."""
        counts: Counter[tuple[TopicPartition, int]] = Counter()
        by_time: dict[int, list[Decided]] = {now: []}
        for tp, decision in decided:
            place = tp, decision.after_offset
            by_time.setdefault(now + counts[place], []).append((tp, decision))
            counts[place] += 1
        return pa.concat_tables([decision_rows(self.settings, mine, time) for time, mine in by_time.items()])

    @cached_property
    def _sink_states(self) -> dict[int, SinkState]:
        """Per partition what the sink says; where there is no sink, or nothing in it, nothing. No transaction is open there.

        A partition whose last message was made before the window first changed says nothing of it, and others say what it was.
        Raises ConfigurationError where messages were not made with the tenants or the window of the configuration, and do not
        say with which, or where the window or the lag of tenants has changed.
        """
        topic, cluster = self.settings.publish.topic, Cluster(self.settings.kafka)
        nothing = {p: SinkState({}, {}, ()) for p in range(self.partitions)}
        if topic not in cluster.partition_counts([topic]):
            return nothing

        bounds = cluster.settled_bounds(topic, self.partitions)

        def read(p: int, window: Window) -> SinkState:
            """What a sink partition says, whose messages had this window unless they tell of another one."""
            offset = -1

            def messages() -> Iterator[tuple[ReadBack, Mapping[str, bytes | None]]]:
                """The partition's messages from its end backwards, without tombstones."""
                nonlocal offset
                for message in read_backwards(self.settings.kafka, topic, p, bounds[p]):
                    if FORGOTTEN not in dict(headers_of(message)):
                        offset = message.offset() or 0
                        yield _as_read_back(message)

            try:
                return sink_state(messages(), window, merge.tenant_max_lag_ms)
            except ValueError:
                raise ForeignMessageError(topic, p, offset, MIN_OFFSETS) from None
            except NotToldError:
                raise ConfigurationError(
                    f"kafka.start: {topic}[{p}]@{offset} does not say where a lost lake goes on, since the idle decisions "
                    "that it needs, with what each tells its tenants, are more than fit into a message; start at `earliest`, "
                    "and publish to another topic"
                ) from None

        merge = self.settings.merge
        found = {p: read(p, merge.window) for p in nothing}
        self._check_tenants(found.values())
        first = next((state.told.first for state in found.values() if state.told), None)
        if first is not None:
            early = [p for p, state in found.items() if state.told is None]
            found |= {p: replace(read(p, first), told=Told(first, first, is_plain=first.is_timeout)) for p in early}
        for state in found.values():
            if state.had_gap and not merge.has_due:
                raise ConfigurationError(
                    f"merge.timeout: the messages of {topic} were made with a window by gap; give the `window` of the lake, "
                    f"or one whose gap and max are both `{merge.window.gap_ms}ms`, which is this timeout"
                )
            if state.last is not None and state.told is None and not merge.window.is_timeout and state.last.closed_at == PLAIN:
                raise ConfigurationError(
                    f"merge.window: the messages of {topic} were made with a timeout; begin with that one as `merge.timeout`, "
                    "and change it with `watersmeet evolve`"
                )
        return found

    def _check_tenants(self, states: Iterable[SinkState]) -> None:
        topic, has_tenants = self.settings.publish.topic, self.settings.merge.has_tenants
        for state in states:
            if state.last is None:
                continue
            if has_tenants and not state.last.tenant:
                raise ConfigurationError(
                    f"merge.tenant: the messages of {topic} were made without tenants; leave `tenant` and `tenant_max_lag` out, "
                    "or publish to another topic"
                )
            if state.last.tenant and not has_tenants:
                raise ConfigurationError(
                    f"merge.tenant: the messages of {topic} were made with tenants; give the `tenant` and `tenant_max_lag` of "
                    "the lake, or publish to another topic"
                )
            if has_tenants and state.told is not None:
                raise ConfigurationError(
                    f"kafka.start: the messages of {topic} tell of another window or `tenant_max_lag` before, and with tenants a "
                    "lake cannot be taken up through such a change; start at `earliest`, and publish to another topic"
                )


def begun(questions: Questions, source: str) -> list[tuple[int, int]]:
    """The beginnings that the tables keep for a source: (partition, offset)."""
    of_source = [[("source", "=", source)]]
    resets = questions.select(tables.RESETS, ["partition", "to_offset"], of_source)
    recovered = questions.select(tables.RECOVERED, ["partition", "offset"], of_source)
    return [tuple(row.values()) for found in (resets, recovered) for row in found.to_pylist()]


def _as_read_back(message: Message) -> tuple[ReadBack, Mapping[str, bytes | None]]:
    headers: dict[str, Any] = dict(headers_of(message))
    try:
        stands = standing(headers)
    except ValueError:
        raise ForeignMessageError(message.topic() or "", message.partition() or 0, message.offset() or 0) from None
    return ReadBack(stands.event_time, stands.key, stands.due, stands.closed_at, stands.tenant), headers
