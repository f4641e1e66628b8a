"""The embedded broker, secured, with further users, another certificate for a while, and logins by
token."""

from __future__ import annotations

import contextlib
import hashlib
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBindingFilter,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from tests.support.rivers import until
from tests.support.tokens import Issuer
from tests.support.topics import PATIENT, client_options
from watersmeet.dev import broker, secure
from watersmeet.dev.broker import BrokerStatus
from watersmeet.dev.certificates import Authority
from watersmeet.kafka.permissions import Permission
from watersmeet.settings import KafkaSettings

PASSWORD = "correct-horse-battery-staple"
"""Of every user that a test adds."""

_BEARER = "org.apache.kafka.common.security.oauthbearer"
_ALLOWED_URLS = "org.apache.kafka.sasl.oauthbearer.allowed.urls"


@dataclass(frozen=True)
class SecuredBroker:
    """A secured broker, and the ways in."""

    status: BrokerStatus
    issuer: Issuer

    @property
    def folder(self) -> Path:
        return secure.folder(self.status.directory)

    @property
    def servers(self) -> str:
        assert self.status.bootstrap_servers is not None
        return self.status.bootstrap_servers

    @property
    def admin(self) -> KafkaSettings:
        """The way in for the test's own setup: by a certificate, and everything is allowed."""
        servers = f"127.0.0.1:{self.status.admin_port}"
        return KafkaSettings(
            bootstrap_servers=servers, options=secure.admin_options(self.status.directory)
        )

    @property
    def own_password(self) -> str:
        return secure.password_file(self.status.directory).read_text()

    def settings(self, *, user: str = "reader", **options: str) -> KafkaSettings:
        """The right way in for `user`, one of the test's; `options` replace single ones
        (`sasl_password="wrong"`)."""
        right = {**secure.user_options(self.status.directory, PASSWORD), "sasl.username": user}
        given = {name.replace("_", "."): value for name, value in options.items()}
        return KafkaSettings(bootstrap_servers=self.servers, options={**right, **given})

    def grant(self, user: str, *allowed: Permission) -> None:
        secure.grant(self.status.directory, self._admin_port, allowed, user)

    def revoke(self, user: str, *no_longer: Permission) -> None:
        filters = dict.fromkeys(secure.binding(AclBindingFilter, user, each) for each in no_longer)
        admin = self.admin
        client = AdminClient({"bootstrap.servers": admin.bootstrap_servers, **admin.options})
        for deleted in client.delete_acls(list(filters)).values():
            deleted.result(30)

    @contextlib.contextmanager
    def another_certificate(self, authority: Authority, valid_for: timedelta) -> Iterator[Path]:
        """The broker comes with another certificate; answers the file of the authority that signed
        it."""
        ca, other = self.folder / "other-ca.crt", self.folder / "other.pem"
        ca.write_bytes(authority.certificate)
        other.write_bytes(authority.signed("broker", valid_for))
        try:
            self._come_with(other)
            yield ca
        finally:
            self._come_with(self.folder / "broker.pem")

    def _come_with(self, keystore: Path) -> None:
        entry = ConfigEntry(
            "listener.name.client.ssl.keystore.location",
            str(keystore),
            incremental_operation=AlterConfigOpType.SET,
        )
        node = ConfigResource(ConfigResource.Type.BROKER, "1", incremental_configs=[entry])
        admin = AdminClient(client_options(self.admin))
        [done] = admin.incremental_alter_configs([node]).values()
        done.result(30)
        wanted = ssl.PEM_cert_to_DER_cert(
            "-----BEGIN CERT" + keystore.read_text().partition("-----BEGIN CERT")[2]
        )

        def is_presented() -> bool:
            """The broker's threads take connections in turns, and one after the other takes up the
            certificate."""
            return all(
                _fingerprint(self._presented()) == _fingerprint(wanted) for _ in range(_LOOKS)
            )

        until(is_presented, "the other certificate", 60)

    def _presented(self) -> bytes:
        return ssl.PEM_cert_to_DER_cert(
            ssl.get_server_certificate(("127.0.0.1", self.status.port or 0), timeout=30)
        )

    @property
    def _admin_port(self) -> int:
        assert self.status.admin_port is not None
        return self.status.admin_port


_LOOKS = 12
"""More than the broker has threads for connections."""


def _fingerprint(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()


@contextlib.contextmanager
def secured_broker(folder: Path, *users: str) -> Iterator[SecuredBroker]:
    """Runs a broker with these users, each with PASSWORD and no permission yet; it also takes the
    tokens of an issuer."""
    folder.mkdir(exist_ok=True)
    with Issuer.running() as issuer, pytest.MonkeyPatch.context() as environment:
        keys = folder / "jwks.json"
        keys.write_text(issuer.key_set)
        heap = os.environ.get("KAFKA_HEAP_OPTS", "")
        environment.setenv("KAFKA_HEAP_OPTS", f"{heap} -D{_ALLOWED_URLS}={keys.as_uri()}")
        listener = "listener.name.client"
        settings = PATIENT | {
            f"{listener}.sasl.enabled.mechanisms": "SCRAM-SHA-512,OAUTHBEARER",
            f"{listener}.oauthbearer.sasl.jaas.config": f"{_BEARER}.OAuthBearerLoginModule "
            "required;",
            f"{listener}.oauthbearer.sasl.server.callback.handler.class": (
                f"{_BEARER}.OAuthBearerValidatorCallbackHandler"
            ),
            "sasl.oauthbearer.jwks.endpoint.url": keys.as_uri(),
            # What Kafka 4.1.1 takes by default accepts a token signed with any key.
            "sasl.oauthbearer.jwt.validator.class": f"{_BEARER}.BrokerJwtValidator",
        }
        try:
            status = broker.start(folder, secure=True, settings=settings)
            assert status.admin_port is not None
            for user in users:
                secure.admit(folder, status.admin_port, user, PASSWORD.encode())
            yield SecuredBroker(status, issuer)
        finally:
            broker.stop(folder)
