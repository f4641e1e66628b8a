"""Rebuild of silver from bronze alone, in a folder of its own, and its comparison with silver.

A rebuild may have another window. It is of one generation, and goes exactly as far as silver was:
up to the offsets and the clocks of its last batch with notes. So the two can be compared row by row
(`verify --against`) while the lake itself goes on. Where `keep` or `forget` takes records out of
bronze meanwhile, a rebuild ends with an error.

Where rows have been deleted (`keep`), a rebuild begins where history does
(`lake.retention_bounds`), with the merge records that were open then. The comparison leaves out
those that were finished before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.audit.evidence import Evidence, find_generation, read_evidence
from watersmeet.audit.problems import Findings, answer, different
from watersmeet.audit.unnoted import before_unnoted
from watersmeet.audit.verify_evidence import groups, place
from watersmeet.core.columns import int64s, looked_up, time_column, times_ms
from watersmeet.core.inputs import InputId
from watersmeet.core.merge import REPLACING
from watersmeet.core.open_before import open_before
from watersmeet.core.plan import BatchPlan, End, OffsetRange, Rules, TopicPartition
from watersmeet.core.reading import RECORD_BYTES
from watersmeet.core.repeated import RECORD_IDS
from watersmeet.core.types import DUE, TENANT, TIME
from watersmeet.core.window import Window
from watersmeet.engine import Engine
from watersmeet.engine.choice import create_tables, open_engine
from watersmeet.errors import ConfigurationError, WatersmeetError
from watersmeet.lake import tables
from watersmeet.lake.epochs import Epochs, begin_epoch, inherited_lateness, read_epochs
from watersmeet.lake.generations import generation_rows, read_generations
from watersmeet.lake.identity import (
    REBUILD_BATCH,
    REBUILD_GENERATION,
    keep_facts,
    kept_facts,
)
from watersmeet.lake.location import Lake
from watersmeet.lake.progress import facts_of, last_batch
from watersmeet.lake.recovered import rows_of_parts
from watersmeet.lake.retention_bounds import History, read_retention_bounds
from watersmeet.lake.snapshot import Snapshot
from watersmeet.lake.table_reader import Condition, TableReader, Where
from watersmeet.running.owner import Owner, now_ms
from watersmeet.settings import Settings
from watersmeet.silver import Silver

WINDOW_FIELD: Final = "merge.timeout"
LAG_FIELD: Final = "merge.tenant_max_lag"
"""Fields of the table `configuration` of a complete rebuild: the timeout or window, and the lag of
tenants (ms), that were asked for. They are only there where the rules of some batch that it repeats
were others.
"""

_COUNTS = ("records", "open", "waiting", "timed_out", "valid", "complete")


def rebuild(
    reader: TableReader,
    settings: Settings,
    directory: Path,
    window: Window | None = None,
    notify: Callable[[BatchPlan], None] = lambda _: None,
    *,
    lag_ms: int | None = None,
    generation: int | None = None,
) -> dict[str, Any]:
    """Derive silver again in `directory`, and return the answer of `rebuild --json`.

    The answer says where the rebuild is, how far it goes, and what silver holds beside what the
    rebuild holds.

    - `window` and `lag_ms`: others than the lake's.
    - `notify`: is called with each batch.
    - `generation`: its number, by default that of the newest.

    Raises ConfigurationError where the folder is not empty, where there is nothing to rebuild, or
    where a lag is given and the lake has no tenants. Raises HistoryMovedError where records were
    taken out of bronze meanwhile.
    """
    snapshot = Snapshot(reader, settings)
    reader = before_unnoted(snapshot, settings)
    settings = read_epochs(reader, settings).current.settings
    evidence = read_evidence(reader, settings, _partitions(reader, settings), generation, full=True)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigurationError(
            f"{directory} is not an empty folder", where="--into", fix="name a new one"
        )
    settings.merge.check_tenants("--tenant-max-lag", lag_ms)

    def rebuilt(epoch_settings: Settings) -> Settings:
        """Return an epoch's settings as the rebuild has them: with its directory, and what was
        asked for.
        """
        merge = epoch_settings.merge if window is None else epoch_settings.merge.with_window(window)
        merge = merge if lag_ms is None else merge.model_copy(update={"tenant_max_lag_ms": lag_ms})
        return rebuilt_settings(epoch_settings, directory).model_copy(update={"merge": merge})

    target = rebuilt(settings)
    into = open_engine(target, dict.fromkeys(tables.inputs_of(settings), Lake(settings)))
    create_tables(into)
    here = open_engine(settings)
    begin = generation_rows(target, evidence.generation._replace(from_batch=0))
    number = evidence.generation.number
    keep_facts(into.reader, into.append, target, {REBUILD_GENERATION: str(number)})
    into.append(tables.GENERATIONS, begin)
    try:
        for plan in _batches(here, into, rebuilt, evidence):
            notify(plan)
    except Exception:  # deleted records break whatever reads them first
        _check_history(snapshot, settings, directory)
        raise
    _check_history(snapshot, settings, directory)
    facts = {REBUILD_BATCH: str(evidence.last_batch), **_other_rules(evidence, rebuilt)}
    keep_facts(into.reader, into.append, target, facts)
    since = {p: history.batch for p, history in evidence.history.items()}
    later = {p for p, batch in since.items() if batch >= evidence.generation.from_batch}
    lags = {"lake": settings.merge.tenant_max_lag_ms, "rebuilt": target.merge.tenant_max_lag_ms}
    answer = {
        "into": str(directory),
        "batch": evidence.last_batch,
        "generation": number,
        "timeout_ms": {"lake": settings.merge.timeout_ms, "rebuilt": target.merge.timeout_ms},
        "window": {"lake": _window_of(settings), "rebuilt": _window_of(target)},
        "tenant_max_lag_ms": lags,
        "lake": content_of(here, settings, reader, evidence.batches, since, later=later),
        "rebuilt": content_of(into, settings, into.reader, later=later),
    }
    return {name: value for name, value in answer.items() if name not in settings.hidden_names}


class HistoryMovedError(WatersmeetError):
    """Records were taken out of bronze while a lake was derived again."""

    def __init__(self, location: str, directory: Path) -> None:
        super().__init__(
            f"{location}: records were taken out of bronze while it was derived again, by `keep`, "
            f"`forget` or by hand, so that {directory} may lack them; delete that folder, and "
            "rebuild again"
        )


def _check_history(snapshot: Snapshot, settings: Settings, directory: Path) -> None:
    """Raise HistoryMovedError where bronze no longer has what it had in the snapshot."""
    if any(snapshot.has_changed_since(tables.bronze(source)) for source in settings.sources):
        raise HistoryMovedError(Lake(settings).location, directory)


def _other_rules(evidence: Evidence, rebuilt: Callable[[Settings], Settings]) -> dict[str, str]:
    """Return, as a rebuild records them, the rules that were asked for and make other merge
    records than those of an epoch that it repeats.
    """
    facts: dict[str, str] = {}
    for epoch, _ in evidence.through:
        own = epoch.settings.merge
        merge = rebuilt(epoch.settings).merge
        if merge.window != own.window:
            facts[WINDOW_FIELD] = str(merge.window)
        if merge.tenant_max_lag_ms != own.tenant_max_lag_ms:
            facts[LAG_FIELD] = str(merge.tenant_max_lag_ms)
    return facts


def _window_of(settings: Settings) -> dict[str, int | None] | None:
    """Return a window by gap as the answer has it; None where there is a timeout."""
    window = settings.merge.window
    return None if window.is_timeout else window._asdict()


def rebuilt_settings(settings: Settings, directory: Path) -> Settings:
    """Return the configuration for a lake in that folder."""
    return settings.model_copy(update={"lake": str(directory.absolute())})


def content_of(
    engine: Engine,
    settings: Settings,
    reader: TableReader,
    batches: Sequence[Condition] = (),
    since: Mapping[int, int] = MappingProxyType({}),
    *,
    later: Collection[int] = (),
) -> dict[str, Any]:
    """Return how many merge records silver has, and what became of the records of each source.

    - Merge records: all, open, timed out, valid, and *complete* (with parts of every source).
    - With tenants, records that wait for their tenants' clocks.
    - By source: how many records were merged, how many of them into a complete merge record, how
      many were late and, where records have ids, how many were duplicates.

    Silver is read as `reader` has it. Only these `batches` count. What was finished, or late, up
    to the batch `since` of its partition does not count. Nor do late duplicates in partitions whose
    history begins `later` than the generation: they follow from merge records of before.
    """
    sources = list(settings.sources)
    names = list(_COUNTS)
    for source in sources:
        names += [f"merged_{source}", f"matched_{source}"]
    schema = pa.schema([("partition", pa.int32()), *((name, pa.int64()) for name in names)])
    rows = engine.read(
        tables.SILVER,
        ["partition", "status", "valid", "batch", *sources],
        [list(batches)] if batches else (),
        version=reader.version(tables.SILVER),
    )
    counted = engine.per_partition(
        partial(_counted, sources=sources, schema=schema, since=since), [rows], schema
    )
    [sums] = engine.summary(counted, [], {name: ("sum", name) for name in names}).to_pylist()
    shown = {name: sums[name] or 0 for name in _COUNTS if name not in settings.hidden_names}
    noted = [name for name in (tables.LATE, tables.DUPLICATES) if name not in settings.hidden_names]
    where: dict[str, Where] = {name: [list(batches)] for name in noted}
    if later:
        compared = [("is_late", "=", False)], [("partition", "not in", sorted(later))]
        where[tables.DUPLICATES] = [[*batches, *condition] for condition in compared]
    noted_counts = {name: _noted(reader, name, where[name], since) for name in noted}
    source_counts = {}
    for source in sources:
        source_counts[source] = {
            "merged": sums[f"merged_{source}"] or 0,
            "in_complete_records": sums[f"matched_{source}"] or 0,
            **{name: counts[source] for name, counts in noted_counts.items()},
        }
    return {**shown, "sources": source_counts}


def _noted(reader: TableReader, table: str, where: Where, since: Mapping[int, int]) -> Counter[str]:
    """Return, by source, how many records of these batches a table of notes has."""
    counts: Counter[str] = Counter()
    by = ["source", "partition", "batch"]
    for row in reader.summary(table, by, {"n": ("count", "*")}, where).to_pylist():
        counts[row["source"]] += row["n"] * (row["batch"] > since.get(row["partition"], -1))
    return counts


def _counted(
    rows: pa.Table, sources: list[str], schema: pa.Schema, since: Mapping[int, int]
) -> pa.Table:
    """Return the counts of some rows, as one row of no particular partition."""
    every = _alive(rows, since)
    rows = every.filter(pc.not_equal(every["status"], "waiting"))
    sizes = [pc.list_value_length(rows[source]) for source in sources]
    is_complete = pc.greater(pc.min_element_wise(*sizes), 0)
    sums = [
        pc.sum(pc.equal(every["status"], status)) for status in ("open", "waiting", "timed_out")
    ]
    sums += [pc.sum(column) for column in (rows["valid"], is_complete)]
    for size in sizes:
        sums += [pc.sum(size), pc.sum(size.filter(is_complete))]
    counts = [0, rows.num_rows, *(total.as_py() for total in sums)]
    return pa.Table.from_pylist([dict(zip(schema.names, counts, strict=True))], schema)


def _alive(rows: pa.Table, since: Mapping[int, int]) -> pa.Table:
    """Return the rows of silver that may still change, or that changed after the batch `since` of
    their partition.
    """
    changed = int64s(rows["batch"]) > looked_up(int64s(rows["partition"]), since, -1)
    return rows.filter(pc.or_(pc.not_equal(rows["status"], "timed_out"), pa.array(changed)))


def _open_at(
    rows: pa.Table,
    ends: Mapping[TopicPartition, int],
    since: Mapping[int, int],
    inputs: Sequence[InputId],
    rules: Rules,
) -> pa.Table:
    """Return the merge records of a partition that were open where its history begins."""
    opened = open_before(_alive(rows, since), ends, inputs)
    due = rules.due(times_ms(opened["event_time"]), times_ms(opened["last_event_time"]))
    return opened.set_column(opened.column_names.index("due"), "due", time_column(due))


def _begin(
    here: Engine,
    owner: Owner,
    settings: Settings,
    evidence: Evidence,
    begins: Mapping[int, History],
    epoch: int,
) -> None:
    """Write a rebuild's batch for partitions whose history does not begin with the lake.

    It has the merge records that were open there then, and how far the merge was. `epoch`: that of
    the rebuild whose rules closed none of these records.
    """
    into = owner.engine
    last = last_batch(into.reader, settings)
    number = 0
    clocks = dict[int, int]()
    ends = dict[TopicPartition, int]()
    ranges = {
        tp: OffsetRange(since, since, None, None, None)
        for tp, since in evidence.generation.begin.items()
    }
    if last is not None:
        number = last[0].batch + 1
        clocks = dict(last[0].clocks)
        for tp, done in last[0].ranges.items():
            ranges[tp] = OffsetRange(
                done.until_offset, done.until_offset, done.position, done.position, done.head
            )
    for p, history in begins.items():
        for input_id, offset in history.offsets.items():
            tp = TopicPartition(input_id, p)
            position = history.positions[input_id]
            ends[tp] = offset
            ranges[tp] = OffsetRange(offset, offset, position, position, position)
        if history.clock is not None:
            clocks[p] = history.clock
    plan = BatchPlan(
        number, ranges, clocks, has_late=False, generation=evidence.generation.number, epoch=epoch
    )
    schema = into.lake.layout[tables.SILVER].schema
    since = {p: history.batch for p, history in begins.items()}
    changed: Where = [[("status", "!=", "timed_out")], [("batch", ">", min(since.values()))]]
    changed = [[*term, ("partition", "in", [*begins]), *evidence.batches] for term in changed]
    rows = here.read(tables.SILVER, schema.names, changed, version=evidence.version)
    open_rows = partial(
        _open_at,
        ends=ends,
        since=since,
        inputs=settings.inputs,
        rules=Rules(settings.merge.window),
    )
    opened = here.collect(here.per_partition(open_rows, [rows], schema))
    for name in REPLACING:
        opened = opened.append_column(name, pa.nulls(len(opened), TIME))
    commit = owner.next_commit(tables.SILVER, facts=facts_of(plan, settings))
    into.merge(tables.SILVER, into.rows(opened), commit)
    owner.confirm(tables.SILVER, commit)
    retention_bounds = [("silver", p, batch, None, now_ms()) for p, batch in since.items()]
    into.append(tables.FLOORS, into.lake.layout[tables.FLOORS].rows(retention_bounds))


def _end(
    tp: TopicPartition, until: int, head: int | None, evidence: Evidence, later: Container[int]
) -> End:
    """Return where an epoch ends in a topic-partition.

    In partitions whose history begins `later`, the epoch has nothing to merge.
    """
    if tp.partition in later:
        return End(evidence.generation.begin.get(tp, 0), None)
    return End(until, head)


def _batches(
    here: Engine, into: Engine, rebuilt: Callable[[Settings], Settings], evidence: Evidence
) -> Iterator[BatchPlan]:
    """Merge the generation into `into`, epoch by epoch, and yield each batch.

    `rebuilt`: returns the rebuild's settings for those of an epoch.
    """
    owner = Owner(into)
    number = evidence.generation.number
    rows: list[dict[str, Any]] = evidence.recovered.to_pylist()
    rows += [{"partition": p, "since": since} for p, since in evidence.since.items()]
    rows += rows_of_parts(evidence.out if number else {})
    if rows:
        recovered = into.lake.layout[tables.RECOVERED]
        recovered_rows = ({**row, "recovered_at": now_ms(), "generation": number} for row in rows)
        into.append(tables.RECOVERED, recovered.rows_of(recovered_rows))
    later = dict(evidence.history)
    next_epochs = [epoch.from_batch for epoch, _ in evidence.through[1:]]
    for number_there, ((epoch, end), until_batch) in enumerate(
        zip_longest(evidence.through, next_epochs)
    ):
        begins = {
            p: history
            for p, history in later.items()
            if until_batch is None or history.batch < until_batch
        }
        later = {p: history for p, history in later.items() if p not in begins}
        settings = rebuilt(epoch.settings)
        if begins:
            _begin(here, owner, settings, evidence, begins, max(0, number_there - 1))
        ends = {
            tp: _end(tp, offset, end.heads.get(tp), evidence, later)
            for tp, offset in end.until.items()
        }
        last = last_batch(into.reader, settings)
        begin_epoch(
            into.reader,
            into.append,
            settings,
            0 if last is None else last[0].batch + 1,
            now_ms(),
        )
        rebuilt_epochs = Epochs(
            earlier._replace(settings=rebuilt(earlier.settings))
            for earlier in evidence.epochs
            if earlier.number <= epoch.number
        )
        lateness = inherited_lateness(evidence.reader, rebuilt_epochs, evidence.generation)
        yield from Silver(owner, settings, evidence.partitions, None, ends, lateness).drain()


def _partitions(reader: TableReader, settings: Settings) -> int:
    last = None
    if reader.exists(tables.PROGRESS):
        last = reader.summary(tables.PROGRESS, [], {"last": ("max", "partition")})["last"][
            0
        ].as_py()
    if last is None:
        place = Lake(settings).location
        raise ConfigurationError(
            "silver has merged nothing yet, so there is nothing to derive again",
            where=place,
            fix="run it first",
        )
    return int(last) + 1


# -- verify --against

Row = tuple[Any, ...]

_RECORD_COLUMNS: Final = ["partition", "source", "topic", "offset", "merge_key", "event_time"]
_LATE_COLUMNS: Final = [*_RECORD_COLUMNS, "position", "u", "value", *TENANT.names]
"""Columns of late records that are compared."""

_DUPLICATE_COLUMNS: Final = [*_RECORD_COLUMNS, "id", "of_offset", "is_late", *TENANT.names]
"""Columns of duplicates that are compared."""

_CORRECTION_PLACE: Final = ["partition", "source", "topic", "offset"]
_NOT_COMPARED: Final = frozenset({"batch", "generation", RECORD_BYTES.name})
"""Columns of corrections that are not compared: a rebuild cuts batches in another way."""


def verify_against(
    here: TableReader,
    there: TableReader,
    settings: Settings,
    directory: Path,
    generation: int | None = None,
) -> dict[str, Any]:
    """Compare silver, late, duplicates and corrections with the rebuild `there`, and return the
    answer of `verify --against --json`.

    Both are compared as they were when the rebuild was made, in the generation that the rebuild is
    of. The columns of their content are compared (`batch` is not), a group of partitions at a time.

    Raises ConfigurationError where there is no rebuild, or where the rebuild has another generation
    than the one that is named, or was asked to have another timeout or another lag of tenants.
    """
    here = before_unnoted(Snapshot(here, settings), settings)
    settings = read_epochs(here, settings).current.settings
    facts = _check_rebuild(there, directory)
    own = find_generation(read_generations(here, settings), int(facts.get(REBUILD_GENERATION, "0")))
    if generation is not None and generation != own.number:
        raise ConfigurationError(
            f"{directory} was derived from generation {own.number}, and not from {generation}",
            where="--against",
            fix=f"leave `--generation` out, or rebuild with `--generation {generation}`",
        )
    batch = int(facts[REBUILD_BATCH])
    if batch > (-1 if (last := last_batch(here, settings)) is None else last[0].batch):
        raise WatersmeetError(
            f"{directory} goes up to batch {batch}, which this lake does not have",
            where="--against",
            fix="rebuild again",
        )
    comparison = _Comparison(
        here,
        there,
        settings,
        own.from_batch,
        batch,
        version=_version_after(here, settings, batch),
        since=read_retention_bounds(there).batches,
        kept=read_retention_bounds(here).times,
        silver=_silver_columns(settings),
    )
    in_silver = Findings("silver")
    in_late = Findings("late")
    in_duplicates = Findings("duplicates")
    in_corrections = Findings("corrections")
    for first, until in groups(_partitions(here, settings)):
        partitions = range(first, until)
        comparison.check_silver(partitions, in_silver)
        comparison.check_noted(tables.LATE, _LATE_COLUMNS, "position", partitions, in_late)
        if settings.has_ids:
            names = _DUPLICATE_COLUMNS
            comparison.check_noted(
                tables.DUPLICATES, names, "event_time", partitions, in_duplicates
            )
        if tables.has_corrections(settings):
            comparison.check_corrections(partitions, in_corrections)
    return answer([in_silver, in_late, in_duplicates, in_corrections])


def _check_rebuild(there: TableReader, directory: Path) -> dict[str, str]:
    """Return the fields that a complete rebuild records itself in.

    Raises ConfigurationError where there is none, or where other rules were asked for than those
    of the batches that it repeats.
    """
    facts = kept_facts(there)
    if REBUILD_BATCH not in facts:
        raise ConfigurationError(
            f"{directory} holds no complete rebuild",
            where="--against",
            fix="`watersmeet rebuild --into DIR` makes one",
        )
    if LAG_FIELD in facts:
        raise ConfigurationError(
            f"{directory} was derived with a tenant_max_lag of {facts[LAG_FIELD]} ms, "
            "which makes other merge records",
            where="--against",
            fix="rebuild without another one",
        )
    if WINDOW_FIELD in facts:
        kind = "gap" if "," in facts[WINDOW_FIELD] else "timeout"
        raise ConfigurationError(
            f"{directory} was derived with a {kind} of {facts[WINDOW_FIELD]}, which makes "
            "other merge records",
            where="--against",
            fix="rebuild without another one",
        )
    return facts


@dataclass(frozen=True)
class _Comparison:
    """Silver and its notes of a lake and of its rebuild, as they were after `batch`.

    - `from_batch`: the first batch of the generation that the rebuild is of.
    - `version`: the version of the lake's silver after `batch`.
    - `since`: by partition, the batch with which the rebuild's history begins.
    - `kept`: by table and partition, the time (ms) before which the lake may have deleted rows.
    - `silver`: the columns that are compared.
    """

    here: TableReader
    there: TableReader
    settings: Settings
    from_batch: int
    batch: int
    version: int
    since: Mapping[int, int]
    kept: Mapping[tuple[str, int], int]
    silver: list[str]

    def check_silver(self, partitions: range, findings: Findings) -> None:
        """Compare the merge records of some partitions.

        Left out are those that were finished before the rebuild's history begins.
        """
        conditions: list[Condition] = [
            ("partition", ">=", partitions.start),
            ("partition", "<", partitions.stop),
        ]
        is_own: Condition = ("batch", ">=", self.from_batch)
        alive: Where = [[*conditions, is_own]]
        if self.since:
            alive = [[*conditions, is_own, ("status", "!=", "timed_out")]]
            alive += [
                [("partition", "=", p), ("batch", ">", self.since.get(p, -1)), is_own]
                for p in partitions
            ]
        here = _rows(self.here, tables.SILVER, self.silver, alive, self.version)
        there = _rows(self.there, tables.SILVER, self.silver, [conditions])
        kept_here = _kept(here, self.silver, self.kept)
        kept_there = _kept(there, self.silver, self.kept)
        for key, one, other in different(kept_here, kept_there, itemgetter(slice(3))):
            findings.add(_difference(one, other, self.silver), place(*key))

    def check_noted(
        self, table: str, columns: list[str], age: str, partitions: range, findings: Findings
    ) -> None:
        """Compare the late, or repeated, records of some partitions.

        `age`: the column by which the lake may have deleted rows of the table.
        """
        where_here = list[list[Condition]]()
        where_there = list[list[Condition]]()
        for p in partitions:
            after = max(self.since.get(p, -1), self.from_batch - 1)
            conditions: list[Condition] = [
                ("partition", "=", p),
                (age, ">=", self.kept.get((table, p), 0)),
            ]
            if table == tables.DUPLICATES and not self._is_whole(p):
                conditions.append(("is_late", "=", False))
            where_here.append([*conditions, ("batch", ">", after), ("batch", "<=", self.batch)])
            where_there.append(conditions)
        here = _rows(self.here, table, columns, where_here)
        there = _rows(self.there, table, columns, where_there)
        _compare(table, here, there, columns, findings)

    def check_corrections(self, partitions: range, findings: Findings) -> None:
        """Compare the corrections of some partitions: those that are whole in the rebuild."""
        whole = [p for p in partitions if self._is_whole(p)]
        if not whole:
            return
        is_there: list[Condition] = [("partition", "in", whole)]
        batches: list[Condition] = [("batch", ">=", self.from_batch), ("batch", "<=", self.batch)]
        columns = tables.layout(self.settings)[tables.CORRECTIONS].schema.names
        names = _CORRECTION_PLACE + [
            name for name in columns if name not in _NOT_COMPARED.union(_CORRECTION_PLACE)
        ]
        here = _rows(self.here, tables.CORRECTIONS, names, [[*is_there, *batches]])
        there = _rows(self.there, tables.CORRECTIONS, names, [is_there])
        _compare(tables.CORRECTIONS, here, there, names, findings)

    def _is_whole(self, partition: int) -> bool:
        """Return True where the history of a partition does not begin within the generation.

        Else its corrections and late duplicates build on merge records from before, which the
        rebuild does not have.
        """
        return self.since.get(partition, -1) < self.from_batch


def _compare(
    table: str, here: Iterator[Row], there: Iterator[Row], names: list[str], findings: Findings
) -> None:
    """Compare rows that a late or repeated record names: their first four columns are its place."""
    for (partition, _, topic, offset), one, other in different(here, there, itemgetter(slice(4))):
        where = f"{table}: {topic}[{partition}]@{offset}"
        findings.add(_difference(one, other, names), where)


def _silver_columns(settings: Settings) -> list[str]:
    columns = ["partition", "merge_key", "event_time", "last_event_time", "status"]
    columns += [*settings.sources, "valid", "invalid_reason"]
    ids = [RECORD_IDS.name] if settings.has_ids else []
    return [*columns, *DUE.names, *TENANT.names, "position", *ids]


def _version_after(reader: TableReader, settings: Settings, batch: int) -> int:
    """Return the version of silver right after a batch."""
    version = reader.version(tables.SILVER)
    last = last_batch(reader, settings)
    if last is not None and last[0].batch == batch:
        return max(version, last[1])  # a key may have been forgotten since
    batch_condition: Where = [[("batch", "=", batch)]]
    [version] = reader.summary(
        tables.PROGRESS, [], {"version": ("max", "silver_version")}, batch_condition
    )["version"].to_pylist()
    if version is None:
        raise WatersmeetError(
            f"it is not known which version of silver batch {batch} made", fix="rebuild again"
        )
    return int(version)


def _kept(
    rows: Iterator[Row], names: Sequence[str], retention_bounds: Mapping[tuple[str, int], int]
) -> Iterator[Row]:
    """Return the rows of silver without those that `keep` has deleted, or may delete.

    These were finished before the table begins.
    """
    partition, status, last = (
        names.index(name) for name in ("partition", "status", "last_event_time")
    )
    limits = {p: time for (table, p), time in retention_bounds.items() if table == tables.SILVER}
    return (
        row
        for row in rows
        if row[status] != "timed_out" or row[last] >= limits.get(row[partition], row[last])
    )


def _rows(
    reader: TableReader, table: str, columns: list[str], where: Where, version: int | None = None
) -> Iterator[Row]:
    """Return rows whose first three columns identify them, with nested values as text."""
    if not reader.exists(table):
        return iter(())
    existing = reader.columns(table, version).names  # a lake may have had no ids yet
    rows = reader.select(table, [n for n in columns if n in existing], where, version=version)
    for name in columns:
        if name not in existing:
            rows = rows.append_column(name, pa.nulls(rows.num_rows, RECORD_IDS.type))
    values = (_comparable(column, name) for name, column in zip(columns, rows.columns, strict=True))
    return zip(*values, strict=True)


def _comparable(column: pa.ChunkedArray, name: str) -> list[Any]:
    """Return a column's values; nested ones as text, without the batch that found a duplicate."""
    values: list[Any] = column.to_pylist()
    if not pa.types.is_nested(column.type):
        return values
    if name == RECORD_IDS.name:
        values = list(map(_without_batches, values))
    return [*map(repr, values)]


def _without_batches(entries: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the ids of a row without the batches, which a rebuild cuts in another way."""
    return [{**entry, "batch": None} for entry in entries or ()]


def _difference(here: list[Row], there: list[Row], names: list[str]) -> str:
    if not here or not there:
        return "the rebuild does not have it" if here else "only the rebuild has it"
    differing = []
    for i, name in enumerate(names):
        if [row[i] for row in here] != [row[i] for row in there]:
            differing.append(name)
    return f"the rebuild has a different {', '.join(differing)}"
