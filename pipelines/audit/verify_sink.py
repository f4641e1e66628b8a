"""Check 6: the sink has silver's finished, valid records.

They are in order, numbered without a gap, and have the content of their rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.audit.evidence import Evidence, read_table
from pipelines.audit.problems import Findings
from pipelines.audit.verify_evidence import Partition, Row
from pipelines.core.inputs import InputId
from pipelines.core.message import as_read, message_bytes, message_values
from pipelines.core.sequence import (
    FORGOTTEN,
    ID,
    PLAIN,
    SEQ,
    SequenceTail,
    SortKey,
    message_id,
    parse_tail,
)
from pipelines.core.types import TIME
from pipelines.kafka.cluster import Cluster
from pipelines.kafka.reading import Range, read_range
from pipelines.lake import tables
from pipelines.lake.epochs import Epoch, Epochs
from pipelines.lake.published import last_published
from pipelines.lake.table_reader import TableReader
from pipelines.lake.tables import SILVER
from pipelines.settings import Settings

REPAIR_HINT = "name a new topic in publish.topic: gold fills it from silver"

Evaluate: TypeAlias = Callable[[pa.Table, Mapping[str, str]], pa.Table]
"""Function that evaluates the user's SQL expressions over rows of silver.

The expressions are by the name of their column. It returns a row for each row, in their order.
"""

Message: TypeAlias = "tuple[int, int, SequenceTail | None, str, bytes | None, int, bytes | None]"
"""A message of the sink.

Its offset, number, what its headers say (None: they are not ours), id, key, timestamp (ms) and
value.
"""

_NOWHERE = SortKey(PLAIN, b"", -1, b"")


# -- validity and messages of rows of silver


class Validator:
    """Check of rows of silver against the `publish` of their epochs.

    The user's own expressions count where there is something to evaluate them.
    """

    def __init__(
        self, settings: Settings, epochs: Epochs, evaluate: Evaluate | None = None
    ) -> None:
        self.settings = settings
        self.epochs = epochs
        self.evaluate = evaluate
        used = (
            {name for epoch in epochs for name in _expressions(epoch)}
            if evaluate is None
            else set()
        )
        self.unevaluated = [f"publish.{name}" for name in ("valid", "value") if name in used]
        self._knows_messages = "publish.value" not in self.unevaluated

    def evaluated(self, rows: pa.Table) -> pa.Table:
        """Return rows of silver with `holds` and `told`: what the predicate says of them, and their
        message's value.
        """
        numbers = self.epochs.numbers_of(rows["batch"].to_numpy())
        rows_by_epoch = [np.flatnonzero(numbers == i) for i in range(len(self.epochs))]
        evaluated = [
            self._evaluated_in_epoch(rows.take(pa.array(row_numbers)), e)
            for row_numbers, e in zip(rows_by_epoch, self.epochs, strict=True)
            if len(row_numbers)
        ]
        if not evaluated:
            return self._evaluated_in_epoch(rows, self.epochs.current)
        return pa.concat_tables(evaluated).take(
            pa.array(np.argsort(np.concatenate(rows_by_epoch), kind="stable"))
        )

    def _evaluated_in_epoch(self, rows: pa.Table, epoch: Epoch) -> pa.Table:
        """Return `evaluated` for rows that the rules of one epoch have judged, or would judge."""
        sources = epoch.settings.sources
        expressions = _expressions(epoch)
        stored = rows
        for name in ("event_time", "last_event_time"):
            stored = stored.set_column(
                stored.column_names.index(name), name, pc.multiply(rows[name], 1000).cast(TIME)
            )
        holds: Any = pa.repeat(True, rows.num_rows)
        value: Any = None
        if "value" not in expressions:
            value = _values(
                as_read(stored, {name: source.read_type for name, source in sources.items()}),
                list(sources),
            )
        readable = as_read(stored, {name: source.value_type for name, source in sources.items()})
        values = self.evaluate(readable, expressions) if self.evaluate and expressions else None
        if "valid" in expressions:
            holds = (
                pa.nulls(rows.num_rows, pa.bool_())
                if values is None
                else values["valid"].fill_null(False)
            )
        if "value" in expressions:
            value = (
                pa.nulls(rows.num_rows, pa.large_binary())
                if values is None
                else values["value"].cast(pa.large_binary())
            )
        return rows.append_column("holds", holds).append_column("told", value)

    def is_same(self, message: bytes | None, row: Row) -> bool:
        """Return True where a message's value is that of the row, as far as that is known."""
        return message == row.value or not self._knows_messages

    def right(self, row: Row, *, is_closed: bool = False) -> list[tuple[bool | None, str | None]]:
        """Return what `valid` and `invalid_reason` may be: one pair, unless an expression was not
        evaluated.

        `is_closed`: a jump has closed what was valid.
        """
        if row.outcome.status != "timed_out":
            return [(False, "reset") if row.is_finished else (None, None)]
        beside = len(row.outcome.key.encode()), len(row.outcome.tenant.encode())
        fits = (
            message_bytes(len(row.value or b""), *beside)
            <= self.epochs.of(row.batch).settings.publish.max_bytes
        )
        sized: list[tuple[bool | None, str | None]] = (
            [(True, None)] if fits else [(False, "too_large")]
        )
        if not self._knows_messages:
            sized = [(True, None), (False, "too_large")]
        right = [
            *([] if row.holds is False else sized),
            *([] if row.holds else [(False, "predicate")]),
        ]
        return [
            (False, "reset") if is_closed and valid else (valid, reason) for valid, reason in right
        ]


