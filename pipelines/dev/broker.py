"""The embedded broker for development and tests: the real Apache Kafka, one node in KRaft mode, in one directory.

A broker's directory holds all there is to it: `data` (what it keeps), `server.properties` (written anew by each start),
`broker.log` (what it says) and `broker.json` (its ports, and its process while it runs). The process is known by its id
together with its start time, so an id that the system has given away since is never taken for the broker.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from pydantic import BaseModel, ConfigDict

from pipelines.errors import BrokerError

_HOST = "127.0.0.1"
_POLL_S = 0.05
_KILL_AFTER_S = 5.0
_LAUNCHED = b"--- launched ---\n"
"""Divides the log: what follows the last one is about the last launch."""
# A process's start time is derived from the time of boot, which the system states in whole seconds.
_SAME_START_S = 2.0
# Below the range from which Linux and macOS take the ports of outgoing connections: such a port stays free while
# the JVM comes up, and between a stop and the next start.
_FREE_PORTS = range(20_000, 32_768)
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
    """The state of the broker of one directory; `port` is the one it has, or comes back on, if there was one yet."""

    running: bool
    port: int | None
    pid: int | None
    directory: Path

    @property
    def bootstrap_servers(self) -> str | None:
        """Where clients reach the broker; None while it does not run."""
        return f"{_HOST}:{self.port}" if self.running else None


class _Record(BaseModel):
    """The content of `broker.json`: the ports stay when the broker stops, the process goes."""

    model_config = ConfigDict(frozen=True)

    port: int
    controller_port: int
    pid: int | None = None
    create_time: float | None = None

    def stopped(self) -> _Record:
        """These ports, without a process."""
        return _Record(port=self.port, controller_port=self.controller_port)


def start(directory: Path, port: int | None = None, *, timeout_s: float = 60) -> BrokerStatus:
    """Starts the directory's broker, and returns once it answers on `port`; it outlives its starter.

    Without a port the broker comes back on the one it had, or takes a free one the first time. A broker that runs already is
    left alone. What the directory held is there again. Raises BrokerError, and leaves nothing new running.
    """
    directory, deadline = directory.expanduser().absolute(), time.monotonic() + timeout_s
    if port is not None and not 0 < port < 65536:
        raise BrokerError(f"{port} is not a port a broker can listen on: name one from 1 to 65535")
    with _locked(directory, deadline):
        known = _read(directory)
        process = _find(known)
        if known is None or process is None:
            _launch(directory, port, known, deadline)
        elif port in (None, known.port):
            _await_answer(directory, known.port, process, deadline)
        else:
            raise BrokerError(
                f"the broker in {directory} already runs on port {known.port}: stop it first to start it on port {port}"
            )
    return status(directory)


def stop(directory: Path, *, timeout_s: float = 30) -> BrokerStatus:
    """Stops the directory's broker and keeps its data; never signals another process.

    The broker is asked to end; one that has not within `timeout_s` is killed.
    """
    directory, deadline = directory.expanduser().absolute(), time.monotonic() + timeout_s
    if _read(directory) is None:
        return status(directory)
    with _locked(directory, deadline):
        record = _read(directory)
        if record is not None:
            process = _find(record)
            if process is not None:
                _end(process, deadline)
            _write(directory, record.stopped())
    return status(directory)


def status(directory: Path) -> BrokerStatus:
    """Says that the broker runs only if the very process that was started in the directory is alive."""
    directory = directory.expanduser().absolute()
    record = _read(directory)
    process = _find(record)
    port, pid = record.port if record else None, process.pid if process else None
    return BrokerStatus(running=pid is not None, port=port, pid=pid, directory=directory)


# -- starting


def _launch(directory: Path, port: int | None, known: _Record | None, deadline: float) -> None:
    """Leaves a broker that answers, or neither a process nor a changed record."""
    java = _java()
    port = port or (known.port if known is not None else _free_port())
    problem = _port_problem(port)
    if problem is not None:
        raise BrokerError(
            f"the broker in {directory} cannot listen on {_HOST}:{port} ({problem}): "
            "stop what holds that port, or name another one"
        )
    controller_port = known.controller_port if known is not None else port
    if controller_port == port or _port_problem(controller_port) is not None:
        controller_port = _free_port(port)
    properties = (_TEMPLATES / "server.properties").read_text(encoding="ascii")
    (directory / "server.properties").write_text(properties.format(port=port, controller_port=controller_port), encoding="ascii")
    if not _cluster_id(directory):
        _format(directory, java, deadline)

    process = _spawn(directory, *java, "kafka.Kafka", "server.properties")
    try:
        # Before the broker answers: a starter that dies while waiting leaves a broker that can be found and stopped.
        created = process.create_time()
        _write(directory, _Record(port=port, controller_port=controller_port, pid=process.pid, create_time=created))
        _await_answer(directory, port, process, deadline)
    except BaseException as failure:
        _end(process, time.monotonic() + _KILL_AFTER_S)
        if known is None:
            (directory / "broker.json").unlink(missing_ok=True)
        else:
            _write(directory, known.stopped())
        if isinstance(failure, psutil.NoSuchProcess):
            raise _early_death(directory) from None
        raise


def _format(directory: Path, java: list[str], deadline: float) -> None:
    """Gives an empty directory a cluster id; one that was being formatted when the machine died is formatted again."""
    # As Kafka makes them, but never with a leading dash, which would look like an option.
    cluster_id = base64.urlsafe_b64encode(b"w" + os.urandom(15)).decode("ascii").rstrip("=")
    process = _spawn(directory, *java, "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", "server.properties")
    try:
        process.wait(max(deadline - time.monotonic(), 0))
    except psutil.TimeoutExpired:
        _end(process, time.monotonic())
        raise BrokerError(
            f"the storage of the broker in {directory} was not ready in time: see {directory / 'broker.log'}"
        ) from None
    if not _cluster_id(directory):
        raise _early_death(directory)


def _spawn(directory: Path, *command: str) -> psutil.Popen:
    """A detached process in the directory that writes to the broker's log."""
    # Under this locale the JVM finds files of any name.
    environment = {**os.environ, "LC_ALL": "C.UTF-8"} if sys.platform == "linux" else None
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
    """The command that runs a class of the broker's jars. Raises BrokerError where something is missing."""
    jars = Path(sys.prefix) / "jars" / "broker"
    if not any(jars.glob("kafka_*.jar")):
        raise BrokerError(f"the broker's jars are not in {jars}: run make install")
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(str(Path(home) / "bin" / "java") if home else "java")
    if java is None:
        where = f"JAVA_HOME is {home}, and no bin/java is there" if home else "no java is on the PATH"
        raise BrokerError(f"the broker needs Java 17 or 21, and {where}: install one, then run make install")
    heap = shlex.split(os.environ.get("KAFKA_HEAP_OPTS") or _DEFAULT_HEAP)
    return [java, *heap, *_JVM_OPTIONS, "-cp", f"{_TEMPLATES}{os.pathsep}{jars / '*'}"]


