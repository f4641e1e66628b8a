"""The embedded broker for development and tests: the real Apache Kafka, one node in KRaft mode, in
one directory.

A broker's directory holds all there is to it: `data` (what it keeps), `server.properties` (written
anew by each start), `broker.log` (what it says), `broker.json` (its ports, and its process while it
runs) and, for a secured one, `secure` (see `dev.secure`). The process is known by its id together
with its start time, so another process that has got the same id since is never taken for the
broker.
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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from pydantic import BaseModel, ConfigDict

from pipelines.dev import secure as securing
from pipelines.dev.processes import HOST, KILL_AFTER_S, alive, end, free_port, port_problem, until
from pipelines.errors import BrokerError
from pipelines.jvm.artifacts import BROKER, jars
from pipelines.jvm.java import java_command, missing_java
from pipelines.kafka.permissions import Permission

_LAUNCHED = b"--- launched ---\n"
"""The divider of the log: what follows the last one is about the last launch."""
# A process's start time is derived from the time of boot, which the system states in whole seconds.
_SAME_START_S = 2.0
_TEMPLATES = Path(__file__).parent / "templates" / "kafka"

_JVM_OPTIONS = (
    "-XX:-UsePerfData",
    "-XX:+ExitOnOutOfMemoryError",
    "-Djava.awt.headless=true",
    "-Djava.net.preferIPv4Stack=true",
)
_DEFAULT_HEAP = "-Xms256m -Xmx1g"


@dataclass(frozen=True)
class BrokerStatus:
    """The state of the broker of one directory.

    `port`: the one that it has, or comes back on; None where there was none yet.
    """

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


class _Record(BaseModel):
    """The content of `broker.json`: the ports stay when the broker stops, the process goes."""

    model_config = ConfigDict(frozen=True)

    port: int
    controller_port: int
    admin_port: int | None = None
    pid: int | None = None
    create_time: float | None = None

    def stopped(self) -> _Record:
        """Return these ports, without a process."""
        return _Record(
            port=self.port, controller_port=self.controller_port, admin_port=self.admin_port
        )


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

    Without a port the broker comes back on the one it had, or takes a free one the first time. A
    broker that runs already is left alone. What the directory held is there again.

    - `secure`: clients need a password and permissions, over TLS; a directory that was secured once
      stays so.
    - `allowed`: what its user may do from now on.
    - `settings`: Kafka's; they replace the broker's own until the next start.
    - `cluster_id`: for a new directory.

    Raises BrokerError or ArtifactsError, and leaves nothing new running.
    """
    directory = directory.expanduser().absolute()
    deadline = time.monotonic() + timeout_s
    if port is not None and not 0 < port < 65536:
        raise BrokerError(f"{port} is not a port a broker can listen on: name one from 1 to 65535")
    with _locked(directory, deadline):
        record = _read(directory)
        process = _find(record)
        if record is None or process is None:
            java = _java()
            # The first time, its jars may have been fetched.
            deadline = time.monotonic() + timeout_s
            ports = _ports(directory, port, record, secure=secure)
            _launch(
                java,
                directory,
                ports,
                record,
                settings or {},
                cluster_id or _new_cluster_id(),
                deadline,
            )
        elif port not in (None, record.port):
            raise BrokerError(
                f"the broker in {directory} already runs on port {record.port}: stop it first to "
                f"start it on port {port}"
            )
        elif secure and record.admin_port is None:
            raise BrokerError(
                f"the broker in {directory} already runs without security: stop it first to secure "
                "it"
            )
        else:
            _await_answer(directory, record, process, deadline)
        state = status(directory)
        if state.admin_port is not None:
            securing.grant(directory, state.admin_port, allowed)
    return state


def stop(directory: Path, *, timeout_s: float = 30) -> BrokerStatus:
    """Stop the directory's broker and keep its data; never signal another process.

    The broker is asked to end; one that has not within `timeout_s` is killed.
    """
    directory = directory.expanduser().absolute()
    deadline = time.monotonic() + timeout_s
    if _read(directory) is None:
        return status(directory)
    with _locked(directory, deadline):
        record = _read(directory)
        if record is not None:
            process = _find(record)
            if process is not None:
                end(process, deadline)
            _write(directory, record.stopped())
    return status(directory)


