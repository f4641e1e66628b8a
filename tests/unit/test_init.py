from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from tests.support.commands import in_process
from watersmeet.configuration.sources import SourceSettings
from watersmeet.core.json_schema import value_schema
from watersmeet.core.message_schema import message_schema
from watersmeet.core.types import columns_ddl
from watersmeet.dev import init
from watersmeet.dev.init import schemas_directory, write_example
from watersmeet.errors import ConfigurationError
from watersmeet.settings import KafkaSettings, MergeSettings, PublishSettings, load_settings

FILES = [
    "watersmeet.yml",
    "examples.jsonl",
    "schemas/orders.json",
    "schemas/tracking.json",
    "expectations/completeness.json",
    "expectations/event_times.json",
    "expectations/fields.json",
    "expectations/freshness.json",
    "expectations/quarantine.json",
    "schemas/merged.json",
]


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_example_is_written_into_a_new_folder(tmp_path: Path) -> None:
    written = write_example(tmp_path / "a" / "b")
    assert written == [tmp_path / "a" / "b" / name for name in FILES]
    assert sorted(contents(tmp_path / "a" / "b")) == sorted(FILES)


def test_example_loads_and_shows_the_defaults(tmp_path: Path) -> None:
    write_example(tmp_path)
    settings = load_settings(tmp_path / "watersmeet.yml", {})
    assert settings.lake == str(tmp_path / "lake")
    assert settings.checkpoints == str(tmp_path / "lake" / "_checkpoints")
    assert settings.kafka == KafkaSettings(bootstrap_servers="127.0.0.1:9092")
    assert settings.merge == MergeSettings(timeout_ms=1_800_000)
    assert settings.publish == PublishSettings(topic="merged")
    assert list(settings.sources) == ["tracking", "orders"]
    tracking = settings.sources["tracking"]
    assert (tracking.key, tracking.event_time) == ("ssid", "ts")
    assert tracking.heartbeat is not None
    assert (tracking.heartbeat.field, tracking.heartbeat.equals) == ("type", "heartbeat")


def test_example_says_what_its_messages_are(tmp_path: Path) -> None:
    write_example(tmp_path)
    settings = load_settings(tmp_path / "watersmeet.yml", {})
    described = json.loads((tmp_path / "schemas" / f"{settings.publish.topic}.json").read_text())
    assert described == message_schema(
        {name: source.value_schema for name, source in settings.sources.items()}
    )


def test_example_names_every_field_there_is(tmp_path: Path) -> None:
    write_example(tmp_path)
    text = (tmp_path / "watersmeet.yml").read_text()
    for part in (KafkaSettings, SourceSettings, MergeSettings, PublishSettings):
        for name, field in part.model_fields.items():
            assert f" {field.validation_alias or name}:" in text


@pytest.mark.parametrize("source", ["tracking", "orders"])
def test_example_schemas_fit_a_table(tmp_path: Path, source: str) -> None:
    write_example(tmp_path)
    file = tmp_path / "schemas" / f"{source}.json"
    schema = value_schema(file.read_bytes(), file)
    assert (
        columns_ddl(pa.schema(list(schema.type)))
        == "type STRING, ssid BIGINT, aid BIGINT, ts BIGINT"
    )


@pytest.mark.parametrize(
    ("source", "value", "violation"),
    [
        ("tracking", {"type": "click", "ssid": 1, "aid": 2, "ts": 3}, None),
        ("tracking", {"type": "cart", "ssid": 1, "aid": 2, "ts": 3}, None),
        ("tracking", {"type": "heartbeat", "ts": 3}, None),
        ("orders", {"type": "order", "ssid": 1, "aid": 2, "ts": 3}, None),
        ("orders", {"type": "heartbeat", "ts": 3}, None),
        ("tracking", {"type": "click", "aid": 2, "ts": 3}, '$: "ssid" is a required property'),
        ("orders", {"type": "order", "ssid": 1, "ts": 3}, '$: "aid" is a required property'),
        ("orders", {"type": "heartbeat"}, '$: "ts" is a required property'),
        ("orders", {"ts": 3}, '$: "type" is a required property'),
        (
            "tracking",
            {"type": "order", "ssid": 1, "aid": 2, "ts": 3},
            "$.type: the value is not one of",
        ),
        (
            "tracking",
            {"type": "click", "ssid": "1", "aid": 2, "ts": 3},
            "$.ssid: the value is not of type",
        ),
        (
            "orders",
            {"type": "heartbeat", "ts": -1},
            "$.ts: the value is less than the minimum of 0",
        ),
    ],
)
def test_example_schemas_take_the_demos_records_and_no_others(
    source: str, value: dict[str, object], violation: str | None
) -> None:
    file = schemas_directory() / f"{source}.json"
    found = value_schema(file.read_bytes(), file).validator()(value)
    assert found is None if violation is None else found is not None and found.startswith(violation)


