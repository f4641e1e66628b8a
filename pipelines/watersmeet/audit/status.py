"""The state of every partition: heads, clock, lag, and how many records ended where.

Reads only, and starts no JVM.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from watersmeet.audit.doubts import heads_in_future, odd_times_in_lake, unmet_in_lake
from watersmeet.audit.newest import doubts_of_newest
from watersmeet.audit.show import utc
from watersmeet.core.avro_schema import MAX_SCHEMAS, MAX_SCHEMAS_BYTES
from watersmeet.core.idle import IdleDecision
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import BatchPlan, Cursor, OpenTransaction, TopicPartition
from watersmeet.core.sequence import CORRECTED, EXCESS, MERGED, TOO_MANY
from watersmeet.core.window import Window
from watersmeet.errors import KafkaTransientError, Problem, UnreadableRecordsError
from watersmeet.kafka.cluster import Cluster, co_partitioned, topics_of
from watersmeet.kafka.reading import Range, read_range
from watersmeet.kafka.transactions import open_transactions
from watersmeet.lake import tables
from watersmeet.lake.decisions import last_decisions
from watersmeet.lake.epochs import read_epochs
from watersmeet.lake.generations import Generation, Generations, read_generations
from watersmeet.lake.inputs import of_topic
from watersmeet.lake.progress import last_batch
from watersmeet.lake.published import last_tails
from watersmeet.lake.quality import last_results
from watersmeet.lake.schemas import FULL, schema_ids, unknown_schemas
from watersmeet.lake.snapshot import Snapshot
from watersmeet.lake.table_reader import MAX_TERMS, TableReader, Where, within
from watersmeet.lake.tenant_state import BatchEnd
from watersmeet.lake.tenants import (
    UNKNOWN_TENANT,
    SlowestTenant,
    clocks_at,
    slowest,
    tenants_of,
    unfinished,
)
from watersmeet.lake.unpublished import count_behind_sink, count_to_publish
from watersmeet.settings import Settings

log = logging.getLogger("watersmeet.status")

EXACT_LAG = 1000
"""Maximum number of offsets up to which what bronze lacks is counted record by record.

