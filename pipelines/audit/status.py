"""The state of every partition: heads, clock, lag, and how many records ended where.

Reads only, and starts no JVM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipelines.audit.doubts import heads_in_future, odd_times_in_lake, unmet_in_lake
from pipelines.audit.problems import Problem
from pipelines.audit.show import utc
from pipelines.audit.unnoted import read_unnoted
from pipelines.core.idle import IdleDecision
from pipelines.core.plan import Cursor, OpenTransaction, TopicPartition
from pipelines.errors import KafkaTransientError, UnreadableRecordsError
from pipelines.kafka.cluster import Cluster, co_partitioned, topics_of
from pipelines.kafka.reading import Range, read_range
from pipelines.kafka.transactions import open_transactions
from pipelines.lake import tables
from pipelines.lake.decisions import read_decisions
from pipelines.lake.epochs import read_epochs
from pipelines.lake.generations import Generation, read_generations
from pipelines.lake.progress import last_batch
from pipelines.lake.published import last_published
from pipelines.lake.quality import last_results
from pipelines.lake.schemas import unknown_schemas
from pipelines.lake.snapshot import Snapshot
from pipelines.lake.table_reader import MAX_TERMS, TableReader, Where, within
from pipelines.lake.tenant_state import BatchEnd
from pipelines.lake.tenants import (
    UNKNOWN_TENANT,
    SlowestTenant,
    clocks_at,
    slowest,
    tenants_of,
    unfinished,
)
from pipelines.lake.unpublished import count_behind_sink
from pipelines.settings import Settings

log = logging.getLogger("watersmeet.status")

EXACT_LAG = 1000
"""Maximum number of offsets up to which what bronze lacks is counted record by record.

