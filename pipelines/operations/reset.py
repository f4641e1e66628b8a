"""A deliberate jump: reading goes on elsewhere, with fresh state. It says first what it would do.

The jump is a batch of silver that merges nothing, so it is decided, completed after a crash, and kept out of a second owner's
hands just as any other (`pipelines.silver`): open merge records are closed unpublished (`core.reset`), and `resets` has a row for
every topic-partition. Where it goes back, records that bronze lacks are read first; what it has is merged again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from pipelines.bronze import Bronze, kafka_input, without_known
from pipelines.core.merge import REPLACING
from pipelines.core.plan import BatchPlan, OffsetRange, TopicPartition
from pipelines.core.reset import closed, published_again
from pipelines.core.types import DUE, TENANT, TIME, own_columns
from pipelines.engine import Engine, Rows
from pipelines.kafka.cluster import Cluster
from pipelines.lake import tables
from pipelines.lake.commits import RESETTING, Commit
from pipelines.lake.published import last_published
from pipelines.lake.questions import Where, within
from pipelines.lake.taken_back import noted_at, undecided_at
from pipelines.running.beginning import Beginning
from pipelines.running.owner import Owner, now_ms
from pipelines.settings import Settings

if TYPE_CHECKING:
    from pipelines.silver import Silver


class Jump(NamedTuple):
    """One topic-partition: the offset that would be read next, the one that will be, and the end of what Kafka has."""

    source: str
    partition: int
    from_offset: int
    to_offset: int
    end: int

    @property
    def skipped(self) -> int:
        """Offsets that will never be merged."""
        return max(0, self.to_offset - self.from_offset)

    @property
    def read_again(self) -> int:
        """Offsets that will be merged a second time."""
        return max(0, self.from_offset - self.to_offset)


@dataclass
class Reset:
    """A jump of every topic-partition of a lake, to `earliest`, `latest` or a Kafka timestamp (ms).

    To make it, the layers must be owned, and what a crash has left complete: it is from where everything stands.
    """

    owner: Owner
    settings: Settings
    silver: Silver
    partitions: int
    to: str | int

    def __post_init__(self) -> None:
        """Asks Kafka where the jump leads."""
        cluster, cursors = Cluster(self.settings.kafka), self.silver.planner.cursors
        self.jumps = []
        for source, topic in self.settings.inputs.items():
            bounds = cluster.bounds(topic, self.partitions)
            if isinstance(self.to, int):
                targets = cluster.offsets_at(topic, self.partitions, self.to)
            else:
                targets = {p: end if self.to == "latest" else first for p, (first, end) in bounds.items()}
            for p, target in targets.items():
                self.jumps.append(Jump(source, p, cursors[TopicPartition(source, p)].next_offset, target, bounds[p][1]))

    def preview(self) -> dict[str, Any]:
        """What the jump does: by topic-partition, and how many open records it closes."""
        is_open: Where = [[("status", "in", ["open", "waiting"])]]
        found = self.owner.engine.questions.summary(tables.SILVER, [], {"open": ("count", "*")}, is_open)
        jumps = [{**jump._asdict(), "skipped": jump.skipped, "read_again": jump.read_again} for jump in self.jumps]
        return {"to": str(self.to), "open_records_closed": found["open"][0].as_py(), "jumps": jumps}

    def commit(self) -> None:
        """Makes the jump."""
        for source in self.settings.inputs:
            self._fetch_missing(source)
        ranges = {
            TopicPartition(jump.source, jump.partition): OffsetRange(jump.from_offset, jump.to_offset, None, None, None)
            for jump in self.jumps
        }
        reason = f"reset --to {self.to}"
        self.silver.commit(BatchPlan(self.silver.planner.next_batch, ranges, {}, has_late=False, reset=reason))

    def _fetch_missing(self, source: str) -> None:
        """Bronze has every record between where the jump goes back to and where it was, each once."""
        ahead = Beginning(self.owner.engine.questions, self.settings, self.partitions).next_offsets(source)
        back = {j.partition: (j.to_offset, ahead[j.partition]) for j in self.jumps if j.source == source and j.read_again}
        back = {p: (since, until) for p, (since, until) in back.items() if since < until}
        if not back:
            return
        engine, table = self.owner.engine, tables.bronze(source)
        kafka = engine.read_kafka(kafka_input(self.settings, source, {}), back)
        known = engine.read(table, ["partition", "offset"], within(back))
        missing = engine.per_partition(without_known, [kafka, known], engine.lake.schema(table))
        bronze = Bronze(self.owner, self.settings, source)
        with engine.held(missing) as rows:
            found = bronze.counted(rows)
            if found.num_rows:
                bronze.note(bronze.append(rows, found, fills=True))


def reset_rows(engine: Engine, settings: Settings, plan: BatchPlan) -> Rows:
    """What a reset changes in silver, as `Engine.merge` takes it."""
    again, sources = taken_back(plan), list(settings.sources)
    schema = engine.lake.layout[tables.SILVER].schema
    has_tenants = settings.merge.has_tenants
    closed_ones: Where = [[("status", "in", ["open", *(["waiting"] if has_tenants else [])])]]
    rows = engine.read(tables.SILVER, schema.names, () if again else closed_ones)
    changed = pa.schema([*schema, *((name, TIME) for name in (REPLACING if has_tenants else REPLACING[:1]))])
    return engine.per_partition(partial(closed, again=again, sources=sources, batch=plan.batch), [rows], changed)


def remember_published(owner: Owner, settings: Settings, plan: BatchPlan) -> None:
    """Before a reset's commit: a message that holds a record that comes again stays published, and `recovered` remembers it.

    The commit takes its merge record out of silver, so that afterwards only an older version would tell it. Until the
    commit, it counts for nothing (`lake.taken_back`).
    """
    if not (again := taken_back(plan)):
        return
    engine, now = owner.engine, now_ms()
    table, of_silver = engine.lake.layout[tables.RECOVERED], engine.lake.layout[tables.SILVER].schema
    names = ["partition", "merge_key", "event_time", *own_columns(of_silver, DUE), *own_columns(of_silver, TENANT)]
    schema = pa.schema([of_silver.field(name) for name in names])
    before = engine.read(tables.SILVER, [*schema.names, *settings.sources], [[("valid", "=", True)]])
    tails = last_published(engine.questions)
    function = partial(published_again, again=again, tails=tails, sources=list(settings.sources))
    messages = engine.summary(engine.per_partition(function, [before], schema), schema.names, {})
    rows = table.rows_of({**row, "recovered_at": now} for row in messages.to_pylist())
    owner.append(tables.RECOVERED, rows, RESETTING, {"batch": plan.batch, "recovered_at": now})


def forget_undecided(owner: Owner, last_batch: int) -> None:
    """Delete what a reset remembered that a crash has kept from being decided. `last_batch`: silver's last one, or -1."""
    engine = owner.engine
    if (at := undecided_at(engine.questions, last_batch)) is not None:
        commit = owner.next_commit(tables.RECOVERED, RESETTING, {"batch": -1, "recovered_at": 0})
        engine.delete(tables.RECOVERED, noted_at(at), commit)
        owner.confirm(tables.RECOVERED, commit)


def note_reset(engine: Engine, settings: Settings, plan: BatchPlan, commit: Commit) -> None:
    """What follows from a reset's commit: a replay changes nothing.

    Late records that come again leave `late`, and `resets` has the jump of every topic-partition.
    """
    again = taken_back(plan)
    if again:
        late = [
            [("source", "=", tp.source), ("partition", "=", tp.partition), ("offset", ">=", since)] for tp, since in again.items()
        ]
        engine.delete(tables.LATE, late, commit)
    now = now_ms()
    jumps = [
        (*settings.place(tp.source), tp.partition, jump.from_offset, jump.until_offset, now, plan.reset)
        for tp, jump in plan.ranges.items()
    ]
    engine.append(tables.RESETS, engine.lake.layout[tables.RESETS].rows(jumps), commit)


def taken_back(plan: BatchPlan) -> dict[TopicPartition, int]:
    """By topic-partition that a reset takes back, the offset from which its records come again; no other batch takes any back."""
    return {tp: jump.until_offset for tp, jump in plan.ranges.items() if jump.until_offset < jump.from_offset}
