"""The rows that a check looks at: those that silver's batches have handled since the last check.

Every table is cut by silver's batches, so that each row is seen once, whatever runs meanwhile:

- silver and its views by their column `batch`;
- bronze, and of it `quarantine`, by the offsets that the batches have passed;
- the sink by the merge records that the batches have finished.

Of `progress` the last batch is looked at, as it stands.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from itertools import pairwise, starmap
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.ask.answers import literal, values
from watersmeet.ask.answers import rows as answer_rows
from watersmeet.audit.problems import as_problem
from watersmeet.configuration.file import known_instead
from watersmeet.core.avro_schema import AvroSchema
from watersmeet.core.column_reading import utf8
from watersmeet.core.columns import (
    NULL_TIME,
    cuts,
    one_chunk,
    row_values,
    times_ms,
)
from watersmeet.core.dropped_fields import dropped_fields, fields_in
from watersmeet.core.inputs import InputId
from watersmeet.core.json_schema import ValueSchema
from watersmeet.core.reading import bronze_schema
from watersmeet.core.sequence import FORGOTTEN, ID, MERGED, Tail, clock_of
from watersmeet.core.types import TIME, schema_of
from watersmeet.errors import ConfigurationError, Problem
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import Range, read_range
from watersmeet.lake import tables
from watersmeet.lake.history import read_history
from watersmeet.lake.inputs import of_input, of_topic
from watersmeet.lake.location import Lake
from watersmeet.lake.newest import lake_schemas
from watersmeet.lake.published import (
    first_to_publish,
    last_tails_in,
    tail_columns,
    topic_columns,
    with_message,
)
from watersmeet.lake.table_reader import (
    Condition,
    TableReader,
    Where,
    within,
)
from watersmeet.lake.views import views
from watersmeet.quality.suites import SINK, Suite, read_suites
from watersmeet.settings import Settings

CHUNK_OFFSETS = 1_000_000
CHUNK_BYTES = 128 * 1024 * 1024
"""About how many offsets are looked at in one go, and packed bytes of bronze, to fit into memory.
"""

MET: Final = "sources_met"
DISTANCE: Final = "days_from_kafka"
DROPPED: Final = "dropped_fields"

_OF_MERGE_RECORD: Final = ("partition", "tenant", "merge_key", "event_time")
_OF_RECORD: Final = ("source", "topic", "partition", "offset", "after_offset")
_COORDINATES: Final = {
    tables.SILVER: ("status", *_OF_MERGE_RECORD, "source", "topic", "offset"),
    tables.MERGED: _OF_MERGE_RECORD,
    SINK: ("partition", "offset"),
}

_OF_PROGRESS: Final = (
    *("batch", "source", "topic", "partition", "until_offset", "head", "clock", "position"),
    "committed_at",
)
_ELAPSED: Final = {"minutes_since_batch": "committed_at", "minutes_behind": "head"}

_OFFSETS: Final = pa.list_(pa.struct([("offset", pa.int64())]))


class Span(NamedTuple):
    """A range of silver's batches, `(after, until]`; -1: from the first on."""

    after: int
    until: int

    @property
    def where(self) -> list[Condition]:
        """The conditions for rows whose column `batch` is in the range."""
        return [("batch", ">", self.after), ("batch", "<=", self.until)]


class Batches(NamedTuple):
    """Batches of a version of silver: by number, how many offsets one has."""

    version: int
    offsets: Mapping[int, int]

    @property
    def last(self) -> int:
        """The last batch; -1 before the first."""
        return max(self.offsets, default=-1)

    def chunks(self, span: Span, limit: int) -> Iterator[Span]:
        """Yield the span in chunks of one batch or more, of up to `limit` offsets."""
        inside = sorted(batch for batch in self.offsets if span.after < batch <= span.until)
        pieces = cuts([self.offsets[batch] for batch in inside], limit)
        lasts = [inside[end - 1] for _, end in pieces]
        yield from starmap(Span, pairwise([span.after, *lasts[:-1], span.until]))


