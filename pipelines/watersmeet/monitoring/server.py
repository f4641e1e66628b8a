"""The HTTP server of the metrics: a client costs it a thread for seconds, and a run nothing."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

MOST_CONNECTIONS: Final = 16
"""Maximum number of connections at a time; another one ends the oldest."""

DEADLINE_S: Final = 5.0
"""Seconds that a client has for all that it sends and takes."""


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        del format, args


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True  # a slow reader does not hold up the end of a run
    block_on_close = False
    request_queue_size = 128

    def __init__(self, family: socket.AddressFamily, address: Any, deadline_s: float) -> None:
        self.address_family = family
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._begun: dict[socket.socket, float] = {}
        """When each connection that is served began (monotonic), the oldest first."""
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # Without asking for the name of this host, which may take as long as a name server likes.
        TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        request, address = super().get_request()
        request.settimeout(self._deadline_s)
        return request, address

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._begun) >= MOST_CONNECTIONS:
                self._end_oldest()
            self._begun[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._begun.pop(request, None)

    def service_actions(self) -> None:
        with self._lock:
            latest = time.monotonic() - self._deadline_s
            while self._begun and next(iter(self._begun.values())) < latest:
                self._end_oldest()

    def _end_oldest(self) -> None:
        # Whatever its thread waits for then fails.
        oldest = next(iter(self._begun))
        del self._begun[oldest]
        with suppress(OSError):  # its client has gone already
            oldest.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # That a client has gone before the end is no error of ours.
        del request, client_address


class MetricsServer:
    """A server of a WSGI application until it is stopped. Raises OSError for a bad address."""

    def __init__(
        self, address: str, port: int, application: Any, deadline_s: float = DEADLINE_S
    ) -> None:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        self._server = _Server(family, place, deadline_s)
        self._server.set_app(application)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return self._server.server_port

    def stop(self) -> None:
        """Stop serving, and wait for the end of the server's thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