The markers of transactions take offsets, too.
"""

PATIENCE_S = 2.5
"""Seconds after which a broker that does not answer counts as away: the tables know nearly as much.
"""

_THREADS = 8

Bounds = Mapping[TopicPartition, tuple[int, int]]
Transactions = Mapping[TopicPartition, OpenTransaction]
Row = dict[str, Any]


def status(
    reader: TableReader, settings: Settings, patience_s: float = PATIENCE_S
) -> dict[str, Any]:
    """Return the answer of `status --json`. Times are epoch ms, null where there is none yet.

    By partition:

    - `behind_sink`: finished, valid records of the newest generation that are never published,
      since they sort at or before the message behind which it began.
    - `waiting`, with tenants: records that wait for their tenant's clock.
    - `tenants`, with tenants: how many have something open or waiting.
    - `slowest`, with tenants: which of them is behind the others (tenant, clock).
    - `leading`, with tenants: whose record is the head of the source that is furthest ahead
      (tenant, null for nobody's, source, head).

    By source:

    - `lag`: records that silver has not passed, and those that bronze lacks. Where Kafka does not
      answer within `patience_s`, the latter are left out and a warning says so.
    - `transaction`, where another producer's transaction is open: since when (Kafka's timestamp of
      its first record), from which offset on, and how many offsets are `behind`. What is there is
      no record yet, and counts in no lag.

    `quality` is as `last_results` has it. `warnings`, as problems, is there where something looks
    wrong (`audit.doubts`) or where notes are not written yet (`audit.unnoted`).
    """
    has_tenants = settings.merge.has_tenants
    reader = Snapshot(reader, settings)
    with ThreadPoolExecutor(_THREADS) as pool:
        kafka_ends = pool.submit(_bounds, settings, patience_s)
        quality = pool.submit(last_results, reader)
        generations = read_generations(reader, settings)
        newest = generations.newest if generations else Generation(0, 0, {}, {})
        unmet = pool.submit(unmet_in_lake, reader, settings)
        unnoted = pool.submit(read_unnoted, reader, settings, newest)
        epochs = read_epochs(reader, settings)
        behind_sink = pool.submit(_behind_sink, reader, newest, epochs.closing_from)
        readers = (_cursors, _decisions)
        cursors, decisions = pool.map(lambda read: read(reader, newest), readers)
        published = last_published(reader)
        since = {**newest.begin, **{tp: cursor.next_offset for tp, cursor in cursors.items()}}
        rows_by_source = pool.map(lambda source: _beyond(reader, source, since), settings.inputs)
        new = {tp: row for rows in rows_by_source for tp, row in rows.items()}
        slowest_tenants = pool.submit(_slowest, reader, settings) if has_tenants else None
        counted = (
            (tables.SILVER, "partition", "status"),
            (tables.LATE, "partition"),
            (tables.QUARANTINE, "partition"),
        )
        silver, late, quarantined = pool.map(lambda columns: _counts(reader, *columns), counted)
        bounds: Bounds | None = None
        transactions: Transactions = {}
        try:
            bounds, transactions = kafka_ends.result()
        except KafkaTransientError as error:
            log.warning("%s; records that are not in bronze yet are not counted", error)
        partitions = range(max([-1, *(tp.partition for tp in bounds or [*cursors, *new])]) + 1)
        every = [TopicPartition(source, p) for source in settings.inputs for p in partitions]
        ends = {tp: max(since.get(tp, 0), new[tp]["last"] + 1 if tp in new else 0) for tp in every}
        odd = pool.submit(odd_times_in_lake, reader, settings, ends)
        behind = dict(
            zip(
                every,
                pool.map(lambda tp: _behind(settings, tp, ends[tp], bounds), every),
                strict=True,
            )
        )
    answers: list[Row] = []
    for p in partitions:
        sources: dict[str, dict[str, Any]] = {}
        for tp in [TopicPartition(source, p) for source in settings.inputs]:
            # An idle decision holds for a source until its next record.
            idle = [
                d.event_time
                for d in [decisions.get(tp)]
                if d is not None and d.after_offset + 1 >= ends[tp]
            ]
            times = [cursors.get(tp, Cursor()).position, new.get(tp, {}).get("head"), *idle]
            head = max((time for time in times if time is not None), default=None)
            waiting = new[tp]["records"] if tp in new else 0
            state = _state_of(is_idle=bool(idle), head=head, waiting=waiting)
            sources[tp.source] = {
                "head": head,
                "lead": None,
                "lag": waiting + behind[tp],
                "state": state,
            }
            if tp in transactions:
                sources[tp.source]["transaction"] = transactions[tp].as_row()
        heads = [at["head"] for at in sources.values()]
        clock = None if None in heads else min(heads)
        for at in sources.values():
            at["lead"] = None if clock is None else at["head"] - clock
            if at["state"] == "held" and at["lead"] == 0:  # nothing waits for another source
                at["state"] = "active"
        counts = {
            "open": silver.get((p, "open"), 0),
            "timed_out": silver.get((p, "timed_out"), 0),
            "late": late.get((p,), 0),
        }
        counts |= {
            "quarantined": quarantined.get((p,), 0),
            "published": published[p].seq + 1 if p in published else 0,
        }
        counts |= {"behind_sink": behind_sink.result().get(p, 0)}
        counts |= {"waiting": silver.get((p, "waiting"), 0)} if has_tenants else {}
        answers.append({"partition": p, "clock": clock, **counts, "sources": sources})
    if slowest_tenants is not None:
        answers = _with_tenants(reader, answers, slowest_tenants.result())
    heads_by_input = {
        TopicPartition(name, row["partition"]): at["head"]
        for row in answers
        for name, at in row["sources"].items()
    }
    last_heads = {tp: head for tp, head in heads_by_input.items() if head is not None}
    ahead = heads_in_future(settings, last_heads, time.time_ns() // 1_000_000)
    problems = [
        *_unknown_schemas(reader, settings),
        *(unmet.result() or []),
        *odd.result(),
        *ahead,
    ]
    warnings = [*(problem._asdict() for problem in problems), *unnoted.result().warnings]
    return {
        "partitions": answers,
        "quality": quality.result(),
        **({"warnings": warnings} if warnings else {}),
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
        for name, source in settings.sources.items()
        if source.registry is not None
        for schema_id, since in unknown_schemas(reader, name).items()
    ]


def _with_tenants(
    reader: TableReader, rows: list[Row], slowest: Mapping[int, SlowestTenant]
) -> list[Row]:
    """Return the partitions' rows with `tenants`, `slowest` and `leading`.

    These say how many tenants have something open or waiting, which of them is behind the others,
    and for which one others wait: whose record is the head of the source that is furthest ahead.
    """
    ahead: dict[TopicPartition, int] = {}
    for row in rows:
        heads = [
            (at["head"], source) for source, at in row["sources"].items() if at["head"] is not None
        ]
        for head, source in [max(heads)] if heads else []:
            ahead[TopicPartition(source, row["partition"])] = head
    tenants = tenants_of(reader, ahead)
    leading = {
        tp.partition: {"tenant": tenants.get(tp), "source": tp.source, "head": head}
        for tp, head in ahead.items()
    }
    with_tenants = []
    for row in rows:
        count, tenant, clock = slowest.get(row["partition"], UNKNOWN_TENANT)
        behind = None if tenant is None else {"tenant": tenant, "clock": clock}
        with_tenants.append(
            {**row, "tenants": count, "slowest": behind, "leading": leading.get(row["partition"])}
        )
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
    last = (
        last_batch(reader)
        if reader.exists(tables.SILVER) and reader.exists(tables.PROGRESS)
        else None
    )
    return {} if last is None or last[0].batch < generation.from_batch else last[0].cursors()


def _behind_sink(
    reader: TableReader, generation: Generation, closing_from: int | None
) -> Mapping[int, int]:
    if not reader.exists(tables.SILVER):
        return {}
    return count_behind_sink(reader, generation, closing_from)


def _slowest(reader: TableReader, settings: Settings) -> dict[int, SlowestTenant]:
    """Return the slowest tenant of each partition, as silver's last batch left them."""
    last = (
        last_batch(reader)
        if reader.exists(tables.SILVER) and reader.exists(tables.PROGRESS)
        else None
    )
    if last is None or not (rows := unfinished(reader)).num_rows:
        return {}
    moment = BatchEnd(last[0].cursors(), last[0].clocks)
    return slowest(rows, clocks_at(reader, read_epochs(reader, settings), last[0].batch, moment))


