"""What looks wrong is told by `status` from the lake, and by `validate` from the last records in
Kafka; it stops nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.cases import Case, heartbeat, keyed
from tests.support.commands import here
from tests.support.configurations import settings_for
from tests.support.model_lakes import KAFKA_TIME_MS, ModelLake
from tests.support.rivers import TIMEOUT_MS, River
from tests.support.topics import produce
from watersmeet.ask.status import status
from watersmeet.audit.doubts import FINISHED, local_times_twice
from watersmeet.audit.show import status_view
from watersmeet.lake import tables

AWAY_S = 0.2
WIRE = "\x00\x00\x00\x00\x07"
Values = Sequence[bytes | None]


def lake_of(folder: Path, tracking: Values, orders: Values, **overrides: Any) -> ModelLake:
    """A lake that has merged these records, and whatever timed out by a heartbeat behind them."""
    end = heartbeat(KAFKA_TIME_MS + 10**7)
    values = {"tracking": [*tracking, end], "orders": [*orders, end]}
    arrivals = [source for source, mine in values.items() for _ in mine]
    lake = ModelLake(settings_for(folder, **overrides), {0: Case(values, 1000, arrivals)})
    lake.arrive()
    lake.merge()
    return lake


def at(key: str, n: int) -> bytes:
    return keyed(key, KAFKA_TIME_MS + n)


def warnings(lake: ModelLake) -> list[dict[str, str]]:
    found: list[dict[str, str]] = status(lake.reader, lake.settings, AWAY_S).get("warnings", [])
    return found


def test_of_what_meets_and_of_few_records_nothing_is_said(tmp_path: Path) -> None:
    pairs = [at(f"k{n}", n) for n in range(20)]
    assert warnings(lake_of(tmp_path / "pairs", pairs, pairs[:1])) == []
    few = [at(f"o{n}", n) for n in range(4)]
    assert warnings(lake_of(tmp_path / "few", pairs[:5], few)) == []


@pytest.mark.promise("A18")
def test_status_says_that_nothing_meets_of_how_many_and_what_differs(tmp_path: Path) -> None:
    tracking, orders = ([at(f"{head}k{n}", n) for n in range(20)] for head in ("", WIRE + "\x04"))
    lake = lake_of(tmp_path, tracking, orders)
    [found] = warnings(lake)
    assert found["where"] == "silver"
    assert found["what"].startswith(
        "of the last 40 finished merge records none has records of two sources (tracking 20, "
        "orders 20): what differs is a "
        "schema id at the beginning of the key"
    )
    console = Console(width=400, record=True)
    console.print(status_view(status(lake.reader, lake.settings, AWAY_S)))
    assert "warning silver: of the last 40 finished merge records none" in console.export_text()


@pytest.mark.promise("A18")
def test_of_the_same_key_it_is_said_how_far_its_records_lie_apart(tmp_path: Path) -> None:
    tracking, orders = ([at(f"k{n}", n + ms) for n in range(10)] for ms in (0, 7_200_000))
    [found] = warnings(lake_of(tmp_path, tracking, orders))
    assert "the nearest records of one key" in found["what"]
    assert "lie 2h apart, and the merge waits for 100ms" in found["what"].replace(
        "1h 59m 59s", "2h"
    )


@pytest.mark.parametrize(
    ("zone", "timeout", "twice"),
    [
        ("Europe/Berlin", "59m", "1h"),
        ("Europe/Berlin", "1h", None),
        ("Australia/Lord_Howe", "29m", "30m"),
        ("Australia/Lord_Howe", "30m", None),
        ("Asia/Kolkata", "1s", None),
        (None, "1s", None),
    ],
)
def test_validate_says_that_the_second_of_two_equal_hours_is_late(
    tmp_path: Path, zone: str | None, timeout: str, twice: str | None
) -> None:
    time = {"field": "ts", "zone": zone} if zone else "ts"
    settings = settings_for(tmp_path, merge__timeout=timeout, sources__orders__event_time=time)
    found = list(local_times_twice(settings))
    assert [each.where for each in found] == ["sources.orders.event_time.zone"] * bool(twice)
    for each in found:
        assert f"when clocks go back in {zone}, {twice} of local time is there twice" in each.what
        assert each.fix.startswith(f"give the merge {twice} or more")


@pytest.mark.long
def test_only_the_last_records_count_so_that_a_mistake_of_today_is_seen(tmp_path: Path) -> None:
    pairs = [at(f"k{n}", n) for n in range(20)]
    lake = lake_of(tmp_path, pairs, pairs)
    row = lake.reader.select(tables.MERGED, ["partition"]).num_rows
    assert (row, warnings(lake)) == (20, [])
    alone = {
        "status": "timed_out",
        "valid": True,
        "last_event_time": KAFKA_TIME_MS,
        "batch": 9,
        "partition": 0,
    }
    part = {"offset": 0, "event_time": KAFKA_TIME_MS, "value": "{}"}
    lake.write(
        tables.SILVER,
        [
            {
                **alone,
                "merge_key": f"n{n}",
                "event_time": KAFKA_TIME_MS + n,
                "tracking": [part] * (n % 2),
                "orders": [part] * (1 - n % 2),
            }
            for n in range(12 * FINISHED)
        ],
    )
    [found] = warnings(lake)
    assert "none has records of two sources" in found["what"]
    looked_at = int(found["what"].split(" finished")[0].rpartition(" ")[2].replace(",", ""))
    assert FINISHED / 2 < looked_at < 2 * FINISHED, "of many, about as many as are wanted"


@pytest.mark.promise("A18")
def test_status_says_that_event_times_are_of_another_unit_and_which_would_fit(
    tmp_path: Path,
) -> None:
    seconds = [keyed("k", KAFKA_TIME_MS // 1000 + n) for n in range(20)]
    lake = lake_of(tmp_path, seconds, [at("k", n) for n in range(20)])
    [found] = [each for each in warnings(lake) if "event_time" in each["where"]]
    assert found["where"] == "sources.tracking.event_time"
    assert (
        "the event time 1970-01-21 10:53:45.600Z where Kafka has 2026-01-01 00:00:00.000Z"
        in found["what"]
    )
    assert "have event times decades from Kafka's own timestamps" in found["what"]
    assert found["fix"].startswith("`unit: s` would fit: `event_time: {field: ts, unit: s}`")


# -- a sample of Kafka


@pytest.fixture
def river(kafka: str, tmp_path: Path, request: pytest.FixtureRequest) -> River:
    return River.make(
        kafka,
        tmp_path,
        f"doubts-{'-'.join(request.node.name.split('_')[1:6]).replace('[', '-')}",
        partitions=2,
    )


def validated(river: River) -> list[dict[str, str]]:
    found = json.loads(here(river, "validate", "--json"))
    assert found["ok"] is True
    told: list[dict[str, str]] = found.get("warnings", [])
    return told


def send(river: River, keys: Callable[[str, int], str], time: Callable[[str, int], int]) -> None:
    for source in ("tracking", "orders"):
        values = [keyed(keys(source, n), time(source, n)) for n in range(30)]
        produce(
            river.kafka, river.topic(source), [(n % 2, value) for n, value in enumerate(values)]
        )


@pytest.mark.promise("A18")
def test_validate_says_before_anything_runs_that_no_key_meets_and_what_differs(
    river: River,
) -> None:
    send(
        river,
        lambda source, n: f"{'K' if source == 'orders' else 'k'}{n}",
        lambda _, n: KAFKA_TIME_MS + n,
    )
    [found] = validated(river)
    assert found["where"] in ("sources.orders.key", "sources.tracking.key")
    assert "none of the 30 keys in the last records of" in found["what"]
    assert "what differs is capital letters" in found["what"]
    assert "warning sources." in here(river, "validate").replace("\n", " ")


@pytest.mark.promise("A18")
def test_validate_names_the_unit_also_where_every_record_is_refused(river: River) -> None:
    send(
        river,
        lambda _, n: f"k{n}",
        lambda source, n: (KAFKA_TIME_MS + n) * (1000 if source == "orders" else 1),
    )
    found = {each["where"]: each for each in validated(river)}
    assert list(found) == ["sources.orders.event_time"]
    assert "no event time where Kafka has" in found["sources.orders.event_time"]["what"]
    assert found["sources.orders.event_time"]["fix"].startswith("`unit: us` would fit")


@pytest.mark.promise("A18")
def test_validate_names_the_fields_that_a_schema_lacks(river: River) -> None:
    fields = {"ts": {"type": "integer"}, "k": {"type": "string"}, "type": {"type": "string"}}
    (river.folder / "orders.json").write_text(json.dumps({"type": "object", "properties": fields}))
    river.config["sources"]["orders"]["schema"] = "orders.json"
    river.write()
    for source in ("tracking", "orders"):
        records = [(n % 2, keyed(f"k{n}", KAFKA_TIME_MS, n=n, secret="s3cret")) for n in range(9)]
        produce(river.kafka, river.topic(source), [*records, (0, heartbeat(KAFKA_TIME_MS, x=1))])
    [found] = validated(river)
    assert found["where"] == "sources.orders.schema"
    assert found["what"] == (
        "of the last 9 records 9 have fields that the schema lacks, so that only bronze keeps "
        "them: n (9), secret (9)"
    )
    assert "s3cret" not in here(river, "validate", "--json")
    for source in ("tracking", "orders"):  # keys that never meet do not hide it
        records = [
            (int((n % 2 == 0) is (source == "orders")), keyed(f"new{n}", KAFKA_TIME_MS, n=n))
            for n in range(200)
        ]
        produce(river.kafka, river.topic(source), records)
    both = json.loads(here(river, "validate", "--json", exit_code=2))
    assert "so that their records never meet" in both["problems"][0]["what"]
    assert [each["where"] for each in both["warnings"]] == ["sources.orders.schema"]
    assert "warning sources.orders.schema: of the last" in here(river, "validate", exit_code=2)


@pytest.mark.long
def test_where_the_lake_says_that_records_meet_no_sample_says_otherwise(river: River) -> None:
    send(river, lambda _, n: f"k{n}", lambda _, n: KAFKA_TIME_MS + n)
    assert validated(river) == []
    for source in ("tracking", "orders"):
        beat = heartbeat(KAFKA_TIME_MS + 10 * TIMEOUT_MS)
        produce(river.kafka, river.topic(source), [(p, beat) for p in (0, 1)])
    river.finish()
    send(river, lambda source, n: f"{source} {n}", lambda _, n: KAFKA_TIME_MS + 20 * TIMEOUT_MS + n)
    send(river, lambda source, n: f"{source} {n}", lambda _, n: KAFKA_TIME_MS + 20 * TIMEOUT_MS + n)
    for source in ("tracking", "orders"):
        values = [keyed(f"{source} {n}", KAFKA_TIME_MS + 20 * TIMEOUT_MS + n) for n in range(400)]
        produce(
            river.kafka, river.topic(source), [(n % 2, value) for n, value in enumerate(values)]
        )
    assert validated(river) == []
