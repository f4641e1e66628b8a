"""Watersmeet's own suites: what a run makes meets them, and each promise is found broken when its
data is, and only then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.cases import keyed
from tests.support.quality import NOW_MS, QualityLake, Row, failed, outcomes, with_rows
from watersmeet.core.silver import PASSED
from watersmeet.lake import tables
from watersmeet.lake.location import Lake
from watersmeet.quality.evaluate import Outcome
from watersmeet.quality.rows import MESSAGES, Span, columns_of, rows_of
from watersmeet.quality.suites import PROMISES, SINK, Suite, checked_views, sentence_of
from watersmeet.settings import Settings

BRONZE = "bronze_tracking"
TIME = datetime(2026, 1, 1, tzinfo=timezone.utc)
MESSAGE: Row = {
    "topic": "merged",
    "partition": 0,
    "offset": 0,
    "timestamp": TIME,
    "key": "a",
    "value": "{}",
    "seq": 0,
    "id": "0/1767225600000/a",
    "event_time": TIME,
}


class Sound:
    """What a run has made of the small lake: by table the rows that a check looks at."""

    def __init__(self, folder: Path) -> None:
        lake = QualityLake(folder)
        lake.flow()
        self.suites: list[Suite] = lake.suites
        names = (BRONZE, tables.MERGED, tables.LATE)
        self.rows: dict[str, pa.Table] = {
            n: rows_of(lake.engine.reader, lake.settings, n, Span(-1, 99), NOW_MS) for n in names
        }
        self.rows[SINK] = pa.Table.from_pylist(
            [MESSAGE, {**MESSAGE, "offset": 1, "seq": 1}], schema=MESSAGES
        )

    def row(self, table: str, **where: Any) -> Row:
        """The first row of a table with these values."""
        found = (row for row in self.rows[table].to_pylist() if where.items() <= row.items())
        row: Row = next(found)
        return row


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    return Sound(tmp_path_factory.mktemp("sound"))


def test_what_a_run_makes_meets_every_promise(sound: Sound) -> None:
    for table, rows in sound.rows.items():
        assert rows.num_rows > 0
        found = outcomes(rows, sound.suites, table)
        assert failed(found) == {}, table
        assert {outcome.unexpected for outcome in found} <= {0, None}


def test_which_columns_a_suite_may_be_about_is_known_without_the_lake(tmp_path: Path) -> None:
    lake = QualityLake(tmp_path)
    lake.flow()
    for table in (BRONZE, tables.SILVER, *checked_views(lake.settings)):
        rows = rows_of(lake.engine.reader, lake.settings, table, Span(-1, 99), NOW_MS)
        assert columns_of(lake.settings, table) == rows.column_names, table


PASSED_OVER: Row = {"merge_key": None, "event_time": None, "heartbeat": False, "reason": None}


def test_records_that_are_passed_over_meet_every_promise(tmp_path: Path) -> None:
    others = [b'{"k": "x"}', keyed("x", 3_000), None, keyed("e", 3_000)]
    mine = {"where": {"field": "k", "equals": "e"}, "tombstone": "skip"}
    lake = QualityLake(
        tmp_path,
        others,
        sources__orders={"topic": "orders", "key": "k", "event_time": "ts", **mine},
    )
    lake.flow()
    rows = rows_of(lake.engine.reader, lake.settings, "bronze_orders", Span(-1, 99), NOW_MS)
    assert sum(PASSED_OVER.items() <= row.items() for row in rows.to_pylist()) == 2
    assert failed(outcomes(rows, lake.suites, "bronze_orders")) == {}


def test_tables_without_rows_meet_every_promise(sound: Sound) -> None:
    for table, rows in sound.rows.items():
        assert failed(outcomes(rows.schema.empty_table(), sound.suites, table)) == {}, table


# -- planted: the table, the promise, a row that keeps every promise, and the rows that break this
# promise and no other

Break = Callable[[Row], list[Row]]


def later(row: Row, ms: int) -> Row:
    moved = timedelta(milliseconds=ms)
    return {
        **row,
        "event_time": row["event_time"] + moved,
        "last_event_time": row["last_event_time"] + moved,
    }


def setting(**values: Any) -> Break:
    return lambda row: [{**row, **values}]


def twice(row: Row) -> list[Row]:
    return [row, row]


READ, REFUSED = {"reason": None, "heartbeat": False}, {"reason": "undecodable"}
OPEN, VALID = {"status": "open"}, {"status": "timed_out"}
MS = timedelta(milliseconds=1)

PLANTED: list[tuple[str, str, Mapping[str, Any], Break]] = [
    *[
        (BRONZE, f"{name} is never null", READ, setting(**{name: None}))
        for name in ("topic", "partition", "offset")
    ],
    (BRONZE, "kafka_timestamp is never null", READ, setting(kafka_timestamp=None)),
    (BRONZE, "heartbeat is never null", READ, setting(heartbeat=None)),
    (BRONZE, "partition and offset together are unique", READ, twice),
    (
        BRONZE,
        "a reason is too_large, undecodable, no_key, no_event_time or event_time_in_future",
        REFUSED,
        setting(reason="dull"),
    ),
    (BRONZE, "a record that is refused has a detail", REFUSED, setting(detail=None)),
    (BRONZE, "a record that was read has an event_time", READ, setting(event_time=None)),
    (BRONZE, "a record that is refused has no event_time", REFUSED, setting(event_time=TIME)),
    (
        BRONZE,
        "a record that was read and is no heartbeat has a merge_key",
        READ,
        setting(merge_key=None),
    ),
    (BRONZE, "a record that is refused has no merge_key", REFUSED, setting(merge_key="a")),
    (BRONZE, "merge_key is never empty", READ, setting(merge_key="")),
    *[
        (tables.MERGED, f"{name} is never null", VALID, setting(**{name: None}))
        for name in (
            "partition",
            "merge_key",
            "status",
            "event_time",
            "last_event_time",
            "batch",
            "tracking",
        )
    ],
    (tables.MERGED, "merge_key is never empty", VALID, setting(merge_key="")),
    (tables.MERGED, "status is open or timed_out", VALID, setting(status="lost")),
    (
        tables.MERGED,
        "event_time is never after last_event_time",
        VALID,
        lambda row: [{**row, "last_event_time": row["event_time"] - MS}],
    ),
    (
        tables.MERGED,
        "partition, generation, merge_key and event_time together are unique",
        VALID,
        twice,
    ),
    (
        tables.MERGED,
        "a key has at most one open record in a partition",
        OPEN,
        lambda row: [row, later(row, 1)],
    ),
    (tables.MERGED, "valid is null while a record is open", OPEN, setting(valid=True)),
    (tables.MERGED, "valid is known once a record has timed out", VALID, setting(valid=None)),
    (
        tables.MERGED,
        "invalid_reason is null unless valid is false",
        VALID,
        lambda row: [
            {**row, "invalid_reason": "reset"},
            {**later(row, 1), "invalid_reason": "predicate"},
        ],
    ),
    (
        tables.MERGED,
        "invalid_reason is given where valid is false",
        VALID,
        setting(valid=False, invalid_reason=None),
    ),
    (
        tables.MERGED,
        "invalid_reason is predicate, too_large or reset",
        VALID,
        setting(valid=False, invalid_reason="because"),
    ),
    *[
        (tables.LATE, f"{name} is never null", {}, setting(**{name: None}))
        for name in (
            "source",
            "topic",
            "partition",
            "offset",
            "merge_key",
            "event_time",
            "position",
            "batch",
        )
    ],
    (tables.LATE, "source, partition, offset and generation together are unique", {}, twice),
    (
        tables.LATE,
        "event_time is always before position",
        {},
        lambda row: [{**row, "event_time": row["position"]}],
    ),
    *[
        (SINK, f"{name} is never null", {}, setting(**{name: None}))
        for name in ("partition", "offset", "timestamp", "key", "seq", "id", "event_time")
    ],
    (SINK, "seq is never below 0", {}, setting(seq=-1)),
    (SINK, "key is never empty", {}, setting(key="")),
    (
        SINK,
        "event_time is never after timestamp",
        {},
        lambda row: [{**row, "event_time": row["timestamp"] + MS}],
    ),
    (SINK, "partition and seq together are unique", {}, twice),
]


def own(row: Row, number: int) -> Row:
    """The row with a place of its own, so that it is no other's repeat."""
    places = {"offset": 1_000 + number, "seq": 1_000 + number, "merge_key": f"key{number}"}
    return {**row, **{name: value for name, value in places.items() if row.get(name) is not None}}


