from __future__ import annotations

import re
from typing import Any

import pytest

from pipelines.adapters.kafka import client_options, spark_options
from pipelines.errors import ConfigurationError
from pipelines.settings import KafkaSettings

ALWAYS = {"kafka.bootstrap.servers": "one:9092,two:9092", "kafka.isolation.level": "read_committed"}
PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"


def kafka(options: dict[str, Any]) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers="one:9092,two:9092", options=options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"security.protocol": "SSL"}, {"security.protocol": "SSL"}),
        (
            {"sasl.mechanism": "PLAIN", "sasl.username": "u", "sasl.password": "p"},
            {"sasl.mechanism": "PLAIN", "sasl.jaas.config": f'{PLAIN} required username="u" password="p";'},
        ),
        (
            {"sasl.mechanisms": "SCRAM-SHA-512", "sasl.username": "u", "sasl.password": "p"},
            {"sasl.mechanism": "SCRAM-SHA-512", "sasl.jaas.config": f'{SCRAM} required username="u" password="p";'},
        ),
        (
            {"sasl.mechanisms": "SCRAM-SHA-256", "sasl.mechanism": "SCRAM-SHA-256", "sasl.username": "u", "sasl.password": ""},
            {"sasl.mechanism": "SCRAM-SHA-256", "sasl.jaas.config": f'{SCRAM} required username="u" password="";'},
        ),
        (
            {"sasl.mechanisms": "GSSAPI", "sasl.kerberos.service.name": "kafka"},
            {"sasl.mechanism": "GSSAPI", "sasl.kerberos.service.name": "kafka"},
        ),
        ({"ssl.ca.location": "/ca.pem"}, {"ssl.truststore.type": "PEM", "ssl.truststore.location": "/ca.pem"}),
        ({"ssl.ca.pem": "---CA---"}, {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": "---CA---"}),
        (
            {"ssl.certificate.pem": "---C---", "ssl.key.pem": "---K---", "ssl.key.password": "p"},
            {
                "ssl.keystore.type": "PEM",
                "ssl.keystore.certificate.chain": "---C---",
                "ssl.keystore.key": "---K---",
                "ssl.key.password": "p",
            },
        ),
        (
            {"socket.send.buffer.bytes": 1, "socket.receive.buffer.bytes": 2, "fetch.min.bytes": 3, "client.rack": "r"},
            {"send.buffer.bytes": "1", "receive.buffer.bytes": "2", "fetch.min.bytes": "3", "client.rack": "r"},
        ),
    ],
)
def test_options_become_those_of_sparks_client(options: dict[str, Any], expected: dict[str, str]) -> None:
    translated = {f"kafka.{name}": value for name, value in expected.items()}
    assert spark_options(kafka(options)) == ALWAYS | translated


@pytest.mark.parametrize("secret", ['say "hi"', "back\\slash", '\\"', "\\", 'a"; b required c="', "it's; = é", "\\n"])
def test_a_password_of_any_characters_stays_one_value(secret: str) -> None:
    options = {"sasl.mechanism": "PLAIN", "sasl.username": secret, "sasl.password": secret}
    jaas = spark_options(kafka(options))["kafka.sasl.jaas.config"]
    string = r'"((?:[^"\\]|\\["\\])*)"'
    match = re.fullmatch(rf"{re.escape(PLAIN)} required username={string} password={string};", jaas)
    assert match is not None
    assert [re.sub(r"\\(.)", r"\1", text) for text in match.groups()] == [secret, secret]


@pytest.mark.parametrize("name", ["ssl.keystore.location", "sasl.oauthbearer.config", "no.such.option", "debug"])
def test_an_option_without_counterpart_is_refused_by_name_and_its_value_never_shown(name: str) -> None:
    settings = kafka({"security.protocol": "SASL_SSL", "sasl.password": "hunter2", name: "5ecret"})
    with pytest.raises(
        ConfigurationError, match=rf"^kafka\.options: {re.escape(name)} has no counterpart .*sasl\.mechanism"
    ) as e:
        spark_options(settings)
    assert "5ecret" not in str(e.value)
    assert "hunter2" not in str(e.value)
    assert "\n" not in str(e.value)


def test_librdkafka_gets_its_options_as_they_were_given() -> None:
    options = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanisms": "PLAIN",
        "sasl.password": 'p"\\',
        "linger.ms": 7,
        "debug": True,
    }
    found = client_options(kafka(options))
    assert {name: found[name] for name in options} == {**options, "linger.ms": "7", "debug": "true"}
    assert found["bootstrap.servers"] == "one:9092,two:9092"
    assert found.keys() - options.keys() == {"bootstrap.servers", "log_level", "error_cb"}