The markers of transactions take offsets, too.
"""

PATIENCE_S = 2.5
"""Seconds after which a broker that does not answer counts as away: the tables know nearly as much.
"""

_THREADS = 8
_OUTCOME = ("partition", "status", "invalid_reason")

Bounds = Mapping[TopicPartition, tuple[int, int]]
Transactions = Mapping[TopicPartition, OpenTransaction]
Row = dict[str, Any]


def status(
    reader: TableReader, settings: Settings, patience_s: float = PATIENCE_S
) -> dict[str, Any]:
    """Return the answer of `status --json`. Times are epoch ms, null where there is none yet.

    By partition:

    - `corrections`: how many late records have corrected a merge record; `corrections_published`:
      how many messages their topic has had; `too_many`: how many late records have corrected
      nothing, since their merge record has as many versions as it may, or is too large, or would
      be with them.
    - `excess`: records of merge records that are too large.
    - `not_valid`: timed-out records that are not published, since they are not valid;
      `not_valid_reasons` counts them by reason.
    - `to_publish`: timed-out, valid records that are still to be published.
    - `behind_sink`: finished, valid records of the newest generation that are never published,
      since they sort at or before the message behind which it began.
    - `not_in_silver`: messages of records that silver does not have: those of a lost lake, and
      those that were forgotten or deleted.
    - `in_former_sink`: records that were published to a sink that has been made again since, and
      are not there again yet.
    - `next_due`: until when the first of the open records can be joined (null: nothing is open).
    - `waiting`, with tenants: records that wait for their tenant's clock.
    - `tenants`, with tenants: how many have something open or waiting.
    - `slowest`, with tenants: which of them is behind the others (tenant, clock).
    - `leading`, with tenants: whose record is the head of the source that is furthest ahead
      (tenant, null for nobody's, source, head).

    So of the records that have timed out each is counted once: `timed_out` + `not_in_silver` =
    `published` + `not_valid` + `to_publish` + `behind_sink` + `in_former_sink`.

    By source:

    - `lag`: records that silver has not passed, and those that bronze lacks. Where Kafka does not
      answer within `patience_s`, the latter are left out and a warning says so.
    - `transaction`, where another producer's transaction is open: since when (Kafka's timestamp of
      its first record), from which offset on, and how many offsets are `behind`. What is there is
      no record yet, and counts in no lag.

    `quality` is as `last_results` has it. `warnings`, as problems, is there where something looks
    wrong (`audit.doubts`).
    """
    reader = Snapshot(reader, settings)
    with ThreadPoolExecutor(_THREADS) as pool:
        kafka_ends = pool.submit(_bounds, settings, patience_s)
        quality = pool.submit(last_results, reader)
        generations = read_generations(reader, settings)
        newest = _newest(generations)
        unmet = pool.submit(unmet_in_lake, reader, settings)
        current = read_epochs(reader, settings).current.settings
        progress = _read_progress(pool, reader, settings, newest)
        slowest_tenants = (
            pool.submit(_slowest, reader, settings) if settings.merge.has_tenants else None
        )
        counts = _read_counts(pool, reader, current, newest)
        bounds, transactions = _answer_of(kafka_ends)
        partitions = range(progress.partitions(bounds))
        every = [TopicPartition(i, p) for i in settings.inputs for p in partitions]
        ends = {tp: progress.end(tp) for tp in every}
        odd = pool.submit(odd_times_in_lake, reader, settings, ends)
        of_newest = pool.submit(doubts_of_newest, reader, settings, ends)
        missing = pool.map(lambda tp: _behind(settings, tp, ends[tp], bounds), every)
        behind = dict(zip(every, missing, strict=True))
    rows: list[Row] = []
    for p in partitions:
        sources: dict[str, Row] = {}
        for input_id, name in settings.input_names.items():
            tp = TopicPartition(input_id, p)
            sources[name] = progress.source_row(tp, behind[tp])
            if tp in transactions:
                sources[name]["transaction"] = transactions[tp].as_row()
        clock = _add_leads(sources.values())
        rows.append({"partition": p, "clock": clock, **counts.of(p), "sources": sources})
    if slowest_tenants is not None:
        rows = _with_tenants(reader, settings, rows, counts, slowest_tenants.result())
    problems = [
        *_unknown_schemas(reader, settings),
        *_excess_schemas(reader, settings),
        *(unmet.result() or []),
        *odd.result(),
        *of_newest.result(),
        *heads_in_future(settings, _heads(settings, rows), time.time_ns() // 1_000_000),
    ]
    warnings = [problem._asdict() for problem in problems]
    return {
        "partitions": rows,
        "quality": quality.result(),
        **({"warnings": warnings} if warnings else {}),
    }


def waits_for(reader: TableReader, settings: Settings) -> dict[int, list[str]]:
    """Return, by partition, the inputs that the clock waits for.

    These are the inputs without a head; where all have one, those whose head is the clock. Kafka is
    not asked.
    """
    reader = Snapshot(reader, settings)
    with ThreadPoolExecutor(_THREADS) as pool:
        progress = _read_progress(
            pool, reader, settings, _newest(read_generations(reader, settings))
        )
    waits: dict[int, list[str]] = {}
    for p in range(progress.partitions(None)):
        sources = {
            name: progress.source_row(TopicPartition(input_id, p), 0)
            for input_id, name in settings.input_names.items()
        }
        clock = _add_leads(sources.values())
        waits[p] = [name for name, source in sources.items() if source["head"] == clock]
    return waits


def _newest(generations: Generations) -> Generation:
    return generations.newest if generations else Generation(0, 0, {}, {})


class _Progress(NamedTuple):
    """Progress of the merge, and of bronze beyond it.

    `since`: by topic-partition, the offset from which on `new` counts the rows of bronze
    (`_beyond`). `decisions`: the last one of the idle policy, by topic-partition.
    """

    cursors: Mapping[TopicPartition, Cursor]
    decisions: Mapping[TopicPartition, IdleDecision]
    since: Mapping[TopicPartition, int]
    new: Mapping[TopicPartition, Row]

    def partitions(self, bounds: Bounds | None) -> int:
        """Return the number of partitions that Kafka has, or else the lake."""
        present = bounds or [*self.cursors, *self.new]
        return max([-1, *(tp.partition for tp in present)]) + 1

    def end(self, tp: TopicPartition) -> int:
        """Return the offset after a topic-partition's last record in bronze."""
        return max(self.since.get(tp, 0), self.new[tp]["last"] + 1 if tp in self.new else 0)

    def source_row(self, tp: TopicPartition, behind: int) -> Row:
        """Return what the answer says of a topic-partition, without its `lead`.

        `behind`: the number of records that bronze lacks.
        """
        times = [self.cursors.get(tp, Cursor()).position, self.new.get(tp, {}).get("head")]
        decision = self.decisions.get(tp)
        # An idle decision holds for a source until its next record.
        is_idle = decision is not None and decision.after_offset + 1 >= self.end(tp)
        if decision is not None and is_idle:
            times.append(decision.event_time)
        head = max((time for time in times if time is not None), default=None)
        waiting = self.new[tp]["records"] if tp in self.new else 0
        state = _state_of(is_idle=is_idle, head=head, waiting=waiting)
        return {"head": head, "lead": None, "lag": waiting + behind, "state": state}


