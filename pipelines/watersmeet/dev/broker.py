"""The embedded broker for development and tests: the real Apache Kafka, one node in KRaft mode, in
one directory.

A broker's directory holds all there is to it: `data` (what it keeps), `server.properties` (written
anew by each start), `broker.log` (what it says), `broker.json` (its ports, and its process while it
runs) and, for a secured one, `secure` (see `dev.secure`). The process is known by its id together
with its start time, so another process that has got the same id since is never taken for the
broker.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

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
            launch(
                java,
                directory,
                ports,
                record,
                settings or {},
                cluster_id or new_cluster_id(),
                deadline,
            )
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
    """Stop the directory's broker and keep its data; never signal another process.

    The broker is asked to end; one that has not within `timeout_s` is killed.
    """
    directory = directory.expanduser().absolute()
    deadline = time.monotonic() + timeout_s
    if read_record(directory) is None:
        return status(directory)
    with locked(directory, deadline):
        record = read_record(directory)
        if record is not None:
            process = find_process(record)
            if process is not None:
                end(process, deadline)
            write_record(directory, record.stopped())
    return status(directory)


def status(directory: Path) -> BrokerStatus:
    """Return the broker's state: it runs only if the very process that was started in the directory
    is alive.
    """
    directory = directory.expanduser().absolute()
    record = read_record(directory)
    process = find_process(record)
    return BrokerStatus(
        running=process is not None,
        port=record.port if record else None,
        pid=process.pid if process else None,
        directory=directory,
        admin_port=record.admin_port if record else None,
    )
