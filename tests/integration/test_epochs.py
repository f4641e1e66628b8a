"""Rules that change on a living lake: whatever happens, the tables are what the epochs' rules make
of bronze."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.support.cases import SOURCES, keyed
from tests.support.commands import here
from tests.support.effort import first_then_nightly
from tests.support.fault_points import IN_EVOLVE
from tests.support.rivers import EMBEDDED, FOLDER, Losses, River, until
from tests.support.topics import consume, published
from watersmeet.core.sequence import CLOSED_AT
from watersmeet.engine.choice import open_engine
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.monitoring.observability import Reporter
from watersmeet.operations import evolve as evolving
from watersmeet.run import LAYERS, Run

pytestmark = [pytest.mark.long, pytest.mark.promise("C6"), pytest.mark.fault("rules")]

POINTS = ("silver.merge", "silver.done", "gold.publish", "publisher.committed", "bronze.done")
FIRST: dict[str, Any] = {
    "ts": {"type": "integer"},
    "k": {"type": "string"},
    "n": {"type": "integer"},
    "type": {"type": "string"},
}


def with_schema(river: River, fields: dict[str, Any]) -> None:
    """Gives the orders a schema with these fields, all of them optional."""
    (river.folder / "orders.json").write_text(json.dumps({"type": "object", "properties": fields}))
    river.config["sources"]["orders"]["schema"] = "orders.json"
    river.write()


def evolve(river: River, *, apply: bool = True, exit_code: int = 0) -> dict[str, Any]:
    command = ["evolve", *(["--apply"] if apply else []), "--json"]
    found: dict[str, Any] = json.loads(here(river, *command, exit_code=exit_code))
    return found


def is_sound(river: River, name: str) -> None:
    """The promises hold, and a rebuild gives the same lake."""
    river.by_embedded()
    assert river.broken_promises() == []
    into = str(river.folder / f"rebuilt-{name}")
    here(river, "rebuild", "--into", into)
    assert json.loads(here(river, "verify", "--against", into, "--json")) == {
        "ok": True,
        "problems": [],
    }


@pytest.mark.fault("kill", "rules", oracle=True)
@pytest.mark.nightly
def test_timeouts_change_up_and_down_with_kills(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "epochs", lake=EMBEDDED)
    first, batches = river.config["merge"]["timeout"], []
    for number, timeout in enumerate(["400ms", "30ms", "30ms", "1s", first]):
        river.flow()
        river.finish()
        river.config["merge"]["timeout"] = timeout
        river.write()
        river.flow()
        if timeout != "30ms" or number == 1:
            refused = river.run("--once")
            assert refused.wait() == 2
            assert (
                "merge.timeout: the lake has other rules than this configuration" in refused.said()
            )
            batches.append(evolve(river)["from_batch"])
        river.kill_at(POINTS[number], "--once")
        river.finish()
    assert batches == sorted(set(batches))
    is_sound(river, "in-the-end")


@pytest.mark.fault("kill", "rules", oracle=True)
@pytest.mark.nightly
def test_a_timeout_becomes_a_window_by_gap_with_kills(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "windows", lake=EMBEDDED)
    river.flow()
    river.finish()
    river.config["merge"] = {"window": {"gap": "100ms", "max": "1s"}}
    river.write()
    river.flow()
    assert {change["field"] for change in evolve(river)["changes"]} == {
        "merge.timeout",
        "merge.window",
    }
    river.kill_at(POINTS[0], "--once")
    river.flow()
    river.kill_at(POINTS[3], "--once")
    river.finish()
    headers = [
        dict(message.headers()) for message in consume(river.kafka, river.sink, river.partitions)
    ]
    assert 0 < sum(CLOSED_AT in each for each in headers) < len(headers)
    is_sound(river, "with a window")


@pytest.mark.promise("C5")
def test_a_change_is_shown_before_it_is_made(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "shown", lake=EMBEDDED)
    river.flow()
    river.finish()
    assert evolve(river, apply=False)["changes"] == []
    river.config["merge"]["timeout"] = "5m"
    river.config["publish"]["max_bytes"] = 1000
    river.write()
    found = evolve(river, apply=False)
    changed = {each["field"]: each["after"] for each in found["changes"]}
    assert changed == {"merge.timeout": 300_000, "publish.max_bytes": 1000}
    assert (found["epoch"], found["applied"], found["problems"]) == (1, False, [])
    assert river.run("--once").wait() == 2
    assert json.loads(here(river, "evolve", "--apply", "--json"))["applied"]
    assert evolve(river)["changes"] == []


@pytest.mark.nightly
@pytest.mark.parametrize("begins_with_tenants", [False, True])
def test_whether_a_lake_has_tenants_is_no_change_that_can_be_made(
    kafka: str, tmp_path: Path, *, begins_with_tenants: bool
) -> None:
    river = River.make(kafka, tmp_path, f"tenants-{begins_with_tenants}", lake=EMBEDDED)
    without = river.config["merge"]
    with_tenants = {**without, "tenant": "k", "tenant_max_lag": "1s"}

    def configure(merge: dict[str, Any]) -> None:
        river.config["merge"] = merge
        river.write()

    configure(with_tenants if begins_with_tenants else without)
    river.flow()
    river.finish("bronze")
    for other in (
        without if begins_with_tenants else with_tenants,
        {**with_tenants, "tenant": "type"},
    ):
        configure(other)
        for command in ("run --once", "evolve", "evolve --apply", "validate --json", "status"):
            said = here(river, *command.split(), exit_code=2)
            for part in (
                "sources.tracking.tenant",
                "the lake was begun with",
                "set it back, or begin a new lake",
            ):
                assert part in said, command
    configure(with_tenants if begins_with_tenants else without)
    assert evolve(river, apply=False)["changes"] == []
    if begins_with_tenants:
        configure({**with_tenants, "tenant_max_lag": "0s"})
        assert "merge.tenant_max_lag: the lake has other rules" in here(
            river, "run", "bronze", "--once", exit_code=2
        )
        assert "merge.tenant_max_lag 1s 0" in " ".join(here(river, "evolve").split())
        expected = [{"field": "merge.tenant_max_lag", "before": 1000, "after": 0}]
        assert evolve(river, apply=False)["changes"] == evolve(river)["changes"] == expected
        assert evolve(river)["changes"] == []


@pytest.mark.promise("C8")
@pytest.mark.timeout(900)
# (That Spark adds the columns, and reads each value by its own epoch, is in test_avro_epochs.py,
# too.)
@pytest.mark.parametrize("lake", first_then_nightly([EMBEDDED, FOLDER]))
def test_a_schema_gains_and_drops_fields(
    kafka: str, tmp_path: Path, lake: str, on_spark: Callable[[River], River]
) -> None:
    river = on_spark(River.make(kafka, tmp_path, f"fields-{lake}", lake=lake))
    fewer = {name: kind for name, kind in FIRST.items() if name != "n"}
    with_schema(river, fewer)
    river.flow()
    river.finish()
    before = published(river.kafka, river.sink, river.partitions)
    with_schema(
        river,
        {
            **FIRST,
            "coupon": {"type": "string"},
            "lines": {"type": "array", "items": {"type": "integer"}},
        },
    )
    [n, *others] = evolve(river, apply=False)["fields"]
    assert (n["source"], n["field"], n["taken_up"]) == ("orders", "n", True)
    assert 0 < n["records"] == n["of"]
    assert [(row["field"], row["records"]) for row in others] == [("coupon", 0), ("lines", 0)]
    assert "field n: kept from then on; " in here(river, "evolve").replace("\n", " ")
    river.flow()
    evolve(river)
    river.flow()
    river.finish()
    after = published(river.kafka, river.sink, river.partitions)
    assert set(before) <= set(after)
    assert any(b"coupon" in (message.value or b"") for message in after)
    with_schema(river, fewer)
    evolve(river)
    river.flow()
    river.finish()
    assert json.loads(here(river, "validate", "--json")) == {"ok": True, "problems": []}
    warnings = json.loads(here(river, "status", "--json"))["warnings"]
    [what] = [each["what"] for each in warnings if each["where"] == "sources.orders.schema"]
    assert "have fields that the schema lacks" in what
    assert " n (" in what
    silver = river.reader.columns("silver").field("orders").type.value_type.field("value").type
    assert [field.name for field in silver] == [*fewer, "n", "coupon", "lines"]
    is_sound(river, "fields")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({**FIRST, "n": {"type": "string"}}, "$.n has another type"),
        ({**FIRST, "n": {"type": "integer", "minimum": 3}}, "$.n: `minimum` differs"),
    ],
)
def test_a_schema_that_does_not_fit_the_one_before_is_refused_with_its_path(
    kafka: str, tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    river = River.make(kafka, tmp_path, f"unfit-{fields['n']['type']}", lake=EMBEDDED)
    with_schema(river, FIRST)
    river.flow()
    river.finish()
    with_schema(river, fields)
    found = evolve(river, apply=False, exit_code=2)
    assert [(each["where"], each["what"]) for each in found["problems"]] == [
        ("sources.orders.schema", said)
    ]
    with_schema(river, FIRST)
    river.finish()


def test_what_never_changes_is_no_change_of_rules_and_is_refused(
    kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "other-name", lake=EMBEDDED)
    river.flow()
    river.finish()
    name = river.config["name"]
    river.config["name"] = "another"
    river.write()
    for apply in (False, True):
        assert name in here(river, "evolve", *(["--apply"] if apply else []), exit_code=2)
    river.config["name"] = name
    river.config["merge"]["timeout"] = "7m"
    river.write()
    assert evolve(river)["applied"]


def _inner(name: str) -> dict[str, Any]:
    inner = {"type": "object", "properties": {name: {"type": "integer"}}}
    return {"type": "array", "items": inner}


@pytest.mark.nightly
@pytest.mark.parametrize("lake", first_then_nightly([EMBEDDED, FOLDER]))
def test_a_field_differs_from_those_of_all_epochs_in_more_than_case(
    kafka: str,
    tmp_path: Path,
    lake: str,
    on_spark: Callable[[River], River],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a lake that has such an epoch all the same runs again once it has evolved back."""
    river = on_spark(River.make(kafka, tmp_path, f"case-{lake}", lake=lake))
    first = {**FIRST, "lines": _inner("sku")}
    with_schema(river, first)
    river.flow()
    river.finish()
    later = {name: kind for name, kind in first.items() if name != "n"}
    with_schema(river, later)
    evolve(river)
    river.finish()
    said = (
        "field `{}` differs from `{}`, which the lake has had, only in case, which columns do not"
    )
    wrong = {**later, "lines": _inner("Sku"), "N": {"type": "integer"}}
    expected = [said.format("lines[].Sku", "sku"), said.format("N", "n")]
    with_schema(river, wrong)
    found = evolve(river, apply=False, exit_code=2)
    assert [each["what"] for each in found["problems"]] == expected
    with monkeypatch.context() as earlier_version:
        earlier_version.setattr(evolving, "check_schemas", lambda _: [])
        evolve(river)
    problems = json.loads(here(river, "validate", "--json", exit_code=2))["problems"]
    assert [each["what"] for each in problems] == expected
    with pytest.raises(ConfigurationError, match=re.escape(expected[0])):
        Run(river.settings, LAYERS, Reporter()).once()
    with_schema(river, later)
    evolve(river)
    river.flow()
    river.finish()
    is_sound(river, "case")