def _expressions(epoch: Epoch) -> dict[str, str]:
    """Return the user's own expressions in an epoch."""
    texts = {"valid": epoch.settings.publish.valid, "value": epoch.settings.publish.value}
    return {name: text for name, text in texts.items() if text is not None and text != "true"}


def _values(rows: pa.Table, sources: Sequence[str]) -> pa.ChunkedArray:
    """Return the default value of each row's message.

    Null for a row that can have none, since something in it is null.
    """
    try:
        return message_values(rows, sources)
    except ValueError:
        if rows.num_rows == 1:
            return pa.chunked_array([pa.nulls(1, pa.large_binary())])
    half = rows.num_rows // 2
    return pa.chunked_array(
        [*_values(rows[:half], sources).chunks, *_values(rows[half:], sources).chunks],
        pa.large_binary(),
    )


# -- the sink


class Sink(NamedTuple):
    """The sink topic, up to where it ended when it was looked at.

    - `bounds`: by partition, the first offset and the exclusive end offset.
    - `noted`: by partition, the last number that `published` had before that.
    - `name`: the topic and Kafka's identity of it, as `published` has it: a topic that is created
      again begins anew.
    """

    bounds: Mapping[int, tuple[int, int]]
    noted: Mapping[int, int]
    name: str


class Limits(NamedTuple):
    """Limits up to which the sink is not checked.

    - `compared`: by partition, the place and number of the last message that a lost lake left.
      Messages up to it are not compared with silver.
    - `due`: by partition, the place up to which no record of the newest generation needs to be
      there.
    - `forgotten`: the partition and event time (ms) of merge records that silver no longer has,
      since their key was forgotten.
    """

    compared: Mapping[int, tuple[SortKey, int]]
    due: Mapping[int, SortKey]
    forgotten: Set[tuple[int, int]]


def read_sink(reader: TableReader, settings: Settings, partitions: int) -> Sink:
    """Return the ends of the sink topic, which exists, as they are now."""
    topic = settings.publish.topic
    cluster = Cluster(settings.kafka)
    name = cluster.identified(topic)
    noted = {p: tail.seq for p, tail in last_published(reader, name).items()}
    return Sink(cluster.bounds(topic, partitions), noted, name)


