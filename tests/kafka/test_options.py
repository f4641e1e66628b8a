from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from confluent_kafka import KafkaError

from watersmeet.configuration.values import OWN_OPTIONS
from watersmeet.errors import (
    ConfigurationError,
    DataLossError,
    KafkaAccessError,
    KafkaRequestError,
    KafkaTransientError,
    KafkaUnreachableError,
    KafkaUnsettledError,
    PublishingError,
    TopicChangedError,
    is_retriable,
    root_cause,
)
from watersmeet.kafka.failures import failure
from watersmeet.kafka.options import (
    ListeningProducer,
    admin_options,
    check_options,
    consumer_options,
    producer_options,
)
from watersmeet.settings import KafkaSettings

SECRET = "hunter2!secret"


def kafka(**options: Any) -> KafkaSettings:
    return KafkaSettings(
        bootstrap_servers="h:1",
        options={name.replace("_", "."): value for name, value in options.items()},
    )


def test_options_reach_every_client_as_they_are() -> None:
    settings = kafka(security_protocol="SASL_SSL", sasl_password='p"\\', client_rack="r")
    for options in (
        admin_options(settings),
        consumer_options(settings),
        producer_options(settings),
    ):
        assert {name: options[name] for name in settings.options} == settings.options
        assert options["bootstrap.servers"] == "h:1"


def test_options_that_tune_give_way_and_those_that_carry_a_promise_do_not() -> None:
    options = consumer_options(kafka(queued_min_messages="7", fetch_wait_max_ms="500"))
    assert (options["queued.min.messages"], options["fetch.wait.max.ms"]) == ("7", "500")
    assert (options["isolation.level"], options["auto.offset.reset"]) == ("read_committed", "error")
    assert producer_options(kafka(linger_ms="5"))["linger.ms"] == "5"
    assert (
        admin_options(kafka(topic_metadata_refresh_interval_ms="9"))[
            "topic.metadata.refresh.interval.ms"
        ]
        == "9"
    )


def test_everything_that_is_set_and_does_not_only_tune_is_refused_in_the_configuration() -> None:
    set_here = {
        *admin_options(kafka()),
        *consumer_options(kafka()),
        *producer_options(
            kafka(),
            transactional_id="x",
            transaction_timeout_ms=1,
            delivery_timeout_ms=1,
            message_max_bytes=1,
        ),
        "error_cb",
    }
    tuning = {
        "queued.min.messages",
        "fetch.queue.backoff.ms",
        "fetch.wait.max.ms",
        "linger.ms",
        "queue.buffering.max.kbytes",
        "topic.metadata.refresh.interval.ms",
        "receive.message.max.bytes",
        "fetch.message.max.bytes",
        "statistics.interval.ms",
    }
    assert {name for name in set_here if not OWN_OPTIONS.fullmatch(name)} == tuning


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": "SCRAM-SHA-512",
            "sasl_username": "u",
            "sasl_password": "p",
        },
        {"security_protocol": "ssl"},
        {"linger_ms": "7", "fetch_min_bytes": "1", "compression_type": "zstd", "debug": "broker"},
        {"session_timeout_ms": "6000"},
    ],
)
def test_options_of_any_kind_of_client_are_taken(options: dict[str, Any]) -> None:
    assert check_options(kafka(**options)) == []


@pytest.mark.promise("C16")
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"no_such_option": SECRET}, ["kafka.options.no.such.option"]),
        ({"security_protocol": SECRET}, ["kafka.options.security.protocol"]),
        (
            {"no_such": "x", "linger_ms": "-1", "client_id": "a"},
            ["kafka.options.no.such", "kafka.options.linger.ms"],
        ),
        (
            {
                "security_protocol": "SASL_SSL",
                "sasl_mechanism": "SCRAM-SHA-512",
                "sasl_password": SECRET,
            },
            ["kafka.options"],
        ),
        ({"security_protocol": "SSL", "ssl_ca_location": f"/{SECRET}.pem"}, ["kafka.options"]),
        ({"security_protocol": "SSL", "ssl_key_pem": SECRET}, ["kafka.options"]),
    ],
)
def test_what_librdkafka_does_not_take_is_named_and_its_value_never_shown(
    options: dict[str, Any], names: list[str]
) -> None:
    problems = check_options(kafka(**options))
    assert [problem.where for problem in problems] == names
    for sentence in map(str, problems):
        assert SECRET not in sentence
        assert "\n" not in sentence


