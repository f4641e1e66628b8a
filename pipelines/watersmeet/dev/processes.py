"""Processes and ports of an embedded broker: waiting for them, ending them, finding a free one."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable

import psutil

from watersmeet.errors import BrokerError

HOST = "127.0.0.1"
_POLL_S = 0.05
KILL_AFTER_S = 5.0
# Below the range from which Linux and macOS take the ports of outgoing connections: such a port
# stays free while the JVM comes up, and between a stop and the next start.
_FREE_PORTS = range(20_000, 32_768)


def alive(process: psutil.Process) -> bool:
    """Return True unless the process has ended, also if it only waits to be collected.

    A child of this process that has ended is collected by the very call that says so.
    """
    if not process.is_running():
        return False
    try:
        # Where nobody collects it, an ended process stays a zombie; but a first thread is one too
        # while others end.
        is_over = process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
    except psutil.NoSuchProcess:
        is_over = True
    try:
        process.wait(0)  # after the look, so that one that ends between the two is collected too
    except psutil.TimeoutExpired:
        return not is_over
    return False


def end(process: psutil.Process, deadline: float) -> None:
    """End the process and collect it, by force once the deadline has passed."""
    with contextlib.suppress(psutil.NoSuchProcess):
        try:
            process.terminate()
            if until(lambda: not alive(process), deadline):
                return
            process.kill()
        except psutil.AccessDenied:
            raise BrokerError(
                f"the broker (process {process.pid}) belongs to another user",
                fix="have that user stop it",
            ) from None
        if not until(lambda: not alive(process), time.monotonic() + KILL_AFTER_S):
            raise BrokerError(
                f"the broker (process {process.pid}) does not end even when killed",
                fix="see what holds it",
            )


def until(condition: Callable[[], bool], deadline: float) -> bool:
    """Return True where the condition came true by the deadline; it is asked at least once."""
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def port_problem(port: int) -> str | None:
    """Return why nobody can listen on the port now; None if one can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the JVM does: connections of an earlier broker that are still closing are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return None


def free_port(*others: int | None) -> int:
    """Return a port on which one can listen now, different from the others."""
    for candidate in random.sample(_FREE_PORTS, 200):
        if candidate not in others and port_problem(candidate) is None:
            return candidate
    raise BrokerError(
        f"no free port was found between {_FREE_PORTS.start} and {_FREE_PORTS.stop - 1}",
        fix="name one",
    )
