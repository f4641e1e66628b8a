"""Reader of records: from Kafka's bytes to a key and an event time, or the reason of a refusal.

The result depends on the record and the rules alone, in every batch, restart and rebuild.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone, tzinfo
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal, Overflow
from enum import Enum
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core import json_text
from watersmeet.core.avro_columns import LOCAL
from watersmeet.core.avro_schema import FRAME, AvroSchema, as_text, schema_id_of
from watersmeet.core.column_reading import ColumnReader, column_reader, sent_keys
from watersmeet.core.columns import Booleans, Int64s, int64s, lengths, one_chunk
from watersmeet.core.headers import REDRIVEN, redriven_offset
from watersmeet.core.items import in_turn
from watersmeet.core.json_schema import ValueSchema
from watersmeet.core.json_text import UndecodableError
from watersmeet.core.repeated import ID
from watersmeet.core.texts import Path, paths_text
from watersmeet.core.times import EPOCH, LAST_EVENT_TIME_MS, parse_iso_8601, time_zone
from watersmeet.core.types import HEADERS, NO_TENANT, TENANT, schema_of

KAFKA: Final = schema_of(
    "topic string, partition int, offset bigint, kafka_timestamp timestamp, timestamp_type int, "
    "key binary, value binary"
).append(pa.field("headers", HEADERS))
"""The columns of a record as Kafka delivers it; a record without a timestamp has -1 ms."""

KEYED_BY: Final = ("key", "value", "headers")
"""The columns of `KAFKA` in which a record may have its merge key."""

_FOUND = "merge_key string, event_time timestamp, heartbeat boolean, reason string, detail string"
BRONZE: Final = pa.schema([*KAFKA, *schema_of(_FOUND)])
"""The columns of `bronze_<source>`: Kafka's, and what was read or why the record was refused."""

RECORD_BYTES: Final = pa.field("record_bytes", pa.int64())
"""The last column of bronze: the bytes of key, value and headers, by which reads are planned."""

REDRIVEN_FROM: Final = pa.field("redriven_from", pa.int64())
"""A column of bronze: the offset, in its own partition, of the record that a redriven one was."""

MAX_RECORD_BYTES: Final = 64 * 1024 * 1024
"""Default maximum size of a value in bytes."""

MILLISECONDS_PER_UNIT: Final = {"s": 3, "ms": 0, "us": -3, "ns": -6}
"""Units of numeric event times, with the milliseconds of each as a power of ten."""
WRITER_SCHEMA: Final = pa.field("writer_schema", pa.int64())
"""A further column of bronze where values name it: the registry's id of their schema."""

_PLACE = ("topic", "partition", "offset")
_BATCH_ROWS = 65_536
_EXACTLY: Final = Context(MAX_PREC, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[Overflow])


def bronze_schema(*, has_registry: bool = False, has_ids: bool = False) -> pa.Schema:
    """Return the columns of a source's bronze; `has_ids`: records of some source may have ids."""
    writer_schema = [WRITER_SCHEMA] if has_registry else []
    ids = [ID] if has_ids else []
    return pa.schema([*BRONZE, *writer_schema, *TENANT, *ids, REDRIVEN_FROM, RECORD_BYTES])


class Reason(str, Enum):
    """The reason why a record is quarantined: the first that applies, in this order."""

    TOO_LARGE = "too_large"
    UNDECODABLE = "undecodable"
    NO_KEY = "no_key"
    NO_TENANT = "no_tenant"
    NO_EVENT_TIME = "no_event_time"
    EVENT_TIME_IN_FUTURE = "event_time_in_future"


FORGOTTEN: Final = "forgotten"
"""Detail of a refused record that was erased because its key was forgotten."""