@pytest.fixture(scope="module")
def broken(sound: Sound) -> dict[str, pa.Table]:
    """Tables in which each promise is broken by rows of its own."""
    rows = {table: found.to_pylist() for table, found in sound.rows.items()}
    for number, (table, _, like, breaking) in enumerate(PLANTED):
        rows[table] += breaking(own(sound.row(table, **like), number))
    return {table: with_rows(sound.rows[table], found) for table, found in rows.items()}


@pytest.fixture(scope="module")
def found(sound: Sound, broken: dict[str, pa.Table]) -> dict[str, list[Outcome]]:
    return {table: outcomes(rows, sound.suites, table) for table, rows in broken.items()}


@pytest.mark.promise("A6")
@pytest.mark.fault("damage")
@pytest.mark.parametrize(
    ("table", "sentence"), dict.fromkeys((table, sentence) for table, sentence, _, _ in PLANTED)
)
def test_a_broken_promise_is_found_with_its_rows_and_no_others(
    sound: Sound, found: dict[str, list[Outcome]], table: str, sentence: str
) -> None:
    planted = [
        (like, breaking)
        for its, name, like, breaking in PLANTED
        if (its, name) == (table, sentence)
    ]
    rows = sum(len(breaking(sound.row(table, **like))) for like, breaking in planted)
    assert failed(found[table])[sentence] == rows