def _read_progress(
    pool: ThreadPoolExecutor, reader: TableReader, settings: Settings, generation: Generation
) -> _Progress:
    cursors = pool.submit(_cursors, reader, generation)
    decisions = pool.submit(_decisions, reader, generation)
    next_offsets = {tp: cursor.next_offset for tp, cursor in cursors.result().items()}
    since = {**generation.begin, **next_offsets}
    rows_by_input = pool.map(lambda input_id: _beyond(reader, input_id, since), settings.inputs)
    new = {tp: row for rows in rows_by_input for tp, row in rows.items()}
    return _Progress(cursors.result(), decisions.result(), since, new)


class _Counts(NamedTuple):
    """Numbers of rows by partition: of silver by status too (of late records that have corrected
    nothing: `too_many`), and for what timed out and is not valid also by `invalid_reason`.
    `next_due`: times (ms) of open rows.
    """

    silver: Mapping[tuple[Any, ...], int]
    not_valid: Mapping[int, Mapping[str, int]]
    next_due: Mapping[int, int]
    to_publish: Mapping[int, int]
    behind_sink: Mapping[int, int]
    quarantined: Mapping[tuple[Any, ...], int]
    published: Mapping[int, int]
    corrections_published: Mapping[int, int]

    def of(self, partition: int) -> dict[str, Any]:
        """Return the numbers of a partition as the answer has them."""
        timed_out = self.silver.get((partition, "timed_out"), 0)
        reasons = self.not_valid.get(partition, {})
        not_published = {
            "not_valid": sum(reasons.values()),
            "to_publish": self.to_publish.get(partition, 0),
            "behind_sink": self.behind_sink.get(partition, 0),
        }
        published = self.published.get(partition, 0)
        surplus = published + sum(not_published.values()) - timed_out
        return {
            "open": self.silver.get((partition, "open"), 0),
            "next_due": self.next_due.get(partition),
            "timed_out": timed_out,
            "published": published,
            **not_published,
            "not_valid_reasons": dict(sorted(reasons.items())),
            "not_in_silver": max(0, surplus),
            "in_former_sink": max(0, -surplus),
            "late": self.silver.get((partition, "late"), 0),
            "corrections": self.silver.get((partition, "correction"), 0),
            "too_many": self.silver.get((partition, TOO_MANY), 0),
            "corrections_published": self.corrections_published.get(partition, 0),
            "duplicates": self.silver.get((partition, "duplicate"), 0),
            "excess": self.silver.get((partition, "excess"), 0),
            "quarantined": self.quarantined.get((partition,), 0),
        }


