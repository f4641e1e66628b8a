"""The embedded broker for development and tests: Apache Kafka, one KRaft node in one directory.

The directory holds `data`, `server.properties` (written anew by each start), `broker.log`,
`broker.json` (its ports, and its process while it runs) and, for a secured one, `secure` (see
`dev.secure`). The process is known by its id and its start time, so that another process with the
same id is never taken for the broker.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from pydantic import BaseModel, ConfigDict

from watersmeet.dev import secure as securing
from watersmeet.dev.processes import HOST, KILL_AFTER_S, alive, end, free_port, port_problem, until
from watersmeet.errors import BrokerError
from watersmeet.jvm.artifacts import BROKER, jars, java_command, missing_java
from watersmeet.kafka.permissions import Permission

_LAUNCHED = b"--- launched ---\n"
"""The divider of the log: what follows the last one is about the last launch."""
_TEMPLATES = Path(__file__).parent / "templates" / "kafka"

_JVM_OPTIONS = (
    *("-XX:-UsePerfData", "-XX:+ExitOnOutOfMemoryError"),
    *("-Djava.awt.headless=true", "-Djava.net.preferIPv4Stack=true"),
)
_DEFAULT_HEAP = "-Xms256m -Xmx1g"

INHERITED: Final = frozenset(
    ["PATH", "HOME", "USER", "TMPDIR", "TZ", "JAVA_HOME", "JAVA_TOOL_OPTIONS", "LD_LIBRARY_PATH"]
)
"""The environment that the broker, which outlives us, inherits: no passwords."""

# A process's start time is derived from the time of boot, which the system states in whole seconds.
_SAME_START_S = 2.0


@dataclass(frozen=True)
class BrokerStatus:
    """The state of a directory's broker; `port`: the one it has, or comes back on, if any."""

    running: bool
    port: int | None
    pid: int | None
    directory: Path
    admin_port: int | None = None
    """The port of a secured broker at which its administrator is let in by a certificate."""

    @property
    def is_secured(self) -> bool:
        """True where clients need a password."""
        return self.admin_port is not None

    @property
    def bootstrap_servers(self) -> str | None:
        """The address where clients reach the broker; None while it does not run."""
        return f"{HOST}:{self.port}" if self.running else None


def start(
    directory: Path,
    port: int | None = None,
    *,
    secure: bool = False,
    allowed: Iterable[Permission] = (),
    settings: Mapping[str, str] | None = None,
    cluster_id: str | None = None,
    timeout_s: float = 60,
) -> BrokerStatus:
    """Start the directory's broker, and return once it answers on `port`; it outlives its starter.

    Without a port it comes back on its own, or takes a free one. One that runs is left alone.

    - `secure`: clients need a password and permissions, over TLS; once secured, it stays so.
    - `allowed`: what its user may do from now on.
    - `settings`: Kafka's; they replace the broker's own until the next start.
    - `cluster_id`: for a new directory.

    Raises BrokerError or ArtifactsError, and leaves nothing new running.
    """
    directory = directory.expanduser().absolute()
    deadline = time.monotonic() + timeout_s
    if port is not None and not 0 < port < 65536:
        raise BrokerError(
            f"{port} is not a port a broker can listen on", fix="name one from 1 to 65535"
        )
    with _locked(directory, deadline):
        record = _read_record(directory)
        process = _find_process(record)
        if record is None or process is None:
            java = java_of_broker()
            # The first time, its jars may have been fetched.
            deadline = time.monotonic() + timeout_s
            ports = _choose_ports(directory, port, record, secure=secure)
            id = cluster_id or _new_cluster_id()
            _launch(java, directory, ports, record, settings or {}, id, deadline)
        elif port not in (None, record.port):
            raise BrokerError(
                f"the broker in {directory} already runs on port {record.port}",
                fix=f"stop it first to start it on port {port}",
            )
        elif secure and record.admin_port is None:
            raise BrokerError(
                f"the broker in {directory} already runs without security",
                fix="stop it first to secure it",
            )
        else:
            _await_answer(directory, record, process, deadline)
        state = status(directory)
        if state.admin_port is not None:
            securing.grant(directory, state.admin_port, allowed)
    return state


def stop(directory: Path, *, timeout_s: float = 30) -> BrokerStatus:
    """Stop the directory's broker, by force after `timeout_s`; keep its data."""
    directory = directory.expanduser().absolute()
    deadline = time.monotonic() + timeout_s
    if _read_record(directory) is None:
        return status(directory)
    with _locked(directory, deadline):
        if (record := _read_record(directory)) is not None:
            if (process := _find_process(record)) is not None:
                end(process, deadline)
            _write_record(directory, record.stopped())
    return status(directory)


def status(directory: Path) -> BrokerStatus:
    """Return the broker's state: it runs if the process that was started there is alive."""
    directory = directory.expanduser().absolute()
    record = _read_record(directory)
    if record is None:
        return BrokerStatus(running=False, port=None, pid=None, directory=directory)
    process = _find_process(record)
    pid = process.pid if process else None
    return BrokerStatus(pid is not None, record.port, pid, directory, record.admin_port)


def broker_facts(
    status: BrokerStatus, allowed: Sequence[Permission] | None = None
) -> dict[str, Any]:
    """Return the answer of `broker --json`, which says where secrets are, never what they are."""
    facts: dict[str, Any] = {name: getattr(status, name) for name in ("running", "port", "pid")}
    facts |= {"directory": str(status.directory), "secure": status.is_secured}
    if status.is_secured:
        facts |= {
            "user": securing.USER,
            "client": str(securing.client_file(status.directory)),
            "password": str(securing.password_file(status.directory)),
            "admin_port": status.admin_port,
        }
    if allowed is not None:
        facts["allowed"] = [permission._asdict() for permission in allowed]
    return facts


