"""Bronze as `verify` reads it: each topic-partition in order of offset, a piece at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.audit.evidence import NULL, Evidence, Ints, here, numbers
from watersmeet.audit.partitioning import Place, check_key_partition
from watersmeet.audit.problems import Findings
from watersmeet.audit.verify_values import as_kept
from watersmeet.core.columns import NULL_TIME, groups, row_values, times_ms
from watersmeet.core.inputs import InputId
from watersmeet.core.model import Record
from watersmeet.core.plan import TopicPartition
from watersmeet.core.repeated import ID
from watersmeet.core.types import TENANT
from watersmeet.kafka.reading import Range, read_range
from watersmeet.lake import tables
from watersmeet.lake.inputs import of_topic
from watersmeet.lake.table_reader import within

NEXT: Final = 8
"""Number of offsets that are read at first to find the record after a batch."""

_COLUMNS = ("partition", "offset", "merge_key", "event_time", *TENANT.names)
_IDLE = ("source", "topic", "partition", "after_offset", "event_time", "decided_at")


class Records(NamedTuple):
    """What the next rows of a topic-partition say, each offset once. All are offsets.

    - `offset`: every one; `repeated`: how often one is there, if more than once.
    - `unread`: of records with a value that were neither read nor refused.
    - `keys`: of records with a sampled key that the generation reads, the key and tenant.
    """

    offset: Ints
    repeated: Mapping[int, int]
    unread: Sequence[int]
    keys: Mapping[int, tuple[str, str]]


class Log:
    """A topic-partition, of which bronze was read up to the offset `until`.

    - `begin`: the first offset that the generation is judged by.
    - `bronze_end`: the exclusive end offset of what bronze must have; `end`: of what is read.
    - `position`: that of the last record that was read (ms); `last`: the offset of it.
    - `arrived`: records for the model, with their positions (ms), that were not taken yet.
    - `values`: values of records with sampled keys whose outcome was not seen yet.
    - `is_over`: True once no batch is left that could merge what is read on.
    """

    def __init__(
        self, evidence: Evidence, tp: TopicPartition, idle: pa.Table, kept: pa.DataType, end: int
    ) -> None:
        cursor = evidence.cursor_of(tp)
        self.evidence = evidence
        self.tp = tp
        self.until = cursor.next_offset
        self.begin = evidence.begin_of(tp)
        self.position = NULL if cursor.position is None else cursor.position
        self.last = -1
        self.is_over = False
        self.arrived: list[tuple[int, Record]] = []
        self.values: dict[int, bytes] = {}
        self._kept_type = kept
        self._has_fields = pa.types.is_struct(kept)
        own = idle.filter(pc.greater_equal(idle["after_offset"], self.begin - 1))
        self._decisions, self._tenant_times = _decisions(own)
        self._taken = 0
        self.bronze_end = max([end, *(after + 1 for after in own["after_offset"].to_pylist())])
        # A decision is read with the record that it comes before, which may be none yet.
        self.end = max(self.bronze_end, self.until + 1) if own.num_rows else end
        self._out = evidence.out.get(tp, np.array([], np.int64))
        self._decoders = [
            schemas[tp.input.source].decoder_of_accepted() if tp.input.source in schemas else None
            for schemas in evidence.avro
        ]

    def has_next(self, offset: int) -> bool:
        """Return True where the first record at or after an offset was read, or there is none."""
        return self.until >= self.end or self.last >= offset

    def take(self, rows: pa.Table, until: int) -> Records:
        """Take the next rows of bronze, which are all up to an offset."""
        offset, firsts, counts = np.unique(
            numbers(rows["offset"]), return_index=True, return_counts=True
        )
        rows = rows.take(pa.array(firsts))
        is_refused = numbers(pc.is_valid(rows["reason"]))
        # A record that is neither timed nor refused is a tombstone that was skipped.
        is_timed = numbers(pc.is_valid(rows["event_time"]))
        has_value = numbers(pc.is_valid(rows["value"]))
        is_own = offset >= self.begin
        is_read = is_timed & ~is_refused & is_own
        self.until = until
        keys = self._read(rows.filter(pa.array(is_read)))
        # Where several sources share a topic (`where`), each passes over the records of the
        # others: they have no time that it can read.
        source = self.tp.input.source
        unread = [
            o
            for o in offset[~is_timed & ~is_refused & has_value & is_own].tolist()
            if self.evidence.epoch_of(self.tp, o).settings.sources[source].where is None
        ]
        is_repeated = counts > 1
        repeated = zip(offset[is_repeated].tolist(), counts[is_repeated].tolist(), strict=True)
        return Records(offset, dict(repeated), unread, keys)

    def _read(self, rows: pa.Table) -> dict[int, tuple[str, str]]:
        """Add records, and the decisions after offsets before `until`, to what arrived.

        Without tenants the model is given the records with sampled keys alone.
        """
        taken, after = self._taken, numbers(self._decisions["after_offset"])
        self._taken = int(np.searchsorted(after, self.until))
        decisions = self._decisions.slice(taken, self._taken - taken)
        offsets = np.append(numbers(rows["offset"]), numbers(decisions["after_offset"]))
        count = rows.num_rows
        self.last = int(offsets[:count].max(initial=self.last))
        order = np.lexsort((np.arange(len(offsets)) >= count, offsets))
        times = np.append(numbers(rows["event_time"]), numbers(decisions["event_time"]))[order]
        positions = np.maximum.accumulate(np.append(self.position, times))
        self.position = int(positions[-1])
        names = ("merge_key", *TENANT.names, "value", ID.name, "heartbeat")
        contents = list(zip(*(rows[name].to_pylist() for name in names), strict=True))
        has_tenants = self.evidence.settings.merge.has_tenants
        keys = dict[int, tuple[str, str]]()
        entries = (column.tolist() for column in (order, offsets[order], positions[1:], times))
        for i, offset, position, time in zip(*entries, strict=True):
            is_decision = i >= count
            key, tenant, value, record_id, is_heartbeat = (
                (None,) * 5 if is_decision else contents[i]
            )
            if self.is_over or is_heartbeat or value is None or not self.evidence.is_sampled(key):
                key = value = record_id = None
            if self.is_over or (key is None and not has_tenants):
                continue
            decided = self._tenant_times[taken + i - count] if is_decision else None
            size = len(value or b"")
            record = Record(self.tp.input, offset, time, key, tenant, decided, record_id, size)
            self.arrived.append((position, record))
            if key is not None and value is not None:
                keys[offset] = key, tenant or ""
                self.values[offset] = value
        return keys

    def passed_over(self, since: int, until: int) -> set[int]:
        """Return the offsets in a range that are in messages of earlier generations, or copies."""
        begin, end = np.searchsorted(self._out, [since, until])
        return set(self._out[begin:end].tolist())

    def kept(self, offset: int) -> Any:
        """Return what silver keeps of a record's value, as rows have it."""
        value = self.values[offset]
        if not self._has_fields:
            return value.decode()
        epoch = self.evidence.epoch_of(self.tp, offset)
        decode = self._decoders[epoch.number]
        content = value if decode is None else decode(value, self.tp.partition, offset)
        read_type = epoch.settings.sources[self.tp.input.source].read_type
        return as_kept(content, read_type, self._kept_type)