def test_every_promise_on_values_can_be_broken(found: dict[str, list[Outcome]]) -> None:
    never_broken = {o.expectation for of_table in found.values() for o in of_table if o.success}
    assert {sentence for sentence in never_broken if not sentence.startswith("the column ")} == {
        "orders is never null"
    }


# -- with tenants: rows of the sound lake as they are where every one of them has a tenant

TENANTS = {"timeout": "100ms", "tenant": "org", "tenant_max_lag": "1s"}
SECOND = timedelta(seconds=1)

PLANTED_WITH_TENANTS: list[tuple[str, str, Mapping[str, Any], Break]] = [
    (
        BRONZE,
        "a reason is too_large, undecodable, no_key, no_tenant, no_event_time or "
        "event_time_in_future",
        REFUSED,
        setting(reason="dull"),
    ),
    (BRONZE, "a record with a merge_key has a tenant", READ, setting(tenant=None)),
    (BRONZE, "a record that is refused has no tenant", REFUSED, setting(tenant="x")),
    (BRONZE, "tenant is never empty", READ, setting(tenant="")),
    (tables.MERGED, "tenant is never null", VALID, setting(tenant=None)),
    (tables.MERGED, "tenant is never empty", VALID, setting(tenant="")),
    (
        tables.MERGED,
        "partition, generation, tenant, merge_key and event_time of merge records together "
        "are unique, unless a reset closed them",
        VALID,
        twice,
    ),
    (
        tables.MERGED,
        "a key of a tenant has at most one open record in a partition",
        OPEN,
        lambda row: [row, later(row, 1)],
    ),
    *[
        (tables.WAITING, f"{name} is never null", {}, setting(**{name: None}))
        for name in PASSED.names
        if name != "generation"
    ],
    (tables.WAITING, "tenant is never empty", {}, setting(tenant="")),
    (
        tables.WAITING,
        "source, topic, partition, offset and generation together are unique",
        {},
        twice,
    ),
    (
        tables.MERGED,
        "due is known of a merge record, unless a reset closed it",
        OPEN,
        setting(due=None),
    ),
    (
        tables.MERGED,
        "closed_at is known once a record has timed out, unless a reset closed it",
        VALID,
        setting(closed_at=None),
    ),
    (
        tables.MERGED,
        "closed_at is null until a record has timed out",
        OPEN,
        setting(closed_at=TIME),
    ),
    (tables.LATE, "tenant is never null", {}, setting(tenant=None)),
]


def of_tenants(table: str, row: Row) -> list[Row]:
    """A row of a tenant; an open record also of another tenant."""
    if table == BRONZE:
        return [{**row, "tenant": None if row["merge_key"] is None else "x"}]
    if table == tables.LATE:
        return [{**row, "tenant": "x"}]
    due = row["last_event_time"] + SECOND
    found = {
        **row,
        "tenant": "x",
        "due": due,
        "closed_at": due + SECOND if row["status"] == "timed_out" else None,
    }
    return [found, {**found, "tenant": "y"}] if row["status"] == "open" else [found]


def waiting(settings: Settings) -> pa.Table:
    """A record that waits for its tenant's clock."""
    row = {"source": "tracking", "topic": "tracking", "partition": 0, "offset": 1, "tenant": "x"}
    row |= {"merge_key": "a", "event_time": TIME, "position": TIME + SECOND, "batch": 0}
    schema = Lake(settings).schema(tables.WAITING)
    return pa.Table.from_pylist([{**row, "generation": 0}], schema=schema)


