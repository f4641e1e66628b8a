"""`try`: what the merge model makes of random records, and one clear sentence for a line that is
wrong."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from tests.support.cases import (
    INPUTS,
    SOURCES,
    Case,
    expected_duplicates,
    expected_late,
    expected_messages,
    expected_quarantine,
    expected_silver,
    heartbeat,
    keyed,
    random_case,
    with_ids,
)
from tests.support.configurations import IDS, SMALLEST, settings_for
from tests.support.corrections import CorrectionModels
from tests.support.effort import draws
from tests.support.inputs import record_of
from tests.support.tenants import TenantModels, tenant_case
from tests.support.topics import Published
from watersmeet.audit.show import try_view
from watersmeet.cli import app
from watersmeet.core.message import message_bytes
from watersmeet.core.times import LAST_EVENT_TIME_MS
from watersmeet.dev.init import write_example
from watersmeet.dry_run import try_file, try_records
from watersmeet.errors import ConfigurationError
from watersmeet.settings import Settings

pytestmark = pytest.mark.promise("C12")

Found = dict[str, Any]
FAR_MS = 10**9


def records_of(cases: Mapping[int, Case]) -> list[Found]:
    """Every record of some cases, a partition each, in the order of arrival."""
    records = []
    for partition, case in cases.items():
        offsets = dict.fromkeys(case.values, 0)
        for source in case.arrivals:
            records.append(
                {
                    "source": source,
                    "partition": partition,
                    "value": case.values[source][offsets[source]],
                }
            )
            offsets[source] += 1
    return records


def silver_of(found: Found, cases: Mapping[int, Case]) -> list[tuple[object, ...]]:
    """As `expected_silver` has it; what a part's value is, its place says."""
    rows, inputs = [], inputs_of(cases)
    for row in found["records"]:
        values, of_source = cases[row["partition"]].values, dict[str, list[tuple[object, ...]]]()
        for part in row["parts"]:
            name = name_of(part, inputs)
            text = (values[name][part["offset"]] or b"").decode()
            topic = [part["topic"]] if name != part["source"] else []
            of_source.setdefault(part["source"], []).append(
                (*topic, part["offset"], part["event_time"], text)
            )
        parts = (tuple(of_source.get(source, ())) for source in SOURCES)
        rows.append(
            (
                *(
                    row[name]
                    for name in ("partition", "key", "status", "event_time", "last_event_time")
                ),
                *parts,
            )
        )
    return sorted(rows, key=repr)


def sent(found: Found) -> list[Published]:
    return [
        Published(
            m["partition"],
            m["key"].encode(),
            m["timestamp"],
            m["value"].encode(),
            m["seq"],
            m["id"],
        )
        for m in found["messages"]
    ]


def inputs_of(cases: Mapping[int, Case]) -> tuple[str, ...]:
    return next((tuple(case.values) for case in cases.values()), SOURCES)


def name_of(row: Found, inputs: Sequence[str]) -> str:
    """The input that a record came from."""
    name = f"{row['source']}/{row['topic']}"
    return name if name in inputs else str(row["source"])


def places(rows: list[Found], inputs: Sequence[str] = SOURCES) -> list[tuple[object, ...]]:
    return sorted((row["partition"], name_of(row, inputs), row["offset"]) for row in rows)


def check(found: Found, cases: Mapping[int, Case]) -> None:
    inputs = inputs_of(cases)
    assert silver_of(found, cases) == expected_silver(cases, inputs)
    assert sent(found) == expected_messages(cases, inputs)
    assert places(found["quarantined"], inputs) == sorted(
        row[:3] for row in expected_quarantine(cases)
    )
    late = [
        (*place[:3], r["key"], r["event_time"], r["position"])
        for r in found["late"]
        for place in places([r], inputs)
    ]
    assert sorted(late) == [row[:6] for row in expected_late(cases, inputs)]
    duplicates = [
        (*place[:3], r["key"], r["event_time"], r["id"], r["of_offset"])
        for r in found["duplicates"]
        for place in places([r], inputs)
    ]
    assert sorted(duplicates) == expected_duplicates(cases, inputs)


def settings_of(inputs: Sequence[str] = SOURCES) -> Settings:
    topics = [name.partition("/")[2] for name in inputs if "/" in name]
    return settings_for(Path("/nowhere"), sources__tracking__topic=topics or "tracking", **IDS)