def status(directory: Path) -> BrokerStatus:
    """Return the broker's state: it runs only if the very process that was started in the directory
    is alive.
    """
    directory = directory.expanduser().absolute()
    record = _read(directory)
    process = _find(record)
    return BrokerStatus(
        running=process is not None,
        port=record.port if record else None,
        pid=process.pid if process else None,
        directory=directory,
        admin_port=record.admin_port if record else None,
    )


# -- starting


def _ports(directory: Path, port: int | None, previous: _Record | None, *, secure: bool) -> _Record:
    """Return the ports on which the broker will listen: those it had, as far as they are free, and
    `port`, where one is given.
    """
    port = port or (previous.port if previous is not None else free_port())
    problem = port_problem(port)
    if problem is not None:
        raise BrokerError(
            f"the broker in {directory} cannot listen on {HOST}:{port} ({problem}): "
            "stop what holds that port, or name another one"
        )
    controller_port = previous.controller_port if previous is not None else port
    if controller_port == port or port_problem(controller_port) is not None:
        controller_port = free_port(port)
    admin_port = previous.admin_port if previous is not None else None
    if admin_port is None and not secure:
        return _Record(port=port, controller_port=controller_port)
    if admin_port in (None, port, controller_port) or port_problem(admin_port) is not None:
        admin_port = free_port(port, controller_port)
    return _Record(port=port, controller_port=controller_port, admin_port=admin_port)


def _launch(
    java: list[str],
    directory: Path,
    ports: _Record,
    previous: _Record | None,
    settings: Mapping[str, str],
    cluster_id: str,
    deadline: float,
) -> None:
    """Start the broker: leave one that answers, or neither a process nor a changed record."""
    if ports.admin_port is not None:
        securing.prepare(directory)
        securing.keep_private(directory / "data", directory / "broker.log")
    (directory / "server.properties").write_text(_properties(ports, settings), encoding="ascii")
    if not _cluster_id(directory):
        _format(directory, java, cluster_id, deadline)

    process = _spawn(directory, *java, "kafka.Kafka", "server.properties")
    try:
        # Before the broker answers: a starter that dies while waiting leaves a broker that can be
        # found and stopped.
        _write(
            directory,
            ports.model_copy(update={"pid": process.pid, "create_time": process.create_time()}),
        )
        _await_answer(directory, ports, process, deadline)
        if ports.admin_port is not None:
            securing.admit_own_user(directory, ports.port, ports.admin_port)
    except BaseException as failure:
        end(process, time.monotonic() + KILL_AFTER_S)
        if previous is None:
            (directory / "broker.json").unlink(missing_ok=True)
        else:
            _write(directory, previous.stopped())
        if isinstance(failure, psutil.NoSuchProcess):
            raise _early_death(directory) from None
        raise


def _properties(ports: _Record, settings: Mapping[str, str]) -> str:
    """Return the broker's settings: where one comes twice, the last counts."""
    names = ["server.properties", *(["secure.properties"] if ports.admin_port is not None else [])]
    templates = "".join((_TEMPLATES / name).read_text(encoding="ascii") for name in names)
    further = "".join(f"{name}={value}\n" for name, value in settings.items())
    return templates.format(**ports.model_dump()) + further


INHERITED: Final = frozenset(
    ["PATH", "HOME", "USER", "TMPDIR", "TZ", "JAVA_HOME", "JAVA_TOOL_OPTIONS", "LD_LIBRARY_PATH"]
)
"""The environment variables that the broker inherits. It outlives us, and others may hold
passwords, which are not for it.
"""


def _new_cluster_id() -> str:
    """Return a new id as Kafka makes them, but never with a leading dash, which would look like an
    option.
    """
    return base64.urlsafe_b64encode(b"w" + os.urandom(15)).decode("ascii").rstrip("=")


def _format(directory: Path, java: list[str], cluster_id: str, deadline: float) -> None:
    """Give an empty directory a cluster id; one that was being formatted when the machine died is
    formatted again.
    """
    arguments = ["format", "-t", cluster_id, "-c", "server.properties"]
    process = _spawn(directory, *java, "kafka.tools.StorageTool", *arguments)
    try:
        process.wait(max(deadline - time.monotonic(), 0))
    except psutil.TimeoutExpired:
        end(process, time.monotonic())
        raise BrokerError(
            f"the storage of the broker in {directory} was not ready in time: see "
            f"{directory / 'broker.log'}"
        ) from None
    if not _cluster_id(directory):
        raise _early_death(directory)


