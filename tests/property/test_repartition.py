"""The order of repartitioning is a pure function of what is there: the lockstep of a few lines of Python, however it is cut."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.core.columns import NO_TIME
from pipelines.core.repartition import ROUTED, Lockstep
from pipelines.core.types import TIME

Topic = dict[int, list[int | None]]
"""By partition the event times (ms) of its records; None: of a record that has none."""

law = settings(max_examples=200, deadline=None, derandomize=True)
topics = st.dictionaries(
    st.integers(0, 9), st.lists(st.one_of(st.none(), st.integers(0, 12)), max_size=12), min_size=1, max_size=5
)


@dataclass
class Model:
    """Rule 1 of the merge among the partitions of one topic: go on where the next record's position is smallest."""

    topic: Topic

    def order(self) -> list[tuple[int, int]]:
        """Every record, as (partition, offset)."""
        found, passed, heads = [], dict.fromkeys(self.topic, 0), dict.fromkeys(self.topic, NO_TIME)
        while ahead := [p for p, times in self.topic.items() if passed[p] < len(times)]:
            positions = {p: max(heads[p], NO_TIME if (t := self.topic[p][passed[p]]) is None else t) for p in ahead}
            p = min(ahead, key=lambda p: (positions[p], p))
            found.append((p, passed[p]))
            passed[p], heads[p] = passed[p] + 1, positions[p]
        return found


def rows(p: int, times: list[int | None], first: int) -> pa.Table:
    columns = {name: pa.nulls(len(times), kind) for name, kind in zip(ROUTED.names, ROUTED.types, strict=True)}
    columns["partition"] = pa.array([p] * len(times), pa.int32())
    columns["offset"] = pa.array(range(first, first + len(times)), pa.int64())
    columns["event_time"] = pa.array([None if t is None else t * 1000 for t in times], pa.int64()).cast(TIME)
    return pa.table(columns, schema=ROUTED)


def places(taken: pa.Table) -> list[tuple[int, int]]:
    return list(zip(taken["partition"].to_pylist(), taken["offset"].to_pylist(), strict=True))


@law
@given(topics, st.data())
def test_the_order_is_the_lockstep_however_reading_is_cut_or_begun_again(topic: Topic, data: st.DataObject) -> None:
    lockstep, read, found = Lockstep({}), dict.fromkeys(topic, 0), []
    written: dict[int, int] = {}
    positions: dict[int, int] = {}
    while True:
        waiting = lockstep.first_offsets()
        for p in [p for p, times in topic.items() if p not in waiting and read[p] < len(times)]:
            count = data.draw(st.integers(1, 4))
            lockstep.add(rows(p, topic[p][read[p] : read[p] + count], read[p]))
            read[p] = min(read[p] + count, len(topic[p]))
        taken, reached = lockstep.take([p for p, times in topic.items() if read[p] < len(times)])
        found += places(taken)
        positions |= reached
        written |= {p: offset + 1 for p, offset in places(taken)}
        if data.draw(st.booleans()):  # a crash: only what was written is known
            lockstep, read = Lockstep(dict(positions)), {p: written.get(p, 0) for p in topic}
        if all(written.get(p, 0) == len(times) for p, times in topic.items()):
            break
    assert found == Model(topic).order()


@law
@given(topics)
def test_no_record_is_further_behind_in_the_order_than_in_its_own_partition(topic: Topic) -> None:
    """So none is late that was not late before: it lies behind the largest event time by no more."""
    largest = NO_TIME
    own = dict.fromkeys(topic, NO_TIME)
    for p, offset in Model(topic).order():
        time = topic[p][offset]
        if time is not None:
            largest, own[p] = max(largest, time), max(own[p], time)
            assert largest <= own[p]


@law
@given(topics, st.integers(0, 9))
def test_nothing_waits_for_a_partition_that_is_at_its_end(topic: Topic, silent: int) -> None:
    lockstep = Lockstep({silent: 0})
    for p, times in topic.items():
        lockstep.add(rows(p, times, 0))
    assert sorted(places(lockstep.take([])[0])) == sorted((p, o) for p, times in topic.items() for o in range(len(times)))
    assert lockstep.first_offsets() == {}
