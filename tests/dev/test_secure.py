"""`broker start --secure`: who has no password and no permission gets nowhere, and the secrets stay
with their owner."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from tests.support.configurations import SMALLEST
from watersmeet.dev import broker, secure
from watersmeet.errors import BrokerError, KafkaAccessError, KafkaUnreachableError
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.permissions import permissions
from watersmeet.settings import KafkaSettings, load_settings

pytestmark = pytest.mark.long

QUICKLY = "-Xmx512m -XX:+UseSerialGC -XX:TieredStopAtLevel=1"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    broker.stop(tmp_path / "broker")


def watersmeet(folder: Path, *words: str) -> dict[str, Any]:
    """What a command answers, in a process that knows no password."""
    environment = {
        name: value for name, value in os.environ.items() if name != secure.PASSWORD_VARIABLE
    }
    environment["KAFKA_HEAP_OPTS"] = QUICKLY
    program = [sys.executable, "-m", "watersmeet", *words, "--json"]
    done = subprocess.run(
        program,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    if (password := secure.password_file(folder / "broker")).exists():
        assert password.read_text() not in done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def granted(directory: Path, admin_port: int) -> set[tuple[str, ...]]:
    """All that anybody is allowed, as the broker tells it."""
    kinds: Any = (
        ResourceType.ANY,
        None,
        ResourcePatternType.ANY,
        None,
        None,
        AclOperation.ANY,
        AclPermissionType.ANY,
    )
    anything = AclBindingFilter(*kinds)
    admin = AdminClient(
        {"bootstrap.servers": f"127.0.0.1:{admin_port}", **secure.admin_options(directory)}
    )
    found = admin.describe_acls(anything).result(30)
    assert {(acl.permission_type.name, acl.host) for acl in found} == {("ALLOW", "*")}
    return {
        (acl.principal, acl.operation.name, acl.restype.name.replace("_", " ").lower(), acl.name)
        for acl in found
    }


@pytest.mark.nightly
def test_a_secured_broker_lets_its_user_do_what_a_configuration_needs(folder: Path) -> None:
    config = folder / "watersmeet.yml"
    way_in = {
        "bootstrap_servers": "127.0.0.1:1",
        "options": {"sasl.password": f"${{{secure.PASSWORD_VARIABLE}}}"},
    }
    config.write_text(yaml.safe_dump({**SMALLEST, "kafka": way_in}))
    started = watersmeet(folder, "broker", "start", "--secure")
    directory = Path(started["directory"])
    assert started["running"]
    assert started["secure"]
    allowed = permissions(load_settings(config, {secure.PASSWORD_VARIABLE: "any"}))
    assert started["allowed"] == [one._asdict() for one in allowed]
    expected = {("User:watersmeet", *one[:3]) for one in allowed}
    assert granted(directory, started["admin_port"]) == expected

    modes = {
        file.name: stat.S_IMODE(file.stat().st_mode) for file in secure.folder(directory).iterdir()
    }
    assert modes == dict.fromkeys(
        ["admin.pem", "broker.pem", "ca.crt", "client.yml", "watersmeet.password"], 0o600
    )
    assert stat.S_IMODE(secure.folder(directory).stat().st_mode) == 0o700

    for nobody in (
        {},
        {"security.protocol": "SSL", "ssl.ca.location": str(secure.folder(directory) / "ca.crt")},
    ):
        for port in (started["port"], started["admin_port"]):
            stranger = KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}", options=nobody)
            with pytest.raises((KafkaUnreachableError, KafkaAccessError)):
                Cluster(stranger, timeout_s=2).partition_counts(["tracking"])

    del started["allowed"]
    assert (
        watersmeet(folder, "broker", "start") == watersmeet(folder, "broker", "status") == started
    )
    watersmeet(folder, "broker", "stop")
    again = watersmeet(folder, "broker", "start")
    assert (again["port"], again["secure"]) == (started["port"], True)
    assert granted(directory, again["admin_port"]) == expected

    own = yaml.safe_load(Path(started["client"]).read_text())["kafka"]
    own["options"]["sasl.password"] = Path(started["password"]).read_text()
    assert Cluster(KafkaSettings(**own)).partition_counts(["tracking"]) == {}


@pytest.mark.nightly
def test_what_a_secured_broker_keeps_is_readable_by_its_owner_alone_also_where_it_was_open_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_HEAP_OPTS", QUICKLY)
    directory = folder / "broker"
    broker.start(directory)
    broker.stop(directory)
    for _ in range(2):
        broker.start(directory, secure=True)
        broker.stop(directory)
        assert any((directory / "data").iterdir())
        assert stat.S_IMODE((directory / "data").stat().st_mode) == 0o700
        assert stat.S_IMODE((directory / "broker.log").stat().st_mode) == 0o600


@pytest.mark.nightly
def test_a_broker_that_runs_openly_is_not_secured_under_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_HEAP_OPTS", QUICKLY)
    open_to_all = broker.start(folder / "broker")
    with pytest.raises(BrokerError, match="already runs without security; stop it first"):
        broker.start(folder / "broker", secure=True)
    assert broker.status(folder / "broker") == open_to_all
    assert not open_to_all.is_secured
