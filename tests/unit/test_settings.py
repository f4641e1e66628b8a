# ruff: noqa: E501 (tables of cases read best with one line a case)
from __future__ import annotations

import copy
import pickle
import re
import time
import traceback
from collections.abc import Mapping
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from pydantic import ValidationError

from tests.support.configurations import SMALLEST
from watersmeet.configuration.sources import Equality
from watersmeet.configuration.values import parse_duration
from watersmeet.core.window import Window
from watersmeet.errors import (
    ConfigurationError,
    RegistryAccessError,
    RegistryUnreachableError,
    UnknownWriterSchemaError,
)
from watersmeet.settings import (
    CatalogLake,
    KafkaSettings,
    MergeSettings,
    PublishSettings,
    QualitySettings,
    Settings,
    StartOffsets,
    StartTimestamp,
    load_settings,
)

pytestmark = pytest.mark.promise("C16")


SECRET = "hunter2!secret"
ABSENT: Any = object()


def changed(*changes: tuple[str, Any]) -> dict[str, Any]:
    """The smallest configuration with other values at slashed paths (ABSENT takes one away)."""
    config = copy.deepcopy(SMALLEST)
    for path, value in changes:
        *parents, last = path.split("/")
        part = config
        for name in parents:
            part = part.setdefault(name, {})
        if value is ABSENT:
            del part[last]
        else:
            part[last] = value
    return config


def load(
    folder: Path, config: dict[str, Any] | str, environ: Mapping[str, str] | None = None
) -> Settings:
    file = folder / "watersmeet.yml"
    file.write_text(config if isinstance(config, str) else yaml.safe_dump(config, sort_keys=False))
    return load_settings(file, environ or {})


def refusal(
    folder: Path, config: dict[str, Any] | str, environ: Mapping[str, str] | None = None
) -> str:
    """The sentence after the file's name; it is one line, its advice is a fact of its own, and
    nothing in the traceback shows the secret."""
    with pytest.raises(ConfigurationError) as caught:
        load(folder, config, environ)
    message, start = str(caught.value), f"{folder / 'watersmeet.yml'}: "
    assert message.startswith(start)
    assert "; " not in caught.value.problem.what
    assert "\n" not in message
    assert "{" not in message.replace("${", "").replace("`{", "")
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert SECRET not in repr((caught.value.__cause__, caught.value.__context__))
    return message[len(start) :]


# -- what is taken


def test_smallest_configuration_gets_the_contracts_defaults(tmp_path: Path) -> None:
    settings = load(tmp_path, SMALLEST)
    assert settings.lake == str(tmp_path / "lake")
    assert settings.checkpoints == str(tmp_path / "lake" / "_checkpoints")
    assert settings.kafka.options == {}
    assert (settings.kafka.start, settings.kafka.on_data_loss) == ("earliest", "stop")
    assert (settings.kafka.max_offsets_per_batch, settings.kafka.quarantine_limit) == (500_000, 0.5)
    assert settings.merge == MergeSettings(
        timeout_ms=1_800_000, max_future_ms=86_400_000, max_records_per_batch=1_000_000
    )
    assert settings.merge.idle_after_ms is None
    assert settings.retention_ms == 7 * 86_400_000
    publish = settings.publish
    assert (publish.valid, publish.value, publish.max_bytes) == ("true", None, 8 * 1024 * 1024)
    assert publish.delivery == "exactly_once"
    tracking = settings.sources["tracking"]
    assert (tracking.format, tracking.schema_file, tracking.key, tracking.heartbeat) == (
        "json",
        None,
        None,
        None,
    )


def test_suites_are_files_and_are_read_with_the_configuration(tmp_path: Path) -> None:
    assert load(tmp_path, SMALLEST).quality == QualitySettings(suites=[], every=None)
    (tmp_path / "mine.json").write_text("{}")
    quality = load(tmp_path, changed(("quality", {"suites": ["mine.json"], "every": 100}))).quality
    assert [(kept.path, kept.text) for kept in quality.suites] == [(tmp_path / "mine.json", b"{}")]
    assert quality.every == 100


def test_sources_keep_their_order(tmp_path: Path) -> None:
    third = {"topic": "a", "event_time": "ts"}
    assert list(load(tmp_path, changed(("sources/a", third))).sources) == [
        "tracking",
        "orders",
        "a",
    ]


def test_settings_are_frozen_and_travel(tmp_path: Path) -> None:
    settings = load(tmp_path, SMALLEST)
    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(ValueError, match="frozen"):
        settings.name = "other"


def test_parts_can_be_built_in_python_by_their_attributes() -> None:
    assert MergeSettings(timeout_ms=5).timeout_ms == 5
    assert CatalogLake(catalog="main", schema_name="shop").schema_name == "shop"
    assert MergeSettings(timeout_ms=5, idle_after_ms=7).idle_after_ms == 7
    assert PublishSettings(topic="a", delivery="at_most_once").delivery == "at_most_once"


@pytest.mark.parametrize("start", ["sink", StartTimestamp(17), StartOffsets({"a": {0: 17}})])
def test_a_start_can_be_built_in_python(start: Any) -> None:
    kafka = KafkaSettings(bootstrap_servers="h:1", start=start, quarantine_limit=0.1)
    assert (kafka.start, kafka.quarantine_limit) == (start, 0.1)


@pytest.mark.parametrize(
    ("lake", "expected"),
    [
        ("lake", "{folder}/lake"),
        ("./a/../lake/", "{folder}/lake"),
        ("/data/lake", "/data/lake"),
        ("s3://bucket/lake/", "s3://bucket/lake"),
        (
            "abfss://c@account.dfs.core.windows.net/lake",
            "abfss://c@account.dfs.core.windows.net/lake",
        ),
        ("dbfs:/lake", "dbfs:/lake"),
        ("file:/data/lake", "file:/data/lake"),
        ("file:///data/lake", "file:///data/lake"),
        ("hdfs:///lake", "hdfs:///lake"),
        ("HDFS://name:8020/lake", "HDFS://name:8020/lake"),
    ],
)
def test_lake_is_absolute_or_a_uri_and_holds_its_checkpoints(
    tmp_path: Path, lake: str, expected: str
) -> None:
    settings = load(tmp_path, changed(("lake", lake)))
    assert settings.lake == expected.format(folder=tmp_path)
    assert settings.checkpoints == f"{settings.lake}/_checkpoints"


def test_a_lake_that_is_refused_makes_its_checkpoints_no_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="a URI without an absolute path") as refused:
        load(tmp_path, changed(("lake", "file:./x")))
    assert refused.value.more == []


def test_relative_paths_are_relative_to_the_configuration_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf" / "schemas").mkdir(parents=True)
    (tmp_path / "conf" / "schemas" / "t.json").write_text("{}")
    config = changed(("checkpoints", "../state"), ("sources/tracking/schema", "schemas/t.json"))
    (tmp_path / "conf" / "w.yml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    settings = load_settings(Path("conf/w.yml"), {})
    assert settings.lake == str(tmp_path / "conf" / "lake")
    assert settings.checkpoints == str(tmp_path / "state")
    schema = settings.sources["tracking"].schema_file
    assert schema is not None
    assert schema.path == tmp_path / "conf" / "schemas" / "t.json"


def test_catalog_lake_is_named_by_catalog_and_schema(tmp_path: Path) -> None:
    config = changed(
        ("lake", {"catalog": "main", "schema": "shop"}), ("checkpoints", "dbfs:/state")
    )
    settings = load(tmp_path, config)
    assert settings.lake == CatalogLake(catalog="main", schema_name="shop")
    assert settings.checkpoints == "dbfs:/state"


@pytest.mark.parametrize(
    ("equals", "kind"),
    [("heartbeat", str), ("true", str), (True, bool), (1, int), (1.0, float), ("1", str)],
)
def test_heartbeat_keeps_the_type_of_what_it_equals(
    tmp_path: Path, equals: Any, kind: type
) -> None:
    settings = load(
        tmp_path, changed(("sources/orders/heartbeat", {"field": "meta.type", "equals": equals}))
    )
    heartbeat = settings.sources["orders"].heartbeat
    assert isinstance(heartbeat, Equality)
    assert (heartbeat.field, heartbeat.equals, type(heartbeat.equals)) == (
        "meta.type",
        equals,
        kind,
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (200, 200),
        (999_000_000, 999_000_000),
        ("8MiB", 8_388_608),
        ("1KiB", 1024),
        ("2kB", 2000),
        ("3MB", 3_000_000),
    ],
)
def test_sizes_are_in_bytes(tmp_path: Path, given: Any, expected: int) -> None:
    assert load(tmp_path, changed(("publish/max_bytes", given))).publish.max_bytes == expected


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [
        ("0s", 0),
        ("500ms", 500),
        ("30s", 30_000),
        ("30m", 1_800_000),
        ("12h", 43_200_000),
        ("7d", 604_800_000),
    ],
)
def test_durations_are_in_ms(text: str, expected_ms: int) -> None:
    assert parse_duration(text) == expected_ms


@pytest.mark.parametrize(
    "text",
    ["", "30", "m", "1.5h", "-1s", "30 m", "30M", "1w", "٣s", "30m ", "9" * 30],
)
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(
        ConfigurationError, match="is not a duration; write a whole number and ms, s, m, h or d"
    ):
        parse_duration(text)


