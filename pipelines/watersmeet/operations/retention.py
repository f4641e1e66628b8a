"""Deletes rows that are older than `keep` behind the clock of their partition.

The owner of a table does it between two batches. Rows that are still needed stay:

- records that silver has not merged;
- merge records that are open or not published;
- in bronze, all that begins at or after such a merge record, since its message must say where a
  lost lake would be recovered;
- corrections that are not published;
- dead letters that are not sent yet, with bronze's rows of them;
- in bronze, the rows of redriven records as long as `quarantine` has the refused ones, since they
  alone say that these were redriven.

Bronze is deleted up to the end of a batch, so that what is left can be derived again
(`lake.retention_bounds`); after a reset, only what was merged since. A floor is written first, then
the rows below it are deleted. What a crash leaves is deleted the next time.

Rows of `erased` go once Kafka no longer has their offsets, whatever `keep` says.

Deleting rewrites the files that hold rows on both sides of the floor. So a run, which checks every
few hours, waits until a worthwhile share of a file can go (`SHARE`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from watersmeet.core.inputs import InputId, of_source
from watersmeet.core.recovery import read_again_from
from watersmeet.core.sequence import CORRECTED, MERGED
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

_COLUMNS = {
    tables.SILVER: "last_event_time",
    tables.LATE: "position",
    tables.DUPLICATES: "event_time",
    tables.CORRECTIONS: "last_event_time",
    tables.QUARANTINE: "kafka_timestamp",
}
"""Column by which the age of a row is counted. In bronze that is the event time, or Kafka's
timestamp where there is none.
"""


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
    if table == tables.ERASED:
        _expire_erased(owner, settings, only_if_worthwhile=only_if_worthwhile)
        return
    keep_ms = kept_ms(settings.keep, table)
    if keep_ms is None or (last := last_batch(reader, settings)) is None:
        return
    generation = read_generations(reader, settings).newest
    if last[0].batch < generation.from_batch:  # after a reset, the clock may be an earlier one
        return
    limits = {p: clock - keep_ms for p, clock in last[0].clocks.items()}
    if table in _COLUMNS:
        epochs = read_epochs(reader, settings)
        if table == tables.SILVER:
            needed = _needed_of_silver(reader, limits, epochs)
        elif table == tables.CORRECTIONS:
            needed = _first_not_published(reader, limits)
        else:
            needed = _first_not_sent(reader, settings, table, limits)
        correcting = _needed_to_correct(reader, epochs, table, last[0].clocks, generation)
        _forget_before(
            owner,
            table,
            {
                p: min(limit, needed.get(p, limit), correcting.get(p, limit))
                for p, limit in limits.items()
            },
            only_if_worthwhile=only_if_worthwhile,
        )
    else:
        _forget_batches(
            owner,
            settings,
            table,
            limits,
            last[0].clocks,
            generation,
            only_if_worthwhile=only_if_worthwhile,
        )


def _expire_erased(owner: Owner, settings: Settings, *, only_if_worthwhile: bool) -> None:
    """Delete the places of erased records that Kafka no longer has: nothing reads them again."""
    reader = owner.engine.reader
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
    if not terms:
        return
    rows = _count(reader, tables.ERASED, terms)
    if not only_if_worthwhile or _is_worth_it(reader, tables.ERASED, rows):
        _delete(owner, tables.ERASED, terms)


def kept_ms(keep: KeepSettings, table: str) -> int | None:
    """Return how long (ms) rows of a table are kept; None: for ever."""
    by_table = {
        tables.SILVER: keep.silver_ms,
        tables.LATE: keep.late_ms,
        tables.DUPLICATES: keep.silver_ms,
        tables.CORRECTIONS: keep.silver_ms,
        tables.QUARANTINE: keep.quarantine_ms,
    }
    return keep.bronze_ms if table.startswith(tables.bronze("")) else by_table.get(table)


def _needed_of_silver(
    reader: TableReader, partitions: Mapping[int, int], epochs: Epochs
) -> dict[int, int]:
    """Return what `_needed` does, and keep rows that could be published again.

    These are rows whose records, merged anew after a reset to earlier offsets, could sort behind
    the last message.
    """
    needed = _needed(reader, partitions, epochs)
    for p, tail in last_tails(reader, MERGED).items():
        time = read_again_from(int(tail.place[0]), longest_ms(epochs))
        needed[p] = min(time, needed.get(p, time))
    return needed


def _needed(reader: TableReader, partitions: Mapping[int, int], epochs: Epochs) -> dict[int, int]:
    """Return, by partition, the smallest event time (ms) of open or unpublished merge records.

    The time from which a lost lake would be recovered after one counts instead, if it is smaller. A
    partition without such records is absent.
    """
    beyond = may_be_beyond(MERGED, last_tails(reader, MERGED), partitions)
    finished = ([*with_message(MERGED), *term] for term in beyond)
    where: Where = [[("status", "=", "open")], *finished]
    firsts = {name: ("min", name) for name in ("event_time", "closed_at")}
    rows = reader.summary(tables.SILVER, ["partition"], firsts, where).to_pylist()
    recovery_times = {
        row["partition"]: read_again_from(row["closed_at"], longest_ms(epochs))
        for row in rows
        if row["closed_at"] is not None
    }
    times = {row["partition"]: row["event_time"] for row in rows}
    return {p: min(time, recovery_times.get(p, time)) for p, time in times.items()}


def _first_not_published(reader: TableReader, partitions: Mapping[int, int]) -> dict[int, int]:
    """Return, by partition, the smallest last event time (ms) of corrections that may be
    unpublished.
    """
    beyond = may_be_beyond(CORRECTED, last_tails(reader, CORRECTED), partitions)
    values = {"first": ("min", "last_event_time")}
    return by_partition(reader.summary(tables.CORRECTIONS, ["partition"], values, beyond), "first")


def _needed_to_correct(
    reader: TableReader,
    epochs: Epochs,
    table: str,
    clocks: Mapping[int, int],
    generation: Generation,
) -> dict[int, int]:
    """Return, by partition, the time (ms) from which rows of a table may be needed for corrections
    that are not made yet: those of late records, and of the merge records that these may belong to.

    `keep` is long enough for the rules of now; an earlier epoch may have had longer ones. The time
    is that of the table's column in `_COLUMNS`. A partition without such a late record is absent.
    """
    needs = (tables.LATE, tables.SILVER, tables.CORRECTIONS)
    if table not in needs or "u" not in reader.columns(tables.LATE).names:
        return {}
    firsts = {name: ("min", name) for name in ("position", "event_time")}
    of_generation: Condition = ("generation", "=", generation.number)
    where = [
        [of_generation, ("partition", "=", p), ("u", ">=", unsettled_from(epochs, clock))]
        for p, clock in sorted(clocks.items())
    ]
    longest = longest_ms(epochs)
    needed: dict[int, int] = {}
    for portion in in_portions(where):
        for row in reader.summary(tables.LATE, ["partition"], firsts, portion).to_pylist():
            is_late = table == tables.LATE
            needed[row["partition"]] = row["position"] if is_late else row["event_time"] - longest
    return needed


def _first_not_sent(
    reader: TableReader, settings: Settings, table: str, partitions: Mapping[int, int]
) -> dict[int, int]:
    """Return, by partition, the time (ms) of the oldest row still to be sent as a dead letter.

    The time is that of the table's column in `_COLUMNS`. A partition without such a row is absent.
    """
    where = unsent(reader, settings, table, partitions)
    if where is None:
        return {}
    rows = reader.summary(table, ["partition"], {"first": ("min", _COLUMNS[table])}, where)
    return by_partition(rows, "first")


def _forget_before(
    owner: Owner, table: str, limits: Mapping[int, int], *, only_if_worthwhile: bool
) -> None:
    """Delete rows of a table that lie before a time (ms) of their partition; of silver, finished
    ones.
    """
    existing = read_retention_bounds(owner.engine.reader).times
    further = {p: limit for p, limit in limits.items() if limit > existing.get((table, p), 0)}
    is_finished = [("status", "=", "timed_out")] if table == tables.SILVER else []
    terms = [
        [*is_finished, ("partition", "=", p), (_COLUMNS[table], "<", limit)]
        for p, limit in sorted(further.items())
    ]
    rows = _count(owner.engine.reader, table, terms)
    if not terms or (only_if_worthwhile and not _is_worth_it(owner.engine.reader, table, rows)):
        return
    _note(owner, table, {p: (None, limit) for p, limit in further.items()})
    _delete(owner, table, terms)


def _forget_batches(
    owner: Owner,
    settings: Settings,
    table: str,
    limits: Mapping[int, int],
    clocks: Mapping[int, int],
    generation: Generation,
    *,
    only_if_worthwhile: bool,
) -> None:
    """Delete rows of bronze before the end of a batch.

    At the end of that batch, every position must be older than the limit (ms).
    """
    reader = owner.engine.reader
    first = generation.from_batch
    retention_bounds = {
        p: batch for p, batch in read_retention_bounds(reader).batches.items() if batch >= first
    }
    epochs = read_epochs(reader, settings)
    longest = longest_ms(epochs)
    needed = _needed(reader, limits, epochs)
    unsent_times = _first_not_sent(reader, settings, tables.LATE, limits)
    bounds = {
        p: min(limit, clocks[p] - longest, needed.get(p, limit), unsent_times.get(p, limit))
        for p, limit in limits.items()
    }
    batches = {
        p: batch
        for p, batch in _batches_before(reader, settings, bounds, first).items()
        if batch > retention_bounds.get(p, -1)
    }
    # Also what an earlier call has left: after a crash, or because another source's owner wrote
    # the floor.
    ends = batch_ends(reader, {**retention_bounds, **batches})
    terms = list[Sequence[Condition]]()
    for input_id in of_source(settings.inputs, table.removeprefix(tables.bronze(""))):
        input_ends = {
            tp.partition: end
            for tp, end in ends.items()
            if tp.input == input_id and tp.partition in limits
        }
        redriven = _redriven(reader, input_id, input_ends)
        for p, end in sorted(input_ends.items()):
            terms += of_topic(input_id, _below(p, end, limits[p], redriven.get(p, ())))
    rows = _count(reader, table, terms)
    if only_if_worthwhile and not _is_worth_it(reader, table, rows):
        return
    if batches:
        _note(owner, table, {p: (batch, None) for p, batch in batches.items()})
    if rows:
        _delete(owner, table, terms)


def _below(partition: int, end: int, limit_ms: int, redriven: Collection[int]) -> Where:
    """Return a condition for old rows of bronze, in a partition of an input and before an offset.

    They are older than the limit (ms), and not at the offsets `redriven`.
    """
    below: list[Condition] = [("partition", "=", partition), ("offset", "<", end)]
    below += [("offset", "not in", list(redriven))] if redriven else []
    untimed = [("event_time", "is null", None), ("kafka_timestamp", "<", limit_ms)]
    return [[*below, ("event_time", "<", limit_ms)], [*below, *untimed]]


def _redriven(
    reader: TableReader, input_id: InputId, ends: Mapping[int, int]
) -> dict[int, list[int]]:
    """Return, by partition, the offsets before these ends of redriven records that must stay.

    Without one of them, its refused record could be redriven again.
    """
    where = of_input(input_id, [[NOT_FORGOTTEN]])
    places = reader.select(tables.QUARANTINE, ["partition", "offset"], where)
    refused: dict[int, set[int]] = {}
    for p, offset in zip(
        places["partition"].to_pylist(), places["offset"].to_pylist(), strict=True
    ):
        refused.setdefault(p, set()).add(offset)
    ranges = {p: (min(offsets) + 1, ends[p]) for p, offsets in refused.items() if p in ends}
    needed: dict[int, list[int]] = {}
    for p, at, offset in redriven_in_bronze(reader, Refused(reader, input_id), ranges):
        if offset in refused.get(p, ()):
            needed.setdefault(p, []).append(at)
    return needed


def _batches_before(
    reader: TableReader, settings: Settings, bounds: Mapping[int, int], since: int
) -> dict[int, int]:
    """Return, by partition, the last batch at whose end every source's position is below a bound.

    Bounds are in ms. Only batches from `since` on count.
    """
    last_batches = {}
    for portion in in_portions(sorted(bounds)):
        where = [
            [("partition", "=", p), ("batch", ">=", since), ("position", "<", bounds[p])]
            for p in portion
        ]
        rows = reader.summary(
            tables.PROGRESS, ["partition", "source", "topic"], {"last": ("max", "batch")}, where
        ).to_pylist()
        for p in portion:
            batches = [row["last"] for row in rows if row["partition"] == p]
            if len(batches) == len(settings.inputs):
                last_batches[p] = min(batches)
    return last_batches


def _note(
    owner: Owner, table: str, retention_bounds: Mapping[int, tuple[int | None, int | None]]
) -> None:
    """Write the floors of a table: by partition a batch, or a time (ms)."""
    owner.last_number(table, DELETING)  # raises where a later owner has come
    rows = [(table, p, *floor, now_ms()) for p, floor in retention_bounds.items()]
    owner.engine.append(tables.FLOORS, owner.engine.lake.layout[tables.FLOORS].rows(rows))


def _count(reader: TableReader, table: str, terms: Where) -> int:
    """Return how many rows meet one of the terms, which exclude one another."""
    return sum(row_count(reader, table, portion) for portion in in_portions(terms))


def _is_worth_it(reader: TableReader, table: str, rows: int) -> bool:
    """Return True if this many rows are a worthwhile share of their table, or of a file."""
    table_rows = row_count(reader, table)
    file_rows = FILE_BYTES // max(1, reader.row_bytes(table))
    return rows > 0 and rows * SHARE >= min(table_rows, file_rows)


def _delete(owner: Owner, table: str, terms: Where) -> None:
    for portion in in_portions(terms):
        with suppress_conflict():
            owner.change(table, DELETING, partial(owner.engine.delete, table, portion))
