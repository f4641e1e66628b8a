"""The order of repartitioning is a pure function of what is there: the lockstep of a few lines of
Python, however it is cut."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.effort import draws
from watersmeet.core.columns import NULL_TIME
from watersmeet.core.repartition import ROUTED, InputPartition, Lockstep
from watersmeet.core.types import TIME

Inputs = dict[InputPartition, list[int | None]]
"""By topic and partition the event times (ms) of the records; None: of a record that has none."""

TOPICS = ("a", "b", "c")

law = draws(60)
inputs = st.dictionaries(
    st.builds(InputPartition, st.sampled_from(TOPICS), st.integers(0, 9)),
    st.lists(st.one_of(st.none(), st.integers(0, 12)), max_size=12),
    min_size=1,
    max_size=5,
)


@dataclass
class Model:
    """Rule 1 of the merge among the partitions of some topics: go on where the next record's
    position is smallest."""

    inputs: Inputs

    def order(self) -> list[tuple[InputPartition, int]]:
        """Every record, as (input, offset)."""
        found, passed, heads = (
            [],
            dict.fromkeys(self.inputs, 0),
            dict.fromkeys(self.inputs, NULL_TIME),
        )
        while ahead := [of for of, times in self.inputs.items() if passed[of] < len(times)]:
            positions = {
                of: max(heads[of], NULL_TIME if (t := self.inputs[of][passed[of]]) is None else t)
                for of in ahead
            }
            of = min(ahead, key=lambda of: (positions[of], of))
            found.append((of, passed[of]))
            passed[of], heads[of] = passed[of] + 1, positions[of]
        return found


def rows(of: InputPartition, times: list[int | None], first: int) -> pa.Table:
    columns = {
        name: pa.nulls(len(times), kind)
        for name, kind in zip(ROUTED.names, ROUTED.types, strict=True)
    }
    columns["topic"] = pa.array([of.topic] * len(times), pa.string())
    columns["partition"] = pa.array([of.partition] * len(times), pa.int32())
    columns["offset"] = pa.array(range(first, first + len(times)), pa.int64())
    columns["event_time"] = pa.array(
        [None if t is None else t * 1000 for t in times], pa.int64()
    ).cast(TIME)
    return pa.table(columns, schema=ROUTED)


def places(taken: pa.Table) -> list[tuple[InputPartition, int]]:
    inputs = map(InputPartition, taken["topic"].to_pylist(), taken["partition"].to_pylist())
    return list(zip(inputs, taken["offset"].to_pylist(), strict=True))


@pytest.mark.promise("N5")
@pytest.mark.fault("cuts", oracle=True)
@law
@given(inputs, st.data())
def test_the_order_is_the_lockstep_however_reading_is_cut_or_begun_again(
    of_inputs: Inputs, data: st.DataObject
) -> None:
    lockstep, read, found = Lockstep(TOPICS, {}), dict.fromkeys(of_inputs, 0), []
    written: dict[InputPartition, int] = {}
    positions: dict[InputPartition, int] = {}
    while True:
        waiting = lockstep.first_offsets()
        for of in [
            of for of, times in of_inputs.items() if of not in waiting and read[of] < len(times)
        ]:
            count = data.draw(st.integers(1, 4))
            lockstep.add(rows(of, of_inputs[of][read[of] : read[of] + count], read[of]))
            read[of] = min(read[of] + count, len(of_inputs[of]))
        taken, reached = lockstep.take(
            [of for of, times in of_inputs.items() if read[of] < len(times)]
        )
        found += places(taken)
        positions |= reached
        written |= {of: offset + 1 for of, offset in places(taken)}
        if data.draw(st.booleans()):  # a crash: only what was written is known
            lockstep, read = (
                Lockstep(TOPICS, dict(positions)),
                {of: written.get(of, 0) for of in of_inputs},
            )
        if all(written.get(of, 0) == len(times) for of, times in of_inputs.items()):
            break
    assert found == Model(of_inputs).order()


@pytest.mark.promise("N5")
@pytest.mark.fault("cuts", oracle=True)
@law
@given(inputs)
def test_no_record_is_further_behind_in_the_order_than_in_its_own_partition(
    of_inputs: Inputs,
) -> None:
    """So none is late that was not late before: it lies behind the largest event time by no
    more."""
    largest = NULL_TIME
    own = dict.fromkeys(of_inputs, NULL_TIME)
    for of, offset in Model(of_inputs).order():
        time = of_inputs[of][offset]
        if time is not None:
            largest, own[of] = max(largest, time), max(own[of], time)
            assert largest <= own[of]


@law
@given(inputs, st.builds(InputPartition, st.sampled_from(TOPICS), st.integers(0, 9)))
def test_nothing_waits_for_a_partition_that_is_at_its_end(
    of_inputs: Inputs, silent: InputPartition
) -> None:
    lockstep = Lockstep(TOPICS, {silent: 0})
    for of, times in of_inputs.items():
        lockstep.add(rows(of, times, 0))
    every = sorted((of, o) for of, times in of_inputs.items() for o in range(len(times)))
    assert sorted(places(lockstep.take([])[0])) == every
    assert lockstep.first_offsets() == {}
