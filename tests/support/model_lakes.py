"""Whole lakes straight from the merge model, without the pipeline and without a JVM: correct until
a test breaks them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import orjson
import pyarrow as pa
from confluent_kafka import Producer
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from tests.support.cases import BAD_VALUES, HOLE, Case
from tests.support.inputs import record_of
from tests.support.journals import decisions_of, journal_rows
from tests.support.topics import Published, consume
from watersmeet.core.idle import IdleDecision
from watersmeet.core.model import (
    MIN_TIME,
    NO_TENANT,
    MergeRecord,
    MergeRules,
    PartitionMerge,
    PublishedRecord,
    Record,
)
from watersmeet.core.plan import BatchPlan, OffsetRange, TopicPartition
from watersmeet.core.sequence import MERGED, Tail
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.commits import Commit
from watersmeet.lake.history import Generation
from watersmeet.lake.journal import CLOSED, SKIP, Decision
from watersmeet.lake.location import Lake
from watersmeet.lake.progress import batch_rows, facts_of
from watersmeet.lake.published import topic_columns
from watersmeet.lake.tables import APPLICATION
from watersmeet.settings import Settings

KAFKA_TIME_MS = 1_767_225_600_000
Row = dict[str, Any]


@dataclass
class ModelLake:
    """Many cases in one lake, a partition each. `arrive` fills bronze, `merge` is one batch of
    silver, `jump` begins a generation, `publish` writes what is finished to the real sink and notes
    it. A value's tenant is its field `g`, where the merge has tenants.

    `is_valid` judges finished merge records; `kept` is what silver keeps of a source's value: its
    text, or what a schema makes of it; `value` is a row's message, by default its JSON.
    """

    settings: Settings
    cases: Mapping[int, Case]
    is_valid: Callable[[Row], bool] = lambda _: True
    kept: Callable[[str, bytes], Any] = lambda _, value: value.decode()
    value: Callable[[Row], bytes | None] | None = None
    known: dict[tuple[int, str], list[PublishedRecord]] = field(default_factory=dict)
    """By partition and key, the messages of a lost lake that were read back."""
    since: dict[int, int] = field(default_factory=dict)
    """By partition, the position of their tenant before which that lake's records are passed
    over."""
    rows: list[Row] = field(default_factory=list)
    """Merge records, and records that wait."""
    others: list[Row] = field(default_factory=list)
    """All other rows of silver."""

    def __post_init__(self) -> None:
        self.lake = Lake(self.settings)
        self.reader = DeltaRsReader(self.lake)
        self.sources = list(self.settings.sources)
        self.closing: dict[tuple[int, str], Row] = {}
        """By partition and id of a message, the row that it is of."""
        self.tps = [
            self.tp_of(source, p) for p in range(max(self.cases) + 1) for source in self.sources
        ]
        self.begin = dict.fromkeys(self.tps, 0)
        self.until = dict.fromkeys(self.tps, 0)
        self.first = dict.fromkeys(self.tps, 0)
        """What bronze has of a topic-partition: from `first` up to `arrived`."""
        self.arrived = dict.fromkeys(self.tps, 0)
        self.batch = 0
        self.generations = [Generation(0, 0, dict(self.begin), {})]
        self.gaps = list[Decision]()
        self.passed_over: set[tuple[TopicPartition, int]] = set()
        """The records that are parts of messages of earlier generations."""
        self.of_sink: set[tuple[TopicPartition, int]] = set()
        """The records that the first generation found in the sink."""
        self.decided_in: int | None = None
        """The generation in which the idle policy decided; None: whichever it is."""
        self.time = 0
        """The last moment that was noted (epoch ms); no two steps share one."""
        self.positions: dict[TopicPartition, int | None] = dict.fromkeys(self.tps)
        self.before: list[Row] = []
        self.out: dict[int, list[Published]] = {p: [] for p in self.cases}
        """The messages of each sink partition."""
        for name, table in self.lake.layout.items():
            DeltaTable.create(
                self.lake.address(name), table.schema, partition_by=list(table.partitioned_by)
            )
        self._write_journal()

    @property
    def has_tenants(self) -> bool:
        """Whether every tenant has a clock of its own."""
        return self.settings.merge.has_tenants

    @property
    def late(self) -> list[Row]:
        """The late records."""
        return [row for row in self.others if row["status"] == "late"]

    # -- writing

    def write(
        self, table: str, rows: Iterable[Row], *, commit: Commit | None = None, mode: str = "append"
    ) -> int:
        """Rows by column; times are epoch ms, and so are those of parts. Returns the version."""
        layout = self.lake.layout[table]
        found = layout.rows(
            [[_stored(row.get(f.name), f.type) for f in layout.schema] for row in rows]
        )
        properties = None
        if commit is not None:
            transaction = Transaction(commit.application, commit.transaction_version)
            properties = CommitProperties(
                {"userMetadata": commit.metadata}, app_transactions=[transaction]
            )
        write_deltalake(self.lake.address(table), found, mode=mode, commit_properties=properties)  # type: ignore[call-overload]
        return DeltaTable(self.lake.address(table)).version()

    # -- the pipeline's steps

    def arrive(self, share: float = 1.0) -> None:
        """The next records of every case: up to this share of all of them."""
        wanted = dict(self.arrived)
        for tp in self.tps:
            if case := self.cases.get(tp.partition):
                here = case.arrivals[: round(share * len(case.arrivals))].count(tp.input.source)
                wanted[tp] = max(here, self.arrived[tp])
        self._read({tp: (self.arrived[tp], until) for tp, until in wanted.items()})
        self.arrived = wanted

    def decide(self) -> None:
        """The idle policy's decisions of all cases are made in this generation alone."""
        self.decided_in = self.number

    def merge(self) -> BatchPlan:
        """One batch: everything that the clock has reached."""
        rows, others, ranges, clocks = [], [], {}, {}
        for p in range(max(self.cases) + 1):
            model, ends = self._model(p)
            rows += [self._silver_row(p, "open", record) for record in model.open.values()]
            rows += [self._silver_row(p, "timed_out", record) for record in model.timed_out]
            rows += [self._waiting_row(p, record, position) for position, record in model.waiting]
            late = [(each.position, each.record) for each in model.late]
            for status, records in (("late", late), ("passed", model.passed)):
                others += [self._row_of(p, status, *each) for each in records]
            self.of_sink |= {
                (TopicPartition(each.input, p), each.offset) for _, each in model.passed
            }
            if model.clock is not None:
                clocks[p] = model.clock
            for source in self.sources:
                tp = self.tp_of(source, p)
                others += self._decision_rows(tp)
                until, position = ends[source]
                ranges[tp] = OffsetRange(
                    self.until[tp], until, self.positions[tp], position, model.heads.get(tp.input)
                )
                self.until[tp], self.positions[tp] = until, position
        known = {_content(row): row for row in self.rows[len(self.before) :]}
        self.rows = [*self.before, *(known.get(_content(row), row) for row in rows)]
        known_others = {_content(row) for row in self.others if row["generation"] == self.number}
        new = [row for row in others if _content(row) not in known_others]
        self.others += new
        has_late = any(row["status"] == "late" for row in new)
        return self._commit(
            BatchPlan(self.batch, ranges, clocks, has_late=has_late, generation=self.number)
        )

    def jump(self, by: int, *sources: str) -> None:
        """A reset: the topic-partitions of these sources (by default of all) go on so many offsets
        further, or further back, as far as Kafka has them. What is out is passed over.
        """
        target = {
            tp: max(0, at + by) if tp.input.source in (sources or self.sources) else at
            for tp, at in self.until.items()
        }
        self.time = max(self.time + 1, wall_clock_ms())
        sent = {(m.partition, m.id) for out in self.out.values() for m in out}
        self.passed_over |= self.of_sink
        for row in self.rows:
            if row["valid"] and (row["partition"], self._id(row)) in sent:
                for source in self.sources:
                    tp = self.tp_of(source, row["partition"])
                    self.passed_over |= {(tp, part["offset"]) for part in row[source]}
            elif row["status"] != "timed_out":
                row |= {"status": "timed_out", "valid": False, "invalid_reason": "reset"}
                row |= dict.fromkeys(["due", "closed_at", "position"])
            elif row["valid"]:
                row |= {"valid": False, "invalid_reason": "reset"}
        self._read({tp: (offset, self.first[tp]) for tp, offset in target.items()})
        self.first = {tp: min(offset, self.first[tp]) for tp, offset in target.items()}
        self.before = self.rows
        tails = {p: self._tail(out[-1]) for p, out in self.out.items() if out}
        begun = Generation(
            self.number + 1,
            self.batch,
            dict(target),
            tails,
            "reset",
            self.time,
            "jump",
            reached=dict(self.until),
        )
        self.begin, self.until, self.positions = dict(target), dict(target), dict.fromkeys(self.tps)
        self.generations.append(begun)
        self._know(
            {**self._place(tp), "from_offset": offset, "until_offset": offset + 1}
            for tp, offset in sorted(self.passed_over)
            if offset >= target[tp]
        )
        self._write_journal()

    def _tail(self, message: Published) -> Tail:
        row = self.closing[message.partition, message.id]
        return Tail(message.seq, MERGED.place(row), None, row["event_time"])

    @property
    def timeout(self) -> int:
        """How long a merge record stays open (ms)."""
        return self.settings.merge.window.gap_ms

    @property
    def number(self) -> int:
        """That of the newest generation."""
        return self.generations[-1].number

    def _write_journal(self) -> None:
        closed = [Decision(0, CLOSED, self.number, {}, self.time, 0)]
        rows = journal_rows([*decisions_of(self.generations), *self.gaps, *closed])
        write_deltalake(self.lake.address(tables.JOURNAL), rows, mode="overwrite")

    def start(self, offset: int) -> None:
        """Bronze begins there."""
        self._begin(dict.fromkeys(self.tps, offset))

    def recover(
        self,
        messages: Iterable[tuple[int, str, int]],
        begin: Mapping[TopicPartition, int] | None = None,
    ) -> None:
        """Messages (partition, key, event time) that were read back before the first batch, where
        bronze begins there."""
        found = [
            {"partition": p, "merge_key": key, "event_time": time, "tenant": NO_TENANT}
            | {"due": time + self.timeout, "closed_at": time + self.timeout + 1}
            for p, key, time in messages
        ]
        self._remember(found)
        self._begin(begin or {}, found)

    def take_up(
        self,
        lost: Mapping[int, list[MergeRecord]],
        since: Mapping[int, int],
        begin: Mapping[TopicPartition, int],
    ) -> None:
        """Begins as a lake does whose tables were lost, and had tenants, with what was read back of
        the sink."""
        self.since = dict(since)
        self._know({"partition": p, "position": time} for p, time in since.items())
        self._remember(
            {**vars(r), "merge_key": r.key, "partition": p}
            for p, mine in lost.items()
            for r in mine
        )
        self._begin(begin)

    def _remember(self, messages: Iterable[Row]) -> None:
        """Messages that were read back."""
        rows = [{"tenant": NO_TENANT, **row} for row in messages]
        for row in rows:
            message = PublishedRecord(
                row["event_time"], row["due"], row["closed_at"], row["tenant"]
            )
            self.known.setdefault((row["partition"], row["merge_key"]), []).append(message)
        self._know(rows)

    def _know(self, rows: Iterable[Row]) -> None:
        """The newest generation knows this of messages that are out."""
        of_number = {"status": "out", "batch": None, "generation": self.number}
        self.others += [{**row, **of_number} for row in rows]
        self._write_silver()

    def messages(self) -> list[Published]:
        """The sink as it must be: a function of silver's finished, valid rows."""
        found = []
        for p in sorted(self.cases):
            mine = [row for row in self.rows if row["partition"] == p and row["valid"]]
            for seq, row in enumerate(sorted(mine, key=_order)):
                message_id = self._id(row)
                self.closing[p, message_id] = row
                value = self.value(row) if self.value else self.default_value(row)
                found.append(
                    Published(
                        p,
                        row["merge_key"].encode(),
                        max(1, row["event_time"]),
                        value,
                        seq,
                        message_id,
                    )
                )
        return found

    def _id(self, row: Row) -> str:
        whose = f"{quote(row['tenant'], safe='')}/" if row["tenant"] else ""
        return f"{row['partition']}/{row['event_time']}/{whose}{row['merge_key']}"

    def default_value(self, row: Row) -> bytes:
        """A row's message where no other is configured."""
        values = self.cases[row["partition"]].values
        joined = {
            s: b",".join(values[s][part["offset"]] or b"" for part in row[s]) for s in self.sources
        }
        arrays = b"".join(
            b',"%s":[%s]' % (source.encode(), mine) for source, mine in joined.items()
        )
        times = row["event_time"], row["last_event_time"]
        head = orjson.dumps(row["merge_key"]) + (
            b',"tenant":' + orjson.dumps(row["tenant"]) if row["tenant"] else b""
        )
        return b'{"key":%s,"event_time":%d,"last_event_time":%d%s}' % (head, *times, arrays)

    def publish(self, name: str, most: int | None = None) -> None:
        """Sends what sorts behind the last message of each partition (no more than `most`), one
        transaction's row in `published` for each; `name`: the sink's there.
        """
        pending = self._pending(most)
        offsets = self.send([message for new in pending.values() for message in new])
        self.time = max(self.time + 1, wall_clock_ms())
        rows = []
        for p, new in pending.items():
            closed = self.closing[p, new[-1].id]
            rows.append(
                {
                    "partition": p,
                    "first_seq": new[0].seq,
                    "last_seq": new[-1].seq,
                    "last_event_time": int(new[-1].id.split("/")[1]),
                    "last_key": new[-1].key.decode(),
                    "last_due": closed["due"],
                    "last_closed_at": closed["closed_at"],
                    "last_tenant": closed["tenant"],
                    "sink_offset": offsets[p],
                    "committed_at": self.time,
                    **topic_columns(name),
                }
            )
        self.write(tables.PUBLISHED, rows)

    def _pending(self, most: int | None) -> dict[int, list[Published]]:
        found: dict[int, list[Published]] = {}
        for message in self.messages():
            p, out = message.partition, self.out[message.partition]
            new = found.setdefault(p, [])
            if (not out or self._order_of(message) > self._order_of(out[-1])) and len(new) != most:
                new.append(message._replace(seq=len(out) + len(new)))
        return {p: new for p, new in found.items() if new}

    def _order_of(self, message: Published) -> tuple[Any, ...]:
        return _order(self.closing[message.partition, message.id])

    def _headers(self, message: Published) -> list[tuple[str, bytes]]:
        headers = [("watersmeet.seq", b"%d" % message.seq), ("watersmeet.id", message.id.encode())]
        closed = self.closing[message.partition, message.id]
        headers += [(f"watersmeet.{name}", b"%d" % closed[name]) for name in ("closed_at", "due")]
        headers += [("watersmeet.tenant", closed["tenant"].encode())] if closed["tenant"] else []
        return headers

    def send(self, messages: Sequence[Published]) -> dict[int, int]:
        """Sends messages in one transaction, and returns the offset of the last by partition."""
        offsets: dict[int, int] = {}
        topic = self.settings.publish.topic
        producer = Producer(
            {
                "bootstrap.servers": self.settings.kafka.bootstrap_servers,
                "transactional.id": f"test-{topic}",
            }
        )
        producer.init_transactions(30)
        producer.begin_transaction()
        for m in messages:
            self.out[m.partition].append(m)
            producer.produce(
                topic,
                m.value,
                m.key,
                m.partition,
                timestamp=m.timestamp,
                headers=self._headers(m),  # type: ignore[arg-type]
                on_delivery=lambda _, sent: offsets.__setitem__(sent.partition(), sent.offset()),  # type: ignore[assignment, index]
            )
        producer.commit_transaction(30)
        # Where an answer was lost and the message was sent again, the broker does not say its
        # offset; the topic does.
        if None in offsets.values():
            ends = consume(self.settings.kafka.bootstrap_servers, topic, 1 + max(offsets))
            offsets = {p: max(m.offset() or 0 for m in ends if m.partition() == p) for p in offsets}
        return offsets

    # -- parts of steps

    def _read(self, ranges: Mapping[TopicPartition, tuple[int, int]]) -> None:
        """Bronze has the records of these ranges."""
        for source in self.sources:
            mine = {
                tp: offsets
                for tp, offsets in ranges.items()
                if tp.input.source == source and tp.partition in self.cases
            }
            found = [
                self._bronze_row(tp, offset, self.cases[tp.partition].values[source][offset])
                for tp, offsets in mine.items()
                for offset in range(*offsets)
            ]
            self.write(tables.bronze(source), [row for row in found if row is not None])

    def _begin(self, offsets: Mapping[TopicPartition, int], messages: Iterable[Row] = ()) -> None:
        """The first generation begins at these offsets, behind the last of these messages."""
        for known in (self.begin, self.first, self.arrived, self.until):
            known.update(offsets)
        tails: dict[int, Tail] = {}
        for row in sorted(messages, key=_order):
            p, place = row["partition"], MERGED.place(row)
            tails[p] = Tail(tails[p].seq + 1 if p in tails else 0, place, None, row["event_time"])
        tails |= {p: self._tail(out[-1]) for p, out in self.out.items() if out}
        self.generations = [Generation(0, 0, dict(self.begin), tails, "sink" if tails else "start")]
        self._write_journal()

    def _skip(self, ranges: Mapping[TopicPartition, tuple[int, int]], reason: str) -> None:
        rows = [
            {**self._place(tp), "from_offset": a, "to_offset": b} for tp, (a, b) in ranges.items()
        ]
        self.gaps.append(Decision(0, SKIP, None, {"jumps": rows, "reason": reason}, self.time, 0))
        self._write_journal()

    def _commit(self, plan: BatchPlan) -> BatchPlan:
        self.time = max(self.time + 1, wall_clock_ms())
        for row in self.rows:
            row.setdefault("batch", plan.batch)
            row.setdefault("generation", self.number)
        rows = batch_rows(plan, self.time).to_pylist()
        self.others += [
            {"status": "batch", **{name: _ms(value) for name, value in row.items()}} for row in rows
        ]
        self._write_silver(Commit(APPLICATION, 1, plan.batch + 1, facts_of(plan)))
        self.batch += 1
        return plan

    def _write_silver(self, commit: Commit | None = None) -> None:
        self.write(tables.SILVER, [*self.rows, *self.others], commit=commit, mode="overwrite")

    def _place(self, tp: TopicPartition) -> Row:
        return {**tp.input._asdict(), "partition": tp.partition}

    def tp_of(self, source: str, partition: int) -> TopicPartition:
        """A partition of a source's topic."""
        return TopicPartition(self.settings.inputs_by_name[source], partition)

    def _bronze_row(self, tp: TopicPartition, offset: int, value: bytes | None) -> Row | None:
        if value == HOLE:
            return None
        record = None if value in BAD_VALUES else json.loads(value or b"")
        read = {
            "merge_key": None,
            "event_time": None,
            "heartbeat": False,
            "reason": "undecodable",
            "detail": "made to be refused",
        }
        if value is None and self.settings.sources[tp.input.source].tombstone == "skip":
            read |= {"reason": None, "detail": None}
        if record is not None:
            read = {
                "merge_key": record.get("k"),
                "event_time": record["ts"],
                "heartbeat": "k" not in record,
                "reason": None,
            }
            no_tenant = None if read["heartbeat"] else NO_TENANT
            read["tenant"] = record.get("g") if self.has_tenants else no_tenant
        kafka = {
            "offset": offset,
            "kafka_timestamp": KAFKA_TIME_MS,
            "timestamp_type": 0,
            "key": None,
            "value": value,
        }
        size = len(value or b"")
        return {**self._place(tp), **kafka, "headers": None, **read, "record_bytes": size}

    def _decisions(self, tp: TopicPartition) -> list[IdleDecision]:
        """The idle policy's decisions among what has arrived of a topic-partition."""
        case = self.cases.get(tp.partition)
        decisions = case.decisions.get(tp.input.source, ()) if case is not None else ()
        if self.decided_in not in (None, self.number):
            return []
        span = range(self.begin[tp] - 1, self.arrived[tp])
        return [decision for decision in decisions if decision.after_offset in span]

    def _decision_rows(self, tp: TopicPartition) -> list[Row]:
        numbers = {"batch": self.batch, "generation": self.number, "decided_at": 0}
        return [
            {"status": "idle", **self._place(tp), "after_offset": after, **numbers}
            | {"event_time": at, "tenant": tenant}
            for after, time, told in self._decisions(tp)
            for tenant, at in ((None, time), *told)
        ]

    def _model(self, p: int) -> tuple[PartitionMerge, dict[str, tuple[int, int | None]]]:
        """The era from its beginning to what has arrived; and by source the next offset and the
        position there."""
        case = self.cases.get(p, Case({source: [] for source in self.sources}, 100))
        merge = self.settings.merge
        rules = MergeRules(
            self.settings.inputs, merge.window.gap_ms, merge.window.max_ms, merge.tenant_max_lag_ms
        )
        known = {
            key: messages
            for (partition, key), messages in self.known.items()
            if partition == p and not self.number
        }
        out = {(tp.input, offset) for tp, offset in self.passed_over if tp.partition == p}
        since = MIN_TIME if self.number else self.since.get(p, MIN_TIME)
        model = PartitionMerge(rules, recovered=known, out=out, since=since)
        arrived: dict[str, list[tuple[int, int]]] = {source: [] for source in self.sources}
        for source in self.sources:
            tp = self.tp_of(source, p)
            decided = [
                record_of(tp.input, *d[:2], tenant=None, tenant_times=dict(d.tenant_times))
                for d in self._decisions(tp)
            ]
            told = [(record.offset, 1, record) for record in decided]
            for offset in range(self.begin[tp], self.arrived[tp]):
                row = self._bronze_row(tp, offset, case.values[source][offset])
                if row is not None and row["event_time"] is not None:
                    record = record_of(
                        tp.input, offset, row["event_time"], row["merge_key"], row["tenant"]
                    )
                    told.append((offset, 0, record))
            for offset, is_idle, record in sorted(told, key=lambda each: each[:2]):
                model.arrive(record)
                arrived[source].append((offset + is_idle, model.heads[tp.input]))
        model.advance()
        ends = {}
        for source, told in arrived.items():  # type: ignore[assignment]
            passed = len(told) - len(model.unread().get(self.tp_of(source, p).input, ()))
            end = told[passed][0] if passed < len(told) else self.arrived[self.tp_of(source, p)]
            ends[source] = (
                max(end, self.begin[self.tp_of(source, p)]),
                told[passed - 1][1] if passed else None,
            )
        return model, ends

    def _silver_row(self, p: int, status: str, record: Any) -> Row:
        key, first, last, parts = record.content()
        values = self.cases[p].values
        columns = {
            source: [
                {
                    "offset": part.offset,
                    "event_time": part.event_time,
                    "value": self.kept(source, values[source][part.offset] or b""),
                }
                for part in mine
            ]
            for source, mine in zip(self.sources, parts, strict=True)
        }
        row = {
            "partition": p,
            "merge_key": key,
            "status": status,
            "event_time": first,
            "last_event_time": last,
            **columns,
        }
        valid = None if status == "open" else self.is_valid(row)
        closing = {"due": record.due, "closed_at": record.closed_at}
        if status == "open":
            closing = {"due": self.settings.merge.window.due(first, last), "closed_at": None}
        row |= {**closing, "tenant": record.tenant, "position": None}
        sizes = [
            len(values[source][part.offset] or b"")
            for source, mine in zip(self.sources, parts, strict=True)
            for part in mine
        ]
        row |= {"record_bytes": sum(sizes), "record_count": len(sizes)}
        return {**row, "valid": valid, "invalid_reason": "predicate" if valid is False else None}

    def _waiting_row(self, p: int, record: Record, position: int) -> Row:
        """A merge record of its own, as far as it goes."""
        alone = MergeRecord(
            record.key or "",
            record.event_time,
            record.event_time,
            {s: [] for s in self.sources},
            record.tenant or "",
        )
        alone.parts[record.input.source].append(record.part)
        return {
            **self._silver_row(p, "open", alone),
            **self._place(TopicPartition(record.input, p)),
            "offset": record.offset,
            "status": "waiting",
            "due": None,
            "position": position,
        }

    def _row_of(self, p: int, status: str, position: int, record: Record) -> Row:
        """The row of a record that is not merged."""
        value = self.cases[p].values[record.input.source][record.offset]
        row = {
            **self._place(TopicPartition(record.input, p)),
            "status": status,
            "offset": record.offset,
            "merge_key": record.key,
            "event_time": record.event_time,
            "position": position,
            "tenant": record.tenant,
            "batch": self.batch,
            "generation": self.number,
        }
        if status == "late":
            row |= {"value": value, "record_bytes": len(value or b"")}
        return row