@pytest.mark.parametrize(
    "text", ["2932897d", "10675199d", "253402300800000ms", f"{'9' * 19}ms", f"{'9' * 5_000}d"]
)
def test_a_duration_that_is_too_long_is_refused_with_the_longest(tmp_path: Path, text: str) -> None:
    assert parse_duration("2932896d") == 2_932_896 * 86_400_000
    sentence = "is too long; it must be `2932896d` or shorter"
    with pytest.raises(ConfigurationError, match=f"^`{text}` {sentence}$"):
        parse_duration(text)
    said = refusal(tmp_path, changed(("retention", "${X}")), {"X": text})
    assert said == f"retention: the value of ${{X}} {sentence}"
    assert sentence in refusal(tmp_path, changed(("merge/timeout", text)))


def test_kafka_options_become_text(tmp_path: Path) -> None:
    options = {
        "security.protocol": "SSL",
        "enable.ssl.certificate.verification": False,
        "socket.timeout.ms": 5,
        "a": 0.5,
    }
    assert load(tmp_path, changed(("kafka/options", options))).kafka.options == {
        "security.protocol": "SSL",
        "enable.ssl.certificate.verification": "false",
        "socket.timeout.ms": "5",
        "a": "0.5",
    }


# -- the engine, and how it gets to the lake


def test_the_engine_is_spark_and_finds_its_own_way_by_default(tmp_path: Path) -> None:
    settings = load(tmp_path, SMALLEST)
    assert (settings.engine, settings.storage, settings.spark) == ("spark", {}, {})
    assert load(tmp_path, changed(("engine", "spark"))).engine == "spark"


def test_options_of_storage_and_spark_become_text(tmp_path: Path) -> None:
    config = changed(
        ("storage", {"AWS_REGION": "eu-west-1", "allow_http": True}),
        ("spark", {"spark.sql.shuffle.partitions": 4}),
    )
    settings = load(tmp_path, config)
    assert settings.storage == {"AWS_REGION": "eu-west-1", "allow_http": "true"}
    assert settings.spark == {"spark.sql.shuffle.partitions": "4"}


@pytest.mark.parametrize("field", ["lake", "checkpoints"])
@pytest.mark.parametrize(
    "uri",
    [
        f"s3://key:{SECRET}@bucket/lake",
        f"s3://{SECRET}@bucket/lake",
        f"s3://bucket/lake?token={SECRET}",
        f"abfss://c:{SECRET}@account.dfs.core.windows.net/lake",
        f"abfss://c@account.dfs.core.windows.net/lake?sig={SECRET}",
        f"hdfs://name:{SECRET}@host",
    ],
)
def test_credentials_in_the_uri_of_a_location_are_refused_without_showing_them(
    tmp_path: Path, field: str, uri: str
) -> None:
    said = refusal(tmp_path, changed((field, uri)))
    assert f"{field} has a user, a password or a query in its URI" in said
    assert SECRET not in said


def test_options_of_storage_and_spark_are_never_shown(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        changed(
            ("storage", {"AWS_SECRET_ACCESS_KEY": SECRET}), ("spark", {"spark.hadoop.key": SECRET})
        ),
    )
    assert SECRET not in repr(settings)
    assert SECRET not in str(settings)
    assert "AWS_SECRET_ACCESS_KEY" in repr(settings)
    assert SECRET not in refusal(tmp_path, changed(("storage", {"AWS_REGION": [SECRET]})))


def test_the_digest_does_not_depend_on_what_runs_the_merge_or_how_it_gets_in(
    tmp_path: Path,
) -> None:
    before = load(tmp_path, SMALLEST).digest
    elsewhere = changed(
        ("engine", "spark"),
        ("storage", {"a": "b"}),
        ("spark", {"c": "d"}),
        ("lake", "s3://elsewhere"),
    )
    assert load(tmp_path, elsewhere).digest == before
    assert load(tmp_path, changed(("merge/timeout", "17m"))).digest != before


def test_a_value_is_text_or_the_struct_of_its_schema(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"type": "object", "properties": {"n": {"type": "integer"}}}')
    sources = load(tmp_path, changed(("sources/tracking/schema", "t.json"))).sources
    assert sources["tracking"].value_type == pa.struct([("n", pa.int64())])
    assert sources["orders"].value_type == pa.string()


# -- where reading begins


@pytest.mark.parametrize("word", ["earliest", "latest", "sink"])
def test_a_start_may_be_a_word(tmp_path: Path, word: str) -> None:
    assert load(tmp_path, changed(("kafka/start", word))).kafka.start == word


def start(folder: Path, text: str, environ: Mapping[str, str] | None = None) -> Any:
    """`kafka.start` as YAML itself reads it: a time in quotes is text, without them it is a
    time."""
    return load(
        folder, yaml.safe_dump(changed(("kafka/start", "HERE"))).replace("HERE", text), environ
    ).kafka.start


@pytest.mark.parametrize(
    ("text", "timestamp_ms"),
    [
        ("2026-01-01T00:00:00Z", 1_767_225_600_000),
        ("2026-01-01T01:30:00+01:30", 1_767_225_600_000),
        ("2026-01-01 00:00:00", 1_767_225_600_000),
        ("2026-01-01T00:00:00.1239Z", 1_767_225_600_123),
        ("2026-01-01", 1_767_225_600_000),
        ('"2026-01-01"', 1_767_225_600_000),
        ('"2026-01-01T00:00"', 1_767_225_600_000),
        ('"20260101T010000+01"', 1_767_225_600_000),
        ('"2026-01-01T00:00:00,5-00:30"', 1_767_227_400_500),
        ("1767225600000", 1_767_225_600_000),
        ("1971-01-01", 31_536_000_000),
        ("9999-12-31T23:59:59.999Z", 253_402_300_799_999),
        ("253402300799999", 253_402_300_799_999),
    ],
)
def test_a_start_may_be_a_time(tmp_path: Path, text: str, timestamp_ms: int) -> None:
    assert start(tmp_path, f"{{timestamp: {text}}}") == StartTimestamp(timestamp_ms)


@pytest.mark.parametrize("time", ["2026-01-01T00:00:00Z", "2026-01-01", "1767225600000"])
def test_a_time_to_start_at_may_come_from_the_environment(tmp_path: Path, time: str) -> None:
    assert start(tmp_path, '{timestamp: "${SINCE}"}', {"SINCE": time}) == StartTimestamp(
        1_767_225_600_000
    )


@pytest.mark.parametrize(
    ("text", "offsets"),
    [
        ("{tracking: {0: 17}}", {"tracking": {0: 17}}),
        ('{tracking: {"0": 17, 1: 0}, orders: {12: 9223372036854775807}}', {"tracking": {0: 17, 1: 0}, "orders": {12: 2**63 - 1}}),
        ('{orders: {2147483647: "${OFFSET}"}}', {"orders": {2**31 - 1: 5}}),
    ],
)  # fmt: skip
def test_a_start_may_be_offsets_of_sources(
    tmp_path: Path, text: str, offsets: dict[str, dict[int, int]]
) -> None:
    assert start(tmp_path, f"{{offsets: {text}}}", {"OFFSET": "5"}) == StartOffsets(offsets)


@pytest.mark.parametrize(
    ("begin", "text"),
    [
        (StartTimestamp(31_536_000_000), "{timestamp: 1971-01-01T00:00:00.000Z}"),
        (StartTimestamp(1_767_225_600_000), "{timestamp: 2026-01-01T00:00:00.000Z}"),
        (StartTimestamp(253_402_300_799_999), "{timestamp: 9999-12-31T23:59:59.999Z}"),
        (StartOffsets({"tracking": {0: 17}}), "{offsets: {tracking: {0: 17}}}"),
        (StartOffsets({"tracking": {10: 1, 2: 17}, "orders": {0: 0}}), "{offsets: {tracking: {2: "
                                                                       "17, 10: 1}, orders: {0: "
                                                                       "0}}}"),
    ],
)  # fmt: skip
def test_a_start_reads_as_in_yaml_and_is_read_again(tmp_path: Path, begin: Any, text: str) -> None:
    assert str(begin) == text
    assert start(tmp_path, text) == begin


@pytest.mark.parametrize("first", ["0", '"0"', "0x0"])
@pytest.mark.parametrize("second", ["00", '"00"', '"000"', "-0"])
def test_a_partition_to_start_at_is_named_once_however_it_is_spelled(
    tmp_path: Path, first: str, second: str
) -> None:
    config = yaml.safe_dump(changed(("kafka/start", "HERE")))
    offsets = f"{{offsets: {{tracking: {{{first}: 1, {second}: 2}}}}}}"
    sentence = refusal(tmp_path, config.replace("HERE", offsets))
    repeated = r"field `kafka\.start\.offsets\.tracking\.-?0+` is repeated( in line \d+)?; keep one"
    assert re.fullmatch(repeated, sentence)


def test_settings_that_begin_elsewhere_travel(tmp_path: Path) -> None:
    for begin in ({"timestamp": 10**12}, {"offsets": {"orders": {0: 5}}}):
        settings = load(tmp_path, changed(("kafka/start", begin)))
        assert pickle.loads(pickle.dumps(settings)) == settings
        with pytest.raises(ValidationError):
            settings.kafka.start = begin  # type: ignore[assignment]


