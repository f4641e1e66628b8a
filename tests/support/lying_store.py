"""An object store that lies: a proxy on loopback before an S3 server, which answers what real
stores answer at times.

What it does is a text, such as `commit:3=done-412 list:5=short:2`: the third commit to a Delta log
that is asked for is made, and the answer is 412; the fifth list and the one after lack the newest
commit. (`LIES`.)

What real stores do not do is not here: a body that is shorter than the file and says that it is
whole, or an older version of an object than the one that was acknowledged.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import PIPE
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

ROOT: Final = Path(__file__).parents[2]

BUSY, CONFLICT, LOST, DONE_412, DONE_503, HALF, SHORT, DEAD, DONE_DEAD = (
    "503",
    "409",
    "lost",
    "done-412",
    "done-503",
    "half",
    "short",
    "dead",
    "done-dead",
)
LIES: Final = {
    BUSY: "the answer is 503 (SlowDown): the server is not asked",
    CONFLICT: "the answer is 409 (ConditionalRequestConflict): the server is not asked",
    LOST: "instead of the answer, the connection ends: the server has done it",
    DONE_412: "the server has done it, and the answer is 412, as of a first try that somebody on "
    "the way has repeated",
    DONE_503: "the server has done it, and the answer is 503",
    HALF: "the connection ends in the midst of the body",
    SHORT: "a list lacks the newest commit of the log",
    DEAD: "no answer comes: whoever has asked is to be killed (`Told.is_dead`); the server is not "
    "asked",
    DONE_DEAD: "the same, and the server has done it",
}
_DRAWN: Final = {
    "commit": (10, 100, (BUSY, CONFLICT, LOST, LOST, DONE_412, DONE_412, DONE_503, DONE_503)),
    "put": (3, 100, (BUSY, LOST, DONE_503)),
    "get": (4, 3000, (BUSY, LOST, HALF, HALF)),
    "head": (2, 700, (BUSY, LOST)),
    "list": (8, 500, (BUSY, LOST, HALF, SHORT, SHORT, SHORT, SHORT)),
    "delete": (1, 20, (BUSY, LOST, DONE_503)),
}
"""By kind of request: how often random lies name it, up to which number, and which of `LIES`."""

_COMMIT: Final = re.compile(r"/_delta_log/\d{20}\.json$")
_LISTED: Final = re.compile(rb"<Contents>(?:(?!</Contents>).)*</Contents>", re.DOTALL)
_LISTED_COMMIT: Final = re.compile(rb"<Key>[^<]*/_delta_log/\d{20}\.json</Key>")
_CODES: Final = {
    BUSY: (503, "SlowDown"),
    CONFLICT: (409, "ConditionalRequestConflict"),
    DONE_412: (412, "PreconditionFailed"),
    DONE_503: (503, "SlowDown"),
}


def random_death(rng: random.Random) -> str:
    """A request in whose midst whoever asks is to be killed."""
    request = rng.choice(["commit", "commit", "put", "get", "list"])
    return f"{request}:{rng.randint(1, _DRAWN[request][1])}={rng.choice((DEAD, DONE_DEAD))}"


class Lie(NamedTuple):
    """What is answered to the request of this number, and to so many in all from there."""

    request: str
    number: int
    kind: str
    length: int

    @classmethod
    def of(cls, word: str) -> Lie:
        """The lie that a word names."""
        match = re.fullmatch(r"([a-z]+):(\d+)=([a-z0-9-]+)(?::(\d+))?", word)
        assert match is not None, word
        request, number, kind, length = match.groups()
        assert request in _DRAWN, word
        assert kind in LIES, word
        return cls(request, int(number), kind, int(length or 1))


def random_lies(rng: random.Random, count: int, longest: int = 4) -> str:
    """So many lies, each about at most so many requests in a row."""
    words = []
    for request in rng.choices([*_DRAWN], [often for often, _, _ in _DRAWN.values()], k=count):
        _, largest, kinds = _DRAWN[request]
        word = f"{request}:{rng.randint(1, largest)}={rng.choice(kinds)}"
        words.append(f"{word}:{rng.choice((1, 1, rng.randint(1, longest)))}")
    return " ".join(words)


@dataclass
class LyingStore:
    """The proxy before one server."""

    server: str
    lies: Sequence[Lie]
    death: Path
    """A file that is made where whoever has asked is to be killed."""
    asked: Counter[str] = field(default_factory=Counter)
    """How many requests of a kind there were."""
    done: list[str] = field(default_factory=list)
    """Which lies there were."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def due(self, method: str, target: str) -> str | None:
        """The kind of lie that a request is answered with."""
        request = _kind_of(method, target)
        with self._lock:
            self.asked[request] += 1
            number = self.asked[request]
            for lie in self.lies:
                if lie.request == request and 0 <= number - lie.number < lie.length:
                    now = time.strftime("%H:%M:%S")
                    self.done.append(f"{now} {request}:{number}={lie.kind} {method} {target}")
                    return lie.kind
        return None


