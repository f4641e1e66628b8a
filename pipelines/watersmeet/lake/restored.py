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

from collections.abc import Iterator
from itertools import chain
from typing import TypeAlias

from watersmeet.core.plan import BatchPlan, TopicPartition
from watersmeet.core.sequence import clock_of
from watersmeet.core.times import time_text
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.commits import WRITES, Commit, closed_by, last_decision
from watersmeet.lake.history import History, read_history
from watersmeet.lake.inputs import by_input
from watersmeet.lake.location import Lake
from watersmeet.lake.newest import row_ends
from watersmeet.lake.progress import last_batch, read_batches
from watersmeet.lake.published import Clocks, last_clocks
from watersmeet.lake.recovered import count_known
from watersmeet.lake.state import check_bases
from watersmeet.lake.table_errors import BRING_BACK
from watersmeet.lake.table_reader import TableReader, extreme, row_count, walk
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


_Behind: TypeAlias = Iterator[tuple[str, str, str]]
"""Tables, each with where it ends, and with what the next one says, which names it."""


def check_not_behind(reader: TableReader, settings: Settings) -> History:
    """Return the history of a lake.

    Raises ConfigurationError where a table ends before what another one says: it was replaced by
    an earlier copy, or restored.

    | table | ends at | told by |
    |---|---|---|
    | journal | its last decision, generation and epoch | silver's last batch, and last jump |
    | silver | its last batch; its clocks; rows of what is out | journal, bases, published |
    | erased | the time of its last rows | the journal |
    | bronze | its last offsets | silver's last batch |
    | bronze, silver, erased | their versions | the journal |

    `published` is told by the topics themselves (`Gold.recover`).
    """
    version = reader.version(tables.JOURNAL) if reader.exists(tables.JOURNAL) else None
    begun = read_history(reader, settings)
    published = last_clocks(reader)
    exists = reader.exists(tables.SILVER)
    last = last_batch(reader) if exists else None
    commit = last_decision(reader, tables.SILVER) if exists else None
    followed = 0 if commit is None else commit[1].facts.get("decisions", 0)
    closed = closed_by(reader) if exists else 0
    has_moved = version is None or reader.has_moved(tables.JOURNAL, version)
    history = read_history(reader, settings) if has_moved else begun
    for table, end, said in chain(
        _journal(history, last, followed, closed),
        _silver(reader, begun, history, last, published),
        _erased(reader, history),
        _bronze(reader, settings, history, last),
        _versions(reader, history),
    ):
        raise ConfigurationError(
            f"the table {table} ends at {end}, although {said}: an earlier copy of it was put "
            "in its place",
            where="lake",
            fix=BRING_BACK,
        )
    check_bases(reader, history.bases)
    return history


def _journal(history: History, last: BatchPlan | None, followed: int, closed: int) -> _Behind:
    # `followed`: the decision that silver's last batch follows; `closed`: the generation whose
    # beginning has closed rows since then, or 0.
    if last is None:
        return
    newest = history.newest.number
    for what, verb, end, said in (
        ("decision", "follows", history.decisions, followed),
        ("generation", "is of", newest, last.generation),
        ("epoch", "is of", history.epochs.current.number, last.epoch),
    ):
        if end < said:
            yield tables.JOURNAL, f"{what} {end}", f"silver's last batch {verb} {what} {said}"
    if newest < closed:
        said_of = f"silver has rows that generation {closed} has closed"
        yield tables.JOURNAL, f"generation {newest}", said_of


def _silver(
    reader: TableReader, before: History, history: History, last: BatchPlan | None, noted: Clocks
) -> _Behind:
    # `before`: the journal as it was before `published` (`noted`) and silver were read.
    begun, batch = before.newest, -1 if last is None else last.batch
    if batch < begun.from_batch - 1:
        said = f"generation {begun.number} of the journal begins with batch {begun.from_batch}"
        yield tables.SILVER, f"batch {batch}", said
    if batch < (saved := max((base.batch for base in before.bases_in(begun)), default=-1)):
        yield tables.SILVER, f"batch {batch}", f"bases has a state after batch {saved}"
    if begun.known and (rows := count_known(reader, begun)) < begun.known:
        of_rows = f"{rows} rows of what generation {begun.number} knows of messages"
        yield tables.SILVER, of_rows, f"the journal says that there are {begun.known}"
    newest = history.newest
    clocks = last.clocks if last is not None and last.generation == newest.number else {}
    if not history.generations:  # gold has noted what its topic has before the lake begins
        return
    for sequence, times in noted:
        begin = {p: clock_of(tail.place) for p, tail in newest.tails_of(sequence).items()}
        for p, time in sorted(times.items()):
            if time > max(begin.get(p, -1), clocks.get(p, -1)):
                clock = time_text(clocks[p]) if p in clocks else "none"
                said = f"published says that {sequence.table} of {time_text(time)} are out"
                yield tables.SILVER, f"clock {clock} in partition {p}", said


def _bronze(
    reader: TableReader, settings: Settings, history: History, last: BatchPlan | None
) -> _Behind:
    if last is None:
        return
    begin = history.generations.of(last.batch).begin
    first = history.first_base
    # `keep` may have deleted a topic-partition's last rows: those before the base with which
    # history begins, and any that were refused, since these go by their own time.
    kept = {} if first is None else read_batches(reader, {first.batch})[first.batch].ranges
    merged = by_input(last.ranges)
    for input_id in settings.inputs:
        until = {
            p: done.until_offset
            for p, done in sorted(merged.get(input_id, {}).items())
            if done.until_offset > begin.get(TopicPartition(input_id, p), 0)
            and (tables.QUARANTINE, p) not in history.floors.times
        }
        ends = row_ends(reader, input_id, {p: at - 1 for p, at in until.items()}) if until else {}
        for p, at in until.items():
            base = kept.get(TopicPartition(input_id, p))
            if max(ends.get(p, 0), 0 if base is None else base.until_offset) < at:
                end = row_ends(reader, input_id, {}).get(p, 0)
                said = f"silver has merged it up to offset {at}"
                table = tables.bronze(input_id.source)
                yield table, f"offset {end} of {input_id.topic}[{p}]", said


def _erased(reader: TableReader, history: History) -> _Behind:
    if history.erased and reader.exists(tables.ERASED):
        last = extreme(reader, tables.ERASED, "erased_at") or 0
        if last < history.erased:
            said = f"the journal says that rows of {time_text(history.erased)} are there"
            yield tables.ERASED, time_text(last) if last else "nothing", said


def _versions(reader: TableReader, history: History) -> _Behind:
    for table, said in history.versions.items():
        if reader.exists(table) and (end := reader.version(table)) < said:
            of_change = f"a jump, or `forget`, has changed it up to version {said}"
            yield table, f"version {end}", of_change


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
    # The versions of a restore and of the last owner's commit that it has undone.
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
