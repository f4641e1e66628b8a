"""A broker with SASL_SSL, SCRAM and ACLs: the right way in works, and every wrong one is one
sentence within seconds."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from tests.kafka.messages import messages
from tests.support.configurations import SMALLEST
from tests.support.secured import PASSWORD, SecuredBroker
from tests.support.timing import within
from tests.support.topics import create_topics, produce
from watersmeet.dev.certificates import Authority
from watersmeet.errors import KafkaAccessError, KafkaUnreachableError, is_retriable
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.permissions import Permission
from watersmeet.kafka.publisher import Publisher, sink_publisher
from watersmeet.kafka.reading import Range, read_range, read_tails
from watersmeet.settings import KafkaSettings, Settings

pytestmark = pytest.mark.long

SECONDS = 5


def read(kafka: KafkaSettings, topic: str) -> int:
    return sum(batch.num_rows for batch in read_range(kafka, Range(topic, 0, 0, 3)))


def publisher(kafka: KafkaSettings, sink: str, delivery: str = "exactly_once") -> Publisher:
    settings = Settings.model_validate(SMALLEST, context={"folder": Path("/")})
    publish = settings.publish.model_copy(update={"topic": sink, "delivery": delivery})
    return sink_publisher(settings.model_copy(update={"kafka": kafka, "publish": publish}))


def refusal(work: Callable[[], object]) -> str:
    """The sentence of what is refused at once and for good, without a secret in it."""
    with within(SECONDS), pytest.raises(KafkaAccessError) as caught:
        work()
    assert not is_retriable(caught.value)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert PASSWORD not in sentence
    assert "hunter2" not in sentence
    return sentence


def on_topic(operation: str, topic: str) -> Permission:
    return Permission(operation, "topic", topic, "")


@pytest.fixture
def source(secured: SecuredBroker, topic: str) -> str:
    """A topic with three records that `reader` may read and `guest` may describe."""
    create_topics(secured.admin, topic, partitions=1)
    produce(secured.admin, topic, [(0, b"x")] * 3)
    secured.grant("reader", on_topic("READ", topic))
    secured.grant("guest", on_topic("DESCRIBE", topic))
    return topic


@pytest.fixture
def sink(secured: SecuredBroker, topic: str) -> str:
    """A topic that `writer` may publish to in transactions."""
    name = f"{topic}-sink"
    create_topics(secured.admin, name, partitions=2)
    in_transactions = Permission("WRITE", "transactional id", f"watersmeet-shop/{name}", "")
    secured.grant("writer", on_topic("READ", name), on_topic("WRITE", name), in_transactions)
    secured.grant("reader", on_topic("READ", name), in_transactions)
    return name


def test_the_right_password_and_permissions_are_all_it_takes(
    secured: SecuredBroker, source: str, sink: str
) -> None:
    assert read(secured.settings(), source) == 3
    assert Cluster(secured.settings()).bounds(source, 1) == {0: (0, 3)}
    to_sink = publisher(secured.settings(user="writer"), sink)
    to_sink.begin()
    to_sink.send([messages(0, "ab"), messages(1, "c")])
    to_sink.begin()
    assert {p: tail.key() for p, tail in to_sink.tails(2).items()} == {0: b"b", 1: b"c"}


WRONG = {
    "password": (
        {"sasl_password": "hunter2"},
        "refuses the login .*invalid credentials.*; check sasl.username, sasl.password",
    ),
    "user": ({"user": "nobody"}, "refuses the login .*; check sasl.username"),
    "mechanism": (
        {"sasl_mechanism": "PLAIN"},
        "refuses the login .*SCRAM-SHA-512.*; check sasl.username, .*sasl.mechanism",
    ),
}


def assert_refused_everywhere(kafka: KafkaSettings, topic: str, sentence: str) -> None:
    for work in (
        lambda: read(kafka, topic),
        lambda: Cluster(kafka).partition_counts([topic]),
        lambda: publisher(kafka, topic).begin(),
    ):
        assert re.search(sentence, refusal(work))


@pytest.mark.promise("K4")
@pytest.mark.fault("outage")
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_login_is_one_sentence_at_once(
    secured: SecuredBroker, source: str, wrong: str
) -> None:
    options, sentence = WRONG[wrong]
    assert_refused_everywhere(secured.settings(**options), source, sentence)


@pytest.mark.promise("K4")
@pytest.mark.fault("outage")
def test_a_certificate_of_a_strange_authority_is_one_sentence_at_once(
    secured: SecuredBroker, source: str, tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger.crt"
    stranger.write_bytes(Authority("stranger").certificate)
    sentence = r"the certificate .* is not accepted \(.*\); ssl.ca.location "
    assert_refused_everywhere(secured.settings(ssl_ca_location=str(stranger)), source, sentence)


@pytest.mark.promise("K4")
@pytest.mark.fault("outage")
def test_an_expired_certificate_is_one_sentence_at_once(
    secured: SecuredBroker, source: str
) -> None:
    with secured.another_certificate(Authority("another"), timedelta(days=-1)) as ca:
        sentence = r"is not accepted \(certificate has expired\); .*it must be valid today"
        assert_refused_everywhere(secured.settings(ssl_ca_location=str(ca)), source, sentence)
    assert read(secured.settings(), source) == 3


def test_a_client_whose_certificate_the_broker_does_not_know_is_told(
    secured: SecuredBroker, tmp_path: Path
) -> None:
    """By a word of the TLS library: librdkafka has no code for it, and tries again."""
    stranger = tmp_path / "stranger.pem"
    stranger.write_bytes(Authority("stranger").signed("admin"))
    options = {
        **secured.admin.options,
        "ssl.certificate.location": str(stranger),
        "ssl.key.location": str(stranger),
    }
    with pytest.raises(
        KafkaUnreachableError, match=r"bad certificate.*; .*the ssl\. options in kafka\.options"
    ):
        Cluster(
            secured.admin.model_copy(update={"options": options}), timeout_s=5
        ).partition_counts(["any"])


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL", "SASL_PLAINTEXT"])
def test_another_protocol_than_the_brokers_is_waited_for_and_told(
    secured: SecuredBroker, protocol: str
) -> None:
    with pytest.raises(
        KafkaUnreachableError, match=r"no Kafka broker answers .*security\.protocol"
    ):
        Cluster(secured.settings(security_protocol=protocol), timeout_s=2).partition_counts(["any"])


def test_a_missing_permission_to_read_names_topic_and_permission(
    secured: SecuredBroker, source: str
) -> None:
    guest = secured.settings(user="guest")
    assert f"does not allow READ on topic {source} " in refusal(lambda: read(guest, source))
    assert f"does not allow READ on topic {source} " in refusal(
        lambda: read_tails(guest, source, 1)
    )


def test_a_missing_permission_to_describe_names_topic_and_permission(
    secured: SecuredBroker, source: str
) -> None:
    stranger = secured.settings(user="writer")
    expected = f"does not allow DESCRIBE on topic {source} "
    assert expected in refusal(lambda: Cluster(stranger).partition_counts([source]))
    assert expected in refusal(lambda: Cluster(stranger).topic_ids([source]))
    assert expected in refusal(lambda: Cluster(stranger).bounds(source, 1))
    assert f"DESCRIBE_CONFIGS on topic {source} " in refusal(
        lambda: Cluster(stranger).topic_settings(source)
    )
    assert "does not allow CREATE on topic new " in refusal(
        lambda: Cluster(stranger).create_topic("new", 1, {})
    )


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_a_missing_permission_to_write_names_topic_and_permission(
    secured: SecuredBroker, sink: str, delivery: str
) -> None:
    reader = publisher(secured.settings(user="reader"), sink, delivery)
    reader.begin()
    assert f"does not allow WRITE on topic {sink} " in refusal(
        lambda: reader.send([messages(0, "a")])
    )


def test_a_missing_permission_for_transactions_names_the_id(
    secured: SecuredBroker, sink: str, capfd: pytest.CaptureFixture[str]
) -> None:
    guest = publisher(secured.settings(user="guest"), sink)
    capfd.readouterr()
    assert f"does not allow WRITE on transactional id watersmeet-shop/{sink} " in refusal(
        guest.begin
    )
    assert capfd.readouterr().err == ""  # librdkafka writes fatal errors there, where it may
