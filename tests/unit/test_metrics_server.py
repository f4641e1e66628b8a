"""The server of the metrics holds out whoever connects to it."""

from __future__ import annotations

import select
import socket
import urllib.request
from collections.abc import Iterator

import psutil
import pytest
from prometheus_client import CollectorRegistry, Gauge, make_wsgi_app

from tests.support.rivers import until
from watersmeet.monitoring.server import MOST_CONNECTIONS, MetricsServer

pytestmark = [pytest.mark.promise("A36"), pytest.mark.fault("hostile")]


@pytest.fixture
def served() -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Gauge("a", "b", registry=registry).set(1)
    made = MetricsServer("127.0.0.1", 0, make_wsgi_app(registry), deadline_s=0.3)
    yield made
    made.stop()


def scraped(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return bytes(answer.read())


def open_files() -> int:
    return psutil.Process().num_fds()


def test_it_answers(served: MetricsServer) -> None:
    assert b"a 1.0" in scraped(served.port)


def test_idle_connections_take_few_files_and_end_soon(served: MetricsServer) -> None:
    before = open_files()
    idle = [socket.create_connection(("127.0.0.1", served.port), 5) for _ in range(300)]
    until(
        lambda: open_files() <= before + len(idle) + MOST_CONNECTIONS,
        "the end of those that are too many",
        5,
    )

    def answers() -> bool:
        try:
            return b"a 1.0" in scraped(served.port)
        except OSError:
            return False

    until(answers, "an answer", 10)
    for one in idle:
        one.close()


def test_a_slow_reader_does_not_hold_up_its_end(served: MetricsServer) -> None:
    with socket.create_connection(("127.0.0.1", served.port), 5) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert b"a 1.0" in scraped(served.port)


@pytest.mark.parametrize("clients", [1, MOST_CONNECTIONS])
def test_clients_that_send_a_byte_now_and_then_keep_nobody_out_and_are_ended(
    served: MetricsServer, clients: int
) -> None:
    slow = [socket.create_connection(("127.0.0.1", served.port), 5) for _ in range(clients)]

    def trickled(one: socket.socket) -> bool:
        """Whether the server still takes a byte."""
        try:
            one.sendall(b"G")
            return select.select([one], [], [], 0.01)[0] == []
        except OSError:
            return False

    for one in slow:
        one.sendall(b"G")
    assert b"a 1.0" in scraped(served.port), "the oldest makes room at once"
    until(lambda: not any(map(trickled, slow)), "the end of all of them", 10)
    for one in slow:
        one.close()
