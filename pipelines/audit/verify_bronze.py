"""Checks 1 and 2: what Kafka has is in bronze once, and what bronze has went exactly one way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from pipelines import tables
from pipelines.adapters.kafka import TIMEOUT_S, Cluster
from pipelines.audit.validate import Problem
from pipelines.audit.verify_evidence import REBUILD, SHOWN, Evidence, Findings, by_topic_partition, first_of, union_all
from pipelines.core.plan import TopicPartition

NEAR = 10_000
"""Offsets that lie closer together are read through rather than sought one by one: transactions leave a hole each."""

Ranges = list[tuple[int, int]]


# -- check 1


def check_offsets(evidence: Evidence) -> Findings:
    """Each (source, partition, offset) is in bronze once, and those that are missing are missing in Kafka too.

    Compaction, retention, aborted records and the markers of transactions leave holes in Kafka; what a start or a reset passed
    over is in `resets`, what a recovery did not read again in `recovered`.
    """
    twice, gaps = _steps(evidence)
    duplicates = [
        Problem(
            f"the record is in bronze {rows} times",
            f"{tables.bronze(tp.source)}: {evidence.at(*tp, offset)}",
            "delete all rows of this offset but one",
        )
        for (tp, offset), rows in sorted(twice.items())
    ]
    skipped = _skipped(evidence)
    wanted = {tp: [r for gap in found for r in subtract(gap, skipped.get(tp, []))] for tp, found in gaps.items()}
    missing = _in_kafka(evidence, wanted)
    first = [
        Problem(
            "bronze lacks a record that Kafka has",
            f"{tables.bronze(tp.source)}: {evidence.at(*tp, offset)}",
            "begin a new lake while Kafka has it",
        )
        for tp, offset in islice(missing, SHOWN)
    ]
    return Findings(duplicates + first, sum(1 for _ in missing))


def subtract(whole: tuple[int, int], holes: Iterable[tuple[int, int]]) -> Ranges:
    """What remains of a range `[from, until)` without others."""
    remaining = [whole]
    for since, until in holes:
        cut = [(max(a, lo), min(b, hi)) for a, b in remaining for lo, hi in ((a, since), (until, b))]
        remaining = [(a, b) for a, b in cut if a < b] if since < until else remaining
    return remaining


def _steps(evidence: Evidence) -> tuple[dict[tuple[TopicPartition, int], int], dict[TopicPartition, Ranges]]:
    """The offsets that are there more than once, and the ranges that are not there, from 0 to the last that should be."""
    along = Window.partitionBy("source", "partition").orderBy("offset")
    offsets = union_all(
        [
            evidence.read(tables.bronze(source)).select(F.lit(source).alias("source"), "partition", "offset")
            for source in evidence.settings.sources
        ],
    )
    steps = offsets.select("*", F.lag("offset", 1, -1).over(along).alias("before"), F.lead("offset").over(along).alias("after"))
    is_no_plain_step = (F.col("offset") != F.col("before") + 1) | F.col("after").isNull()
    twice: dict[tuple[TopicPartition, int], int] = {}
    gaps: dict[TopicPartition, Ranges] = {tp: [] for tp in evidence.until}
    ends = dict.fromkeys(evidence.until, 0)
    for row in steps.where(is_no_plain_step).orderBy("source", "partition", "offset").toLocalIterator():
        tp = TopicPartition(row.source, row.partition)
        if row.offset == row.before:
            twice[tp, row.offset] = twice.get((tp, row.offset), 1) + 1
        elif row.offset > row.before + 1:
            gaps.setdefault(tp, []).append((row.before + 1, row.offset))
        ends[tp] = row.offset + 1
    for tp, until in evidence.until.items():
        if ends[tp] < until:
            gaps[tp].append((ends[tp], until))
    return twice, gaps


def _skipped(evidence: Evidence) -> dict[TopicPartition, Ranges]:
    """What need not be in bronze."""
    skipped: dict[TopicPartition, Ranges] = {}
    for row in evidence.read(tables.RESETS).select("source", "partition", "from_offset", "to_offset").collect():
        skipped.setdefault(TopicPartition(row[0], row[1]), []).append((row[2], row[3]))
    begun = evidence.read(tables.RECOVERED).where(F.col("source").isNotNull()).select("source", "partition", "offset")
    for row in begun.collect():
        skipped.setdefault(TopicPartition(row[0], row[1]), []).append((0, row[2]))
    return skipped


def _in_kafka(evidence: Evidence, wanted: Mapping[TopicPartition, Ranges]) -> Iterator[tuple[TopicPartition, int]]:
    """The offsets in some ranges at which Kafka has a committed record."""
    cluster, settings = Cluster(evidence.settings.kafka), evidence.settings
    consumer = cluster.consumer()
    try:
        for source, kept in settings.sources.items():
            bounds = cluster.bounds(kept.topic, len(evidence.until) // len(settings.sources))
            for p, (first, end) in bounds.items():
                ranges = wanted.get(TopicPartition(source, p), [])
                within = [(max(since, first), min(until, end)) for since, until in ranges if since < end and until > first]
                for offset in _offsets_in(consumer, kept.topic, p, within):
                    yield TopicPartition(source, p), offset
    finally:
        consumer.close()


def _offsets_in(consumer: Consumer, topic: str, partition: int, ranges: Sequence[tuple[int, int]]) -> Iterator[int]:
    offset: int | None = None
    for since, until in ranges:
        if offset is None or since - offset > NEAR:
            consumer.assign([KafkaPartition(topic, partition, since)])
            offset = _next_offset(consumer, topic, partition)
        while offset is not None and offset < until:
            if offset >= since:
                yield offset
            offset = _next_offset(consumer, topic, partition)
        if offset is None:
            return


def _next_offset(consumer: Consumer, topic: str, partition: int) -> int | None:
    """The offset of the next committed record; None at the end."""
    message = consumer.poll(TIMEOUT_S)
    if message is None:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"{topic}[{partition}] does not answer"))
    error = message.error()
    if error is None:
        return message.offset()
    if error.code() == KafkaError._PARTITION_EOF:
        return None
    raise KafkaException(error)


# -- check 2


def check_outcomes(evidence: Evidence) -> Findings:
    """Every record that the merge has passed is in one merge record, late, or published before a recovery; every refused one
    in quarantine once; a heartbeat nowhere. What the merge has not passed, and what bronze does not have, is nowhere.
    """
    quarantined, merged = F.col("quarantined"), F.col("merged") + F.col("late") + F.col("recovered")
    is_passed = F.col("offset") < by_topic_partition(evidence.until)
    nothing, once = F.lit(0), F.lit(1)
    is_wrong = (
        F.when(F.col("kind") == "refused", (merged > 0) | (quarantined > 1) | ((quarantined == 0) & is_passed))
        .when(F.col("kind") == "heartbeat", merged + quarantined > 0)
        .when(F.col("kind") == "record", (quarantined > 0) | (merged != F.when(is_passed, once).otherwise(nothing)))
        .otherwise(True)
    )
    wrong = _outcomes(evidence).withColumn("is_passed", is_passed).where(is_wrong)
    exempt = _without_outcome(evidence)
    if exempt:
        ranges = evidence.lake.spark.createDataFrame(exempt, "s STRING, p INT, since BIGINT, until BIGINT")
        is_exempt = (
            (F.col("source") == F.col("s"))
            & (F.col("partition") == F.col("p"))
            & (F.col("offset") >= F.col("since"))
            & (F.col("offset") < F.col("until"))
            & (F.col("kind") == "record")
            & (merged + quarantined == 0)
        )
        wrong = wrong.join(F.broadcast(ranges), is_exempt, "left_anti")

    def describe(row: Row) -> Problem:
        return Problem(
            _told(row), f"{tables.bronze(row.source)}: {evidence.at(row.source, row.partition, row.offset)}", _mended(row)
        )

    return first_of(wrong, ["source", "partition", "offset"], describe)


def _outcomes(evidence: Evidence) -> DataFrame:
    """Per record: kind (null: bronze does not have it), and how often each outcome has it."""
    frames = []
    for source in evidence.settings.sources:
        kind = F.when(F.col("reason").isNotNull(), "refused").when(F.col("heartbeat"), "heartbeat").otherwise("record")
        here: list[Column | str] = [F.lit(source).alias("source"), "partition"]
        frames.append(evidence.read(tables.bronze(source)).select(*here, "offset", kind.alias("kind")))
    parts = [_offsets_of(source) for source in evidence.settings.sources]
    merged = evidence.silver.select("partition", F.explode(F.concat(*parts)).alias("part")).select("partition", "part.*")
    late = evidence.read(tables.LATE).where(F.col("batch") <= evidence.last_batch)
    outcomes = {
        "merged": merged,
        "late": late,
        "quarantined": evidence.read(tables.QUARANTINE),
        "recovered": _published_before(evidence),
    }
    for outcome, rows in outcomes.items():
        if rows is not None:
            frames.append(rows.select("source", "partition", "offset", F.lit(outcome).alias("outcome")))
    counts = [F.count_if(F.col("outcome") == name).alias(name) for name in outcomes]
    return (
        union_all(frames).groupBy("source", "partition", "offset").agg(F.first("kind", ignorenulls=True).alias("kind"), *counts)
    )


def _offsets_of(source: str) -> Column:
    """The parts of a source in a row of silver: array<struct<source, offset>>."""
    return F.transform(source, lambda part: F.struct(F.lit(source).alias("source"), part["offset"].alias("offset")))


def _published_before(evidence: Evidence) -> DataFrame | None:
    """The records that are parts of messages already out when the lake was lost, or when it jumped back; None: neither was."""
    recovered = evidence.recovered()
    if recovered.isEmpty():
        return None
    timeout_ms = evidence.settings.merge.timeout_ms
    held = recovered.withColumnsRenamed({"partition": "p", "merge_key": "k", "event_time": "held", "stretch": "since"})
    is_held = (
        (F.col("partition") == F.col("p"))
        & (F.col("merge_key") == F.col("k"))
        & (F.col("position") <= F.col("held") + timeout_ms)
        & (F.col("stretch") >= F.col("since"))
    )
    on_time = evidence.records().where(F.col("is_passed") & (F.col("event_time") >= F.col("position") - timeout_ms))
    return on_time.join(held, is_held, "left_semi").select("source", "partition", "offset").distinct()


def _without_outcome(evidence: Evidence) -> list[tuple[str, int, int, int]]:
    """Ranges whose records need no outcome: they were skipped on purpose."""
    skips = evidence.read(tables.RESETS).where("from_offset < to_offset")
    return [tuple(row) for row in skips.select("source", "partition", "from_offset", "to_offset").collect()]


def _told(row: Row) -> str:
    outcomes = {
        "merge record": row.merged,
        "late": row["late"],
        "quarantine": row.quarantined,
        "published before a recovery": row.recovered,
    }
    found = ", ".join(name if count == 1 else f"{name} {count} times" for name, count in outcomes.items() if count)
    what = {None: "not in bronze", "refused": "a refused record", "heartbeat": "a heartbeat"}.get(row.kind, "a record")
    if row.kind == "record" and not row.is_passed:
        what = "a record that the merge has not passed"
    return f"{what}, and found in: {found or 'no outcome'}"


def _mended(row: Row) -> str:
    if row.kind == "refused" and not row.merged + row["late"]:
        return "let quarantine hold bronze's refused rows, each once"
    return REBUILD