# -- choices, shares and times


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("kafka/on_data_loss", ["stop", "continue"]),
        ("publish/delivery", ["exactly_once", "at_least_once", "at_most_once"]),
    ],
)
def test_each_choice_is_taken(tmp_path: Path, path: str, words: list[str]) -> None:
    part, field = path.split("/")
    for word in words:
        assert getattr(getattr(load(tmp_path, changed((path, word))), part), field) == word
        assert (
            getattr(
                getattr(load(tmp_path, changed((path, "${WORD}")), {"WORD": word}), part), field
            )
            == word
        )


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("50%", 0.5),
        ("100%", 1.0),
        ("100.0%", 1.0),
        ("0.5%", 0.005),
        ("1%", 0.01),
        ("33.25%", 0.3325),
    ],
)
def test_a_percentage_is_a_share_of_one(tmp_path: Path, text: str, share: float) -> None:
    settings = load(tmp_path, changed(("kafka/quarantine_limit", text)))
    assert settings.kafka.quarantine_limit == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize(("given", "idle_after_ms"), [(None, None), ("1ms", 1), ("10m", 600_000)])
def test_the_idle_policy_is_off_or_begins_after_a_while(
    tmp_path: Path, given: str | None, idle_after_ms: int | None
) -> None:
    assert load(tmp_path, changed(("merge/idle_after", given))).merge.idle_after_ms == idle_after_ms


@pytest.mark.parametrize(
    ("given", "retention_ms"), [("1h", 3_600_000), ("60m", 3_600_000), ("30d", 2_592_000_000)]
)
def test_old_versions_are_kept_for_an_hour_or_longer(
    tmp_path: Path, given: str, retention_ms: int
) -> None:
    assert load(tmp_path, changed(("retention", given))).retention_ms == retention_ms


# -- the environment, and what is secret


def test_variables_are_taken_from_the_environment_once(tmp_path: Path) -> None:
    environ = {"NAME": "shop", "STAGE": "dev", "BATCH": "17", "PASSWORD": "${STAGE}$NAME"}
    config = changed(
        ("name", "${NAME}-${STAGE}"),
        ("kafka/max_offsets_per_batch", "${BATCH}"),
        ("kafka/options", {"sasl.password": "${PASSWORD}"}),
        ("retention", "${BATCH}d"),
    )
    settings = load(tmp_path, config, environ)
    assert settings.name == "shop-dev"
    assert settings.kafka.max_offsets_per_batch == 17
    assert settings.kafka.options == {"sasl.password": "${STAGE}$NAME"}
    assert settings.retention_ms == 17 * 86_400_000
    assert type(settings.name) is type(settings.kafka.options["sasl.password"]) is str


def test_process_environment_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATERSMEET_TEST_NAME", "from-outside")
    (tmp_path / "w.yml").write_text(yaml.safe_dump(changed(("name", "${WATERSMEET_TEST_NAME}"))))
    assert load_settings(tmp_path / "w.yml").name == "from-outside"


def test_an_unset_variable_is_named_with_its_place(tmp_path: Path) -> None:
    sentence = refusal(
        tmp_path, changed(("kafka/options", {"sasl.password": f"{SECRET}${{KAFKA_PASSWORD}}"}))
    )
    assert sentence.startswith(
        "kafka.options.sasl.password: the environment variable KAFKA_PASSWORD is not set"
    )


@pytest.mark.promise("C61")
def test_no_secret_of_the_environment_becomes_a_rule_which_the_lake_keeps(tmp_path: Path) -> None:
    lake = load(tmp_path, changed(("merge/tenant", "a"), ("merge/tenant_max_lag", "1h")))
    kept = {*lake.rules(), "merge.tenant", "sources.orders.tenant", "merge.window.gap"}
    kept |= {"sources.orders.heartbeat.equals", "publish.corrections.topic"}
    for field in sorted(kept):
        config = changed((field.replace(".", "/"), "x${TOKEN}"))
        sentence = refusal(tmp_path, config, {"TOKEN": SECRET})
        if field.endswith(".schema"):  # the name of a file, which no lake keeps
            assert "is not a file that can be read" in sentence
        else:
            assert sentence.startswith(
                f"{field} must not have `${{`: a rule is kept with the lake for ever"
            ), field


@pytest.mark.promise("C61")
def test_a_url_is_shown_as_scheme_and_host_alone(tmp_path: Path) -> None:
    url = f"https://host:8081/{SECRET}?token={SECRET}"
    config = changed(("sources/orders/registry", {"url": "${URL}"}), ("lineage", {"url": "${URL}"}))
    for name in ("format", "schema"):
        config["sources"]["orders"][name] = {"format": "avro", "schema": "o.avsc"}[name]
    (tmp_path / "o.avsc").write_text(
        '{"type": "record", "name": "O", "fields": [{"name": "ts", "type": "long"}]}'
    )
    settings = load(tmp_path, config, {"URL": url})
    assert SECRET not in repr(settings)
    for error in (
        RegistryUnreachableError(url, "x"),
        UnknownWriterSchemaError(url, 7),
        RegistryAccessError(url, "x"),
    ):
        assert SECRET not in repr(error)
        assert SECRET not in repr(vars(error))
        assert "https://host:8081" in str(error)


@pytest.mark.parametrize(
    "value", [SECRET + "${", SECRET + "${}", "${a b}" + SECRET, "${" + SECRET + "}"]
)
def test_a_malformed_variable_is_refused_unshown(tmp_path: Path, value: str) -> None:
    sentence = refusal(tmp_path, changed(("kafka/options", {"sasl.password": value})))
    assert sentence.startswith("kafka.options.sasl.password: `${` must be followed by the name")


@pytest.mark.parametrize(
    "path",
    [
        "name", "lake", "kafka", "kafka/bootstrap_servers", "kafka/options", "kafka/start", "kafka/on_data_loss",
        "kafka/start/timestamp", "kafka/start/offsets", "kafka/start/offsets/orders", "kafka/start/offsets/orders/0",
        "kafka/quarantine_limit", "retention",
        "kafka/max_offsets_per_batch", "sources", "sources/orders", "sources/orders/topic", "sources/orders/format",
        "sources/orders/schema", "sources/orders/key", "sources/orders/event_time", "sources/orders/heartbeat",
        "sources/orders/heartbeat/field", "merge", "merge/timeout", "merge/max_future", "merge/max_records_per_batch",
        "merge/idle_after", "publish/topic", "publish/max_bytes", "publish/delivery", "lake/catalog", "lake/schema",
    ],
)  # fmt: skip
def test_what_a_variable_holds_is_never_shown(tmp_path: Path, path: str) -> None:
    around = {
        "lake": {"catalog": "c", "schema": "s"},
        "sources/orders/heartbeat": {"field": "a", "equals": "b"},
    }
    parent = path.rpartition("/")[0]
    config = changed(*[(parent, around[parent])] if parent in around else [], (path, "${X}"))
    assert path.replace("/", ".") in refusal(tmp_path, config, {"X": f"\0{SECRET}..\n /`."})


@pytest.mark.parametrize(
    "options",
    [
        SECRET,
        [SECRET],
        {"sasl.password": [SECRET]},
        {"sasl.password": {"value": SECRET}},
        {"kafka.sasl.password": SECRET},
        {"group.id": SECRET},
        {f"sasl.password={SECRET}": None},
    ],
)
def test_values_of_kafka_options_are_never_shown(tmp_path: Path, options: Any) -> None:
    assert refusal(tmp_path, changed(("kafka/options", options))).startswith("kafka.options")


def test_a_secret_without_quotes_is_not_shown_by_a_yaml_error(tmp_path: Path) -> None:
    for value in (
        f"*{SECRET}",
        f"!{SECRET}",
        f"&{SECRET} &b",
        f'"\\{SECRET}"',
        f"'{SECRET}",
        f"a: {SECRET}: b",
    ):
        config = f"name: shop\nkafka:\n  options:\n    sasl.password: {value}\n"
        assert "is not valid YAML" in refusal(tmp_path, config)


def test_repr_shows_option_names_but_no_values(tmp_path: Path) -> None:
    settings = load(tmp_path, changed(("kafka/options", {"sasl.password": SECRET})))
    for shown in (repr(settings), str(settings), repr(settings.kafka), f"{settings.kafka}"):
        assert "sasl.password" in shown
        assert SECRET not in shown
    assert "9092" in repr(KafkaSettings(bootstrap_servers="h:9092"))


