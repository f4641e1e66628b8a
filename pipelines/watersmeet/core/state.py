"""The state of the merge: all that the next batch needs beside rows of bronze and silver.

A state is a value. A batch makes the next one of it (`State.after`), and so do the beginning of an
epoch (`State.entering`) and decisions of the idle policy (`State.deciding`). Whoever merges carries
it along; `lake.state` replays it from the tables. Times are in ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.clocks import Clocks, Idle
from watersmeet.core.columns import NULL_TIME, Int64s, groups, int64s, looked_up, row_values
from watersmeet.core.idle import IdleDecision
from watersmeet.core.plan import BatchPlan, Cursor, Rules, TopicPartition, by_topic_partition
from watersmeet.core.tenants import HEADS, Cut, heads_after
from watersmeet.core.window import epoch_start


@dataclass(frozen=True)
class State:
    """How far the merge has come after a batch, under the rules of an epoch."""

    next_batch: int
    cursors: Mapping[TopicPartition, Cursor]
    """How far each topic-partition of every input was consumed."""
    clocks: Mapping[int, int]
    """The clock of each partition that has one."""
    rules: Rules
    """Those of the epoch, with what earlier epochs have left."""
    heads: pa.Table = field(default_factory=HEADS.empty_table)
    """What the clocks of tenants have left (`core.tenants.HEADS`)."""
    cuts: Mapping[TopicPartition, Cut] = field(default_factory=dict)
    """The cut at the clock of each topic-partition, with tenants."""
    idle: Idle = field(default_factory=dict)
    """The idle policy's decisions that no record has followed, in order: those that the merge has
    not consumed, and the last of the others."""
    epoch: int = 0
    epoch_from: int = 0
    """The number of the epoch, and the batch that it begins with."""
    generation: int = 0

    @property
    def begins_epoch(self) -> bool:
        """True where the next batch is the first one of an epoch other than the lake's first."""
        return self.epoch > 0 and self.epoch_from == self.next_batch

    def after(self, plan: BatchPlan, clocks: Clocks) -> State:
        """Return the state after a batch that has moved the clocks."""
        after = replace(
            self,
            next_batch=plan.batch + 1,
            cursors={**self.cursors, **plan.cursors()},
            clocks=plan.clocks,
            heads=clocks.heads(),
            cuts={**self.cuts, **clocks.cuts()},
            idle={},
        )
        return after.deciding((tp, decision) for tp, each in self.idle.items() for decision in each)

    def deciding(self, decisions: Iterable[tuple[TopicPartition, IdleDecision]]) -> State:
        """Return the state with decisions that the idle policy has made, in their order.

        A source that is silent for long has one after the other, with a time for every tenant. So a
        decision takes the place of the one before it, unless that is yet to move the position: the
        state has what it left.
        """
        decided = {tp: [*each] for tp, each in self.idle.items()}
        for tp, decision in decisions:
            if decision.after_offset + 1 < self.cursors[tp].next_offset:
                continue
            of_tp = decided.setdefault(tp, [])
            if of_tp and self._is_superseded(tp, of_tp[-1], decision):
                of_tp.pop()
            of_tp.append(decision)
        return replace(self, idle=decided)

    def _is_superseded(self, tp: TopicPartition, before: IdleDecision, after: IdleDecision) -> bool:
        """Return True if a decision no longer counts once there is the next one.

        Without tenants that is so of all after the same offset: nothing stands between them.
        """
        is_shared = self.rules.lag_ms is None and before.after_offset == after.after_offset
        return is_shared or self.cursors[tp].has_consumed(before)

    def entering(self, epoch: int, from_batch: int, rules: Rules) -> State:
        """Return the state as an epoch begins. The one before it has merged at least one batch.

        `rules`: those that the epoch sets, without what earlier ones have left.
        """
        before = self.rules
        partitions = np.array(sorted(self.clocks), np.int64)
        unknown = self.tenant_clocks(partitions, pa.chunked_array([pa.nulls(len(partitions))]))
        gap_ms = before.window.gap_ms
        horizons = dict(before.horizons)
        for p, clock in zip(partitions.tolist(), unknown.tolist(), strict=True):
            horizons[p] = max(clock - gap_ms, horizons.get(p, clock - gap_ms))
        starts = {
            p: epoch_start(
                clock, before.epoch_start.get(p, NULL_TIME), before.closing, rules.closing
            )
            for p, clock in self.clocks.items()
        }
        changed = replace(
            rules,
            horizons=horizons,
            epoch_start={**before.epoch_start, **starts},
            tenant_horizons=self._tenant_horizons(horizons),
            since=before.since,
        )
        entered = replace(self, rules=changed, epoch=epoch, epoch_from=from_batch)
        return entered if rules.lag_ms == before.lag_ms else entered._behind(before.lag_ms or 0)

    def _tenant_horizons(self, horizons: Mapping[int, int]) -> dict[tuple[int, str], int]:
        """Return the horizons of tenants at the end of an epoch, where they are beyond these."""
        before = self.rules
        tenant_heads = self.heads.filter(self.heads["tenant"].is_valid())
        places = {*row_values(tenant_heads, "partition", "tenant")}
        ordered = sorted(
            places | {place for place in before.tenant_horizons if place[0] in horizons}
        )
        partitions = np.array([p for p, _ in ordered], np.int64)
        tenants = pa.chunked_array([[tenant for _, tenant in ordered]], pa.string())
        clocks = self.tenant_clocks(partitions, tenants)
        beyond = {}
        for place, clock in zip(ordered, clocks.tolist(), strict=True):
            horizon = clock - before.window.gap_ms if clock != NULL_TIME else NULL_TIME
            horizon = max(horizon, before.tenant_horizons.get(place, NULL_TIME))
            if horizon > horizons[place[0]]:
                beyond[place] = horizon
        return beyond

    def _behind(self, lag_ms: int) -> State:
        """Return the state with what every tenant has on a topic-partition under a lag (ms) that
        ends. It counts as a heartbeat without a tenant.
        """
        floors = []
        for tp, cut in self.cuts.items():
            position = self.cursors[tp].position
            floor = max(cut.position, cut.position if position is None else position) - lag_ms
            floors.append((*tp.input, tp.partition, None, floor, floor))
        rows = [dict(zip(HEADS.names, floor, strict=True)) for floor in floors]
        heads = heads_after(pa.concat_tables([self.heads, pa.Table.from_pylist(rows, HEADS)]))
        return replace(self, heads=heads)

    def replayed(
        self, plan: BatchPlan, heads: pa.Table, cuts: Mapping[TopicPartition, Cut]
    ) -> State:
        """Return the state after a later batch of the epoch, as if it had been carried along; but
        without decisions of the idle policy.

        - `heads`: rows of `HEADS` with tenants' largest times: as `own` those from this state on,
          as `at_cut` those from this state's cut to the later one.
        - `cuts`: those that have moved since.
        """
        cursors = {**self.cursors, **plan.cursors()}
        oldest = {}
        if self.rules.lag_ms is not None:
            positions = ((tp, cursor.position) for tp, cursor in cursors.items())
            oldest = {tp: at - self.rules.lag_ms for tp, at in positions if at is not None}
        return replace(
            self,
            next_batch=plan.batch + 1,
            cursors=cursors,
            clocks=plan.clocks,
            heads=heads_after(pa.concat_tables([self.heads, heads]), oldest),
            cuts={**self.cuts, **cuts},
            idle={},
        )

    # -- clocks of tenants

    def tenant_clocks(self, partitions: Int64s, tenants: pa.ChunkedArray) -> Int64s:
        """Return the clock of each of these tenants in its partition.

        It is `NULL_TIME` where the partition has none. The tenant null is one of which nothing is
        known. Without tenants, all have the partition's clock.
        """
        clocks = looked_up(partitions, self.clocks, NULL_TIME)
        if self.rules.lag_ms is None or not len(partitions):
            return clocks
        rows_of = groups(partitions)
        names = tenants.cast(pa.string())
        for tp, positions in self._positions_at_cut(names, rows_of).items():
            rows = rows_of[tp.partition]
            clocks[rows] = np.minimum(clocks[rows], positions)
        return clocks

    def held_by(self, partition: int, tenant: str) -> list[TopicPartition]:
        """Return the topic-partitions whose position holds a tenant's clock, if there is one."""
        rows = {partition: np.array([0])}
        positions = self._positions_at_cut(pa.chunked_array([[tenant]], pa.string()), rows)
        at = {tp: min(int(each[0]), self.clocks[partition]) for tp, each in positions.items()}
        return sorted(tp for tp, position in at.items() if position == min(at.values()))

    def _positions_at_cut(
        self, tenants: pa.ChunkedArray, rows_of: Mapping[int, Int64s]
    ) -> dict[TopicPartition, Int64s]:
        """Return, by topic-partition, the positions at the end of the cut of the tenants in some
        rows of its partition.
        """
        cuts = {tp: cut for tp, cut in self.cuts.items() if tp.partition in rows_of}
        inputs = sorted({tp.input for tp in cuts})
        at_cut = int64s(self.heads["at_cut"])
        heads_of = by_topic_partition(self.heads, inputs, at_cut)
        lag_ms = self.rules.lag_ms or 0
        positions = {}
        for tp, cut in cuts.items():
            tenant_rows = heads_of.get(tp, np.array([], np.int64))
            names = self.heads["tenant"].take(pa.array(tenant_rows)).combine_chunks()
            times = at_cut[tenant_rows]
            is_shared = names.is_null().to_numpy(zero_copy_only=False)
            shared = max(cut.position - lag_ms, times[is_shared].max(initial=NULL_TIME))
            requested = tenants.take(pa.array(rows_of[tp.partition]))
            numbers = int64s(pc.fill_null(pc.index_in(requested, value_set=names.drop_null()), -1))
            own = np.append(times[~is_shared], NULL_TIME)
            positions[tp] = np.maximum(own[numbers], shared)
        return positions

    def last_tenant_clocks(self) -> dict[int, int]:
        """Return by partition the largest clock of any tenant."""
        heads = self.heads.filter(self.heads["tenant"].is_valid())
        tenants_of_heads = heads.group_by(["partition", "tenant"]).aggregate([])
        partitions = np.concatenate(
            [np.array([*self.clocks], np.int64), int64s(tenants_of_heads["partition"])]
        )
        unknown = pa.nulls(len(self.clocks), pa.string())
        tenants = pa.chunked_array([unknown, *tenants_of_heads["tenant"].chunks], pa.string())
        clocks = self.tenant_clocks(partitions, tenants)
        latest = dict.fromkeys(self.clocks, NULL_TIME)
        for p, clock in zip(partitions.tolist(), clocks.tolist(), strict=True):
            latest[p] = max(clock, latest.get(p, clock))
        return latest