@pytest.fixture(scope="module")
def sound_with_tenants(sound: Sound, tmp_path_factory: pytest.TempPathFactory) -> Sound:
    lake = QualityLake(tmp_path_factory.mktemp("tenants"), merge=TENANTS)
    found = copy(sound)
    found.suites, found.rows = lake.suites, {}
    for table, rows in sound.rows.items():
        if table != SINK:
            made = [each for row in rows.to_pylist() for each in of_tenants(table, row)]
            found.rows[table] = with_rows(rows, made)
    found.rows[tables.WAITING] = waiting(lake.settings)
    return found


def test_with_tenants_keys_and_waiting_records_meet_every_promise(
    sound_with_tenants: Sound,
) -> None:
    for table, rows in sound_with_tenants.rows.items():
        assert failed(outcomes(rows, sound_with_tenants.suites, table)) == {}, table


def merged_again(table: str, row: Row) -> list[Row]:
    """The row as a jump back leaves it, and as the next generation makes it again."""
    again = {**row, "generation": row["generation"] + 1}
    if table == tables.LATE or row["status"] == "timed_out":
        return [row, again]
    closed = {"status": "timed_out", "valid": False, "invalid_reason": "reset"}
    return [{**row, **closed, "due": None, "closed_at": None}, again]


@pytest.mark.parametrize("lake", ["sound", "sound_with_tenants"])
def test_what_a_jump_back_merges_again_meets_every_promise(
    request: pytest.FixtureRequest, lake: str
) -> None:
    before: Sound = request.getfixturevalue(lake)
    for table in (tables.MERGED, tables.LATE):
        rows = before.rows[table]
        again = [each for row in rows.to_pylist() for each in merged_again(table, row)]
        assert failed(outcomes(with_rows(rows, again), before.suites, table)) == {}, table


@pytest.mark.long
def test_with_tenants_each_promise_is_found_broken_and_no_other(sound_with_tenants: Sound) -> None:
    for table, sentence, like, breaking in PLANTED_WITH_TENANTS:
        rows = sound_with_tenants.rows[table]
        broken = breaking(own(sound_with_tenants.row(table, **like), 0))
        found = failed(
            outcomes(
                with_rows(rows, [*rows.to_pylist(), *broken]), sound_with_tenants.suites, table
            )
        )
        assert found == {sentence: len(broken)}


def test_a_lake_without_tenants_is_promised_nothing_of_them(
    sound: Sound, sound_with_tenants: Sound
) -> None:
    said, with_tenants = (
        {
            (suite.table, sentence_of(document))
            for suite in each.suites
            for document in suite.documents
        }
        for each in (sound, sound_with_tenants)
    )
    assert not [
        sentence for table, sentence in said if "tenant" in sentence or table == tables.WAITING
    ]
    planted = {(table, sentence) for table, sentence, _, _ in PLANTED_WITH_TENANTS}
    exist = {(tables.MERGED, "the column tenant exists")}
    assert {each for each in with_tenants - said if each[0] != "bronze_orders"} == planted | exist


def test_a_missing_column_fails_what_is_said_of_it_and_no_more(sound: Sound) -> None:
    rows = sound.rows[tables.MERGED].drop_columns(["batch", "orders"])
    wrong = failed(outcomes(rows, sound.suites, tables.MERGED))
    assert wrong == dict.fromkeys(
        [
            "the column batch exists",
            "batch is never null",
            "the column orders exists",
            "orders is never null",
        ]
    )


def test_every_promise_has_a_sentence_of_its_own(sound: Sound) -> None:
    own_suites = [
        suite for suite in sound.suites if suite.name in PROMISES and suite.table != "bronze_orders"
    ]
    assert [suite.name for suite in own_suites] == [
        name for name in PROMISES if name != "waiting_promises"
    ]
    for suite in own_suites:
        sentences = [sentence_of(document) for document in suite.documents]
        assert len(set(sentences)) == len(sentences)
        assert all("description" in document for document in suite.documents)


def test_repeats_are_allowed_where_the_delivery_allows_them(tmp_path: Path) -> None:
    suites = QualityLake(tmp_path, publish__delivery="at_least_once").suites
    rows = pa.Table.from_pylist([MESSAGE, {**MESSAGE, "offset": 1}], schema=MESSAGES)
    assert failed(outcomes(rows, suites, SINK)) == {}