def read_limits(evidence: Evidence) -> Limits:
    """Return which messages of the sink are not compared, and which records need not be there.

    The former came before the lake, the latter before the newest generation.
    """
    first = evidence.generations[0]
    compared = {p: (tail.place, tail.seq) for p, tail in first.tails.items()}
    due = {p: tail.place for p, tail in evidence.generation.tails.items()}
    names = ["partition", "event_time"]
    forgotten_rows = read_table(evidence.reader, evidence.settings, tables.FORGOTTEN, names)
    forgotten = set(zip(*(forgotten_rows[name].to_pylist() for name in names), strict=True))
    return Limits(compared, due, forgotten)


def check_sink(
    partition: Partition, sink: Sink, limits: Limits, validator: Validator, findings: Findings
) -> None:
    """Check one partition of the sink.

    - Numbers rise by one, and places rise.
    - Each message is of a silver record of one of the generations, and no record is in two
      messages.
    - No record of the newest generation is missing up to the last message.

    Under `at_most_once` a failure may leave a gap; under `at_least_once` a message may come again.
    """
    p = partition.number
    first, end = sink.bounds.get(p, (0, 0))
    due = [r for r in partition.rows if r.outcome.status == "timed_out" and r.valid]
    rows = defaultdict[SortKey, list[Row]](list)
    for row in (*due, *partition.published):
        rows[row.outcome.place].append(row)
    check = _SinkCheck(partition, limits, validator, findings, rows, seq=None if first else -1)
    for message in _messages(validator.settings, p, first, end):
        check.check_message(message)
    check.check_missing({row.outcome.place: row for row in due}, sink)


@dataclass
class _SinkCheck:
    """Check of one partition of the sink, whose messages are given to it in order of offset.

    - `rows`: silver's finished, valid records by their place.
    - `seq`: the last number; a partition from which nothing was deleted begins with 0.
    - `last`: the largest place so far, and `where` the last message, for a sentence.
    """

    partition: Partition
    limits: Limits
    validator: Validator
    findings: Findings
    rows: Mapping[SortKey, Sequence[Row]]
    seq: int | None
    last: SortKey = _NOWHERE
    where: str = ""
    places: set[SortKey] = field(default_factory=set)
    parts: set[tuple[InputId, int]] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        publish = self.validator.settings.publish
        self.delivery = publish.delivery
        self.topic = f"{publish.topic}[{self.partition.number}]"

    def check_message(self, message: Message) -> None:
        """Check the next message: its number, its place, and its content."""
        offset, number, tail, *_ = message
        if tail is None:
            what = f"not a message of Watersmeet: {SEQ} or {ID} is missing"
            self.findings.add(what, f"{self.topic}@{offset}", REPAIR_HINT)
            return
        if self.delivery == "at_least_once":
            if hash(message[1:]) in self.seen:
                return
            self.seen.add(hash(message[1:]))
        place = tail.place
        self.where = f"{self.topic}@{offset}: seq {number}, {_record(tail.key, place)}"
        self._check_order(message, place)
        if self._is_compared(number, tail.event_time, place):
            self._check_content(message, place)
        self.seq = number if self.seq is None else max(number, self.seq)
        self.last = max(place, self.last)
        self.places.add(place)

    def _check_order(self, message: Message, place: SortKey) -> None:
        _, number, _, record_id, *_ = message
        if self.seq is not None and number <= self.seq:
            self._add(f"seq {number} after {self.seq}: a repeat, or out of order")
        elif self.seq is not None and number > self.seq + 1 and self.delivery != "at_most_once":
            self._add(f"seq {number} after {self.seq}: a gap")
        elif place <= self.last:
            self._add(f"{record_id} is not in the order of publication")

    def _is_compared(self, number: int, event_time: int, place: SortKey) -> bool:
        """Return True where silver must have a row for a message."""
        p = self.partition.number
        compared_place, compared_seq = self.limits.compared.get(p, (_NOWHERE, -1))
        if place <= compared_place and number <= compared_seq:
            return False
        # By last event time, which is no earlier.
        deleted_before = self.partition.evidence.retention_bounds.times.get((SILVER, p), 0)
        is_forgotten = (p, event_time) in self.limits.forgotten
        return place in self.rows or (event_time >= deleted_before and not is_forgotten)

    def _check_content(self, message: Message, place: SortKey) -> None:
        problems: list[tuple[str | None, Sequence[tuple[Any, ...]]]] = [
            (_unlike(message, self.partition.number, row, self.validator), row.outcome.parts)
            for row in self.rows.get(place, ())
        ] or [("silver has no finished, valid record for it", ())]
        problem, own_parts = min(problems, key=lambda each: each[0] is not None)
        parts = {part[:2] for part in own_parts}
        if problem:
            self._add(problem)
        # Where the place does not rise, that is reported already.
        repeated = sorted(self.parts & parts) if place > self.last else []
        if repeated:
            input_id, offset = repeated[0]
            name = self.validator.settings.input_names[input_id]
            self._add(f"the record {name}@{offset} is in an earlier message, too")
        self.parts |= parts

    def check_missing(self, due: Mapping[SortKey, Row], sink: Sink) -> None:
        """Check, after the last message, that none of the newest generation's records is missing up
        to it. `due`: these records by place.
        """
        p = self.partition.number
        if self.seq is None or not self.places or self.delivery == "at_most_once":
            return
        noted_seq = sink.noted.get(p, -1)
        if noted_seq > self.seq:
            self._add(f"the last message has seq {self.seq}, and {noted_seq} was published")
        # Else retention has deleted messages.
        begin = _NOWHERE if sink.bounds[p][0] == 0 else min(self.places)
        since = max(begin, self.limits.due.get(p, _NOWHERE))
        for place in sorted(due.keys() - self.places):
            if since < place < self.last:
                what = "silver's record is missing in the sink, which has later ones"
                where = f"{self.topic}: {_record(due[place].outcome.key, place)}"
                self.findings.add(what, where, REPAIR_HINT)

    def _add(self, what: str) -> None:
        """Report a problem of the last message."""
        self.findings.add(what, self.where, REPAIR_HINT)


