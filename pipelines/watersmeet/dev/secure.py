"""The additions of a secured embedded broker: certificates, a user with a password, and that user's
permissions.

The directory's folder `secure` holds `ca.crt` (the authority that signed all certificates),
`broker.pem` and `admin.pem` (each a private key with its certificate), `watersmeet.password`, and
`client.yml`, the section `kafka` of a configuration, in which `${KAFKA_PASSWORD}` stands for the
password. They are made once and stay; only their owner can read them.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from watersmeet.dev.processes import HOST
from watersmeet.kafka.permissions import Permission

USER = "watersmeet"
PASSWORD_VARIABLE = "KAFKA_PASSWORD"
_ANSWER_S = 30.0
_ITERATIONS = 4096
_KINDS = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional id": ResourceType.TRANSACTIONAL_ID,
}


def folder(directory: Path) -> Path:
    """Return the folder where a broker keeps what is secret, and what goes with it."""
    return directory / "secure"


def password_file(directory: Path) -> Path:
    """Return the file that holds the password of `USER` and nothing else."""
    return folder(directory) / f"{USER}.password"


def client_file(directory: Path) -> Path:
    """Return the file with the section `kafka` of a configuration that logs in as `USER`."""
    return folder(directory) / "client.yml"


def prepare(directory: Path) -> None:
    """Make the folder's certificates and password, unless it has them."""
    from watersmeet.dev.certificates import Authority  # it needs the extra `broker`

    here = folder(directory)
    here.mkdir(mode=0o700, exist_ok=True)
    if password_file(directory).exists():  # written last
        return
    authority = Authority("Watersmeet's embedded broker")
    _write(here / "ca.crt", authority.certificate)
    for name in ("broker", "admin"):
        _write(here / f"{name}.pem", authority.signed(name))
    _write(password_file(directory), secrets.token_urlsafe(24).encode())


def keep_private(data: Path, log: Path) -> None:
    """Make what a broker keeps, and what it says, readable by its owner alone, whether it exists
    already or will.
    """
    data.mkdir(mode=0o700, exist_ok=True)
    data.chmod(0o700)
    log.touch(mode=0o600)
    log.chmod(0o600)


def admin_options(directory: Path) -> dict[str, str]:
    """Return librdkafka's options of the administrator, who may do everything, at the broker's
    `admin_port`.
    """
    here = folder(directory)
    return {
        "security.protocol": "SSL",
        "ssl.ca.location": str(here / "ca.crt"),
        "ssl.certificate.location": str(here / "admin.pem"),
        "ssl.key.location": str(here / "admin.pem"),
    }


def user_options(directory: Path, password: str = f"${{{PASSWORD_VARIABLE}}}") -> dict[str, str]:
    """Return librdkafka's options of `USER`."""
    return {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": USER,
        "sasl.password": password,
        "ssl.ca.location": str(folder(directory) / "ca.crt"),
    }


def admit(directory: Path, admin_port: int, user: str, password: bytes) -> None:
    """Make a user known to the broker, or change its password."""
    mechanism = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, _ITERATIONS)
    # Named: a client that is collected cancels what it was asked.
    admin = _admin(directory, admin_port)
    # By a request: on the command line of Kafka's storage tool the password would be in the list of
    # processes.
    upsertion = UserScramCredentialUpsertion(user, mechanism, password)
    _done(admin.alter_user_scram_credentials([upsertion]))


def admit_own_user(directory: Path, port: int, admin_port: int) -> None:
    """Make `USER` known to the broker, and write the file for its clients."""
    admit(directory, admin_port, USER, password_file(directory).read_bytes())
    section = {"bootstrap_servers": f"{HOST}:{port}", "options": user_options(directory)}
    _write(client_file(directory), yaml.safe_dump({"kafka": section}, sort_keys=False).encode())


def grant(
    directory: Path, admin_port: int, allowed: Iterable[Permission], user: str = USER
) -> None:
    """Grant a user these permissions; what it was allowed before stays."""
    # A permission that is needed for several reasons comes several times.
    bindings = [_binding(AclBinding, user, permission) for permission in allowed]
    if bindings:
        admin = _admin(directory, admin_port)
        _done(admin.create_acls(list(dict.fromkeys(bindings))))


def revoke(
    directory: Path, admin_port: int, no_longer: Iterable[Permission], user: str = USER
) -> None:
    """Take these permissions from a user."""
    admin = _admin(directory, admin_port)
    filters = [_binding(AclBindingFilter, user, permission) for permission in no_longer]
    _done(admin.delete_acls(list(dict.fromkeys(filters))))


def _binding(kind: Any, user: str, permission: Permission) -> Any:
    operation = AclOperation[permission.operation]
    resource = _KINDS[permission.kind]
    return kind(
        resource,
        permission.name,
        ResourcePatternType.LITERAL,
        f"User:{user}",
        "*",
        operation,
        AclPermissionType.ALLOW,
    )


def _admin(directory: Path, admin_port: int) -> AdminClient:
    return AdminClient(
        {"bootstrap.servers": f"{HOST}:{admin_port}", **admin_options(directory), "log_level": 0}
    )


def _done(futures: dict[Any, Any]) -> None:
    for future in futures.values():
        future.result(_ANSWER_S)


def _write(file: Path, content: bytes) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    draft = file.with_name(f"{file.name}.new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(content)
    draft.replace(file)
