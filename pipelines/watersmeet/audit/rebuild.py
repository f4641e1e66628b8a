"""Rebuild of silver from bronze alone, in a folder of its own, and its comparison with silver.

A rebuild may have another window. It is of one generation, and goes exactly as far as silver was:
up to the offsets and the clocks of its last batch. So the two can be compared row by row
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
from watersmeet.audit.verify_evidence import groups, place
from watersmeet.core.columns import int64s, looked_up, time_column, times_ms
from watersmeet.core.inputs import InputId
from watersmeet.core.open_before import open_before
from watersmeet.core.plan import BatchPlan, End, OffsetRange, Rules, TopicPartition
from watersmeet.core.reading import RECORD_BYTES
from watersmeet.core.repeated import RECORD_IDS
from watersmeet.core.silver import in_silver
from watersmeet.core.types import DUE, TENANT
from watersmeet.core.window import Window
from watersmeet.engine import Engine
from watersmeet.engine.choice import create_tables, open_engine
from watersmeet.errors import ConfigurationError, WatersmeetError
from watersmeet.lake import tables
from watersmeet.lake.commits import bronze_application
from watersmeet.lake.epochs import Epochs, begin_epoch, inherited_lateness, read_epochs
from watersmeet.lake.generations import generation_rows, read_generations
from watersmeet.lake.identity import (
    REBUILD_BATCH,
    REBUILD_GENERATION,
    keep_facts,
    kept_facts,
)
from watersmeet.lake.location import Lake
from watersmeet.lake.progress import BatchVersions, batch_rows, facts_of, last_batch
from watersmeet.lake.recovered import out_rows, rows_of_parts
from watersmeet.lake.retention_bounds import History, read_retention_bounds
from watersmeet.lake.snapshot import Snapshot
from watersmeet.lake.table_reader import Condition, TableReader, Where, between
from watersmeet.running.owner import Owner, now_ms
from watersmeet.settings import Settings
from watersmeet.silver import Silver

WINDOW_FIELD: Final = "merge.timeout"
LAG_FIELD: Final = "merge.tenant_max_lag"
"""Fields of the table `configuration` of a complete rebuild: the timeout or window, and the lag of
tenants (ms), that were asked for. They are only there where the rules of some batch that it repeats
were others.
"""

VERSION_FIELD: Final = "rebuild.version"
"""Field of the table `configuration` of a complete rebuild: the version of the lake's silver that
holds the last batch that it repeats, and that it is compared with.
"""

_MERGE_RECORDS: Final[Condition] = ("status", "in", ["open", "waiting", "timed_out"])
_ALIVE: Final[Condition] = ("status", "in", ["open", "waiting"])
_FINISHED: Final[Condition] = ("status", "=", "timed_out")

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
    reader = snapshot
    settings = read_epochs(reader, settings).current.settings
    evidence = read_evidence(reader, settings, _partitions(reader, settings), generation, full=True)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigurationError(
            f"{directory} is not an empty folder", where="--into", fix="name a new one"
        )
    settings.merge.check_tenants("--tenant-max-lag", lag_ms)
    version = _version_of(evidence)

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
        for plan in _batches(here, into, rebuilt, evidence, version):
            notify(plan)
    except Exception:  # deleted records break whatever reads them first
        _check_history(snapshot, settings, directory)
        raise
    _check_history(snapshot, settings, directory)
    facts = {REBUILD_BATCH: str(evidence.last_batch), VERSION_FIELD: str(version)}
    facts |= _other_rules(evidence, rebuilt)
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
        "lake": content_of(here, settings, version, evidence.batches, since, later=later),
        "rebuilt": content_of(into, settings, later=later),
    }
    return {name: value for name, value in answer.items() if name not in settings.hidden_names}


def _version_of(evidence: Evidence) -> int:
    """Return the version of silver that has a generation as its last batch has left it.

    A jump that has ended it has closed rows since.
    """
    reader = evidence.reader
    if evidence.following is None:
        return reader.version(tables.SILVER)
    version = BatchVersions(reader).of(evidence.last_batch)
    if version is not None:
        return version
    raise WatersmeetError(
        f"it is not known which version of silver batch {evidence.last_batch} made",
        where="--generation",
        fix="rebuild a later one",
    )


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
    version: int | None = None,
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

    Silver is read at its `version`, by default the last. Only these `batches` count. What was
    finished, or late, up to the batch `since` of its partition does not count. Nor do late
    duplicates in partitions whose history begins `later` than the generation: they follow from
    merge records of before.
    """
    sources = list(settings.sources)
    names = list(_COUNTS)
    for source in sources:
        names += [f"merged_{source}", f"matched_{source}"]
    schema = pa.schema([("partition", pa.int32()), *((name, pa.int64()) for name in names)])
    rows = engine.read(
        tables.SILVER,
        ["partition", "status", "valid", "batch", *sources],
        [[*batches, _MERGE_RECORDS]],
        version=version,
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
    noted_counts = {
        name: _noted(engine.reader, name, where[name], since, version) for name in noted
    }
    source_counts = {}
    for source in sources:
        source_counts[source] = {
            "merged": sums[f"merged_{source}"] or 0,
            "in_complete_records": sums[f"matched_{source}"] or 0,
            **{name: counts[source] for name, counts in noted_counts.items()},
        }
    return {**shown, "sources": source_counts}


def _noted(
    reader: TableReader, view: str, where: Where, since: Mapping[int, int], version: int | None
) -> Counter[str]:
    """Return, by source, how many records of these batches a view has."""
    counts: Counter[str] = Counter()
    by = ["source", "partition", "batch"]
    rows = reader.summary(view, by, {"n": ("count", "*")}, where, version=version)
    for row in rows.to_pylist():
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
    is_excess = pc.equal(rows["status"], "excess")
    alive = _alive(rows.filter(pc.invert(is_excess)), since)
    opened = open_before(alive, rows.filter(is_excess), ends, inputs)
    due = rules.due(times_ms(opened["event_time"]), times_ms(opened["last_event_time"]))
    return opened.set_column(opened.column_names.index("due"), "due", time_column(due))


def _begin(
    opened: pa.Table,
    owner: Owner,
    evidence: Evidence,
    begins: Mapping[int, History],
    epoch: int,
) -> None:
    """Write a rebuild's batch for partitions whose history does not begin with the lake.

    It has the merge records that were open there then (`opened`), and how far the merge was.
    `epoch`: that of the rebuild whose rules closed none of these records.
    """
    into = owner.engine
    last = last_batch(into.reader)
    number = 0
    clocks = dict[int, int]()
    ranges = {
        tp: OffsetRange(since, since, None, None, None)
        for tp, since in evidence.generation.begin.items()
    }
    if last is not None:
        number = last.batch + 1
        clocks = dict(last.clocks)
        for tp, done in last.ranges.items():
            ranges[tp] = OffsetRange(
                done.until_offset, done.until_offset, done.position, done.position, done.head
            )
    for p, history in begins.items():
        for input_id, offset in history.offsets.items():
            tp = TopicPartition(input_id, p)
            position = history.positions[input_id]
            ranges[tp] = OffsetRange(offset, offset, position, position, position)
        if history.clock is not None:
            clocks[p] = history.clock
    plan = BatchPlan(
        number, ranges, clocks, has_late=False, generation=evidence.generation.number, epoch=epoch
    )
    batch = in_silver(batch_rows(plan, now_ms()), "batch", opened.schema)
    owner.append(tables.SILVER, pa.concat_tables([opened, batch]), facts=facts_of(plan))
    bounds = [("silver", p, history.batch, None, now_ms()) for p, history in begins.items()]
    into.append(tables.FLOORS, into.lake.layout[tables.FLOORS].rows(bounds))


def _opened(
    here: Engine,
    settings: Settings,
    evidence: Evidence,
    begins: Mapping[int, History],
    version: int,
) -> pa.Table:
    """Return the merge records that were open where histories begin, from a version of silver."""
    schema = here.lake.schema(tables.SILVER)
    since = {p: history.batch for p, history in begins.items()}
    ends = {
        TopicPartition(input_id, p): offset
        for p, history in begins.items()
        for input_id, offset in history.offsets.items()
    }
    own = [("partition", "in", [*begins]), *evidence.batches]
    later = between("batch", {p: (batch + 1, None) for p, batch in since.items()})
    finished = [[_FINISHED, *own, *term] for term in later]
    where: Where = [[_ALIVE, *own], [("status", "=", "excess"), *own], *finished]
    rows = here.read(tables.SILVER, schema.names, where, version=version)
    open_rows = partial(
        _open_at,
        ends=ends,
        since=since,
        inputs=settings.inputs,
        rules=Rules(settings.merge.window),
    )
    return here.collect(here.per_partition(open_rows, [rows], schema))


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
    here: Engine,
    into: Engine,
    rebuilt: Callable[[Settings], Settings],
    evidence: Evidence,
    version: int,
) -> Iterator[BatchPlan]:
    """Merge the generation into `into`, epoch by epoch, and yield each batch.

    `rebuilt`: returns the rebuild's settings for those of an epoch. `version`: that of silver.
    """
    owner = Owner(into)
    number = evidence.generation.number
    rows: list[dict[str, Any]] = evidence.recovered.to_pylist()
    rows += [{"partition": p, "position": since} for p, since in evidence.since.items()]
    rows += rows_of_parts(evidence.out if number else {})
    if rows:
        out = out_rows(rows, number, into.lake.schema(tables.SILVER))
        owner.append(tables.SILVER, out, bronze_application())
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
            opened = _opened(here, settings, evidence, begins, version)
            _begin(opened, owner, evidence, begins, max(0, number_there - 1))
        ends = {
            tp: _end(tp, offset, end.heads.get(tp), evidence, later)
            for tp, offset in end.until.items()
        }
        last = last_batch(into.reader)
        begin_epoch(
            into.reader,
            into.append,
            settings,
            0 if last is None else last.batch + 1,
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

_PLACE: Final = ("partition", "source", "topic", "offset")
_NOT_COMPARED: Final = frozenset({"batch", "generation", RECORD_BYTES.name})
"""Columns of views that are not compared: a rebuild cuts batches in another way."""

_AGES: Final = {
    tables.SILVER: "last_event_time",
    tables.LATE: "position",
    tables.DUPLICATES: "event_time",
    tables.EXCESS: "event_time",
    tables.PASSED: "position",
    tables.CORRECTIONS: "last_event_time",
}
"""What is compared (merge records, and records that wait, as rows of silver), and by which column
the lake may have deleted rows of it.
"""


def verify_against(
    here: TableReader,
    there: TableReader,
    settings: Settings,
    directory: Path,
    generation: int | None = None,
) -> dict[str, Any]:
    """Compare silver with the rebuild `there`, and return the answer of `verify --against --json`.

    What the generation of the rebuild had by its last batch is compared: merge records and what
    waits, late, duplicate, excess and passed records, and corrections. What was final then is
    compared as it is now, and the rest as it was then. The columns of their content are compared
    (`batch` is not), a group of partitions at a time.

    Raises ConfigurationError where there is no rebuild, or where the rebuild has another generation
    than the one that is named, or was asked to have another timeout or another lag of tenants.
    """
    here = Snapshot(here, settings)
    settings = read_epochs(here, settings).current.settings
    facts = _check_rebuild(there, directory)
    generations = read_generations(here, settings)
    own = find_generation(generations, int(facts.get(REBUILD_GENERATION, "0")))
    if generation is not None and generation != own.number:
        raise ConfigurationError(
            f"{directory} was derived from generation {own.number}, and not from {generation}",
            where="--against",
            fix=f"leave `--generation` out, or rebuild with `--generation {generation}`",
        )
    batch = int(facts[REBUILD_BATCH])
    last = last_batch(here)
    if last is None or batch > last.batch:
        raise WatersmeetError(
            f"{directory} goes up to batch {batch}, which this lake does not have",
            where="--against",
            fix="rebuild again",
        )
    is_newest = own == generations.newest
    version = int(facts[VERSION_FIELD])
    comparison = _Comparison(
        here,
        there,
        settings,
        (own.from_batch, batch),
        version=None if is_newest else version,
        alive_version=None if is_newest and batch == last.batch else version,
        since=read_retention_bounds(there).batches,
        kept=read_retention_bounds(here).times,
    )
    names = [name for name in _AGES if name not in settings.hidden_names]
    findings = {name: Findings(name) for name in names}
    for first, until in groups(_partitions(here, settings)):
        for name, found in findings.items():
            comparison.check(name, range(first, until), found)
    return answer(findings.values())


def _check_rebuild(there: TableReader, directory: Path) -> dict[str, str]:
    """Return the fields that a complete rebuild records itself in.

    Raises ConfigurationError where there is none, or where other rules were asked for than those
    of the batches that it repeats.
    """
    facts = kept_facts(there)
    if VERSION_FIELD not in facts:
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
    """Silver of a lake and of its rebuild.

    - `batches`: the first batch of the generation that the rebuild is of, and the last that it
      repeats.
    - `version`: of the lake's silver, for what was final then; None: the last.
    - `alive_version`: the same for what was open or waited then.
    - `since`: by partition, the batch with which the rebuild's history begins.
    - `kept`: by table and partition, the time (ms) before which the lake may have deleted rows.
    """

    here: TableReader
    there: TableReader
    settings: Settings
    batches: tuple[int, int]
    version: int | None
    alive_version: int | None
    since: Mapping[int, int]
    kept: Mapping[tuple[str, int], int]

    def check(self, name: str, partitions: range, findings: Findings) -> None:
        """Compare the rows of silver, or of a view, of some partitions."""
        names = self._columns(name)
        here = list[Row]()
        there = list[Row]()
        for is_alive in (True, False) if name == tables.SILVER else (False,):
            version = self.alive_version if is_alive else self.version
            terms = {p: self._term(name, p, is_alive=is_alive) for p in partitions}
            own = [
                [*term, *self._batches(p, is_alive=is_alive)] for p, term in terms.items() if term
            ]
            if own:
                here += _rows(self.here, name, names, own, version)
                there += _rows(self.there, name, names, [*filter(None, terms.values())])
        key = itemgetter(slice(3 if name == tables.SILVER else len(_PLACE)))
        for at, one, other in different(here, there, key):
            where = place(*at) if name == tables.SILVER else f"{name}: {at[2]}[{at[0]}]@{at[3]}"
            findings.add(_difference(one, other, names), where)

    def _batches(self, p: int, *, is_alive: bool) -> list[Condition]:
        first, last = self.batches
        since = first - 1 if is_alive else max(self.since.get(p, -1), first - 1)
        return [("batch", ">", since), ("batch", "<=", last)]

    def _term(self, name: str, p: int, *, is_alive: bool) -> list[Condition]:
        """Return the condition for the rows of a partition that are compared; empty for none."""
        here: Condition = ("partition", "=", p)
        if is_alive:
            return [here, _ALIVE]
        conditions: list[Condition] = [here, (_AGES[name], ">=", self.kept.get((name, p), 0))]
        # Where a history begins within the generation, corrections and late duplicates build on
        # merge records from before, which the rebuild does not have, and what became too large has
        # records from before.
        is_whole = self.since.get(p, -1) < self.batches[0]
        if name == tables.SILVER:
            conditions.append(_FINISHED)
        elif name == tables.PASSED:
            conditions.append(("status", "=", "passed"))
        elif name == tables.DUPLICATES and not is_whole:
            conditions.append(("is_late", "=", False))
        is_left_out = name in (tables.CORRECTIONS, tables.EXCESS) and not is_whole
        return [] if is_left_out else conditions

    def _columns(self, name: str) -> list[str]:
        if name == tables.SILVER:
            columns = ["partition", "merge_key", "event_time", "last_event_time", "status"]
            columns += [*self.settings.sources, "valid", "invalid_reason"]
            ids = [RECORD_IDS.name] if self.settings.has_ids else []
            return [*columns, *DUE.names, *TENANT.names, "position", *ids]
        schema = Lake(self.settings).schema(name)
        return [*_PLACE, *(n for n in schema.names if n not in _NOT_COMPARED.union(_PLACE))]


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
    return zip(*map(_comparable, rows.columns), strict=True)


def _comparable(column: pa.ChunkedArray) -> list[Any]:
    """Return a column's values; nested ones as text."""
    values: list[Any] = column.to_pylist()
    return [*map(repr, values)] if pa.types.is_nested(column.type) else values


def _difference(here: list[Row], there: list[Row], names: list[str]) -> str:
    if not here or not there:
        return "the rebuild does not have it" if here else "only the rebuild has it"
    differing = []
    for i, name in enumerate(names):
        if [row[i] for row in here] != [row[i] for row in there]:
            differing.append(name)
    return f"the rebuild has a different {', '.join(differing)}"
