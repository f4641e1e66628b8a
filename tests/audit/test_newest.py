"""Of the newest records in bronze it is told which fields their schemas lack, and which keys two
sources have in different partitions, whatever cut and restarts brought them there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import Case, heartbeat, keyed
from tests.support.configurations import settings_for
from tests.support.model_lakes import KAFKA_TIME_MS, ModelLake
from watersmeet.ask.status import status
from watersmeet.audit.doubts import doubts_of_newest
from watersmeet.core.dropped_fields import DroppedFields
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.repartition import murmur2
from watersmeet.lake import newest as reading
from watersmeet.lake.newest import bronze_ends, dropped_in_lake, finders
from watersmeet.settings import Settings

AWAY_S = 0.2
PARTITIONS = 4
SCHEMA = {
    "type": "object",
    "properties": {"ts": {"type": "integer"}, "k": {"type": "string"}, "type": {"type": "string"}},
}
Values = list[bytes | None]


def with_schema(folder: Path, **overrides: Any) -> Settings:
    (folder / "orders.json").write_text(json.dumps(SCHEMA))
    return settings_for(folder, sources__orders__schema="orders.json", **overrides)


def case_of(values: Mapping[str, Values]) -> Case:
    return Case({**values}, 1000, [source for source, own in values.items() for _ in own])


def bronze_of(settings: Settings, values: Mapping[int, Mapping[str, Values]]) -> ModelLake:
    """A lake whose bronze has these records, by partition and source."""
    cases = {p: case_of(of_sources) for p, of_sources in values.items()}
    lake = ModelLake(settings, cases, kept=lambda _, value: json.loads(value))
    for share in (0.3, 0.7, 1.0):
        lake.arrive(share)
    return lake


def dropped_of_orders(lake: ModelLake) -> DroppedFields:
    place = lake.reader, lake.settings
    return dropped_in_lake(*place, bronze_ends(*place), finders(*place))["orders"]


def at(key: str, n: int, **more: object) -> bytes:
    return keyed(key, KAFKA_TIME_MS + n, **more)


def fields_of(n: int) -> dict[str, object]:
    """The coupon that every third order has, and the note of one."""
    return {**({"coupon": "x"} if n % 3 == 0 else {}), **({"note": "y"} if n == 7 else {})}


@pytest.mark.promise("A18")
def test_status_names_the_fields_that_a_schema_lacks_with_their_records(tmp_path: Path) -> None:
    orders: Values = [at(f"k{n}", n, **fields_of(n)) for n in range(30)]
    orders += [heartbeat(KAFKA_TIME_MS, beat="z"), b"{", b'{"ts":1}']
    tracking: Values = [at(f"k{n}", n, anything=1) for n in range(30)]
    lake = bronze_of(with_schema(tmp_path), {0: {"tracking": tracking, "orders": orders}})
    [warning] = status(lake.reader, lake.settings, AWAY_S)["warnings"]
    assert warning["where"] == "sources.orders.schema"
    assert warning["what"] == (
        "of the last 30 records 11 have fields that the schema lacks, so that only bronze keeps "
        "them: coupon (10), note (1)"
    )


@pytest.mark.parametrize("records", [12, 30])
def test_only_the_newest_records_of_every_partition_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: int
) -> None:
    monkeypatch.setattr(reading, "RECORDS", records)
    orders: Values = [at("k", n, **{"old" if n < 20 else "new": 1}) for n in range(30)]
    values = {p: {"tracking": [], "orders": orders} for p in range(3)}
    lake = bronze_of(with_schema(tmp_path), values)
    dropped = dropped_of_orders(lake)
    assert dropped.records == dropped.counts["new"] == records


def test_large_records_are_fewer_and_one_that_is_too_large_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: Values = [at("k", n, more="x" * (100_000 if n < 25 else 10)) for n in range(30)]
    lake = bronze_of(with_schema(tmp_path), {0: {"tracking": [], "orders": orders}})
    for limit, count in ((250_000, 7), (1_500, 5), (10, 0)):
        monkeypatch.setattr(reading, "RECORDS_BYTES", limit)
        assert dropped_of_orders(lake).records == count


def java(key: str) -> int:
    return murmur2(key.encode()) % PARTITIONS


def another(key: str) -> int:
    return sum(key.encode()) % PARTITIONS


@pytest.mark.promise("A18")
@pytest.mark.parametrize("partitioner", [java, another], ids=["alike", "apart"])
def test_status_tells_keys_that_two_partitioners_keep_apart(
    tmp_path: Path, partitioner: Callable[[str], int]
) -> None:
    keys = [f"key {n}" for n in range(400)]
    values: dict[int, dict[str, Values]] = {
        p: {
            "tracking": [at(key, n) for n, key in enumerate(keys) if java(key) == p],
            "orders": [at(key, n) for n, key in enumerate(keys) if partitioner(key) == p],
        }
        for p in range(PARTITIONS)
    }
    lake = bronze_of(settings_for(tmp_path), values)
    found = status(lake.reader, lake.settings, AWAY_S).get("warnings", [])
    apart = sum(java(key) != partitioner(key) for key in keys)
    assert [warning["what"] for warning in found] == (
        [
            f"{apart} of 400 keys that tracking and orders share are in different partitions, so "
            "that their records never meet"
        ]
        if apart
        else []
    )
    assert all("partitioner" in warning["fix"] for warning in found)
    assert all("repartition" in warning["fix"] for warning in found)


@pytest.mark.parametrize("merges", [0, 1])
def test_the_ends_of_bronze_are_those_of_what_has_arrived(tmp_path: Path, merges: int) -> None:
    orders: Values = [at(f"k{n}", n) for n in range(9)]
    values = {p: {"tracking": orders[: p + 1], "orders": orders} for p in range(3)}
    values[3] = {"tracking": [], "orders": []}
    lake = ModelLake(settings_for(tmp_path), {p: case_of(each) for p, each in values.items()})
    lake.arrive(0.5)
    for _ in range(merges):
        lake.merge()
    lake.arrive()
    ends = bronze_ends(lake.reader, lake.settings)
    assert {tp: end for tp, end in ends.items() if end} == {
        tp: end for tp, end in lake.arrived.items() if end
    }


def test_of_an_empty_lake_nothing_is_said(tmp_path: Path) -> None:
    lake = bronze_of(with_schema(tmp_path), {0: {"tracking": [], "orders": []}})
    assert (
        doubts_of_newest(lake.reader, lake.settings, bronze_ends(lake.reader, lake.settings)) == []
    )
    assert doubts_of_newest(lake.reader, lake.settings, {}) == []
    gone = {TopicPartition(InputId("orders", "orders"), 0): 7}
    assert doubts_of_newest(lake.reader, lake.settings, gone) == []