@pytest.mark.parametrize("inputs", [SOURCES, INPUTS], ids=["", "topics"])
@draws(20)
@given(seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=3, unique=True))
def test_it_shows_what_the_merge_model_makes_of_the_records(
    inputs: Sequence[str], seeds: list[int]
) -> None:
    cases = {
        partition: with_ids(random_case(seed, sources=inputs), seed)
        for partition, seed in enumerate(seeds)
    }
    as_is = try_records(settings_of(inputs), records_of(cases), close=False)
    check(as_is, cases)
    waiting = [
        (p, name_of(record.input._asdict(), inputs), record.offset)
        for p, case in cases.items()
        for queue in case.merged(inputs).unread().values()
        for _, record in queue
        if record.key is not None
    ]
    assert places(as_is["waiting"], inputs) == sorted(waiting)

    closed = try_records(settings_of(inputs), records_of(cases))
    check(closed, ended(cases))
    assert closed["waiting"] == []
    assert closed["clocks"] == as_is["clocks"], "the clock at the last record"
    finished = [row for row in as_is["records"] if row["status"] == "timed_out"]
    assert [row for row in closed["records"] if not row["at_end"]] == finished


@draws(20)
@given(seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=3, unique=True))
def test_it_shows_the_corrections_that_their_model_makes(seeds: list[int]) -> None:
    """Those of the last late records only where time goes on."""
    cases = {p: with_ids(random_case(seed), seed) for p, seed in enumerate(seeds)}
    corrected = {"topic": "merged-corrections", "within": "1d"}
    settings = settings_for(Path("/nowhere"), publish__corrections=corrected, **IDS)
    for close in (False, True):
        found = try_records(settings, records_of(cases), close=close)
        models = CorrectionModels(ended(cases) if close else cases, (100, None, None), 86_400_000)
        models.arrive(1.0)
        corrections = [
            (
                *(m["partition"], m["key"], m["seq"], m["version"]),
                "/".join(str(m["late"][name]) for name in COORDINATES),
                orjson.loads(m["value"]),
            )
            for m in found["corrections"]
        ]
        assert sorted(corrections, key=lambda row: row[:3]) == models.messages()
        repeated = [
            (p, source, row["of_offset"])
            for row in found["duplicates"]
            if row["is_late"]
            for p, source, _ in places([row])
        ]
        expected = [(p, source, of_offset) for p, source, _, of_offset in models.late_duplicates()]
        assert sorted(repeated) == sorted(expected)


def test_a_correction_of_the_last_moment_of_the_calendar_is_shown() -> None:
    """It is settled later than that."""
    settings = settings_for(
        Path("/nowhere"), publish__corrections={"topic": "merged-corrections", "within": "1d"}
    )
    sent_late = LAST_EVENT_TIME_MS - 500
    records = [
        {"source": source, "value": keyed(key, time), "timestamp": LAST_EVENT_TIME_MS}
        for key, time in (("a", sent_late), ("z", LAST_EVENT_TIME_MS))
        for source in ("tracking", "orders")
    ]
    late = {"source": "orders", "value": keyed("a", sent_late), "timestamp": LAST_EVENT_TIME_MS}
    [correction] = try_records(settings, [*records, late])["corrections"]
    assert (correction["key"], correction["timestamp"]) == ("a", sent_late)


COORDINATES = ("source", "topic", "partition", "offset")


def ended(cases: Mapping[int, Case]) -> dict[int, Case]:
    """The cases with a heartbeat from far ahead at the end of each source."""
    return {
        p: replace(
            case,
            values={source: [*mine, heartbeat(FAR_MS)] for source, mine in case.values.items()},
            arrivals=[*case.arrivals, *case.values],
        )
        for p, case in cases.items()
        if case.arrivals
    }


