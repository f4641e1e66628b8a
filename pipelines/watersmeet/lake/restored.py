"""Tables that somebody has deleted, restored to an earlier version, or replaced by an earlier copy.

Each of these takes one table back, and not those that were written by what it had. What bronze
lacks then would never be merged, what silver lacks is in messages, and in place of a table that is
gone a start would make an empty one. So a run is refused until the table is back, or is taken
forward again.

One rule tells all of it: where a table ends is compared with what the next one says. Each table is
read after what is said of it, so that a run that goes on meanwhile puts nobody behind. As long as
its log has a RESTORE, the log tells it too, with the version to go forward to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from watersmeet.core.inputs import InputId
from watersmeet.core.plan import BatchPlan, OffsetRange, TopicPartition
from watersmeet.core.sequence import clock_of
from watersmeet.core.times import time_text
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.bases import check_bases
from watersmeet.lake.commits import WRITES, Commit, closed_by, last_decision
from watersmeet.lake.history import History, read_history
from watersmeet.lake.location import Lake
from watersmeet.lake.newest import row_ends
from watersmeet.lake.progress import last_batch, read_batches
from watersmeet.lake.published import Clocks, last_clocks
from watersmeet.lake.recovered import count_known
from watersmeet.lake.table_errors import BRING_BACK
from watersmeet.lake.table_reader import TableReader, row_count, walk
from watersmeet.lake.tables import Table
from watersmeet.settings import Settings

# -- tables that are gone


def deleted_tables(reader: TableReader, settings: Settings) -> list[str]:
    """Return the tables that are gone from a lake with rows, and whose rows nothing else has.

    A start makes all of them before it writes a row.
    """
    layout = tables.layout(settings)
    lasting = [name for name, table in layout.items() if not table.is_replaceable]
    deleted = [table for table in lasting if not reader.exists(table)]
    if not deleted:
        return []
    existing = [name for name in lasting if layout[name].has_records and name not in deleted]
    return deleted if any(row_count(reader, table) for table in existing) else []


def check_not_deleted(reader: TableReader, settings: Settings) -> None:
    """Raise ConfigurationError where a table is gone from a lake with rows."""
    if deleted := deleted_tables(reader, settings):
        raise ConfigurationError(
            f"the table {deleted[0]} does not exist, although others of this lake have rows",
            where="lake",
            fix=BRING_BACK,
        )


# -- tables that end before what the next one says


class Behind(NamedTuple):
    """A table, where it ends, and what the next one says, which names it."""

    table: str
    end: str
    said: str


@dataclass(frozen=True)
class _Lake:
    """What the tables of a lake say of each other, each read before those that it tells of.

    - `begun`: the journal as it was before `published` and silver were read;
      `history`: as it is after them.
    - `published`: the clocks of the last messages that were noted.
    - `saved`: the batch of the newest saved state; -1 without one.
    - `last`: silver's last batch; `followed`: the number of the decision that it follows;
      `closed_by`: the generation whose beginning has closed rows since then, or 0.
    """

    reader: TableReader
    settings: Settings
    begun: History
    published: Clocks
    saved: int
    last: BatchPlan | None
    followed: int
    closed_by: int
    history: History

    @classmethod
    def read(cls, reader: TableReader, settings: Settings) -> _Lake:
        """Read the tables in the order in which they tell of each other."""
        version = reader.version(tables.JOURNAL) if reader.exists(tables.JOURNAL) else None
        begun = read_history(reader, settings)
        published = last_clocks(reader)
        exists = reader.exists(tables.SILVER)
        last = last_batch(reader) if exists else None
        commit = last_decision(reader, tables.SILVER) if exists else None
        has_moved = version is None or reader.has_moved(tables.JOURNAL, version)
        return cls(
            reader,
            settings,
            begun,
            published,
            max((base.batch for base in begun.bases_in(begun.newest)), default=-1),
            last,
            0 if commit is None else commit[1].facts.get("decisions", 0),
            closed_by(reader) if exists else 0,
            read_history(reader, settings) if has_moved else begun,
        )

    @property
    def batch(self) -> int:
        """The number of silver's last batch; -1 before the first."""
        return -1 if self.last is None else self.last.batch


