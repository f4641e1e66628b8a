"""Identity, decisions, maintenance, small files and names of a lake."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.lake.conftest import SPARK_CATALOG, Store, settings_for
from tests.support.inputs import tp_of
from watersmeet.core.idle import IdleDecision
from watersmeet.core.plan import Rules
from watersmeet.core.state import State
from watersmeet.core.tenants import Cut
from watersmeet.core.types import columns_ddl
from watersmeet.core.window import Window
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.files import Files
from watersmeet.lake.history import Epoch, Epochs, Generation
from watersmeet.lake.identity import (
    changes,
    check_layout,
    differences,
    identity,
    keep_facts,
    keep_identity,
    kept_facts,
)
from watersmeet.lake.journal import MOVED, read_journal
from watersmeet.lake.location import Lake
from watersmeet.lake.maintenance import FEW_FILES, FILE_BYTES, VACUUM_EVERY_S, Maintenance, maintain
from watersmeet.lake.progress import Decided, decision_rows, last_decisions, read_decisions
from watersmeet.lake.state import base_rows
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import Settings

# -- layout and place


def test_a_lake_has_the_columns_that_the_contract_promises(tmp_path: Path) -> None:
    parts = "ARRAY<STRUCT<offset: BIGINT, event_time: TIMESTAMP, value: STRING>>"
    kafka = "topic STRING, partition INT, offset BIGINT, kafka_timestamp TIMESTAMP"
    record = "key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
    place = "source STRING, topic STRING, partition INT, offset BIGINT"
    promised = {
        "bronze_orders": f"{kafka}, timestamp_type INT, {record}, merge_key STRING, event_time "
        "TIMESTAMP, heartbeat BOOLEAN, "
        "reason STRING, detail STRING, tenant STRING, redriven_from BIGINT, record_bytes BIGINT",
        "silver": "partition INT, merge_key STRING, status STRING, event_time TIMESTAMP, "
        "last_event_time TIMESTAMP, "
        f"tracking {parts}, orders {parts}, valid BOOLEAN, invalid_reason STRING, batch BIGINT, "
        "generation INT, due TIMESTAMP, closed_at TIMESTAMP, tenant STRING, position TIMESTAMP, "
        "record_bytes BIGINT, record_count BIGINT, source STRING, topic STRING, offset BIGINT, "
        "value BINARY, u TIMESTAMP, id STRING, of_offset BIGINT, is_late BOOLEAN, "
        "is_late_born BOOLEAN, version BIGINT, settled_at TIMESTAMP, first_event_time TIMESTAMP, "
        "has_message BOOLEAN, after_offset BIGINT, decided_at TIMESTAMP, from_offset BIGINT, "
        "until_offset BIGINT, head TIMESTAMP, clock TIMESTAMP, epoch INT, committed_at TIMESTAMP",
        "merged": "partition INT, merge_key STRING, status STRING, event_time TIMESTAMP, "
        "last_event_time TIMESTAMP, "
        f"tracking {parts}, orders {parts}, valid BOOLEAN, invalid_reason STRING, batch BIGINT, "
        "generation INT, due TIMESTAMP, closed_at TIMESTAMP, tenant STRING, record_bytes BIGINT, "
        "record_count BIGINT",
        "waiting": f"{place}, tenant STRING, merge_key STRING, event_time TIMESTAMP, position "
        "TIMESTAMP, batch BIGINT, generation INT, record_bytes BIGINT",
        "late": f"{place}, merge_key STRING, event_time TIMESTAMP, position TIMESTAMP, value "
        "BINARY, batch BIGINT, generation INT, tenant STRING, u TIMESTAMP, id STRING, record_bytes "
        "BIGINT",
        "duplicates": f"{place}, merge_key STRING, event_time TIMESTAMP, id STRING, of_offset "
        "BIGINT, is_late BOOLEAN, batch BIGINT, generation INT, tenant STRING",
        "excess": f"{place}, tenant STRING, merge_key STRING, event_time TIMESTAMP, batch BIGINT, "
        "generation INT",
        "passed": f"status STRING, {place}, tenant STRING, merge_key STRING, event_time TIMESTAMP, "
        "position TIMESTAMP, batch BIGINT, generation INT, from_offset BIGINT, until_offset "
        "BIGINT, due TIMESTAMP, closed_at TIMESTAMP",
        "quarantine": f"source STRING, {kafka}, {record}, reason STRING, detail STRING, "
        "record_bytes BIGINT",
        "idle_heartbeats": "source STRING, topic STRING, partition INT, after_offset BIGINT, "
        "event_time TIMESTAMP, "
        "decided_at TIMESTAMP, tenant STRING, batch BIGINT, generation INT",
        "generations": "generation INT, from_batch BIGINT, source STRING, topic STRING, partition "
        "INT, start_offset BIGINT, "
        "kind STRING, decided_at TIMESTAMP, reason STRING, epoch INT, life STRING",
        "resets": "source STRING, topic STRING, partition INT, from_offset BIGINT, to_offset "
        "BIGINT, decided_at TIMESTAMP, "
        "reason STRING",
        "journal": "seq BIGINT, kind STRING, generation INT, body STRING, decided_at TIMESTAMP, "
        "token BIGINT",
        "published": "topic STRING, partition INT, first_seq BIGINT, last_seq BIGINT, "
        "last_event_time TIMESTAMP, last_key STRING, "
        "sink_offset BIGINT, committed_at TIMESTAMP, topic_id STRING, last_due TIMESTAMP, "
        "last_closed_at TIMESTAMP, last_tenant STRING, last_settled_at TIMESTAMP, last_u "
        "TIMESTAMP, last_source STRING, last_topic STRING, last_offset BIGINT, "
        "failed_values BIGINT",
        "progress": "batch BIGINT, source STRING, topic STRING, partition INT, from_offset BIGINT, "
        "until_offset BIGINT, head TIMESTAMP, clock TIMESTAMP, position TIMESTAMP, epoch INT, "
        "generation INT, committed_at TIMESTAMP",
        "epochs": "epoch INT, from_batch BIGINT, configuration STRING, decided_at TIMESTAMP",
        "corrections": "generation INT, partition INT, tenant STRING, merge_key STRING, event_time "
        "TIMESTAMP, is_late_born BOOLEAN, version BIGINT, source STRING, topic STRING, offset "
        "BIGINT, position TIMESTAMP, u TIMESTAMP, settled_at TIMESTAMP, valid BOOLEAN, "
        "invalid_reason STRING, batch BIGINT, first_event_time TIMESTAMP, last_event_time "
        f"TIMESTAMP, tracking {parts}, orders {parts}, due TIMESTAMP, closed_at TIMESTAMP, id "
        "STRING, has_message BOOLEAN, record_bytes BIGINT, record_count BIGINT",
    }
    corrections = {"topic": "merged-corrections", "within": "7d"}
    publish = {"topic": "merged", "corrections": corrections}
    lake = Lake(settings_for(tmp_path, publish=publish))
    layout = lake.layout
    assert {name: columns_ddl(lake.schema(name)) for name in promised} == promised
    assert not layout.keys() & lake.views.keys()
    assert layout["silver"].partitioned_by == ("status",)
    assert layout["silver"].properties[tables.DELETION_VECTORS] == "true"
    assert "versions" not in layout
    keys = {key for table in layout.values() for key in table.properties}
    assert "delta.enableInCommitTimestamps" not in keys


TENANTS = {"timeout": "100ms", "tenant": "org", "tenant_max_lag": "1s"}


@pytest.mark.parametrize(
    "merge", [{"window": {"gap": "1s", "max": "2s"}}, TENANTS], ids=["a window", "tenants"]
)
def test_every_lake_has_the_same_tables_whatever_its_merge(
    tmp_path: Path, merge: dict[str, Any]
) -> None:
    usual = Lake(settings_for(tmp_path)).layout
    assert Lake(settings_for(tmp_path, merge=merge)).layout == usual


def test_silver_skips_files_by_all_that_it_is_asked_for_but_no_log_tells_a_key(
    tmp_path: Path,
) -> None:
    layout = Lake(settings_for(tmp_path)).layout
    assert layout["silver"].properties["delta.dataSkippingStatsColumns"] == (
        "partition,event_time,last_event_time,batch,generation,due,closed_at,position,"
        "record_bytes,record_count,offset,u,of_offset,version,settled_at,first_event_time,"
        "after_offset,decided_at,from_offset,until_offset,head,clock,epoch,committed_at"
    )
    for table in filter(lambda table: table.has_records, layout.values()):
        assert "key" not in table.properties["delta.dataSkippingStatsColumns"]


def test_a_table_has_an_address_in_each_kind_of_lake(tmp_path: Path) -> None:
    catalog = settings_for(
        tmp_path, lake={"catalog": "main", "schema": "shop"}, checkpoints="s3://b/c"
    )
    named = Lake(catalog, {"late": Lake(settings_for(tmp_path, lake="s3://b/lake"))})
    assert (named.address("silver"), named.location, named.is_catalog) == (
        "`main`.`shop`.`silver`",
        "main.shop",
        True,
    )
    assert named.address("late") == "s3://b/lake/silver", "where its rows are"
    assert not named.owning_lake("late").is_catalog
    assert Lake(settings_for(tmp_path)).address("silver") == f"{tmp_path}/lake/silver"


# -- identity


FACTS = {"partitions": "4", "merge.timeout": "100 ms", "sources.orders.topic": "orders (a)"}


def test_what_a_lake_was_begun_with_stays(folder_store: Store) -> None:
    asked = folder_store.reader
    assert differences(asked, FACTS) == []
    folder_store.create("journal")
    keep_identity(asked, folder_store.append, FACTS)
    keep_identity(asked, folder_store.append, {**FACTS, "publish.valid": "true"})
    decided = [decision.body["facts"].keys() for decision in read_journal(asked)]
    assert decided == [FACTS.keys(), {"publish.valid"}]
    assert differences(asked, {**FACTS, "publish.valid": "true"}) == []
    for field_, value, said in (
        ("partitions", "8", "the topics have 8 partitions, and had 4 when the lake was begun"),
        (
            "merge.timeout",
            "200 ms",
            "the lake was begun with `100 ms`, and `200 ms` would make another result",
        ),
        (
            "sources.orders.topic",
            "orders (b)",
            "orders was deleted and made again since the lake was begun",
        ),
        ("sources.orders.topic", "sales (b)", "the lake was begun with `orders (a)`"),
    ):
        with pytest.raises(ConfigurationError, match="lake was begun") as refused:
            keep_identity(asked, folder_store.append, {**FACTS, field_: value})
        assert said in str(refused.value)
        assert differences(asked, {**FACTS, field_: value}) == [refused.value.problem]


def test_of_a_fact_the_one_that_was_kept_last_holds_whatever_the_clocks_of_hosts_say(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = folder_store.reader
    folder_store.create("journal")
    keep_identity(asked, folder_store.append, FACTS)
    for name in "bcd":
        monkeypatch.setattr(time, "time_ns", lambda: 5_000_000)  # far behind
        moved = {**FACTS, "sources.orders.topic": f"orders ({name})"}
        keep_facts(asked, folder_store.append, moved, MOVED)
        assert kept_facts(asked)["sources.orders.topic"] == f"orders ({name})"


WAYS: dict[str, dict[str, Any]] = {
    "without": {},
    "everywhere": {"merge": TENANTS},
    "elsewhere": {
        "merge": TENANTS,
        "sources": {
            "tracking": {"topic": "tracking", "event_time": "ts"},
            "orders": {"topic": "orders", "event_time": "ts", "tenant": "customer"},
        },
    },
}
"""Where a configuration has its tenants."""

_SET_BACK = "it would be another merge; set it back, or begin a new lake"


@pytest.mark.parametrize(
    ("begun", "now", "said"),
    [
        (
            "without",
            "everywhere",
            "sources.tracking.tenant: the lake was begun without tenants, and with tenants at "
            "`org`",
        ),
        (
            "everywhere",
            "without",
            "sources.tracking.tenant: the lake was begun with tenants at `org`, and without "
            "tenants",
        ),
        (
            "everywhere",
            "elsewhere",
            "sources.orders.tenant: the lake was begun with tenants at `org`, and with tenants at "
            "`customer`",
        ),
    ],
)
def test_a_lakes_tenants_never_change(
    folder_store: Store, tmp_path: Path, begun: str, now: str, said: str
) -> None:
    asked, before, after = (
        folder_store.reader,
        *(settings_for(tmp_path, **WAYS[way]) for way in (begun, now)),
    )
    for settings in (before, after):
        check_layout(asked, Lake(settings))  # nothing is there yet
    folder_store.create("journal")
    keep_identity(asked, folder_store.append, identity(before, 4, {}))
    check_layout(asked, Lake(before))
    keep_identity(asked, folder_store.append, identity(before, 4, {}))
    with pytest.raises(ConfigurationError) as refused:
        check_layout(asked, Lake(after))
    assert str(refused.value) == f"{said} {_SET_BACK}"
    with pytest.raises(
        ConfigurationError
    ) as of_first_starts:  # the second of two that checked the layout before
        keep_identity(asked, folder_store.append, identity(after, 4, {}))
    assert str(of_first_starts.value).removesuffix(" (and 1 more changes)") == str(refused.value)
    assert str(differences(asked, identity(after, 4, {}))[0]) == f"{said} {_SET_BACK}"
    assert differences(asked, identity(before, 4, {})) == []


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (
            {"tracking": ["tracking"], "orders": ["other"]},
            "sources.orders.topic: the lake was begun with `orders`, and `other`",
        ),
        (
            {"tracking": ["tracking", "web"], "orders": ["orders"]},
            "sources.tracking.topic: the lake was begun with `tracking`, and `tracking, web`",
        ),
        (
            {"tracking": ["tracking"], "carts": ["orders"]},
            "sources: the lake was begun with `tracking, orders`, and `tracking, carts`",
        ),
    ],
)
def test_a_lake_is_looked_at_with_the_sources_and_topics_that_it_was_begun_with(
    folder_store: Store, tmp_path: Path, sources: Mapping[str, list[str]], said: str
) -> None:
    asked, before = folder_store.reader, folder_store.settings
    folder_store.create("journal")
    keep_identity(asked, folder_store.append, identity(before, 4, {}))
    check_layout(asked, Lake(before))
    others = {name: {"topic": topic, "event_time": "ts"} for name, topic in sources.items()}
    with pytest.raises(ConfigurationError) as refused:
        check_layout(asked, Lake(settings_for(tmp_path, sources=others)))
    assert str(refused.value).startswith(f"{said} would make another result")


def test_identity_and_rules_name_everything_that_content_depends_on(tmp_path: Path) -> None:
    schema = tmp_path / "orders.json"
    schema.write_text('{"type": "object", "properties": {"a": {"type": "string"}}}')
    sources = {
        "tracking": {
            "topic": "t",
            "event_time": {"field": "meta.ts", "unit": "us"},
            "tombstone": "skip",
        },
        "orders": {
            "topic": "o",
            "event_time": {"field": "at"},
            "schema": str(schema),
            "heartbeat": {"field": "x", "equals": 1},
        },
    }
    settings = settings_for(tmp_path, sources=sources)
    facts, rules = identity(settings, 4, {"o": "id-o"}), settings.rules()
    assert facts["partitions"] == "4"
    assert facts["sources.orders.topic"] == "o (id-o)"
    assert facts["sources.tracking.topic"] == "t (missing)"
    assert rules["sources.orders.heartbeat"] == {"field": "x", "equals": 1}
    assert rules["sources.tracking.schema"] is None
    assert rules["sources.tracking.event_time"] == {"field": "meta.ts", "unit": "us"}
    assert (rules["sources.orders.event_time"], rules["sources.tracking.tombstone"]) == (
        "at",
        "skip",
    ), "ms is the unit anyway"
    assert settings.before_epochs().under(rules).rules() == rules
    of_earlier = {name: rule for name, rule in rules.items() if not name.endswith(".tombstone")}
    found = settings.before_epochs().under(of_earlier).rules()
    assert found["sources.tracking.tombstone"] == "quarantine", (
        "rules that were kept before there was a choice"
    )
    schema.write_text('{"properties":   {"a": {"type": "string"}}, "type": "object"}')
    same = settings_for(tmp_path, sources=sources)
    assert changes(Epochs([Epoch(0, 0, settings)]), same) == {}, "what a schema says counts"


@pytest.mark.parametrize("now", [True, 1.0])
def test_a_rule_or_schema_that_differs_in_type_alone_is_another_one(
    tmp_path: Path, now: Any
) -> None:
    def settings(value: Any) -> Settings:
        schema = tmp_path / "orders.json"
        schema.write_text(json.dumps({"type": "object", "properties": {"a": {"enum": [value]}}}))
        source = {
            "topic": "o",
            "event_time": "at",
            "schema": str(schema),
            "where": {"field": "x", "equals": value},
        }
        return settings_for(
            tmp_path, sources={"tracking": {"topic": "t", "event_time": "at"}, "orders": source}
        )

    assert set(changes(Epochs([Epoch(0, 0, settings(1))]), settings(now))) == {
        "sources.orders.schema",
        "sources.orders.where",
    }


def test_a_lake_that_is_new_or_of_this_layout_is_not_refused(either_store: Store) -> None:
    check_layout(either_store.reader, either_store.lake)
    either_store.create("silver")
    check_layout(either_store.reader, either_store.lake)


@pytest.mark.promise("C13")
@pytest.mark.parametrize("layout", [None, *range(1, tables.LAYOUT_VERSION)])
def test_a_lake_of_an_earlier_layout_is_refused_and_told_how_to_go_on(
    folder_store: Store, layout: int | None
) -> None:
    create_silver(folder_store, layout)
    with pytest.raises(
        ConfigurationError,
        match=r"earlier version of Watersmeet.*an empty place.*`kafka\.start: sink`",
    ):
        check_layout(folder_store.reader, folder_store.lake)


def create_silver(store: Store, layout: int | str | None) -> None:
    """Create silver with another number of its layout, or without one."""
    silver = store.lake.layout["silver"]
    said = {tables.LAYOUT: None if layout is None else str(layout)}
    properties = {
        name: value for name, value in {**silver.properties, **said}.items() if value is not None
    }
    store.lake.layout["silver"] = replace(silver, properties=properties)
    store.create("silver")


@pytest.mark.promise("N21")
@pytest.mark.fault("commits")
@pytest.mark.parametrize("either_store", [SPARK_CATALOG], indirect=True)
def test_a_property_that_anybody_may_set_says_nothing_of_the_layout(either_store: Store) -> None:
    silver = either_store.lake.layout["silver"]
    touched = {**silver.properties, "delta.enableInCommitTimestamps": "true"}
    either_store.lake.layout["silver"] = tables.Table(
        "silver", silver.schema, silver.partitioned_by, touched
    )
    either_store.create_by_spark("silver")
    check_layout(either_store.reader, either_store.lake)


@pytest.mark.promise("C15")
def test_a_lake_of_a_later_layout_is_refused(either_store: Store) -> None:
    create_silver(either_store, tables.LAYOUT_VERSION + 1)
    with pytest.raises(
        ConfigurationError,
        match=r"has layout 7, .* knows layout 6; use the version that wrote it, or a later",
    ):
        check_layout(either_store.reader, either_store.lake)


def test_a_layout_that_is_no_number_is_refused_with_how_to_put_it_back(
    either_store: Store,
) -> None:
    create_silver(either_store, "six")
    with pytest.raises(
        ConfigurationError,
        match=r"silver has watersmeet.layout=six, .* SET TBLPROPERTIES \('watersmeet.layout' = '6'",
    ):
        check_layout(either_store.reader, either_store.lake)


# -- decisions


def test_decisions_without_end_are_read_a_piece_at_a_time(
    either_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the pieces, they come in the same order, each with the times of all its tenants."""
    either_store.create("silver")
    rng = random.Random(7)
    rows, expected = [], list[Decided]()
    for p in range(3):
        for source in ("tracking", "orders"):
            after, time = -1, 100
            for _ in range(25):
                after, time = after + rng.choice([0, 0, 0, 5]), time + rng.choice([1, 70])
                tenants = tuple((f"t{n}", time - n) for n in range(rng.choice([0, 1, 3])))
                decided = tp_of(source, p), IdleDecision(after, time, tenants)
                rows.append(decision_rows([decided], 10_000 + time, 9, 4))
                expected.append(decided)
    either_store.append_outcomes("idle", pa.concat_tables(rows))
    reader, generation = either_store.reader, Generation(4, 0, {}, {})
    read, sizes = reader.rows, list[int]()

    def sized(*args: Any, **options: Any) -> pa.Table:
        found = read(*args, **options)
        sizes.append(found.num_rows)
        return found

    monkeypatch.setattr(reader, "rows", sized)
    for limit in (20, 10_000):
        monkeypatch.setattr("watersmeet.lake.progress.PIECE_ROWS", limit)
        found = [*read_decisions(reader, generation)]
        assert sorted(found, key=itemgetter(0)) == sorted(expected, key=itemgetter(0))
        assert max(sizes) <= limit
        assert sum(sizes) == sum(map(len, rows))
        sizes.clear()
    lasts = {tp: (each.after_offset, each.event_time) for tp, each in expected}
    assert {tp: each[:2] for tp, each in last_decisions(reader, generation).items()} == lasts