def test_a_run_that_goes_on_ends_when_the_rules_change(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "goes-on", lake=EMBEDDED)
    river.flow()
    run = river.run()
    until(lambda: "silver: batch 0" in run.said(), "the first batch")
    river.config["merge"]["timeout"] = "5m"
    river.write()
    assert evolve(river)["applied"]
    assert run.wait() == 1
    river.flow()
    river.finish()
    is_sound(river, "goes-on")


@pytest.mark.fault("kill")
def test_a_crash_in_the_midst_of_a_change_leaves_the_old_rules(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "crash", lake=EMBEDDED)
    river.flow()
    river.finish()
    timeout = river.config["merge"]["timeout"]
    river.config["merge"]["timeout"] = "5m"
    river.write()
    crashed = river.run("--apply", command="evolve", point=IN_EVOLVE[0])
    crashed.await_held()
    crashed.kill()
    assert evolve(river, apply=False)["epoch"] == 1
    river.config["merge"]["timeout"] = timeout
    river.write()
    river.flow()
    river.finish()
    assert river.losses() == Losses()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_predicate_changes_and_every_row_keeps_the_one_that_judged_it_also_in_a_window_by_gap(
    kafka: str, tmp_path: Path, on_spark: Callable[[River], River]
) -> None:
    river = on_spark(River.make(kafka, tmp_path, "valid", lake=FOLDER))
    for number, valid in enumerate(
        ["size(orders) > 0", "size(tracking) > 1", "size(orders) > 0 AND size(tracking) > 0"]
    ):
        river.config["publish"]["valid"] = valid
        if number == 2:
            river.config["merge"] = {"window": {"gap": "100ms", "max": "1s"}}
        river.write()
        river.flow()
        if number:
            assert evolve(river)["epoch"] == number
        river.finish()
    into = str(tmp_path / "again")
    for command in (
        ["verify", "--full"],
        ["rebuild", "--into", into],
        ["verify", "--against", into],
    ):
        here(river, *command)