def _journal(lake: _Lake) -> Iterator[Behind]:
    """Yield where the journal ends before what silver's last batch says."""
    history, last = lake.history, lake.last
    if last is None:
        return
    ends = {
        "decision": (history.decisions, lake.followed),
        "generation": (history.newest.number, last.generation),
        "epoch": (history.epochs.current.number, last.epoch),
    }
    for what, (end, said) in ends.items():
        if end < said:
            verb = "follows" if what == "decision" else "is of"
            said_of = f"silver's last batch {verb} {what} {said}"
            yield Behind(tables.JOURNAL, f"{what} {end}", said_of)
    if history.newest.number < lake.closed_by:
        said_of = f"silver has rows that generation {lake.closed_by} has closed"
        yield Behind(tables.JOURNAL, f"generation {history.newest.number}", said_of)


def _silver(lake: _Lake) -> Iterator[Behind]:
    """Yield where silver ends before what the journal, saved states and `published` say."""
    begun = lake.begun.newest
    end = f"batch {lake.batch}"
    if lake.batch < begun.from_batch - 1:
        said = f"generation {begun.number} of the journal begins with batch {begun.from_batch}"
        yield Behind(tables.SILVER, end, said)
    if lake.batch < lake.saved:
        yield Behind(tables.SILVER, end, f"bases has a state after batch {lake.saved}")
    if begun.known and (rows := count_known(lake.reader, begun)) < begun.known:
        said = f"the journal says that there are {begun.known}"
        of_rows = f"{rows} rows of what generation {begun.number} knows of messages"
        yield Behind(tables.SILVER, of_rows, said)
    newest, last = lake.history.newest, lake.last
    clocks = last.clocks if last is not None and last.generation == newest.number else {}
    if not lake.history.generations:  # gold has noted what its topic has before the lake begins
        return
    for sequence, noted in lake.published:
        begin = {p: clock_of(tail.place) for p, tail in newest.tails_of(sequence).items()}
        for p, time in sorted(noted.items()):
            if time > max(begin.get(p, -1), clocks.get(p, -1)):
                clock = time_text(clocks[p]) if p in clocks else "none"
                said = f"published says that {sequence.table} of {time_text(time)} are out"
                yield Behind(tables.SILVER, f"clock {clock} in partition {p}", said)


def _bronze(lake: _Lake) -> Iterator[Behind]:
    """Yield where bronze ends before what silver has merged."""
    if lake.last is None:
        return
    begin = lake.history.generations.of(lake.last.batch).begin
    merged = {
        tp: done.until_offset
        for tp, done in lake.last.ranges.items()
        if done.until_offset > begin.get(tp, 0)
    }
    deleted = _deleted_until(lake, merged)
    for input_id in lake.settings.inputs:
        until = {tp.partition: at for tp, at in merged.items() if tp.input == input_id}
        if not until:
            continue
        ends = row_ends(lake.reader, input_id, {p: at - 1 for p, at in until.items()})
        for p, at in sorted(until.items()):
            end = max(ends.get(p, 0), deleted.get(TopicPartition(input_id, p), 0))
            if end < at:
                yield _bronze_behind(lake, input_id, p, at)


def _bronze_behind(lake: _Lake, input_id: InputId, partition: int, until: int) -> Behind:
    end = row_ends(lake.reader, input_id, {}).get(partition, 0)
    place = f"{input_id.topic}[{partition}]"
    said = f"silver has merged it up to offset {until}"
    return Behind(tables.bronze(input_id.source), f"offset {end} of {place}", said)


