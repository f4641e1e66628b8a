"""The launch of an embedded broker: its ports, its settings, its process, and its first answer."""

from __future__ import annotations

import base64
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from watersmeet.dev import secure as securing
from watersmeet.dev.broker_directory import BrokerRecord, read_cluster_id, write_record
from watersmeet.dev.processes import HOST, KILL_AFTER_S, alive, end, free_port, port_problem, until
from watersmeet.errors import BrokerError
from watersmeet.jvm.artifacts import BROKER, jars, java_command, missing_java

_LAUNCHED = b"--- launched ---\n"
"""The divider of the log: what follows the last one is about the last launch."""
_TEMPLATES = Path(__file__).parent / "templates" / "kafka"

_JVM_OPTIONS = (
    *("-XX:-UsePerfData", "-XX:+ExitOnOutOfMemoryError"),
    *("-Djava.awt.headless=true", "-Djava.net.preferIPv4Stack=true"),
)
_DEFAULT_HEAP = "-Xms256m -Xmx1g"


def choose_ports(
    directory: Path, port: int | None, previous: BrokerRecord | None, *, secure: bool
) -> BrokerRecord:
    """Return the ports for the broker: those it had, if they are free, and `port` if given."""
    port = port or (previous.port if previous is not None else free_port())
    if (problem := port_problem(port)) is not None:
        raise BrokerError(
            f"the broker in {directory} cannot listen on {HOST}:{port} ({problem})",
            fix="stop what holds that port, or name another one",
        )
    controller_port = previous.controller_port if previous is not None else port
    if controller_port == port or port_problem(controller_port) is not None:
        controller_port = free_port(port)
    admin_port = previous.admin_port if previous is not None else None
    if admin_port is None and not secure:
        return BrokerRecord(port=port, controller_port=controller_port)
    if admin_port in (None, port, controller_port) or port_problem(admin_port) is not None:
        admin_port = free_port(port, controller_port)
    return BrokerRecord(port=port, controller_port=controller_port, admin_port=admin_port)


def launch(
    java: list[str],
    directory: Path,
    ports: BrokerRecord,
    previous: BrokerRecord | None,
    settings: Mapping[str, str],
    cluster_id: str,
    deadline: float,
) -> None:
    """Start the broker: leave one that answers, or neither a process nor a changed record."""
    if ports.admin_port is not None:
        securing.prepare(directory)
        securing.keep_private(directory / "data", directory / "broker.log")
    (directory / "server.properties").write_text(_properties(ports, settings), encoding="ascii")
    if not read_cluster_id(directory):
        _format(directory, java, cluster_id, deadline)

    process = _spawn(directory, *java, "kafka.Kafka", "server.properties")
    try:
        # Before the broker answers: a starter that dies while waiting leaves a broker that can be
        # found and stopped.
        started = {"pid": process.pid, "create_time": process.create_time()}
        write_record(directory, ports.model_copy(update=started))
        await_answer(directory, ports, process, deadline)
        if ports.admin_port is not None:
            securing.admit_own_user(directory, ports.port, ports.admin_port)
    except BaseException as failure:
        end(process, time.monotonic() + KILL_AFTER_S)
        if previous is None:
            (directory / "broker.json").unlink(missing_ok=True)
        else:
            write_record(directory, previous.stopped())
        if isinstance(failure, psutil.NoSuchProcess):
            raise _early_death(directory) from None
        raise


def _properties(ports: BrokerRecord, settings: Mapping[str, str]) -> str:
    names = ["server.properties", *(["secure.properties"] if ports.admin_port is not None else [])]
    templates = "".join((_TEMPLATES / name).read_text(encoding="ascii") for name in names)
    further = "".join(f"{name}={value}\n" for name, value in settings.items())
    return templates.format(**ports.model_dump()) + further


INHERITED: Final = frozenset(
    ["PATH", "HOME", "USER", "TMPDIR", "TZ", "JAVA_HOME", "JAVA_TOOL_OPTIONS", "LD_LIBRARY_PATH"]
)
"""The environment that the broker, which outlives us, inherits: no passwords."""


