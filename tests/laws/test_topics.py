"""A source with several topics on real Delta tables: each has offsets and positions of its own, and
one column is theirs."""

from __future__ import annotations

from functools import cache

import numpy as np
import pyarrow as pa
import pytest

from tests.laws.conftest import QUICK, MakeLake
from tests.support.cases import (
    INPUTS,
    Case,
    cases_with_ids,
    expected_duplicates,
    expected_late,
    expected_quarantine,
    expected_silver,
    rich_cases,
)
from tests.support.configurations import IDS
from tests.support.inputs import input_of, tp_of
from tests.support.lakes import CaseLake
from watersmeet.core.repeated import DUPLICATE_SCHEMA
from watersmeet.core.silver import in_silver
from watersmeet.lake import tables
from watersmeet.running.published_parts import late_duplicates

PARTITIONS = 20
TOPICS = {"sources__tracking__topic": [name.partition("/")[2] for name in INPUTS if "/" in name]}


@cache
def cases() -> dict[int, Case]:
    return cases_with_ids(rich_cases(PARTITIONS, 31_000, INPUTS))


@pytest.fixture(scope="module")
def lake(new_lake: MakeLake, kind: str) -> CaseLake:
    """Cut by arrivals, by starts and, where a batch costs little, by its size."""
    size = (10 if kind == QUICK else 1000) * PARTITIONS * len(INPUTS)
    lake = new_lake(cases(), merge__max_records_per_batch=size, **TOPICS, **IDS)
    for share in (0.6, 1.0):
        lake.arrive(share)
        lake.merge()
    return lake


def test_silver_equals_the_merge_model_however_the_input_is_cut(lake: CaseLake, kind: str) -> None:
    assert len(lake.plans) >= (4 if kind == QUICK else 2)
    expected = expected_silver(cases(), INPUTS)
    assert lake.silver() == expected
    topics = [[part[0] for part in row[5]] for row in expected]  # type: ignore[attr-defined]
    assert sum(len(set(each)) > 1 for each in topics) > 20, "there are records of both"


def test_late_and_quarantine_equal_the_merge_model(lake: CaseLake) -> None:
    late, refused = expected_late(cases(), INPUTS), expected_quarantine(cases())
    assert (lake.late(), lake.quarantined()) == (late, refused)
    assert lake.duplicates() == expected_duplicates(cases(), INPUTS)
    assert {row[1] for row in late} == {row[1] for row in refused} == set(INPUTS)
    for table in (tables.LATE, tables.QUARANTINE):
        places = lake.reader.summary(
            table, ["source", "topic"], {"rows": ("count", "*")}
        ).to_pylist()
        assert {(row["source"], row["topic"]) for row in places} == {*map(input_of, INPUTS)}, table


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_a_late_record_that_repeats_one_of_its_own_topic_is_not_that_of_another(
    new_lake: MakeLake,
) -> None:
    """Both topics of the source have the offset."""
    lake = new_lake({0: Case({name: [] for name in INPUTS}, 100)}, **TOPICS, **IDS)
    one, other = (tp_of(name, 0) for name in INPUTS if "/" in name)
    columns = {"partition": 0, "merge_key": "a", "event_time": 0, "id": "i", "is_late": True}
    rows = [
        {**columns, **one.input._asdict(), "offset": 8, "of_offset": 3},
        {**columns, **other.input._asdict(), "offset": 9, "of_offset": 3},
    ]
    schema = lake.engine.lake.schema(tables.SILVER)
    late = in_silver(pa.Table.from_pylist(rows, DUPLICATE_SCHEMA), "duplicate", schema)
    lake.owner().append(tables.SILVER, late, tables.BESIDE)
    found = late_duplicates(lake.reader, lake.settings.inputs, {one: np.array([3])})
    assert {tp: offsets.tolist() for tp, offsets in found.items() if len(offsets)} == {one: [8]}


def test_every_topic_has_offsets_heads_and_progress_of_its_own(lake: CaseLake) -> None:
    assert set(lake.plans[-1].ranges) == {tp_of(name, p) for name in INPUTS for p in cases()}
    columns = ["source", "topic", "partition", "until_offset", "head"]
    noted = lake.reader.select(
        tables.PROGRESS, columns, [[("batch", "=", lake.plans[-1].batch)]]
    ).to_pylist()
    found = {
        (row["source"], row["topic"], row["partition"]): (row["until_offset"], row["head"])
        for row in noted
    }
    assert found == {
        (*tp.input, tp.partition): (
            done.until_offset,
            done.head,
        )
        for tp, done in lake.plans[-1].ranges.items()
    }
    clocks = {p: case.merged(INPUTS).clock for p, case in cases().items()}
    assert lake.plans[-1].clocks == {p: clock for p, clock in clocks.items() if clock is not None}