def broker_view(facts: dict[str, Any]) -> str:
    """Return the answer of `broker_facts` for people: a line for each fact."""
    state = "not running"
    if facts["running"]:
        state = f"running at 127.0.0.1:{facts['port']} (process {facts['pid']})"
    lines = [f"{state}; data in {facts['directory']}"]
    if facts["secure"]:
        password = shlex.quote(facts["password"])
        lines += [
            f"section `kafka` for the configuration: {facts['client']}",
            f'password of {facts["user"]}: export {securing.PASSWORD_VARIABLE}="$(cat {password})"',
        ]
    lines += [
        f"{facts['user']} may {p['operation']} {p['kind']} {p['name']}: {p['why']}"
        for p in facts.get("allowed", ())
    ]
    return "\n".join(lines)


# -- its directory


class BrokerRecord(BaseModel):
    """The content of `broker.json`: the ports stay when the broker stops, the process goes."""

    model_config = ConfigDict(frozen=True)

    port: int
    controller_port: int
    admin_port: int | None = None
    pid: int | None = None
    create_time: float | None = None

    def stopped(self) -> BrokerRecord:
        """Return these ports, without a process."""
        return self.model_copy(update={"pid": None, "create_time": None})


def _find_process(record: BrokerRecord | None) -> psutil.Process | None:
    # Never another one that has its id now.
    if record is None or record.pid is None or record.create_time is None:
        return None
    try:
        process = psutil.Process(record.pid)
        same = abs(process.create_time() - record.create_time) < _SAME_START_S
    except psutil.Error:
        return None
    return process if same and alive(process) else None


def _read_cluster_id(directory: Path) -> str | None:
    # Kafka writes it when it has formatted the storage.
    try:
        text = (directory / "data" / "meta.properties").read_text(encoding="latin-1")
    except FileNotFoundError:
        return None
    match = re.search(r"^cluster\.id=(\S+)$", text, re.MULTILINE)
    return match[1] if match else None


def _read_record(directory: Path) -> BrokerRecord | None:
    try:
        return BrokerRecord.model_validate_json((directory / "broker.json").read_bytes())
    except (OSError, ValueError):
        return None


def _write_record(directory: Path, record: BrokerRecord) -> None:
    # As a whole: no reader sees half of it.
    draft = directory / "broker.json.new"
    draft.write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")
    draft.replace(directory / "broker.json")


@contextlib.contextmanager
def _locked(directory: Path, deadline: float) -> Iterator[None]:
    # One start or stop at a time; one that dies frees the lock.
    def taken() -> bool:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / ".lock").open("ab") as file:
            if not until(taken, deadline):
                raise BrokerError(
                    f"another start or stop of the broker in {directory} is still under way",
                    fix="try again later",
                )
            yield
    except OSError as error:
        raise BrokerError(
            f"the broker cannot use its directory {directory} ({error.strerror or error})",
            fix="name one that can be written",
        ) from error


# -- its launch


def _choose_ports(
    directory: Path, port: int | None, previous: BrokerRecord | None, *, secure: bool
) -> BrokerRecord:
    # Those it had, if they are free, and `port` if given.
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


def _launch(
    java: list[str],
    directory: Path,
    ports: BrokerRecord,
    previous: BrokerRecord | None,
    settings: Mapping[str, str],
    cluster_id: str,
    deadline: float,
) -> None:
    # Leaves one that answers, or neither a process nor a changed record.
    if ports.admin_port is not None:
        securing.prepare(directory)
        securing.keep_private(directory / "data", directory / "broker.log")
    names = ["server.properties", *(["secure.properties"] if ports.admin_port is not None else [])]
    templates = "".join((_TEMPLATES / name).read_text(encoding="ascii") for name in names)
    further = "".join(f"{name}={value}\n" for name, value in settings.items())
    properties = templates.format(**ports.model_dump()) + further
    (directory / "server.properties").write_text(properties, encoding="ascii")
    if not _read_cluster_id(directory):
        _format(directory, java, cluster_id, deadline)

    process = _spawn(directory, *java, "kafka.Kafka", "server.properties")
    try:
        # Before the broker answers: a starter that dies while waiting leaves a broker that can be
        # found and stopped.
        started = {"pid": process.pid, "create_time": process.create_time()}
        _write_record(directory, ports.model_copy(update=started))
        _await_answer(directory, ports, process, deadline)
        if ports.admin_port is not None:
            securing.admit_own_user(directory, ports.port, ports.admin_port)
    except BaseException as failure:
        end(process, time.monotonic() + KILL_AFTER_S)
        if previous is None:
            (directory / "broker.json").unlink(missing_ok=True)
        else:
            _write_record(directory, previous.stopped())
        if isinstance(failure, psutil.NoSuchProcess):
            raise _early_death(directory) from None
        raise


def _new_cluster_id() -> str:
    # As Kafka makes them, never with a leading dash, as options have.
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
    if not _read_cluster_id(directory):
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


def _await_answer(
    directory: Path, ports: BrokerRecord, process: psutil.Process, deadline: float
) -> None:
    # By this broker, and no other on its port.
    cluster_id = _read_cluster_id(directory)
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