def test_parts_are_told_by_event_time_and_then_by_source(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    records = [("orders", 0), ("tracking", 40), ("orders", 40), ("orders", 50), ("tracking", 20)]
    lines = [{"source": source, "value": {"k": "a", "ts": ts}} for source, ts in records]
    file.write_text("\n".join(map(json.dumps, lines)))
    [record] = try_file(settings_of(), file)["records"]
    assert [part["line"] for part in record["parts"]] == [1, 5, 2, 3, 4]


def test_every_record_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    lines: list[dict[str, Any]] = [
        {"source": "tracking", "value": {"k": "a", "ts": 0}},
        {
            "source": "orders",
            "value": {"k": "a", "ts": 40},
            "key": "x",
            "headers": {"h": "1", "n": None},
        },
        {"source": "tracking", "value": {"ts": 900, "type": "heartbeat"}},
        {"source": "orders", "value": {"k": "b", "ts": 900}, "timestamp": 800},
        {"source": "orders", "value": {"k": "b", "ts": 500}},
        {"source": "orders", "value": '{"k": 1.10, "ts": 950}'},
        {"source": "orders", "partition": 1, "value": None},
        {"source": "orders", "value": {"k": "b", "ts": 90_000_000}, "timestamp": 900},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    found = try_file(settings_of(), file)
    assert [(row["key"], [part["line"] for part in row["parts"]]) for row in found["records"]] == [
        ("a", [1, 3]),
        ("b", [7]),
        ("1.10", [11]),
    ]
    assert [(row["line"], row["key"], row["position"]) for row in found["late"]] == [(9, "b", 900)]
    refused = [
        (row["line"], row["partition"], row["offset"], row["reason"])
        for row in found["quarantined"]
    ]
    assert refused == [(13, 1, 0, "undecodable"), (15, 0, 4, "event_time_in_future")]
    assert found["read"] == {
        "tracking": {"records": 2, "heartbeats": 1, "skipped": 0},
        "orders": {"records": 6, "heartbeats": 0, "skipped": 0},
    }
    assert found["clocks"] == [{"partition": 0, "clock": 900}, {"partition": 1, "clock": None}]
    assert [message["key"] for message in found["messages"]] == ["a", "b", "1.10"]


def test_a_value_that_is_an_object_keeps_its_numbers_as_they_are_spelled(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text(
        '{"source": "tracking", "value": {"k": 1.10, "ts": 1e2, "n": [123456789012345678901, {"m": '
        '-0.0}], "s": "é"}}\n'
    )
    found = try_file(settings_of(), file)
    value = '{"k":1.10,"ts":1e2,"n":[123456789012345678901,{"m":-0.0}],"s":"é"}'
    expected = (
        f'{{"key":"1.10","event_time":100,"last_event_time":100,"tracking":[{value}],"orders":[]}}'
    )
    assert [message["value"] for message in found["messages"]] == [expected]


def test_units_tombstones_and_the_largest_message_are_the_configurations() -> None:
    unit: dict[str, Any] = {
        "sources__tracking__event_time": {"field": "ts", "unit": "s"},
        "sources__tracking__tombstone": "skip",
    }
    settings = settings_for(Path("/nowhere"), publish__max_bytes=message_bytes(100, 1, 0), **unit)
    large = keyed("b", 5, text="x" * 100)
    records = [{"source": "tracking", "value": value} for value in (None, large, keyed("a", 7))]
    found = try_records(settings, records)
    assert [(row["key"], row["event_time"], row["invalid_reason"]) for row in found["records"]] == [
        ("b", 5_000, "too_large"),
        ("a", 7_000, None),
    ]
    assert (found["quarantined"], found["read"]["tracking"]["skipped"]) == ([], 1)
    assert [message["key"] for message in found["messages"]] == ["a"]


def test_of_no_records_there_is_nothing() -> None:
    found = try_records(settings_of(), [])
    nothing = {"records": 0, "heartbeats": 0, "skipped": 0}
    assert {name: value for name, value in found.items() if value} == {
        "read": dict.fromkeys(SOURCES, nothing)
    }


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "is no strict JSON"),
        ("[1]", "is no JSON object"),
        ('{"source": "tracking", "value": {"ts": NaN}}', "is no strict JSON (NaN is no JSON)"),
        ('{"source": "tracking", "value": {"k": "\\ud800"}}', "is no strict JSON"),
        ('{"value": {}}', "`source` is `None`, which is no source; known here: tracking, orders"),
        ('{"source": ["tracking"], "value": {}}', "which is no source"),
        (
            '{"source": "trackin", "value": {}}',
            "`source` is `trackin`, which is no source; did you mean `tracking`?",
        ),
        ('{"source": "tracking"}', "`value` is missing; add it, null for a tombstone"),
        ('{"source": "tracking", "value": {}, "offset": 1}', "unknown field `offset`"),
        (
            '{"source": "tracking", "value": {}, "partition": -1}',
            "`partition` is `-1`; write a whole number from 0",
        ),
        ('{"source": "tracking", "value": {}, "partition": true}', "`partition` is `True`"),
        (
            '{"source": "tracking", "value": {}, "timestamp": "now"}',
            "`timestamp` is `now`; write whole milliseconds",
        ),
        ('{"source": "tracking", "value": {}, "headers": ["a"]}', "`headers` are no object"),
        ('{"source": "tracking", "value": {}, "key": "\\ud800"}', "`key` cannot be sent"),
        (
            '{"source": "tracking", "value": {}, "headers": {"\\ud800": "a"}}',
            "`headers` cannot be sent",
        ),
    ],
)
def test_a_line_that_is_wrong_is_one_sentence_with_its_number(
    tmp_path: Path, line: str, sentence: str
) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text(f'{{"source": "orders", "value": {{}}}}\n{line}\n')
    with pytest.raises(ConfigurationError) as refused:
        try_file(settings_of(), file)
    assert str(refused.value).startswith(f"{file}, line 2: ")
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_nothing_is_left_in_the_temporary_folder_which_there_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = Settings.model_validate(SMALLEST)
    record = {"source": "tracking", "key": "a", "value": {"ts": 0}, "timestamp": 0}
    assert len(try_records(settings, [record])["records"]) == 1
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "a#b").mkdir()
    for unfit in ("missing", "a#b"):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / unfit))
        with pytest.raises(ConfigurationError, match=r"no place for a temporary folder .*TMPDIR"):
            try_records(settings, [record])


