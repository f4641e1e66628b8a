"""A registry as whoever owns it may make it: before a real one, a gate that is hostile for a while,
or about some schemas."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.registry import TestRegistry
from watersmeet.dev.processes import HOST

CHUNK = b" " * 2**20
CHUNKS = 400
"""An answer of so many pieces is too large for any schema."""


@contextmanager
def answering(
    answer: Callable[[BaseHTTPRequestHandler], None], is_over: threading.Event
) -> Iterator[str]:
    """Inside, a server at this URL answers; at the end `is_over` is set, for an answer that has no
    end of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError, ValueError):  # nobody listens any more
                answer(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer((HOST, 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{HOST}:{server.server_port}"
    finally:
        is_over.set()
        server.shutdown()
        server.server_close()


def send(to: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str) -> None:
    to.send_response(status)
    for name, value in {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **headers,
    }.items():
        to.send_header(name.replace("_", "-"), value)
    to.end_headers()
    to.wfile.write(body)


def flood(to: BaseHTTPRequestHandler) -> None:
    to.send_response(200)
    to.end_headers()
    for _ in range(CHUNKS):
        to.wfile.write(CHUNK)


def packed_flood() -> Callable[[BaseHTTPRequestHandler], None]:
    """The same answer in few bytes, packed once."""
    packer = zlib.compressobj(1, wbits=zlib.MAX_WBITS | 16)
    packed = b"".join([*(packer.compress(CHUNK) for _ in range(CHUNKS)), packer.flush()])
    return lambda to: send(to, packed, Content_Encoding="gzip")


def schema(text: Any, *references: str) -> bytes:
    named = [{"name": name, "subject": name, "version": 1} for name in references]
    return json.dumps(
        {"id": 1, "subject": "s", "version": 1, "schema": json.dumps(text), "references": named}
    ).encode()


class HostileGate:
    """Passes on to a registry what is asked, but for schemas of its own. While it is in a `mood`,
    it answers by that alone."""

    def __init__(self, registry: TestRegistry, schemas: Mapping[int, bytes]) -> None:
        """`schemas`: whole answers by the id that is asked for."""
        self._registry, self._schemas = registry, schemas
        self.mood: str | None = None
        self.asked = 0
        """How many requests have come."""
        self._is_over = threading.Event()
        self.moods: Mapping[str, Callable[[BaseHTTPRequestHandler], None]] = {
            "trickles": self._trickle,
            "is silent": self._keep_silent,
            "floods": flood,
            "floods, packed": packed_flood(),
            "says something else": lambda to: send(to, b'{"error_code": 50001}'),
            "has nothing": lambda to: send(to, b"", 404),
            "fails": lambda to: send(to, b"{", 500),
            "sends elsewhere": lambda to: send(to, b"", 302, Location=f"http://{HOST}:9/"),
            "hangs up": lambda to: to.connection.close(),
        }

    def serving(self) -> AbstractContextManager[str]:
        """Inside, it answers at this URL."""
        return answering(self.answer, self._is_over)

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        """Answers a request."""
        self.asked += 1
        if (mood := self.mood) is not None:
            return self.moods[mood](to)
        words = to.path.partition("?")[0].split("/")
        if words[1] == "subjects" and words[2].startswith("endless"):
            number = int(words[2].removeprefix("endless")) + 1
            kind = {
                "type": "record",
                "name": f"E{number - 1}",
                "fields": [{"name": "f", "type": f"endless{number}"}],
            }
            return send(to, schema(kind, f"endless{number}"))
        if words[1:3] == ["schemas", "ids"] and int(words[3]) in self._schemas:
            return send(to, self._schemas[int(words[3])])
        try:
            with urllib.request.urlopen(f"{self._registry.url}{to.path}", timeout=30) as found:
                status, body = found.status, found.read()
        except urllib.error.HTTPError as error:
            status, body = error.code, error.read()
        return send(to, body, status)

    def _wait_while(self, mood: str, pause_s: float = 0.1) -> bool:
        """Wait for a moment, or until there is no reason to any more; answer whether there still
        is."""
        return self.mood == mood and not self._is_over.wait(pause_s)

    def _keep_silent(self, _: BaseHTTPRequestHandler) -> None:
        while self._wait_while("is silent"):
            pass

    def _trickle(self, to: BaseHTTPRequestHandler) -> None:
        to.send_response(200)
        to.end_headers()
        while self._wait_while("trickles"):
            to.wfile.write(b" ")
