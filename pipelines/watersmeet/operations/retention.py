"""Deletes rows that are older than `keep` behind the clock of their partition.

The owner of a table does it between two batches: of silver, all kinds of final rows in one commit,
of bronze, records and refused records. Rows that are still needed stay:

- records that silver has not merged;
- merge records that are open or not published;
- in bronze, all that begins at or after such a merge record, since its message must say where a
  lost lake would be recovered;
- corrections that are not published;
- dead letters that are not sent yet, with bronze's rows of them;
- in bronze, the rows of redriven records as long as it has the refused ones, since they alone say
  that these were redriven.

Records are deleted up to the end of a batch, so that what is left can be derived again
(`lake.retention_bounds`); after a reset, only what was merged since. A floor is written first, then
the rows below it are deleted. What a crash leaves is deleted the next time.

Rows of `erased` go once Kafka no longer has their offsets, whatever `keep` says.

Deleting rewrites the files that hold rows on both sides of the floor. So a run, which checks every
few hours, waits until a worthwhile share of a file can go (`SHARE`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final, TypeAlias

from watersmeet.core.inputs import InputId, of_source
from watersmeet.core.plan import BatchPlan, TopicPartition
from watersmeet.core.recovery import read_again_from
from watersmeet.core.sequence import CORRECTED, MERGED, clock_of
from watersmeet.kafka.cluster import Cluster
from watersmeet.lake import tables
from watersmeet.lake.chunks import NOT_FORGOTTEN
from watersmeet.lake.commits import DELETING
from watersmeet.lake.conflicts import suppress_conflict
from watersmeet.lake.epochs import Epochs, longest_ms, read_epochs, unsettled_from
from watersmeet.lake.generations import Generation, read_generations
from watersmeet.lake.inputs import of_input, of_topic
from watersmeet.lake.maintenance import FILE_BYTES
from watersmeet.lake.order import may_be_beyond, with_message
from watersmeet.lake.progress import last_batch
from watersmeet.lake.published import last_tails
from watersmeet.lake.retention_bounds import batch_ends, read_retention_bounds
from watersmeet.lake.table_reader import (
    Condition,
    TableReader,
    Where,
    by_partition,
    in_portions,
    row_count,
)
from watersmeet.operations.redrive import Refused, redriven_in_bronze
from watersmeet.running.dead_letters import unsent
from watersmeet.running.owner import Owner, now_ms
from watersmeet.settings import KeepSettings, Settings

_OF_SILVER: Final = {
    tables.SILVER: ("timed_out", "last_event_time"),
    tables.LATE: ("late", "position"),
    tables.DUPLICATES: ("duplicate", "event_time"),
    tables.EXCESS: ("excess", "event_time"),
    tables.PASSED: ("passed", "position"),
    tables.CORRECTIONS: ("correction", "last_event_time"),
}
"""The rows of silver that end, by the name that their floor has: their status, and the column by
which their age is counted.
"""

_REFUSED: Final = [("reason", "is not null", None)]

_Floors: TypeAlias = dict[tuple[str, int], tuple[int | None, int | None]]
"""By table and partition, where it begins: the end of a batch, or a time (ms)."""

SHARE = 8
"""A run deletes rows once they are an eighth of their table, or of a file, so that at most eight
bytes are rewritten for one.
"""


def expire(
    owner: Owner, settings: Settings, table: str, *, only_if_worthwhile: bool = False
) -> None:
    """Delete the rows of a table that are older than `keep` allows, and places that Kafka no longer
    has.

    With `only_if_worthwhile`, only once there are enough of them (`SHARE`). If another writer was
    quicker, the next call deletes them. Raises LeaseLostError, and deletes nothing more, if a later
    owner has taken the table.
    """
    reader = owner.engine.reader
    floors: _Floors = {}
    if table == tables.ERASED:
        terms = _places_kafka_lacks(reader, settings)
    elif (
        not tables.has_records(table)
        or settings.keep == KeepSettings()
        or (last := last_batch(reader)) is None
    ):
        return
    else:
        generation = read_generations(reader, settings).newest
        if last.batch < generation.from_batch:  # after a reset, the clock may be an earlier one
            return
        old = _Old(reader, settings, last, generation)
        terms, floors = old.of_silver() if table == tables.SILVER else old.of_bronze(table)
    rows = sum(row_count(reader, table, portion) for portion in in_portions(terms))
    if rows and (not only_if_worthwhile or _is_worth_it(reader, table, rows)):
        _note(owner, table, floors)
        for portion in in_portions(terms):
            with suppress_conflict():
                owner.change(table, DELETING, partial(owner.engine.delete, table, portion))


def _note(owner: Owner, table: str, floors: _Floors) -> None:
    """Write the floors of a table that lie further on than those that are there."""
    owner.last_number(table, DELETING)  # raises where a later owner has come
    existing = read_retention_bounds(owner.engine.reader)
    now = now_ms()
    rows = [
        (name, p, batch, time, now)
        for (name, p), (batch, time) in sorted(floors.items())
        if (batch is not None and batch > existing.batches.get(p, -1))
        or (time is not None and time > existing.times.get((name, p), 0))
    ]
    if rows:
        owner.engine.append(tables.FLOORS, owner.engine.lake.layout[tables.FLOORS].rows(rows))


def _is_worth_it(reader: TableReader, table: str, rows: int) -> bool:
    """Return True if this many rows are a worthwhile share of their table, or of a file."""
    file_rows = FILE_BYTES // max(1, reader.row_bytes(table))
    return rows * SHARE >= min(row_count(reader, table), file_rows)


def _places_kafka_lacks(reader: TableReader, settings: Settings) -> list[Sequence[Condition]]:
    """Return conditions for places of erased records that Kafka no longer has: nothing reads them
    again.
    """
    cluster = Cluster(settings.kafka)
    terms = list[Sequence[Condition]]()
    for input_id in settings.inputs:
        places = reader.summary(
            tables.ERASED, ["partition"], {"first": ("min", "offset")}, of_input(input_id)
        )
        partitions = places["partition"].to_pylist()
        bounds = cluster.bounds_of(input_id.topic, partitions) if partitions else {}
        for p, first in zip(partitions, places["first"].to_pylist(), strict=True):
            begin, _ = bounds[p]
            if first < begin:
                terms += of_input(input_id, [[("partition", "=", p), ("offset", "<", begin)]])
    return terms


@dataclass
class _Old:
    """The rows of a lake that are old enough and no longer needed, after its `last` batch."""

    reader: TableReader
    settings: Settings
    last: BatchPlan
    generation: Generation

    def of_silver(self) -> tuple[list[Sequence[Condition]], _Floors]:
        """Return conditions for old rows of silver, and the floors where its rows begin then."""
        terms = list[Sequence[Condition]]()
        floors: _Floors = {}
        for name, (status, column) in _OF_SILVER.items():
            keep = self.settings.keep
            keep_ms = keep.late_ms if name == tables.LATE else keep.silver_ms
            for p, limit in self._limits(keep_ms, partial(self._needed_of, name)).items():
                terms.append([("status", "=", status), ("partition", "=", p), (column, "<", limit)])
                floors[name, p] = None, limit
        return terms, floors

    def of_bronze(self, table: str) -> tuple[list[Sequence[Condition]], _Floors]:
        """Return conditions for old rows of a bronze table, and the floors where it begins then.

        At the end of the batch that is the floor, every position is older than the limit.
        """
        keep = self.settings.keep
        inputs = of_source(self.settings.inputs, table.removeprefix(tables.bronze("")))
        limits = self._limits(keep.bronze_ms)
        batches = self._batches_before(limits)
        ends = batch_ends(self.reader, batches)
        terms = list[Sequence[Condition]]()
        for input_id in inputs:
            input_ends = {tp.partition: end for tp, end in ends.items() if tp.input == input_id}
            redriven = _redriven(self.reader, input_id, input_ends)
            for p, end in sorted(input_ends.items()):
                terms += of_topic(input_id, _below(p, end, limits[p], redriven.get(p, ())))
        floors: _Floors = {(table, p): (batch, None) for p, batch in batches.items()}
        needed = partial(self._first_not_sent, tables.QUARANTINE, "kafka_timestamp")
        for p, limit in self._limits(keep.quarantine_ms, needed).items():
            for input_id in inputs:
                end = self.last.ranges[TopicPartition(input_id, p)].until_offset
                here: list[Condition] = [("partition", "=", p), ("offset", "<", end)]
                old = [*here, *_REFUSED, ("kafka_timestamp", "<", limit)]
                terms += of_topic(input_id, [old])
            floors[tables.QUARANTINE, p] = None, limit
        return terms, floors

    def _limits(
        self, keep_ms: int | None, needed: Callable[[], Mapping[int, int]] = dict
    ) -> dict[int, int]:
        """Return, by partition, the time (ms) before which rows go; empty where none do.

        `needed`: returns the times from which rows are needed.
        """
        if keep_ms is None:
            return {}
        first = needed()
        limits = {p: clock - keep_ms for p, clock in self.last.clocks.items()}
        return {p: min(limit, first.get(p, limit)) for p, limit in sorted(limits.items())}

    def _needed_of(self, name: str) -> dict[int, int]:
        """Return, by partition, the time (ms) from which rows of silver are needed."""
        found = [self._needed_to_correct(name)]
        if name == tables.SILVER:
            found += [self._unpublished, self._published_again]
        elif name == tables.CORRECTIONS:
            found.append(self._first_correction())
        elif name == tables.LATE:
            found.append(self._first_not_sent(name, "position"))
        return _least(*found)

    @cached_property
    def _epochs(self) -> Epochs:
        return read_epochs(self.reader, self.settings)

    @property
    def _published_again(self) -> dict[int, int]:
        """By partition, the first time (ms) of rows that could be published again: their records,
        merged anew after a reset to earlier offsets, could sort behind the last message.
        """
        longest = longest_ms(self._epochs)
        tails = last_tails(self.reader, MERGED)
        return {p: read_again_from(clock_of(tail.place), longest) for p, tail in tails.items()}

    @cached_property
    def _unpublished(self) -> dict[int, int]:
        """By partition, the smallest event time (ms) of open or unpublished merge records.

        The time from which a lost lake would be recovered after one counts instead, if it is
        smaller. A partition without such records is absent.
        """
        beyond = may_be_beyond(MERGED, last_tails(self.reader, MERGED), self.last.clocks)
        finished = ([*with_message(MERGED), *term] for term in beyond)
        where: Where = [[("status", "=", "open")], *finished]
        firsts = {name: ("min", name) for name in ("event_time", "closed_at")}
        rows = self.reader.summary(tables.SILVER, ["partition"], firsts, where).to_pylist()
        recovery_times = {
            row["partition"]: read_again_from(row["closed_at"], longest_ms(self._epochs))
            for row in rows
            if row["closed_at"] is not None
        }
        return _least({row["partition"]: row["event_time"] for row in rows}, recovery_times)

    def _first_correction(self) -> dict[int, int]:
        """Return, by partition, the smallest last event time (ms) of corrections that may be
        unpublished.
        """
        beyond = may_be_beyond(CORRECTED, last_tails(self.reader, CORRECTED), self.last.clocks)
        values = {"first": ("min", "last_event_time")}
        rows = self.reader.summary(tables.CORRECTIONS, ["partition"], values, beyond)
        return by_partition(rows, "first")

    def _needed_to_correct(self, name: str) -> dict[int, int]:
        """Return, by partition, the time (ms) from which rows may be needed for corrections that
        are not made yet: late records, and the merge records that these may belong to.

        `keep` is long enough for the rules of now; an earlier epoch may have had longer ones. A
        partition without such a late record is absent.
        """
        if name not in (tables.LATE, tables.SILVER, tables.CORRECTIONS):
            return {}
        firsts = {column: ("min", column) for column in ("position", "event_time")}
        of_generation: Condition = ("generation", "=", self.generation.number)
        where = [
            [of_generation, ("partition", "=", p), ("u", ">=", unsettled_from(self._epochs, clock))]
            for p, clock in sorted(self.last.clocks.items())
        ]
        longest = longest_ms(self._epochs)
        needed: dict[int, int] = {}
        for portion in in_portions(where):
            for row in self.reader.summary(tables.LATE, ["partition"], firsts, portion).to_pylist():
                is_late = name == tables.LATE
                time = row["position"] if is_late else row["event_time"] - longest
                needed[row["partition"]] = time
        return needed

    def _first_not_sent(self, view: str, column: str) -> dict[int, int]:
        """Return, by partition, the time (ms) of the oldest row still to be sent as a dead letter.

        A partition without such a row is absent.
        """
        where = unsent(self.reader, self.settings, view, self.last.clocks)
        if where is None:
            return {}
        rows = self.reader.summary(view, ["partition"], {"first": ("min", column)}, where)
        return by_partition(rows, "first")

    def _batches_before(self, limits: Mapping[int, int]) -> dict[int, int]:
        """Return, by partition, the batch up to whose end bronze may go: the last one at whose end
        every source's position is before the limit, and before all that is needed.

        It is no batch before an earlier floor: a crash may have left rows, or another source's
        owner has written it.
        """
        if not limits:
            return {}
        longest = longest_ms(self._epochs)
        closed = {p: clock - longest for p, clock in self.last.clocks.items()}
        unsent_times = self._first_not_sent(tables.LATE, "position")
        bounds = _least(limits, closed, self._unpublished, unsent_times)
        first = self.generation.from_batch
        last_batches = {
            p: batch
            for p, batch in read_retention_bounds(self.reader).batches.items()
            if batch >= first and p in limits
        }
        for portion in in_portions(sorted(limits)):
            where = [
                [("partition", "=", p), ("batch", ">=", first), ("position", "<", bounds[p])]
                for p in portion
            ]
            by = ["partition", "source", "topic"]
            rows = self.reader.summary(tables.PROGRESS, by, {"last": ("max", "batch")}, where)
            for p in portion:
                batches = [row["last"] for row in rows.to_pylist() if row["partition"] == p]
                if len(batches) == len(self.settings.inputs):
                    last_batches[p] = max(min(batches), last_batches.get(p, -1))
        return last_batches


def _least(*times: Mapping[int, int]) -> dict[int, int]:
    """Return, by partition, the smallest of these times (ms)."""
    least: dict[int, int] = {}
    for p, time in (item for each in times for item in each.items()):
        least[p] = min(time, least.get(p, time))
    return least


def _below(partition: int, end: int, limit_ms: int, redriven: Collection[int]) -> Where:
    """Return a condition for old records of bronze, in a partition of an input and before an
    offset, that were not refused.

    They are older than the limit (ms), and not at the offsets `redriven`.
    """
    below: list[Condition] = [("partition", "=", partition), ("offset", "<", end)]
    below += [("offset", "not in", list(redriven))] if redriven else []
    below.append(("reason", "is null", None))
    untimed = [("event_time", "is null", None), ("kafka_timestamp", "<", limit_ms)]
    return [[*below, ("event_time", "<", limit_ms)], [*below, *untimed]]


def _redriven(
    reader: TableReader, input_id: InputId, ends: Mapping[int, int]
) -> dict[int, list[int]]:
    """Return, by partition, the offsets before these ends of redriven records that must stay.

    Without one of them, its refused record could be redriven again.
    """
    where = of_input(input_id, [[NOT_FORGOTTEN]])
    firsts = reader.summary(tables.QUARANTINE, ["partition"], {"first": ("min", "offset")}, where)
    first = by_partition(firsts, "first")
    ranges = {p: (at + 1, ends[p]) for p, at in first.items() if p in ends}
    needed: dict[int, list[int]] = {}
    for p, at, _ in redriven_in_bronze(reader, Refused(reader, input_id), ranges):
        needed.setdefault(p, []).append(at)
    return needed