def _deleted_until(lake: _Lake, merged: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Return the offset up to which `keep` may have deleted a topic-partition's last rows.

    Refused records go by their own time, so that any of them may be gone.
    """
    floors, first = lake.history.floors, lake.history.first_base
    ends: Mapping[TopicPartition, OffsetRange] = {}
    if first is not None:
        ends = read_batches(lake.reader, {first.batch})[first.batch].ranges
    until: dict[TopicPartition, int] = {}
    for tp, at in merged.items():
        if (tables.QUARANTINE, tp.partition) in floors.times:
            until[tp] = at
        elif tp in ends:
            until[tp] = ends[tp].until_offset
    return until


def _erased(lake: _Lake) -> Iterator[Behind]:
    """Yield where `erased` ends before what the journal says."""
    said = lake.history.erased
    if not said or not lake.reader.exists(tables.ERASED):
        return
    last = lake.reader.summary(tables.ERASED, [], {"last": ("max", "erased_at")})["last"][0].as_py()
    if (last or 0) < said:
        end = time_text(last) if last else "nothing"
        yield Behind(
            tables.ERASED, end, f"the journal says that rows of {time_text(said)} are there"
        )


def _versions(lake: _Lake) -> Iterator[Behind]:
    """Yield where a table has not the version yet that the journal says of it."""
    for table, said in lake.history.versions.items():
        if lake.reader.exists(table) and (end := lake.reader.version(table)) < said:
            of_change = f"a jump, or `forget`, has changed it up to version {said}"
            yield Behind(table, f"version {end}", of_change)


_ENDS: Final[tuple[Callable[[_Lake], Iterator[Behind]], ...]] = (
    _journal,
    _silver,
    _erased,
    _bronze,
    _versions,
)
"""Which table ends where although which other one says what.

| table | ends at | told by |
|---|---|---|
| journal | its last decision, generation and epoch | silver's last batch, and last jump |
| silver | its last batch; its clocks; rows of what is out | journal and bases; published; journal |
| erased | the time of its last rows | the journal |
| bronze | its last offsets | silver's last batch |
| bronze, silver, erased | their versions | the journal |

`published` is told by the topics themselves (`Gold.recover`).
"""


def check_not_behind(reader: TableReader, settings: Settings) -> History:
    """Return the history of a lake.

    Raises ConfigurationError where a table ends before what another one says: it was replaced by
    an earlier copy, or restored.
    """
    lake = _Lake.read(reader, settings)
    for ends in _ENDS:
        for table, end, said in ends(lake):
            raise ConfigurationError(
                f"the table {table} ends at {end}, although {said}: an earlier copy of it was put "
                "in its place",
                where="lake",
                fix=BRING_BACK,
            )
    check_bases(reader, lake.history.bases)
    return lake.history


# -- tables whose log has a RESTORE


def check_not_restored(reader: TableReader, lake: Lake) -> None:
    """Raise ConfigurationError where a table was restored to before something that a run, or a
    command, has written to it.
    """
    for table in lake.layout:
        if table != tables.QUALITY and reader.exists(table):
            check_table(reader, lake, table)


def check_table(reader: TableReader, lake: Lake, table: str) -> None:
    """Raise ConfigurationError where this table was restored to before a commit of the layers."""
    undone = _undone(reader, lake.layout[table])
    if undone is not None:
        restore, version = undone
        address = lake.address(table)
        name = address if lake.owning_lake(table).is_catalog else f"delta.`{address}`"
        raise ConfigurationError(
            f"{table} was taken back by somebody's RESTORE (its version {restore}), and what "
            f"was written to it until its version {version} is gone: take it forward again "
            f"with RESTORE TABLE {name} TO VERSION AS OF {version}",
            where="lake",
            fix=(
                "to go back on purpose, use `watersmeet reset`, or begin a new lake elsewhere "
                "(with `kafka.start: sink` it takes up the sink)"
            ),
        )


def _undone(reader: TableReader, table: Table) -> tuple[int, int] | None:
    """Return the versions of a restore and of the last owner's commit that it has undone.

    None where there is no such restore.
    """
    restore: int | None = None
    until: int | None = None
    for version in walk(reader, table.name):
        is_undone = until is not None and version.number > until
        commit = Commit.parse(version.metadata)
        # Nobody else writes to the others, to some of them without a token.
        is_own = not table.has_records and version.operation in WRITES
        if is_own if commit is None else not commit.is_fence:
            return (restore, version.number) if is_undone and restore is not None else None
        if version.restored_to is not None and not is_undone:
            restore = version.number
            until = version.restored_to
    return None
