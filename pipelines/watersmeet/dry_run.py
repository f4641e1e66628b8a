"""Dry run: applies a configuration's rules to records, without Kafka and without a lake.

The records are written as bronze of a lake in a temporary folder, and silver merges them there.
With `close`, time goes on after the last record until every merge record has timed out, as if every
source sent a heartbeat from far ahead.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, Final, NamedTuple, TypeAlias

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.audit.validate import check_expressions
from watersmeet.avro_json import UnencodableError, encoder
from watersmeet.configuration.file import known_instead
from watersmeet.core import sequence as sequences
from watersmeet.core.columns import row_values
from watersmeet.core.corrections import as_silver
from watersmeet.core.idle import IdleDecision
from watersmeet.core.inputs import InputId, input_of_part, of_source
from watersmeet.core.plan import Cursor, TopicPartition
from watersmeet.core.reading import KAFKA, read_records
from watersmeet.core.sequence import CORRECTED, ID, LATE, MERGED, SEQ, VERSION
from watersmeet.core.sequence import TENANT as TENANT_HEADER
from watersmeet.core.silver import with_status
from watersmeet.core.times import epoch_ms
from watersmeet.core.types import DUE, TENANT
from watersmeet.engine.choice import create_tables, open_engine
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.history import Generation, generation_body
from watersmeet.lake.identity import begin_epoch
from watersmeet.lake.inputs import topic_partition
from watersmeet.lake.journal import BEGIN, decide
from watersmeet.lake.location import OPENED_BY_DELTA_RS, Lake
from watersmeet.lake.table_reader import normalise
from watersmeet.lake.views import views
from watersmeet.running.lake_sequence import values_under
from watersmeet.running.owner import Owner
from watersmeet.settings import KeepSettings, Settings, load_settings
from watersmeet.silver import Silver

LARGEST_PARTITION: Final = 2**31 - 1
LARGEST_TIME_MS: Final = 2**53

_FIELDS: Final = ["source", "partition", "key", "value", "timestamp", "headers"]
_RECORD: Final = ("merge_key", *TENANT.names, "event_time")
"""Columns of a record that is not published."""

RecordPlace: TypeAlias = tuple[InputId, int, int]
"""Input, partition and offset of a record."""

_Sent: TypeAlias = tuple[str, int, "bytes | Mapping[str, Any]"]
"""Place of a record, its number, and the line or the object that it is."""


def try_file(
    configuration: Settings | Path | str, file: Path, *, close: bool = True
) -> dict[str, Any]:
    """Return `try_records` of a file with a JSON object in each line, `line` its number there.

    Blank lines are skipped. A value that is an object is sent as compact JSON, with its numbers as
    they are spelled, and text as it is.
    """
    return _tried(configuration, _lines(file), close=close)


def try_records(
    configuration: Settings | Path | str,
    records: Iterable[Mapping[str, Any]],
    *,
    close: bool = True,
) -> dict[str, Any]:
    """Return what a configuration makes of some records, in the order in which they came.

    `configuration`: its file, or what `load_settings` made of it.

    A record has `source` and `value` (an object; text or bytes, which are sent as they are; None
    for a tombstone). It may have `partition` (default 0), `key` (text), `timestamp` (Kafka's own,
    epoch ms; without it `max_future` refuses nothing) and `headers` (a mapping). Offsets are
    numbered by topic-partition, `line` by record from 1 on. `close`: time goes on at the end until
    all merge records have timed out. Without it, open records stay open, and records that wait for
    the clock keep waiting.

    The answer is that of `try --json`, with times in epoch ms:

    - `clocks`: the clock of each partition at the last record.
    - `records`: the merge records in order of (partition, event time, key), with `at_end` where
      only the end has timed them out.
    - `messages`: the messages as they would be sent, in order, without the headers for recovery.
      Bytes of a value that are not UTF-8 are shown as `\\xff`.
    - `late`, `duplicates`, `quarantined` and `waiting`: records in the order in which they came.
      With tenants, those that wait for their tenant's clock have a `position`. A duplicate has its
      `id`, in `of_offset` the offset of the part that counts, and `is_late`.
    - `excess`: records of merge records that are too large.
    - `corrections`: the messages of corrections, in order, each with `version` and the record that
      made it (`late`). A null value takes back what was sent.
    - `too_many`: those of the late records that correct nothing, since their merge record has as
      many versions as it may, or is too large, or would be with them.
    - `read`: by source, how many records there were, and how many of them were heartbeats or
      skipped tombstones.

    Raises ConfigurationError if the configuration or a record is not what it should be.
    """
    numbered = ((f"record {n}", n, record) for n, record in enumerate(records, 1))
    return _tried(configuration, numbered, close=close)


class SentRecord(NamedTuple):
    """A record as it is sent to Kafka; `timestamp_ms`: None where Kafka sets it."""

    topic: str
    partition: int
    timestamp_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, str | bytes | None]]


def records_of_file(settings: Settings, file: Path) -> Iterator[tuple[str, SentRecord]]:
    """Yield the records of a file, as `try_file` takes it, each with its place there."""
    for place, _, record in _checked_records(settings, _lines(file)):
        yield place, record


def _lines(file: Path) -> list[_Sent]:
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigurationError(
            f"cannot be read ({error.strerror})",
            where=file,
            fix="name a file with a JSON object in each line",
        ) from None
    return [(f"{file}, line {n}", n, text) for n, text in enumerate(lines, 1) if text.strip()]


def _tried(
    configuration: Settings | Path | str, sent: Iterable[_Sent], *, close: bool
) -> dict[str, Any]:
    settings = configuration
    if not isinstance(settings, Settings):
        settings = load_settings(Path(settings))
    settings = _without_registries(settings)
    for what, where, fix in check_expressions(settings):
        raise ConfigurationError(what, where=where, fix=fix)
    rows: dict[InputId, list[tuple[Any, ...]]] = {i: [] for i in settings.inputs}
    lines: dict[RecordPlace, int] = {}
    offsets: Counter[tuple[str, int]] = Counter()
    for _, number, record in _checked_records(settings, sent):
        topic, partition, time_ms, *fields = record
        # The largest time is after every event time.
        kafka_time = (LARGEST_TIME_MS if time_ms is None else time_ms) * 1000
        offset = offsets[topic, partition]
        offsets[topic, partition] += 1
        for reader in (i for i in settings.inputs if i.topic == topic):
            lines[reader, partition, offset] = number
            rows[reader].append((topic, partition, offset, kafka_time, 0, *fields))
    return DryRun(settings, _bronze(settings, rows), lines).run(close=close)


def _without_registries(settings: Settings) -> Settings:
    # Values are encoded with the source's own schema.
    sources = {
        name: source.changed(registry=None) if source.registry else source
        for name, source in settings.sources.items()
    }
    return settings.model_copy(update={"sources": sources})


# -- what is sent


def _checked_records(
    settings: Settings, sent: Iterable[_Sent]
) -> Iterator[tuple[str, int, SentRecord]]:
    encoders = {
        name: partial(_avro, encoder(source.avro_schema.text))
        for name, source in settings.sources.items()
        if source.avro_schema
    }
    for place, number, record in sent:
        try:
            parsed = _parsed(record) if isinstance(record, bytes) else record
            yield place, number, _checked(parsed, settings, encoders)
        except ConfigurationError as error:
            raise ConfigurationError(*error.problem._replace(where=place)) from None


def _wrong(what: str, fix: str) -> ConfigurationError:
    return ConfigurationError(what, fix=fix)


def _parsed(text: bytes) -> Mapping[str, Any]:
    # The value is text as it is sent, or null.
    try:
        parsed = json.loads(text, parse_constant=_no_constant)
        if isinstance(parsed, dict) and not isinstance(parsed.get("value"), (str, type(None))):
            spelled = json.loads(text, parse_int=orjson.Fragment, parse_float=orjson.Fragment)
            parsed["value"] = orjson.dumps(spelled["value"]).decode()
    except (ValueError, TypeError, RecursionError) as error:
        raise _wrong(
            f"is no strict JSON ({error})", f"write an object such as {_EXAMPLE}"
        ) from None
    if not isinstance(parsed, dict):
        raise _wrong("is no JSON object", f"write one such as {_EXAMPLE}")
    return parsed


_EXAMPLE: Final = '{"source": "tracking", "value": {"ts": 0}}'


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _checked(
    record: Mapping[str, Any], settings: Settings, encoders: Mapping[str, Callable[..., Any]]
) -> SentRecord:
    for field in record:
        if field not in _FIELDS:
            raise _wrong(f"unknown field `{field}`", known_instead(str(field), _FIELDS))
    name = record.get("source")
    inputs = settings.inputs_by_name
    partition = record.get("partition", 0)
    time_ms = record.get("timestamp")
    if not isinstance(name, str) or name not in inputs:
        what = "is no source"
        instead = known_instead(str(name), list(inputs))
        if str(name) in settings.sources:
            what = "has several topics"
            example = settings.input_names[of_source(settings.inputs, str(name))[0]]
            instead = f"name one, such as `{example}`"
        raise _wrong(f"`source` is `{name}`, which {what}", instead)
    source, topic = inputs[name]
    if "value" not in record:
        raise _wrong("`value` is missing", "add it, null for a tombstone")
    if type(partition) is not int or not 0 <= partition <= LARGEST_PARTITION:
        raise _wrong(
            f"`partition` is `{partition}`", f"write a whole number from 0 to {LARGEST_PARTITION}"
        )
    if time_ms is not None and (type(time_ms) is not int or not 0 <= time_ms <= LARGEST_TIME_MS):
        raise _wrong(
            f"`timestamp` is `{time_ms}`", "write whole milliseconds since 1970, or leave it out"
        )
    readers = [i.source for i in settings.inputs if i.topic == topic]
    if time_ms is None and any(settings.sources[reader].time is None for reader in readers):
        raise _wrong(
            "`timestamp` is missing, which is the event time", "add it, in milliseconds since 1970"
        )
    headers = _headers(record.get("headers") or {})
    key = _bytes("key", record.get("key"))
    encode = encoders.get(source, partial(_bytes, "value"))
    return SentRecord(topic, partition, time_ms, key, encode(record["value"]), headers)


def _headers(headers: object) -> list[tuple[str, str | bytes | None]]:
    if not isinstance(headers, Mapping):
        raise _wrong("`headers` are no object", 'write them as {"name": "text"}')
    sent = list[tuple[str, str | bytes | None]]()
    for name, value in headers.items():
        _bytes("headers", str(name))  # raises where it is no text
        sent.append((str(name), _bytes("headers", value)))
    return sent


def _avro(encode: Callable[[Any], bytes], value: object) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    try:
        return encode(json.loads(value, parse_float=Decimal) if isinstance(value, str) else value)
    except UnencodableError as error:
        raise _wrong(error.what, error.fix) from None
    except ValueError:
        raise _wrong(
            "`value` is text that is no JSON, and the source's values are Avro", "write an object"
        ) from None


def _bytes(name: str, value: object) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    try:
        if not isinstance(value, str):
            value = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return value.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise _wrong(f"`{name}` cannot be sent ({error})", "write it as text") from None


def _bronze(settings: Settings, rows: Mapping[InputId, list[tuple[Any, ...]]]) -> pa.Table:
    records = []
    for (source, _), input_rows in rows.items():
        named = [dict(zip(KAFKA.names, row, strict=True)) for row in input_rows]
        kafka = pa.Table.from_pylist(named, KAFKA)
        read = read_records(kafka, settings.reading_rules(source))
        records.append(read.append_column("source", pa.repeat(pa.scalar(source), len(read))))
    return pa.concat_tables(records)


# -- what comes out


def _temporary_folder() -> TemporaryDirectory[str]:
    try:
        return TemporaryDirectory(prefix="watersmeet-")
    except OSError as error:
        raise ConfigurationError(
            f"there is no place for a temporary folder ({error.strerror})",
            fix="set TMPDIR to a folder that can be written to",
        ) from None


@contextmanager
def _silver(settings: Settings, bronze: pa.Table, partitions: Sequence[int]) -> Iterator[Silver]:
    # Of a lake that has begun, and has these records in bronze.
    with _temporary_folder() as folder:
        own = {"lake": folder, "engine": "embedded", "durable": False, "keep": KeepSettings()}
        settings = settings.model_copy(update=own)
        if Lake(settings).needs_spark:
            raise ConfigurationError(
                f"there is no place for a temporary folder in {gettempdir()}",
                fix=f"set TMPDIR to a folder whose path is {OPENED_BY_DELTA_RS}",
            )
        engine = open_engine(settings)
        create_tables(engine)
        begin_epoch(engine.reader, engine.append, settings, 0)
        starts = {TopicPartition(i, p): 0 for i in settings.inputs for p in partitions or [0]}
        body = generation_body(Generation(0, 0, starts, {}))
        decide(engine.reader, engine.append, BEGIN, lambda: body, 0)
        for source in settings.sources:
            its = bronze.filter(pc.equal(bronze["source"], source))
            engine.append(tables.bronze(source), its)
        yield Silver(Owner(engine), settings, len(partitions))


@dataclass(frozen=True)
class DryRun:
    """A dry run of some records.

    `bronze`: the records, with the column `source`. `lines`: the line of each.
    """

    settings: Settings
    bronze: pa.Table
    lines: Mapping[RecordPlace, int]

    def run(self, *, close: bool) -> dict[str, Any]:
        """Return what `try_records` does."""
        partitions = sorted({partition for _, partition, _ in self.lines})
        with _silver(self.settings, self.bronze, partitions) as merging:
            deque(merging.drain(), 0)
            planner = merging.recover()
            last = planner.state
            if close:
                planner.state = last.deciding(self._far_ahead(last.cursors))
                deque(merging.drain(), 0)
            cursors = merging.recover().state.cursors
            columns = tables.silver_columns(self.settings).names
            silver = merging.owner.engine.reader.rows(tables.SILVER, columns)
        silver = silver.sort_by(
            [(name, "ascending") for name in ("partition", "event_time", "tenant", "merge_key")]
        )
        of_correction = views(self.settings)[tables.CORRECTIONS].schema.names
        corrections = with_status(silver, "correction").select(of_correction)
        is_refused = pc.equal(corrections["version"], 0)
        is_merge_record = pc.is_in(silver["status"], pa.array(tables.statuses_of(tables.MERGED)))
        of_duplicate = (*_RECORD, "id", "of_offset", "is_late")
        is_quarantined = pc.is_valid(self.bronze["reason"])
        return {
            "clocks": [{"partition": p, "clock": last.clocks.get(p)} for p in partitions],
            "records": self._records(silver.filter(is_merge_record), last.next_batch),
            "messages": list(self._messages(MERGED, with_status(silver, "timed_out"))),
            "corrections": list(self._messages(CORRECTED, corrections)),
            "late": self._described(with_status(silver, "late"), *_RECORD, "position"),
            "too_many": self._described(as_silver(corrections.filter(is_refused)), *_RECORD),
            "duplicates": self._described(with_status(silver, "duplicate"), *of_duplicate),
            "excess": self._described(with_status(silver, "excess"), *_RECORD),
            "quarantined": self._described(self.bronze.filter(is_quarantined), "reason", "detail"),
            "waiting": self._waiting(cursors, silver),
            "read": {name: self._counts(i) for i, name in self.settings.input_names.items()},
        }

    def _far_ahead(
        self, cursors: Mapping[TopicPartition, Cursor]
    ) -> Iterator[tuple[TopicPartition, IdleDecision]]:
        # A heartbeat after the last record of every topic-partition times everything out.
        rules = self.settings.merge
        newest = pc.max(normalise(self.bronze.select(["event_time"]))["event_time"]).as_py() or 0
        # By then, late records are settled.
        last = newest + rules.longest_ms + 1 + rules.window.gap_ms
        records = Counter(TopicPartition(input_id, p) for input_id, p, _ in self.lines)
        return ((tp, IdleDecision(records[tp] - 1, last)) for tp in cursors)

    # -- the answer's parts

    def _records(self, silver: pa.Table, next_batch: int) -> list[dict[str, Any]]:
        columns = ["partition", "event_time", "last_event_time", "status", "valid"]
        columns += ["invalid_reason", *self._shown(*DUE.names, *TENANT.names)]
        every = ["merge_key", "batch", *columns, *self.settings.sources]
        records = []
        for row in normalise(silver.select(every)).to_pylist():
            at_end = row["batch"] >= next_batch and row["status"] == "timed_out"
            parts = []
            for source in self.settings.sources:
                for part in row[source]:
                    input_id = input_of_part(self.settings.inputs, source, part)
                    place = self._place(input_id, row["partition"], part["offset"])
                    parts.append({**place, "event_time": epoch_ms(part["event_time"])})
            parts.sort(key=itemgetter("event_time"))
            shown = {name: row[name] for name in columns}
            records.append({"key": row["merge_key"], **shown, "at_end": at_end, "parts": parts})
        return records

    def _messages(self, sequence: sequences.Sequence, rows: pa.Table) -> Iterator[dict[str, Any]]:
        for name, value in sequence.with_message.items():
            rows = rows.filter(pc.equal(rows[name], value))
        for partition in sorted(pc.unique(rows["partition"]).to_pylist()):
            its = sequence.in_order(rows.filter(pc.equal(rows["partition"], partition)))
            values, _ = values_under(self.settings, sequence, its)
            made, _ = sequence.messages(its, values, None)
            for row in made.to_pylist():
                headers = {header["key"]: header["value"].decode() for header in row["headers"]}
                place = {"partition": partition, "seq": int(headers[SEQ]), "id": headers[ID]}
                if LATE in headers:  # a correction
                    source, topic, _, offset = headers[LATE].split("/")
                    late = self._place(InputId(source, topic), partition, int(offset))
                    place |= {"version": int(headers[VERSION]), "late": late}
                for name in self._shown(*TENANT.names):
                    place[name] = headers.get(TENANT_HEADER, "")
                sent = {"key": row["key"].decode(), "timestamp": row["timestamp"]}
                value = row["value"]
                text = None if value is None else value.decode(errors="backslashreplace")
                yield {**place, **sent, "value": text}

    def _waiting(
        self, cursors: Mapping[TopicPartition, Cursor], silver: pa.Table
    ) -> list[dict[str, Any]]:
        of_silver = normalise(with_status(silver, "waiting"))
        names = ("source", "topic", "partition", "offset", "position")
        positions = {tuple(place): at for *place, at in row_values(of_silver, *names)}
        rows = self.bronze.filter(pc.is_valid(self.bronze["merge_key"]))
        waiting = []
        for row in self._described(rows, *_RECORD):
            place = tuple(row[name] for name in names[:-1])
            if place in positions or row["offset"] >= cursors[topic_partition(row)].next_offset:
                shown = {"position": positions.get(place)} if self._shown("waiting") else {}
                waiting.append(row | shown)
        return waiting

    def _counts(self, input_id: InputId) -> dict[str, int]:
        is_its = (pc.equal(self.bronze[name], text) for name, text in input_id._asdict().items())
        rows = self.bronze.filter(pc.and_(*is_its))
        is_skipped = pc.and_(pc.is_null(rows["event_time"]), pc.is_null(rows["reason"]))
        beats, skipped = (pc.sum(column).as_py() or 0 for column in (rows["heartbeat"], is_skipped))
        return {"records": len(rows), "heartbeats": beats, "skipped": skipped}

    def _described(self, rows: pa.Table, *columns: str) -> list[dict[str, Any]]:
        described = []
        shown = self._shown(*columns)
        every = ["source", "topic", "partition", "offset", *shown]
        for row in normalise(rows.select(every)).to_pylist():
            place = self._place(*topic_partition(row), row["offset"])
            facts = {"key" if name == "merge_key" else name: row[name] for name in shown}
            described.append({**place, **facts})
        return sorted(described, key=itemgetter("line"))

    def _shown(self, *names: str) -> list[str]:
        return [name for name in names if name not in self.settings.hidden_names]

    def _place(self, input_id: InputId, partition: int, offset: int) -> dict[str, Any]:
        place = {**input_id._asdict(), "partition": partition, "offset": offset}
        return {**place, "line": self.lines[input_id, partition, offset]}
