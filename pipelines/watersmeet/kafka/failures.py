"""The meaning of Kafka's errors: refusals fail at once, and what may pass is waited for."""

from __future__ import annotations

import logging
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


def _codes(names: str) -> frozenset[int]:
    return frozenset(getattr(KafkaError, name) for name in names.split())


_LOGIN: Final = _codes("_AUTHENTICATION SASL_AUTHENTICATION_FAILED UNSUPPORTED_SASL_MECHANISM")
_PERMISSION: Final = _codes(
    "TOPIC_AUTHORIZATION_FAILED GROUP_AUTHORIZATION_FAILED CLUSTER_AUTHORIZATION_FAILED "
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"
)
_ACCESS: Final = _LOGIN | _PERMISSION | {KafkaError._SSL}
_MISSING_TOPIC: Final = _codes(
    "UNKNOWN_TOPIC_OR_PART UNKNOWN_TOPIC_ID _UNKNOWN_TOPIC _UNKNOWN_PARTITION"
)
_PASSING: Final = _codes(
    "_ALL_BROKERS_DOWN _MSG_TIMED_OUT _RESOLVE _TIMED_OUT _TIMED_OUT_QUEUE _TRANSPORT _WAIT_COORD "
    "COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE FENCED_LEADER_EPOCH "
    "KAFKA_STORAGE_ERROR LEADER_NOT_AVAILABLE NOT_CONTROLLER NOT_COORDINATOR NOT_ENOUGH_REPLICAS "
    "NOT_LEADER_FOR_PARTITION OFFSET_NOT_AVAILABLE REQUEST_TIMED_OUT THROTTLING_QUOTA_EXCEEDED "
    "UNKNOWN_LEADER_EPOCH"
)
"""Errors that may pass, without those that say so themselves (`retriable()`, in transactions)."""

_ADVERTISED: Final = re.compile(r"(\S+:\d+)/(\d+): ")
"""A broker's address and number, with which librdkafka's words about it begin."""

_PROBE_TIMEOUT_S: Final = 2.0

_HARMLESS: Final = re.compile(r"CONFWARN |.* \(after \d+ms in state (TRY_)?CONNECT\b")
"""What librdkafka says of options that another kind of client has, and of a connection that was
never made: no request was under way on it.
"""


class ConnectionLog(logging.Handler):
    """Listens to librdkafka's log for a connection that broke, or a request that took too long.

    Of these librdkafka calls no other callback: it tries again by itself, and says that it was
    done. `is_shown`: whatever it says goes to standard error, too.
    """

    def __init__(self, *, is_shown: bool) -> None:
        super().__init__(logging.INFO)
        self.trouble = ""
        """What it has said first."""
        self.logger = logging.Logger("librdkafka")
        """The logger for the client, which hears of it when it polls."""
        self.logger.addHandler(self)
        if is_shown:
            self.logger.addHandler(logging.StreamHandler())

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line of the log. What nobody knows counts as trouble."""
        text = record.getMessage()
        if not self.trouble and not _HARMLESS.match(text):
            self.trouble = text


class ErrorLog:
    """The last errors that a client reported on its own (`error_cb`, while it polls).

    Those of the login and of TLS come in no other way. They are asked for since a moment of
    `time.monotonic()`, so that one client can serve many requests.
    """

    def __init__(self, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._errors: deque[tuple[float, KafkaError]] = deque(maxlen=100)

    def __call__(self, error: KafkaError) -> None:
        """Note an error."""
        self._errors.append((time.monotonic(), error))

    def last(self, since: float) -> KafkaError | None:
        """Return the last refusal since then, else the last error; "all are down" comes behind."""
        errors = [error for noted_s, error in list(self._errors) if noted_s >= since]
        return max(
            reversed(errors),
            key=lambda e: (e.code() in _ACCESS, e.code() != KafkaError._ALL_BROKERS_DOWN),
            default=None,
        )

    def check(self, since: float, timeout_s: float, permission: str, resource: str) -> None:
        """Raise a `failure` where Kafka has refused the client since then, or time has run out."""
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
    """Return an error of Kafka in one sentence; the request takes `permission` on `resource`.

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
                fix="check the sasl.oauthbearer. options in kafka.options, and that the brokers "
                "take tokens of that issuer",
            )
        return KafkaAccessError(
            f"Kafka at {servers} refuses the login ({detail})",
            fix="check sasl.username, sasl.password, sasl.mechanism and security.protocol in "
            "kafka.options",
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
                fix="ssl.ca.location in kafka.options must name the authority that signed it, "
                "and it must be valid today and for that host",
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
            f"no Kafka broker answers at {servers} (its broker {advertised[2]} calls itself "
            f"{advertised[1]}, which this machine cannot resolve)",
            fix="correct advertised.listeners of that broker, or let this machine resolve the name",
        )
    if is_passing(error):
        # librdkafka numbers what it noticed itself below zero, and what a broker has answered above
        if code > 0:
            return KafkaUnsettledError(
                f"Kafka at {servers} cannot serve {resource} just now ({detail})",
                fix="if this goes on, look whether one of its brokers is down",
            )
        return KafkaUnreachableError(
            f"no Kafka broker answers at {servers} ({detail})",
            fix="start it, or correct kafka.bootstrap_servers, or security.protocol and the ssl. "
            "options in kafka.options",
        )
    return KafkaRequestError(
        f"Kafka at {servers} refused {permission} on {resource}: {detail} ({error.name()})"
    )


def _certificate_problem(kafka: KafkaSettings) -> str | None:
    # Python's TLS says what is wrong; librdkafka says the same of every certificate.
    options = kafka.options
    first_server = kafka.bootstrap_servers.split(",")[0].strip()
    host, _, port = first_server.rpartition("://")[2].rpartition(":")
    # The broker goes away just now, or the options are of a kind that only librdkafka knows.
    try:
        context = ssl.create_default_context(
            cafile=options.get("ssl.ca.location"), cadata=options.get("ssl.ca.pem")
        )
        context.check_hostname = options.get("ssl.endpoint.identification.algorithm") != "none"
        host = host.strip("[]")
        with socket.create_connection((host, int(port)), _PROBE_TIMEOUT_S) as connection:
            context.wrap_socket(connection, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except (OSError, ValueError):
        pass
    return None
