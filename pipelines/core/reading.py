"""Reading records: from the bytes that Kafka holds to a key and an event time, or to the reason why a record is refused.

What is read depends on the record and the rules alone, so the same bytes are read alike in every batch, restart and rebuild.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Any, Final, TypeAlias

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.json_schema import ValueSchema
from pipelines.core.json_text import MAX_DEPTH, UndecodableError, at, is_same, kind, number_text, parse_object
from pipelines.core.times import LAST_EVENT_TIME_MS, parse_iso_8601
from pipelines.core.types import HEADERS, TIME, schema_of

KAFKA: Final = schema_of(
    "topic string, partition int, offset bigint, kafka_timestamp timestamp, timestamp_type int, key binary, value binary"
).append(pa.field("headers", HEADERS))
"""A record's columns as Kafka delivers them; a record without a timestamp has -1 ms."""

BRONZE: Final = pa.schema(
    [*KAFKA, *schema_of("merge_key string, event_time timestamp, heartbeat boolean, reason string, detail string")]
)
"""The columns of `bronze_<source>`: Kafka's, and what was read from the record or why it was refused."""

_BATCH_ROWS = 65_536


class Reason(str, Enum):
    """Why a record is quarantined; the first that applies, in this order."""

    UNDECODABLE = "undecodable"
    NO_KEY = "no_key"
    NO_EVENT_TIME = "no_event_time"
    EVENT_TIME_IN_FUTURE = "event_time_in_future"


@dataclass(frozen=True)
class ReadingRules:
    """How a source's records are read. Paths are field names from the outermost in; `key` None means the Kafka key."""

    event_time: tuple[str, ...]
    max_future_ms: int
    key: tuple[str, ...] | None = None
    heartbeat: tuple[tuple[str, ...], str | int | float | bool] | None = None
    schema: ValueSchema | None = None


_Read: TypeAlias = "tuple[str | None, int, bool]"  # merge key, event time in ms, and whether the record is a heartbeat
_Look: TypeAlias = Callable[["bytes | None", "bytes | None", int], _Read]  # of Kafka's key, value, and timestamp in ms
_Glance: TypeAlias = Callable[["bytes | None", "bytes | None", int], "_Read | None"]  # None: look properly


