"""The meaning of Kafka's errors: a refused login, certificate or permission fails at once; only
transient errors are waited for.
"""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections import deque
from typing import Final

from confluent_kafka import KafkaError

from watersmeet.errors import (
    KafkaAccessError,
    KafkaRequestError,
    KafkaUnreachableError,
    KafkaUnsettledError,
    TopicChangedError,
    WatersmeetError,
)
from watersmeet.settings import KafkaSettings

_LOGIN: Final = {
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.UNSUPPORTED_SASL_MECHANISM,
}
_PERMISSION: Final = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_ACCESS: Final = _LOGIN | _PERMISSION | {KafkaError._SSL}
_MISSING_TOPIC: Final = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_TOPIC_ID,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
}
_PASSING: Final = {
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._MSG_TIMED_OUT,
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._TRANSPORT,
    KafkaError._WAIT_COORD,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_CONTROLLER,
    KafkaError.NOT_COORDINATOR,
    KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.THROTTLING_QUOTA_EXCEEDED,
    KafkaError.UNKNOWN_LEADER_EPOCH,
}
"""Errors that may pass, without those that say so themselves (`retriable()`, which the
transactional producer alone sets).
"""

_ADVERTISED: Final = re.compile(r"(\S+:\d+)/(\d+): ")
"""The beginning of what librdkafka says of a broker that it knows from the cluster: its address and
number.
"""

_PROBE_TIMEOUT_S: Final = 2.0


class ErrorLog:
    """The last errors that a client reported on its own (`error_cb`, while it polls), the only way
    in which it reports those of the login and of TLS.

    They are asked for since a moment of `time.monotonic()`, so that one client can serve many
    requests.
    """

    def __init__(self, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._errors: deque[tuple[float, KafkaError]] = deque(maxlen=100)

    def __call__(self, error: KafkaError) -> None:
        """Note an error."""
        self._errors.append((time.monotonic(), error))

    def last(self, since: float) -> KafkaError | None:
        """Return the most specific error since then: the last refusal, else the last error, where
        "all brokers are down" comes behind any other.
        """
        errors = [error for noted_s, error in list(self._errors) if noted_s >= since]
        return max(
            reversed(errors),
            key=lambda error: (
                error.code() in _ACCESS,
                error.code() != KafkaError._ALL_BROKERS_DOWN,
            ),
            default=None,
        )

    def check(self, since: float, timeout_s: float, permission: str, resource: str) -> None:
        """Raise a `failure` where Kafka has refused the client since then, or where `timeout_s`
        have passed.
        """
        error = self.last(since)
        if (error is not None and error.code() in _ACCESS) or time.monotonic() - since > timeout_s:
            silence = KafkaError(KafkaError._TIMED_OUT, f"{resource} does not answer")
            raise failure(self._kafka, error or silence, permission, resource)


def is_passing(error: KafkaError) -> bool:
    """Return True where the same request may succeed a little later."""
    return error.retriable() or error.code() in _PASSING


def failure(
    kafka: KafkaSettings, error: KafkaError, permission: str, resource: str
) -> WatersmeetError:
    """Return the error that puts an error of Kafka into one sentence.

    `permission` on `resource` (such as READ on `topic orders`) is what the request takes. The error
    is:

    - KafkaAccessError for a refused login, certificate or permission;
    - TopicChangedError for a topic that does not exist;
    - KafkaUnreachableError or KafkaUnsettledError for what may pass;
    - KafkaRequestError for all else.
    """
    code = error.code()
    servers = kafka.bootstrap_servers
    # librdkafka's own words on one line, without after how long and in which state it met the error
    detail = " ".join(re.sub(r" \(after \d+ms in state .*\)$", "", error.str()).split())
    if code in _LOGIN:
        mechanisms = [kafka.options.get(name) for name in ("sasl.mechanism", "sasl.mechanisms")]
        if "OAUTHBEARER" in mechanisms:
            return KafkaAccessError(
                f"the login to Kafka at {servers} by a token fails ({detail})",
                fix=(
                    "check the sasl.oauthbearer. options in kafka.options, and that the brokers "
                    "take tokens of that issuer"
                ),
            )
        return KafkaAccessError(
            f"Kafka at {servers} refuses the login ({detail})",
            fix=(
                "check sasl.username, sasl.password, sasl.mechanism and security.protocol in "
                "kafka.options"
            ),
        )
    if code in _PERMISSION:
        remedy = "READ, which includes it," if permission == "DESCRIBE" else "that permission"
        return KafkaAccessError(
            f"Kafka at {servers} does not allow {permission} on {resource} ({error.name()})",
            fix=f"grant {remedy} to the user that kafka.options logs in as",
        )
    if code == KafkaError._SSL:
        if problem := _certificate_problem(kafka):
            return KafkaAccessError(
                f"the certificate of Kafka at {servers} is not accepted ({problem})",
                fix=(
                    "ssl.ca.location in kafka.options must name the authority that signed it, "
                    "and it must be valid today and for that host"
                ),
            )
        return KafkaAccessError(
            f"the TLS connection to Kafka at {servers} fails ({detail})",
            fix="check security.protocol and the ssl. options in kafka.options",
        )
    if code in _MISSING_TOPIC:
        return TopicChangedError(
            f"{resource} does not exist at {servers}, or was deleted",
            fix="create it, or correct its name",
        )
    if code == KafkaError._RESOLVE and (advertised := _ADVERTISED.match(detail)):
        return KafkaUnreachableError(
            servers,
            f"its broker {advertised[2]} calls itself {advertised[1]}, which this machine cannot "
            "resolve",
            "correct advertised.listeners of that broker, or let this machine resolve the name",
        )
    if is_passing(error):
        # librdkafka numbers what it noticed itself below zero, and what a broker has answered above
        return (
            KafkaUnreachableError(servers, detail)
            if code < 0
            else KafkaUnsettledError(servers, resource, detail)
        )
    return KafkaRequestError(
        f"Kafka at {servers} refused {permission} on {resource}: {detail} ({error.name()})"
    )


def _certificate_problem(kafka: KafkaSettings) -> str | None:
    """Return why Python's TLS refuses the first broker's certificate, or None where it does not.

    librdkafka says the same of every certificate.
    """
    options = kafka.options
    first_server = kafka.bootstrap_servers.split(",")[0].strip()
    host, _, port = first_server.rpartition("://")[2].rpartition(":")
    # The broker goes away just now, or the options are of a kind that only librdkafka knows.
    try:
        context = ssl.create_default_context(
            cafile=options.get("ssl.ca.location"), cadata=options.get("ssl.ca.pem")
        )
        context.check_hostname = options.get("ssl.endpoint.identification.algorithm") != "none"
        with socket.create_connection(
            (host.strip("[]"), int(port)), _PROBE_TIMEOUT_S
        ) as connection:
            context.wrap_socket(connection, server_hostname=host.strip("[]")).close()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except (OSError, ValueError):
        pass
    return None