def new_cluster_id() -> str:
    """Return a new id as Kafka makes them, never with a leading dash, as options have."""
    return base64.urlsafe_b64encode(b"w" + os.urandom(15)).decode("ascii").rstrip("=")


def _format(directory: Path, java: list[str], cluster_id: str, deadline: float) -> None:
    # One that was being formatted when the machine died is formatted again.
    arguments = ["format", "-t", cluster_id, "-c", "server.properties"]
    process = _spawn(directory, *java, "kafka.tools.StorageTool", *arguments)
    try:
        process.wait(max(deadline - time.monotonic(), 0))
    except psutil.TimeoutExpired:
        end(process, time.monotonic())
        raise BrokerError(
            f"the storage of the broker in {directory} was not ready in time",
            fix=f"see {directory / 'broker.log'}",
        ) from None
    if not read_cluster_id(directory):
        raise _early_death(directory)


def _spawn(directory: Path, *command: str) -> psutil.Popen:
    environment = {name: value for name, value in os.environ.items() if name in INHERITED}
    if sys.platform == "linux":
        environment["LC_ALL"] = "C.UTF-8"  # the JVM finds files of any name under it
    with (directory / "broker.log").open("ab", buffering=0) as log:
        log.write(_LAUNCHED)
        return psutil.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def java_of_broker() -> list[str]:
    """Return how to run a class of the broker's jars. Raises BrokerError or ArtifactsError."""
    java = java_command()
    if java is None:
        raise BrokerError(
            f"the broker needs Java 17 or 21, and {missing_java()}", fix="install one"
        )
    class_path = os.pathsep.join(map(str, [_TEMPLATES, *jars(BROKER)]))
    heap = shlex.split(os.environ.get("KAFKA_HEAP_OPTS") or _DEFAULT_HEAP)
    return [java, *heap, *_JVM_OPTIONS, "-cp", class_path]


def await_answer(
    directory: Path, ports: BrokerRecord, process: psutil.Process, deadline: float
) -> None:
    """Return once this broker, and no other on its port, has answered a client."""
    cluster_id = read_cluster_id(directory)
    port = ports.admin_port or ports.port
    options = {} if ports.admin_port is None else securing.admin_options(directory)

    def ready() -> bool:
        if not alive(process):
            raise _early_death(directory)
        return _answering_cluster(port, options) == cluster_id

    if not until(ready, deadline):
        raise BrokerError(
            f"the broker in {directory} did not answer on {HOST}:{port} in time",
            fix=f"see {directory / 'broker.log'}",
        )


def _answering_cluster(port: int, options: Mapping[str, str]) -> str | None:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return None
    # While the broker comes up, librdkafka's log is of no interest: nobody reads its queue.
    quiet = {"log_level": 0, "log.queue": True}
    admin = AdminClient({"bootstrap.servers": f"{HOST}:{port}", **options, **quiet})
    try:
        metadata = admin.list_topics(timeout=1)
    except KafkaException:
        return None
    return str(metadata.cluster_id) if metadata.brokers else None


def _early_death(directory: Path) -> BrokerError:
    # With the root cause that the log gives for the end of what was launched last.
    log = directory / "broker.log"
    words = log.read_bytes().rpartition(_LAUNCHED)[2].decode("utf-8", "replace")
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    thrown = r"(Exception in thread \"\S+\" )?[\w.$]+(Exception|Error): "
    # Names the port, which its cause does not.
    binds = [line for line in lines if "failed to bind to" in line]
    causes = [line for line in lines if line.startswith("Caused by: ")]
    causes = causes or [line for line in lines if re.match(thrown, line)]
    messages = [line for line in lines if not re.match(r"at |Picked up |Formatting |\d{4}-", line)]
    reason = (binds[-1:] or causes[-1:] or messages[:1] or lines[-1:] or ["it said nothing"])[0]
    reason = re.sub(rf"^(Caused by: )?{thrown}", "", reason).rstrip(".")
    return BrokerError(
        f"the broker in {directory} ended while it was starting ({reason})", fix=f"see {log}"
    )