def _decisions(reader: TableReader, generation: Generation) -> dict[TopicPartition, IdleDecision]:
    """Return the last decision of the idle policy for each topic-partition."""
    return dict(read_decisions(reader, generation)) if reader.exists(tables.IDLE_HEARTBEATS) else {}


def _beyond(
    reader: TableReader, source: str, since: Mapping[TopicPartition, int]
) -> dict[TopicPartition, Row]:
    """Return what bronze holds of a source from some offsets on, by topic-partition.

    That is: the number of `records`, their `head` (ms), and the `last` offset.
    """
    ranges = {tp.partition: (offset, None) for tp, offset in since.items() if tp.source == source}
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
        for row in _rows(reader, tables.bronze(source), ["partition"], where, **values)
    ]
    return {TopicPartition(source, row["partition"]): row for row in rows}


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
    for source, topic in settings.inputs.items():
        limits, still_open = open_transactions(cluster, topic, range(partitions))
        for p, first_and_end in limits.items():
            bounds[TopicPartition(source, p)] = first_and_end
        for p, transaction in still_open.items():
            transactions[TopicPartition(source, p)] = transaction
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
    missing = Range(settings.inputs[tp.source], tp.partition, since, end)
    try:
        return sum(batch.num_rows for batch in read_range(settings.kafka, missing))
    except UnreadableRecordsError as error:
        log.warning("%s", error)
        return end - since
