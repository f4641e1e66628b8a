"""The state of every partition: heads, clock, lag, and how many records ended where.

Reads only, and starts no JVM.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import pyarrow as pa

from watersmeet.ask.answers import Row, beyond, rows
from watersmeet.audit.doubts import (
    doubts_of_newest,
    heads_in_future,
    odd_times_in_lake,
    unmet_in_lake,
)
from watersmeet.core.avro_schema import MAX_SCHEMAS, MAX_SCHEMAS_BYTES
from watersmeet.core.plan import OpenTransaction, TopicPartition
from watersmeet.core.sequence import CORRECTED, EXCESS, MERGED, TOO_MANY
from watersmeet.core.state import State
from watersmeet.core.times import utc
from watersmeet.errors import KafkaTransientError, Problem, UnreadableRecordsError
from watersmeet.kafka.cluster import Cluster, co_partitioned, topics_of
from watersmeet.kafka.reading import Range, open_transactions, read_range
from watersmeet.lake import tables
from watersmeet.lake.history import Generation, History, read_history
from watersmeet.lake.inputs import by_input
from watersmeet.lake.progress import last_batch, last_decisions
from watersmeet.lake.published import count_behind_sink, count_to_publish, last_tails_in, topic_of
from watersmeet.lake.quality import last_results
from watersmeet.lake.schemas import FULL, KeptSchemas
from watersmeet.lake.snapshot import Snapshot
from watersmeet.lake.state import (
    UNKNOWN_TENANT,
    SlowestTenant,
    slowest,
    state_at,
    tenants_of,
    unfinished,
)
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import Settings

log = logging.getLogger("watersmeet.status")

EXACT_LAG: Final = 1000
"""Maximum number of offsets up to which what bronze lacks is counted record by record.