def read_logs(evidence: Evidence, partitions: range) -> dict[TopicPartition, Log]:
    """Return the logs of some partitions, before anything is read of them."""
    settings = evidence.settings
    own = [[*here(partitions), ("generation", "=", evidence.generation.number)]]
    columns = [*_IDLE, *TENANT.names]
    idle = evidence.reader.select(tables.IDLE_HEARTBEATS, columns, own)
    silver = tables.silver_columns(settings)
    logs = {}
    for input_id in settings.inputs:
        table, last = tables.bronze(input_id.source), {"last": ("max", "offset")}
        where = of_topic(input_id, [here(partitions)])
        rows = evidence.reader.summary(table, ["partition"], last, where)
        ends = {row["partition"]: row["last"] + 1 for row in rows.to_pylist()}
        is_its = pc.and_(
            pc.equal(idle["source"], input_id.source), pc.equal(idle["topic"], input_id.topic)
        )
        of_input = by_partition(idle.filter(is_its), partitions)
        kept = silver.field(input_id.source).type.value_type.field("value").type
        for p in partitions:
            tp = TopicPartition(input_id, p)
            logs[tp] = Log(evidence, tp, of_input[p], kept, ends.get(p, 0))
    return logs


def extend(
    evidence: Evidence, logs: Mapping[TopicPartition, Log], until: Mapping[TopicPartition, int]
) -> Iterator[tuple[TopicPartition, int, Records]]:
    """Read bronze on up to these offsets, and yield what was read, each with its first offset."""
    for input_id in evidence.settings.inputs:
        while ranges := {
            tp.partition: (logs[tp].until, min(end, logs[tp].until + evidence.piece_records))
            for tp, end in until.items()
            if tp.input == input_id and logs[tp].until < min(end, logs[tp].end)
        }:
            has_ids = evidence.settings.has_ids
            columns = [*_COLUMNS, "heartbeat", "reason", "value", *([ID.name] if has_ids else [])]
            where = of_topic(input_id, within(ranges))
            rows = evidence.reader.select(tables.bronze(input_id.source), columns, where)
            if not has_ids:
                rows = rows.append_column(ID, pa.nulls(rows.num_rows, ID.type))
            of_partitions = by_partition(rows, ranges)
            for p, (begin, end) in ranges.items():
                own = of_partitions[p]
                is_here = pc.and_(
                    pc.greater_equal(own["offset"], begin), pc.less(own["offset"], end)
                )
                tp = TopicPartition(input_id, p)
                yield tp, begin, logs[tp].take(own.filter(is_here), end)