def _spawn(directory: Path, *command: str) -> psutil.Popen:
    """Start a detached process in the directory that writes to the broker's log."""
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


def _java() -> list[str]:
    """Return the command that runs a class of the broker's jars.

    Raises BrokerError where there is no Java, ArtifactsError where the jars cannot be had.
    """
    java = java_command()
    if java is None:
        raise BrokerError(f"the broker needs Java 17 or 21, and {missing_java()}: install one")
    class_path = os.pathsep.join(map(str, [_TEMPLATES, *jars(BROKER)]))
    heap = shlex.split(os.environ.get("KAFKA_HEAP_OPTS") or _DEFAULT_HEAP)
    return [java, *heap, *_JVM_OPTIONS, "-cp", class_path]


def _await_answer(
    directory: Path, ports: _Record, process: psutil.Process, deadline: float
) -> None:
    """Return once this broker, and no other on its port, has answered a client."""
    cluster_id = _cluster_id(directory)
    port = ports.admin_port or ports.port
    options = {} if ports.admin_port is None else securing.admin_options(directory)

    def ready() -> bool:
        """Return True where the broker that was started answers. Raises BrokerError where its
        process has ended.
        """
        if not alive(process):
            raise _early_death(directory)
        return _answering_cluster(port, options) == cluster_id

    if not until(ready, deadline):
        raise BrokerError(
            f"the broker in {directory} did not answer on {HOST}:{port} in time: see "
            f"{directory / 'broker.log'}"
        )


def _answering_cluster(port: int, options: Mapping[str, str]) -> str | None:
    """Return the id of the cluster that answers on the port now, if one does."""
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return None
    # While the broker is still coming up, librdkafka's log is of no interest: it goes to a queue
    # that nobody reads.
    admin = AdminClient(
        {"bootstrap.servers": f"{HOST}:{port}", **options, "log_level": 0, "log.queue": True}
    )
    try:
        metadata = admin.list_topics(timeout=1)
    except KafkaException:
        return None
    return str(metadata.cluster_id) if metadata.brokers else None


def _early_death(directory: Path) -> BrokerError:
    """Return an error of one sentence, with the root cause that the log gives for the end of what
    was launched last.
    """
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
        f"the broker in {directory} ended while it was starting ({reason}): see {log}"
    )


# -- processes


def _find(record: _Record | None) -> psutil.Process | None:
    """Return the live process of the record, never another one that has its id now."""
    if record is None or record.pid is None or record.create_time is None:
        return None
    try:
        process = psutil.Process(record.pid)
        same = abs(process.create_time() - record.create_time) < _SAME_START_S
    except psutil.Error:
        return None
    return process if same and alive(process) else None


# -- the directory


def _cluster_id(directory: Path) -> str | None:
    """Return the id of the formatted storage, which Kafka writes as the last step of formatting;
    None until then.
    """
    try:
        text = (directory / "data" / "meta.properties").read_text(encoding="latin-1")
    except FileNotFoundError:
        return None
    match = re.search(r"^cluster\.id=(\S+)$", text, re.MULTILINE)
    return match.group(1) if match else None


def _read(directory: Path) -> _Record | None:
    """Return what `broker.json` says; None where the file is missing or was tampered with."""
    try:
        return _Record.model_validate_json((directory / "broker.json").read_bytes())
    except (OSError, ValueError):
        return None


def _write(directory: Path, record: _Record) -> None:
    """Replace `broker.json` as a whole: no reader sees half of it."""
    draft = directory / "broker.json.new"
    draft.write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")
    draft.replace(directory / "broker.json")


@contextlib.contextmanager
def _locked(directory: Path, deadline: float) -> Iterator[None]:
    """Allow one start or stop at a time in a directory; the system frees the lock of a holder that
    dies.

    Raises BrokerError where the directory cannot be used.
    """

    def taken() -> bool:
        """Take the lock of the directory, if nobody has it, and return whether that was done."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / ".lock").open("ab") as file:
            if not until(taken, deadline):
                raise BrokerError(
                    f"another start or stop of the broker in {directory} is still under way: try "
                    "again later"
                )
            yield
    except OSError as error:
        raise BrokerError(
            f"the broker cannot use its directory {directory} ({error.strerror or error}): name "
            "one that can be written"
        ) from error