The markers of transactions take offsets, too.
"""

PATIENCE_S: Final = 2.5
"""Seconds after which a broker that does not answer counts as away: the tables know nearly as much.
"""

_THREADS: Final = 8

Bounds = Mapping[TopicPartition, tuple[int, int]]
Transactions = Mapping[TopicPartition, OpenTransaction]


def status(
    reader: TableReader, settings: Settings, patience_s: float = PATIENCE_S
) -> dict[str, Any]:
    """Return the answer of `status --json`. Times are epoch ms, null where there is none yet.

    By partition:

    - `corrections`: how many late records have corrected a merge record; `corrections_closed`: how
      many more had, and were closed by a jump before they were published; `corrections_behind`:
      those of the newest generation that are never published, since they sort at or before the
      message behind which it began; `corrections_published`: how many messages their topic has had;
      `too_many`: how many late records have corrected
      nothing, since their merge record has as many versions as it may, or is too large, or would
      be with them.
    - `excess`: records of merge records that are too large.
    - `not_valid`: timed-out records that are not published, since they are not valid;
      `not_valid_reasons` counts them by reason.
    - `failed_values`: messages, to all topics so far, whose value is null because `publish.value`
      failed; those of a transaction that a crash kept from being noted are not known.
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
    history = read_history(reader, settings)
    with ThreadPoolExecutor(_THREADS) as pool:
        kafka_ends = pool.submit(_kafka_ends, settings, patience_s)
        quality = pool.submit(last_results, reader)
        unmet = pool.submit(unmet_in_lake, reader, settings)
        places = pool.submit(_places, reader, settings, history.newest)
        counts = pool.submit(count_outcomes, reader, settings, history)
        slowest_tenants = pool.submit(_slowest, reader, settings, history)
        bounds, transactions = kafka_ends.result()
        by_place = places.result()
        found = by_place if bounds is None else bounds
        partitions = range(max((tp.partition for tp in found), default=-1) + 1)
        every = [TopicPartition(i, p) for i in settings.inputs for p in partitions]
        ends = {tp: by_place.get(tp, NOWHERE).end for tp in every}
        odd = pool.submit(odd_times_in_lake, reader, settings, ends)
        of_newest = pool.submit(doubts_of_newest, reader, settings, ends)
        missing = pool.map(lambda tp: _missing(settings, tp, ends[tp], bounds), every)
        behind = dict(zip(every, missing, strict=True))
    answer: list[Row] = []
    for p in partitions:
        clock, sources = _sources(settings, p, by_place, behind, transactions)
        answer.append(
            {"partition": p, "clock": clock, **_partition(counts.result()[p]), "sources": sources}
        )
    if settings.merge.has_tenants:
        _add_tenants(reader, settings, answer, counts.result(), slowest_tenants.result())
    problems = [
        *_schema_problems(reader, settings),
        *(unmet.result() or []),
        *odd.result(),
        *of_newest.result(),
        *heads_in_future(settings, _heads(settings, answer), time.time_ns() // 1_000_000),
    ]
    warnings = [problem._asdict() for problem in problems]
    return {
        "partitions": answer,
        "quality": quality.result(),
        **({"warnings": warnings} if warnings else {}),
    }


def waits_for(reader: TableReader, settings: Settings) -> dict[int, list[str]]:
    """Return, by partition, the inputs that the clock waits for.

    These are the inputs without a head; where all have one, those whose head is the clock. Kafka is
    not asked.
    """
    snapshot = Snapshot(reader, settings)
    by_place = _places(snapshot, settings, read_history(snapshot, settings).newest)
    waits: dict[int, list[str]] = {}
    for p in range(max((tp.partition for tp in by_place), default=-1) + 1):
        clock, sources = _sources(settings, p, by_place, Counter(), {})
        waits[p] = [name for name, source in sources.items() if source["head"] == clock]
    return waits


# -- topic-partitions


class _Place(NamedTuple):
    """Where a topic-partition stands in bronze: the offset after its last record, its head (ms),
    how many records the merge has not passed, and whether the idle policy speaks for it.
    """

    end: int = 0
    head: int | None = None
    waiting: int = 0
    is_idle: bool = False


NOWHERE: Final = _Place()


def _places(
    reader: TableReader, settings: Settings, newest: Generation
) -> dict[TopicPartition, _Place]:
    has_silver = reader.exists(tables.SILVER)
    last = last_batch(reader) if has_silver else None
    idle = last_decisions(reader, newest) if has_silver else {}
    merged = last.ranges if last is not None and last.batch >= newest.from_batch else {}
    since = {**newest.begin, **{tp: done.until_offset for tp, done in merged.items()}}
    new, begins = dict[TopicPartition, Row](), by_input(since)
    for i in settings.inputs:
        found = rows(
            reader,
            f"SELECT `partition`, count(*) AS records, max(event_time) AS head, "
            f"max(b.offset) AS last FROM {tables.bronze(i.source)} b "
            f"WHERE topic = '{i.topic}' AND {beyond(begins[i])} GROUP BY `partition`",
        )
        new |= {TopicPartition(i, row["partition"]): row for row in found}
    places = {}
    for tp in {**since, **new, **idle}:
        row = new.get(tp, {"records": 0, "head": None, "last": -1})
        end = max(since.get(tp, 0), row["last"] + 1)
        # An idle decision holds for a source until its next record.
        is_idle = tp in idle and idle[tp].after_offset + 1 >= end
        position = merged[tp].position if tp in merged else None
        times = [position, row["head"], idle[tp].event_time if is_idle else None]
        head = max((each for each in times if each is not None), default=None)
        places[tp] = _Place(end, head, row["records"], is_idle)
    return places


def _sources(
    settings: Settings,
    partition: int,
    places: Mapping[TopicPartition, _Place],
    missing: Mapping[TopicPartition, int],
    transactions: Transactions,
) -> tuple[int | None, dict[str, Row]]:
    # `missing`: the number of records that bronze lacks.
    tps = {name: TopicPartition(i, partition) for i, name in settings.input_names.items()}
    heads = [places.get(tp, NOWHERE).head for tp in tps.values()]
    clock = None if None in heads else min(head for head in heads if head is not None)
    sources: dict[str, Row] = {}
    for name, tp in tps.items():
        place = places.get(tp, NOWHERE)
        lead = None if clock is None or place.head is None else place.head - clock
        # What is not ahead of the clock does not wait for another source.
        state = "held" if place.waiting and lead != 0 else "active"
        state = "waiting" if place.head is None else state
        state = "idle" if place.is_idle else state
        lag = place.waiting + missing[tp]
        sources[name] = {"head": place.head, "lead": lead, "lag": lag, "state": state}
        if tp in transactions:
            sources[name]["transaction"] = transactions[tp].as_row()
    return clock, sources


def _heads(settings: Settings, answer: Sequence[Row]) -> dict[TopicPartition, int]:
    return {
        TopicPartition(settings.inputs_by_name[name], row["partition"]): source["head"]
        for row in answer
        for name, source in row["sources"].items()
        if source["head"] is not None
    }


# -- counts

_COUNTED_AS: Final = {
    ("correction", TOO_MANY): TOO_MANY,
    ("correction", EXCESS): TOO_MANY,
    ("correction", "reset"): "corrections_closed",
}
"""What rows count as, by status and reason, if not as their view or, in `merged`, their status."""

_TOLD: Final = (
    *("open", "timed_out", "published", "not_valid", "to_publish", "behind_sink", "failed_values"),
    *(tables.LATE, tables.CORRECTIONS, "corrections_closed", "corrections_behind", TOO_MANY),
    *("corrections_published", tables.DUPLICATES, tables.EXCESS, "quarantined"),
)
"""The counts of a partition that the answer has."""

_NOT_VALID: Final = "not valid: "


def count_outcomes(
    reader: TableReader, settings: Settings, history: History
) -> defaultdict[int, Counter[str]]:
    """Return, by partition, how many records ended where, under the names of `status`, and by
    reason (`not valid: REASON`) what timed out and is not valid.

    `next_due`: until when (ms) the first of the open records can be joined.
    """
    counts = defaultdict[int, Counter[str]](Counter)
    window = history.epochs.current.settings.merge.window
    for row in rows(
        reader,
        "SELECT `partition`, status, invalid_reason, count(*) AS n, min(event_time) AS first, "
        f"min(last_event_time) AS last FROM silver WHERE status IN {tuple(tables.STATUSES)} "
        "GROUP BY `partition`, status, invalid_reason",
    ):
        here, status_of_row, reason = counts[row["partition"]], row["status"], row["invalid_reason"]
        view = tables.STATUSES[status_of_row].view
        name = status_of_row if view == tables.MERGED else view
        here[_COUNTED_AS.get((status_of_row, reason), name)] += row["n"]
        if status_of_row == "timed_out" and reason is not None:
            here["not_valid"] += row["n"]
            here[f"{_NOT_VALID}{reason}"] += row["n"]
        if status_of_row == "open":
            here["next_due"] = window.due(row["first"], row["last"])
    for name, what in (
        ("quarantined", "count(*) AS n FROM quarantine"),
        ("failed_values", "coalesce(sum(failed_values), 0) AS n FROM published"),
    ):
        for row in rows(reader, f"SELECT `partition`, {what} GROUP BY `partition`"):
            counts[row["partition"]][name] = row["n"]
    tails, corrected = (
        last_tails_in(reader, sequence, topic_of(settings, sequence))
        for sequence in (MERGED, CORRECTED)
    )
    by_name = {
        "published": {p: tail.seq + 1 for p, tail in tails.items()},
        "corrections_published": {p: tail.seq + 1 for p, tail in corrected.items()},
    }
    if reader.exists(tables.SILVER):
        newest = history.newest
        finished = [p for p, here in counts.items() if here["timed_out"]]
        by_name["to_publish"] = count_to_publish(reader, newest, tails, finished)
        by_name["behind_sink"] = count_behind_sink(reader, newest, MERGED)
        by_name["corrections_behind"] = count_behind_sink(reader, newest, CORRECTED)
    for name, found in by_name.items():
        for p, n in found.items():
            counts[p][name] = n
    return counts


def _partition(counts: Counter[str]) -> Row:
    reasons = {name.removeprefix(_NOT_VALID): counts[name] for name in counts if _NOT_VALID in name}
    names = ("published", "to_publish", "behind_sink", "not_valid")
    surplus = sum(counts[name] for name in names) - counts["timed_out"]
    return {
        **{name: counts[name] for name in _TOLD},
        "next_due": counts.get("next_due"),
        "not_valid_reasons": dict(sorted(reasons.items())),
        "not_in_silver": max(0, surplus),
        "in_former_sink": max(0, -surplus),
    }


def unfinished_tenants(reader: TableReader, history: History) -> tuple[pa.Table, State] | None:
    """Return the rows of tenants that are still to change (`lake.state.unfinished`), and the
    state in which the last batch left them; None where there are none.
    """
    last = last_batch(reader) if reader.exists(tables.SILVER) else None
    if last is None or not (found := unfinished(reader)).num_rows:
        return None
    return found, state_at(reader, history, history.generations.of(last.batch), last.batch)


def _slowest(
    reader: TableReader, settings: Settings, history: History
) -> Mapping[int, SlowestTenant]:
    found = unfinished_tenants(reader, history) if settings.merge.has_tenants else None
    return slowest(*found) if found else {}


def _add_tenants(
    reader: TableReader,
    settings: Settings,
    answer: Sequence[Row],
    counts: Mapping[int, Counter[str]],
    slowest_tenants: Mapping[int, SlowestTenant],
) -> None:
    ahead: dict[int, tuple[TopicPartition, int]] = {}
    names = settings.input_names
    heads = _heads(settings, answer)
    for tp in sorted(heads, key=lambda tp: (heads[tp], names[tp.input])):
        ahead[tp.partition] = tp, heads[tp]
    leaders = tenants_of(reader, dict(ahead.values()))
    for row in answer:
        p = row["partition"]
        count, tenant, clock = slowest_tenants.get(p, UNKNOWN_TENANT)
        row |= {"waiting": counts[p]["waiting"], "tenants": count, "leading": None}
        row["slowest"] = None if tenant is None else {"tenant": tenant, "clock": clock}
        if p in ahead:
            tp, head = ahead[p]
            leading = {"tenant": leaders.get(tp), "source": names[tp.input], "head": head}
            row["leading"] = leading


def _schema_problems(reader: TableReader, settings: Settings) -> Iterator[Problem]:
    for name in settings.registries:
        where = f"sources.{name}.registry"
        kept = KeptSchemas(reader, name)
        for schema_id, since in kept.waiting.items():
            yield Problem(
                f"since {utc(since)} the registry does not have schema {schema_id}, which a record "
                "was written with; the source waits for it, or its records are refused once "
                "registry.unknown_after is over",
                where,
                "register it under this id; or set registry.unknown_after; or jump over the record "
                "with `watersmeet reset`",
            )
        if FULL in kept:
            yield Problem(
                f"the source has {MAX_SCHEMAS:,} schemas, or {MAX_SCHEMAS_BYTES // 2**20} MiB of "
                "them: records that were written with another one are refused",
                where,
                "find out who registers so many; a new lake begins with none",
            )


# -- Kafka


def _kafka_ends(settings: Settings, patience_s: float) -> tuple[Bounds | None, Transactions]:
    bounds: dict[TopicPartition, tuple[int, int]] = {}
    transactions: dict[TopicPartition, OpenTransaction] = {}
    try:
        cluster = Cluster(settings.kafka, patience_s)
        partitions = co_partitioned(settings, cluster.partition_counts(topics_of(settings)))
        for i in settings.inputs:
            limits, still_open = open_transactions(cluster, i.topic, range(partitions))
            bounds |= {TopicPartition(i, p): ends for p, ends in limits.items()}
            transactions |= {TopicPartition(i, p): found for p, found in still_open.items()}
    except KafkaTransientError as error:
        log.warning("%s; records that are not in bronze yet are not counted", error)
        return None, {}
    return bounds, transactions


def _missing(
    settings: Settings, tp: TopicPartition, next_offset: int, bounds: Bounds | None
) -> int:
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
