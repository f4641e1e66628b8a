"""A key that was forgotten: everything is as if its records had been heartbeats, whatever step was
cut off, on both engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import orjson
import pytest

from tests.laws.conftest import QUICK, MakeLake, in_folders
from tests.support.avro import CASE_SCHEMA, as_avro, as_text, decoded, encoded
from tests.support.cases import (
    BAD_VALUES,
    SOURCES,
    Case,
    cases_with_ids,
    expected_duplicates,
    expected_late,
    expected_silver,
    heartbeat,
    keyed,
    rich_cases,
)
from tests.support.commands import in_process
from tests.support.configurations import IDS
from tests.support.crashes import CrashError, dying_at
from tests.support.lakes import CaseLake, fill_bronze
from tests.support.tenants import TENANTS, TenantModels, late_of, silver_of, tenant_cases
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.identity import begin_epoch
from watersmeet.operations.forget import Forgetting
from watersmeet.running.bronze_table import BronzeTable

KEY = "a"
SHARE = 0.7
CRASHES = [("update", tables.bronze(source)) for source in SOURCES]
CRASHES += [("append", tables.ERASED), ("merge", tables.SILVER)]


def without_key(case: Case) -> Case:
    """The case as it would be had the records of the key that have arrived been heartbeats."""
    arrived = case.arrivals[: round(SHARE * len(case.arrivals))]
    values = {source: [*mine] for source, mine in case.values.items()}
    for source, mine in values.items():
        for offset in range(arrived.count(source)):
            value = mine[offset]
            if value not in BAD_VALUES and (document := orjson.loads(value or b"")).get("k") == KEY:
                mine[offset] = heartbeat(document["ts"])
    return replace(case, values=values)


def erase(lake: CaseLake, crash: tuple[str, str] | None = None) -> None:
    engine = lake.engine if crash is None else dying_at(lake.engine, *crash)
    Forgetting(lake.reader, lake.settings, KEY).erase(lake.owner(engine))


@pytest.mark.promise("N9")
@pytest.mark.fault("kill", oracle=True)
@in_folders
def test_all_else_is_as_if_the_keys_records_had_been_heartbeats(
    new_lake: MakeLake, kind: str
) -> None:
    corrections = {"topic": "merged-corrections", "within": "1d"}
    lake = new_lake(
        cases_with_ids(rich_cases(8, 1656, wealth="late")), publish__corrections=corrections, **IDS
    )
    lake.arrive(SHARE)
    lake.merge(lake.quick)
    with_keys = (tables.SILVER, tables.LATE, tables.DUPLICATES, tables.CORRECTIONS)
    for name in with_keys:
        assert KEY in lake.reader.select(name, ["merge_key"])["merge_key"].to_pylist()
    quarantined = len(lake.quarantined())
    for crash in CRASHES if kind == QUICK else CRASHES[-1:]:
        with pytest.raises(CrashError):
            erase(lake, crash)
    erase(lake)
    versions = [lake.reader.version(name) for name in lake.engine.lake.layout]
    erase(lake)
    assert [lake.reader.version(name) for name in lake.engine.lake.layout] == versions, (
        "there is nothing left to erase"
    )

    for name in (*with_keys, *map(tables.bronze, lake.settings.sources)):
        assert KEY not in lake.reader.select(name, ["merge_key"])["merge_key"].to_pylist()
    for name in map(tables.bronze, lake.settings.sources):
        rows = lake.reader.select(name, ["merge_key", "id"]).to_pylist()
        assert not any(row["id"] for row in rows if row["merge_key"] is None)
    for name in (tables.QUARANTINE, *map(tables.bronze, lake.settings.sources)):
        found = lake.reader.select(name, ["key", "value", "headers", "detail"]).to_pylist()
        assert not any(b'"k":"a"' in (row["value"] or b"") for row in found)
        erased = [row for row in found if row["detail"] == "forgotten"]
        assert all(
            (row["key"], row["value"], row["headers"]) == (None, None, None) for row in erased
        )
        assert erased or name != tables.QUARANTINE
    assert len(lake.quarantined()) == quarantined

    cases = {p: without_key(case) for p, case in lake.cases.items()}
    lake.arrive()
    lake.merge(lake.quick)
    assert lake.silver() == expected_silver(cases)
    assert lake.late() == expected_late(cases)
    assert lake.duplicates() == expected_duplicates(cases)
    assert any(row[1] == KEY for row in lake.silver()), "a key that comes again begins anew"


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_a_record_that_was_refused_under_an_earlier_key_path_is_found(
    new_lake: MakeLake, kind: str
) -> None:
    lake = new_lake(rich_cases(4, 1656, wealth="late"))
    lake.arrive(SHARE)
    lake.merge()
    begin_epoch(lake.reader, lake.quick.append, lake.settings, 0)
    has_key = [row for row in lake.quarantined() if b'"k":"a"' in (row[3] or b"")]  # type: ignore[operator]
    assert has_key
    sources = {
        name: source.model_copy(update={"key": "another.path"})
        for name, source in lake.settings.sources.items()
    }
    lake.settings = lake.settings.model_copy(update={"sources": sources})
    begin_epoch(lake.reader, lake.quick.append, lake.settings, 1)
    erase(lake)
    assert not [row for row in lake.quarantined() if b'"k":"a"' in (row[3] or b"")]  # type: ignore[operator]
    for name in (tables.SILVER, *map(tables.bronze, lake.settings.sources)):
        assert KEY not in lake.reader.select(name, ["merge_key"])["merge_key"].to_pylist()


@pytest.mark.promise("N9")
@pytest.mark.fault("hostile")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_a_refused_record_is_found_and_leaves_its_place_and_reason(
    new_lake: MakeLake, kind: str
) -> None:
    refused = b'{"k":"a","card":"4111"}'
    values: dict[str, list[bytes | None]] = {"tracking": [refused, keyed("b", 5)], "orders": []}
    lake = new_lake({0: Case(values, 100, ["tracking"] * 2)})
    lake.arrive()
    found = Forgetting(lake.reader, lake.settings, KEY)
    assert found.is_there
    assert found.partitions == {0}
    erase(lake)
    rows = lake.reader.select(tables.QUARANTINE, ["offset", "key", "value", "reason", "detail"])
    [row] = rows.to_pylist()
    assert tuple(row.values()) == (0, None, None, "no_event_time", "forgotten")
    assert not Forgetting(lake.reader, lake.settings, KEY).is_there
    of_records = [[("source", "is not null", None)]]
    names = ["source", "partition", "offset"]
    places = lake.reader.select(tables.ERASED, names, of_records).to_pylist()
    assert places == [{"source": "tracking", "partition": 0, "offset": 0}]


@pytest.mark.promise("N9")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.usefixtures("kind")
def test_a_refused_record_of_bare_avro_is_found_by_the_schema_of_its_offset(
    new_lake: MakeLake, tmp_path: Path
) -> None:
    note = {"name": "note", "type": ["null", "string"], "default": None}
    after = {**CASE_SCHEMA, "fields": [note, *CASE_SCHEMA["fields"]]}
    (tmp_path / "case.avsc").write_bytes(as_text(CASE_SCHEMA))
    read = decoded(CASE_SCHEMA, as_avro(keyed(KEY, 5)) or b"")
    refused = read | {"ts": datetime(1969, 1, 1, tzinfo=timezone.utc)}
    values: dict[str, list[bytes | None]] = {
        "tracking": [as_avro(keyed("b", 5)), encoded(after, refused)],
        "orders": [],
    }
    lake = new_lake(
        {0: Case(values, 100, ["tracking"] * 2)},
        sources__tracking__format="avro",
        sources__tracking__schema=str(tmp_path / "case.avsc"),
    )
    begin_epoch(lake.reader, lake.quick.append, lake.settings, 0)
    lake.arrive(0.5)
    rules = {"schema": as_text(after).decode(), "schema_since": {"0": 1}}
    lake.change_rules({f"sources.tracking.{name}": rule for name, rule in rules.items()})
    lake.arrive()
    assert Forgetting(lake.reader, lake.settings, KEY).is_there
    erase(lake)
    [row] = lake.reader.select(tables.QUARANTINE, ["offset", "value", "detail"]).to_pylist()
    assert tuple(row.values()) == (1, None, "forgotten")
    kept = lake.reader.select(tables.bronze("tracking"), ["offset", "value"]).to_pylist()
    assert [row["offset"] for row in kept if row["value"] is not None] == [0]
    assert not Forgetting(lake.reader, lake.settings, KEY).is_there


@pytest.mark.promise("N9")
@pytest.mark.fault("lost")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.usefixtures("kind")
def test_every_row_of_silver_goes_in_one_commit_and_messages_of_a_lost_lake_stay(
    new_lake: MakeLake,
) -> None:
    lake = new_lake({0: Case({source: [] for source in SOURCES}, 100)})
    schema = lake.engine.lake.schema(tables.SILVER)
    row = {"partition": 0, "tenant": "", "event_time": 5, "source": "orders", "topic": "orders"}
    offsets = {"offset": 7, "from_offset": None, "until_offset": None}
    statuses = ["open", "timed_out", "waiting", "late", "duplicate", "excess", "passed"]
    statuses += ["correction", "out"]
    rows = [
        {**row, **offsets, "merge_key": key, "status": status, "event_time": time}
        for status in statuses
        for key in (KEY, "b")
        for time in (5, 6)
    ]
    layout = lake.engine.lake.layout
    lake.engine.append(tables.SILVER, layout[tables.SILVER].rows_of(rows))
    version = lake.reader.version(tables.SILVER)
    erase(lake)
    assert lake.reader.version(tables.SILVER) == version + 1
    assert lake.reader.columns(tables.SILVER).names == schema.names
    left = lake.reader.select(tables.SILVER, ["merge_key", "status"]).to_pylist()
    of_key = [row["status"] for row in left if row["merge_key"] == KEY]
    assert of_key == ["out", "out"]
    assert len(left) - len(of_key) == 2 * len(statuses)
    of_merged = [[("source", "is null", None)]]
    names = ["partition", "event_time"]
    places = lake.reader.select(tables.ERASED, names, of_merged).to_pylist()
    assert [tuple(place.values()) for place in places] == [(0, 5), (0, 6)]


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_a_heartbeat_and_a_skipped_tombstone_lose_a_key_that_is_kafkas(
    new_lake: MakeLake, kind: str
) -> None:
    skipped = {f"sources__{name}__tombstone": "skip" for name in SOURCES}
    values: list[bytes | None] = [keyed("b", 0), heartbeat(10), None, keyed("c", 20), heartbeat(30)]
    lake = new_lake({0: Case(dict.fromkeys(SOURCES, values), 100)}, **skipped)
    for source in SOURCES:
        fill_bronze(
            BronzeTable(lake.owner(lake.quick), lake.settings, lake.input_of(source)),
            {(0, n): value for n, value in enumerate(values)},
        )
    lake.merge()
    before = lake.silver()
    for offset in (1, 2):
        Forgetting(lake.reader, lake.settings, f"tracking {offset}").erase(lake.owner())
    columns = ["offset", "key", "value", "headers", "heartbeat", "merge_key"]
    rows = lake.reader.select(tables.bronze("tracking"), columns).sort_by("offset").to_pylist()
    assert [row["key"] for row in rows] == [None, None, None, None, b"tracking 4"]
    assert [row["heartbeat"] for row in rows] == [False, True, False, False, True]
    assert [row["merge_key"] for row in rows] == ["b", None, None, "c", None]
    assert lake.silver() == before


# -- tenants


def without_key_of(case: Case, tenants: Sequence[str], share: float) -> Case:
    """The case as it would be had the records of the key of these tenants that have arrived been
    heartbeats of theirs."""
    arrived = case.arrivals[: round(share * len(case.arrivals))]
    values = {source: [*mine] for source, mine in case.values.items()}
    for source, mine in values.items():
        for offset in range(arrived.count(source)):
            document = orjson.loads(mine[offset] or b"")
            if document.get("k") == KEY and document["g"] in tenants:
                mine[offset] = heartbeat(document["ts"], g=document["g"])
    return replace(case, values=values)


@pytest.mark.promise("T8")
@pytest.mark.fault("kill", oracle=True)
@in_folders
@pytest.mark.parametrize("tenant", [TENANTS[0], None], ids=["one tenant's", "every tenant's"])
def test_with_tenants_all_else_is_as_if_the_keys_records_had_been_heartbeats(
    new_lake: MakeLake, kind: str, tenant: str | None
) -> None:
    gone, others = (
        (TENANTS, [])
        if tenant is None
        else ([tenant], [each for each in TENANTS if each != tenant])
    )
    inputs = tenant_cases(12)
    lake = new_lake(inputs, merge={"timeout": "100ms", "tenant": "g", "tenant_max_lag": "300ms"})
    lake.arrive(SHARE)
    lake.merge(lake.quick)
    columns = ["merge_key", "tenant", "status"]
    before = {tuple(row.values()) for row in lake.reader.select(tables.SILVER, columns).to_pylist()}
    assert {(KEY, TENANTS[0], status) for status in ("open", "timed_out", "waiting")} <= before
    of_key = Forgetting(lake.reader, lake.settings, KEY, tenant)
    if kind == QUICK:
        for crash in [("update", tables.bronze("orders")), ("merge", tables.SILVER)]:
            with pytest.raises(CrashError):
                Forgetting(lake.reader, lake.settings, KEY, tenant).erase(
                    lake.owner(dying_at(lake.engine, *crash))
                )
    of_key.erase(lake.owner())
    left = (
        Forgetting(lake.reader, lake.settings, KEY, tenant).preview()["tables"]
        if kind == QUICK
        else []
    )
    assert all(row["before"] == 0 for row in left)
    for name in (tables.SILVER, tables.LATE, *map(tables.bronze, lake.settings.sources)):
        found = lake.reader.select(name, ["merge_key", "tenant"]).to_pylist()
        tenants = {row["tenant"] for row in found if row["merge_key"] == KEY}
        assert not tenants & {*gone}
        assert tenants or not others or name == tables.LATE
    cases = {p: without_key_of(case, gone, SHARE) for p, case in inputs.items()}
    models = TenantModels(cases, (100, None, 300))
    for share in (SHARE, 1.0):
        models.arrive(share)
    lake.arrive()
    lake.merge(lake.quick)
    assert silver_of(lake.reader) == models.silver()
    assert late_of(lake.reader) == models.late()


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_of_what_was_refused_that_of_another_tenant_stays(new_lake: MakeLake, kind: str) -> None:
    """What does not say whose it is goes, too."""
    soon = [keyed("a", 0, g=tenant).replace(b'"ts":0', b'"ts":"soon"') for tenant in ("x", "y")]
    nobody: bytes = keyed("a", 5)
    lake = new_lake(
        {0: Case({"tracking": [*soon, nobody], "orders": []}, 100, ["tracking"] * 3)},
        merge={"timeout": "1s", "tenant": "g", "tenant_max_lag": "1s"},
    )
    lake.arrive()
    Forgetting(lake.reader, lake.settings, KEY, "x").erase(lake.owner())
    found = (
        lake.reader.select(tables.QUARANTINE, ["offset", "reason", "detail"])
        .sort_by("offset")
        .to_pylist()
    )
    assert [row["detail"] == "forgotten" for row in found] == [True, False, True]
    assert [row["reason"] for row in found] == ["no_event_time", "no_event_time", "no_tenant"]


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_a_tenant_where_there_are_none_is_a_clear_error(new_lake: MakeLake, kind: str) -> None:
    lake = new_lake({0: Case({source: [] for source in SOURCES}, 100)})
    with pytest.raises(ConfigurationError, match="--tenant: this lake has no tenants"):
        Forgetting(lake.reader, lake.settings, KEY, "x")


@pytest.mark.parametrize("options", [[], ["--apply"]])
def test_a_tombstone_for_the_key_of_one_tenant_is_refused_before_anything_is_done(
    tmp_path: Path, options: list[str]
) -> None:
    done = in_process("forget", KEY, "--tenant", "x", "--tombstone", *options, cwd=tmp_path)
    assert done.returncode == 2
    assert "--tombstone: it tells consumers that the key of every tenant is gone" in done.stderr