def _await_answer(directory: Path, port: int, process: psutil.Process, deadline: float) -> None:
    """Returns when this broker, and no other on its port, has answered a client."""
    cluster_id = _cluster_id(directory)

    def ready() -> bool:
        if not _alive(process):
            raise _early_death(directory)
        return _answering_cluster(port) == cluster_id

    if not _until(ready, deadline):
        raise BrokerError(f"the broker in {directory} did not answer on {_HOST}:{port} in time: see {directory / 'broker.log'}")


def _answering_cluster(port: int) -> str | None:
    """The id of the cluster that answers on the port now, if one does."""
    try:
        socket.create_connection((_HOST, port), timeout=1).close()
    except OSError:
        return None
    # While the broker is still coming up, librdkafka's log is of no interest: it goes to a queue that nobody reads.
    admin = AdminClient({"bootstrap.servers": f"{_HOST}:{port}", "log_level": 0, "log.queue": True})
    try:
        metadata = admin.list_topics(timeout=1)
    except KafkaException:
        return None
    return str(metadata.cluster_id) if metadata.brokers else None


def _early_death(directory: Path) -> BrokerError:
    """One sentence with the root cause that the log gives for the end of what was launched last."""
    log = directory / "broker.log"
    words = log.read_bytes().rpartition(_LAUNCHED)[2].decode("utf-8", "replace")
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    thrown = r"(Exception in thread \"\S+\" )?[\w.$]+(Exception|Error): "
    binds = [line for line in lines if "failed to bind to" in line]  # names the port, which its cause does not
    causes = [line for line in lines if line.startswith("Caused by: ")] or [line for line in lines if re.match(thrown, line)]
    said = [line for line in lines if not re.match(r"at |Picked up |Formatting |\d{4}-", line)]
    reason = (binds[-1:] or causes[-1:] or said[:1] or lines[-1:] or ["it said nothing"])[0]
    reason = re.sub(rf"^(Caused by: )?{thrown}", "", reason).rstrip(".")
    return BrokerError(f"the broker in {directory} ended while it was starting ({reason}): see {log}")