@dataclass(frozen=True)
class ReadingRules:
    """Rules by which a source's records are read; paths are field names from the outermost in.

    Of several paths of one thing, the first counts that leads to something but null.
    """

    event_times: tuple[Path, ...]
    """Paths of the event time; none for Kafka's own timestamp of the record."""
    max_future_ms: int
    keys: tuple[tuple[Path, ...], ...] = ()
    """Paths of each part of the merge key; none where the record was sent with it."""
    key_header: str | None = None
    """Name of the header that a record is sent with as its key; None for the Kafka key."""
    heartbeat: tuple[tuple[str, ...], str | int | float | bool] | None = None
    schema: ValueSchema | AvroSchema | None = None
    unit: str = "ms"
    """Unit of an event time that is a number, one of `MILLISECONDS_PER_UNIT`."""
    skips_tombstones: bool = False
    """True where a record without a value is passed over, not refused."""
    where: tuple[tuple[str, ...], str | int | float | bool] | None = None
    """Path and value of the source's own records. Any other is a heartbeat, or is passed over."""
    leaves_undecodable: bool = False
    """True where another source of the topic refuses what cannot be decoded."""
    tenant: Path | None = None
    """Path of the tenant; None without tenants. A heartbeat without one is nobody's."""
    reads_text: bool = False
    """True where a number in a string is an event time in the `unit`."""
    zone: str | None = None
    """Time zone of an event time that names none; None for UTC."""
    max_record_bytes: int = MAX_RECORD_BYTES
    """Maximum bytes of a value that is kept, and of key and headers together."""
    id: Path | None = None
    """Path of a record's id; empty where it has none, None where no source has: no column `ID`."""

    @property
    def unit_exponent(self) -> int:
        """Milliseconds of the `unit`, as a power of ten."""
        return MILLISECONDS_PER_UNIT[self.unit]


_Text: TypeAlias = "str | None"
_Read: TypeAlias = "tuple[_Text, int | None, bool, _Text, _Text, _Text, _Text]"
"""Merge key, event time in ms, whether it is a heartbeat, reason and detail, tenant, and id."""

_SKIPPED: _Read = (None, None, False, None, None, None, None)
_Find: TypeAlias = Callable[[dict[str, Any]], Any]

_READ: Final = pa.schema([*BRONZE, *TENANT, ID])
"""The columns of a record that was read, but for those that its bytes and headers give."""
_READ_TYPES: Final = [pa.string(), pa.timestamp("ms", "UTC"), pa.bool_(), *[pa.string()] * 4]

_TOO_LARGE: Final = "too_large"
"""A column of records to read: why one is too large to be read, or null."""