# -- what is refused


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        # unknown and missing fields
        (("merge/timout", "30m"), "unknown field `merge.timout`; did you mean `timeout`?"),
        (("merge/timeout_ms", 5), "unknown field `merge.timeout_ms`; did you mean `timeout`"),
        (("sources/orders/schema_file", "x"), "unknown field `sources.orders.schema_file`; did you "
                                              "mean `schema`"),
        (("sources/orders/heartbeat", {"feild": "a"}), "unknown field "
                                                       "`sources.orders.heartbeat.feild`; did you "
                                                       "mean `field`"),
        (("lake", {"catalogue": "a"}), "unknown field `lake.catalogue`; did you mean `catalog`?"),
        (("colour", "red"), "unknown field `colour`; known here: name, engine, lake, storage, "
                            "spark, checkpoints, durable, kafka, sources, merge, silver, publish"),
        ((1, 2), "unknown field `1`; known here: name"),
        (("name", ABSENT), "required field `name` is missing; add it, such as `name: shop`"),
        (("lake", ABSENT), "required field `lake` is missing"),
        (("kafka", ABSENT), "required field `kafka` is missing"),
        (("kafka", {}), "required field `kafka.bootstrap_servers` is missing; add it, such as"),
        (("sources", ABSENT), "required field `sources` is missing"),
        (("sources/orders/topic", ABSENT), "required field `sources.orders.topic` is missing"),
        (("sources/orders/event_time", ABSENT), "required field `sources.orders.event_time` is "
                                                "missing"),
        (("sources/orders/heartbeat", {"field": "a"}), "required field "
                                                       "`sources.orders.heartbeat.equals` is "
                                                       "missing"),
        (("merge/timeout", ABSENT), "required field `merge.timeout` is missing; add it, such as "
                                    "`timeout: 30m`"),
        (("merge", {"timeout": "30m", "tenant": "org"}), "required field `merge.tenant_max_lag` is "
                                                         "missing where there is a tenant; add it, "
                                                         "such as `tenant_max_lag: 24h`"),
        (("publish", ABSENT), "required field `publish` is missing"),
        (("lake", {"catalog": "main"}), "required field `lake.schema` is missing"),
        (("quality/suite", []), "unknown field `quality.suite`; did you mean `suites`?"),
        # wrong types
        (("quality", []), "quality must be a mapping, not a list"),
        (("quality/suites", "one.json"), "quality.suites must be a list, not text; write one entry "
                                         "a line, each after a dash"),
        (("quality/suites", [5]), "quality.suites.0 must be text, not a number"),
        (("quality/suites", ["a", "none.json"]), "quality.suites.0: `a` is not a file that can be "
                                                 "read"),
        (("quality/every", 0), "quality.every: `0` is not a whole number from 1 to"),
        (("quality/every", "10m"), "quality.every: `10m` is not a whole number from 1 to"),
        (("name", 5), "name must be text, not a number; put text in quotes"),
        (("name", True), "name must be text, not true; put text in quotes"),
        (("name", None), "name must be text, not null"),
        (("durable", 1), "durable: `1` is neither true nor false"),
        (("durable", "true"), "durable: `true` is neither true nor false"),
        (("durable", None), "durable: null is neither true nor false"),
        (("lake", ["a"]), "lake must be text, not a list"),
        (("checkpoints", 5), "checkpoints must be text, not a number"),
        (("kafka", None), "kafka must be a mapping, not null"),
        (("kafka/options", None), "kafka.options must be a mapping, not null"),
        (("kafka/options", {"a": None}), "kafka.options.a must be text, a number, true or false, "
                                         "not null"),
        (("sources", ["tracking", "orders"]), "sources must be a mapping, not a list"),
        (("sources/orders", "orders"), "sources.orders must be a mapping, not text"),
        (("sources/orders/topic", {"a": 1}), "sources.orders.topic must be text, not a mapping"),
        (("sources/orders/schema", 5), "sources.orders.schema must be text, not a number"),
        (("sources/orders/key", 5), "sources.orders.key must be text, not a number"),
        (("sources/orders/heartbeat", "type"), "sources.orders.heartbeat must be a mapping, not "
                                               "text"),
        (("merge", []), "merge must be a mapping, not a list"),
        (("merge/timeout", 30), "merge.timeout: `30` is not a duration"),
        (("merge/max_future", None), "merge.max_future: null is not a duration"),
        (("publish/valid", True), "publish.valid must be text, not true; put text in quotes"),
        (("publish/value", ["a"]), "publish.value must be text, not a list"),
        (("kafka/max_offsets_per_batch", "many"), "kafka.max_offsets_per_batch: `many` is not a "
                                                  "whole number from 1"),
        (("kafka/max_offsets_per_batch", "500"), "kafka.max_offsets_per_batch: `500` is not a "
                                                 "whole number from 1"),
        (("kafka/max_offsets_per_batch", True), "kafka.max_offsets_per_batch: true is not a whole "
                                                "number"),
        (("merge/max_records_per_batch", 1.5), "merge.max_records_per_batch: `1.5` is not a whole "
                                               "number from 1"),
        (("publish/max_bytes", "8 MiB"), "publish.max_bytes: `8 MiB` is not a size in bytes (such "
                                         "as `8MiB`"),
        # wrong values
        (("name", ""), "name must not be empty"),
        (("name", "my shop"), "name: `my shop` is not a name; use letters, digits, `-`, `_` and "
                              "`.`"),
        (("lake", "  "), "lake must not be empty"),
        (("lake", {"catalog": "a.b", "schema": "s"}), "lake.catalog: `a.b` is not a name in a "
                                                      "catalog"),
        (("lake", {"catalog": "a", "schema": "s"}), "`checkpoints` is needed where the lake is a "
                                                    "catalog"),
        (("kafka/bootstrap_servers", "localhost"), "kafka.bootstrap_servers: `localhost` is not a "
                                                   "list of brokers; write host:port"),
        (("kafka/bootstrap_servers", "a:1,,b:2"), "kafka.bootstrap_servers: `a:1,,b:2` is not a "
                                                  "list of brokers"),
        (("kafka/bootstrap_servers", "a:0"), "kafka.bootstrap_servers: `a:0` is not a list of "
                                             "brokers"),
        (("kafka/bootstrap_servers", "a:65536"), "kafka.bootstrap_servers: `a:65536` is not a list "
                                                 "of brokers"),
        (("lake", "file:./x"), "lake: `file:./x` is a URI without an absolute path; write "
                               "`file:///folder` or `s3://bucket/folder`, or a path without a "
                               "scheme"),
        (("lake", "file:x"), "lake: `file:x` is a URI without"),
        (("lake", "file://x/y"), "lake: `file://x/y` is a URI without"),
        (("lake", "s3:/bucket/x"), "lake: `s3:/bucket/x` is a URI without"),
        (("lake", "s3:///x"), "lake: `s3:///x` is a URI without"),
        (("checkpoints", "dbfs:x"), "checkpoints: `dbfs:x` is a URI without"),
        (("lineage", {"file": "file:///x"}), "lineage.file: `file:///x` is a URI; name a file by "
                                             "its path"),
        (("sources/orders/repartition", {"from": "o", "partitions": 100_001}),
         "sources.orders.repartition.partitions: `100001` is not a whole number from 1 to 100000"),
        (("kafka/max_offsets_per_batch", 0), "kafka.max_offsets_per_batch: `0` is not a whole "
                                             "number from 1 to 2147483647"),
        (("merge/max_records_per_batch", 2**31), "merge.max_records_per_batch: `2147483648` is not "
                                                 "a whole number"),
        (("merge/max_records_per_batch", -1), "merge.max_records_per_batch: `-1` is not a whole "
                                              "number"),
        (("merge/timeout", "0s"), "merge.timeout: `0s` is too short; it must be longer than "
                                  "nothing"),
        (("merge/timeout", "half an hour"), "merge.timeout: `half an hour` is not a duration; "
                                            "write a whole number and"),
        (("merge/max_future", "-1s"), "merge.max_future: `-1s` is not a duration"),
        (("merge/window", {"gap": "30m", "max": "12h"}), "`merge` has both `timeout` and `window`; "
                                                         "leave one of them out"),
        (("merge", {"window": {"gap": "30m", "max": "29m"}}), "merge.window.max is shorter than "
                                                              "the gap; give it the length of the "
                                                              "gap at least"),
        (("merge/tenant", ""), "merge.tenant must not be empty"),
        (("merge/tenant", "a..b"), "merge.tenant: `a..b` is not a dotted path; join field names by "
                                   "single dots"),
        (("merge/tenant", ["org"]), "merge.tenant must be text, not a list"),
        (("merge/tenant_max_lag", 0), "merge.tenant_max_lag: `0` is not a duration; write a whole "
                                      "number and ms, s, m, h or d"),
        (("merge/tenant_max_lag", "-1s"), "merge.tenant_max_lag: `-1s` is not a duration"),
        (("merge/tenant_max_lag", "24h"), "merge.tenant_max_lag is for a merge with `tenant` "
                                          "alone; add that, or leave this out"),
        (("merge/tenant_max_lag_ms", 5), "unknown field `merge.tenant_max_lag_ms`; did you mean "
                                         "`tenant_max_lag`"),
        (("sources/orders/tenant", "org"), "sources.orders.tenant is for a merge with "
                                           "`merge.tenant` alone; add that, or leave this out"),
        (("sources/orders/tenant", "org."), "sources.orders.tenant: `org.` is not a dotted path"),
        (("publish/max_bytes", 0), "publish.max_bytes: `0` is not a size in bytes (such as `8MiB`, "
                                   "or a whole number) from 200 to 999000000"),
        (("publish/max_bytes", 8), "publish.max_bytes: `8` is too small, since the headers of a "
                                   "message alone count 200 bytes; write the unit, such as "
                                   "`8MiB`"),
        (("kafka/max_record_bytes", 64), "kafka.max_record_bytes: `64` is too small"),
        (("publish/max_bytes", "8Mib"), "publish.max_bytes: `8Mib` is not a size in bytes"),
        (("publish/max_bytes", "2GiB"), "publish.max_bytes: `2GiB` is not a size"),
        (("publish/max_bytes", "1GB"), "publish.max_bytes: `1GB` is not a size in bytes"),
        (("publish/valid", ""), "publish.valid must not be empty"),
        (("publish/topic", "my topic"), "publish.topic: `my topic` is not a topic name"),
        (("sources/orders/topic", ".."), "sources.orders.topic: `..` is not a topic name"),
        (("sources/orders/event_time", "a..b"), "sources.orders.event_time: `a..b` is not a dotted "
                                                "path"),
        (("sources/orders/event_time", {"unit": "s"}), "required field "
                                                       "`sources.orders.event_time.field` is "
                                                       "missing"),
        (("sources/orders/event_time", {"field": "a..b"}), "sources.orders.event_time.field: "
                                                           "`a..b` is not a dotted path"),
        (("sources/orders/event_time", {"field": "ts", "unit": "sec"}), "sources.orders.event_time.unit: `sec` is not one of"),
        (("sources/orders/tombstone", "ignore"), "sources.orders.tombstone: `ignore` is not one "
                                                 "of"),
        (("sources/orders/key", ".a"), "sources.orders.key: `.a` is not a dotted path"),
        (("sources/orders/heartbeat", {"field": "a", "equals": None}), "heartbeat.equals must be "
                                                                       "text, a number, true or "
                                                                       "false"),
        (("sources/orders/heartbeat", {"field": "a", "equals": float("nan")}), "heartbeat.equals "
                                                                               "must be text, a "
                                                                               "number"),
        (("sources/orders/schema", "gone.json"), "sources.orders.schema: `gone.json` is not a file "
                                                 "that can be read"),
        (("sources/orders/schema", "."), "sources.orders.schema: `.` is not a file that can be "
                                         "read"),
        (("kafka/start", "foo"), "kafka.start: `foo` is not one of the values it may have; use "
                                 "earliest, latest, sink, `{timestamp: ...}` or `{offsets: ...}`"),
        (("kafka/start", {"time": 1}), "kafka.start: `{time: ...}` is not one of the values it may "
                                       "have"),
        (("kafka/start", {}), "kafka.start: `{}` is not one of the values it may have"),
        (("kafka/start", {"timestamp": 1, "offsets": {"orders": {0: 1}}}), "kafka.start: "
                                                                           "`{timestamp: ..., "
                                                                           "offsets: ...}` is not "
                                                                           "one of the"),
        (("kafka/start", None), "kafka.start: null is not one of the values it may have"),
        (("kafka/start", ["sink"]), "kafka.start: a list is not one of the values it may have"),
        (("kafka/start", 1_767_225_600_000), "kafka.start: `1767225600000` is not one of the "
                                             "values it may have"),
        (("kafka/start", datetime(2026, 1, 1)), "kafka.start: `2026-01-01 00:00:00` is not one of "
                                                "the values it may have"),
        (("kafka/start", {"timestamp": "yesterday"}), "kafka.start.timestamp: `yesterday` is not a "
                                                      "time; write ISO 8601, such as "
                                                      "`2026-01-01T00:00:00Z`, or epoch "
                                                      "milliseconds"),
        (("kafka/start", {"timestamp": "1767225600000"}), "kafka.start.timestamp: `1767225600000` "
                                                          "is not a time"),
        (("kafka/start", {"timestamp": "2026-02-30"}), "kafka.start.timestamp: `2026-02-30` is not "
                                                       "a time"),
        (("kafka/start", {"timestamp": "2026-01-01T25:00"}), "kafka.start.timestamp: "
                                                             "`2026-01-01T25:00` is not a time"),
        (("kafka/start", {"timestamp": 1.5}), "kafka.start.timestamp: `1.5` is not a time"),
        (("kafka/start", {"timestamp": True}), "kafka.start.timestamp: true is not a time"),
        (("kafka/start", {"timestamp": None}), "kafka.start.timestamp: null is not a time"),
        (("kafka/start", {"timestamp": ["2026-01-01"]}), "kafka.start.timestamp: a list is not a "
                                                         "time"),
        (("kafka/start", {"timestamp": -1}), "kafka.start.timestamp: `-1` is out of range; it must "
                                             "lie from 1971 to the year 9999"),
        (("kafka/start", {"timestamp": 1_767_225_600}), "kafka.start.timestamp: `1767225600` is out "
                                                        "of range; it must lie from 1971 to the "
                                                        "year 9999, a number in milliseconds"),
        (("kafka/start", {"timestamp": "1970-12-31"}), "kafka.start.timestamp: `1970-12-31` is out "
                                                       "of range; it must lie from 1971"),
        (("kafka/start", {"timestamp": 253_402_300_800_000}), "kafka.start.timestamp: "
                                                              "`253402300800000` is out of range"),
        (("kafka/start", {"timestamp": date(1969, 12, 31)}), "kafka.start.timestamp: `1969-12-31` "
                                                             "is out of range"),
        (("kafka/start", {"timestamp": datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-5)))}), "kafka.start.timestamp: `9999-12-31"),
        (("kafka/start", {"timestamp": "1970-01-01T00:00:00+01:00"}), "kafka.start.timestamp: "
                                                                      "`1970-01-01T00:00:00+01:00` "
                                                                      "is out of range"),
        (("kafka/start", {"offsets": {}}), "kafka.start.offsets must have 1 or more entries, not "
                                           "0"),
        (("kafka/start", {"offsets": 17}), "kafka.start.offsets must be a mapping, not a number"),
        (("kafka/start", {"offsets": None}), "kafka.start.offsets must be a mapping, not null"),
        (("kafka/start", {"offsets": {"orders": 17}}), "kafka.start.offsets.orders must be a "
                                                       "mapping, not a number"),
        (("kafka/start", {"offsets": {"orders": {}}}), "kafka.start.offsets.orders must have 1 or "
                                                       "more entries, not 0"),
        (("kafka/start", {"offsets": {"orders": [17]}}), "kafka.start.offsets.orders must be a "
                                                         "mapping, not a list"),
        (("kafka/start", {"offsets": {"order": {0: 17}}}), "kafka.start.offsets.order is not a "
                                                           "source; did you mean `orders`?"),
        (("kafka/start", {"offsets": {5: {0: 17}}}), "kafka.start.offsets.5 is not a source; known "
                                                     "here: tracking, orders"),
        (("kafka/start", {"offsets": {"orders": {-1: 17}}}), "kafka.start.offsets.orders.-1: `-1` "
                                                             "is not a whole number from 0 to "
                                                             "2147483647"),
        (("kafka/start", {"offsets": {"orders": {2**31: 17}}}), "kafka.start.offsets.orders.2147483648: `2147483648` is not a whole number from 0 to 2147483647"),
        (("kafka/start", {"offsets": {"orders": {"all": 17}}}), "kafka.start.offsets.orders.all: "
                                                                "`all` is not a whole number from "
                                                                "0 to"),
        (("kafka/start", {"offsets": {"orders": {"a\nb": 17}}}), "kafka.start.offsets.orders.a b: "
                                                                 "`a b` is not a whole number from "
                                                                 "0 to"),
        (("kafka/start", {"offsets": {"orders": {True: 17}}}), "kafka.start.offsets.orders.1: true "
                                                               "is not a whole number from 0 to"),
        (("kafka/start", {"offsets": {"orders": {0: 17, "0": 17}}}), "field `kafka.start.offsets.orders.0` is repeated in line "),
        (("kafka/start", {"offsets": {"orders": {0: -1}}}), "kafka.start.offsets.orders.0: `-1` is "
                                                            "not a whole number from 0 to "
                                                            "9223372036854775807"),
        (("kafka/start", {"offsets": {"orders": {0: 2**63}}}), "kafka.start.offsets.orders.0: "
                                                               "`9223372036854775808` is not a "
                                                               "whole number from 0 to"),
        (("kafka/start", {"offsets": {"orders": {0: "17"}}}), "kafka.start.offsets.orders.0: `17` "
                                                              "is not a whole number from 0 to"),
        (("kafka/start", {"offsets": {"orders": {0: 1.5}}}), "kafka.start.offsets.orders.0: `1.5` "
                                                             "is not a whole number from 0 to"),
        (("kafka/start", {"offsets": {"orders": {0: True}}}), "kafka.start.offsets.orders.0: true "
                                                              "is not a whole number from 0 to"),
        (("kafka/start", {"offsets": {"orders": {0: "latest"}}}), "kafka.start.offsets.orders.0: "
                                                                  "`latest` is not a whole number "
                                                                  "from 0 to"),
        (("kafka/on_data_loss", "ignore"), "kafka.on_data_loss: `ignore` is not one of the values "
                                           "it may have; use stop or continue"),
        (("kafka/quarantine_limit", "0%"), "kafka.quarantine_limit: `0%` is not a percentage above "
                                           "0% and up to 100%; write one such as `50%`"),
        (("kafka/quarantine_limit", "100.1%"), "kafka.quarantine_limit: `100.1%` is not a "
                                               "percentage above 0%"),
        (("kafka/quarantine_limit", "-1%"), "kafka.quarantine_limit: `-1%` is not a percentage"),
        (("kafka/quarantine_limit", "50 %"), "kafka.quarantine_limit: `50 %` is not a percentage"),
        (("kafka/quarantine_limit", ".5%"), "kafka.quarantine_limit: `.5%` is not a percentage"),
        (("kafka/quarantine_limit", "half"), "kafka.quarantine_limit: `half` is not a percentage"),
        (("kafka/quarantine_limit", 0.5), "kafka.quarantine_limit: `0.5` is not a percentage"),
        (("kafka/quarantine_limit", 50), "kafka.quarantine_limit: `50` is not a percentage"),
        (("kafka/quarantine_limit", True), "kafka.quarantine_limit: true is not a percentage"),
        (("kafka/quarantine_limit", None), "kafka.quarantine_limit: null is not a percentage"),
        (("merge/idle_after", "soon"), "merge.idle_after: `soon` is not a duration"),
        (("merge/idle_after", 600_000), "merge.idle_after: `600000` is not a duration"),
        (("merge/idle_after", False), "merge.idle_after: false is not a duration"),
        (("merge/idle_after", "0s"), "merge.idle_after: `0s` is too short; it must be longer than "
                                     "nothing"),
        (("merge/idle_after_ms", 5), "unknown field `merge.idle_after_ms`; did you mean "
                                     "`idle_after`"),
        (("publish/delivery", "twice"), "publish.delivery: `twice` is not one of the values it may "
                                        "have; use exactly_once, at_least_once or at_most_once"),
        (("publish/delivery", None), "publish.delivery: null is not one of the values it may have"),
        (("retention", "59m"), "retention: `59m` is too short; it must be `1h` or longer, such as "
                               "`7d`"),
        (("retention", "0s"), "retention: `0s` is too short"),
        (("retention", "week"), "retention: `week` is not a duration"),
        (("retention", 7), "retention: `7` is not a duration"),
        (("retention", None), "retention: null is not a duration"),
        (("retention_ms", 7), "unknown field `retention_ms`; did you mean `retention`?"),
        # sources and topics
        (("sources/orders", ABSENT), "sources must have 2 or more entries, not 1"),
        (("sources", {}), "sources must have 2 or more entries, not 0"),
        (("sources/Orders", {}), "sources.Orders: `Orders` is not a name for a source; use a-z, "
                                 "0-9 and _"),
        (("sources/2nd", {}), "sources.2nd: `2nd` is not a name for a source"),
        (("sources/merge_key", {}), "sources.merge_key: `merge_key` is reserved for the output"),
        (("sources/batch", {}), "sources.batch: `batch` is reserved for the output"),
        (("sources/due", {}), "sources.due: `due` is reserved for the output; choose another"),
        (("sources/closed_at", {}), "sources.closed_at: `closed_at` is reserved for the output"),
        (("sources/tenant", {}), "sources.tenant: `tenant` is reserved for the output"),
        (("sources/position", {}), "sources.position: `position` is reserved for the output"),
        (("sources/key", {}), "sources.key: `key` is reserved for the output"),
        (("sources/orders/topic", "tracking"), "sources.orders.topic is the topic of source "
                                               "`tracking` too"),
        (("sources/orders/topic", []), "sources.orders.topic must have 1 or more entries, not 0"),
        (("sources/orders/topic", ["a", ["b"]]), "sources.orders.topic.1 must be text, not a list"),
        (("sources/orders/topic", ["a", "b c"]), "sources.orders.topic.1: `b c` is not a topic "
                                                 "name"),
        (("sources/orders/topic", ["a", "b", "a"]), "sources.orders.topic names a twice; name each "
                                                    "topic once"),
        (("sources/orders/topic", ["orders", "tracking"]), "sources.orders.topic is the topic of "
                                                           "source `tracking` too; a source of "
                                                           "several topics shares none"),
        (("sources/orders/where", {"field": "type"}), "required field "
                                                      "`sources.orders.where.equals` is missing"),
        (("sources/orders/where", "type = 'click'"), "sources.orders.where must be a mapping, not "
                                                     "text"),
        (("publish/topic", "orders"), "publish.topic is the topic of source `orders` too; publish "
                                      "to another topic"),
        (("publish/late_topic", "orders"), "publish.late_topic is the topic of source `orders` "
                                           "too; send these records to a topic"),
        (("publish/quarantine_topic", "merged"), "publish.quarantine_topic is the topic of "
                                                 "`publish.topic` too"),
        (("sources/orders/repartition", {}), "required field `sources.orders.repartition.from` is "
                                             "missing; add it, such as `from: clicks`"),
        (("sources/orders/repartition", {"from": "raw"}), "required field "
                                                          "`sources.orders.repartition.partitions` "
                                                          "is missing"),
        (("sources/orders/repartition", {"from": "raw", "partitions": 0}), "sources.orders.repartition.partitions: `0` is not a whole number from 1"),
        (("sources/orders/repartition", {"from": {"a": 1}, "partitions": 2}), "sources.orders.repartition.from must be text, not a mapping"),
        (("sources/orders/repartition", {"from": [], "partitions": 2}), "sources.orders.repartition.from must have 1 or more entries, not 0"),
        (("sources/orders/repartition", {"from": ["a", 5], "partitions": 2}), "sources.orders.repartition.from.1 must be text, not a number"),
        (("sources/orders/repartition", {"from": ["a", "a"], "partitions": 2}), "sources.orders.repartition.from names a twice; name each topic once"),
        (("sources/orders/repartition", {"from": ["raw", "tracking"], "partitions": 2}), "sources.orders.repartition.from is the topic of source `tracking` too"),
        (("sources/orders/repartition", {"form": "raw"}), "unknown field "
                                                          "`sources.orders.repartition.form`; did "
                                                          "you mean `from`?"),
        (("sources/orders/repartition", {"from": "orders", "partitions": 2}), "sources.orders.repartition.from is the topic of source `orders` too; write the records"),
        (("storage", "x"), "storage must be a mapping, not text"),
        (("storage", {"AWS_REGION": None}), "storage.AWS_REGION must be text, a number, true or "
                                            "false, not null"),
        (("storage", {"a=b": "x"}), "storage has a name that no option can have; write `name: "
                                    "value`"),
        (("spark", {"spark.jars": ["a"]}), "spark.spark.jars must be text, a number, true or "
                                           "false, not a list"),
        (("engine", "flink"), "engine: `flink` is not one of the values it may have; use spark or "
                              "embedded"),
        (("engine", ["spark"]), "engine: a list is not one of the values it may have; use spark or "
                                "embedded"),
        (("sources/orders/format", "csv"), "sources.orders.format: `csv` is not one of the values "
                                           "it may have; use json or avro"),
        (("sources/orders/registry", {"url": "http://h"}), "sources.orders.registry is for "
                                                           "`format: avro` alone; leave it out"),
        (("sources/orders/registry", {}), "required field `sources.orders.registry.url` is "
                                          "missing; add it, such as `url: http://127.0.0.1:8081`"),
        (("sources/orders/registry", {"url": "http://u:p@h"}), "sources.orders.registry.url is not "
                                                               "a URL; write http:// or https://, "
                                                               "a host, and no password"),
        (("sources/orders/registry", {"url": "http://h", "options": {"max.retries": 9}}), "sources.orders.registry.options.max.retries is set by Watersmeet itself; leave it out"),
        (("sources/orders/format", "avro"), "required field `sources.orders.schema` is missing; "
                                            "Avro cannot be read without it, so name a file"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_in_one_sentence(
    tmp_path: Path, change: tuple[Any, Any], sentence: str
) -> None:
    path, value = change
    config = changed((path, value)) if isinstance(path, str) else {**changed(), path: value}
    assert sentence in refusal(tmp_path, config)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (("lake", {}), {"lake.catalog", "lake.schema"}),
        (("sources/orders", {}), {"sources.orders.topic", "sources.orders.event_time"}),
        (("publish/corrections", {}), {"publish.corrections.topic", "publish.corrections.within"}),
        (("sources/orders/where", {"feild": "a", "5": 6}), {
            f"sources.orders.where.{name}" for name in ("feild", "5", "field", "equals")}),
    ],
)  # fmt: skip
def test_every_unknown_and_missing_field_is_named_at_once(
    tmp_path: Path, change: tuple[str, Any], fields: set[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, changed(change, ("merge/timeout", "soon")))
    said = [fault.problem.what for fault in (caught.value, *caught.value.more)]
    assert [what for what in said if "merge.timeout: `soon` is not a duration" in what]
    named = {re.sub(".*field `(.*)`.*", r"\1", what) for what in said if "field `" in what}
    assert named == fields


def test_a_topic_has_several_sources_only_where_each_says_which_records_are_its_own(
    tmp_path: Path,
) -> None:
    roles = {
        name: (f"sources/{name}/where", {"field": "type", "equals": name})
        for name in ("tracking", "orders")
    }
    same = ("sources/orders/topic", "tracking")
    settings = load(tmp_path, changed(same, *roles.values()))
    assert [source.topic for source in settings.sources.values()] == ["tracking", "tracking"]
    assert [settings.reading_rules(name).leaves_undecodable for name in settings.sources] == [
        False,
        True,
    ]
    for name in roles:
        assert "or each of the two its own records with `where`" in refusal(
            tmp_path, changed(same, roles[name])
        )
    assert "publish to another topic" in refusal(
        tmp_path, changed(("publish/topic", "orders"), *roles.values())
    )


# -- several topics


def test_a_source_may_have_several_topics_whose_order_says_nothing(tmp_path: Path) -> None:
    one = load(tmp_path, changed(("sources/tracking/topic", ["eu", "us"])))
    other = load(tmp_path, changed(("sources/tracking/topic", ["us", "eu"])))
    assert one.inputs == (("tracking", "eu"), ("tracking", "us"), ("orders", "orders"))
    assert (one.inputs, one.digest) == (other.inputs, other.digest)
    assert list(one.input_names.values()) == ["tracking/eu", "tracking/us", "orders"]
    assert [one.inputs_by_name[name] for name in one.input_names.values()] == list(one.inputs)


def test_a_list_of_one_topic_is_that_topic(tmp_path: Path) -> None:
    plain, listed = (
        load(tmp_path, changed()),
        load(tmp_path, changed(("sources/tracking/topic", ["tracking"]))),
    )
    assert (listed, listed.digest) == (plain, plain.digest)
    assert list(listed.input_names.values()) == ["tracking", "orders"]


def test_several_topics_are_neither_shared_nor_repartitioned(tmp_path: Path) -> None:
    several = ("sources/tracking/topic", ["eu", "us"])
    roles = [
        (f"sources/{name}/where", {"field": "type", "equals": name})
        for name in ("tracking", "orders")
    ]
    for more in ([("sources/orders/topic", "eu")], [("sources/orders/topic", ["us", "eu"])]):
        sentence = (
            "sources.orders.topic is the topic of source `tracking` too; a source of several "
            "topics shares none of them"
        )
        assert sentence in refusal(tmp_path, changed(several, *roles, *more))
    resolve_condition = load(tmp_path, changed(several, roles[0]))
    assert not resolve_condition.reading_rules("tracking").leaves_undecodable
    assert "publish to another topic" in refusal(
        tmp_path, changed(several, ("publish/topic", "us"))
    )
    kept = ("sources/tracking/repartition", {"from": "raw", "partitions": 2})
    assert (
        "sources.tracking.repartition is not possible where the source has several topics; name "
        "one topic" in refusal(tmp_path, changed(several, kept))
    )


def test_reading_begins_at_offsets_by_input(tmp_path: Path) -> None:
    several = ("sources/tracking/topic", ["eu", "us"])
    found = load(
        tmp_path,
        changed(several, ("kafka/start", {"offsets": {"tracking/us": {0: 5}, "orders": {1: 7}}})),
    )
    assert found.kafka.start == StartOffsets({"tracking/us": {0: 5}, "orders": {1: 7}})
    for name, sentence in (
        ("tracking", "has several topics; name each by its topic, such as `tracking/eu`"),
        ("us", "is not a source"),
    ):
        assert f"kafka.start.offsets.{name} {sentence}" in refusal(
            tmp_path, changed(several, ("kafka/start", {"offsets": {name: {0: 5}}}))
        )


# -- tenants

TENANTS = (("merge/tenant", "org"), ("merge/tenant_max_lag", "24h"))


def test_without_tenants_nothing_is_said_of_them(tmp_path: Path) -> None:
    for settings in (
        load(tmp_path, SMALLEST),
        load(tmp_path, changed(("merge/tenant", None), ("merge/tenant_max_lag", None))),
    ):
        assert (
            settings.merge.has_tenants,
            settings.merge.shows_closing,
            settings.merge.tenant_max_lag_ms,
        ) == (False, False, None)
        assert (settings.tenant_paths.get("orders"), settings.reading_rules("orders").tenant) == (
            None,
            None,
        )
        assert not [field for field in settings.rules() if "tenant" in field]
        assert settings == load(tmp_path, SMALLEST)


def test_a_source_has_its_tenants_where_the_merge_or_it_says(tmp_path: Path) -> None:
    settings = load(tmp_path, changed(*TENANTS, ("sources/orders/tenant", "customer.org")))
    assert (
        settings.merge.tenant,
        settings.merge.tenant_max_lag_ms,
        settings.merge.has_tenants,
    ) == ("org", 86_400_000, True)
    assert tuple(settings.tenant_paths.values()) == (
        "org",
        "customer.org",
    )
    assert settings.reading_rules("tracking").tenant == ("org",)
    assert settings.reading_rules("orders").tenant == ("customer", "org")
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_a_tenant_may_have_to_keep_up_with_all(tmp_path: Path) -> None:
    assert (
        load(tmp_path, changed(TENANTS[0], ("merge/tenant_max_lag", "0s"))).merge.tenant_max_lag_ms
        == 0
    )


def test_with_tenants_answers_show_when_merge_records_were_closed_under_any_rules(
    tmp_path: Path,
) -> None:
    settings = load(tmp_path, changed(*TENANTS))
    assert settings.merge.shows_closing
    assert settings.merge.window.is_timeout
    assert settings.before_epochs().merge.shows_closing, "a lake has them from its first batch on"
    assert settings.merge.with_window(Window(5, 7)).tenant_max_lag_ms == 86_400_000


def test_how_far_a_tenant_may_lag_is_a_rule_that_may_change(tmp_path: Path) -> None:
    settings = load(tmp_path, changed(*TENANTS))
    assert settings.rules()["merge.tenant_max_lag"] == 86_400_000
    assert "merge.tenant" not in settings.rules(), "that there are tenants never changes"
    later = settings.before_epochs().under({**settings.rules(), "merge.tenant_max_lag": 5})
    assert (later.merge.tenant, later.merge.tenant_max_lag_ms, later.merge.shows_closing) == (
        "org",
        5,
        True,
    )
    of_lake_without = load(tmp_path, SMALLEST).rules()
    assert settings.before_epochs().under(of_lake_without).merge.tenant_max_lag_ms == 86_400_000, (
        "the lake's identity says no"
    )
    assert (
        load(tmp_path, SMALLEST).before_epochs().under(settings.rules()).merge.tenant_max_lag_ms
        is None
    )


def test_the_digest_knows_tenants_only_where_there_are_some(tmp_path: Path) -> None:
    found = [
        load(tmp_path, changed(*TENANTS, *more)).digest
        for more in ((), (("sources/orders/tenant", "x"),))
    ]
    found += [
        load(tmp_path, changed(TENANTS[0], ("merge/tenant_max_lag", "1h"))).digest,
        load(tmp_path, SMALLEST).digest,
    ]
    assert len(set(found)) == len(found)


def test_the_sources_of_a_topic_have_their_tenants_at_one_path(tmp_path: Path) -> None:
    roles = [
        (f"sources/{name}/where", {"field": "type", "equals": name})
        for name in ("tracking", "orders")
    ]
    shared = [*roles, ("sources/orders/topic", "tracking"), *TENANTS]
    paths = [("sources/tracking/tenant", "a"), ("sources/orders/tenant", "a")]
    assert load(tmp_path, changed(*shared, *paths)).tenant_paths["orders"] == "a"
    sentence = (
        "sources.orders.tenant: `org` is not `a`, where source `tracking` of the same topic has "
        "its tenants"
    )
    assert refusal(tmp_path, changed(*shared, paths[0])) == f"{sentence}; give both the same path"


def test_repartitioned_sources_have_topics_of_their_own_and_one_number_of_partitions(
    tmp_path: Path,
) -> None:
    def repartitioned(**of_orders: Any) -> dict[str, Any]:
        of_tracking = {"from": "raw", "partitions": 3}
        return changed(
            ("sources/tracking/repartition", of_tracking), ("sources/orders/repartition", of_orders)
        )

    settings = load(tmp_path, repartitioned(**{"from": "other", "partitions": 3}))
    assert {
        name: (kept.from_topics, kept.partitions) for name, kept in settings.repartitioned.items()
    } == {
        "tracking": (("raw",), 3),
        "orders": (("other",), 3),
    }
    several = load(tmp_path, repartitioned(**{"from": ["z", "other"], "partitions": 3}))
    assert several.repartitioned["orders"].from_topics == ("other", "z")
    assert settings.digest == load(tmp_path, SMALLEST).digest
    sentence = (
        "sources.orders.repartition.partitions: 4 is not the 3 of source `tracking`; give all "
        "sources the same number"
    )
    assert sentence in refusal(tmp_path, repartitioned(**{"from": "other", "partitions": 4}))
    assert "sources.orders.repartition.from is the topic of" in refusal(
        tmp_path, repartitioned(**{"from": "raw", "partitions": 3})
    )
    in_use = {**repartitioned(**{"from": "other", "partitions": 3}), "publish": {"topic": "raw"}}
    assert "publish.topic is the topic of `sources.tracking.repartition.from` too" in refusal(
        tmp_path, in_use
    )


@pytest.mark.parametrize(
    "option",
    [
        "bootstrap.servers", "metadata.broker.list", "group.id", "group.instance.id", "isolation.level",
        "enable.auto.commit", "enable.auto.offset.store", "auto.offset.reset", "transactional.id", "enable.idempotence",
        "acks", "request.required.acks", "message.max.bytes", "max.in.flight", "max.in.flight.requests.per.connection",
        "retries", "partitioner", "key.deserializer", "value.serializer", "allow.auto.create.topics", "transaction.timeout.ms",
        "delivery.timeout.ms", "message.timeout.ms", "delivery.report.only.error", "enable.partition.eof", "log_level",
        "log.queue", "log.connection.close", "logger", "error_cb", "stats_cb", "on_delivery", "default.topic.config",
    ],
)  # fmt: skip
def test_options_that_carry_a_promise_are_not_the_users(tmp_path: Path, option: str) -> None:
    sentence = refusal(tmp_path, changed(("kafka/options", {option: "x"})))
    assert sentence == f"kafka.options.{option} is set by Watersmeet itself; leave it out"


@pytest.mark.parametrize(
    "option",
    ["debug", "queued.min.messages", "fetch.wait.max.ms", "linger.ms", "client.id", "batch.size"],
)
def test_options_that_tune_or_explain_are_the_users(tmp_path: Path, option: str) -> None:
    assert load(tmp_path, changed(("kafka/options", {option: 7}))).kafka.options == {option: "7"}


def test_options_of_spark_are_refused_by_their_prefix(tmp_path: Path) -> None:
    assert "leave out the leading `kafka.`" in refusal(
        tmp_path, changed(("kafka/options", {"kafka.ssl.ca": "x"}))
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- a\n- b\n", "must be a mapping of fields, not a list"),
        ("just text", "must be a mapping of fields, not text"),
        ('"\\ud83d"', "must be a mapping of fields, not text"),
        ("name: shop\nlake: [a\nkafka: b\n", "is not valid YAML in line 3, column 6"),
        ("name: shop\n\tlake: a\n", "is not valid YAML in line 2, column 1"),
        ("name: shop\nlake: *base\n", "is not valid YAML in line 2, column 7: found undefined "
                                      "alias"),
        ("name: a\n---\nname: b\n", "is not valid YAML in line 2"),
        ("name: !python/object:os.system x\n", "is not valid YAML in line 1"),
        ("name: 2026-13-45\n", "is not valid YAML: a value does not fit its tag or type"),
        ("name: !!bool perhaps\n", "is not valid YAML: a value does not fit its tag or type"),
        ("name: 2026-01-01\n", "required field `lake` is missing"),
        ("name: a\nname: b\n", "field `name` is repeated in line 2; keep one"),
        ("sources:\n  a: {topic: x}\n  b: {topic: x}\n  a: {topic: y}\n", "field `sources.a` is "
                                                                          "repeated in line 4"),
        ("kafka:\n  options: {a.b: 1, a.b: 1}\n", "field `kafka.options.a.b` is repeated in line "
                                                  "2"),
        ("lake: &a\n  b: *a\n", "is not usable YAML: mappings or lists that contain themselves"),
        ("name: " + "[" * 5000, "is not usable YAML"),
        ("name: \x01\n", "is not valid YAML: unreadable characters"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_mapping_of_fields_is_refused(
    tmp_path: Path, text: str, sentence: str
) -> None:
    assert sentence in refusal(tmp_path, text)


@pytest.mark.parametrize(
    "digits", ["9" * 5_000, "0x" + "f" * 9_000], ids=["decimal", "hexadecimal"]
)
@pytest.mark.parametrize("text", ["name: {}\n", "? {}\n: 1\n", "kafka: {{options: {{a: [{}]}}}}\n"])
def test_a_number_of_too_many_digits_is_refused_however_it_is_written(
    tmp_path: Path, digits: str, text: str
) -> None:
    sentence = "is not valid YAML: a value does not fit its tag or type; put text in quotes"
    assert refusal(tmp_path, text.format(digits)) == sentence


def test_a_date_is_not_text(tmp_path: Path) -> None:
    text = yaml.safe_dump(SMALLEST).replace("name: shop", "name: 2026-01-01")
    assert "name must be text, not a date; put text in quotes" in refusal(tmp_path, text)


def test_yaml_anchors_and_merge_keys_work_and_may_be_overridden(tmp_path: Path) -> None:
    text = yaml.safe_dump(changed(("sources", ABSENT))) + (
        "sources:\n  a: &a {topic: a, event_time: ts, key: k}\n  b: {<<: *a, topic: b}\n"
    )
    assert [(s.topic, s.key) for s in load(tmp_path, text).sources.values()] == [
        ("a", "k"),
        ("b", "k"),
    ]


LEVELS = "".join(f"  - &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
MERGED = "".join(f"  - &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 10))


@pytest.mark.parametrize(
    "bomb",
    [
        f"name:\n  - &a0 [x]\n{LEVELS}",
        f"name:\n  - &a0 {{x: y}}\n{MERGED}",
        f"name:\n  - &a0 {'x' * 10_000}\n{LEVELS}",
        f"name:\n  - &a0 ${{NAME}}\n{LEVELS}",
    ],
)
def test_aliases_that_stand_for_more_than_a_configuration_can_hold_are_refused_at_once(
    tmp_path: Path, bomb: str
) -> None:
    began = time.process_time()
    assert "its aliases stand for more than" in refusal(tmp_path, bomb, {"NAME": "x"})
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("spelled", "right"),
    [
        ("NO", '"NO"'),
        ("Yes", '"Yes"'),
        ("on", '"on"'),
        ("True", '"True"'),
        ("007", '"007"'),
        ("0x1F", '"0x1F"'),
        ("1_000", '"1_000"'),
        ("1:30", '"1:30"'),
        ("+1", '"+1"'),
        ("1.", '"1."'),
        (".5", '".5"'),
        ("1e3", '"1e3"'),
        ("-1E+3", '"-1E+3"'),
        ("1.5e3", '"1.5e3"'),
        ("~", '"~"'),
        ("Null", '"Null"'),
        ("2026-01-01", '"2026-01-01"'),
    ],
)
@pytest.mark.parametrize("rule", ["heartbeat", "where"])
def test_what_a_record_is_compared_with_is_not_guessed_from_its_spelling(
    tmp_path: Path, spelled: str, right: str, rule: str
) -> None:
    config = yaml.safe_dump(changed((f"sources/orders/{rule}", {"field": "f", "equals": "HERE"})))
    sentence = refusal(tmp_path, config.replace("HERE", spelled))
    assert f"sources.orders.{rule}.equals" in sentence
    assert f"`{right}`" in sentence
    quoted = load(tmp_path, config.replace("HERE", right)).sources["orders"]
    assert getattr(quoted, rule).equals == spelled


@pytest.mark.parametrize(
    ("spelled", "value"),
    [
        ("NOTE", "NOTE"),
        ("true", True),
        ("false", False),
        ("-1", -1),
        ("0", 0),
        ("1.50", 1.5),
        ("1.0e+3", 1000.0),
        ("a b", "a b"),
    ],
)
def test_what_reads_as_the_json_that_it_is_needs_no_quotes(
    tmp_path: Path, spelled: str, value: Any
) -> None:
    config = yaml.safe_dump(changed(("sources/orders/where", {"field": "f", "equals": "HERE"})))
    where = load(tmp_path, config.replace("HERE", spelled)).sources["orders"].where
    assert where is not None
    assert (where.equals, type(where.equals)) == (value, type(value))


@pytest.mark.parametrize(
    "spelled", ["NO", "True", "0123", "1_000", "1.50", "0x1F", "1:30", "~", "2026-01-01"]
)
@pytest.mark.parametrize("path", ["kafka/options", "storage", "spark"])
def test_an_option_is_passed_on_as_it_is_spelled_or_refused_unshown(
    tmp_path: Path, spelled: str, path: str
) -> None:
    config = yaml.safe_dump(changed((path, {"a.b": "HERE"})))
    sentence = refusal(tmp_path, config.replace("HERE", spelled))
    assert sentence.startswith(f"{path.replace('/', '.')}.a.b ")
    assert "put it in quotes" in sentence
    assert spelled not in sentence
    load(tmp_path, config.replace("HERE", f'"{spelled}"'))


@pytest.mark.parametrize("half", ["\\ud83d", "a\\ude00", "\\ud83d\\ude00"])
@pytest.mark.parametrize(
    "path",
    [
        "name", "sources/orders/key", "sources/orders/schema", "sources/orders/heartbeat/equals",
        "sources/orders/where/equals", "publish/valid", "publish/value", "kafka/options/a.b", "storage/a",
    ],
)  # fmt: skip
def test_half_a_surrogate_pair_is_no_text_wherever_it_stands(
    tmp_path: Path, path: str, half: str
) -> None:
    text = yaml.safe_dump(changed((path, "HERE"))).replace("HERE", f'"{half}"')
    sentence = f"{path.replace('/', '.')}: half a surrogate pair is no text"
    right = "write the character itself, or its number after `\\U` with eight digits"
    assert refusal(tmp_path, text) == f"{sentence}; {right}"


def test_half_a_surrogate_pair_is_no_text_in_a_name_or_a_list_either(tmp_path: Path) -> None:
    sentence = "half a surrogate pair is no text"
    assert refusal(tmp_path, '"\\ud83d": 1\n').startswith(f"\\ud83d: {sentence}")
    assert refusal(tmp_path, 'a: ["\\ud83d"]\n').startswith(f"a: {sentence}")
    whole = yaml.safe_dump(changed(("publish/valid", "HERE"))).replace("HERE", '"\\U0001F600"')
    assert load(tmp_path, whole).publish.valid == "\U0001f600"


def test_a_variable_that_is_not_utf8_is_refused_by_its_name(tmp_path: Path) -> None:
    sentence = "the environment variable X is not UTF-8; set it to text in UTF-8"
    for path in ("name", "kafka/options/a.b", "lineage/file"):
        said = refusal(tmp_path, changed((path, "${X}")), {"X": f"{SECRET}\udcff"})
        assert said == f"{path.replace('/', '.')}: {sentence}"


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.yml").write_bytes(b"name: \xff\xfe\xfa\n")
    with pytest.raises(ConfigurationError, match="is not valid YAML"):
        load_settings(tmp_path / "w.yml", {})


@pytest.mark.parametrize(("file", "why"), [("gone.yml", "No such file"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_refused_with_a_way_out(
    tmp_path: Path, file: str, why: str
) -> None:
    with pytest.raises(
        ConfigurationError,
        match=f"cannot be read \\({why}.*name another file with -c, or write one with `init`",
    ):
        load_settings(tmp_path / file, {})


# -- ids


def test_a_lake_that_had_ids_keeps_their_columns_and_no_other_lake_has_them(
    tmp_path: Path,
) -> None:
    plain = load(tmp_path, SMALLEST)
    with_id = load(tmp_path, changed(("sources/orders/id", "event.id")))
    assert (plain.has_ids, with_id.has_ids) == (False, True)
    assert [with_id.reading_rules(name).id for name in with_id.sources] == [(), ("event", "id")]
    assert [plain.reading_rules(name).id for name in plain.sources] == [None, None]
    assert with_id.digest != plain.digest
    assert with_id.fingerprint != plain.fingerprint
    assert with_id.rules()["sources.orders.id"] == "event.id"

    begun = with_id.before_epochs()
    assert not begun.has_ids
    epochs = [begun.under(plain.rules())]
    for rules in (with_id.rules(), plain.rules(), plain.rules()):
        epochs.append(epochs[-1].under(rules))
    assert [epoch.has_ids for epoch in epochs] == [False, True, True, True]
    assert [epoch.reading_rules("orders").id for epoch in epochs] == [
        None,
        ("event", "id"),
        (),
        (),
    ]
    without = {name: rule for name, rule in plain.rules().items() if not name.endswith(".id")}
    assert not begun.under(without).has_ids, "of a version that knew no ids"