def batch_at(reader: TableReader, version: int | None) -> int:
    """Return the last batch that a version of silver (None: none) has; -1 before the first.

    Raises VersionGoneError where the log has forgotten the version.
    """
    if version is None or not reader.exists(tables.SILVER):
        return -1
    last = reader.summary(tables.PROGRESS, [], {"batch": ("max", "batch")}, version=version)
    batch: int | None = last["batch"][0].as_py()
    return -1 if batch is None else batch


def read_batches(reader: TableReader, since: int) -> Batches:
    """Return the batches of silver's last version, from one on."""
    if not reader.exists(tables.SILVER):
        return Batches(0, {})
    version = reader.version(tables.SILVER)
    sums = {"begin": ("sum", "from_offset"), "end": ("sum", "until_offset")}
    where: Where = [[("batch", ">=", since)]]
    rows = reader.summary(tables.PROGRESS, ["batch"], sums, where, version=version).to_pylist()
    return Batches(version, {row["batch"]: abs(row["end"] - row["begin"]) for row in rows})


def chunk_limit(reader: TableReader, settings: Settings) -> int:
    """Return how many offsets make a chunk: fewer where records are large."""
    widest = max(reader.row_bytes(tables.bronze(source)) for source in settings.sources)
    return max(1, min(CHUNK_OFFSETS, CHUNK_BYTES // max(1, widest)))


def coordinates(table: str, hidden_names: Collection[str]) -> tuple[str, ...]:
    """Return the columns by which a row of a table is found, as far as it has them, without
    `hidden_names`.
    """
    columns = _COORDINATES.get(table, _OF_RECORD)
    return tuple(name for name in columns if name not in hidden_names)


def rows_of(
    reader: TableReader, settings: Settings, table: str, span: Span, now_ms: int
) -> pa.Table:
    """Return the rows of a table that a suite looks at.

    - Bytes of records are text, null where they are not UTF-8.
    - Of parts in silver and its views only offsets are left. `<source>_parts` counts a source's
      parts of a merge record, and `sources_met` the sources that it has.
    - In bronze `days_from_kafka` is how far the event time lies behind Kafka's timestamp, and
      `dropped_fields` how many fields a value has that the source's schema lacks; else null.

    Raises WatersmeetError where Kafka does not show the sink.
    """
    if table == tables.PROGRESS:
        return _progress_rows(reader, now_ms)
    if table == SINK:
        return _messages(reader, settings, span)
    if table == tables.QUARANTINE or table.startswith(tables.bronze("")):
        return _read_records(reader, settings, table, span)
    return _silver_rows(reader, settings, table, span)


def columns_of(settings: Settings, table: str) -> list[str]:
    """Return the names of the columns that `rows_of` returns of a table."""
    if table == tables.PROGRESS:
        return [*_OF_PROGRESS, *_ELAPSED]
    if table == SINK:
        return list(MESSAGES.names)
    if table == tables.QUARANTINE:
        return _but_headers(views(settings)[tables.QUARANTINE].schema)
    if table.startswith(tables.bronze("")):
        return [*_but_headers(bronze_schema()), DISTANCE, DROPPED]
    names = Lake(settings).schema(table).names
    sources = [source for source in settings.sources if source in names]
    counts = [*(f"{source}_parts" for source in sources), MET] if sources else []
    return list(dict.fromkeys([*names, *counts]))


def _but_headers(schema: pa.Schema) -> list[str]:
    return [name for name in schema.names if name != "headers"]


def missing_columns(settings: Settings, suites: Sequence[Suite]) -> list[Problem]:
    """Return a problem for each column that an expectation is about and its table does not have."""
    problems = []
    for suite in suites:
        existing = columns_of(settings, suite.table)
        for number, document in enumerate(suite.documents):
            kwargs = document["kwargs"]
            if str(document["type"]).startswith(("expect_column_to_exist", "expect_table_")):
                continue
            values = [kwargs.get(name) for name in ("column", "column_A", "column_B")]
            values += kwargs.get("column_list") or []
            problems += [
                Problem(
                    f"{suite.file}: expectations[{number}]: {suite.table} has no column `{name}`",
                    "quality.suites",
                    known_instead(name, existing),
                )
                for name in values
                if isinstance(name, str) and name not in existing
            ]
    return list(dict.fromkeys(problems))


def check_suites(settings: Settings) -> list[Problem]:
    """Return a problem where a suite lacks its form, or is about a column that there is not."""
    try:
        return missing_columns(settings, read_suites(settings))
    except ConfigurationError as error:
        return [as_problem(error, "quality.suites")]


# -- records, and what became of them


def _silver_rows(reader: TableReader, settings: Settings, table: str, span: Span) -> pa.Table:
    names = Lake(settings).schema(table).names
    rows = _as_text(reader.rows(table, names, [span.where]))
    met = []
    for source in (source for source in settings.sources if source in names):
        counts = pc.list_value_length(rows[source]).cast(pa.int64())
        rows = rows.set_column(names.index(source), source, rows[source].cast(_OFFSETS))
        met.append(pc.greater(counts, 0).cast(pa.int64()))
        if f"{source}_parts" not in names:
            rows = rows.append_column(f"{source}_parts", counts)
    return rows.append_column(MET, reduce(pc.add, met)) if met and MET not in names else rows


def _read_records(reader: TableReader, settings: Settings, table: str, span: Span) -> pa.Table:
    is_bronze = table != tables.QUARANTINE
    inputs = [i for i in settings.inputs if not is_bronze or tables.bronze(i.source) == table]
    schema = bronze_schema() if is_bronze else views(settings)[table].schema
    where: list[Sequence[Condition]] = []
    for input_id in inputs:
        merged = within(_merged_offsets(reader, input_id, span))
        where += (of_topic if is_bronze else of_input)(input_id, merged)
    rows = reader.rows(table, _but_headers(schema), where)
    if not is_bronze:
        return _as_text(rows)
    return _with_doubts(rows, lake_schemas(reader, settings).get(inputs[0].source))


def _as_text(rows: pa.Table) -> pa.Table:
    for place, field in enumerate(rows.schema):
        if pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
            rows = rows.set_column(place, field.name, utf8(one_chunk(rows[field.name])))
    return rows


def _with_doubts(rows: pa.Table, value_schema: ValueSchema | AvroSchema | None) -> pa.Table:
    dropped = pa.nulls(rows.num_rows, pa.int64())
    if value_schema is not None:
        has_key = rows["merge_key"].is_valid().combine_chunks()
        fields = fields_in(rows.filter(has_key), dropped_fields(value_schema))
        counts = pa.array(map(len, fields), dropped.type, size=len(fields))
        dropped = pc.replace_with_mask(dropped, has_key, counts)
    event_times, kafka_times = times_ms(rows["event_time"]), times_ms(rows["kafka_timestamp"])
    is_missing = (event_times == NULL_TIME) | (kafka_times < 0)
    days = pa.array((event_times - kafka_times) / 86_400_000, pa.float64(), mask=is_missing)
    return _as_text(rows).append_column(DISTANCE, days).append_column(DROPPED, dropped)


def _merged_offsets(
    reader: TableReader, input_id: InputId, span: Span
) -> dict[int, tuple[int, int]]:
    merged = of_input(input_id, [span.where])
    bounds = {"begin": ("min", "from_offset"), "end": ("max", "until_offset")}
    rows = reader.summary(tables.PROGRESS, ["partition"], bounds, merged).to_pylist()
    return {r["partition"]: (r["begin"], r["end"]) for r in rows if r["begin"] < r["end"]}


# -- progress


def _progress_rows(reader: TableReader, now_ms: int) -> pa.Table:
    # Also, in minutes until now: since the batch's commit, and behind the head.
    where: Where = [[("batch", "=", batch_at(reader, reader.version(tables.SILVER)))]]
    rows = reader.rows(tables.PROGRESS, _OF_PROGRESS, where)
    for name, since in _ELAPSED.items():
        times = times_ms(rows[since])
        minutes = pa.array((now_ms - times) / 60_000, pa.float64(), mask=times == NULL_TIME)
        rows = rows.append_column(name, minutes)
    return rows


# -- the sink

MESSAGES: Final = schema_of(
    "topic string, partition int, offset bigint, timestamp timestamp, key string, value string, "
    "seq bigint, id string, event_time timestamp"
)
"""Messages as a check sees them; `seq`, `id`, `event_time`: of their headers, or null."""


def published_until(reader: TableReader, settings: Settings, last: int) -> int:
    """Return the last batch of silver that is published whole; -1 where there is none."""
    generations = read_history(reader, settings).generations
    if last < 0 or not generations or not reader.exists(tables.PUBLISHED):
        return -1
    tails = last_tails_in(reader, MERGED, settings.publish.topic)
    first = first_to_publish(reader, generations.newest, tails)
    return last if first is None else min(last, first - 1)


def _messages(reader: TableReader, settings: Settings, span: Span) -> pa.Table:
    # All records of one time are finished by one batch, so the times at which the first and the
    # last merge record of a partition were closed select its messages.
    values_of = {"first": ("min", MERGED.clock), "last": ("max", MERGED.clock)}
    finished = [[*with_message(MERGED), *span.where]]
    closed = reader.summary(MERGED.table, ["partition"], values_of, finished)
    if not closed.num_rows:
        return MESSAGES.empty_table()
    topic = settings.publish.topic
    cluster = Cluster(settings.kafka)
    # Where the topic was created anew since, nothing is noted yet.
    sink = topic_columns(cluster.identified(topic))
    is_its = " AND ".join(f"p.{name} = {literal(text)}" for name, text in sink.items())
    noted = f"ms(p.{tail_columns(MERGED)[MERGED.clock]})"
    # `at_most_once` notes no offsets: then a partition is read from end to end.
    found = answer_rows(
        reader,
        f"WITH c AS ({values(closed.column_names, row_values(closed, *closed.column_names))}) "
        "SELECT c.`partition`, first, last, "
        f"coalesce(max(CASE WHEN {noted} < first THEN sink_offset END), -1) AS before, "
        f"min(CASE WHEN {noted} >= last THEN sink_offset END) AS until "
        f"FROM c LEFT JOIN published p ON p.`partition` = c.`partition` AND {is_its} "
        "GROUP BY c.`partition`, first, last ORDER BY c.`partition`",
    )
    timeout_ms = read_history(reader, settings).epochs.first_timeout_ms
    messages = [MESSAGES.empty_table()]
    # A commit is answered before every partition shows it.
    bounds = cluster.settled_bounds(topic, found[-1]["partition"] + 1)
    for row in found:
        first, end = bounds[row["partition"]]
        since = max(first, row["before"] + 1)
        until = end if row["until"] is None else row["until"] + 1
        if since < until:
            read = read_range(settings.kafka, Range(topic, row["partition"], since, until))
            times = row["first"], row["last"]
            messages += [_as_messages(batch, times, timeout_ms) for batch in read]
    return pa.concat_tables(messages)


def _as_messages(batch: pa.RecordBatch, times: tuple[int, int], timeout_ms: int) -> pa.Table:
    # Without tombstones, and with messages that do not say when they were closed.
    headers = [
        {header["key"]: header["value"] for header in its or ()}
        for its in batch["headers"].to_pylist()
    ]
    tails = [_tail(its, timeout_ms) for its in headers]
    event_times = [tail and tail.event_time for tail in tails]
    columns = [
        *(batch[name] for name in ("topic", "partition", "offset", "kafka_timestamp")),
        *(utf8(batch[name]) for name in ("key", "value")),
        pa.array([tail and tail.seq for tail in tails], pa.int64()),
        utf8(pa.array([its.get(ID) for its in headers], pa.binary())),
        pa.array(event_times, pa.timestamp("ms", "UTC")).cast(TIME),
    ]
    first, last = times
    is_selected = [
        FORGOTTEN not in its and (tail is None or first <= clock_of(tail.place) <= last)
        for its, tail in zip(headers, tails, strict=True)
    ]
    return pa.table(columns, schema=MESSAGES).filter(pa.array(is_selected, pa.bool_()))


def _tail(headers: Mapping[str, bytes], timeout_ms: int) -> Tail | None:
    try:
        return MERGED.parse(headers, timeout_ms)
    except ValueError:
        return None
