"""A real broker that asks for passwords: SASL_SSL with SCRAM, ACLs, and certificates made on the spot."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from pipelines.settings import KafkaSettings

PASSWORD = "correct-horse"
_HOST = "127.0.0.1"
_NOW = ["-days", "2"]
_PAST = ["-startdate", "20200101000000Z", "-enddate", "20200102000000Z"]
_HEAP = "-Xmx384m -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=SECURED://127.0.0.1:{secured},EXPIRED://127.0.0.1:{expired},PLAIN://127.0.0.1:{plain},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=SECURED://127.0.0.1:{secured},EXPIRED://127.0.0.1:{expired},PLAIN://127.0.0.1:{plain}
listener.security.protocol.map=SECURED:SASL_SSL,EXPIRED:SASL_SSL,PLAIN:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=PLAIN
controller.listener.names=CONTROLLER
sasl.enabled.mechanisms=SCRAM-SHA-512
listener.name.secured.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.expired.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
ssl.keystore.type=PEM
listener.name.secured.ssl.keystore.location={folder}/server.pem
listener.name.expired.ssl.keystore.location={folder}/expired.pem
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
log.dirs={folder}/data
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1
log.cleaner.dedupe.buffer.size=16777216
metric.reporters=
"""


@dataclass(frozen=True)
class SecuredBroker:
    """Where a secured broker listens: `plain` is for the test's own setup (everything is allowed there)."""

    secured: str
    expired: str
    plain: str
    folder: Path

    def settings(self, *, user: str = "reader", servers: str | None = None, **options: str) -> KafkaSettings:
        """The right way in for `user`; `options` replace single ones (`sasl_password="wrong"`)."""
        right = {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": user,
            "sasl.password": PASSWORD,
            "ssl.ca.location": str(self.folder / "ca.crt"),
        }
        given = {name.replace("_", "."): value for name, value in options.items()}
        return KafkaSettings(bootstrap_servers=servers or self.secured, options={**right, **given})

    def allow(self, user: str, operation: AclOperation, name: str, kind: ResourceType = ResourceType.TOPIC) -> None:
        """Grants one permission."""
        binding = AclBinding(kind, name, ResourcePatternType.LITERAL, f"User:{user}", "*", operation, AclPermissionType.ALLOW)
        admin = AdminClient({"bootstrap.servers": self.plain, "log_level": 0})
        for done in admin.create_acls([binding]).values():
            done.result(30)


@contextlib.contextmanager
def secured_broker(folder: Path, *users: str) -> Iterator[SecuredBroker]:
    """Runs a broker with these users, each with PASSWORD and no permission yet."""
    secured, expired, plain, controller = _free_ports(4)
    _certificates(folder)
    text = _PROPERTIES.format(secured=secured, expired=expired, plain=plain, controller=controller, folder=folder)
    (folder / "server.properties").write_text(text)
    scram = [word for user in users for word in ("-S", f"SCRAM-SHA-512=[name={user},password={PASSWORD},iterations=4096]")]
    cluster = "w" + urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]
    _run(folder, *_java(), "kafka.tools.StorageTool", "format", "-t", cluster, "-c", "server.properties", *scram)
    with (folder / "broker.log").open("ab") as log:
        process = subprocess.Popen([*_java(), "kafka.Kafka", "server.properties"], cwd=folder, stdout=log, stderr=log)
    try:
        _await_answer(process, plain, folder)
        yield SecuredBroker(f"{_HOST}:{secured}", f"{_HOST}:{expired}", f"{_HOST}:{plain}", folder)
    finally:
        process.kill()
        process.wait(30)


def _await_answer(process: subprocess.Popen[bytes], port: int, folder: Path) -> None:
    until = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection((_HOST, port), timeout=1):
            admin = AdminClient({"bootstrap.servers": f"{_HOST}:{port}"})  # held: a collected client cancels its requests
            admin.describe_cluster(request_timeout=30).result(30)
            return
        time.sleep(0.1)
    raise RuntimeError(f"the secured broker did not start:\n{(folder / 'broker.log').read_text()[-3000:]}")


def _certificates(folder: Path) -> None:
    """An authority, a broker's certificate signed by it, one that has expired, and an authority that signed neither."""
    names = "subjectAltName=IP:127.0.0.1,DNS:localhost"
    for authority in ("ca", "stranger"):
        _run(
            folder, "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={authority}",
            "-keyout", f"{authority}.key", "-out", f"{authority}.crt",
        )  # fmt: skip
    (folder / "names.cnf").write_text(names)
    for name, dates in {"server": _NOW, "expired": _PAST}.items():
        _run(
            folder, "openssl", "req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1",
            "-keyout", f"{name}.key", "-out", f"{name}.csr",
        )  # fmt: skip
        _sign(folder, name, dates)
        (folder / f"{name}.pem").write_text((folder / f"{name}.key").read_text() + (folder / f"{name}.crt").read_text())


def _sign(folder: Path, name: str, dates: list[str]) -> None:
    """By `openssl ca`, which takes any dates in every version of openssl."""
    (folder / "index.txt").write_text("")
    (folder / "serial").write_text(f"{random.randrange(2**60):030x}\n")
    (folder / "ca.cnf").write_text(
        "[ca]\ndefault_ca=own\n[own]\ndatabase=index.txt\nserial=serial\nnew_certs_dir=.\ndefault_md=sha256\npolicy=any\n"
        "[any]\ncommonName=supplied\n"
    )
    _run(
        folder, "openssl", "ca", "-batch", "-notext", "-config", "ca.cnf", "-cert", "ca.crt", "-keyfile", "ca.key",
        "-in", f"{name}.csr", "-out", f"{name}.crt", "-extfile", "names.cnf", *dates,
    )  # fmt: skip


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def _java() -> list[str]:
    java = shutil.which(str(Path(os.environ["JAVA_HOME"]) / "bin" / "java") if "JAVA_HOME" in os.environ else "java")
    if java is None:
        raise RuntimeError("there is no java on the PATH")
    log = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
    return [java, *_HEAP.split(), log, "-cp", str(Path(sys.prefix) / "jars" / "broker" / "*")]


def _free_ports(count: int) -> list[int]:
    ports: list[int] = []
    for port in random.sample(range(20_000, 32_768), 200):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((_HOST, port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError("there are no free ports")
