"""Facts about tenants for `explain`: a record's position in its tenant, that tenant's clock, and
the sources that hold the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from watersmeet.audit.show import utc
from watersmeet.core.clocks import Clocks
from watersmeet.core.columns import NULL_TIME
from watersmeet.core.idle import IdleDecision
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import BatchPlan, Cursor, OffsetRange, TopicPartition
from watersmeet.core.tenants import TenantClocks
from watersmeet.lake.epochs import Epochs
from watersmeet.lake.inputs import topic_partition
from watersmeet.lake.table_reader import TableReader
from watersmeet.lake.tenant_state import BatchEnd
from watersmeet.lake.tenants import clocks_at

JsonObject = dict[str, Any]


class TenantFacts:
    """Positions and clocks of a lake's tenants at the end of a batch.

    `ends`: rows of `progress` of that batch, one for every topic-partition.
    """

    def __init__(
        self, reader: TableReader, epochs: Epochs, batch: int, ends: Iterable[JsonObject]
    ) -> None:
        self._reader = reader
        self._epochs = epochs
        self._batch = batch
        self._ends = {topic_partition(row): row for row in ends}
        self._names = epochs.current.settings.input_names

    def clock(self, partition: int, tenant: str) -> tuple[int | None, list[str]]:
        """Return a tenant's clock (ms), and the names of the inputs that hold it there.

        The clock is None while the partition has none.
        """
        input_clocks: dict[str, int] = {}
        for input_id, clocks in self._by_input.items():
            tenants = pa.chunked_array([[tenant]], pa.string())
            time = int(clocks.at(np.array([partition]), tenants)[0])
            input_clocks |= {} if time == NULL_TIME else {self._names[input_id]: time}
        clock = min(input_clocks.values(), default=None)
        return clock, [name for name, time in input_clocks.items() if time == clock]

    @cached_property
    def _by_input(self) -> dict[InputId, Clocks]:
        """The clocks of tenants by input, as if there were no other input."""
        clocks_by_input: dict[InputId, Clocks] = {}
        for input_id in sorted({tp.input for tp in self._ends}):
            input_rows = {tp: row for tp, row in self._ends.items() if tp.input == input_id}
            cursors = {
                tp: Cursor(row["until_offset"], row["position"]) for tp, row in input_rows.items()
            }
            clocks = {
                tp.partition: row["clock"]
                for tp, row in input_rows.items()
                if row["clock"] is not None
            }
            clocks_by_input[input_id] = clocks_at(
                self._reader, self._epochs, self._batch, BatchEnd(cursors, clocks)
            )
        return clocks_by_input

    def positions(
        self,
        tp: TopicPartition,
        batch: int,
        before: tuple[Cursor, int | None],
        rows: pa.Table,
        last: int,
        idle: Sequence[IdleDecision],
    ) -> Mapping[int, int]:
        """Return, by offset, the positions (ms) in their tenants of records that a batch read.

        - `rows`: offset, event_time and tenant in bronze of the batch's records, up to the last one
          that is asked about.
        - `last`: the position of that record among all records.
        - `before`: where the batch began, and the clock then.
        """
        cursor, clock = before
        moment = BatchEnd({tp: cursor}, {} if clock is None else {tp.partition: clock})
        heads = clocks_at(self._reader, self._epochs, batch, moment).heads()
        until = int(rows["offset"].to_numpy().max(initial=cursor.next_offset - 1)) + 1
        plan = BatchPlan(
            batch,
            {tp: OffsetRange(cursor.next_offset, until, cursor.position, last, last)},
            {tp.partition: last},
            False,
        )
        records = rows
        for name, text in tp.input._asdict().items():
            records = records.append_column(name, pa.repeat(pa.scalar(text), len(rows)))
        records = records.append_column(
            "partition", pa.repeat(pa.scalar(tp.partition, pa.int32()), len(rows))
        )
        lag_ms = self._epochs.of(batch).settings.merge.tenant_max_lag_ms or 0
        positions = TenantClocks.of(records, heads, plan, {tp: idle}, lag_ms).positions
        return {
            o: v
            for o, v in zip(rows["offset"].to_pylist(), positions.tolist(), strict=True)
            if v != NULL_TIME
        }

    # -- why, in sentences

    def why_open(self, partition: int, tenant: str, limit: str) -> str:
        """Return why a merge record is open that can be joined until a limit."""
        return (
            f"open: times out once the clock of tenant {tenant!r} has passed {limit}; it is "
            f"{self._clock_text(partition, tenant)}"
        )

    def why_waiting(self, partition: int, tenant: str, position: int) -> str:
        """Return why a record waits that was read at a position (ms) of its tenant."""
        return (
            f"read at {utc(position)} of tenant {tenant!r}, whose clock is "
            f"{self._clock_text(partition, tenant)}"
        )

    def why_late(self, tenant: str, row: JsonObject, global_position: int | None) -> str:
        """Return why a record is in `late`.

        `global_position`: its position among all records (ms), if that is known.
        """
        merge = self._epochs.of(row["batch"]).settings.merge
        window = merge.window
        position = row["position"]
        if row["event_time"] >= position - window.gap_ms:
            return f"late: before what an earlier epoch had timed out of tenant {tenant!r}"
        name = "timeout" if window.is_timeout else "gap"
        limit = utc(position - window.gap_ms)
        why = (
            f"late: before {limit}, which is the position of tenant {tenant!r}, {utc(position)}, "
            f"less the {name}"
        )
        if global_position is not None and position == global_position - (
            merge.tenant_max_lag_ms or 0
        ):
            why += (
                f"; that is as far behind the position of all, {utc(global_position)}, as "
                "merge.tenant_max_lag lets it be"
            )
        return why

    def _clock_text(self, partition: int, tenant: str) -> str:
        clock, sources = self.clock(partition, tenant)
        if clock is None:
            return "undefined"
        global_clock = next(
            (row["clock"] for tp, row in self._ends.items() if tp.partition == partition), None
        )
        if clock == global_clock:
            return utc(clock)
        return (
            f"{utc(clock)}, held by {' and '.join(sources)}; the clock of all is "
            f"{utc(global_clock)}"
        )
