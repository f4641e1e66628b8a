"""The rows that a check looks at: those that silver's batches have handled since the last check,
table by table.

Every table is cut by silver's batches, so that each row is seen once, whatever runs meanwhile:

- silver and late by their column `batch`;
- bronze by the offsets that the batches have passed;
- the sink by the merge records that the batches have finished.

Of `progress` the last batch is looked at: a row for each topic-partition, as it stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.columns import MAX_TIME, NULL_TIME, int64s, looked_up, times_ms
from pipelines.core.inputs import of_source, topic_of
from pipelines.core.merge import late_schema
from pipelines.core.reading import bronze_schema
from pipelines.core.sequence import CLOSED_AT, FORGOTTEN, ID, SEQ, parse_message_id
from pipelines.core.types import TENANT, TIME
from pipelines.engine import Engine, Rows
from pipelines.kafka.cluster import Cluster
from pipelines.kafka.reading import Range, read_range
from pipelines.lake import tables
from pipelines.lake.inputs import resolve_condition
from pipelines.lake.order import Order, orders
from pipelines.lake.published import last_published
from pipelines.lake.table_reader import Condition, TableReader, Where, in_portions, within
from pipelines.quality.suites import SINK
from pipelines.settings import Settings

CHUNK_OFFSETS = 1_000_000
CHUNK_BYTES = 512 * 1024 * 1024
"""Approximate number of offsets that are looked at in one go, and of bytes of bronze's files, so
that the rows fit into memory.
"""

MET: Final = "sources_met"
DISTANCE: Final = "days_from_kafka"

_OFFSETS: Final = pa.list_(pa.struct([("offset", pa.int64())]))

_FINISHED: Final[list[Condition]] = [("status", "=", "timed_out"), ("valid", "=", True)]


class Span(NamedTuple):
    """A range of silver's batches: those after one of them (-1: from the first on) up to another
    one, which is included.
    """

    after: int
    until: int

    @property
    def where(self) -> list[Condition]:
        """The conditions for rows whose column `batch` is in the range."""
        return [("batch", ">", self.after), ("batch", "<=", self.until)]


class Batches(NamedTuple):
    """Batches of silver: by number, the version of silver that holds one, and how many offsets it
    has.
    """

    versions: Mapping[int, int]
    offsets: Mapping[int, int]

    @property
    def last(self) -> int:
        """The last batch; -1 before the first."""
        return max(self.versions, default=-1)

    def chunks(self, span: Span, limit: int) -> Iterator[Span]:
        """Yield the span in pieces of up to `limit` offsets, and of one batch or more: a batch is
        bounded by itself.
        """
        after = span.after
        size = 0
        inside = sorted(batch for batch in self.versions if span.after < batch <= span.until)
        for before, batch in zip([span.after, *inside], inside, strict=False):
            if size and size + self.offsets[batch] > limit:
                yield Span(after, before)
                after = before
                size = 0
            size += self.offsets[batch]
        if after < span.until:
            yield Span(after, span.until)


def batch_at(reader: TableReader, version: int | None) -> int:
    """Return the last batch that a version of silver has; -1 where it has none, and for None."""
    if version is None or not reader.exists(tables.PROGRESS):
        return -1
    last = reader.summary(
        tables.PROGRESS, [], {"batch": ("max", "batch")}, [[("silver_version", "<=", version)]]
    )
    batch: int | None = last["batch"][0].as_py()
    return -1 if batch is None else batch


def read_batches(reader: TableReader, since: int) -> Batches:
    """Return the batches that silver has made and noted, from one on."""
    if not reader.exists(tables.PROGRESS):
        return Batches({}, {})
    sums = {
        "version": ("max", "silver_version"),
        "begin": ("sum", "from_offset"),
        "end": ("sum", "until_offset"),
    }
    rows = reader.summary(tables.PROGRESS, ["batch"], sums, [[("batch", ">=", since)]]).to_pylist()
    return Batches(
        {row["batch"]: row["version"] for row in rows},
        {row["batch"]: abs(row["end"] - row["begin"]) for row in rows},
    )


def chunk_limit(reader: TableReader, settings: Settings) -> int:
    """Return how many offsets make a piece: fewer where records are large."""
    widest = max(reader.row_bytes(tables.bronze(source)) for source in settings.sources)
    return max(1, min(CHUNK_OFFSETS, CHUNK_BYTES // max(1, widest)))


def coordinates(
    table: str, *, has_tenants: bool = False, has_topics: bool = False
) -> tuple[str, ...]:
    """Return the columns by which a row of a table is found."""
    topic = ("topic",) if has_topics else ()
    of_table = {
        tables.SILVER: (
            "partition",
            *(TENANT.names if has_tenants else ()),
            "merge_key",
            "event_time",
        ),
        tables.LATE: ("source", *topic, "partition", "offset"),
        tables.PROGRESS: ("source", *topic, "partition"),
    }
    of_bronze = topic if table.startswith(tables.bronze("")) else ()
    return of_table.get(table, (*of_bronze, "partition", "offset"))


def rows_of(engine: Engine, settings: Settings, table: str, span: Span, now_ms: int) -> Rows:
    """Return the rows of a table that a suite looks at, in the engine's form.

    - Bytes of records are text, null where they are not UTF-8.
    - Of the parts in silver only the offsets are left. `<source>_parts` says how many records of a
      source a merge record holds, and `sources_met` of how many sources it has some.
    - In bronze `days_from_kafka` is how far the event time lies behind Kafka's timestamp (negative:
      before it), null where either is missing.

    Raises WatersmeetError where Kafka does not show the sink.
    """
    reader = engine.reader
    if table == tables.SILVER:
        kept = engine.lake.layout[table].schema
        rows = engine.read(table, kept.names, [span.where])
        counts = {
            f"{source}_parts": source
            for source in settings.sources
            if f"{source}_parts" not in kept.names
        }
        fields = [
            (field.name, _OFFSETS if field.name in settings.sources else field.type)
            for field in kept
        ]
        met = [MET] if MET not in kept.names else []
        schema = pa.schema([*fields, *[(name, pa.int64()) for name in (*counts, *met)]])
        function = partial(
            _with_counts, counts=counts, sources=list(settings.sources) if met else []
        )
        return engine.per_partition(function, [rows], schema)
    if table == tables.LATE:
        schema = late_schema(has_tenants=settings.merge.has_tenants)
        rows = engine.read(table, schema.names, [span.where])
        return engine.per_partition(_as_text, [rows], _text_schema(schema))
    if table == tables.PROGRESS:
        return engine.rows(_standing(reader, now_ms))
    if table == SINK:
        return engine.rows(_messages(reader, settings, span))
    inputs = of_source(
        settings.inputs, next(name for name in settings.sources if tables.bronze(name) == table)
    )
    passed = {name: _passed(reader, name, span) for name in inputs}
    where = [
        term
        for name, ranges in passed.items()
        for term in resolve_condition(tables.bronze(name), within(ranges))
    ]
    kept = bronze_schema(has_tenants=settings.merge.has_tenants)
    schema = _text_schema(pa.schema([field for field in kept if field.name != "headers"]))
    rows = engine.read(table, schema.names, where)
    return engine.per_partition(
        partial(_within, passed=passed), [rows], schema.append(pa.field(DISTANCE, pa.float64()))
    )


# -- bronze, silver, late: pure functions of Arrow tables, which run where the engine keeps its rows


def _text_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema(
        [(field.name, pa.string() if field.type == pa.binary() else field.type) for field in schema]
    )


def _as_text(rows: pa.Table) -> pa.Table:
    """Return rows with text for bytes, null where they are not UTF-8."""
    for place, field in enumerate(rows.schema):
        if pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
            rows = rows.set_column(place, field.name, _text(rows[field.name]))
    return rows


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.chunked_array(
            [pa.array([_decoded(value) for value in column.to_pylist()], pa.string())]
        )


def _decoded(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def _within(rows: pa.Table, passed: Mapping[str, Mapping[int, tuple[int, int]]]) -> pa.Table:
    """Return the rows at offsets `[from, until)` of their partition, by input, with text for bytes
    and `days_from_kafka`.
    """
    partitions = int64s(rows["partition"])
    offsets = int64s(rows["offset"])
    found = np.zeros(rows.num_rows, np.bool_)
    for name, ranges in passed.items():
        since = looked_up(partitions, {p: begin for p, (begin, _) in ranges.items()}, 0)
        until = looked_up(partitions, {p: end for p, (_, end) in ranges.items()}, 0)
        is_in = (offsets >= since) & (offsets < until)
        found |= (
            is_in & pc.equal(rows["topic"], topic_of(name)).to_numpy() if topic_of(name) else is_in
        )
    rows = _as_text(rows.filter(pa.array(found)))
    time, taken = (times_ms(rows[name]) for name in ("event_time", "kafka_timestamp"))
    days = pa.array(
        (time - taken) / 86_400_000, pa.float64(), mask=(time == NULL_TIME) | (taken < 0)
    )
    return rows.append_column(DISTANCE, days)


def _with_counts(rows: pa.Table, counts: Mapping[str, str], sources: Sequence[str]) -> pa.Table:
    lengths = {
        source: pc.list_value_length(rows[source]).cast(pa.int64())
        for source in {*counts.values(), *sources}
    }
    for name, source in counts.items():
        rows = rows.append_column(name, lengths[source])
    if sources:
        has_parts = [pc.greater(lengths[source], 0).cast(pa.int64()) for source in sources]
        rows = rows.append_column(MET, reduce(pc.add, has_parts))
    return rows


def _passed(reader: TableReader, name: str, span: Span) -> dict[int, tuple[int, int]]:
    """Return, by partition, the offsets `[from, until)` of an input's bronze that the batches have
    merged.
    """
    merged: Where = [[*span.where, ("source", "=", name)]]
    bounds = {"begin": ("min", "from_offset"), "end": ("max", "until_offset")}
    rows = reader.summary(tables.PROGRESS, ["partition"], bounds, merged).to_pylist()
    return {
        row["partition"]: (row["begin"], row["end"]) for row in rows if row["begin"] < row["end"]
    }


# -- progress


def _standing(reader: TableReader, now_ms: int) -> pa.Table:
    """Return where each topic-partition stood after the last batch.

    Also, in minutes until now: `minutes_since_batch` from the batch's commit, `minutes_behind` from
    the head.
    """
    names = [
        "batch",
        "source",
        "topic",
        "partition",
        "until_offset",
        "head",
        "clock",
        "position",
        "committed_at",
    ]
    last = reader.summary(tables.PROGRESS, [], {"batch": ("max", "batch")})["batch"][0].as_py()
    found = reader.select(tables.PROGRESS, names, [[("batch", "=", -1 if last is None else last)]])
    columns = {name: found[name] for name in names}
    for name, since in (("minutes_since_batch", "committed_at"), ("minutes_behind", "head")):
        columns[name] = pc.divide(
            pc.subtract(pa.scalar(now_ms, pa.int64()), found[since]).cast(pa.float64()), 60_000.0
        )
    for name in ("head", "clock", "position", "committed_at"):
        columns[name] = pc.multiply(found[name], 1000).cast(TIME)
    return pa.table(columns)


# -- the sink

MESSAGES: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", TIME),
        ("key", pa.string()),
        ("value", pa.string()),
        ("seq", pa.int64()),
        ("id", pa.string()),
        ("event_time", TIME),
    ]
)
"""Messages as a check sees them; `seq`, `id` and `event_time` come from their headers, null where
those do not say it.
"""


def published_until(reader: TableReader, last: int) -> int:
    """Return the last batch of silver of which gold has published everything; -1 where there is
    none.
    """
    if last < 0 or not reader.exists(tables.PUBLISHED):
        return -1
    highest = reader.summary(tables.PROGRESS, [], {"partition": ("max", "partition")})["partition"][
        0
    ].as_py()
    tails = last_published(reader)
    pending = list[list[Condition]]()
    for order in orders(reader):
        since = order.since(tails, range(highest + 1))
        later = ([("partition", "=", p), (order.column, ">", time)] for p, time in since.items())
        pending += [[*_FINISHED, *order.conditions, *term] for term in later]
    found = [
        row["batch"]
        for row in _asked(reader, tables.SILVER, [], {"batch": ("min", "batch")}, pending)
    ]
    first: int = min((batch for batch in found if batch is not None), default=last + 1)
    return min(first - 1, last)


def _asked(
    reader: TableReader,
    table: str,
    by: list[str],
    values: Mapping[str, tuple[str, str]],
    terms: Where,
) -> list[Any]:
    """Return the rows of a summary whose condition has a term for each partition, asking for some
    partitions at a time.
    """
    return [
        row
        for some in in_portions(terms)
        for row in reader.summary(table, by, values, some).to_pylist()
    ]


def _messages(reader: TableReader, settings: Settings, span: Span) -> pa.Table:
    """Return the messages of the merge records that these batches have finished: those of each
    partition follow one another.
    """
    return pa.concat_tables(
        [_messages_of(order, reader, settings, span) for order in orders(reader)]
    )


def _messages_of(order: Order, reader: TableReader, settings: Settings, span: Span) -> pa.Table:
    """Return the messages of an order.

    All records of one time are finished by one batch, so the first and the last time tell which
    messages they are.
    """
    ends = {"first": ("min", order.column), "last": ("max", order.column)}
    of_span = [[*_FINISHED, *order.conditions, *span.where]]
    rows = reader.summary(tables.SILVER, ["partition"], ends, of_span).to_pylist()
    times = {row["partition"]: (row["first"], row["last"]) for row in rows}
    if not times:
        return MESSAGES.empty_table()
    topic = settings.publish.topic
    cluster = Cluster(settings.kafka)
    sink = cluster.identified(topic)  # where it was created anew since, nothing is noted yet
    last_time = f"last_{order.column}"
    noted = [
        ("sink", "=", sink),
        *((f"last_{name}", *condition) for name, *condition in order.conditions),
    ]
    before: Where = [
        [*noted, ("partition", "=", p), (last_time, "<", first)] for p, (first, _) in times.items()
    ]
    after: Where = [
        [*noted, ("partition", "=", p), (last_time, ">=", last)] for p, (_, last) in times.items()
    ]
    # `at_most_once` notes no offsets: then a partition is read from end to end.
    begins = dict.fromkeys(times, -1)
    ends_at = dict.fromkeys(times, -1)
    for known, kind, where in ((begins, "max", before), (ends_at, "min", after)):
        found = _asked(
            reader, tables.PUBLISHED, ["partition"], {"offset": (kind, "sink_offset")}, where
        )
        known |= {row["partition"]: row["offset"] for row in found if row["offset"] is not None}
    messages = []
    # A commit is answered before every partition shows it.
    bounds = cluster.settled_bounds(topic, max(times) + 1)
    for p in sorted(times):
        first, end = bounds[p]
        since = max(first, begins[p] + 1)
        until = end if ends_at[p] < 0 else ends_at[p] + 1
        if since < until:
            read = read_range(settings.kafka, Range(topic, p, since, until))
            messages += [_as_messages(batch, times[p], order) for batch in read]
    return pa.concat_tables(messages) if messages else MESSAGES.empty_table()


def _as_messages(batch: pa.RecordBatch, times: tuple[int, int], order: Order) -> pa.Table:
    """Return the messages of an order, without tombstones, whose time lies between two (inclusive),
    or is not known.
    """
    read = [_of_headers(headers) for headers in batch["headers"].to_pylist()]
    seqs, ids, event_times, closed = (
        (list(column) for column in zip(*read, strict=True)) if read else ([], [], [], [])
    )
    columns = [
        *(batch[name] for name in ("topic", "partition", "offset", "kafka_timestamp")),
        *(_text(pa.chunked_array([batch[name]])) for name in ("key", "value")),
        pa.array(seqs, pa.int64()),
        pa.array(ids, pa.string()),
        pa.array(event_times, pa.timestamp("ms", "UTC")).cast(TIME),
    ]
    tombstones = [
        any(header["key"] == FORGOTTEN for header in headers or ())
        for headers in batch["headers"].to_pylist()
    ]
    is_closed = order.column == "closed_at"
    told = zip(event_times, closed, strict=True)
    ordering = [  # messages that say when they were closed and those that do not are of two orders
        (at if is_closed else time) if time is None or (at is not None) == is_closed else MAX_TIME
        for time, at in told
    ]
    meant = zip(ordering, tombstones, strict=True)
    is_meant = np.array(
        [not gone and (time is None or times[0] <= time <= times[1]) for time, gone in meant],
        np.bool_,
    )
    return pa.table(columns, schema=MESSAGES).filter(pa.array(is_meant))


def _of_headers(
    headers: list[dict[str, Any]] | None,
) -> tuple[int | None, str | None, int | None, int | None]:
    """Return the number, the id and the event time (ms) of a message, and when it was closed (ms),
    where the headers say it.
    """
    said = {header["key"]: _decoded(header["value"]) for header in headers or ()}
    seq = said.get(SEQ)
    id = said.get(ID)
    try:
        event_time = parse_message_id(id or "")[1]
    except ValueError:
        event_time = None
    return _number(seq), id, event_time, _number(said.get(CLOSED_AT))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