@pytest.mark.parametrize("existing", FILES)
def test_nothing_is_written_where_one_file_exists(tmp_path: Path, existing: str) -> None:
    (tmp_path / existing).parent.mkdir(exist_ok=True)
    (tmp_path / existing).write_text("mine")
    with pytest.raises(
        ConfigurationError, match="already exists; it was kept; name another folder"
    ) as caught:
        write_example(tmp_path)
    assert str(tmp_path / existing) in str(caught.value)
    assert contents(tmp_path) == {existing: "mine"}


def test_every_existing_file_is_named(tmp_path: Path) -> None:
    write_example(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        write_example(tmp_path)
    assert all(str(tmp_path / name) in str(caught.value) for name in FILES)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["schemas", "expectations"])
@pytest.mark.parametrize("is_link", [False, True])
def test_nothing_is_written_where_one_folder_is_a_file_or_a_link_to_nothing(
    tmp_path: Path, name: str, is_link: bool
) -> None:
    there = tmp_path / name
    if is_link:
        there.symlink_to("nowhere")
    else:
        there.write_text("mine")
    with pytest.raises(ConfigurationError, match="is no folder; name another folder") as caught:
        write_example(tmp_path)
    assert str(caught.value).startswith(f"{there}: ")
    assert list(tmp_path.iterdir()) == [there]


@pytest.mark.parametrize("name", ["schemas", "expectations"])
def test_nothing_is_written_where_one_folder_takes_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / name
    there.mkdir()
    monkeypatch.setattr(os, "access", lambda path, _: path != there)  # root may write anywhere
    with pytest.raises(ConfigurationError, match=r"cannot be written to \(Permission denied\)"):
        write_example(tmp_path)
    assert list(tmp_path.iterdir()) == [there]


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(
        ConfigurationError, match=r"cannot be written to .*; name a folder that can"
    ):
        write_example(tmp_path / "file")


def test_schemas_come_from_the_package_where_it_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert schemas_directory() == init.PACKAGE.parents[1] / "schemas"
    (tmp_path / "_schemas").mkdir()
    monkeypatch.setattr(init, "PACKAGE", tmp_path)
    assert schemas_directory() == tmp_path / "_schemas"


SPARKS = [
    "DATABRICKS_RUNTIME_VERSION",
    "PYSPARK_GATEWAY_PORT",
    "SPARK_REMOTE",
    "SPARK_HOME",
    "MASTER",
]


@pytest.mark.parametrize("named", [None, *SPARKS, "PYSPARK_SUBMIT_ARGS"])
@pytest.mark.parametrize("asked", [None, "spark", "embedded"])
def test_init_takes_spark_where_the_environment_names_one_or_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None, asked: str | None
) -> None:
    for name in [*SPARKS, "PYSPARK_SUBMIT_ARGS"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--conf a=b pyspark-shell")
    if named is not None:
        monkeypatch.setenv(named, "--master spark://here:7077 pyspark-shell")
    options = [] if asked is None else ["--engine", asked]
    answer = json.loads(in_process("init", "new", *options, "--json", cwd=tmp_path).stdout)
    text = (tmp_path / "new" / "watersmeet.yml").read_text()
    [before, line] = re.findall(r"(.*)\n(engine: .*)\n", text)[0]
    expected = asked or ("embedded" if named is None else "spark")
    assert answer["engine"] == yaml.safe_load(text)["engine"] == expected
    assert before.startswith("# One process without a JVM. Take `spark` ")
    assert line.endswith("# the default" if expected == "spark" else "# not the default")
    said = in_process("init", "again", *options, cwd=tmp_path).stdout.splitlines()[-1]
    if named is None or asked is not None:
        assert (answer["reason"], "engine" in said) == (None, False)
    else:
        assert answer["reason"].startswith(f"{named} ")
        assert said == f"engine: spark, since {answer['reason']}"
