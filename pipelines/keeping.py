"""Deletes rows that are older than `keep` behind the clock of their partition: for the owner of a table, between two batches.

Whatever is still needed stays: records that silver has not merged, merge records that are open or not published, and of bronze
all that begins at or after such a merge record, since its message must say where a lost lake would be taken up; and dead letters
that are not sent yet, with bronze's rows of them. Bronze is
deleted up to the end of a batch, so that what is left can be derived again (`lake.floors`); after a deliberate reset, only what
was merged since. A floor is written first, then the rows below it are deleted: what a crash leaves, the next time deletes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipelines.core.plan import TopicPartition
from pipelines.extent import finished
from pipelines.lake import tables
from pipelines.lake.conflicts import suppress_conflict
from pipelines.lake.epochs import read_epochs
from pipelines.lake.floors import batch_ends, last_reset, read_floors
from pipelines.lake.progress import last_batch
from pipelines.lake.published import last_published
from pipelines.lake.questions import PARTITIONS_PER_QUESTION, Questions, Where
from pipelines.letters import not_sent
from pipelines.owner import Owner, now_ms
from pipelines.settings import KeepSettings, Settings

_APPLICATION = "watersmeet-keep"
_COLUMNS = {tables.SILVER: "last_event_time", tables.LATE: "position", tables.QUARANTINE: "kafka_timestamp"}
"""What the age of a row is counted by; of bronze it is the event time, or Kafka's timestamp where there is none."""


def expire(owner: Owner, settings: Settings, table: str) -> None:
    """Deletes the rows of a table that are older than `keep` wants them. Where another writer was quicker, the next time does."""
    questions, keep_ms = owner.engine.questions, kept_ms(settings.keep, table)
    last = None if keep_ms is None else last_batch(questions)
    if keep_ms is None or last is None:
        return
    limits = {p: clock - keep_ms for p, clock in last[0].clocks.items()}
    if table in _COLUMNS:
        needed = _needed(questions, limits) if table == tables.SILVER else _first_not_sent(questions, settings, table, limits)
        _forget_before(owner, table, {p: min(limit, needed.get(p, limit)) for p, limit in limits.items()})
    else:
        _forget_batches(owner, settings, table, limits, last[0].clocks)


def kept_ms(keep: KeepSettings, table: str) -> int | None:
    """How long rows of a table are kept; None: for ever."""
    known = {tables.SILVER: keep.silver_ms, tables.LATE: keep.late_ms, tables.QUARANTINE: keep.quarantine_ms}
    return keep.bronze_ms if table.startswith(tables.bronze("")) else known.get(table)


def _needed(questions: Questions, partitions: Mapping[int, int]) -> dict[int, int]:
    """By partition the smallest event time (ms) of merge records that are open or not published; absent where there are none."""
    tails = last_published(questions)
    since = {p: tails[p].event_time if p in tails else -1 for p in partitions}
    where: Where = [[("status", "=", "open")], *finished(since)]
    rows = questions.summary(tables.SILVER, ["partition"], {"first": ("min", "event_time")}, where)
    return dict(zip(rows["partition"].to_pylist(), rows["first"].to_pylist(), strict=True))


def _first_not_sent(questions: Questions, settings: Settings, table: str, partitions: Mapping[int, int]) -> dict[int, int]:
    """By partition the age (ms) of the oldest row that is still to be sent as a dead letter; absent where there is none."""
    where = not_sent(questions, settings, table, partitions)
    if where is None:
        return {}
    rows = questions.summary(table, ["partition"], {"first": ("min", _COLUMNS[table])}, where)
    return dict(zip(rows["partition"].to_pylist(), rows["first"].to_pylist(), strict=True))


def _forget_before(owner: Owner, table: str, limits: Mapping[int, int]) -> None:
    """Rows of a table that lie before a time (ms) of their partition; of silver, finished ones."""
    known = read_floors(owner.engine.questions).times
    further = {p: limit for p, limit in limits.items() if limit > known.get((table, p), 0)}
    if not further:
        return
    _note(owner, [(table, p, None, limit) for p, limit in further.items()])
    is_finished = [("status", "=", "timed_out")] if table == tables.SILVER else []
    for some in _some(sorted(further)):
        _delete(owner, table, [[*is_finished, ("partition", "=", p), (_COLUMNS[table], "<", further[p])] for p in some])


def _forget_batches(owner: Owner, settings: Settings, table: str, limits: Mapping[int, int], clocks: Mapping[int, int]) -> None:
    """Rows of bronze before the end of a batch at whose end every position was older than the limit (ms)."""
    questions, reset = owner.engine.questions, last_reset(owner.engine.questions)
    floors = {p: batch for p, batch in read_floors(questions).batches.items() if batch > reset}
    needed, letters = _needed(questions, limits), _first_not_sent(questions, settings, tables.LATE, limits)
    timeout_ms = max(epoch.settings.merge.timeout_ms for epoch in read_epochs(questions, settings))
    bounds = {p: min(limit, clocks[p] - timeout_ms, needed.get(p, limit), letters.get(p, limit)) for p, limit in limits.items()}
    batches = {p: batch for p, batch in _batches_before(questions, settings, bounds, reset).items() if batch > floors.get(p, -1)}
    if batches:
        _note(owner, [(table, p, batch, None) for p, batch in batches.items()])
    # Also what an earlier time had left: after a crash, or because another source's owner has written the floor.
    ends = batch_ends(questions, {**floors, **batches})
    source = table.removeprefix(tables.bronze(""))
    for some in _some(sorted(p for p in limits if TopicPartition(source, p) in ends)):
        where: Where = []
        for p in some:
            below = [("partition", "=", p), ("offset", "<", ends[TopicPartition(source, p)])]
            untimed = [("event_time", "is null", None), ("kafka_timestamp", "<", limits[p])]
            where = [*where, [*below, ("event_time", "<", limits[p])], [*below, *untimed]]
        if questions.summary(table, [], {"rows": ("count", "*")}, where)["rows"][0].as_py():
            _delete(owner, table, where)


def _batches_before(questions: Questions, settings: Settings, bounds: Mapping[int, int], reset: int) -> dict[int, int]:
    """By partition the last batch after a reset at whose end every source's position is below a bound (ms)."""
    found = {}
    for some in _some(sorted(bounds)):
        where = [[("partition", "=", p), ("batch", ">", reset), ("position", "<", bounds[p])] for p in some]
        rows = questions.summary(tables.PROGRESS, ["partition", "source"], {"last": ("max", "batch")}, where).to_pylist()
        for p in some:
            mine = [row["last"] for row in rows if row["partition"] == p]
            if len(mine) == len(settings.sources):
                found[p] = min(mine)
    return found


def _some(partitions: Sequence[int]) -> Iterator[Sequence[int]]:
    return (partitions[i : i + PARTITIONS_PER_QUESTION] for i in range(0, len(partitions), PARTITIONS_PER_QUESTION))


def _note(owner: Owner, rows: Sequence[tuple[str, int, int | None, int | None]]) -> None:
    now = now_ms()
    owner.engine.append(tables.FLOORS, owner.engine.lake.layout[tables.FLOORS].rows((*row, now) for row in rows))


def _delete(owner: Owner, table: str, where: Where) -> None:
    with suppress_conflict():
        owner.engine.delete(table, where, owner.next_commit(table, _APPLICATION))
