"""The schema registry: a real one, with references, a password and TLS, and in every kind of
trouble."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.avro import as_text, encoded, framed
from tests.support.registry import TestRegistry, gate
from watersmeet.configuration.sources import RegistrySettings
from watersmeet.core.avro_schema import avro_schema
from watersmeet.dev.certificates import Authority
from watersmeet.dev.processes import HOST, free_port
from watersmeet.errors import (
    ConfigurationError,
    RegistryAccessError,
    RegistryUnreachableError,
    UnknownWriterSchemaError,
    WatersmeetError,
)
from watersmeet.kafka.registry import Registry

pytestmark = pytest.mark.long

USER, PASSWORD = "reader", "s3cret:words"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestRegistry]:
    found = TestRegistry(tmp_path_factory.mktemp("registry"))
    found.start()
    yield found
    found.kill()


def at(url: str, **options: str) -> Registry:
    return Registry(
        RegistrySettings(
            url=url, options={name.replace("_", "."): value for name, value in options.items()}
        )
    )


def record(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "record",
        "name": name,
        "fields": [{"name": field, "type": kind} for field, kind in fields.items()],
    }


def refusal(registry: Registry, kind: type[WatersmeetError], *, retriable: bool = False) -> str:
    with pytest.raises(kind) as caught:
        _ = registry[1]
    assert caught.value.retriable == retriable
    assert PASSWORD not in str(caught.value)
    assert caught.value.__cause__ is None
    return str(caught.value)


def test_a_schema_is_what_was_registered_with_all_that_it_refers_to(registry: TestRegistry) -> None:
    city, address = (
        record("geo.City", zip="int"),
        record("geo.Address", city="geo.City", was=["null", "geo.City"]),
    )
    main = record("R", at="geo.Address", born="geo.City")
    alone = registry.register("city", city)
    registry.register("address", address, [("geo.City", "city", 1)])
    schema_id = registry.register(
        "main", main, [("geo.Address", "address", 1), ("geo.City", "city", 1)]
    )
    found = pickle.loads(pickle.dumps(at(registry.url)))
    assert json.loads(found[alone]) == city
    whole, value = (
        json.loads(found[schema_id]),
        {"at": {"city": {"zip": 1}, "was": None}, "born": {"zip": 2}},
    )
    assert (
        avro_schema(as_text(whole), Path("x"), found).decoder()(
            framed(schema_id, encoded(whole, value))
        )
        == value
    )
    assert sorted(found) == sorted([alone, schema_id])
    assert len(found) == 2


def test_a_process_asks_for_a_schema_once(registry: TestRegistry, tmp_path: Path) -> None:
    schema_id = registry.register("once", record("Once", f="int"))
    with gate(registry, tmp_path, USER, PASSWORD) as (url, trusted):
        found = at(url, ssl_ca_location=str(trusted), basic_auth_user_info=f"{USER}:{PASSWORD}")
        text = found[schema_id]
    assert found[schema_id] == text, "though it is no longer there to ask"


def test_it_is_read_with_a_password_over_tls(registry: TestRegistry, tmp_path: Path) -> None:
    schema_id = registry.register("secret", record("Secret", f="int"))
    with gate(registry, tmp_path, USER, PASSWORD) as (url, trusted):
        known = {"ssl_ca_location": str(trusted)}
        found = at(url, **known, basic_auth_user_info=f"{USER}:{PASSWORD}")
        found.check()
        assert json.loads(found[schema_id])["name"] == "Secret"
        assert "HTTP status 401" in refusal(
            at(url, **known, basic_auth_user_info=f"{USER}:wrong"), RegistryAccessError
        )
        assert "HTTP status 401" in refusal(at(url, **known), RegistryAccessError)
        assert "(TLS)" in refusal(
            at(url, basic_auth_user_info=f"{USER}:{PASSWORD}"), RegistryAccessError
        )
        (tmp_path / "other.pem").write_bytes(Authority("another").certificate)
        assert "(TLS)" in refusal(
            at(url, ssl_ca_location=str(tmp_path / "other.pem")), RegistryAccessError
        )


def test_an_unknown_id_and_a_registry_that_is_away_may_be_waited_for(
    registry: TestRegistry,
) -> None:
    with pytest.raises(
        UnknownWriterSchemaError,
        match=r"schema 4711, which the schema registry at .* does not have",
    ) as caught:
        _ = at(registry.url)[4711]
    assert caught.value.retriable
    port = free_port()
    assert f"http://{HOST}:{port}" in refusal(
        at(f"http://{HOST}:{port}"), RegistryUnreachableError, retriable=True
    )
    with pytest.raises(RegistryUnreachableError):
        at(f"http://{HOST}:{port}").check()


def test_options_that_the_client_does_not_take_are_an_error_without_their_values(
    tmp_path: Path,
) -> None:
    url = "http://127.0.0.1:1"
    assert "Unrecognized properties: no.such" in refusal(
        at(url, no_such=PASSWORD), ConfigurationError
    )
    assert "basic.auth.user.info must be in the form" in refusal(
        at(url, basic_auth_user_info="s3cret"), ConfigurationError
    )
    assert "cannot be read" in refusal(
        at(url, ssl_ca_location=str(tmp_path / PASSWORD)), ConfigurationError
    )