def _read_counts(
    pool: ThreadPoolExecutor, reader: TableReader, settings: Settings, newest: Generation
) -> _Counts:
    silver_rows = pool.submit(_silver_rows, reader)
    next_due = pool.submit(_next_due, reader, settings.merge.window)
    behind_sink = pool.submit(_counted, reader, count_behind_sink, newest)
    quarantined = pool.submit(_counts, reader, tables.QUARANTINE, "partition")
    tails = last_tails(reader, MERGED)
    silver = Counter[tuple[Any, ...]]()
    not_valid = defaultdict[int, Counter[str]](Counter)
    for row in silver_rows.result():
        partition, status_of_row, reason = (row[name] for name in _OUTCOME)
        is_refused = reason in (TOO_MANY, EXCESS)
        silver[partition, TOO_MANY if is_refused else status_of_row] += row["rows"]
        if status_of_row == "timed_out" and reason is not None:
            not_valid[partition][reason] += row["rows"]
    partitions = [p for p, status_of_row in silver if status_of_row == "timed_out"]
    to_publish = pool.submit(_counted, reader, count_to_publish, newest, tails, partitions)
    corrected = last_tails(reader, CORRECTED) if tables.has_corrections(settings) else {}
    return _Counts(
        silver,
        not_valid,
        next_due.result(),
        to_publish.result(),
        behind_sink.result(),
        quarantined.result(),
        {p: tail.seq + 1 for p, tail in tails.items()},
        {p: tail.seq + 1 for p, tail in corrected.items()},
    )


def _answer_of(
    kafka_ends: Future[tuple[Bounds, Transactions]],
) -> tuple[Bounds | None, Transactions]:
    """Return what Kafka answers (`_bounds`); None and nothing where it does not."""
    try:
        return kafka_ends.result()
    except KafkaTransientError as error:
        log.warning("%s; records that are not in bronze yet are not counted", error)
        return None, {}


def _add_leads(sources: Collection[Row]) -> int | None:
    """Return the clock of a partition, and set the `lead` of each of its sources."""
    heads = [source["head"] for source in sources]
    if None in heads:
        return None
    clock = min(heads)
    for source in sources:
        source["lead"] = source["head"] - clock
        if source["state"] == "held" and source["lead"] == 0:  # nothing waits for another source
            source["state"] = "active"
    return int(clock)


def _heads(settings: Settings, rows: Sequence[Row]) -> dict[TopicPartition, int]:
    """Return the head of each topic-partition that has one."""
    return {
        TopicPartition(settings.inputs_by_name[name], row["partition"]): source["head"]
        for row in rows
        for name, source in row["sources"].items()
        if source["head"] is not None
    }


def _state_of(*, is_idle: bool, head: int | None, waiting: int) -> str:
    """Return the state of a source, of which bronze holds `waiting` records that are not merged."""
    if is_idle:
        return "idle"
    if head is None:
        return "waiting"
    return "held" if waiting else "active"


def _unknown_schemas(reader: TableReader, settings: Settings) -> list[Problem]:
    """Return a problem for each schema that records name and that the registry did not have when
    last asked.
    """
    return [
        Problem(
            f"since {utc(since)} the registry does not have schema {schema_id}, which a record was "
            "written with; the source waits for it, or its records are refused once "
            "registry.unknown_after is over",
            f"sources.{name}.registry",
            "register it under this id; or set registry.unknown_after; or jump over the record "
            "with `watersmeet reset`",
        )
        for name in settings.registries
        for schema_id, since in unknown_schemas(reader, name).items()
    ]