def test_a_client_that_cannot_be_made_is_a_mistake_in_the_configuration() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"^kafka\.options: librdkafka does not take them \(.*\); correct them$",
    ) as error:
        ListeningProducer(kafka(security_protocol=SECRET))
    assert SECRET not in str(error.value)


def test_the_log_goes_nowhere_unless_it_is_asked_for() -> None:
    script = """if True:
        import sys
        from watersmeet.kafka.options import ListeningProducer
        from watersmeet.settings import KafkaSettings
        options = {"debug": "broker"} if sys.argv[1] == "debug" else {}
        kafka = KafkaSettings(bootstrap_servers="127.0.0.1:1", options=options)
        producer = ListeningProducer(kafka)
        while not producer.errors.last(0):
            producer.poll(0.5)
        print(producer.errors.last(0).name())
    """
    said = {}
    for mode in ("quiet", "debug"):
        done = subprocess.run(
            [sys.executable, "-c", script, mode],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert done.stdout.strip() in ("_TRANSPORT", "_ALL_BROKERS_DOWN")
        said[mode] = bool(done.stderr)
    assert said == {"quiet": False, "debug": True}


# -- what errors mean


@pytest.mark.parametrize(
    ("code", "kind", "sentence"),
    [
        (KafkaError._AUTHENTICATION, KafkaAccessError, r"refuses the login .*sasl\.username"),
        (KafkaError.SASL_AUTHENTICATION_FAILED, KafkaAccessError, "refuses the login"),
        (
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            KafkaAccessError,
            "does not allow READ on topic t .*grant that permission",
        ),
        (KafkaError.CLUSTER_AUTHORIZATION_FAILED, KafkaAccessError, "does not allow READ"),
        (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, KafkaAccessError, "does not allow READ"),
        (KafkaError._SSL, KafkaAccessError, "the TLS connection to Kafka at h:1 fails"),
        (KafkaError._TRANSPORT, KafkaUnreachableError, "no Kafka broker answers at h:1"),
        (KafkaError._ALL_BROKERS_DOWN, KafkaUnreachableError, "no Kafka broker answers"),
        (KafkaError._TIMED_OUT, KafkaUnreachableError, "no Kafka broker answers"),
        (KafkaError._RESOLVE, KafkaUnreachableError, "no Kafka broker answers"),
        (
            KafkaError.NOT_LEADER_FOR_PARTITION,
            KafkaUnsettledError,
            "Kafka at h:1 cannot serve topic t just now",
        ),
        (KafkaError.FENCED_LEADER_EPOCH, KafkaUnsettledError, "cannot serve topic t"),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, TopicChangedError, "topic t does not exist at h:1"),
        (KafkaError.INVALID_CONFIG, KafkaRequestError, "refused READ on topic t: .*INVALID_CONFIG"),
    ],
)
def test_each_error_is_one_sentence_and_only_what_may_pass_is_waited_for(
    code: int, kind: type, sentence: str
) -> None:
    error = failure(
        kafka(),
        KafkaError(code, "h:1/bootstrap: why\nindeed (after 5ms in state CONNECT)"),
        "READ",
        "topic t",
    )
    assert type(error) is kind
    assert re.search(sentence, str(error))
    assert "\n" not in str(error)
    assert "in state" not in str(error)
    assert is_retriable(error) == issubclass(kind, KafkaTransientError)


@pytest.mark.parametrize(
    ("error", "retriable"),
    [
        (KafkaUnreachableError("h:1", "gone"), True),
        (PublishingError("t", "slow"), True),
        (PublishingError("t", "too large", retriable=False), False),
        (KafkaAccessError("no"), False),
        (DataLossError("s", "t", {0: (1, 2)}), False),
        (ValueError("watersmeet"), False),
    ],
)
def test_an_error_says_whether_to_try_again(error: Exception, retriable: bool) -> None:
    assert is_retriable(error) is retriable


def test_an_error_of_a_worker_is_recognised_by_the_last_line_of_its_traceback() -> None:
    text = (
        "Spark said:\nTraceback (most recent call last):\n  File x\nwatersmeet.errors.{}: the "
        "sentence\n\n\tat org.apache.spark.X"
    )
    unreachable, access = (
        RuntimeError(text.format("KafkaUnreachableError")),
        RuntimeError(text.format("KafkaAccessError")),
    )
    assert (is_retriable(unreachable), is_retriable(access)) == (True, False)
    assert root_cause(unreachable) == root_cause(access) == "the sentence"
    mentioned = RuntimeError("a value said: watersmeet.errors.KafkaUnreachableError: not raised")
    assert not is_retriable(mentioned)