class _RefusedError(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason, self.detail = reason, detail


def read_records(kafka: pa.Table | pa.RecordBatch, rules: ReadingRules) -> pa.Table:
    """Reads every record under the rules: each row of `KAFKA` columns becomes one row of `BRONZE` columns, in the same order.

    A record that was read has an event time and either a merge key or, as a heartbeat, none; `reason` and `detail` are null.
    A refused record has `reason` (a value of `Reason`) and `detail` (one sentence), neither key nor event time, and is no
    heartbeat. Never raises because of a record, whatever its bytes.
    """
    glance, look = _glance(rules), _look(rules)
    table = pa.Table.from_batches([kafka]) if isinstance(kafka, pa.RecordBatch) else kafka
    read = [_read_batch(batch, glance, look) for batch in table.to_batches(max_chunksize=_BATCH_ROWS)]
    return pa.Table.from_batches(read, BRONZE)


def _read_batch(kafka: pa.RecordBatch, glance: _Glance | None, look: _Look) -> pa.RecordBatch:
    merge_keys: list[str | None] = [None] * kafka.num_rows
    event_times: list[int | None] = [None] * kafka.num_rows
    heartbeats = [False] * kafka.num_rows
    reasons: list[str | None] = [None] * kafka.num_rows
    details: list[str | None] = [None] * kafka.num_rows
    # By way of numpy: five times as fast as to_pylist().
    keys, values = (kafka.column(name).to_numpy(zero_copy_only=False).tolist() for name in ("key", "value"))
    times_ms = pc.divide(pc.fill_null(kafka.column("kafka_timestamp").cast(pa.int64()), -1000), 1000).to_numpy().tolist()
    for row, record in enumerate(zip(keys, values, times_ms, strict=True)):
        try:
            merge_keys[row], event_times[row], heartbeats[row] = (glance and glance(*record)) or look(*record)
        except _RefusedError as error:
            reasons[row], details[row] = error.reason.value, error.detail
    columns = [
        *(kafka.column(name).cast(kind) for name, kind in zip(KAFKA.names, KAFKA.types, strict=True)),
        pa.array(merge_keys, pa.string()),
        pc.multiply(pa.array(event_times, pa.int64()), 1000).cast(TIME),
        pa.array(heartbeats, pa.bool_()),
        pa.array(reasons, pa.string()),
        pa.array(details, pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=BRONZE)


# -- one record


def _look(rules: ReadingRules) -> _Look:
    """The function that decides about any record. It raises _RefusedError."""
    violation = rules.schema.validator() if rules.schema else None

    def look(key: bytes | None, value: bytes | None, kafka_time: int) -> _Read:
        try:
            document = parse_object(value, violation)
        except UndecodableError as error:
            raise _RefusedError(Reason.UNDECODABLE, str(error)) from None
        heartbeat = rules.heartbeat is not None and is_same(at(document, rules.heartbeat[0]), rules.heartbeat[1])
        merge_key = None if heartbeat else _merge_key(rules, key, document, value)
        event_time = _event_time(at(document, rules.event_time), rules.event_time, value)
        # A record without a Kafka timestamp (-1) has nothing that its event time could be compared with.
        if 0 <= kafka_time < event_time - rules.max_future_ms:
            ahead = event_time - kafka_time
            detail = f"{ahead} ms after Kafka's own timestamp of the record; merge.max_future is {rules.max_future_ms} ms"
            raise _RefusedError(Reason.EVENT_TIME_IN_FUTURE, detail)
        return merge_key, event_time, heartbeat

    return look


def _glance(rules: ReadingRules) -> _Glance | None:
    """The quick function that reads plain records just as `_look` does, for rules without a schema, nesting or odd heartbeats."""
    marker_path, marker = rules.heartbeat or (("",), "")
    is_flat = all(len(path) == 1 for path in (rules.event_time, rules.key or ("",), marker_path))
    if rules.schema or not is_flat or type(marker) is not str:
        return None
    loads, max_future = orjson.loads, rules.max_future_ms
    time_name, key_name, marker_name = rules.event_time[0], rules.key and rules.key[0], rules.heartbeat and marker_path[0]

    def glance(key: bytes | None, value: bytes | None, kafka_time: int) -> _Read | None:
        try:
            document = loads(value)  # type: ignore[arg-type]
            event_time = document[time_name]
            if type(event_time) is not int or not 0 <= event_time <= LAST_EVENT_TIME_MS or len(value) > 2 * MAX_DEPTH:  # type: ignore[arg-type]
                return None
            if 0 <= kafka_time < event_time - max_future:
                return None
            if marker_name is not None and document.get(marker_name) == marker:
                return None, event_time, True
            if key_name is None:
                return (key.decode(), event_time, False) if key else None
            found = document[key_name]
        except (LookupError, TypeError, ValueError):
            return None
        if type(found) is int:
            return (str(found), event_time, False) if found else None
        return (found, event_time, False) if type(found) is str and found else None

    return glance


def _merge_key(rules: ReadingRules, key: bytes | None, document: dict[str, Any], value: bytes | None) -> str:
    if rules.key is None:
        if not key:
            raise _RefusedError(Reason.NO_KEY, "the Kafka key is missing" if key is None else "the Kafka key is empty")
        try:
            return key.decode()
        except UnicodeDecodeError:
            raise _RefusedError(Reason.NO_KEY, "the Kafka key is not UTF-8") from None
    found, where = at(document, rules.key), ".".join(rules.key)
    if isinstance(found, str) and found:
        return found
    if isinstance(found, bool):
        return "true" if found else "false"
    if isinstance(found, (int, float)):
        return number_text(found, rules.key, value)
    raise _RefusedError(Reason.NO_KEY, f"{where} is {kind(found)}")


def _event_time(found: Any, path: tuple[str, ...], value: bytes | None) -> int:
    """A number is epoch milliseconds, its fraction cut off; a string is ISO 8601; the year 9999 is the last."""
    where = ".".join(path)
    if isinstance(found, str):
        event_time = parse_iso_8601(found)
        if event_time is None:
            raise _RefusedError(Reason.NO_EVENT_TIME, f"{where} is not an ISO 8601 time: {found[:100]!r}")
    elif isinstance(found, float):
        event_time = _whole(found, number_text(found, path, value))
    elif isinstance(found, int) and not isinstance(found, bool):
        event_time = found
    else:
        raise _RefusedError(Reason.NO_EVENT_TIME, f"{where} is {kind(found)}")
    if event_time < 0:
        raise _RefusedError(Reason.NO_EVENT_TIME, f"{where} is before 1970: {str(found)[:100]}")
    if event_time > LAST_EVENT_TIME_MS:
        raise _RefusedError(Reason.NO_EVENT_TIME, f"{where} is after the year 9999: {str(found)[:100]}")
    return event_time


def _whole(number: float, text: str) -> int:
    """A number without its fraction, from its text: a double would round a long fraction up.

    What is below 0 comes out as -1, what is too late as one more than the last event time.
    """
    try:
        exact = Decimal(text)
    except ArithmeticError:  # an exponent of twenty digits: zero or infinite, as the double is too
        exact = Decimal(number)
    return -1 if exact < 0 else int(min(exact, Decimal(LAST_EVENT_TIME_MS + 1)))