def _excess_schemas(reader: TableReader, settings: Settings) -> list[Problem]:
    """Return a problem for each source that takes no further schemas."""
    return [
        Problem(
            f"the source has {MAX_SCHEMAS:,} schemas, or {MAX_SCHEMAS_BYTES // 2**20} MiB of them: "
            "records that were written with another one are refused",
            f"sources.{name}.registry",
            "find out who registers so many; a new lake begins with none",
        )
        for name in settings.registries
        if FULL in schema_ids(reader, name)
    ]


def _with_tenants(
    reader: TableReader,
    settings: Settings,
    rows: list[Row],
    counts: _Counts,
    slowest: Mapping[int, SlowestTenant],
) -> list[Row]:
    """Return the partitions' rows with `waiting`, `tenants`, `slowest` and `leading`.

    These say how many records wait for their tenant's clock, how many tenants have something open
    or waiting, which of them is behind the others, and for which one others wait: whose record is
    the head of the source that is furthest ahead.
    """
    ahead: dict[TopicPartition, int] = {}
    for row in rows:
        heads = [
            (source["head"], name)
            for name, source in row["sources"].items()
            if source["head"] is not None
        ]
        if heads:
            head, name = max(heads)
            ahead[TopicPartition(settings.inputs_by_name[name], row["partition"])] = head
    tenants = tenants_of(reader, ahead)
    leading = {
        tp.partition: {
            "tenant": tenants.get(tp),
            "source": settings.input_names[tp.input],
            "head": head,
        }
        for tp, head in ahead.items()
    }
    with_tenants = []
    for row in rows:
        p = row["partition"]
        count, tenant, clock = slowest.get(p, UNKNOWN_TENANT)
        of_tenants = {
            "waiting": counts.silver.get((p, "waiting"), 0),
            "tenants": count,
            "slowest": None if tenant is None else {"tenant": tenant, "clock": clock},
            "leading": leading.get(p),
        }
        with_tenants.append({**row, **of_tenants})
    return with_tenants


# -- the tables


def _rows(
    reader: TableReader,
    table: str,
    by: Sequence[str],
    where: Where = (),
    **values: tuple[str, str],
) -> list[Row]:
    """Return a summary of a table; without rows where the table does not exist yet."""
    return reader.summary(table, by, values, where).to_pylist() if reader.exists(table) else []


def _cursors(reader: TableReader, generation: Generation) -> dict[TopicPartition, Cursor]:
    """Return how far the merge has passed each topic-partition in a generation."""
    last = _last_batch(reader)
    return {} if last is None or last.batch < generation.from_batch else last.cursors()


def _last_batch(reader: TableReader) -> BatchPlan | None:
    """Return silver's last batch; None where the table does not exist yet."""
    return last_batch(reader) if reader.exists(tables.SILVER) else None


def _counted(
    reader: TableReader, count: Callable[..., Mapping[int, int]], *about: Any
) -> Mapping[int, int]:
    """Return a count of rows of silver; nothing where the table does not exist yet."""
    return count(reader, *about) if reader.exists(tables.SILVER) else {}


def _silver_rows(reader: TableReader) -> list[Row]:
    statuses = ["open", "waiting", "timed_out", "late", "duplicate", "excess", "correction"]
    where = [[("status", "in", statuses)]]
    return _rows(reader, tables.SILVER, _OUTCOME, where, rows=("count", "*"))


def _next_due(reader: TableReader, window: Window) -> dict[int, int]:
    """Return, by partition with an open record, until when (ms) the first of them can be joined."""
    times = {"first": ("min", "event_time"), "last": ("min", "last_event_time")}
    rows = _rows(reader, tables.SILVER, ["partition"], [[("status", "=", "open")]], **times)
    return {row["partition"]: window.due(row["first"], row["last"]) for row in rows}