def extend_beyond(
    evidence: Evidence, logs: Mapping[TopicPartition, Log], until: Mapping[TopicPartition, int]
) -> Iterator[tuple[TopicPartition, int, Records]]:
    """Do as `extend`, and read on until the first record after these offsets."""
    more = NEXT
    while left := {tp: end + more for tp, end in until.items() if not logs[tp].has_next(end)}:
        yield from extend(evidence, logs, left)
        more *= 4


def by_partition(rows: pa.Table, partitions: Iterable[int]) -> dict[int, pa.Table]:
    """Return the rows of each of some partitions, which may be none."""
    own = groups(numbers(rows["partition"], NULL))
    return {p: rows.take(pa.array(own.get(p, []), pa.int64())) for p in partitions}


def _decisions(rows: pa.Table) -> tuple[pa.Table, list[dict[str, int]]]:
    rows = rows.sort_by([("after_offset", "ascending"), ("event_time", "ascending")])
    tenant_times: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
    for row in rows.filter(pc.is_valid(rows["tenant"])).to_pylist():
        tenant_times[row["after_offset"], row["decided_at"]][row["tenant"]] = row["event_time"]
    decisions = rows.filter(pc.is_null(rows["tenant"]))
    places = row_values(decisions, "after_offset", "decided_at")
    return decisions, [tenant_times.get(place, {}) for place in places]


# -- checks of what is the same in every generation, and of offsets

Bounds: TypeAlias = Mapping[InputId, Mapping[int, tuple[int, int]]]
"""The first offset that Kafka has, and the exclusive end offset, by input and partition."""

NO_BOUNDS: Final[Bounds] = MappingProxyType({})

NEAR = 10_000
"""Distance up to which offsets are read through rather than sought one by one.

Each transaction leaves a gap.
"""


