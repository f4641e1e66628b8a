"""Sources whose values are Avro are merged as those whose values are JSON, and silver holds their
fields, typed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.laws.conftest import MakeLake
from tests.support.avro import CASE_SCHEMA, as_avro, as_text, avro_case, decoded, in_a_column
from tests.support.cases import (
    SOURCES,
    Case,
    expected_late,
    expected_quarantine,
    expected_silver,
    rich_cases,
)
from tests.support.lakes import CaseLake, late_of, silver_of
from watersmeet.audit.rebuild import rebuild, rebuilt_settings, verify_against
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.location import Lake

pytestmark = [pytest.mark.promise("C11"), pytest.mark.fault("cuts", oracle=True)]


@cache
def cases() -> dict[int, Case]:
    return rich_cases(12, 300)


@pytest.fixture(scope="module")
def lake(new_lake: MakeLake, tmp_path_factory: pytest.TempPathFactory) -> CaseLake:
    """`tracking` is Avro, `orders` JSON; filled and merged in two stretches."""
    file = tmp_path_factory.mktemp("schema") / "tracking.avsc"
    file.write_bytes(as_text(CASE_SCHEMA))
    sent = {p: avro_case(case, "tracking") for p, case in cases().items()}
    lake = new_lake(sent, sources__tracking__format="avro", sources__tracking__schema=str(file))
    for share in (0.6, 1.0):
        lake.arrive(share)
        lake.merge()
    return lake


def as_fields(row: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    """A row with the values of one source as what fastavro reads of them."""
    parts = [
        (offset, time, in_a_column(decoded(CASE_SCHEMA, as_avro(text.encode()) or b"")))
        for offset, time, text in row[at]
    ]
    return (*row[:at], parts, *row[at + 1 :])


def with_maps(row: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    """A row of silver with maps, which Arrow gives as lists of pairs, as mappings."""
    parts = [
        (offset, time, {**value, "tags": dict(value["tags"])}) for offset, time, value in row[at]
    ]
    return (*row[:at], parts, *row[at + 1 :])


def test_silver_is_what_the_merge_model_makes_of_the_decoded_values(lake: CaseLake) -> None:
    found, expected = (
        [with_maps(row, 5) for row in lake.silver()],
        [as_fields(row, 5) for row in expected_silver(cases())],
    )
    by_place = sorted(found, key=lambda row: row[:5])
    assert by_place == sorted(expected, key=lambda row: row[:5])
    assert sum(len(row[5]) for row in found) > 50


def test_late_and_refused_records_are_kept_as_they_came(lake: CaseLake) -> None:
    def as_sent(source: str, value: bytes | None) -> bytes | None:
        return as_avro(value) if source == "tracking" else value

    assert lake.late() == sorted(
        (*row[:6], as_sent(row[1], row[6]))  # type: ignore[arg-type]
        for row in expected_late(cases())
    )
    refused = [
        (p, source, offset, as_sent(source, value))  # type: ignore[arg-type]
        for p, source, offset, value in expected_quarantine(cases())
    ]
    assert lake.quarantined() == sorted(refused, key=repr)
    assert {row[1] for row in refused} == set(SOURCES)


def test_a_rebuild_reads_bronzes_bytes_again(lake: CaseLake, tmp_path: Path) -> None:
    rebuild(lake.reader, lake.settings, tmp_path / "again")
    there = DeltaRsReader(Lake(rebuilt_settings(lake.settings, tmp_path / "again")))
    assert silver_of(there) == lake.silver()
    assert late_of(there) == lake.late()
    assert verify_against(lake.reader, there, lake.settings, tmp_path / "again") == {
        "ok": True,
        "problems": [],
    }
