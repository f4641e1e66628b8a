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

Records are deleted up to a base (`lake.state`), so that what is left can be derived again; after a
reset, only what was merged since. Of silver, what a derivation from the newest base on may need
stays, too: the merge records that late records may still correct. A floor is decided first, then
the rows below it are deleted. What a crash leaves is deleted the next time, and so are bases that
are replaced or were not decided.

Rows of `erased` go once Kafka no longer has their offsets, whatever `keep` says.

Deleting rewrites the files that hold rows on both sides of the floor. So a run, which checks every
few hours, waits until a worthwhile share of a file can go (`SHARE`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final, TypeAlias

from watersmeet.core.columns import MAX_TIME, NULL_TIME
from watersmeet.core.inputs import InputId, of_source
from watersmeet.core.plan import BatchPlan, TopicPartition
from watersmeet.core.recovery import read_again_from
from watersmeet.core.sequence import CORRECTED, MERGED, clock_of
from watersmeet.core.sequence import Sequence as Order
from watersmeet.core.tenants import Cut
from watersmeet.errors import ConfigurationError
from watersmeet.kafka.cluster import Cluster
from watersmeet.lake import tables
from watersmeet.lake.commits import suppress_conflict
from watersmeet.lake.history import (
    Base,
    Epochs,
    Floors,
    Generation,
    longest_ms,
    needed_ms,
    read_history,
    unsettled,
)
from watersmeet.lake.inputs import of_input, of_topic, topic_partition
from watersmeet.lake.journal import ERASED, FLOOR
from watersmeet.lake.maintenance import FILE_BYTES
from watersmeet.lake.pieces import NOT_FORGOTTEN
from watersmeet.lake.progress import last_batch, read_batches
from watersmeet.lake.published import last_tails, may_be_beyond, with_message
from watersmeet.lake.state import read_state
from watersmeet.lake.table_reader import (
    Condition,
    TableReader,
    Where,
    extreme,
    extremes,
    in_portions,
    row_count,
)
from watersmeet.lake.tables import DELETING
from watersmeet.operations.redrive import redriven_in_bronze
from watersmeet.running.dead_letters import unsent
from watersmeet.running.owner import Owner
from watersmeet.running.saving import save_last_state
from watersmeet.settings import KeepSettings, Settings

_REFUSED: Final = [("reason", "is not null", None)]

_Terms: TypeAlias = list[Sequence[Condition]]
_Positions: TypeAlias = Mapping[TopicPartition, int | None]
_NO_FLOORS: Final = Floors(-1, {})

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
    floors = _NO_FLOORS
    kept: Where = ()
    if table == tables.ERASED:
        terms, kept = _places_kafka_lacks(reader, settings)
    elif table == tables.BASES:
        # Nobody reads the others any more, or they were not decided.
        bases = [base.number for base in read_history(reader, settings).bases]
        terms = [[("_base", "not in", bases) if bases else ("_base", "is not null", None)]]
    elif (
        not owner.engine.lake.layout[table].has_records
        or settings.keep == KeepSettings()
        or (last := last_batch(reader)) is None
    ):
        return
    else:
        history = owner.history(settings)
        generation = history.generations.newest
        if last.batch < generation.from_batch:  # after a reset, the clock may be an earlier one
            return
        if not only_if_worthwhile:  # a run has done so after its batches
            save_last_state(owner, settings, generation, last.batch)
        saved = read_history(reader, settings).bases_in(generation)
        old = _Old(reader, settings, last, generation, history.epochs, saved)
        terms, floors = old.of(table)
    rows = sum(row_count(reader, table, portion) for portion in in_portions(terms))
    if rows and (not only_if_worthwhile or _is_worth_it(reader, table, rows)):
        if table == tables.ERASED:
            # The time of the last rows that stay.
            last_ms = extreme(reader, tables.ERASED, "erased_at", kept) or 0
            owner.decide(ERASED, {"last": last_ms})
        _decide(owner, table, floors)
        for portion in in_portions(terms):
            with suppress_conflict():
                owner.change(table, DELETING, partial(owner.engine.delete, table, portion))


def _decide(owner: Owner, table: str, floors: Floors) -> None:
    owner.last_number(table, DELETING)  # raises where a later owner has come
    existing = read_history(owner.engine.reader, owner.engine.lake.settings).floors
    times = [
        (name, p, time)
        for (name, p), time in sorted(floors.times.items())
        if time > existing.times.get((name, p), 0)
    ]
    if times or floors.base > existing.base:
        owner.decide(FLOOR, {"base": floors.base, "times": times})


def _is_worth_it(reader: TableReader, table: str, rows: int) -> bool:
    file_rows = FILE_BYTES // max(1, reader.row_bytes(table))
    return rows * SHARE >= min(row_count(reader, table), file_rows)


def _places_kafka_lacks(
    reader: TableReader, settings: Settings
) -> tuple[list[Sequence[Condition]], list[Sequence[Condition]]]:
    """Return conditions for places of erased records that Kafka no longer has, since nothing reads
    them again; and for all others.
    """
    cluster = Cluster(settings.kafka)
    terms = list[Sequence[Condition]]()
    kept: list[Sequence[Condition]] = [[("source", "is null", None)]]
    for input_id in settings.inputs:
        places = extremes(reader, tables.ERASED, "offset", of_input(input_id), "min")
        bounds = cluster.bounds_of(input_id.topic, [*places]) if places else {}
        begins = {p: begin for p, (begin, _) in bounds.items()}
        terms += of_input(input_id, [[("offset", "<", begins)]])
        kept += of_input(input_id, [[("offset", ">=", begins)]])
    return terms, kept


@dataclass
class _Old:
    """The rows of a lake that are old enough and no longer needed, after its `last` batch.

    `bases`: those of the generation.
    """

    reader: TableReader
    settings: Settings
    last: BatchPlan
    generation: Generation
    epochs: Epochs
    bases: Sequence[Base]

    def of(self, table: str) -> tuple[_Terms, Floors]:
        """Return conditions for old rows of a table, and the floors where its rows begin then; none
        where silver's owner has deleted a base meanwhile.
        """
        try:
            return self.of_silver() if table == tables.SILVER else self.of_bronze(table)
        except ConfigurationError:
            now = read_history(self.reader, self.settings).bases_in(self.generation)
            if now == self.bases:
                raise
            return [], _NO_FLOORS

    def of_silver(self) -> tuple[_Terms, Floors]:
        """Return conditions for old rows of silver, and the floors where its rows begin then.

        What came after the last base can still be derived again, and history begins with the first
        base of which that is so.
        """
        terms: _Terms = []
        times: dict[tuple[str, int], int] = {}
        if not self.bases:
            return terms, _NO_FLOORS
        reach_ms = needed_ms(self.epochs)
        needed_since = [
            _least(*({tp.partition: (at or 0) - reach_ms} for tp, at in ends.items()))
            for ends in self._ends
        ]
        keep = self.settings.keep
        for status in tables.FINISHED:
            name, column = tables.STATUSES[status].floor, str(tables.STATUSES[status].age)
            keep_ms = keep.late_ms if name == tables.LATE else keep.silver_ms
            limits = self._limits(keep_ms, partial(self._needed_of, name))
            least = _least(limits, needed_since[-1])
            limits = {p: least[p] for p in limits}
            terms.append([("status", "=", status), (column, "<", limits)])
            times |= {(name, p): limit for p, limit in limits.items()}
        number = next(
            base.number
            for base, needed in zip(self.bases, needed_since, strict=True)
            if all(time <= needed.get(p, time) for (_, p), time in times.items())
        )
        return terms, Floors(number, times)

    @cached_property
    def _ends(self) -> list[_Positions]:
        """The positions (ms) of all topic-partitions at each base; None before the first record."""
        batches = read_batches(self.reader, {base.batch for base in self.bases})
        return [
            {tp: cursor.position for tp, cursor in batches[base.batch].cursors().items()}
            for base in self.bases
        ]

    def of_bronze(self, table: str) -> tuple[_Terms, Floors]:
        """Return conditions for old rows of a bronze table, and the floors where it begins then.

        At the end of the batch that is the floor, every position is older than the limit.
        """
        keep = self.settings.keep
        inputs = of_source(self.settings.inputs, table.removeprefix(tables.bronze("")))
        limits = self._limits(keep.bronze_ms)
        bases = self._bases_before(limits)
        ends = {}
        for base in {*bases.values()}:
            state = read_state(self.reader, self.epochs, base)
            first_waiting = self._first_waiting(base)
            for tp in (tp for tp in state.cursors if bases.get(tp.partition) == base):
                cut = state.cuts.get(tp, Cut(state.cursors[tp].next_offset, NULL_TIME))
                waiting = first_waiting.get(tp, cut.until)
                ends[tp] = min(state.cursors[tp].next_offset, cut.until, waiting)
        terms: _Terms = []
        for input_id in inputs:
            input_ends = {tp.partition: end for tp, end in ends.items() if tp.input == input_id}
            redriven = _redriven(self.reader, input_id, input_ends)
            for p, end in sorted(input_ends.items()):
                terms += of_topic(input_id, _below(p, end, limits[p], redriven.get(p, ())))
        needed = partial(self._first_not_sent, tables.QUARANTINE, "kafka_timestamp")
        limits = self._limits(keep.quarantine_ms, needed)
        for input_id in inputs:
            merged = {p: self.last.ranges[TopicPartition(input_id, p)].until_offset for p in limits}
            old = [("offset", "<", merged), *_REFUSED, ("kafka_timestamp", "<", limits)]
            terms += of_topic(input_id, [old])
        times = {(tables.QUARANTINE, p): limit for p, limit in limits.items()}
        return terms, Floors(max((base.number for base in bases.values()), default=-1), times)

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
        needed = [self._needed_to_correct]
        if name == tables.SILVER:
            needed += [self._unpublished, self._published_again]
        elif name == tables.CORRECTIONS:
            needed.append(self._first_correction())
        elif name == tables.LATE:
            needed.append(self._first_not_sent(name, "position"))
        return _least(*needed)

    def _first_waiting(self, base: Base) -> dict[TopicPartition, int]:
        """Return, by topic-partition, the first offset of records that waited for their tenants at
        a base: the first batch of an epoch reads them once more, here or in a derivation.
        """
        by = ["source", "topic", "partition"]
        where = base.of(("status", "=", "waiting"))
        rows = self.reader.summary(tables.BASES, by, {"first": ("min", "offset")}, where)
        return {topic_partition(row): row["first"] for row in rows.to_pylist()}

    @property
    def _published_again(self) -> dict[int, int]:
        """By partition, the first time (ms) of rows that could be published again: their records,
        merged anew after a reset to earlier offsets, could sort behind the last message.
        """
        longest = longest_ms(self.epochs)
        tails = last_tails(self.reader, MERGED)
        return {p: read_again_from(clock_of(tail.place), longest) for p, tail in tails.items()}

    @cached_property
    def _unpublished(self) -> dict[int, int]:
        """By partition, the smallest event time (ms) of open or unpublished merge records.

        The time from which a lost lake would be recovered after one counts instead, if it is
        smaller. A partition without such records is absent.
        """
        where: Where = [[("status", "=", "open")], *self._beyond(MERGED)]
        firsts = {name: ("min", name) for name in ("event_time", "closed_at")}
        rows = self.reader.summary(tables.SILVER, ["partition"], firsts, where).to_pylist()
        recovery_times = {
            row["partition"]: read_again_from(row["closed_at"], longest_ms(self.epochs))
            for row in rows
            if row["closed_at"] is not None
        }
        return _least({row["partition"]: row["event_time"] for row in rows}, recovery_times)

    def _beyond(self, sequence: Order) -> Where:
        """Return a condition for the rows of a sequence that may still have to be published."""
        beyond = may_be_beyond(sequence, last_tails(self.reader, sequence), self.last.clocks)
        return [[*with_message(sequence), *term] for term in beyond]

    def _first_correction(self) -> dict[int, int]:
        """Return, by partition, the smallest last event time (ms) of corrections that may be still
        to be published.
        """
        where = self._beyond(CORRECTED)
        return extremes(self.reader, tables.CORRECTIONS, "last_event_time", where, "min")

    @cached_property
    def _needed_to_correct(self) -> dict[int, int]:
        """By partition, the time (ms) from which rows may be needed for corrections that are not
        made yet: late records, and the merge records that these may belong to.

        `keep` is long enough for the rules of now; an earlier epoch may have had longer ones. A
        partition without such a late record is absent.
        """
        longest = longest_ms(self.epochs)
        first: dict[int, int] = {}
        for portion in in_portions(unsettled(self.epochs, self.generation, self.last.clocks)):
            first |= extremes(self.reader, tables.LATE, "event_time", portion, "min")
        return {p: time - longest for p, time in first.items()}

    def _first_not_sent(self, view: str, column: str) -> dict[int, int]:
        """Return, by partition, the time (ms) of the oldest row still to be sent as a dead letter.

        A partition without such a row is absent.
        """
        where = unsent(self.reader, self.settings, view, self.last.clocks)
        if where is None:
            return {}
        return extremes(self.reader, view, column, where, "min")

    def _bases_before(self, limits: Mapping[int, int]) -> dict[int, Base]:
        """Return, by partition, the base up to which bronze may go: the last one at which every
        source's position is before the limit, and before all that is needed.
        """
        if not limits:
            return {}
        longest = longest_ms(self.epochs)
        closed = {p: clock - longest for p, clock in self.last.clocks.items()}
        unsent_times = self._first_not_sent(tables.LATE, "position")
        bounds = _least(limits, closed, self._unpublished, unsent_times)
        before: dict[int, Base] = {}
        for base, ends in zip(self.bases, self._ends, strict=True):
            last = _greatest(ends)
            before |= {p: base for p in limits if last.get(p, MAX_TIME) < bounds[p]}
        return before


def _least(*times: Mapping[int, int]) -> dict[int, int]:
    least: dict[int, int] = {}
    for p, time in (item for each in times for item in each.items()):
        least[p] = min(time, least.get(p, time))
    return least


def _greatest(positions: _Positions) -> dict[int, int]:
    """Return, by partition, the greatest of these positions (ms); `MAX_TIME` where one is None."""
    greatest: dict[int, int] = {}
    for tp, position in positions.items():
        at = MAX_TIME if position is None else position
        greatest[tp.partition] = max(at, greatest.get(tp.partition, at))
    return greatest


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
    first = extremes(reader, tables.QUARANTINE, "offset", where, "min")
    ranges = {p: (at + 1, ends[p]) for p, at in first.items() if p in ends}
    needed: dict[int, list[int]] = {}
    for p, at, _ in redriven_in_bronze(reader, input_id, ranges):
        needed.setdefault(p, []).append(at)
    return needed