def _slowest(reader: TableReader, settings: Settings) -> dict[int, SlowestTenant]:
    """Return the slowest tenant of each partition, as silver's last batch left them."""
    last = _last_batch(reader)
    if last is None or not (rows := unfinished(reader)).num_rows:
        return {}
    end = BatchEnd(last.cursors(), last.clocks)
    return slowest(rows, clocks_at(reader, read_epochs(reader, settings), last.batch, end))


def _decisions(reader: TableReader, generation: Generation) -> dict[TopicPartition, IdleDecision]:
    """Return the last decision of the idle policy for each topic-partition."""
    return last_decisions(reader, generation) if reader.exists(tables.IDLE_HEARTBEATS) else {}


def _beyond(
    reader: TableReader, input_id: InputId, since: Mapping[TopicPartition, int]
) -> dict[TopicPartition, Row]:
    """Return what bronze holds of an input from some offsets on, by topic-partition.

    That is: the number of `records`, their `head` (ms), and the `last` offset.
    """
    ranges = {tp.partition: (offset, None) for tp, offset in since.items() if tp.input == input_id}
    partitions = sorted(ranges)
    end = max(ranges, default=-1) + 1
    parts: list[Where] = [
        [[("partition", ">=", end)], [("partition", "in", sorted({*range(end)} - {*ranges}))]]
    ]
    # With more partitions in one question, neighbours would share a term, and their rows could not
    # be told apart.
    chunks = [partitions[i : i + MAX_TERMS] for i in range(0, len(partitions), MAX_TERMS)]
    parts += [_within(ranges, chunk) for chunk in chunks]
    values = {"records": ("count", "*"), "head": ("max", "event_time"), "last": ("max", "offset")}
    rows = [
        row
        for where in parts
        for row in _rows(
            reader,
            tables.bronze(input_id.source),
            ["partition"],
            of_topic(input_id, where),
            **values,
        )
    ]
    return {TopicPartition(input_id, row["partition"]): row for row in rows}


def _within(ranges: Mapping[int, tuple[int, None]], partitions: Sequence[int]) -> Where:
    return within({p: ranges[p] for p in partitions})


def _counts(reader: TableReader, table: str, *by: str) -> dict[tuple[Any, ...], int]:
    counts: dict[tuple[Any, ...], int] = {}
    for row in _rows(reader, table, by, rows=("count", "*")):
        counts[tuple(row[name] for name in by)] = row["rows"]
    return counts


# -- Kafka


def _bounds(settings: Settings, patience_s: float) -> tuple[Bounds, Transactions]:
    """Return the first and the exclusive end offset of every topic-partition, and the open
    transactions.
    """
    cluster = Cluster(settings.kafka, patience_s)
    partitions = co_partitioned(settings, cluster.partition_counts(topics_of(settings)))
    bounds: dict[TopicPartition, tuple[int, int]] = {}
    transactions: dict[TopicPartition, OpenTransaction] = {}
    for input_id in settings.inputs:
        limits, still_open = open_transactions(cluster, input_id.topic, range(partitions))
        for p, first_and_end in limits.items():
            bounds[TopicPartition(input_id, p)] = first_and_end
        for p, transaction in still_open.items():
            transactions[TopicPartition(input_id, p)] = transaction
    return bounds, transactions


def _behind(settings: Settings, tp: TopicPartition, next_offset: int, bounds: Bounds | None) -> int:
    """Return how many records Kafka has after a topic-partition's end in bronze.

    Offsets are counted instead where there are many, or where the records cannot be read. 0 where
    Kafka does not answer.
    """
    if bounds is None:
        return 0
    first, end = bounds[tp]
    since = max(first, next_offset)
    if not 0 < end - since <= EXACT_LAG:
        return max(0, end - since)
    missing = Range(tp.input.topic, tp.partition, since, end)
    try:
        return sum(batch.num_rows for batch in read_range(settings.kafka, missing))
    except UnreadableRecordsError as error:
        log.warning("%s", error)
        return end - since