def test_a_record_that_cannot_be_sent_is_named_by_its_number() -> None:
    with pytest.raises(
        ConfigurationError, match=r"record 2: `value` cannot be sent \(.*\); write it as text"
    ):
        try_records(
            settings_of(),
            [{"source": "orders", "value": {}}, {"source": "orders", "value": {"at": object()}}],
        )
    with pytest.raises(
        ConfigurationError, match=r"missing.jsonl: cannot be read \(.*\); name a file"
    ):
        try_file(settings_of(), Path("missing.jsonl"))


def test_the_command_tries_the_example_without_kafka_and_without_a_lake(tmp_path: Path) -> None:
    write_example(tmp_path)
    arguments = ["try", str(tmp_path / "examples.jsonl"), "-c", str(tmp_path / "watersmeet.yml")]
    before = sorted(tmp_path.rglob("*"))
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    told = " ".join(shown.stdout.split())
    assert (
        "'7' · partition 0 · 2026-01-01 10:00:00.000Z to 2026-01-01 10:02:00.000Z · timed out at "
        "the end" in told
    )
    as_json = CliRunner().invoke(app, [*arguments, "--json", "--no-close"])
    found = json.loads(as_json.stdout)
    assert [(row["key"], row["status"]) for row in found["records"]] == [("7", "open")]
    assert [row["line"] for row in found["waiting"]] == [3]
    assert found["messages"] == []
    assert sorted(tmp_path.rglob("*")) == before


def test_a_configuration_is_named_by_its_file_too(tmp_path: Path) -> None:
    file = tmp_path / "watersmeet.yml"
    file.write_text(yaml.safe_dump(SMALLEST))
    found = try_records(str(file), [{"source": "orders", "key": "a", "value": {"ts": 5}}])
    assert [
        (message["key"], orjson.loads(message["value"])["orders"]) for message in found["messages"]
    ] == [("a", [{"ts": 5}])]


def test_the_first_steps_show_what_the_command_answers(tmp_path: Path) -> None:
    write_example(tmp_path)
    shown = CliRunner().invoke(
        app, ["try", str(tmp_path / "examples.jsonl"), "-c", str(tmp_path / "watersmeet.yml")]
    )
    page = (Path(__file__).parents[2] / "docs" / "first-steps.md").read_text(encoding="utf-8")
    told = page.partition("watersmeet try shop/examples.jsonl")[2].split("```")[2]
    assert " ".join(told.split()) in " ".join(shown.stdout.split())


def test_the_documented_test_of_a_rule_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_example(tmp_path)
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    scope: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], scope)
    scope["test_an_order_without_a_visit_is_published"]()


AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "ts", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "k", "type": ["null", "string"]},
        {
            "name": "price",
            "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2},
            "default": "\u0000",
        },
    ],
}


