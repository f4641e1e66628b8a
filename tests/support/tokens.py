"""A small issuer of OAuth tokens (client credentials, JWT signed with RS256) on loopback."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

CLIENT, SECRET = "pipeline", "tell-nobody-this-secret"
_KEY_ID = "tests"
_VALID_S = 3600


@dataclass
class Issuer:
    """Gives every client that knows SECRET a token, signed with `key`."""

    url: str = ""
    key: rsa.RSAPrivateKey = field(default_factory=lambda: new_key())

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[Issuer]:
        """An issuer that answers at its `url`."""
        issuer = cls()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                known = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
                if self.headers.get("Authorization") == f"Basic {known}":
                    status, answer = 200, issuer.grant()
                else:
                    status, answer = (
                        401,
                        {"error": "invalid_client", "error_description": "wrong client or secret"},
                    )
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        issuer.url = f"http://127.0.0.1:{server.server_address[1]}/token"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield issuer
        finally:
            server.shutdown()
            server.server_close()

    def grant(self) -> dict[str, Any]:
        now = int(time.time())
        claims = {
            "iss": self.url,
            "sub": CLIENT,
            "iat": now,
            "exp": now + _VALID_S,
            "scope": "kafka",
        }
        signed = ".".join(
            _encoded(json.dumps(part).encode())
            for part in ({"alg": "RS256", "kid": _KEY_ID}, claims)
        )
        signature = self.key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())
        return {
            "access_token": f"{signed}.{_encoded(signature)}",
            "token_type": "bearer",
            "expires_in": _VALID_S,
        }

    @property
    def key_set(self) -> str:
        """The public key, as a JSON Web Key Set."""
        numbers = self.key.public_key().public_numbers()
        whole = {"n": numbers.n, "e": numbers.e}
        parts = {
            name: _encoded(value.to_bytes((value.bit_length() + 7) // 8, "big"))
            for name, value in whole.items()
        }
        return json.dumps(
            {"keys": [{"kty": "RSA", "kid": _KEY_ID, "use": "sig", "alg": "RS256", **parts}]}
        )

    @property
    def options(self) -> dict[str, str]:
        """librdkafka's, for a client that logs in with a token of this issuer."""
        return {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.id": CLIENT,
            "sasl.oauthbearer.client.secret": SECRET,
            "sasl.oauthbearer.token.endpoint.url": self.url,
        }


def new_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")