def _order(row: Row) -> tuple[Any, ...]:
    """The order of publication."""
    return row["closed_at"], row["tenant"].encode(), row["due"], row["merge_key"].encode()


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


def _content(row: Row) -> str:
    numbers = ("batch", "generation")
    return repr({name: value for name, value in row.items() if name not in numbers})


def _stored(value: Any, kind: pa.DataType) -> Any:
    """Times of parts as Arrow takes them."""
    if (
        not pa.types.is_list(kind)
        or not value
        or "event_time" not in [f.name for f in kind.value_type]
    ):
        return value
    return [{**part, "event_time": part["event_time"] * 1000} for part in value]


def rewrite(
    settings: Settings, table: str, change: Callable[[Row], Row | list[Row] | None]
) -> None:
    """Replaces each row of a table, or of a view of silver, by what `change` makes of it: another
    row, several, or none; in a commit that says nothing."""
    lake = Lake(settings)
    view = lake.views.get(table)
    stored = table if view is None else view.parts[0].table
    wanted = None if view is None else view.parts[0].where[0][2]
    rows = list[Row]()
    layout = lake.layout[stored]
    reader = DeltaRsReader(lake)
    existing = reader.columns(stored).names
    columns = [name for name in layout.schema.names if name in existing]
    for stored_row in reader.rows(stored, columns).to_pylist():
        row = {name: _ms(value) for name, value in stored_row.items()}
        is_of = wanted is None or row["status"] in ([wanted] if isinstance(wanted, str) else wanted)
        changed = change(row) if is_of else row
        rows += [] if changed is None else changed if isinstance(changed, list) else [changed]
    found = layout.rows([[_stored(row.get(f.name), f.type) for f in layout.schema] for row in rows])
    write_deltalake(lake.address(stored), found, mode="overwrite")


def _ms(value: Any) -> Any:
    if hasattr(value, "timestamp"):
        return round(value.timestamp() * 1000)
    if isinstance(value, list):
        return [_ms(each) for each in value]
    return {name: _ms(each) for name, each in value.items()} if isinstance(value, dict) else value
