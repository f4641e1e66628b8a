"""`verify` derives corrections again: no alarm in a right lake, and each wrong row is found;
`rebuild` makes the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.audit.inputs import problems_in
from tests.audit.test_corrections import NOTED
from tests.audit.test_verify import Change, altered, gone, twice
from tests.laws.test_corrections import TENANT_PARTITIONS, cases, corrections
from tests.support.cases import Case, heartbeat, keyed
from tests.support.configurations import IDS, settings_for
from tests.support.corrections import corrections_of, late_duplicates_of
from tests.support.crashes import CrashError, dying_at
from tests.support.lakes import CaseLake
from tests.support.model_lakes import rewrite
from tests.support.tenants import merge_of, tenant_cases
from watersmeet.audit.rebuild import rebuild, rebuilt_settings, verify_against
from watersmeet.engine.choice import open_engine
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.location import Lake
from watersmeet.operations.forget import Forgetting
from watersmeet.operations.retention import expire

pytestmark = pytest.mark.promise("R21")


LATER = {"partition": 0, "last_settled_at": 20_000}


def lake_of(folder: Path, given: dict[int, Case], **overrides: Any) -> CaseLake:
    settings = settings_for(folder, **(corrections() | overrides))
    return CaseLake(open_engine(settings), settings, given)


def late_case() -> Case:
    """One record that is late once four have arrived, and settled at the end."""
    return Case(
        {
            "tracking": [keyed("a", 0), heartbeat(1000), keyed("a", 50), heartbeat(2000)],
            "orders": [heartbeat(1000), heartbeat(2000)],
        },
        100,
        ["tracking", "tracking", "orders", "tracking", "tracking", "orders"],
    )


@pytest.mark.fault("cuts", "rules")
@pytest.mark.parametrize("tenants", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_right_lake_is_right_and_a_rebuild_has_the_same_corrections(
    tmp_path: Path, tenants: bool
) -> None:
    more = {"merge": merge_of((100, 250, 300))} if tenants else IDS
    more = more | corrections(max_versions=1)
    lake = lake_of(tmp_path, tenant_cases(TENANT_PARTITIONS) if tenants else cases(), **more)
    for share in (0.4, 0.8, 1.0):
        lake.arrive(share)
        lake.merge()
        assert problems_in(lake) == []
    assert len(corrections_of(lake.reader)) > 10
    assert {row[9] for row in corrections_of(lake.reader)} == {0, 1}
    rebuild(lake.reader, lake.settings, tmp_path / "again")
    there = DeltaRsReader(Lake(rebuilt_settings(lake.settings, tmp_path / "again")))
    assert corrections_of(there) == corrections_of(lake.reader)
    assert late_duplicates_of(there) == late_duplicates_of(lake.reader)
    assert verify_against(lake.reader, there, lake.settings, tmp_path / "again")["problems"] == []


@pytest.mark.fault("retention")
def test_corrections_that_keep_has_deleted_before_anything_else_are_no_broken_promise(
    tmp_path: Path,
) -> None:
    """A run deletes rows once they are a worthwhile share of their table."""
    case = late_case()
    case.values["tracking"] += [keyed("b", 29_000) for _ in range(9)]
    for source, values in case.values.items():
        values.append(heartbeat(30_500))
        case.arrivals += [source] * (len(values) - case.arrivals.count(source))
    corrected_within = {"topic": "merged-corrections", "within": "20s"}
    keep = {"silver": "30s", "late": "30s"}
    settings = settings_for(tmp_path, keep=keep, publish__corrections=corrected_within)
    lake = CaseLake(open_engine(settings), settings, {0: case})
    lake.arrive()
    lake.merge()
    published = lake.engine.lake.layout[tables.PUBLISHED]
    lake.engine.append(tables.PUBLISHED, published.rows_of([NOTED | LATER]))
    assert len(corrections_of(lake.reader)) == 1
    expire(lake.owner(), settings, tables.SILVER, only_if_worthwhile=True)
    assert corrections_of(lake.reader) == []
    assert problems_in(lake) == []


@pytest.mark.fault("kill")
def test_of_a_key_that_is_half_forgotten_the_half_alone_is_told(tmp_path: Path) -> None:
    lake = lake_of(tmp_path, {0: late_case()})
    lake.arrive()
    lake.merge()
    assert len(corrections_of(lake.reader)) == 1
    dying = dying_at(lake.engine, "merge", tables.SILVER)
    with pytest.raises(CrashError):
        Forgetting(lake.reader, lake.settings, "a").erase(lake.owner(dying))
    found = problems_in(lake)
    told = [text for text in found if "`forget` was cut short" in text]
    assert told
    assert found == told
    Forgetting(lake.reader, lake.settings, "a").erase(lake.owner())
    assert problems_in(lake) == []


BREAKS: list[tuple[Change, str]] = [
    (gone, "the tables have nothing, and the merge model version 1"),
    (twice, "and the merge model nothing"),
    (altered(version=7), "the tables have version 7"),
    (altered(is_late_born=True), ": is_late_born"),
    (altered(tracking=[]), ": tracking"),
]


@pytest.mark.fault("damage")
@pytest.mark.parametrize(
    ("change", "words"), BREAKS, ids=["gone", "twice", "version", "kind", "parts"]
)
def test_what_is_wrong_with_a_correction_is_found(
    tmp_path: Path, change: Change, words: str
) -> None:
    lake = lake_of(tmp_path, {p: cases()[p] for p in range(4)})
    lake.arrive()
    lake.merge()
    rebuild(lake.reader, lake.settings, tmp_path / "again")
    there = DeltaRsReader(Lake(rebuilt_settings(lake.settings, tmp_path / "again")))
    rows = lake.reader.select(
        tables.CORRECTIONS, ["partition", "source", "offset", "is_late_born", "tracking"]
    ).to_pylist()
    chosen = next(row for row in rows if not row["is_late_born"] and row["tracking"])
    at = chosen["partition"], chosen["source"], chosen["offset"]

    def changed(row: dict[str, Any]) -> Any:
        return change(row) if (row["partition"], row["source"], row["offset"]) == at else row

    rewrite(lake.settings, tables.CORRECTIONS, changed)
    found = problems_in(lake)
    assert any(f"by {at[1]}@{at[2]}" in told and words in told for told in found), found
    [problem] = verify_against(lake.reader, there, lake.settings, tmp_path / "again")["problems"]
    assert problem["where"].startswith("corrections: ")
    assert problem["where"].endswith(f"[{at[0]}]@{at[2]}")
