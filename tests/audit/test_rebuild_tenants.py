"""`rebuild` with tenants: through epochs and resets it is what silver was, and under another lag
what the model makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable
from rich.console import Console

from tests.audit.inputs import problems_in
from tests.audit.test_verify_tenants import settings_of
from tests.support.cases import cases_with_ids
from tests.support.configurations import IDS, settings_for
from tests.support.lakes import CaseLake, duplicates_of
from tests.support.tenants import TenantModels, late_of, silver_of, tenant_cases
from watersmeet.audit.rebuild import rebuild, rebuilt_settings, verify_against
from watersmeet.audit.show import rebuild_view
from watersmeet.core.window import Window
from watersmeet.engine.choice import open_engine
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.history import read_history
from watersmeet.lake.identity import begin_epoch
from watersmeet.lake.location import Lake
from watersmeet.operations.retention import expire
from watersmeet.settings import Settings

pytestmark = [pytest.mark.promise("T6"), pytest.mark.fault("jumps", "rules")]


def reader_of(settings: Settings, directory: Path) -> DeltaRsReader:
    return DeltaRsReader(Lake(rebuilt_settings(settings, directory)))


def jump(lake: CaseLake) -> None:
    """A deliberate reset: in every other partition forward by two offsets, in the others back by
    three."""
    cursors = lake.start().recover().state.cursors.items()
    lake.jump({tp: max(0, at.next_offset + (2 if tp.partition % 2 else -3)) for tp, at in cursors})


@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.parametrize(
    "has_reset",
    [pytest.param(False, marks=pytest.mark.nightly), True],
    ids=["epochs", "epochs and a reset"],
)
def test_a_rebuild_is_what_silver_was_then(tmp_path: Path, has_reset: bool) -> None:
    rules = [(100, None, 300), (30, 90, 1000), (150, 400, 50)]
    settings = settings_of(tmp_path, *rules[0], **IDS)
    lake = CaseLake(open_engine(settings), settings, cases_with_ids(tenant_cases(12)))
    begin_epoch(lake.reader, lake.engine.append, settings, 0)
    for number, of_epoch in enumerate(rules):
        if number:
            lake.settings = settings_of(tmp_path, *of_epoch, **IDS)
            begin_epoch(
                lake.reader,
                lake.engine.append,
                lake.settings,
                lake.start().recover().state.next_batch,
            )
        for share in (0.3 * number + 0.1, 0.3 * number + 0.3):
            lake.arrive(share)
            lake.merge()
        if number == 1 and has_reset:
            jump(lake)
    readers = silver_of, late_of, duplicates_of
    silver, late, duplicates = (read(lake.reader, generation=int(has_reset)) for read in readers)
    assert problems_in(lake) == []
    again = tmp_path / "again"
    found = rebuild(lake.reader, lake.settings, again)
    there = reader_of(lake.settings, again)
    assert silver_of(there, generation=int(has_reset)) == silver
    assert late_of(there, generation=int(has_reset)) == late
    assert duplicates_of(there, generation=int(has_reset)) == duplicates != []
    assert found["lake"] == found["rebuilt"]
    assert min(found["lake"][name] for name in ("open", "waiting", "timed_out")) > 0
    assert found["lake"]["records"] == found["lake"]["open"] + found["lake"]["timed_out"]
    assert found["tenant_max_lag_ms"] == {"lake": 50, "rebuilt": 50}
    lake.arrive()
    lake.merge()
    assert verify_against(lake.reader, there, lake.settings, again) == {
        "ok": True,
        "problems": [],
    }, "as silver was then"


def test_a_rebuild_is_what_silver_was_also_where_refused_records_have_gone(tmp_path: Path) -> None:
    """What tenants let `keep` delete: nothing is derived from it."""
    settings = settings_of(tmp_path, keep={"quarantine": "1ms"})
    cases = {p: replace(case, decisions={}) for p, case in tenant_cases(2).items()}
    for p, case in cases.items():
        values = {**case.values, "tracking": [b"{", *case.values["tracking"]]}
        cases[p] = replace(case, values=values, arrivals=["tracking", *case.arrivals])
    lake = CaseLake(open_engine(settings), settings, cases)
    lake.arrive()
    refused = DeltaTable(lake.reader.path(tables.bronze("tracking")))  # type: ignore[attr-defined]
    refused.update({"kafka_timestamp": "to_timestamp_micros(0)"}, predicate="reason IS NOT NULL")
    lake.merge()
    for source in settings.sources:
        expire(lake.owner(), settings, tables.bronze(source))
    assert read_history(lake.reader, lake.settings).floors.times
    again = tmp_path / "again"
    rebuild(lake.reader, settings, again)
    assert silver_of(reader_of(settings, again)) == silver_of(lake.reader) != []
    assert (
        verify_against(lake.reader, reader_of(settings, again), settings, again)["problems"] == []
    )


CHANGES = [
    ("timed_out", "tenant", "'another'"),
    ("waiting", "position", "position + INTERVAL '1 day'"),
    ("timed_out", "closed_at", "closed_at + INTERVAL '1 day'"),
    ("late", "tenant", "'another'"),
]


@pytest.mark.parametrize(("status", "column", "value"), CHANGES)
def test_what_the_rebuild_has_otherwise_is_told(
    tmp_path: Path, status: str, column: str, value: str
) -> None:
    settings = settings_of(tmp_path, 100, None, 300)
    lake = CaseLake(open_engine(settings), settings, tenant_cases(3))
    lake.arrive(0.7)
    lake.merge()
    again = tmp_path / "again"
    rebuild(lake.reader, settings, again)
    there = reader_of(settings, again)
    columns = ["partition", "merge_key", "event_time"]
    row = there.select(tables.SILVER, columns, [[("status", "=", status)]]).to_pylist()[0]
    is_it = (
        f"partition = {row['partition']} AND merge_key = '{row['merge_key']}' AND status = "
        f"'{status}'"
    )
    is_it += (
        f" AND event_time = arrow_cast({row['event_time'] * 1000}, 'Timestamp(Microsecond, "
        'Some("UTC"))\')'
    )
    DeltaTable(str(again / tables.SILVER)).update(updates={column: value}, predicate=is_it)
    problems = verify_against(lake.reader, there, settings, again)["problems"]
    assert {problem["what"] for problem in problems} == {f"the rebuild has a different {column}"}


@pytest.mark.fault("rules", oracle=True)
def test_under_another_lag_and_window_it_is_what_the_model_makes_of_it(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, 100, None, 300)
    lake = CaseLake(open_engine(settings), settings, cases := tenant_cases(12))
    for share in (0.5, 1.0):
        lake.arrive(share)
        lake.merge()
    again = tmp_path / "again"
    found = rebuild(lake.reader, settings, again, Window(30, 90), lag_ms=2000)
    models = TenantModels(cases, (30, 90, 2000))
    models.arrive(1.0)
    there = reader_of(settings, again)
    assert silver_of(there) == models.silver()
    assert late_of(there) == models.late()
    assert found["tenant_max_lag_ms"] == {"lake": 300, "rebuilt": 2000}
    console = Console(width=200, record=True)
    console.print(rebuild_view(found))
    assert (
        "lake, T = 100ms, lag 300ms  rebuilt, gap 30ms, max 90ms, lag 2s" in console.export_text()
    )
    with pytest.raises(ConfigurationError, match="derived with a tenant_max_lag of 2000 ms"):
        verify_against(lake.reader, there, settings, again)


def test_a_lag_where_there_are_no_tenants_is_a_clear_error(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    lake = CaseLake(open_engine(settings), settings, tenant_cases(1))
    lake.arrive()
    lake.merge()
    with pytest.raises(ConfigurationError, match="--tenant-max-lag: this lake has no tenants"):
        rebuild(lake.reader, settings, tmp_path / "again", lag_ms=5)