def _kind_of(method: str, target: str) -> str:
    url = urlsplit(target)
    if method == "PUT":
        return "commit" if _COMMIT.search(unquote(url.path)) else "put"
    if method == "GET":
        return "list" if "list-type=2" in url.query else "get"
    # Several objects are deleted by a POST; parts of a large one are begun and ended by others.
    return {"HEAD": "head", "DELETE": "delete"}.get(
        method, "delete" if "delete" in url.query else "put"
    )


class _Handler(BaseHTTPRequestHandler):
    """A connection of a client, and one of its own to the server."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    store: LyingStore

    def setup(self) -> None:
        super().setup()
        self._server = HTTPConnection(urlsplit(self.store.server).netloc)

    def finish(self) -> None:
        self._server.close()
        with suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind = self.store.due(self.command, self.path)
        if kind in (BUSY, CONFLICT):
            self._refuse(kind)
            return
        if kind in (DEAD, DONE_DEAD):
            if kind == DONE_DEAD:
                self._ask(body)
            self.store.death.touch()
            threading.Event().wait()
        try:
            status, headers, content = self._ask(body)
        except (OSError, HTTPException):  # the server is away
            self.close_connection = True
            return
        if kind == LOST:
            self.close_connection = True
        elif kind in (DONE_412, DONE_503):
            self._refuse(kind)
        elif kind == SHORT:
            self._write(status, headers, _without_newest(content))
        elif kind == HALF:
            self.close_connection = True
            self._write(status, headers, content, sent=len(content) // 2)
        else:
            self._write(status, headers, content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815 - their names

    def _ask(self, body: bytes) -> tuple[int, HTTPMessage, bytes]:
        # The signature covers the host by which the client has asked.
        self._server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            self._server.putheader(name, value)
        self._server.endheaders(body)
        answer = self._server.getresponse()
        return answer.status, answer.headers, answer.read()

    def _refuse(self, kind: str) -> None:
        status, code = _CODES[kind]
        text = f"<Error><Code>{code}</Code><Message>{LIES[kind]}</Message></Error>".encode()
        headers = HTTPMessage()
        headers["Content-Type"] = "application/xml"
        self._write(status, headers, b"" if self.command == "HEAD" else text)

    def _write(
        self, status: int, headers: HTTPMessage, content: bytes, sent: int | None = None
    ) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            is_of_head = self.command == "HEAD" and name.lower() == "content-length"
            if is_of_head or name.lower() not in ("content-length", "transfer-encoding"):
                self.send_header(name, value)
        if self.command != "HEAD" and status != 204:
            self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        with suppress(OSError):  # a client that no longer wants it
            self.wfile.write(content[:sent])
            self.wfile.flush()


def _without_newest(content: bytes) -> bytes:
    commits = [
        (_LISTED_COMMIT.search(listed[0]), listed)
        for listed in _LISTED.finditer(content)
        if _LISTED_COMMIT.search(listed[0])
    ]
    if not commits:
        return content
    _, newest = max(commits, key=lambda each: each[0][0] if each[0] else b"")
    return content[: newest.start()] + content[newest.end() :]


@dataclass
class Told:
    """What a proxy has told once it has ended."""

    endpoint: str
    death: Path
    lies: list[str] = field(default_factory=list)
    """Which lies, and of what."""
    asked: dict[str, int] = field(default_factory=dict)
    """How many requests of a kind there were."""

    @property
    def is_dead(self) -> bool:
        """Whether whoever has asked is to be killed."""
        return self.death.exists()


@contextmanager
def lying_store(server: str, lies: str = "") -> Iterator[Told]:
    """A proxy before a server with these lies, and its end.

    It is a process of its own: delta-rs holds Python's lock while it waits for some answers.
    """
    with tempfile.TemporaryDirectory() as name:
        death = Path(name, "death")
        command = [sys.executable, "-m", "tests.support.lying_store", server, lies, str(death)]
        process = subprocess.Popen(command, cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        told = Told(process.stdout.readline().strip(), death)
        try:
            yield told
        finally:
            answer, _ = process.communicate(timeout=30)  # ends its standard input
            vars(told).update(json.loads(answer))


def main(server: str, lies: str, death: str) -> None:
    store = LyingStore(server, [Lie.of(word) for word in lies.split()], Path(death))
    handler = type("Handler", (_Handler,), {"store": store})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        sys.stdout.write(f"http://127.0.0.1:{proxy.server_address[1]}\n")
        sys.stdout.flush()
        threading.Thread(target=proxy.serve_forever, args=[0.05], daemon=True).start()
        sys.stdin.read()
        sys.stdout.write(json.dumps({"lies": store.done, "asked": store.asked}))
        sys.stdout.flush()
        os._exit(0)  # clients keep connections


if __name__ == "__main__":
    main(*sys.argv[1:])