@pytest.mark.nightly
def test_the_timeout_stays_until_messages_of_a_lost_lake_are_past(
    kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "read-back", lake=EMBEDDED)
    river.flow()
    river.finish()
    engine = open_engine(river.settings)
    place = {"partition": 0, "tenant": "", "merge_key": "a", "generation": 0}
    left = {**place, "event_time": 900, "due": 1900, "status": "out"}
    engine.append(tables.SILVER, engine.lake.layout[tables.SILVER].rows_of([left]))
    first = river.config["merge"]["timeout"]
    river.config["merge"]["timeout"] = "400ms"
    river.write()
    [problem] = evolve(river, apply=False, exit_code=2)["problems"]
    assert problem["what"] == "messages of the lost lake may still hold records of partition 0"
    river.config["merge"]["timeout"] = first
    river.write()
    river.flow()
    river.finish()
    river.config["merge"]["timeout"] = "400ms"
    river.write()
    assert evolve(river)["applied"], "the clock is at 2000, and 900 + 400 is past"


def lose(river: River) -> None:
    """The lake and its checkpoints are gone; it is taken up from the sink."""
    shutil.rmtree(river.folder / "lake")
    river.config["kafka"]["start"] = "sink"
    river.write()


@pytest.mark.promise("C7")
@pytest.mark.fault("lost", oracle=True)
@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2])
def test_a_lake_lost_after_its_timeout_changed_resumes_once_all_messages_go_by_the_new_one(
    kafka: str, tmp_path: Path, seed: int
) -> None:
    """What is out stays, and what comes is what the rules make of it, also when they change
    again."""
    river = River.make(kafka, tmp_path, f"lost-epochs-{seed}", lake=EMBEDDED, seed=seed)
    for timeout in ("1500ms", "100ms"):
        river.flow()
        river.finish()
        river.config["merge"]["timeout"] = timeout
        river.write()
        evolve(river)
    mine, told = {river.settings.fingerprint}, [rules_told(river)]
    while told[-1] != mine:
        assert len(told) < 8, told
        river.flow()
        river.finish()
        told.append(rules_told(river))
    before = published(river.kafka, river.sink, river.partitions)
    lose(river)
    river.finish("bronze")
    river.finish()
    is_sound(river, "at-once")
    for _ in range(3):
        river.flow()
        river.finish()
    river.config["merge"]["timeout"] = "2s"
    river.write()
    assert evolve(river)["applied"], "what was read back is past"
    river.flow()
    river.finish()
    is_sound(river, "in-the-end")
    after = published(river.kafka, river.sink, river.partitions)
    for p in range(river.partitions):
        of_p = [message for message in after if message.partition == p]
        out = [message for message in before if message.partition == p]
        assert of_p[: len(out)] == out
        assert [message.seq for message in of_p] == list(range(len(of_p)))
        assert all(
            (one.timestamp, one.key) < (other.timestamp, other.key) for one, other in pairwise(of_p)
        )
        values = [orjson.loads(message.value or b"") for message in of_p]
        parts = Counter(
            (source, part["ts"], part["n"])
            for value in values
            for source in SOURCES
            for part in value[source]
        )
        assert max(parts.values()) == 1, "no record is in two messages"