class _RefusedError(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason = reason
        self.detail = detail


def read_records(kafka: pa.Table | pa.RecordBatch, rules: ReadingRules) -> pa.Table:
    """Read every record under the rules.

    Each row of `KAFKA` columns becomes one row of bronze's columns, in the same order:

    - A record that was read has an event time and either a merge key or, as a heartbeat, none.
      `reason` and `detail` are null.
    - A refused record has `reason` (a value of `Reason`) and `detail` (one sentence), neither key
      nor event time, and is no heartbeat. One that is too large has no value, and neither key nor
      headers where it is these that are too large.
    - A skipped tombstone has no key, no event time and no reason.

    `tenant` is null only for a record that was refused or skipped, and for a heartbeat of no
    tenant; it is empty for every other record where there are no tenants. Where values name the
    schema that they were written with, the rows also have the column `WRITER_SCHEMA`; where records
    may have ids, `ID`.

    No record raises an error, whatever its bytes. What `AvroSchema.writers` raises for an id passes
    through.
    """
    read = column_reader(rules)
    look = _look(rules)
    table = pa.Table.from_batches([kafka]) if isinstance(kafka, pa.RecordBatch) else kafka
    table = _without_large(table, rules.max_record_bytes)
    batches = [
        _read_batch(batch, read, look, rules) if read else _read_one_by_one(batch, look, rules)
        for batch in table.to_batches(max_chunksize=_BATCH_ROWS)
    ]
    bronze = pa.Table.from_batches(batches, _READ)
    if rules.id is None:
        bronze = bronze.drop_columns([ID.name])
    bronze = bronze.append_column(REDRIVEN_FROM, _redriven_from(table))
    bronze = bronze.append_column(RECORD_BYTES, pa.array(record_bytes(table), RECORD_BYTES.type))
    if not isinstance(rules.schema, AvroSchema) or rules.schema.writers is None:
        return bronze
    frames = pc.binary_slice(table["value"], 0, FRAME)
    ids = [schema_id_of(frame) for frame in frames.to_pylist()]
    return bronze.add_column(len(BRONZE), WRITER_SCHEMA, pa.array(ids, WRITER_SCHEMA.type))


def _redriven_from(kafka: pa.Table) -> pa.Array:
    headers = one_chunk(kafka["headers"])
    says = pc.equal(headers.flatten().field("key"), REDRIVEN).fill_null(False)
    redriven: list[int | None] = [None] * kafka.num_rows
    for row in pc.unique(headers.value_parent_indices().filter(says)).to_pylist():
        topic, partition, offset = (kafka[name][row].as_py() for name in _PLACE)
        own_headers = [(header["key"], header["value"]) for header in headers[row].as_py()]
        claim = redriven_offset(topic, partition, offset, own_headers)
        redriven[row] = None if claim is None else claim[0]
    return pa.array(redriven, REDRIVEN_FROM.type)


def record_bytes(kafka: pa.Table) -> Int64s:
    """Return how many bytes key, value and headers of each record have."""
    return lengths(kafka["value"]) + _bytes_beside_values(kafka)


def _bytes_beside_values(kafka: pa.Table) -> Int64s:
    headers = one_chunk(kafka["headers"])
    total = lengths(kafka["key"])
    parents = int64s(headers.value_parent_indices())
    flat = headers.flatten()
    for name in ("key", "value"):
        np.add.at(total, parents, lengths(flat.field(name)))
    return total


def _without_large(kafka: pa.Table, max_bytes: int) -> pa.Table:
    # With a further column, `_TOO_LARGE`.
    values = lengths(kafka["value"])
    others = _bytes_beside_values(kafka)
    is_wide = others > max_bytes
    is_large = (values > max_bytes) | (others > max_bytes)
    too_large: list[str | None] = [None] * len(kafka)
    for row in np.flatnonzero(is_large).tolist():
        beside = f", key and headers {others[row]}" if is_wide[row] else ""
        has = f"the value has {values[row]} bytes{beside}"
        too_large[row] = f"{has}; kafka.max_record_bytes is {max_bytes}"
    for name, is_gone in (("value", is_large), ("key", is_wide), ("headers", is_wide)):
        if is_gone.any():
            at = kafka.schema.get_field_index(name)
            column = _with_nulls(kafka[name], is_gone)
            kafka = kafka.set_column(at, kafka.schema.field(name), column)
    return kafka.append_column(_TOO_LARGE, pa.array(too_large, pa.string()))


def _with_nulls(column: pa.ChunkedArray, is_null: Booleans) -> pa.ChunkedArray:
    # What these rows have is not copied: `take` and `if_else` would make room for it.
    null = pa.nulls(1, column.type)
    chunks = []
    end = 0
    for chunk in column.chunks:
        begin, end = end, end + len(chunk)
        parts = []
        kept_from = 0
        for row in np.flatnonzero(is_null[begin:end]).tolist():
            parts += [chunk.slice(kept_from, row - kept_from), null]
            kept_from = row + 1
        chunks.append(pa.concat_arrays([*parts, chunk.slice(kept_from)]) if parts else chunk)
    return pa.chunked_array(chunks, column.type)


def merge_keys(kafka: pa.Table, rules: ReadingRules) -> pa.Array:
    """Return each record's merge key (null: none), whatever else is wrong; `kafka` has `KEYED_BY`,
    and the partition and offset, by which a value's schema may be found.

    Raises what `read_records` raises.
    """
    decode = _decoder(rules, is_checked=False)
    key_of = _key_reader(rules)

    def merge_key(key: bytes | None, value: bytes | None, *place: int) -> str | None:
        try:
            with in_turn(len(value or b"")):
                return key_of(decode(value, *place) if rules.keys else {}, value, key)
        except (UndecodableError, _RefusedError):
            return None

    keys = sent_keys(kafka, rules.key_header).to_pylist()
    places = _places(kafka, rules)
    return pa.array(map(merge_key, keys, kafka["value"].to_pylist(), *places), pa.string())


def _places(kafka: pa.Table | pa.RecordBatch, rules: ReadingRules) -> list[list[int]]:
    # What the decoder of Avro needs beside the values.
    names = ("partition", "offset") if isinstance(rules.schema, AvroSchema) else ()
    return [kafka.column(name).to_pylist() for name in names]


def _read_batch(
    kafka: pa.RecordBatch, read: ColumnReader, look: Callable[..., _Read], rules: ReadingRules
) -> pa.RecordBatch:
    fast = read(kafka, _kafka_times_ms(kafka))
    nothing = pa.nulls(kafka.num_rows, pa.string())
    found = [fast.merge_key, fast.event_time, fast.heartbeat]
    columns = [*found, nothing, nothing, fast.tenant, fast.id]
    is_left = pc.or_(pa.array(fast.is_left), kafka.column(_TOO_LARGE).is_valid())
    if is_left.true_count:
        left = kafka if is_left.true_count == len(kafka) else kafka.filter(is_left)
        others = _read_one_by_one(left, look, rules)
        columns = [
            pc.replace_with_mask(column, is_left, other)
            for column, other in zip(columns, others.columns[len(KAFKA) :], strict=True)
        ]
    return pa.RecordBatch.from_arrays([*kafka.select(KAFKA.names).columns, *columns], schema=_READ)


def _kafka_times_ms(kafka: pa.RecordBatch) -> Int64s:
    times_us = kafka.column("kafka_timestamp").cast(pa.int64())
    return int64s(pc.divide(pc.fill_null(times_us, -1000), 1000))


def _read_one_by_one(
    kafka: pa.RecordBatch, look: Callable[..., _Read], rules: ReadingRules
) -> pa.RecordBatch:
    # Numpy is five times as fast here as to_pylist().
    large, keys, values = (
        column.to_numpy(zero_copy_only=False).tolist()
        for column in (
            kafka.column(_TOO_LARGE),
            sent_keys(kafka, rules.key_header),
            kafka.column("value"),
        )
    )
    times_ms = _kafka_times_ms(kafka).tolist()
    records = map(look, large, keys, values, times_ms, *_places(kafka, rules))
    read = list(zip(*records, strict=True)) or [()] * len(_READ_TYPES)
    columns = [*kafka.select(KAFKA.names).columns, *map(pa.array, read, _READ_TYPES)]
    return pa.RecordBatch.from_arrays(columns, _READ.names).cast(_READ)


# -- one record


def _look(rules: ReadingRules) -> Callable[..., _Read]:
    # The function's arguments are why the record is too large (else None), the key that it was sent
    # with (`sent_keys`), its value, Kafka's timestamp in ms, and with Avro partition and offset.
    parse = _parser(rules)
    key_of = _key_reader(rules)
    event_time_of = _event_time_reader(rules)
    tenant_of = _text_reader(rules, rules.tenant)
    id_of = _text_reader(rules, rules.id)
    is_heartbeat = _test(rules.heartbeat)

    def look(
        too_large: str | None, key: bytes | None, value: bytes | None, kafka_time: int, *place: int
    ) -> _Read:
        if too_large is not None and not rules.leaves_undecodable:
            return _refused(Reason.TOO_LARGE, too_large)
        if too_large is not None or (value is None and rules.skips_tombstones):
            return _SKIPPED
        is_own = False
        try:
            with in_turn(len(value or b"")):
                document, is_own = parse(value, *place)
                is_marked = is_heartbeat is not None and is_heartbeat(document)
                is_beat = is_marked or not is_own
                merge_key = None if is_beat else key_of(document, value, key)
                tenant = tenant_of(document, value, None if is_marked else Reason.NO_TENANT)
                event_time = event_time_of(document, value, kafka_time)
                record_id = None if is_beat else id_of(document, value)
        except UndecodableError as error:
            return _refused(Reason.UNDECODABLE, str(error))
        except _RefusedError as error:
            return _refused(error.reason, error.detail) if is_own else _SKIPPED
        if tenant is None and not is_beat:
            tenant = NO_TENANT
        return merge_key, event_time, is_beat, None, None, tenant, record_id

    return look


def _parser(rules: ReadingRules) -> Callable[..., tuple[dict[str, Any], bool]]:
    # The function returns a value's document, and whether it is the source's own record. It raises
    # _RefusedError where another source refuses the value.
    decode = _decoder(rules)
    is_own = _test(rules.where)
    if is_own is None:
        return lambda value, *place: (decode(value, *place), True)
    decode_any = _decoder(rules, is_checked=False)

    def parse(value: bytes | None, *place: int) -> tuple[dict[str, Any], bool]:
        try:
            document = decode_any(value, *place)
        except UndecodableError as error:
            if rules.leaves_undecodable:
                raise _RefusedError(Reason.UNDECODABLE, str(error)) from None
        else:
            if not is_own(document):
                return document, False
        return decode(value, *place), True

    return parse


def _refused(reason: Reason, detail: str) -> _Read:
    return None, None, False, reason.value, detail, None, None


def _key_reader(rules: ReadingRules) -> Callable[[dict[str, Any], bytes | None, bytes | None], str]:
    if not rules.keys:
        name = "the Kafka key" if rules.key_header is None else f"the header `{rules.key_header}`"
        return lambda _document, _value, key: _sent_key(key, name)
    finders = [(_finder(rules, paths, as_text), paths) for paths in rules.keys]

    return lambda document, value, _key: json_text.key_text(
        [_required(find(document), paths, value, Reason.NO_KEY) for find, paths in finders]
    )


def _event_time_reader(rules: ReadingRules) -> Callable[[dict[str, Any], bytes | None, int], int]:
    if not rules.event_times:
        return lambda _document, _value, kafka_time: _kafka_event_time(kafka_time)
    is_ms = rules.unit_exponent == 0
    zone = time_zone(rules.zone) if rules.zone else timezone.utc
    of_avro = partial(_avro_time, exponent=rules.unit_exponent, zone=zone)
    time_of = _finder(rules, rules.event_times, of_avro)

    def event_time_of(document: dict[str, Any], value: bytes | None, kafka_time: int) -> int:
        event_time = time_of(document)
        if not is_ms or type(event_time) is not int or not 0 <= event_time <= LAST_EVENT_TIME_MS:
            event_time = _event_time(event_time, value, rules, zone)
        if kafka_time >= max(0, event_time - rules.max_future_ms):
            return event_time
        own = "Kafka's own timestamp of the record"
        detail = f"{own} is {kafka_time}: nothing vouches for its event time"
        if kafka_time >= 0:
            ahead = event_time - kafka_time
            detail = f"{ahead} ms after {own}; merge.max_future is {rules.max_future_ms} ms"
        raise _RefusedError(Reason.EVENT_TIME_IN_FUTURE, detail)

    return event_time_of


def _text_reader(rules: ReadingRules, path: Path | None) -> Callable[..., str | None]:
    # The function finds the text at a path, if there is one: a record may have none where no reason
    # for its refusal is given.
    paths = (path or (),)
    find = _finder(rules, paths, as_text)

    def text_of(
        document: dict[str, Any], value: bytes | None, reason: Reason | None = None
    ) -> str | None:
        if not path:
            return None
        if reason is None:
            return _text(find(document), paths, value)
        return _required(find(document), paths, value, reason)

    return text_of


def _test(
    condition: tuple[tuple[str, ...], str | int | float | bool] | None,
) -> Callable[[dict[str, Any]], bool] | None:
    if condition is None:
        return None
    path, expected = condition
    find = json_text.finder(path)

    return lambda document: json_text.is_same(find(document), expected)


def _finder(rules: ReadingRules, paths: Sequence[Path], of_avro: Callable[[Any], Any]) -> _Find:
    find = json_text.first_finder(paths)
    if not isinstance(rules.schema, AvroSchema):
        return find
    return lambda document: of_avro(find(document))


def _decoder(rules: ReadingRules, *, is_checked: bool = True) -> Callable[..., Any]:
    if isinstance(rules.schema, AvroSchema):
        return rules.schema.decoder()
    if rules.schema is None or not is_checked:
        return partial(json_text.parse_object, violation=None)
    return partial(json_text.parse_object, violation=rules.schema.validator())


def _sent_key(key: bytes | None, name: str) -> str:
    if not key:
        raise _RefusedError(Reason.NO_KEY, f"{name} is {'missing' if key is None else 'empty'}")
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise _RefusedError(Reason.NO_KEY, f"{name} is not UTF-8") from None


def _required(field_value: Any, paths: Sequence[Path], value: bytes | None, reason: Reason) -> str:
    text = _text(field_value, paths, value)
    if text is None:
        raise _RefusedError(reason, f"{paths_text(paths)} is {json_text.kind(field_value)}")
    return text


def _text(field_value: Any, paths: Sequence[Path], value: bytes | None) -> str | None:
    if isinstance(field_value, str) and field_value:
        return field_value
    if isinstance(field_value, bool):
        return "true" if field_value else "false"
    if isinstance(field_value, (int, float)):
        return json_text.number_text(field_value, paths, value)
    return None


def _kafka_event_time(kafka_time: int) -> int:
    if 0 <= kafka_time <= LAST_EVENT_TIME_MS:
        return kafka_time
    fault = f"{kafka_time}, which is none" if kafka_time < 0 else "after the year 9999"
    raise _RefusedError(Reason.NO_EVENT_TIME, f"Kafka's own timestamp of the record is {fault}")


def _event_time(field_value: Any, value: bytes | None, rules: ReadingRules, zone: tzinfo) -> int:
    # A number times 10 ** `exponent` is epoch ms. A string is ISO 8601, in `zone` where it names
    # none; with `reads_text` it may be a number, too.
    paths = rules.event_times
    exponent = rules.unit_exponent
    event_time: int | None = None
    if isinstance(field_value, timedelta):  # since 1970, of Avro
        field_value = event_time = field_value // timedelta(milliseconds=1)
    elif isinstance(field_value, str):
        if rules.reads_text and _NUMBER.fullmatch(field_value):
            event_time = _whole(float(field_value), field_value, exponent)
        else:
            event_time = parse_iso_8601(field_value, zone)
    elif type(field_value) is int:
        event_time = field_value * 10 ** max(exponent, 0) // 10 ** max(-exponent, 0)
    elif isinstance(field_value, float):
        spelled = json_text.number_text(field_value, paths, value)
        event_time = _whole(field_value, spelled, exponent)
    if event_time is None:
        is_text = isinstance(field_value, str)
        what = f"not an ISO 8601 time: {field_value[:100]!r}" if is_text else ""
        fault = what or json_text.kind(field_value)
    elif event_time < 0:
        fault = f"before 1970: {str(field_value)[:100]}"
    elif event_time > LAST_EVENT_TIME_MS:
        fault = f"after the year 9999: {str(field_value)[:100]}"
    else:
        return event_time
    raise _RefusedError(Reason.NO_EVENT_TIME, f"{paths_text(paths)} is {fault}")


def _avro_time(field_value: Any, exponent: int, zone: tzinfo) -> Any:
    # A time is one whatever the unit of numbers is; without a zone, it is one of `zone`, and so is
    # a date's midnight.
    if isinstance(field_value, datetime):
        is_local = field_value.tzinfo is LOCAL
        return (field_value.replace(tzinfo=zone) if is_local else field_value) - EPOCH
    if isinstance(field_value, date):
        return datetime(field_value.year, field_value.month, field_value.day, tzinfo=zone) - EPOCH
    if not isinstance(field_value, (float, Decimal)):
        return field_value
    if field_value != field_value:  # not a number
        return as_text(field_value)
    return timedelta(milliseconds=_whole(float(field_value), str(field_value), exponent))


_NUMBER: Final = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


def _whole(number: float, text: str, exponent: int) -> int:
    # Taken from the number's text: a double would round a long fraction up. -1 stands for what is
    # below 0.
    try:
        exact = Decimal(text).scaleb(exponent, _EXACTLY)
    except ArithmeticError:  # an exponent of twenty digits: zero or infinite, as the double is too
        exact = Decimal(number)
    return -1 if exact < 0 else int(min(exact, Decimal(LAST_EVENT_TIME_MS + 1)))