@pytest.mark.parametrize("registry", [None, {"url": "http://127.0.0.1:1"}])
def test_values_of_an_avro_source_are_written_as_json(
    tmp_path: Path, registry: Found | None
) -> None:
    (tmp_path / "order.avsc").write_text(json.dumps(AVRO))
    avro = {
        "sources__orders__format": "avro",
        "sources__orders__schema": str(tmp_path / "order.avsc"),
        "sources__orders__key": "k",
    }
    configuration = settings_for(tmp_path, **avro, sources__orders__registry=registry)
    file = tmp_path / "records.jsonl"
    lines: list[dict[str, Any]] = [
        {
            "source": "orders",
            "value": {"ts": "1970-01-01T00:00:00.005Z", "k": "a", "price": 12345.6},
        },
        {"source": "orders", "value": '{"ts": 6, "k": "a"}'},
        {"source": "orders", "value": None},
        {"source": "orders", "value": {"ts": 7}},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    found = try_file(configuration, file)
    [message] = found["messages"]
    assert orjson.loads(message["value"])["orders"] == [
        {"ts": "1970-01-01T00:00:00.005000Z", "k": "a", "price": 12345.6},
        {"ts": "1970-01-01T00:00:00.006000Z", "k": "a", "price": 0.0},
    ]
    assert '"price":12345.60}' in message["value"]
    assert [(row["line"], row["reason"]) for row in found["quarantined"]] == [
        (3, "undecodable"),
        (4, "no_key"),
    ]
    assert (
        try_records(configuration, [{**line, "partition": 0} for line in lines])["messages"]
        == found["messages"]
    )
    for value, sentence in (
        ({"ts": 5, "prize": 1}, "`value.prize` is no field of the schema; it has ts, k, price"),
        (
            {"ts": 5, "price": 0.001},
            "`value.price` does not fit decimal; write a number that fits its digits",
        ),
        ("x", "`value` is text that is no JSON, and the source's values are Avro; write an object"),
    ):
        file.write_text("\n\n" + json.dumps({"source": "orders", "value": value}))
        with pytest.raises(ConfigurationError) as refused:
            try_file(configuration, file)
        assert str(refused.value) == f"{file}, line 3: {sentence}"


# -- tenants


def check_tenants(found: Found, models: TenantModels) -> None:
    """Merge records, late and waiting ones, and messages in their order."""
    records, waiting = list[Any](), list[Any]()
    order: dict[int, list[str]] = {}
    for p, model in models.models.items():
        for status, rows in (("open", model.open.values()), ("timed_out", model.timed_out)):
            for r in rows:
                due = model.rules.due(r.event_time, r.last_event_time)
                closed_at = r.closed_at if status == "timed_out" else None
                parts = sorted(
                    (source, part.offset) for source, mine in r.parts.items() for part in mine
                )
                times = (r.last_event_time, due, closed_at)
                records.append((p, r.event_time, r.tenant, r.key, status, *times, parts))
        waiting += [(p, r.input.source, r.offset, r.tenant, v) for v, r in model.waiting]
        waiting += [
            (p, s.source, r.offset, r.tenant, None)
            for s, queue in model.unread().items()
            for _, r in queue
            if r.key
        ]
        order[p] = [
            f"{p}/{r.event_time}/{quote(r.tenant, safe='')}/{r.key}"
            for r in model.published_order()
        ]
    names = (
        "partition",
        "event_time",
        "tenant",
        "key",
        "status",
        "last_event_time",
        "due",
        "closed_at",
    )
    assert [
        (
            *(row[name] for name in names),
            sorted((part["source"], part["offset"]) for part in row["parts"]),
        )
        for row in found["records"]
    ] == sorted(records)
    columns = ("partition", "source", "offset", "tenant", "position")
    assert sorted((tuple(row[c] for c in columns) for row in found["waiting"]), key=repr) == sorted(
        waiting, key=repr
    )
    late = [
        (row["partition"], row["source"], row["offset"], row["tenant"], row["key"])
        for row in found["late"]
    ]
    assert sorted(late) == sorted(row[:5] for row in models.late())
    for p, ids in order.items():
        assert [(m["seq"], m["id"]) for m in found["messages"] if m["partition"] == p] == list(
            enumerate(ids)
        )


@pytest.mark.promise("T7")
@pytest.mark.parametrize(
    ("gap_ms", "max_ms", "lag_ms"), [(100, None, 300), (30, 400, 1000), (100, None, 0)]
)
def test_it_shows_what_the_merge_model_makes_of_tenants(
    gap_ms: int, max_ms: int | None, lag_ms: int
) -> None:
    window = (
        {"timeout": f"{gap_ms}ms"}
        if max_ms is None
        else {"window": {"gap": f"{gap_ms}ms", "max": f"{max_ms}ms"}}
    )
    settings = settings_for(
        Path("/nowhere"), merge={**window, "tenant": "g", "tenant_max_lag": f"{lag_ms}ms"}
    )
    cases = {p: tenant_case(p) for p in range(12)}
    models = TenantModels(cases, (gap_ms, max_ms, lag_ms))
    models.arrive(1.0)
    check_tenants(try_records(settings, records_of(cases), close=False), models)
    for model in models.models.values():
        model.arrive(*(record_of(source, FAR_MS, FAR_MS, tenant=None) for source in SOURCES))
        model.advance()
    closed = try_records(settings, records_of(cases))
    check_tenants(closed, models)
    assert {row["status"] for row in closed["records"]} == {"timed_out"}
    assert closed["waiting"] == []


@pytest.mark.parametrize(
    ("merge", "more"),
    [
        ({"timeout": "100ms"}, set()),
        ({"window": {"gap": "100ms", "max": "1s"}}, {"due", "closed_at"}),
        (
            {"timeout": "100ms", "tenant": "g", "tenant_max_lag": "1s"},
            {"due", "closed_at", "tenant"},
        ),
    ],
    ids=["timeout", "window", "tenants"],
)
def test_when_a_record_was_closed_and_whose_it_is_are_shown_where_messages_say_it(
    merge: dict[str, Any], more: set[str]
) -> None:
    settings = settings_for(Path("/nowhere"), merge=merge)
    records = [
        {"source": "tracking", "value": {"ts": 5000, "k": "a", "g": "x"}},
        {"source": "orders", "value": {"ts": 5000, "k": "a", "g": "x"}},
        {"source": "orders", "value": {"ts": 1000, "k": "b", "g": "x"}},
    ]
    found = try_records(settings, records)
    [record], [late], [message] = found["records"], found["late"], found["messages"]
    place = {"partition", "status", "event_time", "last_event_time", "valid", "invalid_reason"}
    assert record.keys() == place | {"key", "at_end", "parts"} | more
    of_record = {"source", "topic", "partition", "offset", "line", "key", "event_time"}
    assert late.keys() == of_record | {"position"} | (more & {"tenant"})
    assert message.keys() == {"partition", "seq", "id", "key", "timestamp", "value"} | (
        more & {"tenant"}
    )
    [waiting, *_] = try_records(settings, records[:1], close=False)["waiting"]
    assert waiting.keys() == of_record | ({"tenant", "position"} if "tenant" in more else set())


def test_tenants_are_shown_to_people(tmp_path: Path) -> None:
    records = [
        {"source": "tracking", "value": {"ts": 5000, "k": "a", "g": "x"}},
        {"source": "orders", "value": {"ts": 4400, "k": "b", "g": "y"}},
        {"source": "orders", "value": {"ts": 5000, "g": "x", "type": "heartbeat"}},
        {"source": "orders", "value": {"ts": 1000, "k": "b", "g": "y"}},
        {"source": "orders", "value": {"ts": 5000, "k": "b"}},
    ]
    settings = settings_for(
        tmp_path, merge={"timeout": "100ms", "tenant": "g", "tenant_max_lag": "1s"}
    )
    console = Console(width=200, record=True)
    for close in (True, False):
        console.print(try_view(try_records(settings, records, close=close)))
    text = console.export_text()
    assert "'a' · partition 0 · tenant 'x' · 1970-01-01 00:00:05.000Z" in text
    assert "partition 0 · seq 0 · tenant 'y' · key 'b'" in text
    assert '{"key":"b","tenant":"y","event_time":4400' in text
    assert re.search(r"orders\[0\]@0 +2 +y +b +1970-01-01 00:00:04.400Z +\+0", text), (
        "waits, read at its own time"
    )
    assert re.search(r"orders\[0\]@2 +4 +y +b +1970-01-01 00:00:01.000Z +\+3s", text), "late"
    assert "no_tenant" in text


def test_a_line_names_a_topic_where_its_source_has_several() -> None:
    settings, value = settings_of(INPUTS), {"k": "a", "ts": 0}
    with pytest.raises(
        ConfigurationError,
        match="`tracking`, which has several topics; name one, such as `tracking/app`",
    ):
        try_records(settings, [{"source": "tracking", "value": value}])
    found = try_records(settings, [{"source": "tracking/web", "value": value}])
    [part] = found["records"][0]["parts"]
    assert {name: part[name] for name in ("source", "topic", "offset", "line")} == {
        "source": "tracking",
        "topic": "web",
        "offset": 0,
        "line": 1,
    }
