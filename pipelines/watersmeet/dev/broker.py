"""The embedded broker for development and tests: Apache Kafka, one KRaft node in one directory.

The directory holds `data`, `server.properties` (written anew by each start), `broker.log`,
`broker.json` (its ports, and its process while it runs) and, for a secured one, `secure` (see
`dev.secure`). The process is known by its id and its start time, so that another process with the
same id is never taken for the broker.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from watersmeet.dev import secure as securing
from watersmeet.dev.broker_directory import find_process, locked, read_record, write_record
from watersmeet.dev.broker_launch import (
    await_answer,
    choose_ports,
    java_of_broker,
    launch,
    new_cluster_id,
)
from watersmeet.dev.processes import HOST, end
from watersmeet.errors import BrokerError
from watersmeet.kafka.permissions import Permission


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
    with locked(directory, deadline):
        record = read_record(directory)
        process = find_process(record)
        if record is None or process is None:
            java = java_of_broker()
            # The first time, its jars may have been fetched.
            deadline = time.monotonic() + timeout_s
            ports = choose_ports(directory, port, record, secure=secure)
            id = cluster_id or new_cluster_id()
            launch(java, directory, ports, record, settings or {}, id, deadline)
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
            await_answer(directory, record, process, deadline)
        state = status(directory)
        if state.admin_port is not None:
            securing.grant(directory, state.admin_port, allowed)
    return state


def stop(directory: Path, *, timeout_s: float = 30) -> BrokerStatus:
    """Stop the directory's broker, by force after `timeout_s`; keep its data."""
    directory = directory.expanduser().absolute()
    deadline = time.monotonic() + timeout_s
    if read_record(directory) is None:
        return status(directory)
    with locked(directory, deadline):
        if (record := read_record(directory)) is not None:
            if (process := find_process(record)) is not None:
                end(process, deadline)
            write_record(directory, record.stopped())
    return status(directory)


def status(directory: Path) -> BrokerStatus:
    """Return the broker's state: it runs if the process that was started there is alive."""
    directory = directory.expanduser().absolute()
    record = read_record(directory)
    if record is None:
        return BrokerStatus(running=False, port=None, pid=None, directory=directory)
    process = find_process(record)
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
