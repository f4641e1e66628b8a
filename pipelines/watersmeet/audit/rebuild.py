"""Rebuild of silver from bronze alone, in a folder of its own, and its comparison with silver.

A rebuild may have another window. It is of one generation, and goes exactly as far as silver was:
up to the offsets and the clocks of its last batch. So the two can be compared row by row
(`verify --against`) while the lake itself goes on. Where `keep` or `forget` takes records out of
bronze meanwhile, a rebuild ends with an error.

Where rows have been deleted (`keep`), a rebuild begins at the saved state with which history begins
(`lake.state`), goes on with its numbers of batches and epochs, and has the merge records of before
that late records may still correct. The comparison leaves out what was finished before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from watersmeet.ask.answers import answer as answer_of
from watersmeet.ask.answers import quoted
from watersmeet.audit.comparison import Difference, Row, as_rows, compare
from watersmeet.audit.evidence import MAX_TIME, Evidence, find_generation, read_evidence
from watersmeet.audit.problems import Report, answer
from watersmeet.audit.verify_rows import place
from watersmeet.core.plan import BatchPlan, End, OffsetRange
from watersmeet.core.silver import in_silver
from watersmeet.core.state import State
from watersmeet.core.window import Window
from watersmeet.engine import Engine
from watersmeet.engine.choice import create_tables, open_engine
from watersmeet.errors import ConfigurationError, WatersmeetError
from watersmeet.lake import tables
from watersmeet.lake.history import generation_body, read_history
from watersmeet.lake.identity import (
    REBUILD_BATCH,
    REBUILD_GENERATION,
    begin_epoch,
    keep_facts,
    kept_facts,
)
from watersmeet.lake.journal import BEGIN, REBUILD, decide
from watersmeet.lake.location import Lake
from watersmeet.lake.pieces import pieces, read_pieces
from watersmeet.lake.progress import BatchVersions, batch_rows, facts_of, last_batch
from watersmeet.lake.recovered import out_rows, rows_of_parts
from watersmeet.lake.snapshot import Snapshot
from watersmeet.lake.state import with_decisions
from watersmeet.lake.table_reader import Condition, TableReader, Where, in_portions
from watersmeet.running.owner import Owner, now_ms
from watersmeet.settings import KeepSettings, MergeSettings, Settings
from watersmeet.silver import Silver

OTHER_RULES: Final = "rebuild.rules"
"""Fact of a complete rebuild: the timeout, gap or lag of tenants that was asked for, where some
batch that it repeats had another.
"""

VERSION_FIELD: Final = "rebuild.version"
"""Fact of a complete rebuild: the version of the lake's silver that
holds the last batch that it repeats, and that it is compared with.
"""

BASE_FIELD: Final = "rebuild.base"
"""Fact of a complete rebuild: the batch whose saved state it began
with (-1: with the generation).
"""


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
    settings = read_history(reader, settings).epochs.current.settings
    evidence = read_evidence(reader, settings, _partitions(reader, settings), generation, full=True)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigurationError(
            f"{directory} is not an empty folder", where="--into", fix="name a new one"
        )
    settings.merge.check_tenants("--tenant-max-lag", lag_ms)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{directory} cannot be made ({error.strerror})", where="--into", fix="name another one"
        ) from None
    version = _version_of(evidence)

    def rebuilt(epoch_settings: Settings) -> Settings:
        merge = epoch_settings.merge if window is None else epoch_settings.merge.with_window(window)
        merge = merge if lag_ms is None else merge.model_copy(update={"tenant_max_lag_ms": lag_ms})
        changed = {"merge": merge, "keep": KeepSettings()}
        return rebuilt_settings(epoch_settings, directory).model_copy(update=changed)

    target = rebuilt(settings)
    into = open_engine(target, dict.fromkeys(tables.inputs_of(settings), Lake(settings)))
    create_tables(into)
    begin = evidence.generation._replace(from_batch=0)
    keep_facts(into.reader, into.append, {REBUILD_GENERATION: str(begin.number)}, REBUILD)
    body = generation_body(begin)
    decide(into.reader, into.append, BEGIN, lambda: body, begin.number)
    try:
        for plan in _batches(into, rebuilt, evidence):
            notify(plan)
    except Exception:  # deleted records break whatever reads them first
        _check_history(snapshot, settings, directory)
        raise
    _check_history(snapshot, settings, directory)
    facts = {REBUILD_BATCH: str(evidence.last_batch), VERSION_FIELD: str(version)}
    facts[BASE_FIELD] = str(evidence.history_batch)
    facts |= _other_rules(evidence, rebuilt)
    keep_facts(into.reader, into.append, facts, REBUILD)
    since = evidence.history_batch
    lags = {"lake": settings.merge.tenant_max_lag_ms, "rebuilt": target.merge.tenant_max_lag_ms}
    answer = {
        "into": str(directory),
        "batch": evidence.last_batch,
        "after_batch": None if since < 0 else since,
        "generation": begin.number,
        "timeout_ms": {"lake": settings.merge.timeout_ms, "rebuilt": target.merge.timeout_ms},
        "window": {"lake": _window_of(settings), "rebuilt": _window_of(target)},
        "tenant_max_lag_ms": lags,
        "lake": content_of(reader, settings, evidence.own_batches, since, version),
        "rebuilt": content_of(into.reader, settings, range(MAX_TIME), since),
    }
    return {name: value for name, value in answer.items() if name not in settings.hidden_names}


def _version_of(evidence: Evidence) -> int:
    # A jump that has ended the generation has closed rows since its last batch.
    reader = evidence.reader
    # One that has no batch before it, nor one of its own, has no rows in any version.
    if evidence.following is None or evidence.last_batch < 0:
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
    if any(snapshot.has_changed_since(tables.bronze(source)) for source in settings.sources):
        raise HistoryMovedError(Lake(settings).location, directory)


def _other_rules(evidence: Evidence, rebuilt: Callable[[Settings], Settings]) -> dict[str, str]:
    merges = [
        (epoch.settings.merge, rebuilt(epoch.settings).merge) for epoch, _ in evidence.through
    ]
    others = [other for pair in merges if (other := _other_rule(*pair)) is not None]
    return {OTHER_RULES: others[-1]} if others else {}


def _other_rule(own: MergeSettings, rebuilt: MergeSettings) -> str | None:
    if rebuilt.tenant_max_lag_ms != own.tenant_max_lag_ms:
        return f"tenant_max_lag of {rebuilt.tenant_max_lag_ms} ms"
    if rebuilt.window != own.window:
        return f"{'timeout' if rebuilt.window.is_timeout else 'gap'} of {rebuilt.window}"
    return None


def _window_of(settings: Settings) -> dict[str, int | None] | None:
    window = settings.merge.window
    return None if window.is_timeout else window._asdict()


def rebuilt_settings(settings: Settings, directory: Path) -> Settings:
    """Return the configuration for a lake in that folder."""
    return settings.model_copy(update={"lake": str(directory.absolute())})


def content_of(
    reader: TableReader, settings: Settings, batches: range, since: int, version: int | None = None
) -> dict[str, Any]:
    """Return how many merge records silver has, and what became of the records of each source.

    - Merge records: all, open, timed out, valid, and *complete* (with parts of every source).
    - With tenants, records that wait for their tenants' clocks.
    - By source: how many records were merged, how many of them into a complete merge record, how
      many were late and, where records have ids, how many were duplicates.

    Only these `batches` count. Where history begins with the batch `since`, what was finished, or
    late, by then does not count. Silver is read at its `version`, by default the last.
    """
    versions = {} if version is None else {tables.SILVER: version}
    own = f"batch >= {batches.start} AND batch < {batches.stop}"
    own += f" AND (status IN {tuple(tables.UNFINISHED)} OR batch > {since})"
    sizes = [f"coalesce(cardinality({quoted(name)}), 0)" for name in settings.sources]
    columns = [f"{size} AS n_{i}" for i, size in enumerate(sizes)]
    columns.append(" AND ".join(f"{size} > 0" for size in sizes) + " AS complete")
    sums = ", ".join(f"sum(n_{i}) AS n_{i}" for i in range(len(sizes)))
    groups = answer_of(
        reader,
        f"SELECT status, source, valid, complete, count(*) AS records, {sums} FROM (SELECT "
        f"status, source, valid, {', '.join(columns)} FROM silver WHERE {own}) "
        "GROUP BY status, source, valid, complete",
        versions,
    ).to_pylist()
    statuses = tables.statuses_of(tables.MERGED)
    merged = [row for row in groups if row["status"] in statuses]

    def total(rows: Sequence[dict[str, Any]], name: str = "records", **which: object) -> int:
        return sum(int(r[name]) for r in rows if all(r[n] == value for n, value in which.items()))

    noted = {tables.LATE: "late", tables.DUPLICATES: "duplicate"}
    sources = {
        source: {
            "merged": total(merged, f"n_{i}"),
            "in_complete_records": total(merged, f"n_{i}", complete=True),
            **{
                name: total(groups, status=status, source=source)
                for name, status in noted.items()
                if name not in settings.hidden_names
            },
        }
        for i, source in enumerate(settings.sources)
    }
    every = {
        "records": total(merged),
        **{status: total(merged, status=status) for status in statuses},
        "valid": total(merged, valid=True),
        "complete": total(merged, complete=True),
    }
    if "waiting" not in settings.hidden_names:
        every["waiting"] = total(groups, status="waiting")
    return {**every, "sources": sources}


def _begin(owner: Owner, evidence: Evidence, state: State) -> None:
    """Write a base as the batch after which it was saved: the rows that were open or waited, late
    records that were not settled, the merge records and corrections of before that late records may
    still correct, and how far the merge was.
    """
    schema = owner.engine.lake.schema(tables.SILVER)
    parts: list[tuple[str, Where]] = [(tables.BASES, [evidence.saved])]
    if tables.has_corrections(evidence.settings):
        closed = [evidence.closed_before(p) for p in sorted({tp.partition for tp in state.cursors})]
        parts += [(tables.SILVER, portion) for portion in in_portions(closed)]
    for table, where in parts:
        by = ("partition", "event_time")
        for rows in read_pieces(evidence.reader, table, schema.names, where, by):
            owner.append(tables.SILVER, rows.cast(schema), tables.BESIDE)
    ranges = {
        tp: OffsetRange(at.next_offset, at.next_offset, at.position, at.position, at.position)
        for tp, at in state.cursors.items()
    }
    number = state.next_batch - 1
    plan = BatchPlan(number, ranges, state.clocks, epoch=state.epoch, generation=state.generation)
    batch = in_silver(batch_rows(plan, now_ms()), "batch", schema)
    owner.append(tables.SILVER, batch, facts=facts_of(plan))


def _batches(
    into: Engine, rebuilt: Callable[[Settings], Settings], evidence: Evidence
) -> Iterator[BatchPlan]:
    """Merge the generation into `into`, epoch by epoch, and yield each batch.

    `rebuilt`: returns the rebuild's settings for those of an epoch.
    """
    owner = Owner(into)
    number = evidence.generation.number
    rows: list[dict[str, Any]] = evidence.recovered.to_pylist()
    rows += [{"partition": p, "position": since} for p, since in evidence.since.items()]
    rows += rows_of_parts(evidence.out)
    if rows:
        out = out_rows(rows, number, into.lake.schema(tables.SILVER))
        owner.append(tables.SILVER, out, tables.BESIDE)
    state = evidence.base
    if state is not None:
        _begin(owner, evidence, state)
        state = with_decisions(evidence.reader, evidence.generation, state)
        for earlier in evidence.epochs[: state.epoch]:
            begin_epoch(into.reader, into.append, rebuilt(earlier.settings), earlier.from_batch)
    first_number = 0 if state is None else state.epoch
    for number_there, (epoch, end) in enumerate(evidence.through, first_number):
        settings = rebuilt(epoch.settings)
        rules = settings.merge.rules
        last = last_batch(into.reader)
        first = 0 if last is None else last.batch + 1
        if state is not None and number_there > first_number:
            state = state.entering(number_there, first, rules)
        elif state is not None:
            first = state.epoch_from
            left = replace(
                state.rules, window=rules.window, lag_ms=rules.lag_ms, bounds=rules.bounds
            )
            state = replace(state, rules=left)
        begin_epoch(into.reader, into.append, settings, first)
        ends = {tp: End(until, end.heads.get(tp)) for tp, until in end.until.items()}
        silver = Silver(owner, settings, evidence.partitions, None, ends, state)
        yield from silver.drain()
        state = silver.recover().state


def _partitions(reader: TableReader, settings: Settings) -> int:
    last = last_batch(reader) if reader.exists(tables.SILVER) else None
    if last is None:
        raise ConfigurationError(
            "silver has merged nothing yet, so there is nothing to derive again",
            where=Lake(settings).location,
            fix="run it first",
        )
    return 1 + max(tp.partition for tp in last.ranges)


# -- verify --against

_AT: Final = ("partition", "merge_key", "event_time", "source", "topic", "offset")


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
    history = read_history(here, settings)
    settings = history.epochs.current.settings
    facts = _facts_of_rebuild(there, directory)
    generations = history.generations
    own = find_generation(generations, int(facts.get(REBUILD_GENERATION, "0")))
    if generation is not None and generation != own.number:
        raise ConfigurationError(
            f"{directory} was derived from generation {own.number}, and not from {generation}",
            where="--against",
            fix=f"leave `--generation` out, or rebuild with `--generation {generation}`",
        )
    batch = int(facts[REBUILD_BATCH])
    last_rules = history.epochs.of(max(batch, own.from_batch)).settings.merge
    rebuilt_rules = read_history(there, settings).epochs.current.settings.merge
    if other := facts.get(OTHER_RULES) or _other_rule(last_rules, rebuilt_rules):
        raise ConfigurationError(
            f"{directory} was derived with a {other}, which makes other merge records",
            where="--against",
            fix="rebuild without another one",
        )
    batches: list[Condition] = [("batch", ">=", own.from_batch), ("batch", "<=", batch)]
    last = last_batch(here)
    if last is None or batch > last.batch:
        raise WatersmeetError(
            f"{directory} goes up to batch {batch}, which this lake does not have",
            where="--against",
            fix="rebuild again",
        )
    version, since = int(facts[VERSION_FIELD]), int(facts[BASE_FIELD])
    kept = history.floors.times
    columns = tables.layout(settings)[tables.SILVER].columns_but(*tables.CUT)
    key = itemgetter(*map(columns.index, _AT))
    report = Report()
    for p, (status, kind) in product(range(_partitions(here, settings)), tables.STATUSES.items()):
        is_alive = kind.age is None
        rebuilt: list[Condition] = [("status", "=", status), ("partition", "=", p)]
        rebuilt.append(("batch", ">", -1 if is_alive else since))
        if kind.age is not None and (time := kept.get((kind.floor, p))) is not None:
            rebuilt.append((kind.age, ">=", time))  # the lake may have deleted earlier ones
        ours = [*rebuilt, *batches]
        is_last = own == generations.newest and (not is_alive or batch == last.batch)
        # In pieces that fit into memory.
        for [piece] in [*pieces(here, tables.SILVER, [ours], ("event_time",))] or [[ours]]:
            actual = _rows(here, columns, [piece], None if is_last else version)
            expected = _rows(there, columns, [[*rebuilt, *piece[len(ours) :]]])
            for difference in compare(actual, expected, columns, key):
                report[kind.floor].add(*_told(difference, kind.floor, status))
    return answer(report.values())


def _facts_of_rebuild(there: TableReader, directory: Path) -> dict[str, str]:
    facts = kept_facts(there)
    if VERSION_FIELD not in facts:
        raise ConfigurationError(
            f"{directory} holds no complete rebuild",
            where="--against",
            fix="`watersmeet rebuild --into DIR` makes one",
        )
    return facts


def _told(difference: Difference, name: str, status: str) -> tuple[str, str]:
    p, merge_key, time, _, topic, offset = difference.key
    where = f"{name}: {topic}[{p}]@{offset}"
    if topic is None or status == "waiting":
        where = place(p, merge_key, time)
    if difference.actual and difference.expected:
        return f"the rebuild has a different {', '.join(difference.columns)}", where
    is_ours = bool(difference.actual)
    return "the rebuild does not have it" if is_ours else "only the rebuild has it", where


def _rows(
    reader: TableReader, columns: list[str], where: Where, version: int | None = None
) -> Iterator[Row]:
    # A lake may lack a column yet.
    existing = reader.columns(tables.SILVER, version).names
    names = [name for name in columns if name in existing]
    return as_rows(reader.select(tables.SILVER, names, where, version=version), columns)