# -- processes


def _find(record: _Record | None) -> psutil.Process | None:
    """The live process of the record, never another one that has its id now."""
    if record is None or record.pid is None or record.create_time is None:
        return None
    try:
        process = psutil.Process(record.pid)
        same = abs(process.create_time() - record.create_time) < _SAME_START_S
    except psutil.Error:
        return None
    return process if same and _alive(process) else None


def _alive(process: psutil.Process) -> bool:
    """Whether the process still does anything: one that only waits to be collected does not."""
    try:
        process.wait(0)  # collects a child of this process that has ended
    except psutil.TimeoutExpired:
        pass
    else:
        return False
    try:
        # Where nobody collects it, an ended process stays a zombie; but a first thread is one too while others end.
        return process.is_running() and not (process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1)
    except psutil.NoSuchProcess:
        return False


def _end(process: psutil.Process, deadline: float) -> None:
    """Leaves the process ended and collected, by force once the deadline has passed."""
    with contextlib.suppress(psutil.NoSuchProcess):
        try:
            process.terminate()
            if _until(lambda: not _alive(process), deadline):
                return
            process.kill()
        except psutil.AccessDenied:
            raise BrokerError(f"the broker (process {process.pid}) belongs to another user: have that user stop it") from None
        if not _until(lambda: not _alive(process), time.monotonic() + _KILL_AFTER_S):
            raise BrokerError(f"the broker (process {process.pid}) does not end even when killed: see what holds it")


def _until(condition: Callable[[], bool], deadline: float) -> bool:
    """Whether the condition came true by the deadline; it is asked at least once."""
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


# -- ports


def _port_problem(port: int) -> str | None:
    """Why nobody can listen on the port now; None if one can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the JVM does: connections of an earlier broker that are still closing are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
            probe.listen(1)
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return None


def _free_port(other_than: int | None = None) -> int:
    """A port on which one can listen now, different from the one given."""
    for candidate in random.sample(_FREE_PORTS, 200):
        if candidate != other_than and _port_problem(candidate) is None:
            return candidate
    raise BrokerError(f"no free port was found between {_FREE_PORTS.start} and {_FREE_PORTS.stop - 1}: name one")


# -- the directory


def _cluster_id(directory: Path) -> str | None:
    """The id of the formatted storage, which Kafka writes as the last step of formatting; None until then."""
    try:
        text = (directory / "data" / "meta.properties").read_text(encoding="latin-1")
    except FileNotFoundError:
        return None
    found = re.search(r"^cluster\.id=(\S+)$", text, re.MULTILINE)
    return found.group(1) if found else None


def _read(directory: Path) -> _Record | None:
    """What `broker.json` says; a file that is missing or was tampered with says nothing."""
    try:
        return _Record.model_validate_json((directory / "broker.json").read_bytes())
    except (OSError, ValueError):
        return None


def _write(directory: Path, record: _Record) -> None:
    """Replaces `broker.json` as a whole: no reader sees half of it."""
    draft = directory / "broker.json.new"
    draft.write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")
    draft.replace(directory / "broker.json")


@contextlib.contextmanager
def _locked(directory: Path, deadline: float) -> Iterator[None]:
    """One start or stop at a time in a directory; the system frees the lock of a holder that dies.

    Raises BrokerError where the directory cannot be used.
    """

    def taken() -> bool:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / ".lock").open("ab") as file:
            if not _until(taken, deadline):
                raise BrokerError(f"another start or stop of the broker in {directory} is still under way: try again later")
            yield
    except OSError as error:
        raise BrokerError(
            f"the broker cannot use its directory {directory} ({error.strerror or error}): name one that can be written"
        ) from error