def check_places(evidence: Evidence, findings: Findings) -> None:
    """Check that no row is of a partition that the topics lack, or of a source or topic that the
    configuration lacks.
    """
    settings = evidence.settings
    for name, table in tables.layout(settings).items():
        own_inputs = [i for i in settings.inputs if name == tables.bronze(i.source)]
        by = [column for column in ("source", "topic", "partition") if column in table.schema.names]
        if not own_inputs and "source" not in by:
            by = by[-1:]  # its topics are those that are written to
        if "partition" not in by:
            continue
        coordinates = [i._asdict() for i in own_inputs or settings.inputs]
        places = [list(map(place.__getitem__, by[:-1])) for place in coordinates]
        if not own_inputs:  # there are merge records, and messages
            places.append([None] * len(by[:-1]))
        counts = evidence.reader.summary(name, by, {"rows": ("count", "*")})
        for row in counts.to_pylist():
            *of, partition, count = row.values()
            if partition not in range(evidence.partitions) or of not in places:
                where = ", ".join(f"{column} {row[column]}" for column in by)
                findings.add(
                    f"{count:,} rows that belong to no partition of the topics",
                    f"{name}: {where}",
                    "delete them, if this is the lake of these topics",
                )


def check_keys(
    evidence: Evidence,
    tp: TopicPartition,
    keys: Mapping[int, tuple[str, str]],
    findings: Findings,
) -> None:
    """Check that keys are where Java's default partitioner has them, if sources are repartitioned.

    `keys`: by offset, each with its tenant.
    """
    if evidence.settings.repartitioned:
        for offset, (key, _) in keys.items():
            check_key_partition(Place(tp, offset, key), evidence.partitions, findings)


def check_offsets(
    evidence: Evidence,
    log: Log,
    begin: int,
    records: Records,
    bounds: Bounds,
    findings: Findings,
) -> None:
    """Check that bronze has each offset of what was read last once, and that Kafka lacks what
    bronze lacks.

    Compaction, retention, aborted records and the markers of transactions leave gaps in Kafka.
    """
    tp = log.tp
    where = f"{tables.bronze(tp.input.source)}: "
    for offset, rows in records.repeated.items():
        what = f"the record is in bronze {rows} times"
        fix = "delete all but one of the rows with this offset"
        findings.add(what, where + tp.at(offset), fix)
    first, end = bounds.get(tp.input, {}).get(tp.partition, (0, 0))
    last = evidence.end.until.get(tp, 0) if evidence.following is not None else log.bronze_end
    begin = max(begin, first, log.begin)
    kafka = evidence.settings.kafka
    # `keep` may have deleted what Kafka had before: nothing tells that it was refused.
    floor = evidence.history.floors.times.get((tables.QUARANTINE, tp.partition), NULL_TIME)
    for gap in gaps(records.offset, begin, min(log.until, last, end)):
        for batch in read_range(kafka, Range(tp.input.topic, tp.partition, *gap)):
            is_kept = times_ms(batch["kafka_timestamp"]) >= floor
            there = batch["offset"].to_numpy()[is_kept]
            for offset in np.setdiff1d(there, records.offset).tolist():
                what = "bronze lacks a record that Kafka has"
                fix = "start a new lake while Kafka still has it"
                findings.add(what, where + tp.at(offset), fix)


def gaps(offsets: Ints, begin: int, end: int) -> list[tuple[int, int]]:
    """Return the ranges of `[begin, end)` that hold none of some offsets, which are in order.

    Ranges that lie near each other (`NEAR`) are returned as one.
    """
    inside = offsets[(offsets >= begin) & (offsets < end)]
    begins = np.append(begin, inside + 1)
    ends = np.append(inside, end)
    ranges: list[tuple[int, int]] = []
    for since, until in zip(
        begins[begins < ends].tolist(), ends[begins < ends].tolist(), strict=True
    ):
        is_near = bool(ranges) and since - ranges[-1][1] <= NEAR
        ranges.append((ranges.pop()[0] if is_near else since, until))
    return ranges