def rules_told(river: River) -> set[str]:
    """By which rules a lost lake would be taken up, as the last messages of all partitions say
    together."""
    last = {
        m.partition(): dict(m.headers()) for m in consume(river.kafka, river.sink, river.partitions)
    }
    return {
        each
        for headers in last.values()
        for each in headers.get("watersmeet.rules", b"").decode().split(",")
    }


@pytest.mark.nightly
def test_refused_records_that_are_sent_again_meet_the_rules_of_the_epoch_then(
    kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "redriven", lake=EMBEDDED)
    with_schema(river, FIRST)
    for p in range(river.partitions):
        river.send("orders", p, keyed("a", 10, n="not a number, and refused as such"))
        river.send("orders", p, orjson.dumps({"ts": 20, "id": "sent again"}))
    river.flow()
    river.finish()
    refused = river.reader.select(
        tables.QUARANTINE, ["partition", "value", "reason"], [[("source", "=", "orders")]]
    ).to_pylist()
    assert sum(b'"id"' in (row["value"] or b"") for row in refused) == river.partitions
    river.config["sources"]["orders"]["key"] = "id"
    with_schema(
        river,
        {name: kind for name, kind in FIRST.items() if name not in ("n", "k")}
        | {"id": {"type": "string"}},
    )
    assert evolve(river)["applied"]
    for reason in ("no_key", "undecodable"):
        said = json.loads(here(river, "redrive", "--reason", reason, "--apply", "--json"))
        assert said["sent"] > 0
    river.flow()
    river.finish()
    silver = river.reader.select(tables.MERGED, ["partition", "merge_key"]).to_pylist()
    late = river.reader.select(
        tables.LATE, ["partition", "merge_key"], [[("source", "=", "orders")]]
    ).to_pylist()
    found = {(row["partition"], row["merge_key"]) for row in [*silver, *late]}
    assert {(p, "sent again") for p in range(river.partitions)} <= found, (
        "they have a key by the new rules"
    )
    is_sound(river, "redriven")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "lake",
    [
        pytest.param(EMBEDDED, id="embedded"),
        pytest.param(FOLDER, id="spark-folder", marks=pytest.mark.nightly),
    ],
)
def test_ids_come_with_an_epoch_and_are_known_before_the_next_run(
    kafka: str, tmp_path: Path, lake: str, on_spark: Callable[[River], River]
) -> None:
    river = on_spark(River.make(kafka, tmp_path, f"with-ids-{lake}", lake=lake))
    river.flow()
    river.finish()
    for source in SOURCES:
        river.config["sources"][source]["id"] = "i"
    river.write()
    river.flow()
    assert {change["field"] for change in evolve(river)["changes"]} == {
        f"sources.{source}.id" for source in SOURCES
    }
    assert river.broken_promises() == []
    assert json.loads(here(river, "explain", "a", "--json"))["duplicates"] == []
    river.finish()
    river.flow()
    river.kill_at("silver.done", "--once")
    assert river.broken_promises() == []
    river.flow()
    river.finish()
    repeated = river.reader.select(tables.DUPLICATES, ["source"])["source"].to_pylist()
    assert set(repeated) == {*SOURCES}
    is_sound(river, "with-ids")
