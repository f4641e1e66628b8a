"""A real schema registry for tests, and a gate before it that asks for a password over TLS."""

from __future__ import annotations

import base64
import json
import shutil
import ssl
import subprocess
import sys
import tarfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from watersmeet.dev.certificates import Authority
from watersmeet.dev.processes import HOST, free_port

API = "/apis/ccompat/v7"
START_S = 90.0


class TestRegistry:
    """Apicurio Registry in a process of its own; what it holds is in its memory, and goes with
    it."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        self._folder, self.port = folder, free_port()
        archives = list(Path(sys.prefix, "jars", "registry").glob("*.tar.gz"))
        assert archives, (
            "the registry is not there: bin/fetch-jars tests/registry/jars.lock fetches it, as "
            "`make test-long` does"
        )
        with tarfile.open(archives[0]) as archive:
            archive.extractall(folder, filter="data")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """What errors say of its URL."""
        return f"http://{HOST}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.address}{API}"

    def start(self) -> None:
        """Returns once it answers, on the same port each time; it is empty."""
        [jar] = self._folder.glob("*-runner.jar")
        ports = {"http": self.port, "management": free_port(self.port)}
        options = [f"-Dquarkus.{name}.host={HOST}" for name in ports] + [
            f"-Dquarkus.{name}.port={n}" for name, n in ports.items()
        ]
        java = [shutil.which("java") or "java", "-Xmx384m", "-XX:TieredStopAtLevel=1"]
        command = [*java, *options, "-jar", str(jar)]
        with (self._folder / "registry.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)
        end = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "registry.log").read_text()[-2000:]
            assert time.monotonic() < end, "the registry does not answer"
            time.sleep(0.1)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)

    def register(
        self,
        subject: str,
        schema: Any,
        references: Sequence[tuple[str, str, int]] = (),
        kind: str = "AVRO",
    ) -> int:
        """The id of a schema; references as (name, subject, version)."""
        named = [
            {"name": name, "subject": other, "version": version}
            for name, other, version in references
        ]
        text = schema if isinstance(schema, str) else json.dumps(schema)
        body = json.dumps({"schema": text, "schemaType": kind, "references": named}).encode()
        headers = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
        request = urllib.request.Request(f"{self.url}/subjects/{subject}/versions", body, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(json.load(answer)["id"])

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/subjects", timeout=5):
                return True
        except OSError:
            return False


@contextmanager
def gate(
    registry: TestRegistry, folder: Path, user: str, password: str
) -> Iterator[tuple[str, Path]]:
    """Inside, a server with TLS passes on to the registry what comes with that password: its URL,
    and whom to trust."""
    authority = Authority("registry")
    trusted, own = folder / "ca.pem", folder / "gate.pem"
    trusted.write_bytes(authority.certificate)
    own.write_bytes(authority.signed("gate"))
    wanted = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()

    class BatchGate(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = 401, b"{}"
            if self.headers["Authorization"] == wanted:
                try:
                    with urllib.request.urlopen(
                        f"http://{HOST}:{registry.port}{self.path}", timeout=30
                    ) as answer:
                        status, body = answer.status, answer.read()
                except urllib.error.HTTPError as error:
                    status, body = error.code, error.read()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer((HOST, 0), BatchGate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"https://{HOST}:{server.server_port}{API}", trusted
    finally:
        server.shutdown()
        server.server_close()
