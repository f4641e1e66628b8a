"""The additions of a secured embedded broker: certificates, and a user with permissions.

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
from confluent_kafka import admin

from watersmeet.dev.processes import HOST
from watersmeet.kafka.permissions import Permission

kafka: Any = admin  # which does not say to type checkers what it exports

USER = "watersmeet"
PASSWORD_VARIABLE = "KAFKA_PASSWORD"
_ANSWER_S = 30.0
_ITERATIONS = 4096
_KINDS = {
    "topic": kafka.ResourceType.TOPIC,
    "group": kafka.ResourceType.GROUP,
    "transactional id": kafka.ResourceType.TRANSACTIONAL_ID,
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
    """Make what a broker keeps, and what it says, readable by its owner alone."""
    data.mkdir(mode=0o700, exist_ok=True)
    data.chmod(0o700)
    log.touch(mode=0o600)
    log.chmod(0o600)


def admin_options(directory: Path) -> dict[str, str]:
    """Return the options of the administrator, who may do everything, at `admin_port`."""
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
    # By a request: on the command line of Kafka's storage tool the password would be in the list of
    # processes.
    mechanism = kafka.ScramCredentialInfo(kafka.ScramMechanism.SCRAM_SHA_512, _ITERATIONS)
    upsertion = kafka.UserScramCredentialUpsertion(user, mechanism, password)
    client = _client(directory, admin_port)  # collected, it would cancel what it was asked
    _done(client.alter_user_scram_credentials([upsertion]))


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
    bindings = list(dict.fromkeys(binding(kafka.AclBinding, user, each) for each in allowed))
    if bindings:
        client = _client(directory, admin_port)
        _done(client.create_acls(bindings))


def binding(kind: Any, user: str, permission: Permission) -> Any:
    """Return a permission of a user as Kafka's client has it, or a filter of permissions."""
    resource = (_KINDS[permission.kind], permission.name, kafka.ResourcePatternType.LITERAL)
    operation = kafka.AclOperation[permission.operation]
    return kind(*resource, f"User:{user}", "*", operation, kafka.AclPermissionType.ALLOW)


def _client(directory: Path, admin_port: int) -> admin.AdminClient:
    servers = {"bootstrap.servers": f"{HOST}:{admin_port}"}
    return admin.AdminClient({**servers, **admin_options(directory), "log_level": 0})


def _done(futures: dict[Any, Any]) -> None:
    for future in futures.values():
        future.result(_ANSWER_S)


def _write(file: Path, content: bytes) -> None:
    draft = file.with_name(f"{file.name}.new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(content)
    draft.replace(file)