def _messages(settings: Settings, partition: int, first: int, end: int) -> Iterator[Message]:
    """Yield the messages of a sink partition in order of offset."""
    for batch in read_range(settings.kafka, Range(settings.publish.topic, partition, first, end)):
        times = batch["kafka_timestamp"].cast(pa.int64()).to_pylist()
        columns = (batch[name].to_pylist() for name in ("offset", "key", "value", "headers"))
        for time, offset, key, value, headers in zip(times, *columns, strict=True):
            own_headers = {
                header["key"]: header["value"] or b"" for header in reversed(headers or [])
            }
            if FORGOTTEN in own_headers:  # a tombstone is no part of the sequence
                continue
            try:
                tail = parse_tail(own_headers)
            except ValueError:
                tail = None
            number = -1 if tail is None else tail.seq
            record_id = own_headers.get(ID, b"").decode(errors="replace")
            yield offset, number, tail, record_id, key, time // 1000, value


def _unlike(message: Message, partition: int, row: Row, validator: Validator) -> str | None:
    """Return what of a message is not as a row of silver has it; None where all is."""
    _, _, _, record_id, key, timestamp, value = message
    outcome = row.outcome
    is_same = {"key": key == outcome.key.encode(), "value": validator.is_same(value, row)}
    is_same["timestamp"] = timestamp == max(1, outcome.event_time)
    is_same["id"] = record_id == message_id(
        partition, outcome.event_time, outcome.key, outcome.tenant
    )
    differing = [part for part, same in is_same.items() if not same]
    return (
        f"{' and '.join(differing)} differ{'s' * (len(differing) == 1)} from silver's record"
        if differing
        else None
    )


def _record(key: str, place: SortKey) -> str:
    tenant = f"tenant {place.tenant.decode()!r}, " if place.tenant else ""
    time = (
        f"event_time {place.time}"
        if place.closed_at == PLAIN
        else f"closed_at {place.closed_at}, due {place.time}"
    )
    return f"{tenant}key {key!r}, {time}"
