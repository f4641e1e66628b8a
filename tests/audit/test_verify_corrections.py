"""`verify` derives corrections again: no alarm in a right lake, and each wrong row is found;
`rebuild` makes the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelines.audit.rebuild import rebuild, rebuilt_settings
from pipelines.engine.choice import open_engine
from pipelines.lake import tables
from pipelines.lake.by_delta_rs import DeltaRsReader
from pipelines.lake.location import Lake
from tests.audit.inputs import problems_in
from tests.audit.test_verify import Change, altered, gone, twice
from tests.laws.test_corrections import cases, corrections
from tests.support.cases import Case
from tests.support.configurations import IDS, settings_for
from tests.support.corrections import corrections_of, late_duplicates_of
from tests.support.lakes import CaseLake
from tests.support.model_lakes import rewrite
from tests.support.tenants import merge_of, tenant_cases

pytestmark = pytest.mark.promise("R21")


def lake_of(folder: Path, given: dict[int, Case], **overrides: Any) -> CaseLake:
    settings = settings_for(folder, **corrections(), **overrides)
    return CaseLake(open_engine(settings), settings, given)


@pytest.mark.parametrize("tenants", [False, True])
def test_a_right_lake_is_right_and_a_rebuild_has_the_same_corrections(
    tmp_path: Path, tenants: bool
) -> None:
    more = {"merge": merge_of((100, 250, 300))} if tenants else IDS
    lake = lake_of(tmp_path, tenant_cases(14) if tenants else cases(), **more)
    for share in (0.4, 0.8, 1.0):
        lake.arrive(share)
        lake.merge()
        assert problems_in(lake) == []
    assert len(corrections_of(lake.reader)) > 10
    rebuild(lake.reader, lake.settings, tmp_path / "again")
    there = DeltaRsReader(Lake(rebuilt_settings(lake.settings, tmp_path / "again")))
    assert corrections_of(there) == corrections_of(lake.reader)
    assert late_duplicates_of(there) == late_duplicates_of(lake.reader)


BREAKS: list[tuple[Change, str]] = [
    (gone, "the tables have nothing, and the model version"),
    (twice, "and version"),
    (altered(version=7), "the tables have version 7"),
    (altered(is_late_born=True), "and the model version"),
    (altered(tracking=[]), "with"),
]


@pytest.mark.parametrize(
    ("change", "words"), BREAKS, ids=["gone", "twice", "version", "kind", "parts"]
)
def test_what_is_wrong_with_a_correction_is_found(
    tmp_path: Path, change: Change, words: str
) -> None:
    lake = lake_of(tmp_path, cases())
    lake.arrive()
    lake.merge()
    rows = lake.reader.select(
        tables.CORRECTIONS, ["partition", "source", "offset", "is_late_born", "tracking"]
    ).to_pylist()
    chosen = next(row for row in rows if not row["is_late_born"] and row["tracking"])
    at = chosen["partition"], chosen["source"], chosen["offset"]

    def changed(row: dict[str, Any]) -> Any:
        return change(row) if (row["partition"], row["source"], row["offset"]) == at else row

    rewrite(lake.settings, tables.CORRECTIONS, changed)
    [problem] = problems_in(lake)
    assert f"offset {at[2]} of {at[1]}" in problem
    assert words in problem