def test_decisions_come_back_in_their_order(either_store: Store) -> None:
    either_store.create("silver")
    tracking, orders = tp_of("tracking", 3), tp_of("orders", 0)
    first, second = (tracking, IdleDecision(-1, 50)), (tracking, IdleDecision(7, 60))
    either_store.append_outcomes("idle", decision_rows([second, first], 1000, 5, 0))
    either_store.append_outcomes(
        "idle", decision_rows([(orders, IdleDecision(7, 55))], 2000, None, 1)
    )
    assert [*read_decisions(either_store.reader, Generation(0, 0, {}, {}))] == [first, second]
    assert [*read_decisions(either_store.reader, Generation(1, 7, {}, {}))] == [
        (orders, IdleDecision(7, 55))
    ]
    topics = (
        either_store.reader.summary("idle_heartbeats", ["topic"], {"n": ("count", "*")})
        .sort_by("topic")
        .to_pylist()
    )
    assert topics == [{"topic": "orders", "n": 1}, {"topic": "tracking", "n": 2}]


# -- maintenance


@dataclass
class Kept:
    """An engine that notes what it is told; the table's properties are real."""

    lake: Lake
    reader: TableReader
    done: list[tuple[str, str]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def compact(self, table: str, file_bytes: int) -> None:
        self.done.append(("compact", table))
        self.sizes.append(file_bytes)

    def purge(self, table: str) -> None:
        self.done.append(("purge", table))

    def vacuum(self, table: str) -> int:
        self.done.append(("vacuum", table))
        return 3

    def set_properties(self, table: str, properties: Mapping[str, str]) -> None:
        assert properties == self.lake.layout[table].properties
        self.done.append(("properties", table))


def test_tables_are_compacted_after_so_many_commits_and_vacuumed_after_hours(
    folder_store: Store,
) -> None:
    folder_store.create("silver")
    for _ in range(FEW_FILES + 1):
        folder_store.add("silver", (0, "k", "late"))
    kept, now = Kept(folder_store.lake, folder_store.reader), [0.0]
    maintenance = Maintenance(kept, ["silver"], every=3, now_s=lambda: now[0])  # type: ignore[arg-type]
    for _ in range(5):
        maintenance.after_commit()
    assert kept.done == [("compact", "silver")]
    now[0] = VACUUM_EVERY_S + 1
    maintenance.after_commit()
    assert kept.done[1:] == [("compact", "silver"), ("purge", "silver"), ("vacuum", "silver")]
    for _ in range(3):
        maintenance.after_commit()
    assert kept.done[4:] == [("compact", "silver")]


def test_what_is_gathered_is_rewritten_seldom(folder_store: Store) -> None:
    folder_store.create("silver")
    for _ in range(FEW_FILES + 1):
        folder_store.add("silver", (0, "k", "late"))
    kept = Kept(folder_store.lake, folder_store.reader)
    maintenance = Maintenance(kept, ["silver"], every=2)  # type: ignore[arg-type]
    for _ in range(2 * 64):
        maintenance.after_commit()
    assert kept.sizes[63] == FILE_BYTES
    assert kept.sizes[7:63:8] == [FILE_BYTES // 8] * 7
    assert {size for n, size in enumerate(kept.sizes) if n % 8 != 7} == {FILE_BYTES // 64}
    assert len(kept.sizes) == 64


def test_maintenance_tells_files_and_gives_the_table_the_properties_of_the_configuration(
    folder_store: Store,
) -> None:
    folder_store.create("silver")
    folder_store.add("silver", (0, "k", "late"))
    kept = Kept(folder_store.lake, folder_store.reader)
    told = {"table": "silver", "files_before": 1, "files": 1, "old_files_removed": 3}
    assert maintain(kept, ["silver"]) == [told]  # type: ignore[arg-type]
    assert kept.done == [("purge", "silver"), ("vacuum", "silver")], "few files stay as they are"
    for _ in range(FEW_FILES):
        folder_store.add("silver", (0, "k", "late"))
    longer = Lake(folder_store.settings.model_copy(update={"retention_ms": 30 * 86_400_000}))
    kept = Kept(longer, folder_store.reader)
    maintain(kept, ["silver"])  # type: ignore[arg-type]
    assert kept.done == [(step, "silver") for step in ("compact", "properties", "purge", "vacuum")]


# -- small files


@pytest.mark.parametrize("scheme", ["", "file:", "file://"])
def test_a_small_file_is_written_read_and_deleted(scheme: str, tmp_path: Path) -> None:
    files = Files({})
    folder = f"{scheme}{tmp_path}/it's a %20 `folder` é"
    assert files.read_text(f"{folder}/a/b") is None
    files.delete(f"{folder}/a/b")
    for text in ("one", "", "é\nmore"):
        files.write_text(f"{folder}/a/b", text)
        assert files.read_text(f"{folder}/a/b") == text
    assert (tmp_path / "it's a %20 `folder` é" / "a" / "b").read_text() == "é\nmore"
    assert files.exists(f"{folder}/a")
    assert files.has_file(f"{folder}/a/b")
    assert not files.has_file(f"{folder}/a")
    files.write_text(f"{folder}/a/c/d", "x")
    files.delete(f"{folder}/a/b")
    assert files.read_text(f"{folder}/a/b") is None
    files.delete(f"{folder}/a")
    assert not files.exists(f"{folder}/a")


def test_a_file_system_that_needs_spark_is_refused_in_one_sentence() -> None:
    for address in ("dbfs:/lake/_leases/1", "hdfs://name/lake/_leases/1"):
        with pytest.raises(
            ConfigurationError,
            match=r"cannot be opened without Spark; give `checkpoints` as a folder",
        ):
            Files({}).read_text(address)


def test_a_saved_state_has_the_form_that_this_layout_has(tmp_path: Path) -> None:
    idle = {tp_of("orders", 1): [IdleDecision(7, -(2**63), (("a", 5),))]}
    rules = Rules(Window(1_000), {1: 7}, {1: 8}, 9, {(1, "ä"): -(2**63)}, {1: 11})
    cuts = {tp_of("tracking", 1): Cut(3, 9)}
    state = State(13, {}, {1: 9}, rules, cuts=cuts, idle=idle, generation=2)
    schema = Lake(settings_for(tmp_path)).schema(tables.BASES)
    [row] = base_rows(state, 4, schema)
    [value] = row["value"].to_pylist()
    assert json.loads(value) == {
        "cuts": [["tracking", "tracking", 1, 3, 9]],
        "idle": [["orders", "orders", 1, [[7, -(2**63), [["a", 5]]]]]],
        "horizons": [[1, 7]],
        "epoch_start": [[1, 8]],
        "since": [[1, 11]],
        "tenant_horizons": [[1, "ä", -(2**63)]],
    }
