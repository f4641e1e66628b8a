"""Silver again, from bronze alone, in a folder of its own, also as it would be under another timeout; and the comparison.

A rebuild goes exactly as far as silver was: up to the offsets and the clocks of its last batch, and through every deliberate
reset at the place where it was made. So it can be compared row by row (`verify --against`), while the lake itself goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.audit.problems import Findings, answer, different
from pipelines.audit.verify_evidence import Evidence, groups, place, read_evidence
from pipelines.core.plan import BatchPlan, End, OffsetRange
from pipelines.engine import Engine
from pipelines.engine.choice import open_engine
from pipelines.errors import ConfigurationError, WatersmeetError
from pipelines.lake import tables
from pipelines.lake.epochs import begin_epoch, read_epochs
from pipelines.lake.location import Lake
from pipelines.lake.progress import last_batch
from pipelines.lake.questions import Questions, Where
from pipelines.owner import Owner, now_ms
from pipelines.settings import Settings
from pipelines.silver import Silver

OF_BATCH: Final = "rebuild.batch"
OF_TIMEOUT: Final = "merge.timeout"
"""What a rebuild notes of itself in its table `configuration`: the last batch that it repeats, and its timeout."""

_COUNTS = ("records", "open", "timed_out", "valid", "complete")


def rebuild(
    questions: Questions,
    settings: Settings,
    directory: Path,
    timeout_ms: int | None = None,
    tell: Callable[[BatchPlan], None] = lambda _: None,
) -> dict[str, Any]:
    """The answer of `rebuild --json`: where it is, how far it goes, and what silver holds beside what the rebuild holds.

    `tell` hears of each batch. Raises ConfigurationError where the folder is not empty, or there is nothing to rebuild.
    """
    settings = read_epochs(questions, settings).current.settings
    evidence = read_evidence(questions, settings, _partitions(questions, settings), full=True)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigurationError(f"--into: {directory} is not an empty folder; name a new one")

    def rebuilt(of_epoch: Settings) -> Settings:
        merge = of_epoch.merge if timeout_ms is None else of_epoch.merge.model_copy(update={"timeout_ms": timeout_ms})
        return rebuilt_settings(of_epoch, directory).model_copy(update={"merge": merge})

    wanted = rebuilt(settings)
    into = open_engine(wanted, dict.fromkeys(tables.inputs_of(settings), Lake(settings)))
    for table in into.lake.layout.values():
        if table.name not in into.lake.borrowed:
            into.create(table)
    for plan in _batches(into, rebuilt, evidence):
        tell(plan)
    now, facts = now_ms(), {OF_BATCH: str(evidence.last_batch), OF_TIMEOUT: f"{wanted.merge.timeout_ms} ms"}
    into.append(tables.CONFIGURATION, into.lake.layout[tables.CONFIGURATION].rows((*fact, now) for fact in facts.items()))
    known_late: Where = [[("batch", "<=", evidence.last_batch)]]
    return {
        "into": str(directory),
        "batch": evidence.last_batch,
        "timeout_ms": {"lake": settings.merge.timeout_ms, "rebuilt": wanted.merge.timeout_ms},
        "lake": content_of(open_engine(settings), settings, evidence.version, known_late),
        "rebuilt": content_of(into, settings),
    }


def rebuilt_settings(settings: Settings, directory: Path) -> Settings:
    """The configuration, for a lake in that folder."""
    return settings.model_copy(update={"lake": str(directory.absolute())})


def content_of(engine: Engine, settings: Settings, version: int | None = None, late: Where = ()) -> dict[str, Any]:
    """How many merge records a version of silver has (None: the last): all, open, timed out, valid, and *complete* (with parts of
    every source); and of each source how many records were merged, how many of them into a complete merge record, and how many
    were late (of those in `late` that meet the conditions).
    """
    sources = list(settings.sources)
    names = [*_COUNTS, *(f"{kind}_{source}" for source in sources for kind in ("merged", "matched"))]
    schema = pa.schema([("partition", pa.int32()), *((name, pa.int64()) for name in names)])
    rows = engine.read(tables.SILVER, ["partition", "status", "valid", *sources], version=version)
    counted = engine.per_partition(partial(_counted, sources=sources, schema=schema), [rows], schema)
    [found] = engine.summary(counted, [], {name: ("sum", name) for name in names}).to_pylist()
    was_late = engine.questions.summary(tables.LATE, ["source"], {"records": ("count", "*")}, late)
    late_of = dict(zip(was_late["source"].to_pylist(), was_late["records"].to_pylist(), strict=True))
    of_sources = {
        source: {
            "merged": found[f"merged_{source}"] or 0,
            "in_complete_records": found[f"matched_{source}"] or 0,
            "late": late_of.get(source, 0),
        }
        for source in sources
    }
    return {**{name: found[name] or 0 for name in _COUNTS}, "sources": of_sources}


def _counted(rows: pa.Table, sources: list[str], schema: pa.Schema) -> pa.Table:
    """The counts of some rows, as one row of no particular partition."""
    sizes = [pc.list_value_length(rows[source]) for source in sources]
    is_complete = pc.greater(pc.min_element_wise(*sizes), 0)
    sums = [pc.sum(pc.equal(rows["status"], status)) for status in ("open", "timed_out")]
    sums += [pc.sum(column) for column in (rows["valid"], is_complete)]
    sums += [pc.sum(each) for size in sizes for each in (size, size.filter(is_complete))]
    counts = [0, rows.num_rows, *(each.as_py() for each in sums)]
    return pa.Table.from_pylist([dict(zip(schema.names, counts, strict=True))], schema)


def _batches(into: Engine, rebuilt: Callable[[Settings], Settings], evidence: Evidence) -> Iterator[BatchPlan]:
    """Merges every era into `into`, from one reset to the next; yields each batch, resets too. `rebuilt`: the settings for it of
    those of an epoch.

    In each era, what is known of idle decisions and of messages read back is what was known then.
    """
    owner = Owner(into)
    for i, (era, reset) in enumerate(zip(evidence.eras, [*evidence.resets, None], strict=True)):
        messages = evidence.recovered.filter(pc.equal(evidence.recovered["era"], i)).to_pylist()
        rows = [(row["partition"], row["merge_key"], row["event_time"], None, None, now_ms()) for row in messages]
        if rows:
            into.append(tables.RECOVERED, into.lake.layout[tables.RECOVERED].rows(rows))
        for epoch, end in era.epochs:
            if end is None:
                ends = {tp: End(until, era.heads.get(tp)) for tp, until in era.until.items()}
            else:
                ends = {tp: End(until, end.heads.get(tp)) for tp, until in end.until.items()}
            settings, last = rebuilt(epoch.settings), last_batch(into.questions)
            begin_epoch(into.questions, into.append, settings, 0 if last is None else last[0].batch + 1, now_ms())
            silver = Silver(owner, settings, evidence.partitions, ends=ends, decided_before_ms=era.ended_at)
            yield from silver.drain()
        if reset is not None:
            ranges = {tp: OffsetRange(era.until[tp], offset, None, None, None) for tp, offset in reset.begin.items()}
            plan = BatchPlan(silver.planner.next_batch, ranges, {}, has_late=False, reset=reset.reason)
            silver.commit(plan)
            yield plan


def _partitions(questions: Questions, settings: Settings) -> int:
    last = None
    if questions.exists(tables.PROGRESS):
        last = questions.summary(tables.PROGRESS, [], {"last": ("max", "partition")})["last"][0].as_py()
    if last is None:
        place = Lake(settings).location
        raise ConfigurationError(f"{place}: silver has merged nothing yet, so there is nothing to derive again; run it first")
    return int(last) + 1


# -- verify --against

Row = tuple[Any, ...]


def verify_against(here: Questions, there: Questions, settings: Settings, directory: Path) -> dict[str, Any]:
    """The answer of `verify --against --json`: silver and late, as they were when the rebuild `there` was made, against it in all
    columns but `batch`, a group of partitions at a time. Raises ConfigurationError where there is no rebuild, or one under
    another timeout.
    """
    settings = read_epochs(here, settings).current.settings
    facts: dict[str, str] = {}
    if there.exists(tables.CONFIGURATION):
        found = there.select(tables.CONFIGURATION, ["field", "value"])
        facts = dict(zip(found["field"].to_pylist(), found["value"].to_pylist(), strict=True))
    if OF_BATCH not in facts:
        raise ConfigurationError(f"--against: {directory} holds no complete rebuild; `watersmeet rebuild --into DIR` makes one")
    if facts[OF_TIMEOUT] != f"{settings.merge.timeout_ms} ms":
        raise ConfigurationError(
            f"--against: {directory} was derived with a timeout of {facts[OF_TIMEOUT]}, which makes other merge records; "
            "rebuild without --timeout"
        )
    batch = int(facts[OF_BATCH])
    silver = ["partition", "merge_key", "event_time", "last_event_time", "status", *settings.sources, "valid", "invalid_reason"]
    late = ["partition", "source", "offset", "merge_key", "event_time", "position", "value"]
    version, in_silver, in_late = _version_after(here, batch), Findings("silver"), Findings("late")
    for first, until in groups(_partitions(here, settings)):
        mine = [("partition", ">=", first), ("partition", "<", until)]
        rows = _rows(here, tables.SILVER, silver, [mine], version), _rows(there, tables.SILVER, silver, [mine])
        for key, one, other in different(*rows, itemgetter(slice(3))):
            in_silver.add(_told(one, other, silver), place(*key))
        rows = _rows(here, tables.LATE, late, [[*mine, ("batch", "<=", batch)]]), _rows(there, tables.LATE, late, [mine])
        for (partition, source, offset), one, other in different(*rows, itemgetter(slice(3))):
            in_late.add(_told(one, other, late), f"late: {settings.sources[source].topic}[{partition}]@{offset}")
    return answer([in_silver, in_late])


def _version_after(questions: Questions, batch: int) -> int:
    """The version of silver right after a batch."""
    version, last = questions.version(tables.SILVER), last_batch(questions)
    if last is not None and last[0].batch == batch:
        return max(version, last[1])  # a key may have been forgotten since
    of_batch: Where = [[("batch", "=", batch)]]
    [version] = questions.summary(tables.PROGRESS, [], {"version": ("max", "silver_version")}, of_batch)["version"].to_pylist()
    if version is None:
        raise WatersmeetError(f"it is not known which version of silver batch {batch} made; rebuild again")
    return int(version)


def _rows(questions: Questions, table: str, columns: list[str], where: Where, version: int | None = None) -> Iterator[Row]:
    """Rows whose first three columns say which they are, nested values as their text."""
    if not questions.exists(table):
        return iter(())
    found = questions.select(table, columns, where, version=version)
    return zip(*(map(repr, c.to_pylist()) if pa.types.is_nested(c.type) else c.to_pylist() for c in found.columns), strict=True)


def _told(here: list[Row], there: list[Row], names: list[str]) -> str:
    if not here or not there:
        return "the rebuild does not have it" if here else "only the rebuild has it"
    differing = [name for i, name in enumerate(names) if [row[i] for row in here] != [row[i] for row in there]]
    return f"the rebuild has a different {', '.join(differing)}"
